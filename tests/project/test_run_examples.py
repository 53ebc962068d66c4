"""The command that runs the examples of the documentation."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "docs/run_examples.py"


def test_an_example_that_hangs_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.spec_from_file_location("run_examples", SCRIPT)
    command = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(command)
    monkeypatch.setattr(command, "EXAMPLES", tmp_path)
    monkeypatch.setattr(command, "SECONDS", 6)
    monkeypatch.setattr(command, "SIMULATE", "import sys; exec(open(sys.argv[1]).read())")
    (tmp_path / "a.py").write_text("import time; time.sleep(60)")
    (tmp_path / "b.py").write_text("print()")
    monkeypatch.setenv("USERSTREAM_TEST_DRIVER", "simulated")
    assert command.main() == 1
    printed = capsys.readouterr().out
    assert "failed   a.py" in printed
    assert "not done after 6 s" in printed
    assert "ok       b.py" in printed
