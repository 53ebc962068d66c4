"""The programs of ``tests/observe/suite``, run under `observe` and judged by marked lines."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import userstream as us
from helpers import device_current
from suite_table import FOUND, POSSIBLE, SUITE, Program
from userstream import testing
from userstream.testing import _simulated

SIMULATED = _simulated.is_simulated()


@functools.cache
def _compiled(path: Path, text: str) -> CodeType:
    return compile(text, str(path), "exec", dont_inherit=True)


@functools.cache
def _kit() -> Any:
    sys.path.insert(0, str(SUITE))
    with device_current(0):
        return importlib.import_module("kit")


def run(program: Program, *, repaired: bool = False, path: Path | None = None) -> us.Observation:
    """Run a program, or a changed copy of it, under `observe`; return the observation."""
    path = path or program.path
    _kit().REPAIRED = repaired
    code = _compiled(path, path.read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "__main__", "__file__": str(path)}
    with device_current(0), us.observe(possible=True, timeline=0) as seen:
        try:
            exec(code, names)
        except Exception:
            if repaired:
                raise  # what is wrong may fail as well
    names.clear()
    if SIMULATED:
        testing.reset()
    return seen


@dataclass(frozen=True)
class Verdict:
    """What an observation says of a program."""

    found: str  # "found", "possible" or "missed"
    lines: bool  # both are named
    races: tuple[str, ...]  # keys of the certain ones
    possible: tuple[str, ...]


def verdict(program: Program, races: Sequence[us.Race]) -> Verdict:
    """Return what the races of a run say of a program."""
    best = ("missed", False)
    for race in races:
        both = program.lines <= named_lines(race)
        found = POSSIBLE if race.possible else FOUND
        best = max(
            best, (found, both), key=lambda each: (each[1], each[0] == FOUND, each[0] == POSSIBLE)
        )
    certain = tuple(sorted(race.key for race in races if not race.possible))
    possible = tuple(sorted(race.key for race in races if race.possible))
    return Verdict(*best, certain, possible)


def named_lines(race: us.Race) -> set[int]:
    """Return the lines that a report of a race names."""
    frames = [each for side in (race.first, race.second) for each in (side.line, side.captured)]
    return {frame.lineno for frame in frames if frame is not None and frame.lineno is not None}


def edited(program: Program, race: us.Race, directory: Path) -> Path | None:
    """Write a program changed as a race advises; return its path, or `None` without edits."""
    lines = program.path.read_text(encoding="utf-8").splitlines(keepends=True)
    if not race.edits:
        return None
    for edit in sorted(race.edits, key=lambda edit: -edit.line):
        assert edit.file == str(program.path)
        lines[edit.line - 1 : edit.end - 1] = [edit.code]
    path = directory / program.path.name
    path.write_text("".join(lines), encoding="utf-8")
    return path


def kernels() -> list[str]:
    """Return the names of the kernels that programs launch."""
    return [*_kit().NAMES.values()]
