"""The CUDA driver: the only package that calls `cuda.bindings.driver`.

Callers name the subject and the function: ``_driver.streams.stream_id(handle)``. Every function
raises `DriverError` (or a more telling error) instead of returning a status, and changes the
caller's current context and capture mode for its own call at most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from userstream import _process
from userstream._driver import (  # noqa: F401 -- the subjects
    account,
    contexts,
    core,
    library,
    status,
    streams,
)

if TYPE_CHECKING:
    from userstream._driver import (  # noqa: F401
        capture,
        copies,
        host_pools,
        pointers,
        values,
    )

# Loaded at their first use, which makes `import userstream` quicker.
__getattr__ = _process.lazy_modules(
    __name__,
    "capture",
    "copies",
    "host_pools",
    "pointers",
    "values",
)
