"""The programs of ``tests/observe/suite``, and the page of the docs about them."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUITE = Path(__file__).parents[1] / "observe" / "suite"
_DOCS = Path(__file__).parents[2] / "docs"
PAGE = _DOCS / "accuracy.md"
FOUND, POSSIBLE, NOT_SEEN = "found", "possible", "not seen"


@dataclass(frozen=True)
class Program:
    """A program with a mistake, which ``--repaired`` leaves out."""

    path: Path
    link: str  # to a report of the mistake
    title: str
    lines: frozenset[int]  # of the two operations that race
    expected: str  # what `observe` says of the mistake
    reason: str  # why it is not seen, or only possible
    needs: str  # frameworks on a real GPU, or nothing

    @property
    def name(self) -> str:
        return self.path.stem


@functools.cache
def programs() -> tuple[Program, ...]:
    """Return all programs of the suite."""
    paths = sorted(SUITE.glob("*.py"))
    return tuple(_read(path) for path in paths if path.stem not in {"kit", "__main__"})


def _read(path: Path) -> Program:
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    marks = [n for n, line in enumerate(lines, 1) if re.search(r"  # (first|second)$", line)]
    told = re.search(r"^# (possible|not seen): (.+)$", text, re.MULTILINE)
    needs = re.search(r"^# needs: (.+)$", text, re.MULTILINE)
    return Program(
        path,
        lines[0].removeprefix("# "),
        next(line for line in lines if line.startswith('"')).strip('"'),
        frozenset(marks),
        FOUND if told is None else told[1],
        "" if told is None else told[2],
        "" if needs is None else needs[1],
    )


# -- the page --------------------------------------------------------------------------------------

_TOOLS = {
    "observe": "`observe`",
    "torch": "`TORCH_CUDA_SANITIZER=1`",
    "compute-sanitizer": "compute-sanitizer",
}
_INTRO = """\
<!-- keywords: recall, precision, false positives, missed races, TORCH_CUDA_SANITIZER -->

# What `observe` finds

{count} programs of at most 40 lines, each with a mistake that was reported in public, and each
once more without the mistake; {needing} of them need PyTorch, CuPy, JAX, numba or Triton, and a
GPU. They are in `tests/observe/suite`; the table links to the reports of the mistakes. *Found*
means that the race is reported with the lines of both operations: one line of two does not count.
Any report about a program without the mistake is false.

The tests of userstream run the programs that need no framework, with different durations of the
kernels in each run, and apply the change that the report advises: the race must then be gone. With
`USERSTREAM_SUITE_RUNS=100` they do so a hundred times, and the verdict and the key of the race must
be the same each time.

`python tests/observe/suite --json docs/measured/suite-simulated.json` measures the programs that
need no framework, `--gpu` all programs, also with the other tools that are installed; `--page`
writes this page, which a test compares with the measured results.

## Summary
"""
_SYMBOLS = {
    "found": "found",
    "possible": "possible",
    "one line": "one line of two",
    "missed": "missed",
}


def measured() -> list[dict[str, Any]]:
    """Return the results that are kept with the documentation."""
    paths = sorted((_DOCS / "measured").glob("suite-*.json"))
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def page(results: Sequence[dict[str, Any]]) -> str:
    """Return the page of the docs about the results of runs."""
    needing = sum(bool(each.needs) for each in programs())
    lines = [_INTRO.format(count=len(programs()), needing=needing), *summary(results)]
    lines += ["", _explained(), *_cut_short(results), "## Programs", ""]
    tools = [tool for tool in _TOOLS if any(tool in _tools(result) for result in results)]
    lines.append(f"| Mistake | {' | '.join(_TOOLS[tool] for tool in tools)} | |")
    lines.append(f"|---|{'---|' * (len(tools) + 1)}")
    for program in programs():
        cells = [_cell(results, program, tool) for tool in tools]
        if not any(cells):  # it has not run yet
            continue
        lines.append(
            f"| [{program.title.rstrip('.')}]({program.link}) (`{program.name}`) | "
            f"{' | '.join(cells)} | {program.reason} |"
        )
    return "\n".join(lines) + "\n"


def summary(results: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of the table with the numbers of each tool."""
    lines = ["| Where | Tool | Programs | Found | Possible | Missed | False reports |"]
    lines += ["|---|---|--:|--:|--:|--:|--:|"]
    for result in results:
        lines += [_row(result["where"], tool, _of_tool(result, tool)) for tool in _tools(result)]
    return lines


def _row(where: str, tool: str, told: Sequence[dict[str, Any]]) -> str:
    """Return a line of the summary."""
    counts = [sum(each["wrong"] == verdict for each in told) for verdict in ("found", "possible")]
    false = sum(not each["silent"] for each in told)
    missed = len(told) - sum(counts)
    numbers = (len(told), *counts, missed, false)
    return f"| {where} | {_TOOLS[tool]} | {' | '.join(map(str, numbers))} |"


def _tools(result: dict[str, Any]) -> list[str]:
    return [tool for tool in _TOOLS if any(tool in each for each in result["programs"].values())]


def _of_tool(result: dict[str, Any], tool: str) -> list[dict[str, Any]]:
    return [each[tool] for each in result["programs"].values() if _has_run(each, tool)]


def _has_run(told: dict[str, Any], tool: str) -> bool:
    """Return whether a program has run to its end with a tool."""
    return tool in told and told[tool]["wrong"] != "failed"


def _explained() -> str:
    hidden = [each for each in programs() if each.expected == NOT_SEEN]
    return f"""\
{len(hidden)} of the mistakes cannot be seen, because host reads make no driver call:
`Observation.not_seen` names the copies and the memory whose results the host may read too early.
*Possible* races are those of `observe(possible=True)`: the last column says why they are not
certain.
"""


def _cut_short(results: Sequence[dict[str, Any]]) -> list[str]:
    """Return a sentence about each result that lacks programs."""
    lines = []
    for result in results:
        is_simulated = result["where"] == "the simulated driver"
        names = [each.name for each in programs() if not (is_simulated and each.needs)]
        told = result["programs"]
        missing = [name for name in names if not _has_run(told.get(name, {}), "observe")]
        if missing:
            count = f"{len(names) - len(missing)} of {len(names)} programs ran"
            but = ", all but " + ", ".join(f"`{each}`" for each in missing)
            lines += [f"On {result['where']} {count}{but if len(missing) < 8 else ''}.", ""]
    return lines


def _cell(results: Sequence[dict[str, Any]], program: Program, tool: str) -> str:
    """Return what a tool says of a program, wherever it ran."""
    told = [
        result["programs"][program.name][tool]
        for result in results
        if _has_run(result["programs"].get(program.name, {}), tool)
    ]
    if not told:
        return ""
    verdicts = [_SYMBOLS.get(each["wrong"], each["wrong"]) for each in told]
    said = verdicts[0] if len(set(verdicts)) == 1 else " / ".join(verdicts)
    if said == "missed" and program.expected == NOT_SEEN and told[0].get("not_seen"):
        said = "named in `not_seen`"
    return said + ("" if all(each["silent"] for each in told) else ", **false report**")
