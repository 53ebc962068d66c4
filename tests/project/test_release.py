"""The links of a release: those of a clone lead nowhere from a package index."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / ".ci/links.py"
ADDRESS = "https://git.example/team/userstream"


@pytest.mark.skipif(not SCRIPT.exists(), reason="a source distribution has no .ci")
def test_links_are_absolute(tmp_path: Path) -> None:
    for name in ("README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    subprocess.run([sys.executable, SCRIPT, ADDRESS, "v1.2.3"], cwd=tmp_path, check=True)
    targets = re.findall(r"(!?)\[[^\]]*\]\(([^)]+)\)", (tmp_path / "README.md").read_text())
    assert len(targets) > 30
    for picture, target in targets:
        kind = "raw" if picture else "blob"
        here, _, path = target.partition(f"{ADDRESS}/{kind}/v1.2.3/")
        assert not here, f"{target} is somewhere else"
        assert (ROOT / path).exists()
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
    assert project["urls"]["Repository"] == ADDRESS
    assert (ROOT / project["urls"]["Changelog"].rpartition("/v1.2.3/")[2]).exists()
