"""Puts the simulated driver into each process of a judge's tests: Python imports this at start."""

import importlib
import os

if os.environ.get("USERSTREAM_JUDGE"):
    from userstream import testing

    testing.simulate(2, driver_version=13000, memory=1 << 33)
    importlib.import_module(os.environ["USERSTREAM_JUDGE"])
