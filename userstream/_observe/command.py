"""``python -m userstream observe``: watch a program, and report at its end.

``--html FILE``
    Write a page there that shows the streams, with the races in it.
``--json FILE``
    Write the whole report there.
``--fail-on WHAT``
    ``races``, which is the default, ``stalls``, both with a comma, or ``nothing``: what makes the
    exit status of a program that succeeded 66.
``--suppress FILE``
    Do not report the races that this file names.
``--possible``
    Report also what something unseen may put in order.
``--strict-threads``
    As ``observe(threads="strict")``.
``--allocations``
    As ``observe(allocations=True)``.
``--simulate``
    Run the program on the simulated driver.

The program's own exit status is kept otherwise. The report goes to stderr, after an exception too.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import threading
import traceback
from typing import TYPE_CHECKING, NoReturn

from userstream import testing
from userstream._observe.observation import Observation
from userstream.errors import DriverNotFoundError, NotSupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence

FOUND = 66  # the exit status of a program that succeeded, and has races
_REFUSED = 2
_INTERRUPTED = 130
_TIMELINE = 100_000  # operations that the page shows
_FAIL_ON = {"races", "stalls", "nothing"}


def main(arguments: Sequence[str]) -> int:
    """Run the command; return its exit status."""
    options = _parse(arguments)
    if options.simulate:
        testing.simulate()
    seen = _observation(options)
    try:
        seen.__enter__()
    except (NotSupportedError, DriverNotFoundError) as error:
        here = " (here: --simulate)" if isinstance(error, DriverNotFoundError) else ""
        print(f"python -m userstream observe: {error}{here}", file=sys.stderr)
        return _REFUSED
    process = os.getpid()
    try:
        status = _run(options.program, as_module=options.module)
    finally:
        if os.getpid() == process:
            seen.stop()
            _report(seen, options)
    if os.getpid() != process:  # a child that the program forked: the report is its parent's
        return status
    found = (seen.races and "races" in options.fail_on) or (
        seen.stalls and "stalls" in options.fail_on
    )
    return FOUND if found and status == 0 else status


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m userstream observe",
        usage="%(prog)s [options] (program.py | -m module) [arguments of the program ...]",
        description="Watch the streams of a program; report races and stalls at its end.",
    )
    parser.add_argument("--html", metavar="FILE", help="write a page of the streams to FILE")
    parser.add_argument("--json", metavar="FILE", help="write the whole report to FILE")
    parser.add_argument(
        "--fail-on",
        type=_fail_on,
        default={"races"},
        metavar="WHAT",
        help=f"races (default), stalls, both with a comma, or nothing: exit with {FOUND} then",
    )
    parser.add_argument(
        "--suppress", metavar="FILE", help="do not report the races that a line of FILE names"
    )
    parser.add_argument("--possible", action="store_true", help="report possible races as well")
    parser.add_argument(
        "--strict-threads",
        action="store_true",
        help="assume that threads do not know what others have waited for",
    )
    parser.add_argument(
        "--allocations", action="store_true", help="name the lines that allocated tensors"
    )
    parser.add_argument("--simulate", action="store_true", help="run on the simulated driver")
    parser.add_argument("-m", dest="module", action="store_true", help="the program is a module")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="the program, and its arguments")
    options = parser.parse_args(arguments)
    if not options.program:
        parser.error("there is no program to watch")
    for path, end in ((options.html, ".html"), (options.json, ".json")):
        if path is not None and not path.endswith(end):
            parser.error(f"the name of that file ends in {end}, not as in {path!r}")
        if path is not None and not os.path.isdir(os.path.dirname(path) or "."):
            parser.error(f"there is no directory for {path!r}")
    return options


def _fail_on(text: str) -> set[str]:
    words = set(text.split(","))
    if not words <= _FAIL_ON:
        raise argparse.ArgumentTypeError(f"{text!r} is not races, stalls or nothing")
    return words


def _observation(options: argparse.Namespace) -> Observation:
    try:
        return Observation(
            possible=options.possible,
            suppress=options.suppress or (),
            threads="strict" if options.strict_threads else "shared",
            timeline=0 if options.html is None else _TIMELINE,
            allocations=options.allocations,
        )
    except (OSError, ValueError, NotSupportedError) as error:
        _refuse(str(error))


def _refuse(message: str) -> NoReturn:
    print(f"python -m userstream observe: {message}", file=sys.stderr)
    raise SystemExit(_REFUSED)


def _run(program: list[str], *, as_module: bool) -> int:
    """Run the program as Python would, and wait for its threads; return its exit status."""
    sys.argv = program
    if not as_module:
        sys.path[0] = os.path.dirname(os.path.abspath(program[0]))
    status = 0
    try:
        if as_module:
            runpy.run_module(program[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(program[0], run_name="__main__")
    except SystemExit as leaving:
        status = _status(leaving)
    except KeyboardInterrupt:
        traceback.print_exc()
        status = _INTERRUPTED
    except Exception as error:
        _print_its_own(error)
        status = 1
    try:
        # As Python does next: what they queue is the program's too. Workers of executors do not end
        # unless they are told to, which this does as well.
        threading._shutdown()  # type: ignore[attr-defined]
    except KeyboardInterrupt:  # which ends the wait, and does not change the status
        traceback.print_exc()
    return status


def _status(leaving: SystemExit) -> int:
    code = leaving.code
    if code is None or isinstance(code, int):
        return code or 0
    print(code, file=sys.stderr)
    return 1


def _print_its_own(error: Exception) -> None:
    """Print the traceback without the frames that brought the program about."""
    trace = error.__traceback__
    while trace is not None and (
        trace.tb_frame.f_code.co_filename == __file__
        or trace.tb_frame.f_globals.get("__name__") == "runpy"
    ):
        trace = trace.tb_next
    traceback.print_exception(error.with_traceback(trace))


def _report(seen: Observation, options: argparse.Namespace) -> None:
    print(seen, file=sys.stderr)
    for path in (options.html, options.json):
        if path is not None:
            seen.save(path)
