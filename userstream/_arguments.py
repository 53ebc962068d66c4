"""Check arguments that users pass: integers, real numbers and devices."""

from __future__ import annotations

import numbers
import operator
from typing import Any

import numpy as np
from cuda.core import Device

from userstream import _buffers, _driver


def integer(value: Any, what: str) -> int:
    """Return an argument as an `int`, or raise a `TypeError` that names it."""
    if not isinstance(value, (bool, np.bool_)):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{what} must be an integer, not {value!r}")


def real(value: Any, what: str) -> float:
    """Return an argument as a `float`, or raise a `TypeError` that names it."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{what} must be a number, not {value!r}")
    return float(value)


def device_id_of(obj: Any) -> int | None:  # any framework's device
    """Return the ordinal of a device object; `None` if `obj` is not a device.

    Raises
    ------
    InvalidDeviceError
        `obj` is a device, but not a CUDA device of this process.
    """
    ordinal = _ordinal(obj)
    if ordinal is not None:
        _driver.library.check_device(ordinal)
    return ordinal


def device_id_or_current(device: Any) -> int:
    """Return the ordinal of a device; `None` means the calling thread's current device."""
    _driver.library.ensure()
    if device is None:
        return _driver.contexts.current_device()
    ordinal = device_id_of(device)
    if ordinal is None:
        raise TypeError(
            'a device is an ordinal, "cuda:1", a cuda.core.Device, or the device object of torch, '
            f"CuPy, JAX, Warp or TVM FFI, not a {type(device).__name__}"
        )
    return ordinal


def _ordinal(obj: Any) -> int | None:
    # bool is a subclass of int, but True is not a device.
    if isinstance(obj, (int, np.integer)) and not isinstance(obj, bool):
        return operator.index(obj)
    if isinstance(obj, str):  # the same strings as in torch
        return _named(obj)
    if isinstance(obj, Device):
        return int(obj.device_id)
    return _buffers.device_id_of(obj)


def _named(device: str) -> int | None:
    kind, _, index = device.partition(":")
    if device == "cuda":
        return _driver.contexts.current_device()
    return int(index) if kind == "cuda" and index.isdecimal() else None
