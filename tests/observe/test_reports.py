"""Reports of an observation as files, by their suffixes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import userstream as us
from observed import a_room, fill

pytestmark = [
    pytest.mark.simulated,
    pytest.mark.no_races(False),  # they watch themselves
]

RACE = """
import userstream as us
from cuda.bindings import driver
from cuda.core import Device

Device(0).set_current()
_, memory = driver.cuMemAlloc(4096)
one, other = us.Stream.create(0), us.Stream.create(0)
driver.cuMemsetD8Async(memory, 1, 4096, int(one.handle))
driver.cuMemsetD8Async(memory, 2, 4096, int(other.handle))
one.sync()
other.sync()
"""


@pytest.fixture
def seen() -> us.Observation:
    with a_room() as room, us.observe() as seen:
        fill(room.x, room.a)
        room.b.wait_event(room.a.record())
        fill(room.x, room.b)
        fill(room.x, room.a)
    assert len(seen.races) == 1
    return seen


def saved(seen: us.Observation, path: Path) -> Any:
    seen.save(path)
    return json.loads(path.read_text())


def test_sarif(seen: us.Observation, tmp_path: Path) -> None:
    document = saved(seen, tmp_path / "seen.sarif")
    (run,) = document["runs"]
    (result,) = run["results"]
    (race,) = seen.races
    assert document["version"] == "2.1.0"
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == [result["ruleId"]]
    assert result["ruleId"] == "write-after-write"
    assert result["level"] == "error"
    assert result["partialFingerprints"] == {"userstreamKey/v1": race.key}
    for side, locations in (
        (race.second, result["locations"]),
        (race.first, result["relatedLocations"]),
    ):
        (location,) = locations
        place = location["physicalLocation"]
        assert side.line is not None
        assert place["region"] == {"startLine": side.line.lineno}
        assert side.line.filename.endswith(place["artifactLocation"]["uri"].removeprefix("file://"))


def test_a_trace(seen: us.Observation, tmp_path: Path) -> None:
    events = saved(seen, tmp_path / "seen.trace.json")["traceEvents"]
    rows = {each["tid"]: each["args"]["name"] for each in events if each["ph"] == "M"}
    operations = [each for each in events if each["ph"] == "X"]
    fills = [each for each in operations if "Memset" in each["name"]]
    assert len({each["tid"] for each in fills}) == 2
    assert all(rows[each["tid"]].startswith("stream: ") for each in fills)
    assert all(each["dur"] > 0 for each in operations)
    starts = {each["id"]: each for each in events if each["ph"] == "s"}
    ends = {each["id"]: each for each in events if each["ph"] == "f"}
    assert starts.keys() == ends.keys()
    kinds = {each["name"] for each in starts.values()}
    assert kinds == {"edge", "write after write"}


def test_text(seen: us.Observation, tmp_path: Path) -> None:
    seen.save(tmp_path / "seen.txt")
    assert (tmp_path / "seen.txt").read_text() == f"{seen}\n"


def test_an_unknown_suffix_is_refused(seen: us.Observation, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"saved as \.html, .* or \.txt, not as '.*seen\.xml'"):
        seen.save(tmp_path / "seen.xml")
    assert list(tmp_path.iterdir()) == []


def test_a_report_is_written_whole_or_not_at_all(
    seen: us.Observation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "seen.txt"
    path.write_text("before")
    path.chmod(0o640)

    def refuse(*_: object) -> None:
        raise OSError("no space")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        with pytest.raises(OSError, match="no space"):
            seen.save(path)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]
    seen.save(path)
    assert path.read_text() == f"{seen}\n"
    assert path.stat().st_mode & 0o777 == 0o640


def test_the_command_writes_reports_and_annotates_lines(tmp_path: Path) -> None:
    (tmp_path / "race.py").write_text(RACE)
    options = ("--simulate", "--report", "seen.sarif", "--report", "seen.txt")
    done = subprocess.run(
        [sys.executable, "-m", "userstream", "observe", *options, "race.py"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "GITHUB_ACTIONS": "true"},
    )
    assert done.returncode == 66
    (result,) = json.loads((tmp_path / "seen.sarif").read_text())["runs"][0]["results"]
    place = result["locations"][0]["physicalLocation"]
    assert place == {"artifactLocation": {"uri": "race.py"}, "region": {"startLine": 10}}
    assert (tmp_path / "seen.txt").read_text().startswith("observed ")
    said = [line for line in done.stderr.splitlines() if line.startswith("::error ")]
    assert [line.split(",title")[0] for line in said] == [
        "::error file=race.py,line=9",
        "::error file=race.py,line=10",
    ]


def test_races_of_an_earlier_report_do_not_fail_a_run(tmp_path: Path) -> None:
    def observe(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "userstream", "observe", "--simulate", *options]
        return subprocess.run(
            [*command, "race.py"], capture_output=True, text=True, check=False, cwd=tmp_path
        )

    (tmp_path / "race.py").write_text(RACE)
    assert observe("--report", "known.json").returncode == 66
    done = observe("--baseline", "known.json")
    assert done.returncode == 0
    assert done.stderr.endswith("compared with known.json: 0 new, 0 fixed\n")
    document = json.loads((tmp_path / "known.json").read_text())
    document["races"][0]["key"] = "race=write-after-write first=old.py:a second=old.py:b"
    (tmp_path / "known.json").write_text(json.dumps(document))
    done = observe("--baseline", "known.json")
    assert done.returncode == 66
    assert "1 new, 1 fixed\n  fixed: race=write-after-write first=old.py:a" in done.stderr
    assert observe("--log", "run.uslog").returncode == 0
    command = [sys.executable, "-m", "userstream", "judge", "--baseline", "known.json", "run.uslog"]
    judged = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert judged.returncode == 66
    assert "1 new, 1 fixed" in judged.stdout
    (tmp_path / "known.json").write_text("[]")
    assert observe("--baseline", "known.json").returncode == 2
