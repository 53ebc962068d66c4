"""Reports that environment variables enable: edges in the log, and NVTX ranges for profilers.

``USERSTREAM_LOG_EDGES=1`` adds a listener that logs each edge between streams.
``USERSTREAM_NVTX=1`` puts ranges around public methods as their classes are defined, and adds
listeners that begin and end a range for the block of each borrow.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any, TypeVar

from userstream import _hooks

if TYPE_CHECKING:
    from collections.abc import Callable

_Function = TypeVar("_Function")  # a bound in quotes takes as long as a module to load

_PACKAGE = os.path.dirname(__file__) + os.sep
_DOMAIN = "userstream"


def is_on(variable: str) -> bool:
    """Return whether an environment variable is neither empty nor 0."""
    return os.environ.get(variable, "") not in ("", "0")


def _nvtx() -> Any:
    try:
        return importlib.import_module("nvtx")
    except ImportError as error:
        raise ImportError("USERSTREAM_NVTX=1 needs the package nvtx: pip install nvtx") from error


_ranges: Any = _nvtx() if is_on("USERSTREAM_NVTX") else None
_begun: dict[int, Any] = {}  # the ranges of borrows, by the identity of the borrow


def ranged(name: str) -> Callable[[_Function], _Function]:
    """Return a decorator that puts an NVTX range around a function if ranges are enabled."""

    def decorate(function: _Function) -> _Function:
        if _ranges is None:
            return function
        decorated: _Function = _ranges.annotate(f"userstream.{name}", domain=_DOMAIN)(function)
        return decorated

    return decorate


def _begin_range(borrow: object, _stream: object) -> None:
    # A range of the process, not of the thread: other ranges of the thread may end in the block.
    _begun[id(borrow)] = _ranges.start_range("userstream.borrow", domain=_DOMAIN)


def _end_range(borrow: object) -> None:
    begun = _begun.pop(id(borrow), None)
    if begun is not None:
        _ranges.end_range(begun)


def _log_edge(destination: object, source: object) -> None:
    """Log an edge, with the line of the calling program."""
    import logging  # imported on first use to keep "import userstream" fast

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


if is_on("USERSTREAM_LOG_EDGES"):
    _hooks.edge_added.append(_log_edge)
if _ranges is not None:
    _hooks.borrow_entered.append(_begin_range)
    _hooks.borrow_left.append(_end_range)
