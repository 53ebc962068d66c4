"""What the environment can make userstream report: edges in the log, NVTX ranges for profilers.

``USERSTREAM_LOG_EDGES=1`` adds a listener that logs each edge between streams.
``USERSTREAM_NVTX=1`` puts ranges around public methods as their classes are defined.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from typing import TYPE_CHECKING, Any, TypeVar

from userstream import _hooks

if TYPE_CHECKING:
    from collections.abc import Callable

_Function = TypeVar("_Function", bound="Callable[..., Any]")

_PACKAGE = os.path.dirname(__file__) + os.sep
_DOMAIN = "userstream"


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "") not in ("", "0")


def _nvtx() -> Any:
    try:
        return importlib.import_module("nvtx")
    except ImportError as error:
        raise ImportError("USERSTREAM_NVTX=1 needs the package nvtx: pip install nvtx") from error


_ranges = _nvtx() if _is_on("USERSTREAM_NVTX") else None
_begun: dict[int, Any] = {}  # the ranges of borrows, by the identity of the borrow


def ranged(name: str) -> Callable[[_Function], _Function]:
    """Return a decorator that puts a range around a function if the environment asks for it."""

    def decorate(function: _Function) -> _Function:
        if _ranges is None:
            return function
        decorated: _Function = _ranges.annotate(f"userstream.{name}", domain=_DOMAIN)(function)
        return decorated

    return decorate


def begins_range(enter: _Function) -> _Function:
    """Begin a range in the ``__enter__`` of a borrow if the environment asks for it."""
    if _ranges is None:
        return enter

    @functools.wraps(enter)
    def entered(borrow: Any) -> Any:
        # Ranges of the process, not of the thread: other ranges of the thread may end in the block.
        begun = _ranges.start_range("userstream.borrow", domain=_DOMAIN)
        try:
            stream = enter(borrow)
        except BaseException:
            _ranges.end_range(begun)
            raise
        _begun[id(borrow)] = begun
        return stream

    return entered  # type: ignore[return-value]  # of the same signature


def ends_range(leave: _Function) -> _Function:
    """End the range of `begins_range` after the ``__exit__`` of the borrow."""
    if _ranges is None:
        return leave

    @functools.wraps(leave)
    def left(borrow: Any, *error: Any) -> None:
        try:
            leave(borrow, *error)
        finally:
            if id(borrow) in _begun:
                _ranges.end_range(_begun.pop(id(borrow)))

    return left  # type: ignore[return-value]  # of the same signature


def _log_edge(destination: object, source: object) -> None:
    """Log an edge, with the line outside of the package that asked for it."""
    import logging  # only programs that log edges pay for it

    logger = logging.getLogger("userstream")
    if not logger.isEnabledFor(logging.DEBUG):
        return
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    logger.debug(
        "%s waits for %s, at %s:%d",
        destination,
        source,
        frame.f_code.co_filename,
        frame.f_lineno,
    )


if _is_on("USERSTREAM_LOG_EDGES"):
    _hooks.edge_added.append(_log_edge)
