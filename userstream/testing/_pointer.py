"""What a kernel's function gets for a pointer."""

from __future__ import annotations

import ctypes
import math
import operator
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import DTypeLike

_SUCCESS = 0
_NOT_FOUND = 500
_ILLEGAL_ADDRESS = 700
_MISALIGNED_ADDRESS = 716
_LARGEST = (1 << 63) - 1


class Fault(Exception):
    """A kernel did what a GPU answers with an error of the context."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Launch:
    """One call of a kernel's function, as its pointers know it."""

    __slots__ = ("fault", "id", "library")

    def __init__(self, library: ctypes.CDLL, launch_id: int) -> None:
        self.library: ctypes.CDLL = library
        self.id: int = launch_id
        self.fault: Fault | None = None  # the first: a kernel does not continue after one


class _Range(ctypes.Structure):
    _fields_ = (
        ("memory", ctypes.c_uint64),
        ("base", ctypes.c_uint64),
        ("size", ctypes.c_size_t),
    )


class _Bytes:
    """Bytes of the simulated device, which stay as long as an array shows them."""

    __slots__ = ("__array_interface__", "_library", "_memory")

    def __init__(self, library: ctypes.CDLL, memory: int, address: int, size: int) -> None:
        self._library = library
        self._memory = memory
        self.__array_interface__: dict[str, Any] = {
            "data": (address, False),
            "shape": (size,),
            "typestr": "|u1",
            "version": 3,
        }

    def __del__(self) -> None:
        self._library.userstream_unuse_memory(self._memory)


class Pointer:
    """A pointer that was passed to a kernel, on the simulated driver.

    Annotates a pointer parameter of the kernel. Not created by users.

    Attributes
    ----------
    address : int
        The address, as the kernel was launched with it.

    Examples
    --------
    >>> import numpy as np
    >>> from userstream import testing
    >>> @testing.kernel("negate")
    ... def negate(grid, block, x: testing.Pointer, n: np.int32):
    ...     values = x.array(n, np.float32)
    ...     values[:] = -values
    """

    __slots__ = ("_launch", "_name", "address")

    def __init__(self, address: int, name: str, launch: Launch) -> None:
        self.address: int = address
        self._name = name
        self._launch = launch

    def __repr__(self) -> str:
        return f"<userstream.testing.Pointer {self._name}: {self.address:#x}>"

    def __index__(self) -> int:
        return self.address

    def __bool__(self) -> bool:
        return self.address != 0

    def array(self, shape: int | Sequence[int], dtype: DTypeLike) -> np.ndarray[Any, Any]:
        """View the memory at the pointer as an array.

        Nothing is copied: what is written to the array is written to the memory of the simulated
        device. The whole array must lie in one allocation that the kernel's device can access;
        otherwise the launch fails with ``CUDA_ERROR_ILLEGAL_ADDRESS`` or
        ``CUDA_ERROR_MISALIGNED_ADDRESS``. The array is valid only while the kernel's function runs.

        Parameters
        ----------
        shape : int or sequence of int
            The number of elements, or the shape (in C order).
        dtype : dtype-like
            The type of the elements, as `numpy.dtype` takes it.

        Returns
        -------
        numpy.ndarray
            The elements, writable.

        Raises
        ------
        ValueError, TypeError
            *shape* or *dtype* is not valid.
        RuntimeError
            The kernel's function has returned.

        Examples
        --------
        >>> import numpy as np
        >>> from userstream import testing
        >>> @testing.kernel("transpose")
        ... def transpose(grid, block, out: testing.Pointer, x: testing.Pointer, n: np.int32):
        ...     out.array((n, n), np.float64)[:] = x.array((n, n), np.float64).T
        """
        kind = np.dtype(dtype)
        if kind.hasobject or kind.itemsize == 0:
            raise TypeError(f"device memory has no elements of the type {kind}")
        sizes = _checked_shape(shape)
        nbytes = math.prod(sizes) * kind.itemsize
        if nbytes == 0:
            return np.empty(sizes, kind)
        alignment = kind.alignment
        if self.address % alignment:
            raise self._failed(
                _MISALIGNED_ADDRESS,
                f"{self.address:#x}, to which {self._name} points, is not a multiple of "
                f"{alignment}, as elements of the type {kind} need it",
            )
        view = np.asarray(self._use(nbytes)).view(kind).reshape(sizes)
        assert isinstance(view, np.ndarray)
        return view

    def _use(self, nbytes: int) -> _Bytes:
        launch, found = self._launch, _Range()
        result = launch.library.userstream_use_memory(
            launch.id, self.address, min(nbytes, _LARGEST), ctypes.byref(found)
        )
        if result == _SUCCESS:
            return _Bytes(launch.library, found.memory, self.address, nbytes)
        if result == _NOT_FOUND:
            raise RuntimeError(
                f"the launch to which {self!r} belongs is over: use a pointer while the kernel's "
                "function runs"
            )
        where = f"{nbytes} bytes at {self.address:#x}, to which {self._name} points"
        left = found.base + found.size - self.address
        if not found.base:
            reason = "where no memory of a device is"
        elif left < nbytes:
            reason = f"and its allocation of {found.size} bytes has {left} from there"
        else:
            reason = "and the kernel's device has no access to the memory of another one"
        raise self._failed(_ILLEGAL_ADDRESS, f"{where}, {reason}")

    def _failed(self, code: int, message: str) -> Fault:
        fault = Fault(code, message)
        if self._launch.fault is None:
            # Without its traceback, which holds arrays: those end before the launch does.
            self._launch.fault = Fault(code, message)
        return fault


def _checked_shape(shape: int | Sequence[int]) -> tuple[int, ...]:
    try:
        sizes: tuple[int, ...] = (operator.index(shape),)  # type: ignore[arg-type]
    except TypeError:
        try:
            sizes = tuple(operator.index(size) for size in shape)  # type: ignore[union-attr]
        except TypeError:
            raise TypeError(
                f"a shape is an int or a sequence of ints, not {type(shape).__name__}"
            ) from None
    if any(size < 0 for size in sizes):
        raise ValueError(f"a shape has no negative sizes: {sizes}")
    return sizes
