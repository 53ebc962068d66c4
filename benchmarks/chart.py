"""The chart: what userstream takes beside each peer, with the most that it may."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.report import Row

# On a white and on a dark page alike: grey text, no background.
INK, MET, MISSED, LIMIT = "#7b7b7b", "#3b8ea5", "#d1495b", "#d08700"
TICKS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
STYLE: dict[str, Any] = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color", "hatch.color"), INK),
    "font.size": 9,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "userstream",  # the same numbers make the same file
}


def draw(path: Path, report: Row) -> None:
    """Write an SVG of all ratios of times that have a limit."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    bars = [
        (f"{row['name']}\nbeside {' or '.join(each['against'])}", each)
        for row in report["rows"]
        for each in row["compared"]
        if each["kind"] == "ratio" and "limit" in each and not each["at_least"]
    ][::-1]
    with rc_context(STYLE):
        figure = Figure(figsize=(9, 1.4 + 0.4 * len(bars)), layout="constrained")
        axes = figure.add_subplot()
        for y, (_, each) in enumerate(bars):
            _bar(axes, y, each)
        axes.axvline(1, color=INK, linewidth=1)
        axes.set_xscale("log")
        least = min((each["median"] for _, each in bars), default=1)
        most = max((max(each["median"], each["limit"]) for _, each in bars), default=1)
        ticks = [tick for tick in TICKS if least / 2.5 <= tick <= most * 2.5]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set_yticks(range(len(bars)), [name for name, _ in bars])
        axes.set_ylim(-0.6, max(len(bars), 1) - 0.4)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("time of userstream / time of the peer")
        figure.suptitle(_title(report["where"]), x=0.01, ha="left", fontsize=10)
        figure.savefig(path, format="svg", transparent=True, metadata={"Date": None})


def _bar(axes: Any, y: int, each: Row) -> None:
    missed = each["verdict"] == "missed"
    low, high = each["quartiles"]
    axes.barh(
        y,
        each["median"],
        height=0.55,
        color=MISSED if missed else MET,
        hatch="///" if missed else None,
        xerr=[[each["median"] - low], [high - each["median"]]],
        error_kw={"ecolor": INK, "elinewidth": 1},
    )
    axes.plot([each["limit"]] * 2, [y - 0.4, y + 0.4], color=LIMIT, linewidth=2.5)


def _title(where: Row) -> str:
    legend = "orange: at most; red, hatched: missed; thin: quartiles"
    if where["simulated"]:
        return f"Simulated driver, Python alone, {where['date'][:10]} ({legend})"
    return f"{where['gpus'][0]}, driver {where['driver']}, {where['date'][:10]} ({legend})"
