"""Arguments that are raw memory: an address or a buffer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, SupportsIndex

import numpy as np
from cuda.bindings import driver

from userstream import _buffers
from userstream._buffers import type_name
from userstream._buffers._layout import contiguous_strides

if TYPE_CHECKING:
    from userstream.typing import Buffer


def address_and_size(memory: int | Buffer) -> tuple[int, int | None]:
    """Return the address of raw memory or a buffer, and the size of a buffer.

    Raises
    ------
    TypeError
        It is neither.
    ValueError
        It is no address of 64 bits, or a buffer whose elements do not lie side by side.
    """
    if isinstance(memory, (bool, np.bool_)):
        raise TypeError(f"an address is a number or a buffer, not {memory!r}")
    if isinstance(memory, (int, driver.CUdeviceptr)):
        return _checked(int(memory)), None
    if _buffers.kind_of(memory) is None and isinstance(memory, SupportsIndex):  # NumPy's integers
        return _checked(memory.__index__()), None
    info = _buffers.view_of(memory).info()
    if info.address is None or info.parts:
        raise ValueError(f"{type_name(memory)} is made of several buffers; pass one of them")
    if info.strides is not None and info.shape is not None and info.nbytes:
        count = math.prod(info.shape)
        if _steps(info.strides, info.shape) != _steps(
            contiguous_strides(info.shape, info.nbytes // count), info.shape
        ):
            raise ValueError(
                f"the elements of this {type_name(memory)} do not lie side by side in C "
                f"order (strides {info.strides}); pass a contiguous one"
            )
    return info.address, info.nbytes


def _checked(address: int) -> int:
    if not 0 <= address < 1 << 64:
        raise ValueError(f"{address} is not an address: addresses are from 0 to 2**64 - 1")
    return address


def _steps(strides: tuple[int, ...], shape: tuple[int, ...]) -> list[int]:
    # Along a dimension of length 1 no step is ever taken.
    return [step for step, length in zip(strides, shape, strict=True) if length > 1]
