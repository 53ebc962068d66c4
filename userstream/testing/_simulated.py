"""The simulated driver: loading, settings, resets; calls that are counted, and calls that fail."""

from __future__ import annotations

import atexit
import ctypes
import itertools
import operator
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, SupportsIndex, overload

from cuda.bindings import driver

from userstream import _built, _process
from userstream._driver import account

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
    """Numbers of live objects in the simulated driver."""

    streams: int
    events: int
    allocations: int
    holds: int
    captures: int


_lock = _process.Lock()
_library: ctypes.CDLL | None = None
_settings: _Settings | None = None
when_loaded: list[Callable[[ctypes.CDLL], None]] = []  # called by `simulate`, once


def simulate(devices: int = 2, *, driver_version: int = 13000, memory: int = 1 << 30) -> None:
    """Replace the CUDA driver with the simulated one in this process.

    The simulated driver stands in for ``libcuda.so.1`` below unmodified ``cuda.bindings`` and
    ``cuda.core``. Streams run asynchronously, device memory is host memory, and Python functions
    stand for kernels (see `kernel`).

    Call it before the first driver call of the process. Repeating the call with the same settings
    has no effect. Every new process has to call it. Thread-safe; does
    not block.

    Parameters
    ----------
    devices : int, default 2
        Number of GPUs, 0 to 16.
    driver_version : int, default 13000
        The version that ``cuDriverGetVersion`` reports, such as 13000 for CUDA 13.0. Newer driver
        functions are missing.
    memory : int, default 2**30
        Memory of each device in bytes. Beyond it, ``CUDA_ERROR_OUT_OF_MEMORY`` is returned.

    Raises
    ------
    RuntimeError
        If the process has loaded a real driver or has called `simulate` with other settings.
    ValueError, TypeError
        If a setting is out of range or of the wrong type.

    Examples
    --------
    >>> from userstream.testing import simulate
    >>> simulate(devices=2)
    >>> from cuda.core import Device
    >>> len(Device.get_all_devices())
    2
    """
    _start(_checked_settings(devices, driver_version, memory))


def adopt() -> None:
    """Simulate if this process was started for it, as `observe --simulate` does.

    It finds the simulated driver through LD_LIBRARY_PATH, and may have used it already.
    """
    if os.environ.get("USERSTREAM_SIMULATE"):
        devices = int(os.environ.get("USERSTREAM_SIMULATED_GPUS") or 2)
        _start(_Settings(devices, 13000, 1 << 30), adopts=True)


def _start(wanted: _Settings, *, adopts: bool = False) -> None:
    global _library, _settings
    with _lock:
        if _settings is not None:
            if _settings != wanted:
                raise RuntimeError(
                    f"the simulated driver already runs with {_text(_settings)}; "
                    f"{_text(wanted)} needs another process"
                )
            return
        _refuse_real_driver()
        library = _load()
        configured = library.userstream_configure(
            wanted.devices, wanted.driver_version, wanted.memory
        )
        if not configured and not adopts:
            raise RuntimeError("the simulated driver was already initialized by other code")
        library.userstream_take_account(account.address())
        # During exit Python cannot run host functions any more, so nothing may wait for one.
        atexit.register(library.userstream_shut_down)
        _process.call_at_exit(library.userstream_end)
        _library, _settings = library, wanted
        _redirect_runtime(library)
        for tell in when_loaded:
            tell(library)


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
    """Raise if a CUDA driver is loaded: the loader would find that one by its name."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        loaded = {line.rstrip("\n").split(maxsplit=5)[-1] for line in maps}
    for file in sorted(loaded):
        if os.path.dirname(file) == os.path.realpath(library_path()):
            continue  # through LD_LIBRARY_PATH
        if re.match(r"libcuda\.so(\.|$)", os.path.basename(file)):
            raise RuntimeError(
                f"this process has already loaded a CUDA driver ({file}): "
                "call simulate() before the first driver call"
            )


def _load() -> ctypes.CDLL:
    library = _built.load(_built.SIMULATED_DRIVER, visible=True)
    _built.load(_built.SIMULATED_NVML)
    sizes, names = ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_char_p)
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "configure": (ctypes.c_bool, [ctypes.c_int, ctypes.c_int, ctypes.c_size_t]),
        "inject": (
            ctypes.c_uint64,
            [names, ctypes.c_size_t, ctypes.c_int, ctypes.c_long, ctypes.c_long, ctypes.c_bool],
        ),
        "withdraw": (ctypes.c_long, [ctypes.c_uint64]),
        "all_calls": (
            ctypes.c_size_t,
            [names, ctypes.POINTER(ctypes.c_long), ctypes.c_size_t],
        ),
        "calls": (ctypes.c_long, [ctypes.c_char_p]),
        "async_error": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_int]),
        "reset": (None, []),
        "shut_down": (None, []),
        "end": (None, []),
        "progress": (None, []),
        "statistics": (None, [ctypes.POINTER(ctypes.c_long)]),
        "is_forked": (ctypes.c_bool, []),
        "define_kernel": (
            ctypes.c_uint64,
            [ctypes.c_char_p, ctypes.c_size_t, sizes, sizes, ctypes.c_bool],
        ),
        "knows_kernel": (ctypes.c_bool, [ctypes.c_uint64]),
        "missing_kernel": (ctypes.c_char_p, [ctypes.c_size_t]),
        "set_duration": (ctypes.c_bool, [ctypes.c_char_p, ctypes.c_double]),
        "take_launch": (ctypes.c_bool, [ctypes.c_void_p]),
        "finish_launch": (None, [ctypes.c_uint64, ctypes.c_int, ctypes.c_char_p]),
        "use_memory": (
            ctypes.c_int,
            [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p],
        ),
        "unuse_memory": (None, [ctypes.c_uint64]),
        "texture_contents": (ctypes.c_bool, [ctypes.c_uint64, ctypes.c_void_p]),
        "runtime_function": (ctypes.c_void_p, [ctypes.c_char_p, ctypes.c_char_p]),
        "redirect": (None, [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p]),
        "take_account": (None, [ctypes.c_void_p]),
        "schedule_begin": (
            ctypes.c_bool,
            [
                ctypes.c_int,
                ctypes.c_uint64,
                ctypes.c_uint,
                ctypes.c_uint64,
                ctypes.c_uint64,
                ctypes.c_char_p,
            ],
        ),
        "schedule_log": (ctypes.c_char_p, []),
        "schedule_end": (ctypes.c_bool, [ctypes.POINTER(ctypes.c_uint64)]),
        "schedule_trace": (ctypes.c_char_p, []),
        "schedule_deadlock": (ctypes.c_char_p, []),
        "set_condition": (ctypes.c_int, [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, f"userstream_{name}")
        function.restype, function.argtypes = result, arguments
    return library


def library_path() -> str:
    """Return the folder of the simulated ``libcuda.so.1`` and ``libnvidia-ml.so.1``.

    In ``LD_LIBRARY_PATH`` it puts the simulated driver in the place of CUDA's for programs that
    load the driver themselves, in any language. ``python -m userstream.testing --library-path``
    prints it. Such programs have two GPUs, or as many as ``USERSTREAM_SIMULATED_GPUS`` says.
    Thread-safe; does not block.

    Returns
    -------
    str
        The path of the folder.

    Examples
    --------
    >>> import os
    >>> from userstream import testing
    >>> sorted(os.listdir(testing.library_path()))
    ['libcuda.so.1', 'libnvidia-ml.so.1']
    """
    return os.path.dirname(os.path.join(_built.PACKAGE, _built.SIMULATED_DRIVER.file))


def _redirect_runtime(library: ctypes.CDLL) -> None:
    """Make `cuda.bindings.runtime` call the runtime functions of the simulated driver.

    The bindings are linked with a runtime that needs private tables of a real driver. They call it
    through pointers that a Cython module exports by name. Change those and the importer's copies.
    """
    from cuda.bindings import __version__, cyruntime, runtime

    # A structure of CUDA 12 differs from that of 13 with the same name.
    version = f" of CUDA {__version__.partition('.')[0]}".encode()
    python = ctypes.pythonapi
    python.PyCapsule_GetName.restype = ctypes.c_char_p
    python.PyCapsule_GetName.argtypes = [ctypes.py_object]
    python.PyCapsule_GetPointer.restype = ctypes.c_void_p
    python.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    python.PyCapsule_SetPointer.argtypes = [ctypes.py_object, ctypes.c_void_p]
    importer = os.path.realpath(runtime.__file__).encode()
    for name, capsule in cyruntime.__pyx_capi__.items():
        signature = python.PyCapsule_GetName(capsule)
        ours = library.userstream_runtime_function(name.encode(), signature + version)
        if ours:
            theirs = python.PyCapsule_GetPointer(capsule, signature)
            library.userstream_redirect(importer, theirs, ours)
            python.PyCapsule_SetPointer(capsule, ours)


def loaded() -> ctypes.CDLL | None:
    """Return the simulated driver if `simulate` was called in this process."""
    return _library


def is_simulated() -> bool:
    """Return whether `simulate` was called in this process."""
    return _library is not None


def _side_door(what: str) -> ctypes.CDLL:
    """Return the simulated driver; raise `RuntimeError` naming `what` without one."""
    if _library is None:
        raise RuntimeError(
            f"{what} needs the simulated driver: "
            "call userstream.testing.simulate() before the first driver call"
        )
    return _library


def stats() -> Statistics:
    """Count the live streams (without the default ones), events, allocations and held streams."""
    values = (ctypes.c_long * 5)()
    _side_door("stats").userstream_statistics(values)
    return Statistics(*values)


def missing_kernels() -> list[str]:
    """Return the names of the kernels that were wanted while no function stood for them."""
    if _library is None:
        return []
    names = map(_library.userstream_missing_kernel, itertools.count())
    return [name.decode(errors="replace") for name in iter(names.__next__, None)]


def progress() -> None:
    """Notify the simulated driver that a word which a stream may wait on was written."""
    if _library is not None:
        _library.userstream_progress()


def _code(result: SupportsIndex) -> int:
    if isinstance(result, bool):
        raise TypeError("result must be a driver.CUresult or an int, not bool")
    try:
        code = operator.index(result)
    except TypeError:
        raise TypeError(
            f"result must be a driver.CUresult or an int, not {type(result).__name__}"
        ) from None
    if not 0 < code < 1 << 31:
        raise ValueError(f"result must be an error code from 1 to 2**31 - 1, not {code}")
    return code


def async_error(stream: object, result: SupportsIndex) -> None:
    """Make a stream fail when it reaches this point, as a faulty kernel would.

    The error is queued in stream order and is sticky: the remaining work of the stream's context
    is dropped, and until `reset` every stream and event of the context, and every later call in
    it, reports the error. Thread-safe; does not block.

    Parameters
    ----------
    stream : object with ``__cuda_stream__``, or CUstream
        The stream that fails.
    result : CUresult or int
        The error to report.

    Raises
    ------
    RuntimeError
        Without the simulated driver, or if the stream accepts no work: its handle is unknown, it is
        being captured, or its context has already failed.

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
        raise RuntimeError(f"the stream accepts no work: CUDA error {answer}")


def handle_of(stream: object) -> int:
    """Return the handle of a stream of any library as an integer."""
    protocol: Callable[[], tuple[int, int]] | None = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        version, handle = protocol()
        if version != 0:
            raise TypeError(f"__cuda_stream__ has version {version}; only version 0 is supported")
        return int(handle)
    if not isinstance(stream, driver.CUstream):
        raise TypeError(
            "a stream must be an object with __cuda_stream__ or a driver.CUstream, not "
            f"{type(stream).__name__}; a handle is passed as Stream.from_handle(handle) or "
            "driver.CUstream(handle), the legacy default stream as Stream.legacy_default()"
        )
    return int(stream)


def reset() -> None:
    """Clear injections, errors, queued or sticky, and call counts; a no-op on a real driver.

    Streams, events and memory are kept. Call it in a fixture around each test. Thread-safe; does
    not block.

    Examples
    --------
    >>> from userstream.testing import inject, reset
    >>> injection = inject("cuStreamQuery", 700, count=10)
    >>> reset()  # the injection is gone
    """
    if _library is not None:
        _library.userstream_reset()


# -- driver calls that are counted, and driver calls that fail -------------------------------------


def plain_name(function: str) -> str:
    """Return the name of a driver function without its version suffix."""
    if not isinstance(function, str):
        raise TypeError(f"function must be a str, not {type(function).__name__}")
    return re.sub(r"(_v\d+)?(_ptsz|_ptds)?$", "", function)


def unknown(function: str) -> ValueError:
    """Return the error for a function that the simulated driver lacks."""
    return ValueError(
        f"the simulated driver has no function {function!r}: "
        "pass the name of a driver function, such as 'cuStreamQuery'"
    )


def counted() -> dict[str, int]:
    """Return the number of calls of every function, including 0."""
    library = _side_door("calls()")
    capacity = library.userstream_all_calls(None, None, 0)
    names, numbers = (ctypes.c_char_p * capacity)(), (ctypes.c_long * capacity)()
    library.userstream_all_calls(names, numbers, capacity)
    return {name.decode(): number for name, number in zip(names, numbers, strict=True) if name}


@overload
def calls() -> dict[str, int]: ...
@overload
def calls(function: str) -> int: ...
def calls(function: str | None = None) -> int | dict[str, int]:
    """Count driver calls since the start or the last `reset`.

    All versions of a function (``_v2``) are counted together, including calls that an injection
    made fail. Thread-safe; does not block.

    Parameters
    ----------
    function : str, optional
        The name, such as ``"cuStreamQuery"``. Without it, every function that was called.

    Returns
    -------
    int or dict
        The number of calls; or a dict from the name of each function that was called to its number.

    Raises
    ------
    RuntimeError
        Without the simulated driver.
    ValueError, TypeError
        If the simulated driver has no such function.

    Examples
    --------
    >>> from cuda.bindings import driver
    >>> from userstream.testing import calls, reset
    >>> reset()
    >>> driver.cuDeviceGetCount()[1] > 0
    True
    >>> calls("cuDeviceGetCount")
    1
    >>> calls()
    {'cuDeviceGetCount': 1}
    """
    if function is None:
        return {name: number for name, number in sorted(counted().items()) if number}
    count: int = _side_door("calls()").userstream_calls(plain_name(function).encode())
    if count < 0:
        raise unknown(function)
    return count


# Operations and the driver functions that perform them. Which function a library calls depends on
# its version and on the device.
OPERATIONS = {
    "allocation": r"cuMem(Host)?Alloc\w*",
    "copy": r"cuMemcpy\w*",
    "fill": r"cuMemset\w*",
    "launch": r"cuLaunch\w*Kernel\w*",
    "stream": r"cuStreamCreate\w*",
    "event": r"cuEventCreate",
    "wait": r"cu(Ctx|Event|Stream)(Query|Synchronize)",
}


class UnusedInjection(AssertionError):
    """An injection that never fired: the test did not test what it claims to.

    `inject` raises it at the end of its ``with`` block. The message names the driver functions that
    were called instead.

    Examples
    --------
    >>> from userstream import testing
    >>> try:
    ...     with testing.inject("cuMemAlloc", 2):
    ...         pass  # allocates nothing
    ... except testing.UnusedInjection as error:
    ...     print(error)
    inject('cuMemAlloc', 2) never fired: no driver function was called in its block.
    Pass strict=False if that may happen.
    """


_MOST = (1 << (8 * ctypes.sizeof(ctypes.c_long) - 1)) - 1  # the largest C long


class inject:  # noqa: N801 - used like a function
    """Make the next calls of driver functions fail with a given result.

    Select them by the name of a function, or by what they do: ``inject(allocation=result)`` makes
    the next allocation fail, whichever function allocates. Such a call returns the result and does
    nothing else. An injection lasts until it is used up, until the end of its ``with`` block if it
    is used as a context manager, or until `reset`. A function can have several injections; the
    earliest one applies first. Thread-safe; does not block.

    A ``with`` block whose injection never fired fails with `UnusedInjection`, unless another error
    ends it: that gets a note.

    Parameters
    ----------
    function : str, optional
        The name, such as ``"cuStreamQuery"``; a version suffix (``_v2``) is ignored.
    result : CUresult or int, optional
        A ``driver.CUresult`` or any positive integer, including codes unknown to the bindings.
    count : int, default 1
        Number of calls that fail.
    skip : int, default 0
        Number of calls that succeed before the first failure.
    this_thread : bool, default False
        Whether the injection applies only to calls of the injecting thread, so that those of
        other threads (such as userstream's watcher) are neither counted nor affected.
    strict : bool, default True
        Whether an injection that never fired fails its ``with`` block.
    allocation, copy, fill, launch, stream, event, wait : CUresult or int, optional
        Instead of *function* and *result*: the result of memory allocations, copies, fills, kernel
        launches, the creation of streams or of events, or host waits (including queries), whichever
        function is called.

    Raises
    ------
    RuntimeError
        Without the simulated driver.
    ValueError, TypeError
        If the simulated driver has no such function, or a number is out of range.
    UnusedInjection
        At the end of the block.

    Examples
    --------
    >>> from cuda.bindings import driver
    >>> from userstream.testing import inject
    >>> with inject("cuEventCreate", driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY):
    ...     result, event = driver.cuEventCreate(0)
    >>> result.name
    'CUDA_ERROR_OUT_OF_MEMORY'

    >>> from cuda.core import Device
    >>> import userstream as us
    >>> stream = us.get_stream(0)
    >>> with inject(allocation=driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY):
    ...     try:
    ...         Device(0).allocate(64, stream=stream)
    ...     except Exception as error:
    ...         print(str(error).partition(":")[0])
    CUDA_ERROR_OUT_OF_MEMORY
    """

    def __init__(
        self,
        function: str | None = None,
        result: SupportsIndex | None = None,
        count: int = 1,
        skip: int = 0,
        *,
        this_thread: bool = False,
        strict: bool = True,
        allocation: SupportsIndex | None = None,
        copy: SupportsIndex | None = None,
        fill: SupportsIndex | None = None,
        launch: SupportsIndex | None = None,
        stream: SupportsIndex | None = None,
        event: SupportsIndex | None = None,
        wait: SupportsIndex | None = None,
    ) -> None:
        self._library = _side_door("inject()")
        operations = {
            "allocation": allocation,
            "copy": copy,
            "fill": fill,
            "launch": launch,
            "stream": stream,
            "event": event,
            "wait": wait,
        }
        names, chosen, shown = _chosen(function, result, operations)
        code = _code(chosen)
        _check_int("count", count)
        _check_int("skip", skip)
        if count < 1 or skip < 0:
            raise ValueError(
                f"count must be at least 1 and skip at least 0, not {count} and {skip}"
            )
        if count > _MOST or skip > _MOST:
            raise ValueError(f"count and skip must be at most {_MOST}, not {count} and {skip}")
        if any("\0" in name for name in names):  # the C function would read the name up to there
            raise unknown(str(function))
        more = [f"count={count}"] * (count != 1) + [f"skip={skip}"] * (skip != 0)
        more += ["this_thread=True"] * bool(this_thread)
        self._text = f"inject({', '.join([f'{shown}{code}', *more])})"
        self._names = names
        self._strict = bool(strict)
        self._before = counted()
        encoded = (ctypes.c_char_p * len(names))(*(name.encode() for name in names))
        self._id = self._library.userstream_inject(
            encoded, len(names), code, count, skip, bool(this_thread)
        )
        if not self._id:
            raise unknown(str(function))

    def __repr__(self) -> str:
        return f"<userstream.testing.{self._text}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        never_fired = self._library.userstream_withdraw(self._id) == 0
        if not never_fired or not self._strict:
            return
        if exc is None:
            raise UnusedInjection(f"{self._reason()}\nPass strict=False if that may happen.")
        if isinstance(exc, Exception):  # it may be why
            exc.add_note(self._reason())

    def _reason(self) -> str:
        now = counted()
        # A reset() in the block begins anew.
        called = {
            name: number - (self._before.get(name, 0) if number >= self._before.get(name, 0) else 0)
            for name, number in sorted(now.items())
        }
        called = {name: number for name, number in called.items() if number}
        hit = {name: number for name, number in called.items() if name in self._names}
        if hit:
            return f"{self._text} never fired: there were too few calls ({_listed(hit)})."
        if not called:
            return f"{self._text} never fired: no driver function was called in its block."
        return f"{self._text} never fired. Called in its block: {_listed(called)}."


def _chosen(
    function: str | None,
    result: SupportsIndex | None,
    operations: dict[str, SupportsIndex | None],
) -> tuple[tuple[str, ...], SupportsIndex, str]:
    """Return the functions that fail, their result, and the arguments as text."""
    given = {name: code for name, code in operations.items() if code is not None}
    keywords = ", ".join(f"{name}=" for name in given or operations)
    if function is None and result is None:
        if len(given) != 1:
            one_of = f"pass a function and a result, or one of {keywords} with a result"
            raise TypeError(one_of)
        [(operation, code)] = given.items()
        names = [name for name in counted() if re.fullmatch(OPERATIONS[operation], name)]
        return tuple(names), code, f"{operation}="
    if given:
        raise TypeError(f"pass a function and a result or {keywords}, not both")
    if function is None or result is None:
        raise TypeError("pass a function and the result that its calls return")
    return (plain_name(function),), result, f"{function!r}, "


def _listed(called: dict[str, int]) -> str:
    return ", ".join(
        f"{name} ({number} times)" if number > 1 else name for name, number in called.items()
    )
