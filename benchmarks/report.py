"""The measured values, in the form of the JSON file and of the table."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import Comparison, Samples
from benchmarks.limits import Limit, Spread, compared, verdict
from userstream import _report

Row = dict[str, Any]


def where(*, simulated: bool, quick: bool) -> Row:
    """Return the machine and the versions."""
    found = _report.gather(with_driver=True)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "simulated": simulated,
        "quick": quick,
        "platform": found.platform,
        "processor": _processor(),
        "cpus": len(os.sched_getaffinity(0)),
        "gpus": [device.name for device in found.devices],
        "driver": found.driver.version if found.driver and not simulated else None,
        "cuda": found.driver.cuda if found.driver else None,
        "versions": found.versions | found.frameworks,
    }


def _processor() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((line.split(":")[1].strip() for line in lines if "model name" in line), None)


def rows_of(case: str, comparison: Comparison, samples: Samples, *, judged: bool) -> list[Row]:
    """Return a row for each thing that was measured."""
    rows: list[Row] = []
    for number, (what, unit) in enumerate(comparison.measures):
        values = {name: each[number] for name, each in samples.items()}
        limits = [limit for limit in comparison.limits if limit.measure == number]
        named = {name for limit in limits for name in limit.against}
        others = [] if comparison.plain else list(values)[1:]
        # Beside calls without a limit stands their ratio all the same.
        limits += [Limit(None, (name,)) for name in others if name not in named]
        rows.append(
            {
                "case": case,
                "name": f"{comparison.name}, {what}" if what else comparison.name,
                "unit": unit,
                "driver": list(comparison.driver),
                "calls": {name: _spread(each) | {"samples": each} for name, each in values.items()},
                "compared": [
                    _compared(values, limit, judged and limit in comparison.limits)
                    for limit in limits
                ],
            }
        )
    return rows


def _spread(values: list[float]) -> Row:
    spread = Spread.of(values)
    return {"median": spread.median, "quartiles": [spread.low, spread.high]}


def _compared(values: Mapping[str, list[float]], limit: Limit, judged: bool) -> Row:
    found = _spread(compared(values, limit))
    kind = "value" if not limit.against else "added" if limit.added else "ratio"
    row: Row = {"against": list(limit.against), "kind": kind} | found
    if limit.value is not None:
        row |= {"limit": limit.value, "stretch": limit.stretch, "at_least": limit.at_least}
    row["verdict"] = verdict(found["median"], limit) if judged else None
    return row


def write(path: Path, report: Row) -> None:
    """Write it in one step: what was there before stays until then."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    part.replace(path)
