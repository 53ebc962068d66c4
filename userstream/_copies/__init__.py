"""Copies of buffers: to the host, from it, and between devices.

`copies` has `asnumpy` and `copyto`. `operands` says what is copied, `arrays` and `layout` how that
lies in memory, `pinned` has the page-locked memory that copies go to, and `staging` takes what does
not fit there through chunks. `copy_lane` is the stream that a copy is queued on, and until when.
"""
