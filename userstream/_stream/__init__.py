"""`Stream`, and functions on its lane: capture, memory operations, attributes and others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from userstream import _process

if TYPE_CHECKING:
    from userstream._stream import (  # noqa: F401
        activation,
        attributes,
        capture,
        events,
        host_functions,
        memory_operations,
    )

# Loaded when they are used first, which makes `import userstream` quicker.
__getattr__ = _process.lazy_modules(
    __name__,
    "activation",
    "attributes",
    "capture",
    "events",
    "host_functions",
    "memory_operations",
)
