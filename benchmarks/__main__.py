"""Measure userstream beside what its users would call instead: ``python -m benchmarks``.

On a machine with a GPU it takes some minutes. Without one, or with ``--simulate``, a smaller set
runs on the simulated driver: what Python costs there, and whether all of this works.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from cuda.core import Device

from benchmarks import chart, harness, report, table
from benchmarks.harness import Run
from userstream import testing
from userstream._report import is_gpu_machine

SUBJECTS = (
    "driver_calls",  # first: the others show their share
    "finding",
    "waiting",
    "ordering",
    "copies",
    "growth",
    "throughput",
    "lateness",
    "importing",
    "observing",
)
DRIVER = "driver_calls.functions"
SECONDS = 150.0  # that a case may take


def main() -> int:
    arguments = _arguments()
    if arguments.redraw:
        results = [json.loads(file.read_text(encoding="utf-8")) for file in arguments.redraw]
        print("\n".join(redrawn(results, targets=arguments.targets)))
        if arguments.chart:
            rows = [row for result in results for row in result["rows"]]
            chart.draw(arguments.chart, results[0] | {"rows": rows})
        return 0
    for subject in SUBJECTS:
        importlib.import_module(f"benchmarks.{subject}")
    parts = arguments.only or [""]
    chosen = [name for name in harness.cases if any(part in name for part in parts)]
    if arguments.list:
        print("\n".join(chosen))
        return 0
    if not chosen:
        print(f"no case has one of {parts} in its name: see --list", file=sys.stderr)
        return 2
    run = Run(quick=arguments.quick, simulated=arguments.simulate or not is_gpu_machine())
    if run.simulated:
        testing.simulate(devices=2)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX would take most memory
    Device(0).set_current()
    result = measure(chosen, run, arguments.json, targets=arguments.targets)
    if arguments.chart:
        try:
            chart.draw(arguments.chart, result)
        except ImportError as error:
            print(f"no chart, draw it with --redraw where matplotlib is: {error}", file=sys.stderr)
            return 1
    return 1 if result["failed"] else 0


def measure(chosen: list[str], run: Run, file: Path | None, *, targets: bool = False) -> report.Row:
    """Run cases, show and write each result at once; a case that fails costs no other."""
    result: report.Row = {
        "where": report.where(simulated=run.simulated, quick=run.quick),
        "rows": [],
        "skipped": {},
        "failed": {},
        "seconds": {},
    }
    print("\n".join((*table.heading(result["where"]), "", table.HEAD)), flush=True)
    driver: dict[str, float] = {}
    for name in chosen:
        started = time.monotonic()
        try:
            with limited(SECONDS):
                for comparison in harness.cases[name](run):
                    samples = harness.measure(comparison, run)
                    for row in report.rows_of(name, comparison, samples, judged=run.judges):
                        result["rows"].append(row)
                        if name == DRIVER:
                            driver |= {call: has["median"] for call, has in row["calls"].items()}
                        print("\n".join(table.block(row, driver, targets=targets)), flush=True)
                    if file:
                        report.write(file, result)
        except harness.Skipped as why:
            result["skipped"][name] = str(why)
        except (Exception, Late):
            result["failed"][name] = traceback.format_exc()
            traceback.print_exc()
        result["seconds"][name] = round(time.monotonic() - started, 1)
        if file:
            report.write(file, result)
    print("\n".join(("", *table.summary(result, targets=targets))), flush=True)
    return result


def redrawn(results: list[report.Row], *, targets: bool) -> Iterator[str]:
    """Write the tables of results that were measured earlier."""
    driver: dict[str, float] = {}
    for result in results:
        yield from (*table.heading(result["where"]), "", table.HEAD)
        for row in result["rows"]:
            if row["case"] == DRIVER:
                driver |= {call: has["median"] for call, has in row["calls"].items()}
            yield from table.block(row, driver, targets=targets)
        yield from ("", *table.summary(result, targets=targets))


class Late(BaseException):
    """A case hangs. No `Exception`, for which code that is measured may have a use of its own."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Interrupt what takes longer; end the process if it hangs where nothing can interrupt it."""

    def interrupt(*_: object) -> None:
        raise Late(f"not done after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, interrupt)
    # Again and again: what is cleaned up may hang as well.
    signal.setitimer(signal.ITIMER_REAL, seconds, 10)
    faulthandler.dump_traceback_later(seconds + 40, exit=True, file=2)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="seconds: see that it works")
    parser.add_argument("--simulate", action="store_true", help="though there is a GPU")
    parser.add_argument("--only", nargs="+", metavar="PART", help="cases with that in their names")
    parser.add_argument("--list", action="store_true", help="the names of the cases")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the results")
    parser.add_argument("--chart", type=Path, metavar="FILE", help="where to draw an SVG")
    parser.add_argument("--targets", action="store_true", help="show what the developers aim at")
    parser.add_argument(
        "--redraw", type=Path, nargs="+", metavar="JSON", help="only show what was measured"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
