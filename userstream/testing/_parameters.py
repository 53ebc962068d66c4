"""Which parameters a kernel takes: what the annotations of its Python function say."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from userstream.testing._condition import Condition
from userstream.testing._pointer import Launch, Pointer

if TYPE_CHECKING:
    from collections.abc import Callable

_ADVICE = (
    "annotate a pointer with testing.Pointer, the condition of a graph with testing.Condition, "
    "and a scalar with its NumPy type, such as np.int32"
)
_HANDLES = (Condition, Pointer)
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
    handle: type[Condition | Pointer] | None  # what the function gets, if no scalar
    is_plain: bool  # the function gets a Python number

    @property
    def size(self) -> int:
        """How many bytes it takes."""
        return self.dtype.itemsize

    def value(self, packed: bytes, launch: Launch) -> object:
        """Take it out of what a launch passes."""
        scalar = np.frombuffer(packed, self.dtype, 1, self.offset)[0]
        if self.handle is not None:
            return self.handle(int(scalar), self.name, launch)
        return scalar.item() if self.is_plain else scalar


def parameters_of(function: Callable[..., object]) -> tuple[Parameter, ...]:
    """Read the annotations of a function that stands for a kernel."""
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise TypeError("a kernel is a plain function: no coroutine, no generator")
    signature = inspect.signature(function)
    named = list(signature.parameters.values())
    if [parameter.name for parameter in named[:2]] != ["grid", "block"]:
        raise TypeError(
            "the function of a kernel takes grid and block first, and then what the kernel takes: "
            f"not {signature}"
        )
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
    return tuple(parameters)


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
