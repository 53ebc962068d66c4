"""``python -m userstream judge``: judge logs of ``python -m userstream observe --log``.

It needs no GPU, no driver and not the program, and where userstream's dependencies are missing the
folder of this package alone: ``PYTHONPATH=.../userstream/_observe python -m judge run.uslog``.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from . import Judge, judged
from .found import Baseline, read_suppressions
from .log import LogError, read_blocks
from .reports import github_annotations, save, suffix_of, text_of

if TYPE_CHECKING:
    from collections.abc import Sequence

FOUND = 66  # the exit status if there are races, as of `observe`
_REFUSED = 2
_TIMELINE = 100_000  # operations that the page shows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    options = _parse(arguments)
    status = 0
    for path in options.logs:
        try:
            judge = _judge(path, options)
            _save(judge, options)
        except (OSError, LogError) as error:
            print(f"python -m userstream judge: {path}: {error}", file=sys.stderr)
            status = _REFUSED
            continue
        if len(options.logs) > 1:
            print(f"== {path}: {judge.about()}")
        print(judge.report(judge.watched()))
        if os.environ.get("GITHUB_ACTIONS") == "true" and judge.races():
            print(github_annotations(judge))
        races = judge.races()
        if options.baseline is not None:
            print(f"\n{options.baseline.compared(races)}")
            races = tuple(options.baseline.new(races))
        if races and not status:
            status = FOUND
    return status


def _judge(path: str, options: argparse.Namespace) -> Judge:
    judge = Judge(
        possible=options.possible,
        suppressions=options.suppress,
        stall=options.stall,
        strict=options.strict_threads,
        timeline=_TIMELINE if options.report else 0,
    )
    with open(path, "rb") as file:
        return judged(read_blocks(file), judge)


def _save(judge: Judge, options: argparse.Namespace) -> None:
    """Write the files before anything is printed: the reader of the output may go away."""
    texts = [(path, text_of(judge, suffix_of(path), judge.watched())) for path in options.report]
    for path, text in texts:
        save(path, text)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m userstream judge",
        description="Judge logs of `python -m userstream observe --log`: report races and stalls.",
        epilog=f"The exit status is {FOUND} if there are races.",
        allow_abbrev=False,
    )
    parser.add_argument("logs", nargs="+", metavar="LOG", help="a log; each is judged by itself")
    add_shared_options(parser)
    parser.add_argument(
        "--suppress",
        type=_suppressions,
        default=[],
        metavar="FILE",
        help="do not report the races that a line of FILE names",
    )
    parser.add_argument(
        "--stall", type=float, default=1e-4, metavar="SECONDS", help="the shortest stall (0.0001)"
    )
    options = parser.parse_args(arguments)
    if len(options.logs) > 1 and options.report:
        parser.error("--report is for one log")
    return options


def add_shared_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `observe` has as well."""
    parser.add_argument(
        "--report",
        type=_report_name,
        action="append",
        default=[],
        metavar="FILE",
        help="write a report to FILE: .html, .json, .sarif, .trace.json (Perfetto) or .txt",
    )
    parser.add_argument(
        "--baseline",
        type=_baseline,
        metavar="FILE",
        help="ignore, for the exit status, the races in FILE, an earlier report as .json",
    )
    parser.add_argument("--possible", action="store_true", help="report possible races as well")
    parser.add_argument(
        "--strict-threads",
        action="store_true",
        help="assume that threads do not know what others have waited for",
    )


def _report_name(path: str) -> str:
    try:
        suffix_of(path)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return path


def _baseline(path: str) -> Baseline:
    try:
        return Baseline(path)
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _suppressions(path: str) -> list[dict[str, str]]:
    try:
        return read_suppressions(path)
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


if __name__ == "__main__":
    sys.exit(main())
