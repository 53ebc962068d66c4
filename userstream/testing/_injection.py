"""Driver calls that are counted, and driver calls that fail."""

from __future__ import annotations

import ctypes
import re
from typing import TYPE_CHECKING, Self, SupportsIndex, overload

from userstream.testing import _simulated

if TYPE_CHECKING:
    from types import TracebackType


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
    library = _simulated._side_door("calls()")
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
    count: int = _simulated._side_door("calls()").userstream_calls(plain_name(function).encode())
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
        self._library = _simulated._side_door("inject()")
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
        code = _simulated._code(chosen)
        _simulated._check_int("count", count)
        _simulated._check_int("skip", skip)
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
