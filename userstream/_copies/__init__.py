"""Copies of buffers: to the host, from it, and between devices.

`copies` has `asnumpy` and `copyto`, `queued` what they are without a wait, and `host_arrays` makes
arrays for them. `operands` says what is copied, `arrays` and `layout` how that lies in memory.
`ordered` orders a copy with the producers of both sides, and `copy_lane` is the stream that it is
queued on, and until when. `pinned` has the page-locked memory that copies go to, and `staging`
takes what does not fit there through chunks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from userstream import _process

if TYPE_CHECKING:
    from userstream._copies import copies, host_arrays, pinned, queued, short, staging  # noqa: F401

# Loaded with the first copy, which makes `import userstream` quicker.
__getattr__ = _process.lazy_modules(
    __name__,
    "copies",
    "host_arrays",
    "pinned",
    "queued",
    "short",
    "staging",
)
