"""The chart: how long userstream takes beside each peer."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.report import Row
from benchmarks.table import quantity

# On a white and on a dark page alike: grey text, no background.
INK, FASTER, SLOWER = "#7b7b7b", "#3b8ea5", "#d1495b"
HEADINGS = {  # by the module of a case
    "finding": "Find the stream of a buffer",
    "waiting": "Wait",
    "ordering": "Order a stream with a framework",
    "copies": "Copy to the host",
    "throughput": "Disturb other threads",
    "observing": "Observe a program",
}
TICKS = {0.001: "1000x", 0.01: "100x", 0.1: "10x", 1.0: "same", 10.0: "10x", 100.0: "100x"}
ROW, HEAD, FOOT = 0.27, 1.1, 0.1  # inches
WIDTH, LEFT, RIGHT = 10.6, 3.7, 6.1  # inches: of the whole, and where the bars begin and end
STYLE: dict[str, Any] = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color", "hatch.color"), INK),
    "font.size": 10,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "userstream",  # the same numbers make the same file
}


def draw(path: Path, report: Row) -> None:
    """Write an SVG of all ratios of times: for each a bar from 1, and both times."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    bars = [
        (row, each)
        for row in report["rows"]
        for each in row["compared"]
        if row["unit"] == "s" and _is_with_a_peer(row, each)
    ]
    groups = [(name, list(group)) for name, group in groupby(bars, _heading)]
    count = len(bars) + 1.6 * len(groups)
    height = HEAD + ROW * count + FOOT
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, height))
        axes = figure.add_axes(
            (LEFT / WIDTH, FOOT / height, (RIGHT - LEFT) / WIDTH, ROW * count / height)
        )
        axes.set_xscale("log")
        axes.set_ylim(count, 0)
        _draw_axis(axes, [each["median"] for _, each in bars])
        y = 0.0
        for name, group in groups:
            _write(axes, 0.1, y + 1.2, name, weight="bold")
            y += 1.6
            for row, each in group:
                _draw_bar(axes, y + 0.5, row, each)
                y += 1
        _write(axes, LEFT, -1.5, "faster", ha="left")
        _write(axes, RIGHT, -1.5, "slower", ha="right")
        _write(axes, RIGHT + 0.95, -0.7, "userstream", weight="bold", ha="right")
        _write(axes, RIGHT + 1.1, -0.7, "the other call", weight="bold")
        figure.text(0.1 / WIDTH, 1 - 0.25 / height, _title(report["where"]))
        figure.savefig(path, format="svg", transparent=True, metadata={"Date": None})


def _heading(bar: tuple[Row, Row]) -> str:
    module: str = bar[0]["case"].partition(".")[0]
    return HEADINGS.get(module, module)


def _is_with_a_peer(row: Row, each: Row) -> bool:
    """Return whether a ratio compares userstream with something other than itself."""
    own = row["case"].startswith(("growth.", "importing.", "lateness."))
    own = own or each["against"][0].startswith(("us.", "with us."))
    return each["kind"] == "ratio" and not each.get("at_least") and not own


def _draw_axis(axes: Any, ratios: list[float]) -> None:
    least, most = min([0.1, *ratios]) / 1.5, max([10.0, *ratios]) * 1.5
    ticks = {at: text for at, text in TICKS.items() if least <= at <= most}
    axes.set_xlim(least, most)
    axes.set_xticks(list(ticks), list(ticks.values()), fontsize=9)
    axes.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False, length=0)
    axes.minorticks_off()
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    axes.grid(axis="x", color=INK, alpha=0.25, linewidth=0.8)
    axes.axvline(1, color=INK, linewidth=1)
    axes.set_axisbelow(True)


def _draw_bar(axes: Any, y: float, row: Row, each: Row) -> None:
    slower = each["median"] > 1
    axes.barh(
        y,
        each["median"] - 1,
        left=1,
        height=0.62,
        color=SLOWER if slower else FASTER,
        hatch="///" if slower else None,
    )
    own, *_ = row["calls"].values()
    peers = {name: row["calls"][name]["median"] for name in each["against"]}
    peer = min(peers, key=lambda name: peers[name])
    others = f", the fastest of {len(peers)}" if len(peers) > 1 else ""
    name = row["name"]
    _write(axes, LEFT - 0.1, y, name, ha="right", fontsize=min(10, 10 * 44 / len(name)))
    _write(axes, RIGHT + 0.95, y, quantity(own["median"], "s"), ha="right")
    _write(axes, RIGHT + 1.1, y, f"{quantity(peers[peer], 's')}  {_fitted(peer + others)}")


def _write(axes: Any, x: float, y: float, text: str, **how: Any) -> None:
    """Write a text at a row, so many inches from the left of the figure."""
    across = (x - LEFT) / (RIGHT - LEFT)
    axes.text(across, y, text, va="center", transform=axes.get_yaxis_transform(), **how)


def _fitted(text: str) -> str:
    return text if len(text) <= 33 else f"{text[:32]}…"


def _title(where: Row) -> str:
    what = "Time of userstream compared with that of another call"
    if where["simulated"]:
        return f"{what}: simulated driver, Python alone, {where['date'][:10]}"
    return f"{what}: {where['gpus'][0]}, driver {where['driver']}, {where['date'][:10]}"
