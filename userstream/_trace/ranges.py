"""NVTX ranges around what userstream does, which profilers show: ``USERSTREAM_NVTX=1``.

They are put around the methods when userstream is imported: who does not ask for them pays nothing,
and never imports ``nvtx``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from userstream._ordering import Borrow
from userstream._registry import UserStream
from userstream._stream.stream import Stream

if TYPE_CHECKING:
    from collections.abc import Callable

_DOMAIN = "userstream"
_METHODS = (
    "acquire",
    "release",
    "wait",
    "wait_all",
    "wait_for_device",
    "asnumpy",
    "asnumpy_async",
    "copyto",
)


def put() -> None:
    """Put a range around each method of these names, and around the block of a borrow."""
    nvtx = _package()
    for name in _METHODS:
        _around(nvtx, UserStream, name, name)
    _around(nvtx, Stream, "sync", "Stream.sync")
    _around_blocks(nvtx)


def _package() -> Any:
    try:
        return importlib.import_module("nvtx")
    except ImportError as error:
        raise ImportError("USERSTREAM_NVTX=1 needs the package nvtx: pip install nvtx") from error


def _around(nvtx: Any, kind: type, name: str, shown: str) -> None:
    annotate: Callable[[Any], Any] = nvtx.annotate(f"userstream.{shown}", domain=_DOMAIN)
    setattr(kind, name, annotate(vars(kind)[name]))


def _around_blocks(nvtx: Any) -> None:
    enter, leave = Borrow.__enter__, Borrow.__exit__
    begun: dict[int, Any] = {}

    def __enter__(self: Borrow) -> Stream:  # noqa: N807
        # Of the process, not of the thread: other ranges of the thread may end in the block.
        range_ = nvtx.start_range("userstream.borrow", domain=_DOMAIN)
        try:
            stream = enter(self)
        except BaseException:
            nvtx.end_range(range_)
            raise
        begun[id(self)] = range_
        return stream

    def __exit__(self: Borrow, *error: Any) -> None:  # noqa: N807
        try:
            leave(self, *error)
        finally:
            if id(self) in begun:
                nvtx.end_range(begun.pop(id(self)))

    # So that type checkers see the methods of the class.
    for name, function in (("__enter__", __enter__), ("__exit__", __exit__)):
        setattr(Borrow, name, function)
