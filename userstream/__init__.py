"""userstream: a CUDA stream per device for your own code, beside any GPU framework.

>>> import userstream as us
>>> stream = us.get_stream(0)
>>> us.wait(0)
"""

from userstream import errors
from userstream._buffers import BufferInfo, describe, device_of
from userstream._registry import UserStream
from userstream._stream import (
    AccessPolicyWindow,
    CaptureInfo,
    FlushRemoteWrites,
    MemoryBarrier,
    Stream,
    WaitFlags,
    WaitValue,
    WriteValue,
)
from userstream.errors import *  # noqa: F403 -- the tree, as errors.__all__ lists it

__version__ = "0.1.0"

_registry = UserStream.get()
get_stream = _registry.get_stream
wait = _registry.wait
wait_for_device = _registry.wait_for_device
wait_all = _registry.wait_all
wait_async = _registry.wait_async
wait_all_async = _registry.wait_all_async
completion = _registry.completion
acquire = _registry.acquire
release = _registry.release
borrow = _registry.borrow
hold = _registry.hold
hand_over = _registry.hand_over
asnumpy = _registry.asnumpy
copyto = _registry.copyto
streams = _registry.streams
close = _registry.close

__all__ = [
    "AccessPolicyWindow",
    "BufferInfo",
    "CaptureInfo",
    "FlushRemoteWrites",
    "MemoryBarrier",
    "Stream",
    "UserStream",
    "WaitFlags",
    "WaitValue",
    "WriteValue",
    "acquire",
    "asnumpy",
    "borrow",
    "close",
    "completion",
    "copyto",
    "describe",
    "device_of",
    "errors",
    "get_stream",
    "hand_over",
    "hold",
    "release",
    "streams",
    "wait",
    "wait_all",
    "wait_all_async",
    "wait_async",
    "wait_for_device",
]
__all__ += errors.__all__

# Tracebacks, pickles and documentation show the path that users import from.
for _name in __all__:
    _object = globals()[_name]
    if isinstance(_object, type) or _object in (describe, device_of):
        _object.__module__ = __name__
del _name, _object
