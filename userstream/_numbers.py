"""Numbers that a user passes. NumPy's are such; `True` is none."""

from __future__ import annotations

import numbers
import operator
from typing import Any

import numpy as np


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
