"""Activation: making a stream the current stream of frameworks for a block."""

from __future__ import annotations

import sys
import threading
import warnings
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from userstream import _process, _unentered, errors
from userstream._buffers import frameworks
from userstream._engine import lanes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import TracebackType
    from typing import Self

    from userstream._buffers.framework import Framework
    from userstream._engine.lane import Lane


class Activatable(Protocol):
    """The part of a `Stream` that frameworks and this module need."""

    def __cuda_stream__(self) -> tuple[int, int]: ...
    @property
    def is_nonblocking(self) -> bool: ...
    def _resolve(self) -> Lane: ...
    def _settled(self) -> Self: ...


S = TypeVar("S", bound="Activatable")


def frameworks_named(names: Iterable[str]) -> list[Framework]:
    """Return the frameworks with these names."""
    imported = {framework.name: framework for framework in frameworks()}
    found = []
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"a framework is named by a string, not {name!r}")
        framework = imported.get(name)
        if framework is None or not framework.is_usable():
            raise _unusable(name)
        found.append(framework)
    return found


def _unusable(name: str) -> ValueError:
    known = [framework.name for framework in frameworks(imported=False)]
    if name in known:
        return ValueError(f"{name} is not imported here, or finds no GPU")
    return ValueError(
        f"{name!r} has no current stream that could be set; those that have one are "
        f"{', '.join(known)}. Pass the stream to its functions instead"
    )


def usable_frameworks() -> list[Framework]:
    """Return the frameworks that are imported and can work on every stream."""
    return [
        framework
        for framework in frameworks()
        if framework.is_usable() and not framework.needs_blocking
    ]


class _PreviousStream:
    """The previous current stream of a framework, and the function that restores it."""

    __slots__ = ("_owner", "_undo", "before", "lane")

    def __init__(
        self, lane: Lane, before: Lane | None, owner: object, undo: Callable[[], object]
    ) -> None:
        self.lane = lane
        self.before = before  # the previous stream, which restore() orders after the lane
        self._owner = owner
        self._undo: Callable[[], object] | None = undo

    def restore(self) -> None:
        """Restore the previous current stream. A call after Ctrl-C completes the rest."""
        try:
            if self._undo is not None:
                self.lane.within(self._undo_once)
        finally:
            # Add the edge even if the framework raises: memory freed in the block returns to the
            # pool. Without the edge its next owner would write while the block's work still reads.
            if self.before is not None:
                self.before.add_edge(self.lane, may_join=False)

    def _undo_once(self) -> None:
        undo, self._undo = self._undo, None  # before the call: CuPy must not pop twice
        if undo is not None:
            undo()


def of_user(stream: S, frameworks: Sequence[str]) -> Activation[S]:
    """Return the result of `Stream.activate`, which warns unless the user enters it."""
    found = frameworks_named(frameworks) if frameworks else usable_frameworks()
    activation = Activation(stream, found, means_all=not frameworks)
    activation.unentered = _unentered.armed("an activation", 2)
    return activation


class Activation(Generic[S]):
    """The context manager of `Stream.activate`.

    `ordered` lists lanes that the caller orders with this one. `means_all` is true if `frameworks`
    are all that are imported. `unentered` warns if a user never enters the block.
    """

    __slots__ = (
        "_before",
        "_frameworks",
        "_modules",
        "_ordered",
        "_stream",
        "_thread",
        "unentered",
    )

    def __init__(
        self,
        stream: S,
        frameworks: Iterable[Framework],
        ordered: Sequence[Lane] = (),
        *,
        means_all: bool = False,
    ) -> None:
        self._stream = stream
        self._frameworks = tuple(frameworks)
        for framework in self._frameworks:
            if framework.needs_blocking and stream.is_nonblocking:
                raise ValueError(
                    f"{framework.name} cannot work on {stream!r}: it relies on the legacy default "
                    "stream to wait for its own, which that does for blocking streams alone; use "
                    "one of Stream.create(device, nonblocking=False)"
                )
        self._ordered = ordered
        self._modules = len(sys.modules) if means_all else None
        self._before: list[_PreviousStream] = []
        self._thread: int | None = None
        self.unentered: _unentered.Unentered | None = None

    def __repr__(self) -> str:
        names = ", ".join(framework.name for framework in self._frameworks) or "no framework"
        return f"<userstream.Stream.activate of {self._stream!r}: {names}>"

    def __enter__(self) -> S:
        if self.unentered is not None:
            _unentered.disarm(self.unentered)
            self.unentered = None
        stream = self._stream._settled()
        if self._thread is not None:
            raise RuntimeError("this block was entered already; call activate() for another one")
        self._thread = threading.get_ident()
        try:
            for framework in self._frameworks:
                self._before.append(self._enter(framework, stream))
        except BaseException as error:  # `__exit__` is not called if this raises
            self._leave(error)
            raise
        return stream

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _process.check_fork()
        self.check_thread()
        self._leave(error)
        if error is None and self._modules not in (None, len(sys.modules)):
            late = [each.name for each in usable_frameworks() if each not in self._frameworks]
            if late:
                warnings.warn(
                    f"{' and '.join(late)} was imported after {self!r} was made, so its work in "
                    "the block went to its own current stream, which nothing orders with this one; "
                    "import it before",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def check_thread(self) -> None:
        """Raise unless this thread entered the block: current streams belong to threads."""
        if self._frameworks and threading.get_ident() != self._thread:
            raise RuntimeError(
                "a block that makes a stream current must end in the thread where it began"
            )

    def _enter(self, framework: Framework, stream: S) -> _PreviousStream:
        lane = stream._resolve()
        device = lane.device
        before, owner = lane.within(lanes.current_of, framework, device)
        if before is not None and any(map(before.is_same, (lane, *self._ordered))):
            before = None
        # Memory that was freed to the stream's arena may still be in use on the previous stream.
        if before is not None:
            lane.add_edge(before, may_join=not lane.is_shared)
        undo = lane.within(framework.activate, stream, device)
        return _PreviousStream(lane, before, owner, undo)

    def _leave(self, error: BaseException | None) -> None:
        failures: list[Exception] = []
        try:
            while self._before:
                try:
                    self._before[-1].restore()
                except Exception as failure:
                    failures.append(failure)
                self._before.pop()
        finally:
            if self._before:  # Ctrl-C interrupted the loop
                self._leave(error)
        self._thread = None
        errors._report_failures(failures, error)
