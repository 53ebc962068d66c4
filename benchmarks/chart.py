"""The chart: how long userstream takes beside each peer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.report import Row

# On a white and on a dark page alike: grey text, no background.
INK, FASTER, SLOWER = "#7b7b7b", "#3b8ea5", "#d1495b"
TICKS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
STYLE: dict[str, Any] = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color", "hatch.color"), INK),
    "font.size": 9,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "userstream",  # the same numbers make the same file
}


def draw(path: Path, report: Row) -> None:
    """Write an SVG of all ratios of times."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    bars = [
        (f"{row['name']}\nbeside {' or '.join(each['against'])}", each)
        for row in report["rows"]
        for each in row["compared"]
        if row["unit"] == "s" and _is_with_a_peer(row, each)
    ][::-1]
    with rc_context(STYLE):
        figure = Figure(figsize=(9, 1.4 + 0.4 * len(bars)), layout="constrained")
        axes = figure.add_subplot()
        for y, (_, each) in enumerate(bars):
            _bar(axes, y, each)
        axes.axvline(1, color=INK, linewidth=1)
        axes.set_xscale("log")
        least = min((each["median"] for _, each in bars), default=1)
        most = max((each["median"] for _, each in bars), default=1)
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


def _is_with_a_peer(row: Row, each: Row) -> bool:
    """Leave out what userstream takes beside itself, for more threads, say."""
    own = row["case"].startswith(("growth.", "importing."))
    own = own or each["against"][0].startswith(("us.", "with us."))
    return each["kind"] == "ratio" and not each.get("at_least") and not own


def _bar(axes: Any, y: int, each: Row) -> None:
    low, high = each["quartiles"]
    slower = each["median"] > 1
    axes.barh(
        y,
        each["median"],
        height=0.55,
        color=SLOWER if slower else FASTER,
        hatch="///" if slower else None,
        xerr=[[each["median"] - low], [high - each["median"]]],
        error_kw={"ecolor": INK, "elinewidth": 1},
    )


def _title(where: Row) -> str:
    legend = "red, hatched: userstream is slower; thin lines: quartiles"
    if where["simulated"]:
        return f"Simulated driver, Python alone, {where['date'][:10]} ({legend})"
    return f"{where['gpus'][0]}, driver {where['driver']}, {where['date'][:10]} ({legend})"
