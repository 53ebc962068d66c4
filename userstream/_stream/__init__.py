"""`Stream`, and modules of functions that take its lane: capture, raw memory, attributes ..."""

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
        operations,
        raw_memory,
    )

# Loaded when they are used first, which makes `import userstream` quicker.
__getattr__ = _process.lazy_modules(
    __name__,
    "activation",
    "attributes",
    "capture",
    "events",
    "host_functions",
    "operations",
    "raw_memory",
)
