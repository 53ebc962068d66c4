"""Records of a log, as the recorder makes them: of calls that the simulated driver lacks."""

from __future__ import annotations

import struct

from userstream._observe.judge import Judge, log

A, B, C = 10, 11, 12  # streams
X, SEMAPHORE = 0x10000, 7
GRAPH, EXECUTABLE, EVENT = 20, 21, 30


def record(
    what: int,
    words: tuple[int, ...],
    *parts: bytes,
    leaving: int = 1,
    result: int = 0,
    thread: int = 1,
) -> bytes:
    """Return a record, as the recorder makes it."""
    data = struct.pack(f"<{len(words)}Q", *words)
    for part in parts:
        data += struct.pack("<Q", len(part)) + part + bytes(-len(part) % 8)
    size = log.HEAD.size + len(data)
    return log.HEAD.pack(size, what, leaving, 0, 1, thread, -1, 0, 0, 1, result, len(words)) + data


class Program:
    """The calls of a program, which a judge takes one after the other."""

    def __init__(self) -> None:
        self.judge = Judge(possible=True)
        self._numbers: dict[str, int] = {}
        for stream in (A, B, C):
            self.see_stream(stream, blocks=False)

    def see_stream(self, stream: int, *, blocks: bool, context: int = 1) -> None:
        self.judge.take(record(log.SEEN_STREAM, (stream, not blocks, context, 0, 0, 0)))

    def call(self, name: str, *words: int, parts: tuple[bytes, ...] = ()) -> None:
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self._numbers) + 1
            self.judge.take(record(log.FUNCTION, (number,), name.encode()))
        self.judge.take(record(number, words, *parts))

    def fill(self, stream: int, at: int = X) -> None:
        self.call("cuMemsetD8Async", at, 1, 64, stream)

    def wait(self, stream: int) -> None:
        self.call("cuWaitExternalSemaphoresAsync", SEMAPHORE, 0, 1, stream)

    def signal(self, stream: int) -> None:
        self.call("cuSignalExternalSemaphoresAsync", SEMAPHORE, 0, 1, stream)

    def order(self, first: int, second: int) -> None:
        self.call("cuEventRecord", EVENT, first)
        self.call("cuStreamWaitEvent", second, EVENT, 0)

    def node(self, kind: str, key: int, *after: int) -> None:
        """Add a node to the graph: ``Memset``, or of external semaphores."""
        before = struct.pack(f"<{len(after)}Q", *after)
        parts = struct.pack("<Q", key), before, struct.pack("<QQIIQQ", X, 0, 1, 1, 64, 1)
        is_fill = kind == "Memset"
        words = (0, GRAPH, 0, len(after), 0, *([0] if is_fill else []))
        self.call(f"cuGraphAdd{kind}Node", *words, parts=parts if is_fill else parts[:2])

    def graph(self) -> None:
        self.call("cuGraphCreate", 0, 0, parts=(struct.pack("<Q", GRAPH),))

    def launch(self, stream: int) -> None:
        made = struct.pack("<Q", EXECUTABLE)
        self.call("cuGraphInstantiateWithFlags", 0, GRAPH, 0, parts=(made,))
        self.call("cuGraphLaunch", EXECUTABLE, stream)

    @property
    def races(self) -> list[bool]:
        """Whether each race is only possible."""
        return [race.possible for race in self.judge.races()]
