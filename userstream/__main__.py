"""``python -m userstream``: what is installed here, and whether userstream works on it.

A report of versions, driver, devices, frameworks (none is imported) and environment; then a
self-check of the main job on every device, with real bytes, on streams of its own. A machine with
neither an NVIDIA device node nor a driver runs the self-check on the simulated driver.

``--json``
    One JSON document on stdout, nothing else. ``docs/reference/command.rst`` has its keys, which
    stay.
``--simulate``
    Run on the simulated driver, GPU or not.
``--require-gpu``
    A machine without a GPU is a failure.

The exit status is 0 if all of it held, 1 if not, 2 if the command line makes no sense.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import TYPE_CHECKING

from userstream import DriverNotFoundError, testing
from userstream._report import driver_choice, facts, selfcheck, show

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    options = _parse(arguments)
    # Not asked with --simulate: to find a real driver is to load it, and only one can be loaded.
    gpu = not options.simulate and driver_choice.is_gpu_machine()
    simulated = not (gpu or options.require_gpu)
    if simulated and not options.json:
        why = "--simulate was given" if options.simulate else driver_choice.NO_GPU
        show.say(f"SIMULATED DRIVER: {why}.\n")
    problem = _prepare(simulated=simulated, gpu=gpu)
    found = facts.gather(with_driver=problem is None)
    if problem is not None:
        found.problems.insert(0, problem)
    checked = selfcheck.run(len(found.devices)) if found.devices else iter(())
    return (_print_json if options.json else _print_text)(found, checked, simulated=simulated)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m userstream",
        description="Report what is installed, and check that userstream works on every device.",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--simulate", action="store_true", help="run on the simulated driver")
    parser.add_argument("--require-gpu", action="store_true", help="fail without a GPU")
    options = parser.parse_args(arguments)
    if options.simulate and options.require_gpu:
        parser.error("--simulate and --require-gpu exclude each other")
    return options


def _prepare(*, simulated: bool, gpu: bool) -> facts.Problem | None:
    """Put the driver in place that was chosen; return what stands against it."""
    if not simulated:
        if gpu:
            return None
        error = DriverNotFoundError(f"--require-gpu was given, and {driver_choice.NO_GPU}")
        return facts.Problem.of("driver", error)
    try:
        testing.simulate()
    except (OSError, RuntimeError) as error:  # no compiler, no directory for it to write to
        return facts.Problem.of("simulated driver", error)
    return None


def _print_text(
    found: facts.Facts, checked: Iterator[selfcheck.Section], *, simulated: bool
) -> int:
    show.report(found, simulated=simulated)
    ok = not found.problems and bool(found.devices)
    for section in checked:
        show.section(section)
        ok = ok and section.ok
    if not found.devices:
        show.no_section()
    show.verdict(ok=ok, simulated=simulated)
    return 0 if ok else 1


def _print_json(
    found: facts.Facts, checked: Iterator[selfcheck.Section], *, simulated: bool
) -> int:
    sections = list(checked)
    ok = not found.problems and bool(found.devices) and all(section.ok for section in sections)
    document = {
        "simulated": simulated,
        "ok": ok,
        **dataclasses.asdict(found),
        "self_check": [dataclasses.asdict(section) for section in sections],
    }
    print(json.dumps(document, indent=2))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
