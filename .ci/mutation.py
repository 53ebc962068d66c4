"""Change the code of a package at random places, and count the changes that its tests notice.

``python .ci/mutation.py _ordering 80 [SEED]``: 80 changes of one operator, constant or condition
each, drawn from all that cosmic-ray knows for `userstream/_ordering`. The work is done in a copy of
the checkout under build/, with the compiled libraries of the installation. Prints each change that
no test notices; some of them change nothing that could be noticed.

For each change, only the tests that run the changed line are run, the quickest first. A first run
of the tests in `FOLDERS` finds them, and stores them in build/mutation-tests.json; delete that file
after the tests have changed.
"""

from __future__ import annotations

import ast
import difflib
import json
import os
import random
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest
    from cosmic_ray.work_db import WorkDB

Span: TypeAlias = tuple[tuple[int, int], tuple[int, int]]  # line and column of begin and end

ROOT = Path(__file__).parents[1]
COPY = ROOT / "build" / "mutation"
ORIGINAL = COPY / "original"  # of the package, while COPY has a change
TESTS = ROOT / "build" / "mutation-tests.json"
PACKAGES = ("_ordering", "_engine", "_copies", "_buffers", "_observe/judge")
# Not those of the simulated driver, the report and the project, which say little of the packages.
FOLDERS = (
    *("ordering", "engine", "copies", "buffers", "stream", "registry", "driver", "observe"),
    *("processes", "project/test_footprint.py"),  # the latter notices what only costs time
)
SECONDS = 120.0  # of tests for one change
CONFIGURATION = """
[cosmic-ray]
module-path = "userstream/{package}"
timeout = 900
excluded-modules = []
test-command = "{python} {script} test"
distributor.name = "local"
"""
COVERAGE = """
[run]
concurrency = thread
patch = subprocess
source = userstream
"""


def main(package: str = "all", count: str = "400", seed: str = "0") -> None:
    """Draw changes of one package, or as many in all packages together."""
    shutil.rmtree(COPY, ignore_errors=True)
    ignored = shutil.ignore_patterns(".git", ".venv", "build", "__pycache__")
    shutil.copytree(ROOT, COPY, ignore=ignored)
    shutil.copytree(COPY / "userstream", ORIGINAL)
    if not TESTS.exists():
        measure()
    packages = PACKAGES if package == "all" else (package,)
    noticed = total = 0
    for each in packages:
        survived, tried = mutate(each, int(count) // len(packages), seed)
        print(f"{each}: {tried - survived} of {tried} changes noticed", flush=True)
        noticed, total = noticed + tried - survived, total + tried
    print(f"{noticed} of {total} changes noticed: {noticed / max(total, 1):.1%}")


# -- the tests that run a line --------------------------------------------------------------------


def measure() -> None:
    """Run all tests; store which of them run each line, and how long each takes."""
    (COPY / "coverage.ini").write_text(COVERAGE, encoding="utf-8")
    env = {
        **os.environ,
        "COVERAGE_FILE": str(COPY / "coverage" / "data"),
        "PYTHONPATH": f"{COPY}{os.pathsep}{Path(__file__).parent}",
    }
    (COPY / "coverage").mkdir()
    for file in (COPY / "userstream/_observe").rglob("*.py"):  # coverage is in site-packages
        text = file.read_text(encoding="utf-8")
        file.write_text(text.replace('"-I", "-S"', '"-I"'), encoding="utf-8")
    coverage = (sys.executable, "-m", "coverage")
    run = ("pytest", "-q", "-p", "mutation", "-p", "no:randomly", "-o", "timeout=600")
    for folder in FOLDERS:
        command = [*coverage, "run", "--rcfile=coverage.ini", "-m", *run, f"tests/{folder}"]
        subprocess.run(command, cwd=COPY, env=env, check=False)
    combine = [*coverage, "combine", "-q", "--keep", "--rcfile=coverage.ini"]
    subprocess.run(combine, cwd=COPY, env=env, check=True)
    shutil.copytree(ORIGINAL, COPY / "userstream", dirs_exist_ok=True)
    from coverage import CoverageData

    data = CoverageData(env["COVERAGE_FILE"])
    data.read()
    seconds: dict[str, float] = defaultdict(float)
    for line in (COPY / "seconds.txt").read_text(encoding="utf-8").splitlines():
        duration, _, name = line.partition(" ")
        seconds[name] += float(duration)
    # The quickest first. What runs as a module is imported has no test.
    tests = sorted(seconds, key=lambda name: seconds[name])
    number = {name: each for each, name in enumerate(tests)}
    lines = {
        str(Path(file).relative_to(COPY / "userstream")): {
            line: sorted(number[name] for name in names if name in number)
            for line, names in data.contexts_by_lineno(file).items()
        }
        for file in data.measured_files()
    }
    found = {"lines": lines, "tests": [(name, seconds[name]) for name in tests]}
    TESTS.write_text(json.dumps(found), encoding="utf-8")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Record the lines that run from now on under the name of the test, in its processes too."""
    import coverage

    current = coverage.Coverage.current()
    if current is not None:
        current.switch_context(item.nodeid)
        config = current.config
        before, config.context = config.context, item.nodeid
        os.environ["COVERAGE_PROCESS_CONFIG"] = config.serialize()
        config.context = before


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Store the duration of a phase of a test."""
    with (COPY / "seconds.txt").open("a", encoding="utf-8") as file:
        file.write(f"{report.duration:.3f} {report.nodeid}\n")


def test() -> int:
    """Run the tests that run the changed line; return the exit status, 0 if there are none."""
    found = json.loads(TESTS.read_text(encoding="utf-8"))
    chosen: set[int] = set()
    for file in ORIGINAL.rglob("*.py"):
        name = str(file.relative_to(ORIGINAL))
        before, after = file.read_text(), (COPY / "userstream" / name).read_text()
        if before != after:
            lines = found["lines"].get(name, {})
            changed = _changed(before, after)
            # A line that runs as its module is imported concerns all tests of the module.
            if not changed <= _in_functions(before):
                changed = set(map(int, lines))
            chosen |= set().union(*(lines.get(str(line), ()) for line in changed))
    spent, order = 0.0, []
    for each in sorted(chosen):
        name, seconds = found["tests"][each]
        spent += seconds
        if spent > SECONDS and order:
            break
        order.append(name)
    if not order:
        return 0
    names = COPY / "tests.txt"
    names.write_text("\n".join(order), encoding="utf-8")
    options = ("-x", "-q", "-p", "no:randomly", "-p", "no:cacheprovider", "-o", "timeout=60")
    command = [sys.executable, "-m", "pytest", *options, f"@{names}"]
    env = {**os.environ, "PYTHONPATH": str(COPY)}  # for the processes that tests start
    return subprocess.run(command, cwd=COPY, env=env, check=False).returncode


def _changed(before: str, after: str) -> set[int]:
    """Return the lines of the original statements that differ; of a block, its first lines."""
    matcher = difflib.SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False)
    lines: set[int] = set()
    for tag, first, last, _, _ in matcher.get_opcodes():
        if tag != "equal":
            lines |= set(range(first + 1, max(last, first + 1) + 1))
    found = set(lines)
    for node in ast.walk(ast.parse(before)):
        if isinstance(node, ast.stmt):
            body: list[ast.stmt] = getattr(node, "body", [])
            end = body[0].lineno - 1 if body else node.end_lineno or node.lineno
            whole = set(range(node.lineno, end + 1))
            found |= whole if whole & lines else set()
    return found


def _in_functions(text: str) -> set[int]:
    """Return the lines that run only when a function is called."""
    found: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found |= set(range(node.body[0].lineno, (node.end_lineno or 0) + 1))
    return found


# -- the changes ----------------------------------------------------------------------------------


def mutate(package: str, count: int, seed: str) -> tuple[int, int]:
    """Return how many changes of a package no test noticed, and how many were tried."""
    from cosmic_ray.work_db import WorkDB, use_db
    from cosmic_ray.work_item import TestOutcome, WorkerOutcome

    configuration = CONFIGURATION.format(package=package, python=sys.executable, script=__file__)
    (COPY / "mutation.toml").write_text(configuration, encoding="utf-8")
    (COPY / "mutation.sqlite").unlink(missing_ok=True)
    _cosmic_ray("init", "mutation.toml", "mutation.sqlite")
    with use_db(str(COPY / "mutation.sqlite"), WorkDB.Mode.open) as work:
        _draw(work, count, random.Random(f"{package} {seed}"))
    _cosmic_ray("exec", "mutation.toml", "mutation.sqlite")
    survived = tried = 0
    with use_db(str(COPY / "mutation.sqlite"), WorkDB.Mode.open) as work:
        for item, result in work.completed_work_items:
            if result.worker_outcome == WorkerOutcome.SKIPPED:
                continue
            tried += 1
            if result.test_outcome == TestOutcome.SURVIVED:
                survived += 1
                where = item.mutations[0]
                print(f"{where.module_path}:{where.start_pos[0]}\n{result.diff}\n", flush=True)
    return survived, tried


def _draw(work: WorkDB, count: int, chance: random.Random) -> None:
    """Skip all changes but `count`, and those of code that does not run."""
    from cosmic_ray.work_item import WorkerOutcome, WorkResult

    unused: dict[Path, list[Span]] = {}
    operations: dict[Path, list[Span]] = {}
    candidates, others = [], []
    for item in sorted(work.work_items, key=lambda item: repr(item.mutations)):
        (where,) = item.mutations
        path = COPY / where.module_path
        if path not in unused:
            tree = ast.parse(path.read_text(encoding="utf-8"))
            unused[path] = list(_unused(tree))
            kinds = (ast.BinOp, ast.AugAssign)
            operations[path] = [_span(node) for node in ast.walk(tree) if isinstance(node, kinds)]
        is_unused = any(
            first <= where.start_pos and where.end_pos <= last for first, last in unused[path]
        )
        # cosmic-ray takes the markers `*` and `/` of parameter lists for operators.
        is_marker = "BinaryOperator" in where.operator_name and not any(
            first <= where.start_pos and where.end_pos <= last for first, last in operations[path]
        )
        (others if is_unused or is_marker else candidates).append(item)
    chance.shuffle(candidates)
    for item in (*others, *candidates[count:]):
        work.set_result(item.job_id, WorkResult(worker_outcome=WorkerOutcome.SKIPPED))


def _unused(tree: ast.Module) -> Iterator[Span]:
    """Yield where code is that does not run: annotations, and imports for type checkers."""
    for node in ast.walk(tree):
        unused: list[Any] = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            unused.append(node)
        yield from (_span(each) for each in unused if isinstance(each, (ast.expr, ast.stmt)))


def _span(node: ast.expr | ast.stmt) -> Span:
    end = (node.end_lineno or node.lineno, node.end_col_offset or 0)
    return (node.lineno, node.col_offset), end


def _cosmic_ray(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "cosmic_ray.cli", *arguments], cwd=COPY, check=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["test"]:
        sys.exit(test())
    main(*sys.argv[1:])
