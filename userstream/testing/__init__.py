"""Tests of stream code on a machine without a GPU, and tools for those with one."""

from userstream.testing._latch import latch
from userstream.testing._simulated import async_error, calls, inject, reset, simulate

__all__ = ["async_error", "calls", "inject", "latch", "reset", "simulate"]

for _public in (async_error, calls, inject, latch, reset, simulate):
    _public.__module__ = __name__
del _public
