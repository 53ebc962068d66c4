"""Driver calls, counted."""

from __future__ import annotations

import ctypes
import re
from typing import overload

from userstream.testing import _simulated


def plain_name(function: str) -> str:
    """Give the name of a driver function without the suffix of a version."""
    if not isinstance(function, str):
        raise TypeError(f"function must be a str, not {type(function).__name__}")
    return re.sub(r"(_v\d+)?(_ptsz|_ptds)?$", "", function)


def unknown(function: str) -> ValueError:
    """Make the error for a name that no function of the simulated driver has."""
    return ValueError(
        f"the simulated driver has no function {function!r}: "
        "pass the name of a driver function, such as 'cuStreamQuery'"
    )


def counted() -> dict[str, int]:
    """Count the calls of every function, those that were not called too."""
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
