"""Copies of buffers: to the host, from it, and between devices.

`copies` has the calls and the general path, `fast_path` the one fast path. `operands` describes the
arrays, `layout` how the bytes of an array are moved. `pinned` has the cache of page-locked memory
and new arrays there, `staging` the lane of a copy and the chunks for large arrays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from userstream import _process

if TYPE_CHECKING:
    from userstream._copies import copies, pinned, staging  # noqa: F401

# Loaded with the first copy, which makes `import userstream` faster.
__getattr__ = _process.lazy_modules(__name__, "copies", "pinned", "staging")
