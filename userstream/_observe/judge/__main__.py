"""``userstream judge``: judge logs of ``userstream observe --log``.

It needs no GPU, no driver and not the program, and where userstream's dependencies are missing the
folder of this package alone: ``PYTHONPATH=.../userstream/_observe python -m judge run``.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import Judge, judged
from .finding_types import KINDS, Baseline, is_of_kind, read_suppressions
from .findings import Report
from .lines import printable, render, style_of
from .log import LogError
from .reports import github_annotations, needs_timeline, save, suffix_of, text_of
from .workers import judge_logs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .finding_types import Suppression
    from .findings import Findings

FOUND = 66  # the exit status if there are races, as of `observe`
REFUSED = 2
LOGS = "*.uslog"  # in a directory of logs


def main(arguments: Sequence[str] | None = None, called: str = "python -m judge") -> int:
    """Run the command under the name that it was called by; return the exit status."""
    parser = _parser(called)
    options = parser.parse_args(arguments)
    by_real_path: dict[str, str] = {}  # a log that is named twice is judged once
    status = 0
    for path in options.logs:
        found = _logs_below(path) if os.path.isdir(path) else [path]
        for log in found:
            by_real_path.setdefault(os.path.realpath(log), log)
        if not found:
            _complain(f"{parser.prog}: {path}: there are no logs ({LOGS}) in it")
            status = REFUSED
    logs = [*by_real_path.values()]
    findings = []
    for log, answer in zip(logs, _judge(logs, options), strict=True):
        if isinstance(answer, Exception):
            _complain(f"{parser.prog}: {log}: {answer}")
            status = REFUSED
        else:
            findings.append(answer)
    if not findings:
        return status
    report = Report(findings, possible=options.possible)
    # Files first: the reader of the output may go away.
    for problem in save_all(report, options.report):
        _complain(f"{parser.prog}: {problem}")
        status = REFUSED
    encoding = sys.stdout.encoding or "utf-8"
    for text in (render(report.lines(), style_of(sys.stdout)), *after(report, options.baseline)):
        print(text.encode(encoding, "backslashreplace").decode(encoding))
    return status or (FOUND if fails(report, options.fail_on, options.baseline) else 0)


def _complain(text: str) -> None:
    print("\n".join(map(printable, text.split("\n"))), file=sys.stderr)


def _logs_below(directory: str) -> list[str]:
    # `Path.rglob` raises an error if a directory vanishes meanwhile.
    walked = os.walk(Path(directory))
    found = (Path(folder, name) for folder, _, names in walked for name in names)
    return sorted(str(path) for path in found if path.match(LOGS))


def _judge(logs: Sequence[str], options: argparse.Namespace) -> Sequence[Findings | Exception]:
    operations = operations_of(options)
    if len(logs) > 1:
        return judge_logs(logs, judge_options(options), operations)
    answers: list[Findings | Exception] = []
    for log in logs:
        try:
            with open(log, "rb") as file:
                judge = judged(file, Judge(**judge_options(options)))
            answers.append(judge.findings(operations=operations))
        except (OSError, LogError) as error:
            answers.append(error)
    return answers


def _parser(called: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=called,
        description="Judge logs of `observe --log`: report races and stalls.",
        epilog=f"The exit status is {FOUND} if there are races.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "logs", nargs="+", metavar="LOG", help="a log, or a directory of them: all in one report"
    )
    add_shared_options(parser)
    return parser


# -- what `observe` does as well ------------------------------------------------------------------


def add_shared_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that the commands `judge` and `observe` share."""
    parser.add_argument(
        "--report",
        type=_report_name,
        action="append",
        default=[],
        metavar="FILE",
        help="write a report to FILE: .html, .json, .sarif, .trace.json (Perfetto) or .txt",
    )
    parser.add_argument(
        "--timeline",
        type=_count,
        default=100_000,
        metavar="N",
        help="show at most N operations, the newest, in .html and .trace.json (100,000)",
    )
    parser.add_argument(
        "--fail-on",
        type=_fail_on,
        default=frozenset({"races"}),
        metavar="WHAT",
        help=f"what makes the exit status {FOUND}: races (default), those that were confirmed, "
        "stalls, streams (of --expect-streams), kinds of races such as use-after-free, several "
        "with commas, or nothing",
    )
    parser.add_argument(
        "--suppress",
        type=_suppressions,
        default=[],
        metavar="FILE",
        help="do not report the races that a line of FILE names",
    )
    parser.add_argument(
        "--baseline",
        type=_baseline,
        metavar="FILE",
        help="ignore, for the exit status, the races in FILE, an earlier report as .json",
    )
    parser.add_argument("--possible", action="store_true", help="report possible races as well")
    parser.add_argument(
        "--expect-streams",
        action="store_true",
        help="report what the program queues on the legacy default stream although it uses others",
    )
    parser.add_argument(
        "--strict-threads",
        action="store_true",
        help="assume that threads do not know what others have waited for",
    )
    parser.add_argument(
        "--stall",
        type=seconds,
        default=1e-4,
        metavar="SECONDS",
        help="the shortest stall (0.0001)",
    )


def judge_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `Judge`."""
    return {
        "possible": options.possible,
        "suppressions": options.suppress,
        "stall": options.stall,
        "strict": options.strict_threads,
        "timeline": operations_of(options),
        "forbidden": () if options.expect_streams or "streams" in options.fail_on else None,
    }


def operations_of(options: argparse.Namespace) -> int:
    """Return the number of operations that the reports show; 0 without a format that shows any."""
    shown = any(needs_timeline(suffix_of(path)) for path in options.report)
    return options.timeline if shown else 0


def save_all(report: Report, paths: Sequence[str]) -> list[str]:
    """Write a report to files; return a message for each file that could not be written."""
    problems = []
    for path in paths:
        try:
            save(path, text_of(report, suffix_of(path)))
        except OSError as error:
            problems.append(f"{path!r} was not written: {error.strerror or error}")
    return problems


def after(report: Report, baseline: Baseline | None) -> list[str]:
    """Return the text after a report: the comparison, and annotations in GitHub Actions."""
    texts = []
    if baseline is not None:
        texts.append(f"\n{baseline.compared(report.races)}")
    if os.environ.get("GITHUB_ACTIONS") == "true" and report.reported:
        texts.append(github_annotations(report))
    return texts


def fails(report: Report, fail_on: frozenset[str], baseline: Baseline | None) -> bool:
    """Return whether a report makes a run fail."""
    if "stalls" in fail_on and (report.stalls or report.forbidden):
        return True
    if "streams" in fail_on and report.wrong_streams:
        return True
    races = report.races if baseline is None else baseline.new(report.races)
    if "confirmed" in fail_on and any(race.confirmed for race in races):
        return True
    return any("races" in fail_on or is_of_kind(race, fail_on) for race in races)


def _report_name(path: str) -> str:
    try:
        suffix_of(path)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return path


def _count(text: str) -> int:
    if not text.replace("_", "").isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of operations")
    return int(text)


def seconds(text: str) -> float:
    """Return the value of an option that is a duration."""
    with suppress(ValueError):
        if (value := float(text)) >= 0:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, at least 0")


def _fail_on(text: str) -> frozenset[str]:
    words = frozenset(text.split(","))
    unknown = sorted(words - {"races", "confirmed", "stalls", "streams", "nothing", *KINDS})
    if unknown:
        raise argparse.ArgumentTypeError(
            f"{unknown[0]!r} is not races, confirmed, stalls, streams, nothing or a kind of "
            f"race: {', '.join(KINDS)}"
        )
    return words


def _baseline(path: str) -> Baseline:
    try:
        return Baseline(path)
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _suppressions(path: str) -> list[Suppression]:
    try:
        return read_suppressions(path)
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


if __name__ == "__main__":
    sys.exit(main())
