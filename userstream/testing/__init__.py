"""Tools for testing stream code, with or without a GPU.

Examples
--------
>>> from userstream import testing
>>> testing.simulate()  # before the first driver call
>>> import userstream as us
>>> stream = us.get_stream(0)
"""

from userstream.testing._latch import latch
from userstream.testing._simulated import async_error, calls, inject, reset, simulate

__all__ = ["async_error", "calls", "inject", "latch", "reset", "simulate"]

for _public in (async_error, calls, inject, latch, latch.release, reset, simulate):
    _public.__module__ = __name__
del _public
