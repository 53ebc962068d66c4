"""The judge: reads the log of an observation, and says which operations race.

It imports nothing but the standard library, so that a log can be judged on any machine, without
CUDA and without the program. `Judge` takes the blocks of a `log`: definitions go to `stacks` and
`world`, records to `engine`, which dispatches them to `allocations`, `captures`, `copies`,
`launches` and `order`. These share `world`: `clocks`, `memory`, `declarations`, `races`,
`timeline`. Findings are in `found`, their page in `page`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import log
from .blocks import Blocks, read_blocks
from .engine import Engine
from .found import Race, covers
from .functions import read_log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from .found import Stall, Suppression

_SHOWN = 20  # stalls in the report
_VERSION = 1  # of the JSON document


class Judge:
    """The findings of one log, which is given block by block.

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
    """

    def __init__(
        self,
        *,
        possible: bool = False,
        suppressions: Sequence[Suppression] = (),
        stall: float = 1e-4,
        strict: bool = False,
        timeline: int = 20_000,
    ) -> None:
        self.header: dict[str, Any] = {}
        self.blocks = Blocks()  # of the caching allocators
        self.seconds: float | None = None  # how long was recorded, once that is known
        self.end: str | None = None  # why the recording ended
        self._possible = possible
        self._suppressions = suppressions
        self._options: dict[str, Any] = {"stall": stall, "strict": strict, "timeline": timeline}
        self.not_recorded: Sequence[str] = ()  # sentences
        self._engine = Engine({}, **self._options)
        self._takers: dict[int, Callable[[log.Block], None]] = {
            log.HEADER: self._header,
            log.CODES: self._codes,
            log.STACKS: self._stacks,
            log.FACTS: self._facts,
            log.THREADS: self._threads,
            log.RECORDS: self._records,
            log.BLOCKS: self._blocks,
            log.UNSEEN: self._not_recorded,
            log.END: self._ended,
        }

    def take(self, block: log.Block) -> None:
        """Apply one block of the log; a block of an unknown type changes nothing."""
        taker = self._takers.get(block.type)
        if taker is not None:
            taker(block)

    def finish(self) -> None:
        """Report results of copies that the host was never seen to wait for."""
        self._engine.finish()

    # -- blocks -----------------------------------------------------------------------------------

    def _header(self, block: log.Block) -> None:
        self.header = block.json()
        functions = log.read_functions(self.header["functions"])
        self._engine = Engine(functions, **self._options)

    def about(self) -> str:
        """Return which process and command the log is of."""
        rank = self.header.get("rank")
        of_rank = "" if rank is None else f", rank {rank}"
        return f"process {self.header['pid']}{of_rank}, {' '.join(self.header['command'])}"

    def watched(self) -> float:
        """Return for how many seconds was recorded, as far as the log tells."""
        if self.seconds is not None:
            return self.seconds
        began: int = self.header.get("monotonic_ns", 0)
        return max(0, self._engine.time - began) * 1e-9

    def _codes(self, block: log.Block) -> None:
        for code in log.read_codes(block):
            self._engine.world.stacks.define_code(code)

    def _stacks(self, block: log.Block) -> None:
        for number, frames in log.read_stacks(block):
            self._engine.world.stacks.define_stack(number, frames)

    def _facts(self, block: log.Block) -> None:
        world, told = self._engine.world, block.json()
        world.names.update(_by_number(told["streams"]))
        world.primary_devices.update(_by_number(told["devices"]))
        world.primaries.update(_by_number(told["primaries"]))
        for number, name in _by_number(told["threads"]).items():
            world.finds.threads.setdefault(number, name)

    def _threads(self, block: log.Block) -> None:
        self._engine.world.clocks.forget_ended_threads(frozenset(block.json()))

    def _records(self, block: log.Block) -> None:
        self._engine.take(read_log(block.data))

    def _blocks(self, block: log.Block) -> None:
        self.blocks = read_blocks(block)

    def _not_recorded(self, block: log.Block) -> None:
        self.not_recorded = block.json()

    def _ended(self, block: log.Block) -> None:
        told = block.json()
        self.seconds, self.end = told["seconds"], told["reason"]

    # -- findings ---------------------------------------------------------------------------------

    def count_races(self) -> int:
        """Return a number that grows with each new race."""
        return self._engine.world.finds.count()

    def races(self) -> tuple[Race, ...]:
        """Return the races, one for each pair of lines."""
        return tuple(race for race in self._all_races() if self._possible or not race.possible)

    def _all_races(self) -> list[Race]:
        return [
            self.blocks.name(race)
            for race in self._engine.world.finds.races()
            if not any(covers(each, race) for each in self._suppressions)
        ]

    def stalls(self) -> tuple[Stall, ...]:
        """Return the calls in which the host waited or was held up, longest first."""
        return tuple(self._engine.world.finds.stalls())

    def not_seen(self) -> tuple[str, ...]:
        """Return sentences that say what could not be observed."""
        counted = self._engine.world.unseen.copy().items()
        return (*(f"{what} ({count})" for what, count in counted), *self.not_recorded)

    def stack(self, number: int) -> tuple[Any, ...]:
        """Return the frames of a stack, by its number in the log."""
        return self._engine.world.stacks[number]

    def calls(self) -> dict[str, int]:
        """Return how often each driver function was called."""
        return dict(sorted(self._engine.counts.items()))

    def report(self, seconds: float) -> str:
        """Return the findings as text."""
        races, stalls, unseen = self.races(), self.stalls(), self.not_seen()
        calls = sum(self._engine.counts.values())
        streams = self._engine.world.clocks.count_streams()
        found = f"{_plural(len(races), 'race')}, {_plural(len(stalls), 'stall')}"
        on = f"{_plural(calls, 'driver call')} on {_plural(streams, 'stream')}"
        lines = [f"observed {seconds:.3f} s, {on}: {found}", *(f"\n{race}" for race in races)]
        if stalls:
            lines.append("\nstalls:")
            lines += [f"  {stall}" for stall in stalls[:_SHOWN]]
            if len(stalls) > _SHOWN:
                lines.append(f"  and {len(stalls) - _SHOWN} more")
        if unseen:
            lines.append("\nnot seen:")
            lines += [f"  {what}" for what in unseen]
        return "\n".join(lines)

    def document(
        self, seconds: float, tell: Callable[[Race], dict[str, Any]] = Race.as_dict
    ) -> dict[str, Any]:
        """Return the findings as JSON-serializable data."""
        found = self._all_races()
        return {
            "version": _VERSION,
            "seconds": seconds,
            "races": [tell(race) for race in found if not race.possible],
            "possible": [tell(race) for race in found if race.possible],
            "stalls": [stall.as_dict() for stall in self.stalls()],
            "calls": self.calls(),
            "not_seen": list(self.not_seen()),
        }

    def document_of_page(self, seconds: float) -> dict[str, Any]:
        """Return the findings and the newest operations, as the page shows them."""
        world = self._engine.world
        timeline = world.timeline.as_dict(
            world.stacks, lambda lane: world.describe(lane)[0], world.finds.thread_name
        )
        return {**self.document(seconds, Race._for_page), "timeline": timeline}


def judged(blocks: Iterable[log.Block], judge: Judge) -> Judge:
    """Return the judge after it has taken the blocks of a whole log.

    Raises
    ------
    LogError
        The log cannot be read.
    """
    for block in blocks:
        judge.take(block)
    if not judge.header:
        raise log.LogError("this log has no header")
    if judge.end is None:
        cut = "what came after the end of this log: the program was killed, or still runs"
        judge.take(log.block(log.UNSEEN, [*judge.not_recorded, cut]))
    judge.finish()
    return judge


def _by_number(found: dict[str, Any]) -> dict[int, Any]:
    """Return a dictionary of JSON, whose keys are text, by the numbers that they stand for."""
    return {int(key): value for key, value in found.items()}


def _plural(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
