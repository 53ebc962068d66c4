"""Many threads, many devices, all at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from testing.programs import check

LOAD = Path(__file__).with_name("load.py")

pytestmark = pytest.mark.simulated


def test_load():
    check(f"import runpy; runpy.run_path({str(LOAD)!r}, run_name='__main__')")
