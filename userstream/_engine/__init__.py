"""The engine: lanes, what orders them, and what waits for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from userstream import _process

if TYPE_CHECKING:
    from userstream._engine import parts  # noqa: F401

# Loaded when it is used first, which makes `import userstream` quicker.
__getattr__ = _process.lazy_modules(__name__, "parts")
