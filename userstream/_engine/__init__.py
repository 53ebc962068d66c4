"""The engine: lanes, the edges between lanes, host waits, futures and held objects."""

from __future__ import annotations

from typing import TYPE_CHECKING

from userstream import _process

if TYPE_CHECKING:
    from userstream._engine import futures  # noqa: F401

# Imported on first use to keep `import userstream` fast.
__getattr__ = _process.lazy_modules(__name__, "futures")
