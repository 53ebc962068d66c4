"""`Stream`, and modules of functions that take its lane: capture, raw memory, attributes ..."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

    from userstream._stream import attributes, host_functions, operations, raw_memory  # noqa: F401

# Loaded when they are used first, which makes `import userstream` quicker.
_LATE = frozenset(("attributes", "host_functions", "operations", "raw_memory"))


def __getattr__(name: str) -> ModuleType:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")  # which makes it an attribute
