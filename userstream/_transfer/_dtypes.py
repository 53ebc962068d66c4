"""From what a framework calls the type of its elements to NumPy's."""

from __future__ import annotations

import functools
import importlib
import re

import numpy as np

from userstream.errors import UnsupportedBufferError

# Several elements to a byte on the device, and one in NumPy.
_BELOW_A_BYTE = re.compile(r"u?int[124]|float[46]_\w+")


def numpy_dtype(dtype: np.dtype | str | None, source: str) -> np.dtype:
    """Return the type of the elements of a buffer that the rule `source` described."""
    if dtype is None:
        raise UnsupportedBufferError(
            f"this {source} does not tell the type of its elements, or it is one that cuda.core "
            "does not know (such as float8 by DLPack); pass a view of them as integers, and view "
            "the result as the type of ml_dtypes"
        )
    if isinstance(dtype, np.dtype):
        if dtype.hasobject:
            raise UnsupportedBufferError(f"this {source} holds Python objects ({dtype})")
        if dtype.isbuiltin == 2:  # of ml_dtypes
            _refuse_parts_of_bytes(dtype.name, source)
        return dtype
    if not isinstance(dtype, str):
        raise UnsupportedBufferError(
            f"the elements of this {source} are {dtype}, which are no numbers; pass the data that "
            "they stand for (of keys of JAX, jax.random.key_data(keys))"
        )
    return _named(dtype, source)


@functools.cache
def _named(name: str, source: str) -> np.dtype:
    _refuse_parts_of_bytes(name, source)
    try:
        return np.dtype(name)
    except TypeError:
        pass
    try:
        extended: np.dtype = np.dtype(getattr(importlib.import_module("ml_dtypes"), name))
    except (ImportError, AttributeError) as error:
        raise UnsupportedBufferError(
            f"the elements of this {source} are {name}, which NumPy does not have: install or "
            f"upgrade the package ml_dtypes (it says: {error}), or convert them first"
        ) from error
    return extended


def _refuse_parts_of_bytes(name: str, source: str) -> None:
    if _BELOW_A_BYTE.fullmatch(name):
        raise UnsupportedBufferError(
            f"the elements of this {source} are {name}, several to a byte; convert them first"
        )
