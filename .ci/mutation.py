"""Change the code of a package at random places, and count the changes that its tests notice.

``python .ci/mutation.py _ordering 80 [SEED]``: 80 changes of one operator, constant or condition
each, drawn from all that cosmic-ray knows for `userstream/_ordering`. The work is done in a copy of
the checkout under build/, with the compiled libraries of the installation. Prints each change that
no test notices; some of them change nothing that could be noticed.
"""

from __future__ import annotations

import ast
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import TestOutcome, WorkerOutcome, WorkResult

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
COPY = ROOT / "build" / "mutation"
PACKAGES = ("_ordering", "_engine", "_copies", "_buffers", "_observe")
CONFIGURATION = """
[cosmic-ray]
module-path = "userstream/{package}"
timeout = 900
excluded-modules = []
test-command = "{python} -m pytest -x -q -p no:randomly -p no:cacheprovider tests/{tests} tests"
distributor.name = "local"
"""


def main(package: str = "all", count: str = "400", seed: str = "0") -> None:
    """Draw changes of one package, or as many in all packages together."""
    packages = PACKAGES if package == "all" else (package,)
    noticed = total = 0
    for each in packages:
        survived, tried = mutate(each, int(count) // len(packages), seed)
        noticed, total = noticed + tried - survived, total + tried
    print(f"{noticed} of {total} changes noticed: {noticed / max(total, 1):.1%}")


def mutate(package: str, count: int, seed: str) -> tuple[int, int]:
    """Return how many changes of a package no test noticed, and how many were tried."""
    shutil.rmtree(COPY, ignore_errors=True)
    ignored = shutil.ignore_patterns(".git", ".venv", "build", "__pycache__")
    shutil.copytree(ROOT, COPY, ignore=ignored)
    configuration = CONFIGURATION.format(
        package=package, python=sys.executable, tests=package.removeprefix("_")
    )
    (COPY / "mutation.toml").write_text(configuration, encoding="utf-8")
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
                print(f"{where.module_path}:{where.start_pos[0]}\n{result.diff}\n")
    return survived, tried


def _draw(work: WorkDB, count: int, chance: random.Random) -> None:
    """Skip all changes but `count`, and those of annotations, which have no effect."""
    annotations: dict[Path, list[tuple[tuple[int, int], tuple[int, int]]]] = {}
    candidates, others = [], []
    for item in sorted(work.work_items, key=lambda item: repr(item.mutations)):
        (where,) = item.mutations
        path = COPY / where.module_path
        if path not in annotations:
            annotations[path] = list(_annotations(path))
        is_annotation = any(
            first <= where.start_pos and where.end_pos <= last for first, last in annotations[path]
        )
        (others if is_annotation else candidates).append(item)
    chance.shuffle(candidates)
    for item in (*others, *candidates[count:]):
        work.set_result(item.job_id, WorkResult(worker_outcome=WorkerOutcome.SKIPPED))


def _annotations(path: Path) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield where code is that does not run: annotations, and imports for type checkers."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        unused = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            unused.append(node)
        for each in unused:
            if isinstance(each, (ast.expr, ast.stmt)):
                end = (each.end_lineno or each.lineno, each.end_col_offset or 0)
                yield (each.lineno, each.col_offset), end


def _cosmic_ray(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "cosmic_ray.cli", *arguments], cwd=COPY, check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
