"""`observe` on programs of real frameworks: what has no race has no report."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from browser import data_of

PROGRAMS = Path(__file__).parent / "programs"
ORDERED = {
    "torch_training": "torch",
    "torch_compiled": "torch",
    "torch_graphs": "torch",
    "torch_many_kernels": "torch",
    "torch_four_streams": "torch",
    "transformers_gpt2": "transformers",
    "jax_training": "jax",
    "cupy_fft": "cupy",
    "numba_streams": "numba_cuda",
    "torch_beside_cupy": "cupy",
}
RACING = {"torch_without_wait": "torch", "cupy_without_borrow": "cupy"}
RACES = 66  # the exit status

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240),
    pytest.mark.usefixtures("can_be_watched"),
]


def _each(programs: dict[str, str]) -> list[object]:
    # Looked for and not imported: other tests put stand-ins in the place of frameworks.
    return [
        pytest.param(
            program,
            marks=pytest.mark.skipif(
                importlib.util.find_spec(package) is None, reason=f"needs {package}"
            ),
        )
        for program, package in programs.items()
    ]


def observed(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=200, check=False
    )


def program(name: str) -> list[str]:
    return ["userstream", "observe", str(PROGRAMS / f"{name}.py")]


@pytest.mark.parametrize("name", _each(ORDERED))
def test_nothing_is_reported(name: str) -> None:
    done = observed("-m", *program(name))
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 races" in done.stderr


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_the_page_of_a_training(tmp_path: Path) -> None:
    file = tmp_path / "seen.html"
    training = PROGRAMS / "torch_training.py"
    done = observed("-m", "userstream", "observe", "--html", str(file), str(training))
    assert done.returncode == 0, done.stdout + done.stderr
    document = data_of(file.read_text(encoding="utf-8"))
    assert document["races"] == []
    timeline = document["timelines"][0]
    assert len(timeline["entries"]) > 200
    assert any("at::native::" in name for name in timeline["names"])
    # Relative to the directory, if it is below.
    assert any(str(training).endswith(frame[0]) for frame in timeline["frames"])
    streams = [number for number, row in enumerate(timeline["rows"]) if row["kind"] == "stream"]
    used = {entry[1] for entry in timeline["entries"]}
    assert len(used.intersection(streams)) >= 2, "the side stream of the loader too"


@pytest.mark.multi_device
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_nothing_is_reported_of_ranks_that_train_together() -> None:
    launcher = ["torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    done = observed("-m", *launcher, "--nproc-per-node", "2", "-m", *program("torch_ddp"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count(" 0 races") == 2


@pytest.mark.parametrize("name", _each(RACING))
def test_a_race_is_reported_with_its_line(name: str) -> None:
    done = observed("-m", *program(name))
    assert done.returncode == RACES, done.stdout + done.stderr
    assert f"{name}.py:" in done.stderr
