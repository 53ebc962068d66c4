"""`Stream`, and the functions on lanes by which its methods are implemented."""

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

# Imported on first use to keep `import userstream` fast.
__getattr__ = _process.lazy_modules(
    __name__,
    "activation",
    "attributes",
    "capture",
    "events",
    "host_functions",
    "memory_operations",
)
