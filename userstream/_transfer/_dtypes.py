"""From what a framework calls the type of its elements to NumPy's."""

from __future__ import annotations

import functools
import importlib
import re

import numpy as np

from userstream.errors import UnsupportedBufferError

_OF_ML_DTYPES = re.compile(r"bfloat16|float8_\w+")
_BELOW_A_BYTE = re.compile(r"u?int[124]|float[46]_\w+")  # several elements to a byte on the device


def numpy_dtype(dtype: np.dtype | str | None, source: str) -> np.dtype:
    """Return the type of the elements of a buffer that the rule `source` described."""
    if dtype is None:
        raise UnsupportedBufferError(f"this {source} does not tell the type of its elements")
    if isinstance(dtype, np.dtype):
        if dtype.hasobject:
            raise UnsupportedBufferError(f"this {source} holds Python objects ({dtype})")
        if dtype.isbuiltin == 2 and _BELOW_A_BYTE.fullmatch(dtype.name):  # of ml_dtypes
            raise _no_dtype(dtype.name, source)
        return dtype
    return _named(dtype, source)


@functools.cache
def _named(name: str, source: str) -> np.dtype:
    if not _OF_ML_DTYPES.fullmatch(name):
        try:
            return np.dtype(name)
        except TypeError:
            raise _no_dtype(name, source) from None
    try:
        extended: np.dtype = np.dtype(getattr(importlib.import_module("ml_dtypes"), name))
    except (ImportError, AttributeError) as error:
        raise UnsupportedBufferError(
            f"the elements of this {source} are {name}, which NumPy has not: install a package "
            f"ml_dtypes that has it (pip install -U ml_dtypes), or convert them first ({error})"
        ) from error
    return extended


def _no_dtype(name: str, source: str) -> UnsupportedBufferError:
    return UnsupportedBufferError(
        f"the elements of this {source} are {name}, which no NumPy type is like; convert them first"
    )
