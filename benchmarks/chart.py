"""The chart: what userstream takes beside each peer, with the target of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.report import Row

# On white and on a dark page alike: grey text, no background.
INK, MET, MISSED, TARGET = "#7b7b7b", "#3b8ea5", "#d1495b", "#d08700"


def draw(path: Path, report: Row) -> None:
    """Write an SVG of all ratios that have a limit."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    bars = [
        (f"{row['name']}  /  {' or '.join(each['against'])}", each)
        for row in report["rows"]
        for each in row["compared"]
        if each["kind"] == "ratio" and "limit" in each and not each["at_least"]
    ][::-1]
    style: dict[str, Any] = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor"), INK)
    style |= dict.fromkeys(("xtick.color", "ytick.color"), INK)
    style |= {"svg.hashsalt": "userstream", "font.size": 9, "svg.fonttype": "none"}
    style |= {"font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans", "Arial"]}
    with plt.rc_context(style):
        figure, axes = plt.subplots(figsize=(9, 1.4 + 0.27 * len(bars)), layout="constrained")
        for y, (_, each) in enumerate(bars):
            missed = each["verdict"] == "missed"
            low, high = each["quartiles"]
            axes.barh(
                y,
                each["median"],
                height=0.62,
                color=MISSED if missed else MET,
                hatch="///" if missed else None,
                edgecolor=INK,
                linewidth=0,
                xerr=[[each["median"] - low], [high - each["median"]]],
                error_kw={"ecolor": INK, "elinewidth": 1},
            )
            axes.plot([each["limit"]] * 2, [y - 0.42, y + 0.42], color=TARGET, linewidth=2)
        axes.set_xscale("log")
        ticks = [0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set_yticks(range(len(bars)), [name for name, _ in bars])
        axes.set_ylim(-0.6, max(len(bars), 1) - 0.4)
        axes.axvline(1, color=INK, linewidth=1)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel(
            "Time of userstream / time of the peer, logarithmic: left of 1 is faster.\n"
            "Orange: the most that it may be. Hatched red: missed. Thin lines: the quartiles."
        )
        axes.set_title(_title(report["where"]), fontsize=9, loc="left", color=INK)
        figure.savefig(path, format="svg", transparent=True, metadata={"Date": None})
        plt.close(figure)


def _title(where: Row) -> str:
    if where["simulated"]:
        return f"Simulated driver: the cost of Python alone, {where['date'][:10]}"
    return f"{where['gpus'][0]}, driver {where['driver']}, {where['date'][:10]}"
