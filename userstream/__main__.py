"""``userstream``: report the installation and check that userstream works on it.

``python -m userstream`` is the same.

The report covers versions, driver, devices, frameworks (none is imported) and environment. The
self-check then moves real data on every device, on streams of its own. On a machine with neither an
NVIDIA device node nor a driver it runs on the simulated driver.

``--json``
    Print a single JSON document to stdout. ``docs/reference/command.md`` describes its keys, which
    are stable.
``--simulate``
    Use the simulated driver, whether or not there is a GPU.
``--require-gpu``
    Fail if there is no GPU.

``observe program.py ...``
    Run a program, and report the races and stalls of its streams: ``observe --help`` says more.
``judge run ...``
    Report the races and stalls in a log of ``observe --log``: ``judge --help`` says more.

The exit status is 0 if every check passed, 1 if not, 2 for an invalid command line, and 141 if the
reader of the output went away (``| head``).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
from typing import TYPE_CHECKING

from userstream import DriverNotFoundError, _report

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["observe"]:
        from userstream._observe import command

        command.main(given[1:], _called())
    if given[:1] == ["judge"]:
        from userstream._observe.judge.__main__ import main as judge

        return judge(given[1:], f"{_called()} judge")
    options = _parse(arguments)
    # Not with --simulate: looking for a real driver loads it, and a process can load only one.
    gpu = not options.simulate and _report.is_gpu_machine()
    simulated = not (gpu or options.require_gpu)
    if simulated and not options.json:
        why = "--simulate was passed" if options.simulate else _report.NO_GPU
        _report.say(f"SIMULATED DRIVER: {why}.\n")
    problem = _prepare(simulated=simulated, gpu=gpu)
    found = _report.gather(with_driver=problem is None)
    if problem is not None:
        found.problems.insert(0, problem)
    checked = _report.check(len(found.devices)) if found.devices else iter(())
    return (_print_json if options.json else _print_text)(found, checked, simulated=simulated)


def _called() -> str:
    """Return how this command was called: by its script, or as a module."""
    script = os.path.basename(sys.argv[0])
    return script if script == "userstream" else "python -m userstream"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    called = _called()
    parser = argparse.ArgumentParser(
        prog=called,
        usage="%(prog)s [options]\n       %(prog)s {observe,judge} --help",
        description="Report the installation, and check that userstream works on every device.",
        epilog=f"`{called} observe program.py` watches the streams of a program; `{called} judge` "
        "reads what was recorded.",
    )
    parser.add_argument("--json", action="store_true", help="print a single JSON document")
    parser.add_argument("--simulate", action="store_true", help="use the simulated driver")
    parser.add_argument("--require-gpu", action="store_true", help="fail if there is no GPU")
    options, rest = parser.parse_known_args(arguments)
    for command in ("observe", "judge"):
        if command in rest:
            parser.error(f"{command} comes first, then its options: {called} {command} --help")
    if rest:
        program = next(filter(os.path.isfile, rest), None)
        advice = f"; to watch a program: {called} observe {program}" if program else ""
        parser.error(f"unrecognized arguments: {' '.join(rest)}{advice}")
    if options.simulate and options.require_gpu:
        parser.error("--simulate and --require-gpu are mutually exclusive")
    return options


def _prepare(*, simulated: bool, gpu: bool) -> _report.Problem | None:
    """Set up the chosen driver; return the problem if that fails."""
    if not simulated:
        if gpu:
            return None
        error = DriverNotFoundError(f"--require-gpu was passed, but {_report.NO_GPU}")
        return _report.Problem.of("driver", error)
    from userstream import testing  # here, so that the library does not depend on its guest

    try:
        testing.simulate()
    except (ImportError, RuntimeError) as error:  # stale, or another driver is loaded
        return _report.Problem.of("simulated driver", error)
    return None


def _print_text(
    found: _report.Facts, checked: Iterator[_report.Section], *, simulated: bool
) -> int:
    _report.print_facts(found, simulated=simulated)
    ok = not found.problems and bool(found.devices)
    for section in checked:
        _report.print_section(section)
        ok = ok and section.ok
    if not found.devices:
        _report.print_no_section()
    _report.print_verdict(ok=ok, simulated=simulated)
    return 0 if ok else 1


def _print_json(
    found: _report.Facts, checked: Iterator[_report.Section], *, simulated: bool
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


def run() -> int:
    """Run the command for a shell; return its exit status."""
    try:
        status = main()
        sys.stdout.flush()  # here, and not at exit, where an error can no longer be handled
    except BrokenPipeError:  # the reader has seen enough
        # Without this the interpreter flushes at exit what is left in the buffer and reports the
        # same error once more. See it with: python -m userstream --json | true
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE  # a shell's exit status for SIGPIPE
    return status


if __name__ == "__main__":
    sys.exit(run())
