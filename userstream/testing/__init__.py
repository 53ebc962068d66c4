"""Tools for testing stream code, with or without a GPU.

Examples
--------
>>> from userstream import testing
>>> testing.simulate()  # before the first driver call
>>> import userstream as us
>>> stream = us.get_stream(0)
"""

from userstream.testing._injection import UnusedInjection, calls, inject
from userstream.testing._kernel_arguments import Condition, Pointer
from userstream.testing._kernels import duration, kernel
from userstream.testing._latch import latch
from userstream.testing._simulated import async_error, reset, simulate

__all__ = [
    "Condition",
    "Pointer",
    "UnusedInjection",
    "async_error",
    "calls",
    "duration",
    "inject",
    "kernel",
    "latch",
    "reset",
    "simulate",
]

for _public in (
    Condition,
    Condition.set,
    Pointer,
    Pointer.array,
    UnusedInjection,
    async_error,
    calls,
    duration,
    inject,
    kernel,
    latch,
    latch.release,
    reset,
    simulate,
):
    _public.__module__ = __name__
del _public
