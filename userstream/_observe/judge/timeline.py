"""The timeline of an observation: operations and waits in the order of the calls."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from .memory import ASSUMED
from .races import RecordedOperation
from .stacks import line_of, owner_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .clocks import Lane
    from .functions import Call
    from .memory import Span
    from .races import StreamFacts
    from .stacks import Stacks

READ, WRITE, EITHER = 0, 1, 2  # kinds of access on the page

_MOST_TOUCHES = 24  # of one operation: a kernel may be given a hundred buffers
_MOST_PENDING = 8  # waits of a stream without an operation after them


class Timeline:
    """The newest operations and waits, up to a given number."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._entries: deque[RecordedOperation] = deque(maxlen=room)
        self._newest: RecordedOperation | None = None
        self._count = 0

    def queued(self, operation: RecordedOperation, lane: Lane, beside: Iterable[Lane]) -> None:
        """Add an operation of a stream, with the streams that it waits for implicitly."""
        if not self._room:
            return
        self._add(operation)
        if beside or lane.pending:
            after = (each.last for each in beside if each.last > lane.last)
            operation.after = (*lane.pending, *after)
            lane.pending = ()
        lane.last = operation.entry

    def touched(self, touches: tuple[Span, ...]) -> None:
        """Add accesses to the newest operation."""
        newest = self._newest
        if newest is not None and len(newest.touches) < _MOST_TOUCHES:
            newest.touches += touches[:_MOST_TOUCHES]  # a batch has thousands

    def must_wait(self, lane: Lane, after: Iterable[int]) -> None:
        """Add entries that the next operation of a stream waits for."""
        for number in after:
            if number not in lane.pending:
                lane.pending = (*lane.pending, number)[-_MOST_PENDING:]

    def host_waited(self, call: Call, after: Iterable[int] = ()) -> None:
        """Add a call in which the host waited or learned that work has completed."""
        if not self._room:
            return
        entry = self._newest
        if entry is None or entry.entry != call.entry:
            entry = RecordedOperation(
                call.name, call.stack, call.thread, None, call.began, call.ended
            )
            self._add(entry)
            call.entry = entry.entry
        entry.waited = True
        entry.after = (*entry.after, *after)

    def _add(self, operation: RecordedOperation) -> None:
        operation.entry = self._count
        self._count += 1
        self._entries.append(operation)
        self._newest = operation

    def as_dict(
        self,
        most: int,
        stacks: Stacks,
        describe: Callable[[Lane], StreamFacts],
        thread_name: Callable[[int], str],
    ) -> dict[str, Any]:
        """Return JSON data, in which names, frames and stacks are indices into lists."""
        entries = list(self._entries)[-most:] if most else []
        first = entries[0].entry if entries else 0
        origin = min((entry.began for entry in entries), default=0)
        rows, names, told = _Places(), _Places(), _Told(stacks)
        streams: dict[Lane, tuple[Any, ...]] = {}
        made = []
        for entry in entries:
            row = -1
            if entry.lane is not None:
                if entry.lane not in streams:
                    facts = describe(entry.lane)
                    streams[entry.lane] = ("stream", facts.name, facts.handle, facts.origin)
                row = rows[streams[entry.lane]]
            made.append(
                [
                    names[entry.name],
                    row,
                    rows["thread", thread_name(entry.thread), None, ""],
                    told.stack(entry.stack),
                    entry.began - origin,
                    entry.ended - entry.began,
                    entry.waited | _is_captured(entry) << 1,
                    [number - first for number in entry.after if number >= first],
                    [
                        [start, end - start, _how(known, write=write)]
                        for start, end, write, known in entry.touches[:_MOST_TOUCHES]
                    ],
                ]
            )
        return {
            "origin": origin,
            "first": first,
            "dropped": first if entries else self._count,
            "rows": [
                {"kind": kind, "name": name, "handle": handle, "origin": origin}
                for kind, name, handle, origin in rows
            ],
            "names": list(names),
            "frames": list(told.frames),
            "stacks": list(told.stacks),
            "entries": made,
        }


def _how(known: str, *, write: bool) -> int:
    return EITHER if known == ASSUMED else WRITE if write else READ


def _is_captured(entry: RecordedOperation) -> bool:
    return entry.lane is not None and entry.lane.capture is not None


class _Places(dict[Any, int]):
    """A dictionary from values to indices; a new value gets the next index."""

    def __missing__(self, key: Any) -> int:
        place = self[key] = len(self)
        return place


class _Told:
    """The stacks in the JSON data, and their frames."""

    def __init__(self, stacks: Stacks) -> None:
        self._known = stacks
        self._places: dict[int, int] = {}
        self.frames = _Places()
        self.stacks: list[list[int]] = []

    def stack(self, index: int) -> int:
        """Return the index of a stack, adding the stack at its first use."""
        place = self._places.get(index)
        if place is None:
            stack = self._known[index]
            line = line_of(stack)
            shown = next((at for at, frame in enumerate(stack) if frame is line), -1)
            frames = [
                self.frames[frame.filename, frame.lineno, frame.name, owner_of(frame)]
                for frame in stack
            ]
            place = self._places[index] = len(self.stacks)
            self.stacks.append([shown, *frames])
        return place
