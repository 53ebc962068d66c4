"""The commands of the pages about the story, and of the README, print what is shown there."""

from __future__ import annotations

import doctest
import functools
import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

DOCS = Path(__file__).parent
STORY = (DOCS / "story.md").read_text(encoding="utf-8")
PAGES = {"story": STORY, "README": (DOCS.parent / "README.md").read_text(encoding="utf-8")}
SCRIPTS = sysconfig.get_path("scripts")
BLOCKS = [
    pytest.param(command, shown, id=f"{page}: {command}")
    for page, text in PAGES.items()
    for command, shown in re.findall(r"^```console\n\$ (.*)\n((?:.*\n)*?)```$", text, re.MULTILINE)
    if not command.startswith("pip ")
]
REPORTED = "userstream observe --simulate --report seen.json prefetch.py"
# What differs from run to run: the wrong loss, durations, addresses, counts.
CHANGING = re.compile(
    r"(?<=loss )[5-9]\.\d+|\d+\.\d+(?= ?s\b)|0x[0-9a-f]+|\d+ (?:driver calls|times|stalls?)"
)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the programs, as in a clone with userstream and pytest alone."""
    docs = tmp_path_factory.mktemp("docs")
    (docs / "conftest.py").write_text("import not_installed", encoding="utf-8")
    return shutil.copytree(DOCS / "examples", docs / "examples") / "story"


@functools.cache  # both pages show the report and the tests
def run(command: str, directory: Path) -> subprocess.CompletedProcess[str]:
    program, *arguments = command.split()
    return subprocess.run(
        [f"{SCRIPTS}/{program}", *arguments],
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "PYTEST_ADDOPTS": "-p no:randomly"},  # the tests in their order
    )


@pytest.mark.parametrize(("command", "shown"), BLOCKS)
def test_a_command(directory: Path, command: str, shown: str) -> None:
    if "--confirm-from" in command:
        run(REPORTED, directory)
    done = run(command, directory)
    shown, said = CHANGING.sub("#", shown), CHANGING.sub("#", done.stdout)
    assert doctest.OutputChecker().check_output(shown, said, FLAGS), done.stdout
    has_races = "observe" in command and command.endswith(" prefetch.py")
    has_failures = " failed" in shown.splitlines()[-1]
    assert done.returncode == (66 if has_races else int(has_failures)), done.stdout


def test_the_wrong_program_fails_both_tests(directory: Path, tmp_path: Path) -> None:
    wrong = shutil.copytree(directory, tmp_path / "wrong")
    tests = wrong / "test_prefetch.py"
    text = tests.read_text(encoding="utf-8")
    tests.write_text(text.replace("from fixed", "from prefetch"), encoding="utf-8")
    done = run("pytest -q --simulated-gpus 2 test_prefetch.py", wrong)
    (shown,) = re.findall(r"^```text\n(.*?)^```$", STORY, re.DOTALL | re.MULTILINE)
    shown = f"...host overwrote the source of a copy...{shown}...2 failed in ...\n"
    assert doctest.OutputChecker().check_output(shown, done.stdout, FLAGS), done.stdout
