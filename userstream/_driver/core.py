"""The compiled core: sequences of driver calls as one call, and errors for its results.

`native/core.h` describes the files of the core. A result is 0, `CAPTURED`, or the index in
`FUNCTIONS` of the driver function that failed << 32 | its ``CUresult``.
"""

from __future__ import annotations

from cuda.bindings import driver

from userstream import _hooks, errors

try:
    from userstream._driver import _core
except ImportError as error:
    from userstream._built import REINSTALL

    raise ImportError(
        f"the compiled core of userstream cannot be loaded ({error}); {REINSTALL}"
    ) from error

from userstream._driver._core import *  # noqa: F403 -- as `_core.pyi` lists it
from userstream._driver.status import call, failed

_WAIT_EVENT = _core.FUNCTIONS.index("cuStreamWaitEvent")
_OLDEST = 12000  # the CUDA version whose variants of the functions `native/core.h` declares


def load_functions() -> None:
    """Check the core, and pass it the addresses of the driver's functions.

    The check reads the C files of a checkout: here, because it takes as long as the core to load.
    """
    # Not `from userstream`: that would wait for a thread that is importing userstream.
    from userstream._built import CORE, check

    check(CORE, _core.SOURCE)
    _core.load(*map(_address, _core.FUNCTIONS))


def _address(function: str) -> int:
    flags = driver.CUdriverProcAddress_flags.CU_GET_PROC_ADDRESS_DEFAULT
    address, _status = call(driver.cuGetProcAddress, function.encode(), _OLDEST, flags)
    return int(address)


def _report_failure(result: int, what: str, error: BaseException | None) -> None:
    """Raise the failure to restore something, or add it as a note to the error of the call."""
    failure = result_failure(result, None)
    failure.add_note(f"so {what} could not be made current again in this thread")
    errors._report_failures([failure], error)


def result_failure(result: int, stream: object) -> Exception:
    """Return the exception for a result that names a driver function and its error."""
    return failed(_core.FUNCTIONS[result >> 32], result & 0xFFFFFFFF, stream)


def edge_failure(result: int, source: object, destination: object) -> Exception:
    """Return the exception for the result of an edge between two lanes that failed."""
    return result_failure(result, destination if result >> 32 == _WAIT_EVENT else source)


_core.set_failures(result_failure, _report_failure)
_core.set_edge_listeners(_hooks.edge_added)
