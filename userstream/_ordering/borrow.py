"""Borrowing buffers for the length of a block."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Final, NoReturn

from userstream import _hooks, _process, _stream, _targets, _unentered, errors
from userstream._buffers import type_name
from userstream._driver import core
from userstream._engine import held_objects, lanes
from userstream._ordering.resolver import given_lane, resolve
from userstream.errors import DeviceMismatchError, UnsupportedBufferError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from userstream._buffers.framework import Framework
    from userstream._driver.core import Use
    from userstream._engine.lane import Lane
    from userstream._ordering.ordering import Ordering
    from userstream._stream.stream import Stream
    from userstream._table import Table
    from userstream.typing import AccessMode, Producer, StreamLike

WRITE: Final = "write"
READ: Final = "read"


class Borrow:
    """The context manager that `borrow` returns; its value is the `Stream`.

    A borrow can be entered again after its end. A borrow that is never entered does nothing; its
    destructor warns.

    Examples
    --------
    >>> import userstream as us
    >>> def on_both(first, second) -> us.Borrow:
    ...     return us.borrow(first, second, name="io")
    """

    __module__ = "userstream"
    __slots__ = (
        "_activate",
        "_activation",
        "_arguments",
        "_keep",
        "_ordering",
        "_unentered",
        "_use",
        "noted",  # by an observation
    )

    mode: ClassVar[AccessMode] = "write"
    noted: object

    def __init__(
        self,
        arguments: tuple[tuple[Any, ...], Table, StreamLike | None, str | None, Producer],
        activate: bool | str | Iterable[str],
        keep: bool,
    ) -> None:
        self._arguments = arguments  # of `resolve`, the buffers first
        self._keep = keep
        self._activate = (
            activate if activate is False or isinstance(activate, (bool, str)) else _names(activate)
        )
        self._activation: _stream.activation.Activation[Any] | None = None
        self._ordering: Ordering | None = None
        self._use: Use | None = None
        try:
            unentered = _unentered.spare.pop()
        except IndexError:
            unentered = _unentered.Unentered()
        frame = sys._getframe(2)  # the caller of UserStream.borrow
        unentered.words, unentered.position = "a borrow", frame.f_lasti
        unentered.code = frame.f_code
        self._unentered: _unentered.Unentered | None = unentered

    def __repr__(self) -> str:
        # Not the repr of the buffers, which may copy them to the host.
        count = len(self._arguments[0])
        ordering = self._ordering
        state = "not entered" if ordering is None else f"on {ordering.consumer!r}"
        return f"<userstream.borrow of {count} {'buffer' if count == 1 else 'buffers'}: {state}>"

    def __reduce__(self) -> NoReturn:
        _process.refuse_copy(self, "call borrow() where the buffers are")

    def __enter__(self) -> Stream:
        unentered = self._unentered
        if unentered is not None:
            unentered.code = self._unentered = None
            _unentered.spare.append(unentered)
        if self._ordering is not None:
            raise RuntimeError("this borrow has not ended yet; call borrow() for another one")
        activation = None
        if self._activate is False:
            ordering = resolve(*self._arguments)
        else:
            # Before any edge is added: an unknown framework raises.
            frameworks = _frameworks(self._activate, self._arguments[0])
            ordering = resolve(*self._arguments)
            activation = _stream.activation.Activation(
                ordering.consumer, frameworks, ordered=ordering.producers
            )
        objects: tuple[object, ...] = ordering.buffers, ordering.owners, ordering.buffer_use
        result = core.acquire(ordering)
        if result:
            objects += (ordering.acquire(result=result),)
        # The use makes an orphan if this object is freed before its block has ended, as by an
        # exception of a signal handler at the first step of `__exit__`. Later calls then add the
        # release edges and hold the buffers.
        rest = ordering.rest
        source = ordering if rest is None or rest.thread is None else None
        use = core.use(ordering.lane, source, objects)
        if activation is not None:
            try:
                activation.__enter__()
            except BaseException:  # `__exit__` is not called if this raises
                use.ticket.end()
                raise
        self._activation = activation
        self._use = use
        self._ordering = ordering
        for listener in _hooks.borrow_entered:
            listener(self, ordering.consumer)
        return ordering.consumer

    def __exit__(  # noqa: PLR0912 -- one function: this path runs on every borrow
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        ordering, use = self._ordering, self._use
        if ordering is None or use is None:
            raise RuntimeError("this borrow was not entered")
        if _process.halted:
            _process.check_fork()
        for listener in _hooks.borrow_left:
            listener(self)
        activation = self._activation
        if ordering.rest is not None:
            ordering.check_thread()
        if activation is not None:
            activation.check_thread()
        self._ordering = self._activation = self._use = None
        failures: list[Exception] = []
        try:
            if activation is not None:
                activation.__exit__(None, None, None)
        except Exception as failure:
            failures.append(failure)
        finally:  # also if an exception of a signal handler came
            objects = use.ticket if self._keep else ordering.buffer_use
            try:
                result = core.release(ordering, objects)
                if result:
                    ordering.release(objects, result=result)
            except Exception as failure:
                failures.append(failure)
                held_objects.hold_later(use)
            except BaseException:
                # Without this the edges would be missing until the next call sweeps.
                held_objects.hold_later(use)
                raise
            if not self._keep:
                use.ticket.end()
        if failures:
            errors._report_failures(failures, error)


class ReadBorrow(Borrow):
    """A `Borrow` declared read-only for `observe`; the order is the same as for `Borrow`."""

    __slots__ = ()

    mode = READ


def reads_only(mode: AccessMode) -> bool:
    """Return whether a mode means that buffers are only read.

    Raises
    ------
    ValueError
        *mode* is neither "read" nor "write".
    """
    if isinstance(mode, str) and mode in (READ, WRITE):
        return mode == READ
    raise ValueError(
        'mode must be "read", for work that only reads the buffers, or "write", not '
        f"{_targets.text_of(mode)}"
    )


def kind_of_borrow(mode: AccessMode) -> type[Borrow]:
    """Return the class for a mode; see `reads_only`."""
    return ReadBorrow if reads_only(mode) else Borrow


def _names(activate: Iterable[str]) -> tuple[str, ...]:
    if not isinstance(activate, Iterable):
        raise TypeError(
            f"activate= takes True, the name of a framework, or several names, not {activate!r}"
        )
    # A tuple, because a borrow can be entered again and an iterator is then exhausted.
    return tuple(activate)


def _frameworks(activate: bool | str | Iterable[str], buffers: tuple[Any, ...]) -> list[Framework]:
    """Return the frameworks to activate; for `True` those of the buffers."""
    if isinstance(activate, str):
        return _stream.activation.frameworks_named([activate])
    if not isinstance(activate, bool):
        return _stream.activation.frameworks_named(activate)
    frameworks = [view.framework for view in _targets.views_in(buffers)]
    found = {framework for framework in frameworks if framework is not None}
    if not found:
        raise ValueError(
            "activate=True: none of the buffers comes from a framework whose current stream could "
            "be set; name the frameworks, or pass the stream to their functions"
        )
    return list(found)


def hand_over(
    results: Sequence[Any],
    stream: StreamLike | None,
    table: Table,
    name: str | None,
) -> None:
    """Make the frameworks' current streams wait for the stream that produced the results."""
    if stream is not None:
        given_lane(stream, "stream")  # raises for a wrong stream, also without results
    ordered: dict[int, Lane] = {}
    for view in _targets.views_in(results, named="results"):
        buffer, framework = view.buffer, view.framework
        if framework is None:
            raise UnsupportedBufferError(
                f"{type_name(buffer)} belongs to no framework with a current stream to which it "
                "could be handed over; make a stream of yours wait for the user stream"
            )
        device = view.device
        if stream is None:
            source = table.user_stream(device, name)._resolve()
        else:
            source = given_lane(stream, "stream", device)
        current, _owner = lanes.current_of(framework, device)
        if current is None:
            raise DeviceMismatchError(
                f"{framework.name} has no current stream on device {device}, where this "
                f"{type_name(buffer)} is, as its current context is on another one",
                device=device,
            )
        if current.is_same(source):
            continue
        if id(current) not in ordered:
            # The framework did not ask for a capture: its stream must not join one of ours.
            current.add_edge(source, may_join=False)
            ordered[id(current)] = current
        if framework.record_use is not None:
            framework.record_use(buffer)
