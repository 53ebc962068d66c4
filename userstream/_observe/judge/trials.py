"""Trials that make suspected races happen: the attempts of the recorder, and their outcome.

The recorder holds the stream of the first operation of a pair of lines, and marks where the second
was queued (``native/holds.c``). The analysis then finds the race in this occurrence, or not: the
two may have got other memory this time. Only a race that it finds there is made to happen, or
shown to be ordered.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from .clocks import LEGACY, NODE
from .finding_types import read_report

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from .clocks import Clocks, Lane
    from .functions import Call

# Why a hold has ended, as in `native/holds.c`.
_TIMER = 0

_ENOUGH = 3  # trials in which the second waited for the first
# Nanoseconds.
_LONG = 10_000_000  # between both without a hold: the second may come after the timer
_SOON = 5_000_000  # after the first has run: the second has waited for it, and nothing else
_FAIR = 5_000_000  # in which the second would have run
_KEPT = 8  # holds
_MOST_REPORTED = 32  # as in `native/parts.h`
_HOST = -1  # in place of a stack
_NOT_SUPPORTED = 801  # by the driver


class Queued(Protocol):
    """An operation, as the analysis keeps it."""

    lane: Lane | None  # None: of the host
    stack: int
    began: int
    ended: int


class Pair(NamedTuple):
    """A pair of operations that race, for the recorder to try."""

    number: int
    first: int  # the stacks of both
    second: int  # _HOST for a write of the host
    context: int  # of the first
    stream: int  # of the second; 0 if no other thread can use it
    context_of_second: int
    adds_edge: bool  # whether the missing edge is added, to see that it orders the two


class Reported(NamedTuple):
    """A pair of lines of an earlier report that race, for the recorder to try from the start."""

    first: tuple[str, int]  # a file and a line in it
    second: tuple[str, int] | None  # None: a write of the host


def reported_pairs(path: str) -> list[Reported]:
    """Read the pairs of lines of a report as JSON; raise `ValueError` for another file."""
    pairs = read_report(
        path, lambda report: [_reported(race) for race in (*report["races"], *report["possible"])]
    )
    return list(dict.fromkeys(filter(None, pairs)))[:_MOST_REPORTED]


def _reported(race: Any) -> Reported | None:
    """Return the lines of a race, or `None` if its first operation cannot be held by its line."""
    first, second = race["first"], race["second"]
    if _is_of_host(first) or not first["line"]:
        return None
    if _is_of_host(second):
        return Reported(_place(first), None)
    return Reported(_place(first), _place(second)) if second["line"] else None


def _is_of_host(operation: Any) -> bool:
    return operation["stream"] == "the host" and operation["handle"] is None


def _place(operation: Any) -> tuple[str, int]:
    file, line, _ = operation["line"]
    return str(file), int(line)


class Trial:
    """The outcome of the trials of a pair of lines."""

    __slots__ = (
        "_armed",
        "confirmed",
        "duration",
        "gap",
        "holds",
        "number",
        "ordered",
        "refusal",
        "remedied",
    )

    def __init__(self, number: int) -> None:
        self.number = number
        self.holds = [0, 0]  # without and with the missing edge
        self.confirmed = False  # the second ran before the first
        self.ordered = 0  # trials in which the second waited for the first
        self.remedied: bool | None = None  # whether the missing edge orders the two
        # Nanoseconds in the last turn without a hold: between both, and in the call of the second.
        self.gap = self.duration = 1 << 62
        self.refusal = 0  # what the driver returned when the stream was to be held
        self._armed: Pair | None = None  # what the recorder tries

    def wants(self, pair: Pair) -> bool:
        """Return whether a pair should be tried and is not being tried yet."""
        if pair == self._armed:
            return False
        self._armed = pair
        return True

    @property
    def verdict(self) -> bool | None:
        """True if the race was made to happen; `None` while neither is shown."""
        if self.confirmed:
            return True
        return False if self.ordered >= _ENOUGH else None

    @property
    def undecided(self) -> str:
        """The reason of a verdict of `None`, for a report; empty for other verdicts."""
        if self.verdict is not None:
            return ""
        if self.holds[0]:
            count = self.holds[0]
            trials = "a trial" if count == 1 else f"{count} trials"
            return f"{trials} without a result (other memory, or a wait in between)"
        if self.refusal == _NOT_SUPPORTED:
            return "the device has no stream memory operations, so its streams cannot be held"
        if self.refusal:
            return f"its stream could not be held: the driver returned {self.refusal}"
        return (
            "the line of the first operation did not run again after the race was found (see "
            "--confirm-from), or its stream could not be held"
        )


class _Mark(NamedTuple):
    lane: Lane
    time: int  # the number of the second operation there


class _Hold:
    """A stream that was held once."""

    def __init__(self, call: Call, lane: Lane) -> None:
        self.number, self.pair, _, _, self.since, adds_edge = call.words
        self.adds_edge = bool(adds_edge)
        self.lane = lane
        self.marks: list[_Mark] = []
        self.suspects: list[tuple[Trial, Queued, int]] = []
        self.ended = 0  # nanoseconds; 0 while the stream is held
        self.is_late = False  # the timer has released it
        self.passed = 0  # marks
        self.waited = 0  # nanoseconds since the last mark
        self.canary = self.changed = self.has_edge = False
        self.tried: set[int] = set()  # trials whose first operation it held
        self.counted: set[int] = set()  # of them, those whose second operation waited for it

    def holds(self, operation: Queued) -> bool:
        """Return whether an operation was held."""
        return (
            operation.lane is self.lane
            and self.since <= operation.began
            and (not self.ended or operation.began <= self.ended)
        )


class Trials:
    """The trials of all pairs of lines.

    Parameters
    ----------
    clocks : Clocks
        Those of the analysis.
    """

    def __init__(self, clocks: Clocks) -> None:
        # For the recorder: pairs to try, and numbers of those that need no further trial.
        self.orders: list[Pair | int] = []
        self.are_made = False  # the recorder may hold streams
        self.most_of_pair = 0  # holds to make the race happen, and as many to order it
        self._clocks = clocks
        self._trials: dict[int, Trial] = {}
        self._of_lines: dict[Hashable, Trial] = {}
        self._holds: deque[_Hold] = deque(maxlen=_KEPT)

    def of(self, lines: Hashable) -> Trial:
        """Return the trial of a pair of lines."""
        trial = self._of_lines.get(lines)
        if trial is None:
            trial = self._of_lines[lines] = Trial(len(self._trials) + 1)
            self._trials[trial.number] = trial
        return trial

    def was_held(self, began: int, ended: int) -> bool:
        """Return whether a stream was held at some time between two times."""
        return any(
            each.since < ended and (not each.ended or began < each.ended) for each in self._holds
        )

    def suspect(self, trial: Trial, first: Queued, second: Queued, *, is_edge: bool) -> None:
        """Add a race that was found; `is_edge` means that an edge would order both operations."""
        hold = next((each for each in self._holds if each.holds(first)), None)
        if hold is None:
            trial.gap = second.began - first.ended
            trial.duration = second.ended - second.began
            self._want(trial, first, second, adds_edge=trial.confirmed and is_edge)
        else:
            time = 0 if second.lane is None else second.lane.time
            hold.suspects.append((trial, second, time))
            if hold.ended:
                self._learn(hold, *hold.suspects.pop())

    def _want(
        self,
        trial: Trial,
        first: Queued,
        second: Queued,
        *,
        adds_edge: bool,
    ) -> None:
        one, other = first.lane, second.lane
        if trial.verdict is False or (trial.confirmed and not adds_edge):
            return
        if trial.remedied is not None or trial.holds[adds_edge] >= self.most_of_pair:
            return
        if one is None or not _can_be_held(one) or first.stack < 0:
            return
        if other is None:
            pair = Pair(trial.number, first.stack, _HOST, one.context, 0, 0, adds_edge=False)
        elif second.stack < 0 or other.kind == NODE or other.capture is not None:
            return
        else:
            stream = {LEGACY: 1, "stream": other.handle}.get(other.kind, 0)
            pair = Pair(
                trial.number,
                first.stack,
                second.stack,
                one.context,
                stream,
                other.context,
                adds_edge,
            )
        if trial.wants(pair):
            self.orders.append(pair)

    # -- records of the recorder ------------------------------------------------------------------

    def held(self, call: Call) -> None:
        """Record that a stream is held from now on."""
        _, number, stream, context, _, adds_edge = call.words
        trial = self._trials.get(number)
        if trial is not None:
            trial.holds[adds_edge] += 1
        self._holds.appendleft(_Hold(call, self._clocks.lane(stream, context, call.thread)))

    def not_held(self, call: Call) -> None:
        """Record that the driver did not hold a stream."""
        number, status = call.words
        if number in self._trials:
            self._trials[number].refusal = status

    def marked(self, call: Call) -> None:
        """Record that the second operation was queued."""
        number, stream, context = call.words
        lane = self._clocks.lane(stream, context, call.thread)
        for hold in self._holds:
            if hold.number == number:
                hold.marks.append(_Mark(lane, lane.time))

    def released(self, call: Call) -> None:
        """Record that a stream was released, and the operations that had run by then."""
        number, why, ended, passed, waited, canary, changed, has_edge = call.words
        hold = next((each for each in self._holds if each.number == number), None)
        if hold is None:
            return
        hold.ended, hold.passed, hold.waited = ended, passed, waited
        hold.is_late = why == _TIMER
        hold.canary, hold.changed, hold.has_edge = bool(canary), bool(changed), bool(has_edge)
        for suspect in hold.suspects:
            self._learn(hold, *suspect)
        hold.suspects.clear()

    def _learn(self, hold: _Hold, trial: Trial, second: Queued, time: int) -> None:
        """Learn from a race whose first operation was held."""
        if hold.pair in self._trials:
            self._learn_from(hold, trial, second, time)
            return
        # A pair of an earlier report: the usual trials go on from a hold that shows nothing.
        if trial.number not in hold.tried:
            hold.tried.add(trial.number)
            trial.holds[0] += 1
        self._learn_from(hold, trial, second, time)
        if trial.verdict is not None or trial.number not in hold.counted:
            self.orders.append(hold.pair)

    def _learn_from(self, hold: _Hold, trial: Trial, second: Queued, time: int) -> None:
        queued = [each.lane is second.lane and time <= each.time for each in hold.marks]
        if hold.changed if second.lane is None else any(queued[: hold.passed]):
            if not hold.adds_edge:
                self._happened(trial)
            elif hold.has_edge:
                self._was_remedied(trial, by_edge=False)
        elif not hold.is_late or second.lane is None or trial.number in hold.counted:
            return
        elif _has_waited(hold, second, trial, queued):
            hold.counted.add(trial.number)
            if hold.has_edge:
                self._was_remedied(trial, by_edge=True)
            elif not hold.adds_edge:
                trial.ordered += 1
                if trial.ordered == _ENOUGH:
                    self.orders.append(trial.number)

    def _happened(self, trial: Trial) -> None:
        if not trial.confirmed:
            trial.confirmed = True
            self.orders.append(trial.number)

    def _was_remedied(self, trial: Trial, *, by_edge: bool) -> None:
        trial.remedied = by_edge
        self.orders.append(trial.number)


def _has_waited(hold: _Hold, second: Queued, trial: Trial, queued: Sequence[bool]) -> bool:
    """Return whether the second operation has waited for the first, which the timer released.

    `queued` says for each mark whether the second operation was queued before it.
    """
    if second.began > hold.ended:  # the host has waited: it would have come here earlier
        return trial.gap < _LONG and second.began - hold.ended < _SOON
    # Nothing else on its stream was held up, and it was; so was the host in a call that waits.
    if any(queued):
        return hold.canary and hold.waited >= _FAIR and queued[0]
    waited = hold.ended - second.began
    return hold.canary and waited >= trial.duration + _FAIR and second.ended > hold.ended


def _can_be_held(lane: Lane) -> bool:
    return lane.kind != NODE and lane.capture is None and not lane.held_by
