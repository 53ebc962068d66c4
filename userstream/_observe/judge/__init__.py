"""The judge: reads the log of an observation, and says which operations race.

It imports nothing but the standard library, so that a log can be judged on any machine, without
CUDA and without the program. `Judge` takes the records of a `log`: definitions go to `stacks`,
calls to `engine`, which dispatches them to `allocations`, `captures`, `copies`, `launches` and
`order`. These share `world`: `clocks`, `memory`, `declarations`, `races`,
`timeline`. What a judge has found is a `Findings`, and those of several processes are a `Report`,
which `reports` writes as files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import log
from .engine import Engine
from .findings import Findings, Process, Report
from .found import covers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .found import Race, Stall, Suppression
    from .functions import Call
    from .stalls import Hangs
    from .trials import Pair


_APART = (
    "two streams at once in memory that a caching allocator may have cut up, where one operation "
    "may reach the other's bytes: observe(allocations=True) tells"
)


class Judge:
    """The findings of one log, which is given a piece at a time.

    Parameters
    ----------
    possible : bool
        Whether `races` includes possible races.
    suppressions : sequence of dict
        The races that are not reported; see `found.read_suppressions`.
    stall : float
        The shortest call, in seconds, that counts as a stall.
    strict : bool
        Whether a host thread knows only what it has waited for itself.
    timeline : int
        The largest number of operations on the page.
    forbidden : sequence of int, optional
        Handles of streams on which the program should queue nothing, beside the legacy default
        stream; `None` if it may use all.
    """

    def __init__(
        self,
        *,
        possible: bool = False,
        suppressions: Sequence[Suppression] = (),
        stall: float = 1e-4,
        strict: bool = False,
        timeline: int = 20_000,
        forbidden: Sequence[int] | None = None,
    ) -> None:
        self.header: dict[str, Any] = {}
        self.end: str | None = None  # why the recording ended
        self.is_cut = False  # the log has no end, and gets none
        self.asked: Callable[[Any], object] = lambda _: None  # with questions of the program
        self._possible = possible
        self._suppressions = suppressions
        self._last_note = 0  # the time of the last question, or of the end
        self._not_recorded: Sequence[str] = ()  # sentences
        notes = {
            log.HEADER: self._header,
            log.NAMES: self._names,
            log.UNSEEN: self._unseen,
            log.QUESTION: self._question,
            log.END: self._ended,
        }
        self._engine = Engine(
            notes, stall=stall, strict=strict, timeline=timeline, forbidden=forbidden
        )

    def take(self, data: bytes) -> int:
        """Apply the whole records at the begin of some bytes; return how many bytes they have."""
        return self._engine.take(data)

    @property
    def number(self) -> int:
        """The number of the last record that was taken."""
        return self._engine.number

    def orders(self) -> list[Pair | int]:
        """Return the pairs that the recorder is to try, and the numbers of pairs to leave out."""
        trials = self._engine.world.trials
        orders, trials.orders = trials.orders, []
        return orders

    # -- records that are no calls ----------------------------------------------------------------

    def _header(self, call: Call) -> None:
        _, pid, monotonic, wall = call.words
        self.header = {
            **log.header_of(call.fetched[0]),
            "pid": pid,
            "monotonic": monotonic,
            "time": wall,
        }
        self._engine.world.stacks.package = self.header.get("package", "")
        self._engine.world.trials.are_made = self.header.get("confirm") == "yes"

    def _names(self, call: Call) -> None:
        world, told = self._engine.world, log.json_of(call.fetched)
        for handle, name in told.get("streams", {}).items():
            world.clocks.name_stream(int(handle), name)
        for number, name in told.get("threads", {}).items():
            world.finds.name_thread(int(number), name)

    def _unseen(self, call: Call) -> None:
        self._not_recorded = log.json_of(call.fetched)

    def _question(self, call: Call) -> None:
        self._last_note = call.ended
        self.asked(log.json_of(call.fetched))

    def _ended(self, call: Call) -> None:
        self._last_note = call.ended
        self._engine.finish()
        self.end = log.text_of(call.fetched[0])
        (without_stack,) = call.words
        if without_stack:
            self._engine.world.unseen["lines of calls with more different stacks than fit"] = (
                without_stack
            )

    # -- findings ---------------------------------------------------------------------------------

    def watched(self) -> float:
        """Return the seconds from the begin of the log to its last record."""
        began: int = self.header.get("monotonic", 0)
        return max(0, self._last_note - began, self._engine.time - began) * 1e-9

    @property
    def hangs(self) -> Hangs:
        """The reports of streams that make no progress."""
        return self._engine.hangs

    def count_races(self) -> int:
        """Return a number that grows with each new race."""
        return self._engine.world.finds.count()

    def races(self) -> tuple[Race, ...]:
        """Return the races, one for each pair of lines."""
        return tuple(race for race in self._all_races() if self._possible or not race.possible)

    def _all_races(self) -> list[Race]:
        return [
            self._engine.blocks.name(race)
            for race in self._engine.world.finds.races()
            if self._engine.blocks.are_one(race)
            and not any(covers(each, race) for each in self._suppressions)
        ]

    def stalls(self) -> tuple[Stall, ...]:
        """Return the calls in which the host waited or was held up, longest first."""
        return self._engine.stalls.found()

    def not_seen(self) -> tuple[str, ...]:
        """Return sentences that say what could not be observed."""
        world = self._engine.world
        counted = world.unseen.copy()
        are_one = self._engine.blocks.are_one
        apart = sum(race.count for race in world.finds.races() if are_one(race) is None)
        if apart:
            counted[_APART] = apart
        if self._engine.lost:
            counted["calls that came faster than they could be analyzed"] = self._engine.lost
        found = [f"{what} ({count})" for what, count in counted.items()]
        if self.header.get("stacks") == "no":
            found.append("lines: the frames of this interpreter cannot be read")
        found += self._not_recorded
        if self.is_cut:
            found.append(
                "what came after the end of this log: the program was killed, or still runs"
            )
        return tuple(found)

    def stack(self, number: int) -> tuple[Any, ...]:
        """Return the frames of a stack, by its number in the log."""
        return self._engine.world.stacks[number]

    def calls(self) -> dict[str, int]:
        """Return how often each driver function was called."""
        return dict(sorted(self._engine.counts.items()))

    def findings(self, seconds: float | None = None, *, operations: int = 0) -> Findings:
        """Return the findings as plain data.

        Parameters
        ----------
        seconds : float, optional
            How long was recorded, if the log does not tell.
        operations : int
            The largest number of operations in the timeline: the newest.
        """
        world, header = self._engine.world, self.header
        timeline = world.timeline.as_dict(
            operations, world.stacks, world.describe, world.finds.thread_name
        )
        return Findings(
            process=Process(
                pid=header.get("pid", 0),
                rank=header.get("rank"),
                command=header.get("command", ()),
                directory=header.get("directory"),
                began=header.get("time", 0),
                monotonic=header.get("monotonic", 0),
                userstream=header.get("userstream", ""),
            ),
            seconds=self.watched() if seconds is None else seconds,
            end=self.end,
            races=tuple(self._all_races()),
            stalls=self.stalls(),
            forbidden=self._engine.stalls.forbidden(),
            allowed=tuple(self._engine.stalls.allowed.items()),
            wrong_streams=self._engine.wrong_streams.found(),
            hangs=self._engine.hangs.found(),
            calls=self.calls(),
            streams=world.clocks.count_streams(),
            not_seen=self.not_seen(),
            timeline=timeline,
        )

    def report(self, seconds: float | None = None, *, operations: int = 0) -> Report:
        """Return the report of this log alone; see `findings`."""
        return Report([self.findings(seconds, operations=operations)], possible=self._possible)


def judged(
    source: log.Source, judge: Judge, progress: Callable[[], object] = lambda: None
) -> Judge:
    """Return the judge after it has taken a whole log; call `progress` after each piece of it.

    Raises
    ------
    LogError
        The log cannot be read.
    """
    for _ in log.read_log(source, judge):
        progress()
    if not judge.header:
        raise log.LogError("this log has no header")
    judge.is_cut = judge.end is None
    return judge
