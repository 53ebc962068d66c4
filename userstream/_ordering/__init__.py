"""Ordering the streams that produce buffers and the stream that uses the buffers.

`resolver` determines the streams. `ordering` adds the edges between the streams, or between a
stream and everything on its device. `borrow` adds edges at both ends of a block, and for results
that were produced in a block. `settings` reads the environment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from userstream import _process

if TYPE_CHECKING:
    from userstream._ordering import borrow, resolver  # noqa: F401

# Loaded with the first buffer that is ordered, which makes `import userstream` faster.
__getattr__ = _process.lazy_modules(__name__, "borrow", "resolver")
