"""Borrowing buffers for the length of a block."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from userstream import _hooks, _process, _stream, _targets, _trace, _unentered, errors
from userstream._driver import core
from userstream._engine import held_objects
from userstream._ordering.ordering import ordering_of_lanes, usual_lanes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from userstream._buffers._framework import Framework
    from userstream._driver.core import Use
    from userstream._ordering.ordering import Lanes, Ordering
    from userstream._stream.stream import Stream
    from userstream.typing import AccessMode, Producer, StreamLike


class Borrow:
    """The context manager that `borrow` returns; its value is the `Stream`.

    It can be entered again after its end. One that is never entered does nothing, and warns of it.

    Examples
    --------
    >>> import userstream as us
    >>> def on_both(first, second) -> us.Borrow:
    ...     return us.borrow(first, second, name="io")
    """

    __slots__ = (
        "_activate",
        "_activation",
        "_asked",
        "_keep",
        "_order",
        "_ordering",
        "_unentered",
        "_use",
        "_user_streams",
        "noted",  # by an observation
    )

    mode: ClassVar[AccessMode] = "write"
    noted: object

    def __init__(
        self,
        order: Callable[..., Ordering],
        user_streams: Mapping[int, Stream] | None,
        asked: tuple[tuple[Any, ...], StreamLike | None, Producer, str | None],
        activate: bool | str | Iterable[str],
        keep: bool,
    ) -> None:
        self._order = order
        self._asked = asked  # the buffers, who uses them, who produces them, and a name
        self._keep = keep
        self._activate = (
            activate if activate is False or isinstance(activate, (bool, str)) else _names(activate)
        )
        # By device, if one of these uses the buffers and nothing else is asked for.
        self._user_streams = user_streams if keep and activate is False else None
        self._ordering: Ordering | Lanes | None = None
        self._use: Use | None = None
        try:
            unentered = _unentered.spare.pop()
        except IndexError:
            unentered = _unentered.Unentered()
        frame = sys._getframe(2)  # that called UserStream.borrow
        unentered.words, unentered.position = "a borrow", frame.f_lasti
        unentered.code = frame.f_code
        self._unentered: _unentered.Unentered | None = unentered

    def __repr__(self) -> str:
        # Not the buffers, whose own may copy them to the host.
        count = len(self._asked[0])
        ordering = self._ordering
        if ordering is None:
            state = "not entered"
        else:
            state = f"on {ordering[0] if isinstance(ordering, tuple) else ordering.consumer!r}"
        return f"<userstream.borrow of {count} {'buffer' if count == 1 else 'buffers'}: {state}>"

    def __reduce__(self) -> NoReturn:
        _process.refuse_copy(self, "call borrow() where the buffers are")

    @_trace.begins_range
    def __enter__(self) -> Stream:
        unentered = self._unentered
        if unentered is not None:
            unentered.code = self._unentered = None
            _unentered.spare.append(unentered)
        if self._ordering is not None:
            raise RuntimeError("this borrow has not ended yet; call borrow() for another one")
        asked, found = self._asked, None
        if self._user_streams is not None:
            found = usual_lanes(asked[0], asked[2], self._user_streams)
        if found is None:
            return self._enter()
        consumer, lane, source, owner = found
        if source is not None:
            result = core.order(source, lane)  # as `add_edge`, without a call more
            if result:
                lane.add_checked_edge(source, result, may_join=False)
        # If this object goes before its block has ended, a later call does what the end would have
        # done: a Ctrl-C may come at the very first step of `__exit__`.
        self._use = core.use(lane, source, (asked[0], owner))
        self._ordering = found
        if _hooks.borrow_entered:
            self._report_entry(consumer)
        return consumer

    def _enter(self) -> Stream:
        activation = None
        if self._activate is False:
            ordering = self._order(*self._asked)
        else:  # what may be refused comes first
            frameworks = _frameworks(self._activate, self._asked[0])
            ordering = self._order(*self._asked)
            activation = _stream.activation.Activation(
                ordering.consumer, frameworks, ordered=ordering.producers
            )
        kept = ordering.acquire()
        use = core.use(ordering.lane, None, (ordering.buffers, kept, ordering.pending))
        if ordering.thread is None:
            use.ticket.order = ordering.release
        if activation is not None:
            try:
                activation.__enter__()
            except BaseException:  # `__exit__` is not called if this raises
                use.ticket.end()
                raise
        self._activation = activation
        self._use = use
        self._ordering = ordering
        if _hooks.borrow_entered:
            self._report_entry(ordering.consumer)
        return ordering.consumer

    def _report_entry(self, stream: Stream) -> None:
        for listener in _hooks.borrow_entered:
            listener(self, stream)

    @_trace.ends_range
    def __exit__(
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
        if not isinstance(ordering, tuple):
            self._exit(ordering, use, error)
            return
        self._ordering = self._use = None
        _, lane, source, _ = ordering
        try:
            result = core.finish(lane, source, use.ticket)
            if result == core.DUE:
                held_objects.sweep_if_due(lane)
            elif result:
                buffers, _, producer, _ = self._asked
                ordering_of_lanes(ordering, buffers, producer).release(use.ticket, result=result)
        except Exception as failure:
            held_objects.hold_later(use)
            errors._report_failures([failure], error)
        except BaseException:  # Ctrl-C; what is held may not be watched yet
            held_objects.hold_later(use)
            raise

    def _exit(self, ordering: Ordering, use: Use, error: BaseException | None) -> None:
        activation = self._activation
        if ordering.thread is not None:
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
        finally:  # also if Ctrl-C came
            try:
                ordering.release(use.ticket if self._keep else ordering.pending)
            except Exception as failure:
                failures.append(failure)
                if self._keep:
                    held_objects.hold_later(use)
            if not self._keep:
                use.ticket.end()
        if failures:
            errors._report_failures(failures, error)


def _names(activate: Iterable[str]) -> tuple[str, ...]:
    if not isinstance(activate, Iterable):
        raise TypeError(
            f"activate= takes True, the name of a framework, or several names, not {activate!r}"
        )
    return tuple(activate)  # an iterator gives them once, and a borrow can be entered again


def _frameworks(activate: bool | str | Iterable[str], buffers: tuple[Any, ...]) -> list[Framework]:
    """Return the frameworks to activate; for `True` those of the buffers."""
    if isinstance(activate, str):
        return _stream.activation.called([activate])
    if not isinstance(activate, bool):
        return _stream.activation.called(activate)
    frameworks = [view.framework for view in _targets.views_in(buffers)]
    found = {framework for framework in frameworks if framework is not None}
    if not found:
        raise ValueError(
            "activate=True: none of the buffers comes from a framework whose current stream could "
            "be set; name the frameworks, or pass the stream to their functions"
        )
    return list(found)
