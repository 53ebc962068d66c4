"""Run the programs of the suite under `observe` and other tools, and write the table of the docs.

``python tests/observe/suite --json FILE`` runs those that need no framework on the simulated
driver, ``--gpu`` all of them on a GPU, with the other tools that are there. FILE is written anew
whenever a program has ended: what a run that is cut short has measured is kept. ``--page`` runs
nothing and writes the page from the results in ``docs/measured``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

SUITE = Path(__file__).parent
sys.path.insert(0, str(SUITE.parents[1] / "support"))

import suite_table  # noqa: E402 -- the folder is no package
from suite_table import Program, programs  # noqa: E402
from userstream import testing  # noqa: E402

_RACES = 66  # the exit status of observe
_SECONDS = 60  # of one run


def main() -> int:
    """Run the command; return its exit status."""
    options = _parse()
    if options.page:
        suite_table.PAGE.write_text(suite_table.page(suite_table.measured()), encoding="utf-8")
        return 0
    print("\n".join(suite_table.summary([_measure(options)])))
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python tests/observe/suite", description=__doc__)
    parser.add_argument("names", nargs="*", help="programs; all by default")
    parser.add_argument("--gpu", action="store_true", help="on a GPU, with all tools")
    parser.add_argument("--runs", type=int, default=1, metavar="N", help="of each under observe")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), metavar="N", help="begin nothing later"
    )
    parser.add_argument("--page", action="store_true", help="only write the page of the docs")
    return parser.parse_args()


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    chosen = [
        each
        for each in programs()
        if (not options.names or each.name in options.names) and _can_run(each, gpu=options.gpu)
    ]
    if not options.gpu:
        testing.simulate()
    found: dict[str, dict[str, Any]] = {each.name: {} for each in chosen}
    measured = {"where": _where(gpu=options.gpu), "runs": options.runs, "programs": found}
    deadline, lock = time.monotonic() + options.seconds, threading.Lock()

    def run(task: tuple[str, Program]) -> None:
        tool, program = task
        if time.monotonic() > deadline:
            return
        told = _TOOLS[tool](program, options)
        with lock:
            found[program.name][tool] = told
            print(f"{program.name:50} {tool}: {_short(told)}", flush=True)
            if options.json is not None:
                measured["programs"] = {name: each for name, each in found.items() if each}
                options.json.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")

    tasks = [(tool, each) for tool in _TOOLS for each in chosen if _applies(tool, each, options)]
    # The simulated driver and an observation are one for the whole process.
    with ThreadPoolExecutor(options.jobs if options.gpu else 1) as pool:
        for _ in pool.map(run, tasks):
            pass
    return measured


def _can_run(program: Program, *, gpu: bool) -> bool:
    packages = program.needs.split()
    if not gpu:
        return not packages
    return all(importlib.util.find_spec(_MODULES.get(each, each)) for each in packages)


_MODULES = {"numba": "numba_cuda"}


def _where(*, gpu: bool) -> str:
    if not gpu:
        return "the simulated driver"
    from cuda.core import Device

    return Device(0).name


def _short(told: dict[str, Any]) -> str:
    return f"{told['wrong']}{'' if told['silent'] else ', FALSE'}"


def _applies(tool: str, program: Program, options: argparse.Namespace) -> bool:
    if tool == "torch":
        return options.gpu and "torch" in program.needs.split()
    if tool == "compute-sanitizer":  # which knows races of allocations alone
        is_there = options.gpu and shutil.which(tool) is not None
        return is_there and "allocate(" in program.path.read_text(encoding="utf-8")
    return True


# -- observe ---------------------------------------------------------------------------------------


def _observe(program: Program, options: argparse.Namespace) -> dict[str, Any]:
    wrong = [_observed(program, options) for _ in range(options.runs)]
    repaired = [_observed(program, options, "--repaired") for _ in range(options.runs)]
    verdicts = {each["found"] for each in wrong}
    failed = [each["failed"] for each in (*wrong, *repaired) if each["failed"]][:1]
    if failed:
        verdicts = {"failed"}
    return {
        "wrong": verdicts.pop() if len(verdicts) == 1 else f"differs: {sorted(verdicts)}",
        "keys": len({tuple(each["keys"]) for each in wrong}),  # 1: the same in every run
        "silent": not any(each["keys"] for each in repaired),
        "possible": any(each["possible"] for each in repaired),
        "not_seen": bool(wrong[0]["not_seen"]),
        "failed": failed,
    }


def _observed(program: Program, options: argparse.Namespace, *arguments: str) -> dict[str, Any]:
    if not options.gpu:
        return _observed_here(program, repaired=bool(arguments))
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "seen.json")
        command = [sys.executable, "-m", "userstream", "observe", "--report", str(report)]
        blocks = ["--allocations"] if program.needs else []  # those of caching allocators
        done = _run([*command, *blocks, str(program.path), *arguments])
        if not report.exists():
            return {
                **dict.fromkeys(("keys", "possible", "not_seen"), ()),
                "found": "failed",
                "failed": (done.stdout + done.stderr)[-2000:],
            }
        document = json.loads(report.read_text(encoding="utf-8"))
    began = bool(document["calls"])
    failed = not began or (done.returncode not in {0, _RACES} and bool(arguments))
    told = _told(program, document)
    return {
        **told,
        "found": told["found"] if began else "failed",
        "failed": (done.stdout + done.stderr)[-2000:] if failed else "",
    }


def _observed_here(program: Program, *, repaired: bool) -> dict[str, Any]:
    """Run a program in this process, as the tests do."""
    import suite  # needs the driver

    return {**_told(program, suite.run(program, repaired=repaired).as_dict()), "failed": ""}


def _told(program: Program, document: dict[str, Any]) -> dict[str, Any]:
    return {
        "found": _verdict(program, document),
        "keys": sorted(race["key"] for race in document["races"]),
        "possible": sorted(race["key"] for race in document["possible"]),
        "not_seen": document["not_seen"],
    }


def _verdict(program: Program, document: dict[str, Any]) -> str:
    for found in ("races", "possible"):
        if any(program.lines <= _lines(race) for race in document[found]):
            return "found" if found == "races" else "possible"
    return (
        "one line" if any(program.lines & _lines(race) for race in document["races"]) else "missed"
    )


def _lines(race: dict[str, Any]) -> set[int]:
    sides = (race["first"], race["second"])
    frames = [side[line] for side in sides for line in ("line", "captured") if side.get(line)]
    return {frame[1] for frame in frames}


# -- other tools -----------------------------------------------------------------------------------


def _both(run: Any) -> Any:
    """Return what runs a program with another tool, with its mistake and without."""

    def both(program: Program, _: argparse.Namespace) -> dict[str, Any]:
        return {"wrong": run(program), "silent": run(program, "--repaired") == "missed"}

    return both


def _torch_sanitizer(program: Program, *arguments: str) -> str:
    done = _run([sys.executable, str(program.path), *arguments], TORCH_CUDA_SANITIZER="1")
    return _from_text(program, done.stdout + done.stderr, "possible data race")


def _compute_sanitizer(program: Program, *arguments: str) -> str:
    tool = ("compute-sanitizer", "--tool", "memcheck", "--track-stream-ordered-races", "all")
    done = _run([*tool, sys.executable, str(program.path), *arguments])
    return _from_text(program, done.stdout + done.stderr, "race")


def _from_text(program: Program, text: str, word: str) -> str:
    """Return whether a tool reports a race, and names both lines."""
    if word not in text:
        return "missed"
    named = {int(line) for line in re.findall(rf"{program.path.name}\D{{1,10}}(\d+)", text)}
    return "found" if program.lines <= named else "one line"


def _run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            env={**os.environ, **environment},
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return subprocess.CompletedProcess(command, -1, "", f"no end after {error.timeout} s")


_TOOLS = {
    "observe": _observe,
    "torch": _both(_torch_sanitizer),
    "compute-sanitizer": _both(_compute_sanitizer),
}


if __name__ == "__main__":
    sys.exit(main())
