"""The simulated driver: loading it, and its side door."""

from __future__ import annotations

import atexit
import ctypes
import operator
import os
import re
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, SupportsIndex

from cuda.bindings import driver

from userstream.testing import _build

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

MAX_DEVICES = 16
_LOWEST_VERSION = 12000
_HIGHEST_VERSION = 13999


@dataclass(frozen=True)
class _Settings:
    devices: int
    driver_version: int
    memory: int


@dataclass(frozen=True)
class Statistics:
    """What is alive in the simulated driver."""

    streams: int
    events: int
    allocations: int
    holds: int
    captures: int


_lock = threading.Lock()
_library: ctypes.CDLL | None = None
_settings: _Settings | None = None


def simulate(devices: int = 2, *, driver_version: int = 13000, memory: int = 1 << 30) -> None:
    """Put the simulated driver in the place of the CUDA driver, for this process.

    It stands in for ``libcuda.so.1`` under unmodified ``cuda.bindings`` and ``cuda.core``. Streams
    run asynchronously, device memory is host memory, and there are no kernels. It is compiled at
    its first use with the C compiler of the system, and kept in ``$USERSTREAM_CACHE_DIR``
    (otherwise ``$XDG_CACHE_HOME/userstream`` or ``~/.cache/userstream``).

    Call it before the first driver call of the process. A second call with the same settings does
    nothing. Processes that are started later call it again. Thread-safe; blocks while it compiles
    (seconds, once for each version of userstream and of the compiler).

    Parameters
    ----------
    devices : int, default 2
        How many GPUs there are: 0 to 16.
    driver_version : int, default 13000
        What ``cuDriverGetVersion`` answers, as 13000 for CUDA 13.0. Functions newer than that are
        not found.
    memory : int, default 2**30
        Bytes of memory of each device; more is ``CUDA_ERROR_OUT_OF_MEMORY``.

    Raises
    ------
    RuntimeError
        When a real driver is loaded in this process, when it already runs with other settings, when
        there is no C compiler or no directory for the result, or on a system without glibc.
    ValueError, TypeError
        For settings that make no sense.

    Examples
    --------
    >>> from userstream.testing import simulate
    >>> simulate(devices=2)
    >>> from cuda.core import Device
    >>> len(Device.get_all_devices())
    2
    """
    global _library, _settings
    wanted = _checked_settings(devices, driver_version, memory)
    with _lock:
        if _settings is not None:
            if _settings != wanted:
                raise RuntimeError(
                    f"the simulated driver already runs with {_text(_settings)}; "
                    f"{_text(wanted)} needs another process"
                )
            return
        _refuse_real_driver()
        library = _load(os.fspath(_build.library()))
        if not library.userstream_configure(wanted.devices, wanted.driver_version, wanted.memory):
            raise RuntimeError("the simulated driver was initialized by somebody else already")
        # At exit Python can no longer run host functions, and nothing may wait any more.
        atexit.register(library.userstream_shut_down)
        _library, _settings = library, wanted


def _checked_settings(devices: int, driver_version: int, memory: int) -> _Settings:
    _check_int("devices", devices)
    _check_int("driver_version", driver_version)
    _check_int("memory", memory)
    if not 0 <= devices <= MAX_DEVICES:
        raise ValueError(f"devices must be 0 to {MAX_DEVICES}, not {devices}")
    if not _LOWEST_VERSION <= driver_version <= _HIGHEST_VERSION:
        raise ValueError(
            f"driver_version must be a number such as 13000 for CUDA 13.0, "
            f"{_LOWEST_VERSION} to {_HIGHEST_VERSION}, not {driver_version}"
        )
    if not 0 < memory < 1 << 48:
        raise ValueError(f"memory must be a positive number of bytes below 2**48, not {memory}")
    return _Settings(devices, driver_version, memory)


def _check_int(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, not {type(value).__name__}")


def _text(settings: _Settings) -> str:
    return (
        f"devices={settings.devices}, driver_version={settings.driver_version}, "
        f"memory={settings.memory}"
    )


def _refuse_real_driver() -> None:
    """Programs find libcuda by its name: the first one that is loaded wins."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        loaded = {line.rstrip("\n").split(maxsplit=5)[-1] for line in maps}
    for file in sorted(loaded):
        if re.match(r"libcuda\.so(\.|$)", os.path.basename(file)):
            raise RuntimeError(
                f"a CUDA driver is loaded in this process already ({file}): "
                "call simulate() before the first driver call"
            )


def _load(path: str) -> ctypes.CDLL:
    library = ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "configure": (ctypes.c_bool, [ctypes.c_int, ctypes.c_int, ctypes.c_size_t]),
        "inject": (
            ctypes.c_uint64,
            [ctypes.c_char_p, ctypes.c_int, ctypes.c_long, ctypes.c_long, ctypes.c_bool],
        ),
        "withdraw": (None, [ctypes.c_char_p, ctypes.c_uint64]),
        "calls": (ctypes.c_long, [ctypes.c_char_p]),
        "async_error": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_int]),
        "reset": (None, []),
        "shut_down": (None, []),
        "progress": (None, []),
        "statistics": (None, [ctypes.POINTER(ctypes.c_long)]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, f"userstream_{name}")
        function.restype, function.argtypes = result, arguments
    return library


def is_simulated() -> bool:
    """Whether `simulate` was called in this process."""
    return _library is not None


def _side_door(what: str) -> ctypes.CDLL:
    if _library is None:
        raise RuntimeError(
            f"{what} needs the simulated driver: "
            "call userstream.testing.simulate() before the first driver call"
        )
    return _library


def stats() -> Statistics:
    """Count what is alive: streams (not the default ones), events, allocations, held streams."""
    values = (ctypes.c_long * 5)()
    _side_door("stats").userstream_statistics(values)
    return Statistics(*values)


def progress() -> None:
    """Tell the simulated driver that a word that a stream may wait for was written."""
    if _library is not None:
        _library.userstream_progress()


def _plain_name(function: str) -> bytes:
    if not isinstance(function, str):
        raise TypeError(f"a driver function is named by a str, not {type(function).__name__}")
    return re.sub(r"(_v\d+)?(_ptsz|_ptds)?$", "", function).encode()


def _unknown(function: str) -> ValueError:
    return ValueError(
        f"the simulated driver has no function {function!r}: "
        "driver functions are named like 'cuStreamQuery'"
    )


class inject:  # noqa: N801 - used like a function
    """Let the next calls of a driver function fail, or answer what you like.

    The function is not executed in these calls: they return ``result``. Injections last until they
    are used up, until the ``with`` block ends when used as a context manager, or until `reset`.
    Several for one function work side by side; the earlier one answers first. Thread-safe; does
    not block.

    Parameters
    ----------
    function : str
        The plain name, such as ``"cuStreamQuery"``; a version suffix (``_v2``) does not matter.
    result : CUresult or int
        A ``driver.CUresult``, or any integer: codes that the bindings do not know too.
    count : int, default 1
        How many calls.
    skip : int, default 0
        How many calls work as usual before that.
    this_thread : bool, default False
        Whether only calls of the thread that injects count and fail, and those of other threads
        (userstream's watcher, say) work as usual.

    Raises
    ------
    RuntimeError
        Without the simulated driver.
    ValueError, TypeError
        For a function that the simulated driver does not have, or numbers that make no sense.

    Examples
    --------
    >>> from cuda.bindings import driver
    >>> from userstream.testing import inject
    >>> with inject("cuEventCreate", driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY):
    ...     result, event = driver.cuEventCreate(0)
    >>> result.name
    'CUDA_ERROR_OUT_OF_MEMORY'
    """

    def __init__(
        self,
        function: str,
        result: SupportsIndex,
        count: int = 1,
        skip: int = 0,
        *,
        this_thread: bool = False,
    ) -> None:
        self._library = _side_door("inject()")
        self._function = _plain_name(function)
        code = _code(result)
        _check_int("count", count)
        _check_int("skip", skip)
        if count < 1 or skip < 0:
            raise ValueError(
                f"count must be at least 1 and skip at least 0, not {count} and {skip}"
            )
        self._id = self._library.userstream_inject(
            self._function, code, count, skip, bool(this_thread)
        )
        if not self._id:
            raise _unknown(function)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._library.userstream_withdraw(self._function, self._id)


def _code(result: SupportsIndex) -> int:
    if isinstance(result, bool):
        raise TypeError("a result is a driver.CUresult or an int, not bool")
    try:
        code = operator.index(result)
    except TypeError:
        raise TypeError(
            f"a result is a driver.CUresult or an int, not {type(result).__name__}"
        ) from None
    if not 0 < code < 1 << 31:
        raise ValueError(f"a result to inject is an error code, 1 to 2**31 - 1, not {code}")
    return code


def async_error(stream: object, result: SupportsIndex) -> None:
    """Let a stream fail when it comes to this point, as a faulty kernel does.

    The error is queued, in the order of the stream. It is sticky: all work that is queued in the
    stream's context is dropped, every stream and event of the context answers the error, and so
    does what is called in it later, until `reset`. Thread-safe; does not block.

    Parameters
    ----------
    stream : object with ``__cuda_stream__``, CUstream or int
        Which stream; an int is its handle.
    result : CUresult or int
        The error.

    Raises
    ------
    RuntimeError
        Without the simulated driver, or when the stream takes no work (unknown handle, capturing,
        or its context has failed before).

    Examples
    --------
    >>> from cuda.bindings import driver
    >>> from cuda.core import Device
    >>> from userstream.testing import async_error, reset
    >>> device = Device(0)
    >>> device.set_current()
    >>> stream = device.create_stream()
    >>> async_error(stream, driver.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS)
    >>> driver.cuStreamSynchronize(stream.handle)[0].name
    'CUDA_ERROR_ILLEGAL_ADDRESS'
    >>> reset()
    """
    library = _side_door("async_error()")
    answer = library.userstream_async_error(handle_of(stream), _code(result))
    if answer:
        raise RuntimeError(f"the stream takes no work: CUDA error {answer}")


def handle_of(stream: object) -> int:
    """Give the handle of whatever is a stream, as an integer."""
    protocol: Callable[[], tuple[int, int]] | None = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        version, handle = protocol()
        if version != 0:
            raise TypeError(f"__cuda_stream__ of version {version}: only version 0 is known")
        return int(handle)
    if isinstance(stream, bool) or not isinstance(stream, (int, driver.CUstream)):
        raise TypeError(
            "a stream is an object with __cuda_stream__, a driver.CUstream or a handle as an int, "
            f"not {type(stream).__name__}"
        )
    return int(stream)


def calls(function: str) -> int:
    """How often a driver function was called since the start or the last `reset`.

    All versions of the function (``_v2``) count, and calls that an injection answered. Thread-safe;
    does not block.

    Parameters
    ----------
    function : str
        The plain name, such as ``"cuStreamQuery"``.

    Returns
    -------
    int
        How often it was called.

    Raises
    ------
    RuntimeError
        Without the simulated driver.
    ValueError, TypeError
        For a function that the simulated driver does not have.

    Examples
    --------
    >>> from cuda.bindings import driver
    >>> from userstream.testing import calls, reset
    >>> reset()
    >>> driver.cuDeviceGetCount()[1] > 0
    True
    >>> calls("cuDeviceGetCount")
    1
    """
    count: int = _side_door("calls()").userstream_calls(_plain_name(function))
    if count < 0:
        raise _unknown(function)
    return count


def reset() -> None:
    """Forget injections, sticky errors and counters; on a real driver there is nothing to do.

    Streams, events and memory stay. Call it in a fixture before each test. Thread-safe; does not
    block.

    Examples
    --------
    >>> from userstream.testing import inject, reset
    >>> injection = inject("cuStreamQuery", 700, count=10)
    >>> reset()  # the injection is gone
    """
    if _library is not None:
        _library.userstream_reset()
