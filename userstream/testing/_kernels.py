"""Kernels on the simulated driver: Python functions that stand for kernels, and their threads."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import threading
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from userstream import _process
from userstream._driver import account
from userstream.testing import _simulated
from userstream.testing._kernel_arguments import (
    Fault,
    Launch,
    Parameter,
    parameters_of,
    pointers_at,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_Function = TypeVar("_Function", bound="Callable[..., object]")

_OWN_FILE = Fault.__init__.__code__.co_filename
_ASSERT = 710
_LAUNCH_FAILED = 719


@dataclass
class _Definition:
    name: str
    function: Callable[..., object]
    parameters: tuple[Parameter, ...]
    takes_all: bool  # whatever parameters the image says the kernel has
    id: int = 0  # the simulated driver's; 0 before there is one


class _Taken(ctypes.Structure):
    _fields_ = (
        ("job", ctypes.c_uint64),
        ("definition", ctypes.c_uint64),
        ("parameters", ctypes.c_void_p),
        ("size", ctypes.c_size_t),
        ("layout", ctypes.POINTER(ctypes.c_size_t)),  # an offset and a size for each
        ("count", ctypes.c_size_t),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("others_wait", ctypes.c_bool),
    )


_lock = _process.Lock()
_by_name: dict[str, _Definition] = {}
_by_id: dict[int, _Definition] = {}  # those that were replaced too, while launches of them may run
_serving = False


# ---- registering ------------------------------------------------------------


def kernel(name: str) -> Callable[[_Function], _Function]:
    """Make a Python function the stand-in for a kernel on the simulated driver.

    A kernel of that name is found in any image, through `cuda.core.ObjectCode` (a single byte will
    do) or through the driver's functions. Each launch calls the function once, with ``grid`` and
    ``block`` (tuples of three), followed by the arguments of the launch. The annotations declare
    their types: `Pointer` for a pointer; `Condition` for the condition of a graph; `Texture` for a
    texture or surface object; a NumPy type, such as ``np.float32`` or a structured `numpy.dtype`,
    for an argument that is passed by value. With ``*arguments: Pointer`` the function takes
    whatever parameters the kernel has in its image (PTX or a cubin), each as a `Pointer`, whose
    ``address`` is the argument's value: for kernels that numba compiles for several types.

    The function runs in stream order, on a Python thread. It must not call CUDA. An exception in it
    becomes an error of the context, as with a faulty kernel, and its traceback is part of the error
    message; an `AssertionError` becomes ``CUDA_ERROR_ASSERT``.

    Without the simulated driver the decorator does nothing, so the same test can run on a GPU.
    Thread-safe; does not block.

    Parameters
    ----------
    name : str
        The name by which the program looks up the kernel. If it is mangled (C++ without
        ``extern "C"``, numba), either the whole name or the bare name of the function, which may
        follow those of its scopes: ``"TestAdd.test_add.<locals>.kernel"``.

    Returns
    -------
    callable
        A decorator, which returns the function unchanged.

    Raises
    ------
    ValueError
        The kernel already has another function, defined in a module.
    TypeError
        An annotation is missing, or is not one of these types.

    Examples
    --------
    >>> import numpy as np
    >>> from cuda.core import Device, LaunchConfig, ObjectCode, launch
    >>> import userstream as us
    >>> from userstream import testing
    >>> @testing.kernel("scale")
    ... def scale(grid, block, x: testing.Pointer, n: np.int32, factor: np.float32):
    ...     x.array(n, np.float32)[:] *= factor
    >>> stream = us.get_stream(0)
    >>> buffer = Device(0).allocate(16, stream=stream)
    >>> kernel = ObjectCode.from_ptx(b"any").get_kernel("scale")
    >>> ones = np.ones(4, np.float32)
    >>> stream = us.copyto(buffer, ones.view(np.uint8), producer=stream)
    >>> launch(stream, LaunchConfig(grid=1, block=4), kernel, buffer, np.int32(4), np.float32(3))
    >>> us.asnumpy(buffer, producer=stream).view(np.float32)
    array([3., 3., 3., 3.], dtype=float32)
    """
    if not isinstance(name, str):
        raise TypeError(
            f"a kernel is named by a str, not {type(name).__name__}: @testing.kernel('scale')"
        )
    if not name or "\0" in name:
        raise ValueError(f"a kernel cannot be named {name!r}")

    def register(function: _Function) -> _Function:
        _register(_Definition(name, function, *parameters_of(function)))
        return function

    return register


def _place(function: Callable[..., object]) -> str:
    module = getattr(function, "__module__", None)
    return f"{module}.{getattr(function, '__qualname__', repr(function))}"


def _register(definition: _Definition) -> None:
    with _lock:
        before = _by_name.get(definition.name)
        if before is not None:
            places = _place(before.function), _place(definition.function)
            # The same function again, or one that was local to a test that is over.
            if places[0] != places[1] and "<locals>" not in places[0]:
                raise ValueError(
                    f"{places[0]} stands for the kernel {definition.name!r} already, and "
                    f"{places[1]} cannot: use that one, or define both in the tests or fixtures "
                    "that use them, where the later one replaces the earlier"
                )
        _by_name[definition.name] = definition
        library = _simulated.loaded()
        if library is not None:
            _tell(library, definition)


def _tell(library: ctypes.CDLL, definition: _Definition) -> None:
    """Define a kernel in the simulated driver, and start the thread that runs kernels."""
    parameters = definition.parameters
    sizes = (ctypes.c_size_t * len(parameters))(*(parameter.size for parameter in parameters))
    offsets = (ctypes.c_size_t * len(parameters))(*(parameter.offset for parameter in parameters))
    definition.id = library.userstream_define_kernel(
        definition.name.encode(), len(parameters), sizes, offsets, definition.takes_all
    )
    _by_id[definition.id] = definition
    for replaced in [each for each in _by_id if not library.userstream_knows_kernel(each)]:
        del _by_id[replaced]
    _start_serving(library)


def _driver_is_loaded(library: ctypes.CDLL) -> None:
    with _lock:
        for definition in _by_name.values():
            if not definition.id:
                _tell(library, definition)


_simulated.when_loaded.append(_driver_is_loaded)


def duration(kernel: str | Callable[..., object], seconds: float) -> None:
    """Make each launch of a kernel take time, on the simulated driver.

    The time passes before the kernel's function is called, so code that does not wait for the
    kernel finds the memory unchanged. Applies to launches that begin from now on, until `reset`.
    Launches on several streams run concurrently. Thread-safe; does not block.

    Parameters
    ----------
    kernel : str or callable
        The name of the kernel, or its function.
    seconds : float
        How long; 0 restores the default.

    Raises
    ------
    RuntimeError
        Without the simulated driver.
    ValueError, TypeError
        *kernel* has no function, or *seconds* is not a valid time.

    Examples
    --------
    >>> from userstream import testing
    >>> @testing.kernel("rest")
    ... def rest(grid, block): ...
    >>> testing.duration(rest, 0.01)
    """
    library = _simulated._side_door("duration()")
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise TypeError(f"seconds must be a number, not {type(seconds).__name__}")
    if not 0 <= seconds < math.inf:
        raise ValueError(f"seconds must be 0 or more, and finite, not {seconds}")
    for name in _names_of(kernel):
        library.userstream_set_duration(name.encode(), float(seconds))


def _names_of(kernel: str | Callable[..., object]) -> list[str]:
    with _lock:
        known = dict(_by_name)
    if isinstance(kernel, str):
        found = [kernel] if kernel in known else []
    elif callable(kernel):
        found = [name for name, each in known.items() if each.function is kernel]
    else:
        raise TypeError(
            f"a kernel is its name or the function that stands for it, not {type(kernel).__name__}"
        )
    if not found:
        raise ValueError(
            f"{kernel!r} is not known as a kernel: decorate a function with @testing.kernel(name); "
            f"there are {sorted(known)}"
        )
    return found


# ---- running ----------------------------------------------------------------


def _start_serving(library: ctypes.CDLL) -> None:
    """Start the first thread, under the lock. Each thread starts another one when needed."""
    global _serving  # noqa: PLW0603 - of the process, as the driver is
    if not _serving:
        _start_thread(library)
        _serving = True


def _start_thread(library: ctypes.CDLL) -> None:
    name = "userstream-kernels"
    thread = threading.Thread(target=_serve, args=(library,), name=name, daemon=True)
    account.on(account.HOUSEKEEPING, _process.start_thread, thread)  # it takes part in no schedule


def _serve(library: ctypes.CDLL) -> None:
    """Run kernels, one after the other, while another thread waits for the next.

    So kernels of several streams run side by side: one that waits for another does not hang.
    """
    taken = _Taken()
    while library.userstream_take_launch(ctypes.byref(taken)):
        if not taken.others_wait:
            with contextlib.suppress(RuntimeError):  # too many threads: then one by one
                _start_thread(library)
        code, text = _run(library, taken)
        library.userstream_finish_launch(taken.job, code, text)


def _run(library: ctypes.CDLL, taken: _Taken) -> tuple[int, bytes | None]:
    """Call the function of a launch; return an error code and its text.

    Nothing is left of the call when this returns: no frame, and thus no array, of the function.
    """
    launch = Launch(library, taken.job)
    name = "?"
    try:
        with _lock:  # the driver may know a definition before it is stored here
            definition = _by_id[taken.definition]
        name = definition.name
        packed = ctypes.string_at(taken.parameters, taken.size)
        parameters = definition.parameters
        if definition.takes_all:
            places = taken.layout[: 2 * taken.count]
            parameters = pointers_at(list(zip(places[::2], places[1::2], strict=True)))
        values = [parameter.value(packed, launch) for parameter in parameters]
        definition.function(tuple(taken.grid), tuple(taken.block), *values)
    except BaseException as error:
        return _code_of(error), _text_of(name, error)
    if launch.fault is not None:  # which the function has caught
        return launch.fault.code, _text_of(name, launch.fault)
    return 0, None


def _code_of(error: BaseException) -> int:
    if isinstance(error, Fault):
        return error.code
    return _ASSERT if isinstance(error, AssertionError) else _LAUNCH_FAILED


def _text_of(name: str, error: BaseException) -> bytes:
    """Return the error message with the traceback of the kernel's function."""
    first = f"the kernel {name!r} raised {type(error).__name__}"
    try:
        first = f"the kernel {name!r} failed: {error}" if isinstance(error, Fault) else first
        frames = error.__traceback__.tb_next if error.__traceback__ else None
        shown = traceback.TracebackException(type(error), error, frames)
        shown.stack = traceback.StackSummary.from_list(
            [frame for frame in shown.stack if frame.filename != _OWN_FILE]
        )
        text = f"{first}\n{''.join(shown.format()).rstrip()}"
    except Exception:  # of its __str__, say
        text = first
    return text.replace("\0", "\\0").encode(errors="backslashreplace")


def _after_fork_in_child() -> None:
    """Start a thread again unless the driver is lost; a fork keeps no thread of the parent."""
    global _lock, _serving  # noqa: PLW0603 - a thread that is not here may have held it
    _lock = _process.Lock()
    serving, _serving = _serving, False
    library = _simulated.loaded()
    if serving and library is not None and not library.userstream_is_forked():
        _start_serving(library)


os.register_at_fork(after_in_child=_after_fork_in_child)
