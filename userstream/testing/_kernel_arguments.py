"""Arguments of simulated kernels: pointers, graph conditions, and their annotations."""

from __future__ import annotations

import ctypes
import inspect
import math
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import DTypeLike

_SUCCESS = 0
_NOT_FOUND = 500
_ILLEGAL_ADDRESS = 700
_MISALIGNED_ADDRESS = 716
_LARGEST = (1 << 63) - 1


class Fault(Exception):
    """An access of a kernel that a GPU reports as an error of the context."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Launch:
    """One call of a kernel's function, to which its pointers belong."""

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
    """Bytes of the simulated device that stay in use as long as an array refers to them."""

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


class Condition:
    """A graph condition that was passed to a kernel, on the simulated driver.

    Annotates a parameter that the kernel takes as a ``cudaGraphConditionalHandle``: cuda.core
    passes its `GraphCondition <cuda.core.graph.GraphCondition>`. Not created by users.

    Attributes
    ----------
    handle : int
        The handle, as the kernel was launched with it.

    Examples
    --------
    >>> import numpy as np
    >>> from userstream import testing
    >>> @testing.kernel("count_down")
    ... def count_down(grid, block, again: testing.Condition, left: testing.Pointer):
    ...     values = left.array(1, np.int32)
    ...     values[0] -= 1
    ...     again.set(values[0] > 0)
    """

    __slots__ = ("_launch", "_name", "handle")

    def __init__(self, handle: int, name: str, launch: Launch) -> None:
        self.handle: int = handle
        self._name = name
        self._launch = launch

    def __repr__(self) -> str:
        return f"<userstream.testing.Condition {self._name}: {self.handle:#x}>"

    def set(self, value: SupportsIndex | np.bool_) -> None:
        """Set the value, as ``cudaGraphSetConditional`` does in a kernel.

        From now on it decides for the nodes of the running graph that have this condition.

        Parameters
        ----------
        value : int or bool
            For "if" and "while", true unless it is 0; for "switch", the number of the case.

        Raises
        ------
        ValueError, TypeError
            *value* is not an unsigned 32-bit integer.
        RuntimeError
            The kernel is not part of a graph that has the condition, or its function has returned.

        Examples
        --------
        >>> import numpy as np
        >>> from userstream import testing
        >>> @testing.kernel("choose")
        ... def choose(grid, block, which: testing.Condition, case: np.uint32):
        ...     which.set(case)
        """
        number = _checked_condition(value)
        launch = self._launch
        result = launch.library.userstream_set_condition(launch.id, self.handle, number)
        if result == _NOT_FOUND:
            raise RuntimeError(
                f"the launch to which {self!r} belongs is over: set a condition while the kernel's "
                "function runs"
            )
        if result:
            raise RuntimeError(
                f"{self!r} cannot be set here: the kernel must be a node of the graph for which "
                "the condition was created, in the same context"
            )


def _checked_condition(value: SupportsIndex | np.bool_) -> int:
    try:
        number = operator.index(bool(value) if isinstance(value, np.bool_) else value)
    except TypeError:
        raise TypeError(f"a condition is an int or a bool, not {type(value).__name__}") from None
    if not 0 <= number < 1 << 32:
        raise ValueError(f"a condition is an unsigned 32-bit integer, not {number}")
    return number


class _Contents(ctypes.Structure):
    _fields_ = (
        ("address", ctypes.c_uint64),
        ("shape", ctypes.c_size_t * 3),
        ("pitch", ctypes.c_size_t),
        ("format", ctypes.c_int),
        ("channels", ctypes.c_uint),
        ("is_writable", ctypes.c_bool),
    )


_FORMATS = {  # CUarray_format
    0x01: np.uint8,
    0x02: np.uint16,
    0x03: np.uint32,
    0x08: np.int8,
    0x09: np.int16,
    0x0A: np.int32,
    0x10: np.float16,
    0x20: np.float32,
}


class Texture:
    """A texture or surface object that was passed to a kernel, on the simulated driver.

    Annotates a parameter that the kernel takes as a ``cudaTextureObject_t`` or a
    ``cudaSurfaceObject_t``. Not created by users.

    Attributes
    ----------
    handle : int
        The object, as the kernel was launched with it.

    Examples
    --------
    >>> import numpy as np
    >>> from userstream import testing
    >>> @testing.kernel("sum_texture")
    ... def sum_texture(grid, block, texture: testing.Texture, out: testing.Pointer):
    ...     out.array(1, np.float32)[0] = texture.array().sum()
    """

    __slots__ = ("_launch", "_name", "handle")

    def __init__(self, handle: int, name: str, launch: Launch) -> None:
        self.handle: int = handle
        self._name = name
        self._launch = launch

    def __repr__(self) -> str:
        return f"<userstream.testing.Texture {self._name}: {self.handle:#x}>"

    def array(self) -> np.ndarray[Any, Any]:
        """View the texels as an array, without filtering, addressing modes or normalization.

        Nothing is copied. What is written to the array of a surface is written to the CUDA array;
        that of a texture is read-only. The array is valid only while the kernel's function runs.

        Returns
        -------
        numpy.ndarray
            The elements. Its axes are depth, height and width, as far as the object has them, and
            the channels if there are several.

        Raises
        ------
        RuntimeError
            The kernel's function has returned.

        Examples
        --------
        >>> from userstream import testing
        >>> @testing.kernel("invert")
        ... def invert(grid, block, surface: testing.Texture):
        ...     pixels = surface.array()
        ...     pixels[:] = 255 - pixels
        """
        launch, found = self._launch, _Contents()
        if not launch.library.userstream_texture_contents(self.handle, ctypes.byref(found)):
            fault = Fault(_ILLEGAL_ADDRESS, f"{self!r} is no texture or surface object")
            if launch.fault is None:
                launch.fault = Fault(fault.code, str(fault))
            raise fault
        sizes = tuple(size for size in found.shape if size)
        kind = np.dtype(_FORMATS[found.format])
        element = kind.itemsize * found.channels
        rows = math.prod(sizes[:-1])
        pointer = Pointer(found.address, self._name, launch)
        nbytes = (rows - 1) * found.pitch + sizes[-1] * element
        raw = pointer.array(nbytes, np.uint8)
        strides = [found.pitch * sizes[-2]] if len(sizes) == 3 else []
        strides += [found.pitch] if len(sizes) > 1 else []
        strides += [element, kind.itemsize]
        view = np.ndarray((*sizes, found.channels), kind, raw, 0, tuple(strides))
        view.flags.writeable = bool(found.is_writable)
        return view[..., 0] if found.channels == 1 else view


_ADVICE = (
    "annotate a pointer with testing.Pointer, the condition of a graph with testing.Condition, "
    "a texture or surface with testing.Texture, and a scalar with its NumPy type, such as np.int32"
)
_HANDLES = (Condition, Pointer, Texture)
_TENSOR_MAPS = ("CUtensorMap", "TensorMapDescriptor")
_ABSTRACT = (
    np.generic,
    np.number,
    np.integer,
    np.signedinteger,
    np.unsignedinteger,
    np.inexact,
    np.floating,
    np.complexfloating,
    np.flexible,
    np.character,
)
_PYTHON_SCALARS = (bool, int, float, complex)  # cuda.core passes an int in 8 bytes


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel."""

    name: str
    offset: int
    dtype: np.dtype[Any]
    handle: type[Condition | Pointer | Texture] | None  # what the function gets, if no scalar
    is_plain: bool  # the function gets a Python number

    @property
    def size(self) -> int:
        """The number of bytes of the parameter."""
        return self.dtype.itemsize

    def value(self, packed: bytes, launch: Launch) -> object:
        """Return the argument from the packed arguments of a launch."""
        scalar = np.frombuffer(packed, self.dtype, 1, self.offset)[0]
        if self.handle is not None:
            return self.handle(int(scalar), self.name, launch)
        return scalar.item() if self.is_plain else scalar


def pointers_at(places: Sequence[tuple[int, int]]) -> tuple[Parameter, ...]:
    """Return pointer parameters at offsets, each of a size; larger ones are read in part."""
    unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32}
    return tuple(
        Parameter(
            f"argument {index + 1}",
            offset,
            np.dtype(unsigned.get(size, np.uint64)),
            Pointer,
            is_plain=False,
        )
        for index, (offset, size) in enumerate(places)
    )


def parameters_of(function: Callable[..., object]) -> tuple[tuple[Parameter, ...], bool]:
    """Return the parameters of a kernel's function, and whether the function takes all of them."""
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise TypeError("a kernel is a plain function: no coroutine, no generator")
    signature = inspect.signature(function)
    named = list(signature.parameters.values())
    if [parameter.name for parameter in named[:2]] != ["grid", "block"]:
        raise TypeError(
            "the function of a kernel takes grid and block first, and then what the kernel takes: "
            f"not {signature}"
        )
    if len(named) == 3 and named[2].kind is named[2].VAR_POSITIONAL:
        if _evaluated(function, named[2]) is not Pointer:
            raise TypeError(f"annotate {named[2]} with testing.Pointer, which each argument is")
        return (), True
    parameters: list[Parameter] = []
    end = 0
    for parameter in named[2:]:
        if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            raise TypeError(f"a kernel takes its parameters by position: not {parameter}")
        annotation = _evaluated(function, parameter)
        dtype = _dtype_of(parameter.name, annotation)
        # As in C: a scalar is aligned to its size, a structure as its members need it.
        alignment = dtype.alignment if dtype.names else dtype.itemsize
        offset = -(-end // alignment) * alignment
        end = offset + dtype.itemsize
        parameters.append(
            Parameter(
                parameter.name,
                offset,
                dtype,
                annotation if annotation in _HANDLES else None,
                annotation in _PYTHON_SCALARS,
            )
        )
    return tuple(parameters), False


def _evaluated(function: Callable[..., object], parameter: inspect.Parameter) -> object:
    if parameter.annotation is parameter.empty:
        raise TypeError(f"the parameter {parameter.name!r} has no annotation: {_ADVICE}")
    if not isinstance(parameter.annotation, str):
        return parameter.annotation
    plain = inspect.unwrap(function)
    enclosing = inspect.getclosurevars(plain).nonlocals if inspect.isfunction(plain) else {}
    try:
        return eval(parameter.annotation, getattr(plain, "__globals__", {}), dict(enclosing))
    except NameError as error:
        raise TypeError(
            f"the annotation {parameter.annotation!r} of {parameter.name!r} cannot be looked up: "
            f"{error}; import what it names in the module, not in a function"
        ) from None


def _dtype_of(name: str, annotation: Any) -> np.dtype[Any]:
    if annotation in _HANDLES:
        return np.dtype(np.uint64)
    kind = getattr(annotation, "__name__", repr(annotation))
    if kind in _TENSOR_MAPS:
        raise TypeError(f"tensor maps ({name!r} is a {kind}) are not simulated")
    refused = TypeError(f"the parameter {name!r} cannot be a {kind}: {_ADVICE}")
    if annotation is None or isinstance(annotation, str) or annotation in _ABSTRACT:
        raise refused
    try:
        dtype: np.dtype[Any] = np.dtype(annotation)
    except (TypeError, ValueError):
        raise refused from None
    if dtype.hasobject or dtype.itemsize == 0 or dtype.kind in "SUMm":
        raise refused
    return dtype
