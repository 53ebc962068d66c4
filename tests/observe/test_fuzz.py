"""Random programs of a few calls: `observe` reports a race exactly where CUDA leaves one.

What it should say is worked out here by brute force: for each operation, which of all those before
it is it ordered behind? `observe` forgets most of them, and has to come to the same. The first
programs are the same in every run; for ``USERSTREAM_FUZZ`` seconds others follow. A failure tells
its seed, and ``USERSTREAM_FUZZ_SEED`` draws that program alone.
"""

from __future__ import annotations

import random
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest
from cuda.bindings import driver

import userstream as us
from helpers import THOROUGH, checked, current_context, device_current, device_memory, seeds
from observed import LEGACY, checked_or_busy, copy, fill, handle, needs_frames

pytestmark = [
    pytest.mark.no_races(False),  # they watch themselves
    pytest.mark.usefixtures("can_be_watched"),
    needs_frames,
]

COUNT = 200 if THOROUGH else 40
PLACE, PLACES = 2048, 16  # bytes, and how many such places there are
EVENTS, GRAPHS = 3, 2

Touch = tuple[int, int, bool]  # from which place to which, and whether it writes there


@dataclass
class Rules:
    """Which operations come behind which, as bits: the first operation is the lowest one."""

    streams: list[str]  # "non-blocking", "blocking" or "legacy"
    racy: bool = False
    host: int = 0
    operations: list[list[Touch]] = field(default_factory=list)
    events: dict[int, int] = field(default_factory=dict)
    graphs: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.last = [0] * len(self.streams)

    def before(self, stream: int) -> int:
        """Return what the next operation of a stream comes behind."""
        found = self.last[stream] | self.host
        for other, kind in enumerate(self.streams):
            if {kind, self.streams[stream]} == {"blocking", "legacy"}:
                found |= self.last[other]
        return found

    def operate(self, stream: int, *touches: Touch, graph: int | None = None) -> None:
        before = self.before(stream)
        if graph is not None:  # its launches run one after the other
            before |= self.graphs.get(graph, 0)
        for number, others in enumerate(self.operations):
            if not before >> number & 1:
                self.racy |= any(_conflict(mine, other) for mine in touches for other in others)
        self.last[stream] = before | 1 << len(self.operations)
        if graph is not None:
            self.graphs[graph] = self.last[stream]
        self.operations.append(list(touches))

    def record(self, event: int, stream: int) -> None:
        self.events[event] = self.last[stream] = self.before(stream)

    def wait(self, stream: int, event: int) -> None:
        if event in self.events:  # else it is as if it had passed
            self.last[stream] = self.before(stream) | self.events[event]

    def record_context(self, event: int) -> None:
        self.events[event] = self.host
        for bits in self.last:
            self.events[event] |= bits


def _conflict(one: Touch, other: Touch) -> bool:
    return one[0] < other[1] and other[0] < one[1] and (one[2] or other[2])


class Program:
    """A random program, which tells the rules what it does."""

    def __init__(self, chance: random.Random, memory: int, stack: ExitStack) -> None:
        self.chance = chance
        self.memory = memory
        kinds = ["non-blocking"] * chance.randint(1, 3) + ["blocking"] * chance.randint(0, 2)
        self.streams: list[us.Stream | int] = [
            stack.enter_context(us.Stream.create(0, nonblocking=kind == "non-blocking"))
            for kind in kinds
        ]
        self.streams.append(LEGACY)
        self.rules = Rules([*kinds, "legacy"])
        self.events = [checked(driver.cuEventCreate(0)) for _ in range(EVENTS)]
        for event in self.events:
            stack.callback(lambda event=event: checked(driver.cuEventDestroy(event)))
        self.graphs: list[tuple[driver.CUgraphExec, int]] = []
        self.stack = stack
        self.care = chance.choice((0.3, 0.9, 0.95))  # how often an operation waits for the last
        self.newest = 0  # the stream of that

    def capture(self) -> None:
        """Make graphs of a fill each."""
        relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        for _ in range(GRAPHS):
            place = self.chance.randrange(PLACES)
            with us.Stream.create(0) as stream:
                checked(driver.cuStreamBeginCapture(handle(stream), relaxed))
                fill(self.at(place), stream, PLACE)
                graph = checked(driver.cuStreamEndCapture(handle(stream)))
            made = checked(driver.cuGraphInstantiate(graph, 0))
            checked(driver.cuGraphDestroy(graph))
            self.stack.callback(lambda made=made: checked(driver.cuGraphExecDestroy(made)))
            self.graphs.append((made, place))

    def at(self, place: int) -> int:
        return self.memory + place * PLACE

    def record(self, event: int, stream: int) -> None:
        checked(driver.cuEventRecord(self.events[event], handle(self.streams[stream])))
        self.rules.record(event, stream)

    def wait(self, stream: int, event: int) -> None:
        checked(driver.cuStreamWaitEvent(handle(self.streams[stream]), self.events[event], 0))
        self.rules.wait(stream, event)

    def step(self) -> None:
        """Do something."""
        chance, rules = self.chance, self.rules
        number, event = chance.randrange(len(self.streams)), chance.randrange(EVENTS)
        stream = self.streams[number]
        what = chance.choices(
            ("fill", "copy", "launch", "record", "wait", "sync", "sync event", "query", "context"),
            (25, 17, 4, 14, 22, 5, 3, 5, 3),
        )[0]
        if what in {"fill", "copy", "launch"}:
            if chance.random() < self.care:
                self.record(event, self.newest)
                self.wait(number, event)
            self.newest = number
        if what == "fill":
            first = chance.randrange(PLACES // 2)
            count = chance.choice((1, 1, 1, 2, PLACES // 2))
            fill(self.at(first), stream, count * PLACE)
            rules.operate(number, (first, first + count, True))
        elif what == "copy":
            to, source = chance.sample(range(PLACES // 2), 2)
            to = chance.choice((to, PLACES // 2 + number))  # where it is no other's
            copy(self.at(to), self.at(source), stream, PLACE)
            rules.operate(number, (source, source + 1, False), (to, to + 1, True))
        elif what == "launch":
            which = chance.randrange(GRAPHS)
            graph, place = self.graphs[which]
            checked(driver.cuGraphLaunch(graph, handle(stream)))
            rules.operate(number, (place, place + 1, True), graph=which)
        elif what == "record":
            self.record(event, number)
        elif what == "wait":
            self.wait(number, event)
        elif what == "sync":
            checked(driver.cuStreamSynchronize(handle(stream)))
            rules.host |= rules.before(number)
        elif what == "sync event":
            checked(driver.cuEventSynchronize(self.events[event]))
            rules.host |= rules.events.get(event, 0)
        elif what == "query":
            if checked_or_busy(driver.cuStreamQuery(handle(stream))):
                rules.host |= rules.before(number)
            if checked_or_busy(driver.cuEventQuery(self.events[event])):
                rules.host |= rules.events.get(event, 0)
        else:
            checked(driver.cuCtxRecordEvent(current_context(), self.events[event]))
            rules.record_context(event)


def test_a_race_is_reported_exactly_where_there_is_one() -> None:
    for seed in seeds(COUNT):
        chance = random.Random(seed)
        with ExitStack() as stack:
            stack.enter_context(device_current(0))
            memory = stack.enter_context(device_memory(0, PLACES * PLACE))
            program = Program(chance, memory, stack)
            with us.observe(possible=True) as seen:
                program.capture()
                for _ in range(chance.randint(3, 25)):
                    program.step()
            checked(driver.cuCtxSynchronize())
        assert bool(seen.races) is program.rules.racy, (seed, str(seen))
