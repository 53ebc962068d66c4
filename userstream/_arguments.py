"""Checks of arguments that users pass: integers, real numbers and devices."""

from __future__ import annotations

import numbers
import operator
from typing import Any

import numpy as np
from cuda.core import Device

from userstream import _buffers, _driver


def integer(value: Any, name: str) -> int:
    """Return an argument as an `int`; raise `TypeError` for other types and for `bool`."""
    if not isinstance(value, (bool, np.bool_)):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{name} must be an integer, not {value!r}")


def real(value: Any, name: str) -> float:
    """Return an argument as a `float`; raise `TypeError` for other types and for `bool`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, not {value!r}")
    return float(value)


def device_id_of(obj: Any) -> int | None:  # any framework's device
    """Return the ordinal of a device; `None` if `obj` is not a device; raise for an invalid one."""
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
        frameworks = ", ".join(
            known.device[0] for known in _buffers.framework.KNOWN if known.device
        )
        is_short = isinstance(device, (str, bool, float))
        raise TypeError(
            'a device is an ordinal, "cuda:1", a cuda.core.Device, or a device object of '
            f"{frameworks}, not {repr(device) if is_short else _buffers.type_name(device)}"
        )
    return ordinal


def _ordinal(obj: Any) -> int | None:
    # bool is a subclass of int, but True is not a device.
    if isinstance(obj, (int, np.integer)) and not isinstance(obj, bool):
        return operator.index(obj)
    if isinstance(obj, str):  # the same strings as in PyTorch
        kind, _, index = obj.partition(":")
        if obj == "cuda":
            return _driver.contexts.current_device()
        return int(index) if kind == "cuda" and index.isdecimal() else None
    if isinstance(obj, Device):
        return int(obj.device_id)
    return _buffers.device_id_of(obj)
