"""Tools for testing stream code, with or without a GPU.

Examples
--------
>>> from userstream import testing
>>> testing.simulate()  # before the first driver call
>>> import userstream as us
>>> stream = us.get_stream(0)
"""

from userstream.testing._kernel_arguments import Condition, Pointer, Texture
from userstream.testing._kernels import duration, kernel
from userstream.testing._latch import latch
from userstream.testing._schedule import Deadlock, schedule, schedules
from userstream.testing._simulated import (
    UnusedInjection,
    adopt,
    async_error,
    calls,
    inject,
    library_path,
    reset,
    simulate,
)

__all__ = [
    "Condition",
    "Deadlock",
    "Pointer",
    "Texture",
    "UnusedInjection",
    "async_error",
    "calls",
    "duration",
    "inject",
    "kernel",
    "latch",
    "library_path",
    "reset",
    "schedule",
    "schedules",
    "simulate",
]

for _public in (
    Condition,
    Condition.set,
    Deadlock,
    Pointer,
    Pointer.array,
    Texture,
    Texture.array,
    UnusedInjection,
    async_error,
    calls,
    duration,
    inject,
    kernel,
    latch,
    latch.release,
    library_path,
    reset,
    schedule,
    schedules,
    simulate,
):
    _public.__module__ = __name__
del _public

adopt()
del adopt
