"""`Stream`, and modules of functions that take its lane: capture, raw memory, attributes ..."""

from __future__ import annotations

from typing import TYPE_CHECKING

from userstream import _late

if TYPE_CHECKING:
    from userstream._stream import attributes, host_functions, operations, raw_memory  # noqa: F401

# Loaded when they are used first, which makes `import userstream` quicker.
__getattr__ = _late.modules(
    __name__,
    "attributes",
    "host_functions",
    "operations",
    "raw_memory",
)
