"""Timelines: what runs when, on the host and on the streams of a device."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import svg

LABELS = 112  # the width of the lanes' names
LANE = 32
BAR = 24
UNIT = (svg.WIDTH - LABELS - 2 * svg.MARGIN) / 12  # a picture is 12 units of time wide

Bar = tuple[float, float, str, str]  # begin, end, kind, words
Point = tuple[str, float]  # lane, time


@dataclass(frozen=True)
class Timeline:
    """Lanes from the top to the bottom, and edges between them."""

    title: str
    note: str
    lanes: dict[str, list[Bar]]
    edges: tuple[tuple[Point, Point], ...] = ()


def _x(time: float) -> float:
    return svg.MARGIN + LABELS + time * UNIT


def _timeline(timeline: Timeline, top: float) -> tuple[list[str], float]:
    """Draw a timeline below `top`; return its shapes and where it ends."""
    shapes = [
        svg.text(svg.MARGIN, top + 12, timeline.title, "mono text title"),
        svg.text(svg.MARGIN, top + 31, timeline.note, "faint"),
    ]
    top += 44
    middle = {lane: top + LANE * (row + 0.5) for row, lane in enumerate(timeline.lanes)}
    for lane, bars in timeline.lanes.items():
        y = middle[lane]
        shapes.append(svg.text(svg.MARGIN, y, lane))
        shapes.append(f'<path d="M{_x(0):g} {y:g}H{_x(12):g}" class="axis"/>')
        for begin, end, kind, words in bars:
            shapes.append(svg.box(_x(begin), y - BAR / 2, (end - begin) * UNIT - 1, BAR, kind))
            if kind == "wait":  # no stripes behind the words
                half = 3.6 * len(words) + 3
                shapes.append(svg.box(_x((begin + end) / 2) - half, y - 8, 2 * half, 16, "patch"))
            on = "bad" if kind == "wait" else "on"
            shapes.append(svg.text(_x((begin + end) / 2), y, words, on, "middle"))
    shapes += [_edge(middle, *edge) for edge in timeline.edges]
    return shapes, top + LANE * len(timeline.lanes)


def _edge(middle: dict[str, float], source: Point, target: Point) -> str:
    """Draw an edge from the end of one bar to the begin of another, later one."""
    (lane, begin), (other, end) = source, target
    bend = _x((begin + end) / 2)
    path = f"M{_x(begin):g} {middle[lane]:g}H{bend:g}V{middle[other]:g}H{_x(end) - 1:g}"
    return f'<path d="{path}" class="edge" marker-end="url(#head)"/>'


def draw(title: str, told: str, *timelines: Timeline) -> str:
    """Draw timelines below each other."""
    shapes: list[str] = []
    bottom = float(svg.MARGIN)
    for timeline in timelines:
        assert all(a[1] <= b[0] for bars in timeline.lanes.values() for a, b in pairwise(bars))
        if shapes:
            bottom += 14
            shapes.append(
                f'<path d="M{svg.MARGIN} {bottom:g}H{svg.WIDTH - svg.MARGIN}" class="axis"/>'
            )
            bottom += 16
        more, bottom = _timeline(timeline, bottom)
        shapes += more
    return svg.document(shapes, bottom + svg.MARGIN, title, told)


BORROW = draw(
    "A device synchronize against borrow",
    "With a device synchronize the host waits twice, for the other pipeline too, and both "
    "frameworks' streams run dry. With borrow the host only queues work: the user stream starts "
    "after the framework's work, the framework continues after yours, and the other pipeline "
    "never stops.",
    Timeline(
        "torch.cuda.synchronize()",
        "The host waits for all streams and queues nothing meanwhile",
        {
            "host": [
                (0, 1.4, "host", "queues"),
                (1.4, 5.6, "wait", "waits"),
                (5.6, 7, "host", "queues"),
                (7, 9.2, "wait", "waits"),
                (9.2, 10.6, "host", "queues"),
            ],
            "framework": [(0.3, 3, "theirs", "fills the buffer"), (9.5, 12, "theirs", "continues")],
            "your stream": [(6, 9.2, "yours", "your work")],
            "other pipeline": [(0, 5.6, "other", "its work"), (9.5, 12, "other", "its work")],
        },
    ),
    Timeline(
        "with us.borrow(tensor) as stream:",
        "The streams wait for each other; the host and the other pipeline continue",
        {
            "host": [(0, 3, "host", "queues all of it"), (3, 12, "host", "is free")],
            "framework": [
                (0.3, 3, "theirs", "fills the buffer"),
                (7.6, 10.1, "theirs", "continues"),
            ],
            "user stream": [(3.7, 6.9, "yours", "your work")],
            "other pipeline": [(0, 5.6, "other", "its work"), (5.6, 12, "other", "its work")],
        },
        (
            (("framework", 3), ("user stream", 3.7)),
            (("user stream", 6.9), ("framework", 7.6)),
        ),
    ),
)

WAIT = draw(
    "What a wait covers",
    "us.wait returns when the work that was queued on the user stream at the time of the call is "
    "done, although another thread queues more there and the framework's stream is still busy.",
    Timeline(
        "us.wait(tensor)",
        "Covers the work that was queued on the user stream when it was called",
        {
            "host": [
                (0, 1.5, "host", "queues"),
                (1.5, 6, "wait", "waits"),
                (6, 12, "host", "continues"),
            ],
            "user stream": [
                (0.4, 3.2, "yours", "your work"),
                (3.2, 6, "yours", "your work"),
                (6, 9.5, "other", "queued later"),
            ],
            "framework": [(0, 12, "theirs", "its work")],
        },
    ),
)

MEMORY = draw(
    "Why a borrow holds its buffers",
    "With edges alone, a tensor that is dropped while the user stream still reads it is given to "
    "the next tensor of the stream it was allocated on, which overwrites it. A held reference "
    "keeps the memory until the work is done.",
    Timeline(
        "edges alone",
        "x was allocated on A and is dropped: y gets its memory while you still read it",
        {
            "stream B": [(0, 2.2, "theirs", "writes x"), (9.3, 11.2, "theirs", "continues")],
            "user stream": [(2.9, 8.6, "yours", "your work reads x")],
            "stream A": [(5, 7.4, "bad", "writes y")],
            "the memory": [(0, 5, "yours", "x"), (5, 12, "bad", "y")],
        },
        ((("stream B", 2.2), ("user stream", 2.9)), (("user stream", 8.6), ("stream B", 9.3))),
    ),
    Timeline(
        "with us.borrow(x) as stream:",
        "x is held until your work is done: y gets other memory",
        {
            "stream B": [(0, 2.2, "theirs", "writes x"), (9.3, 11.2, "theirs", "continues")],
            "user stream": [(2.9, 8.6, "yours", "your work reads x")],
            "stream A": [(5, 7.4, "other", "writes y")],
            "the memory": [(0, 8.6, "yours", "x, held"), (8.6, 12, "other", "free for others")],
        },
        ((("stream B", 2.2), ("user stream", 2.9)), (("user stream", 8.6), ("stream B", 9.3))),
    ),
)
