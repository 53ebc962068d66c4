"""userstream: a CUDA stream per device for your own code, beside any GPU framework.

`borrow` orders that stream with the work on a framework's buffers, in both directions; `get_stream`
and `wait` establish no order. `asnumpy` and `copyto` copy in order. `observe` finds the races
between streams.

>>> import userstream as us
>>> stream = us.get_stream(0)
>>> us.wait(0)
"""

from typing import TYPE_CHECKING, Final

from userstream import (
    _process,  # noqa: F401 -- first, as it refuses subinterpreters
    errors,
)
from userstream._buffers import describe, device_of
from userstream._hooks import stall_allowed
from userstream._registry import UserStream
from userstream._stream.stream import Stream
from userstream.errors import *  # noqa: F403 -- the tree, as errors.__all__ lists it

if TYPE_CHECKING:
    from userstream._buffers.view import BufferInfo
    from userstream._driver.capture import CaptureInfo
    from userstream._engine.futures import Completion
    from userstream._observe import (
        Edit,
        Observation,
        Operation,
        Race,
        Stall,
        WrongStream,
        no_stalls,
        observe,
    )
    from userstream._ordering.borrow import Borrow
    from userstream._stream.attributes import AccessPolicyWindow
    from userstream._stream.memory_operations import (
        FlushRemoteWrites,
        MemoryBarrier,
        WaitFlags,
        WaitValue,
        WriteValue,
    )

__version__ = "0.1.0"

# Final, so that type checkers agree on what they are.
_registry_of_process = UserStream.get()
get_stream: Final = _registry_of_process.get_stream
wait: Final = _registry_of_process.wait
wait_for_device: Final = _registry_of_process.wait_for_device
wait_all: Final = _registry_of_process.wait_all
wait_async: Final = _registry_of_process.wait_async
wait_all_async: Final = _registry_of_process.wait_all_async
completion: Final = _registry_of_process.completion
acquire: Final = _registry_of_process.acquire
release: Final = _registry_of_process.release
borrow: Final = _registry_of_process.borrow
hold: Final = _registry_of_process.hold
hand_over: Final = _registry_of_process.hand_over
asnumpy: Final = _registry_of_process.asnumpy
asnumpy_async: Final = _registry_of_process.asnumpy_async
copyto: Final = _registry_of_process.copyto
pinned_empty: Final = _registry_of_process.pinned_empty
pinned_like: Final = _registry_of_process.pinned_like
streams: Final = _registry_of_process.streams
close: Final = _registry_of_process.close

__all__ = [
    "AccessPolicyWindow",
    "Borrow",
    "BufferInfo",
    "CaptureInfo",
    "Completion",
    "Edit",
    "FlushRemoteWrites",
    "MemoryBarrier",
    "Observation",
    "Operation",
    "Race",
    "Stall",
    "Stream",
    "UserStream",
    "WaitFlags",
    "WaitValue",
    "WriteValue",
    "WrongStream",
    "acquire",
    "asnumpy",
    "asnumpy_async",
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
    "no_stalls",
    "observe",
    "pinned_empty",
    "pinned_like",
    "release",
    "stall_allowed",
    "streams",
    "wait",
    "wait_all",
    "wait_all_async",
    "wait_async",
    "wait_for_device",
]
__all__ += errors.__all__

# Loaded when they are asked for first: who observes nothing pays for nothing. Each says by itself
# that it belongs to this module.
_LATE = {
    "AccessPolicyWindow": "_stream.attributes",
    "Borrow": "_ordering.borrow",
    "BufferInfo": "_buffers.view",
    "CaptureInfo": "_driver.capture",
    "Completion": "_engine.futures",
    **dict.fromkeys(
        ("FlushRemoteWrites", "MemoryBarrier", "WaitFlags", "WaitValue", "WriteValue"),
        "_stream.memory_operations",
    ),
    **dict.fromkeys(
        (
            "Edit",
            "Observation",
            "Operation",
            "Race",
            "Stall",
            "WrongStream",
            "no_stalls",
            "observe",
        ),
        "_observe",
    ),
}


# What other libraries call something that is here under another name.
_INSTEAD = {
    "Event": "stream.record(), and stream.wait_event(event)",
    "ExternalStream": "us.Stream.from_handle(handle)",
    "cpu": "us.asnumpy(buffer)",
    "current_stream": "us.get_stream(buffer)",
    "default_stream": "us.Stream.legacy_default() or us.Stream.per_thread_default()",
    "record_stream": "us.borrow(buffer), or us.hold(buffer, stream=stream)",
    "stream": "us.get_stream(buffer), and stream.activate() in a with statement",
    "sync": "us.wait(buffer), or us.wait_for_device(0)",
    "synchronize": "us.wait(buffer), or us.wait_for_device(0)",
    "to_numpy": "us.asnumpy(buffer)",
    "wait_stream": "stream.wait(other)",
}


def __getattr__(name: str) -> object:
    if name not in _LATE:
        hint = f"; in userstream that is {_INSTEAD[name]}" if name in _INSTEAD else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    import importlib

    found: object = getattr(importlib.import_module(f"{__name__}.{_LATE[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return [*globals(), *_LATE]


# Messages ("a userstream.Stream"), tracebacks and pickles name the path that users import from, so
# that the modules below may move. What is lost: `inspect.getsource` finds functions and methods,
# but none of these classes.
for _name in set(__all__).difference(_LATE):
    _object = globals()[_name]
    if isinstance(_object, type) or _object in (describe, device_of, stall_allowed):
        _object.__module__ = __name__
del TYPE_CHECKING, Final, _name, _object
