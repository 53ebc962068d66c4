"""Reports of an observation as files, by their suffixes."""

from __future__ import annotations

import ctypes
import dataclasses
import html
import json
import linecache
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fastjsonschema
import pytest
from cuda.bindings import driver

import commands
import userstream as us
from browser import data_of
from helpers import UNTRACED, checked
from observed import LEGACY, Room, a_room, copy, fill, needs_frames
from userstream.testing import latch

pytestmark = [
    pytest.mark.simulated,
    pytest.mark.no_races(False),  # they watch themselves
]

SCHEMA = Path(__file__).parents[1] / "support/sarif-schema-2.1.0.json"

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


def validator() -> Any:
    return fastjsonschema.compile(json.loads(SCHEMA.read_text()), use_default=False)


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
        region = place["region"]
        assert region["startLine"] == side.line.lineno
        source = linecache.getline(side.line.filename, side.line.lineno)
        call = source[region["startColumn"] - 1 : region["endColumn"] - 1]
        assert call == "driver.cuMemsetD8Async(address, value, size, handle(stream))"
        assert side.line.filename.endswith(place["artifactLocation"]["uri"].removeprefix("file://"))
    validate = validator()
    validate(document)
    result["level"] = "fatal"
    with pytest.raises(fastjsonschema.JsonSchemaException):
        validate(document)


IN_A_LOOP = RACE.replace("driver.cuMemsetD8", "    driver.cuMemsetD8").replace(
    "\n    driver", "\nfor _ in range(3):\n    driver", 1
)


@pytest.mark.parametrize("source", [RACE, IN_A_LOOP], ids=["once", "in a loop"])
def test_the_fix_in_sarif_mends_the_program(source: str, tmp_path: Path) -> None:
    """In a loop the first operation of the next turn races with the second as well."""

    def observe() -> subprocess.CompletedProcess[str]:
        return commands.observe(tmp_path, "--report", "seen.sarif", "race.py")

    program = tmp_path / "race.py"
    program.write_text(source)
    assert observe().returncode == 66
    document = json.loads((tmp_path / "seen.sarif").read_text())
    validator()(document)
    (result,) = document["runs"][0]["results"]
    assert ("nor the other way round" in result["message"]["text"]) is (source is IN_A_LOOP)
    (fix,) = result["fixes"]
    (change,) = fix["artifactChanges"]
    assert change["artifactLocation"] == {"uri": "race.py"}
    lines = program.read_text().splitlines(keepends=True)
    for each in reversed(change["replacements"]):
        region = each["deletedRegion"]
        assert region["startColumn"] == region["endColumn"] == 1
        lines[region["startLine"] - 1 : region["endLine"] - 1] = [each["insertedContent"]["text"]]
    program.write_text("".join(lines))
    done = observe()
    assert done.returncode == 0, done.stderr + program.read_text()


@needs_frames
def test_a_fix_that_was_tried_in_one_direction_says_so() -> None:
    with a_room() as room, us.observe() as seen:
        for _ in range(2):
            fill(room.x, room.a)
            copy(room.y, room.x, room.b)
    (race,) = seen.races
    tried = dataclasses.replace(race, confirmed=True, remedied=True)
    assert "tried as an edge, in one of the directions, and holds" in str(tried)


def test_a_notebook_shows_the_text_and_the_page(seen: us.Observation) -> None:
    shown = seen._repr_html_()
    assert shown is not None
    assert shown.startswith(f"<pre>{html.escape(str(seen))}</pre>")
    (frame,) = re.findall(r'srcdoc="([^"]*)"', shown)
    assert len(data_of(html.unescape(frame))["timelines"][0]["entries"]) == 3


def write(room: Room) -> None:
    ctypes.memset(room.pinned, 7, 8)


def in_one_function(room: Room, held: latch) -> None:
    copy(room.x, room.pinned, room.a)
    ctypes.memset(room.pinned, 7, 8)
    held.release()
    room.a.sync()


def in_another_one(room: Room, held: latch) -> None:
    copy(room.x, room.pinned, room.a)
    write(room)
    held.release()
    room.a.sync()


@needs_frames
@pytest.mark.parametrize("program", [in_one_function, in_another_one])
def test_a_write_of_the_host_has_its_line_or_those_around_it(
    program: Callable[[Room, latch], None],
) -> None:
    with a_room() as room, us.observe() as seen, latch(room.a) as held:
        program(room, held)
    (race,) = seen.races
    second, line = race.second, program.__code__.co_firstlineno
    assert second.line is not None
    if program is in_one_function:
        assert (second.line.lineno, second.since) == (line + 2, None)
        return
    assert second.since is not None
    assert (second.since.lineno, second.line.lineno) == (line + 1, line + 4)
    assert re.search(r"\n    between \S+ in in_another_one and \S+ in in_another_one\n", str(race))


def copy_and_write(room: Room) -> None:
    copy(room.x, room.pinned, room.a)
    write(room)


@needs_frames
def test_a_line_that_does_not_write_is_not_named_for_one_that_may() -> None:
    with a_room() as room, us.observe() as seen, latch(room.a) as held:
        copy_and_write(room)
        held.release()
        room.a.sync()
    (race,) = seen.races
    assert race.second.since is not None


@needs_frames
def test_threads_that_end_at_once_have_the_same_name_in_every_run() -> None:
    def work(context: driver.CUcontext) -> None:
        checked(driver.cuCtxSetCurrent(context))
        fill(room.x, room.b)

    for _ in range(3):
        with a_room() as room, us.observe() as seen:
            fill(room.x, room.a)
            context = checked(driver.cuCtxGetCurrent())
            thread = threading.Thread(target=work, args=(context,))
            thread.start()
            thread.join()
        (race,) = seen.races
        assert race.second.thread == "Thread (work)"


def on_stream(room: Room, stream: us.Stream | int) -> None:
    for _ in range(2):
        fill(room.x, stream)


LEGACY_NAME = "the legacy default stream of device 0"


@needs_frames
@pytest.mark.parametrize("judge", ["thread", "process"])
def test_operations_on_the_legacy_default_stream(judge: Any, tmp_path: Path) -> None:
    with a_room() as room, us.observe(expect_streams=True, judge=judge) as seen:
        fill(room.y, room.a)
        on_stream(room, LEGACY)
    (wrong,) = seen.wrong_streams
    assert (wrong.name, wrong.stream, wrong.device, wrong.count) == (
        *("cuMemsetD8Async", LEGACY_NAME, 0, 2),
    )
    assert wrong.line is not None
    assert wrong.line.name == "fill"
    assert [frame.name for frame in wrong.stack][-2] == "on_stream"
    assert f"  {wrong}" in str(seen).splitlines()
    told = saved(seen, tmp_path / "seen.json")
    assert told["wrong_streams"] == [{**wrong.as_dict(), "processes": [0]}]
    document = saved(seen, tmp_path / "seen.sarif")
    validator()(document)
    (result,) = (each for each in document["runs"][0]["results"] if "wrong" in each["ruleId"])
    region = result["locations"][0]["physicalLocation"]["region"]
    assert (region["startLine"], result["occurrenceCount"]) == (wrong.line.lineno, 2)
    seen.save(tmp_path / "seen.html")
    (card,) = data_of((tmp_path / "seen.html").read_text())["wrong_streams"]
    assert card["name"] == wrong.name


@needs_frames
def test_streams_that_are_given_are_to_be_avoided_too() -> None:
    with a_room() as room:
        with us.observe(expect_streams=[room.b]) as seen:
            for stream in (room.a, room.b, LEGACY):
                on_stream(room, stream)
    streams = [found.stream for found in seen.wrong_streams]
    assert streams == ["stream 2 of device 0", LEGACY_NAME]
    for wrong, error in ((7, TypeError), ("b", TypeError), ([1.5], us.UnsupportedStreamError)):
        with pytest.raises(error):
            us.observe(expect_streams=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("expect_streams", [True, False])
def test_a_program_on_one_stream_alone_serializes_nothing(expect_streams: bool) -> None:
    with a_room() as room, us.observe(expect_streams=expect_streams) as seen:
        on_stream(room, LEGACY)
        if not expect_streams:
            on_stream(room, room.a)
    assert seen.wrong_streams == ()


def test_a_trace(seen: us.Observation, tmp_path: Path) -> None:
    events = saved(seen, tmp_path / "seen.trace.json")["traceEvents"]
    rows = {each["tid"]: each["args"]["name"] for each in events if each["ph"] == "M"}
    operations = [each for each in events if each["ph"] == "X"]
    fills = [each for each in operations if "Memset" in each["name"]]
    assert len({each["tid"] for each in fills}) == 2
    assert all(rows[each["tid"]].startswith("stream: ") for each in fills)
    assert all(each["dur"] > 0 for each in operations)
    assert min(each["ts"] for each in operations) == 0
    assert {each["pid"] for each in events} == {1}
    starts = {each["id"]: each for each in events if each["ph"] == "s"}
    ends = {each["id"]: each for each in events if each["ph"] == "f"}
    assert starts.keys() == ends.keys()
    kinds = {each["name"] for each in starts.values()}
    assert kinds == {"edge", "write after write"}


def test_text(seen: us.Observation, tmp_path: Path) -> None:
    seen.save(tmp_path / "seen.txt")
    assert (tmp_path / "seen.txt").read_text() == f"{seen}\n"


def test_the_text_shows_both_lines_with_the_calls_underlined(seen: us.Observation) -> None:
    (race,) = seen.races
    text = str(seen).splitlines()
    assert text[2:] == str(race).splitlines()
    call = "driver.cuMemsetD8Async(address, value, size, handle(stream))"
    first = text.index(
        "  first: cuMemsetD8Async writes on stream 2 of device 0, first used at "
        f"observed.py:{race.first.line.lineno}"
    )
    for at in (first, first + 4):
        place, source, mark = text[at + 1 : at + 4]
        assert place.endswith(f"observed.py:{race.first.line.lineno} in fill")
        assert source == f"{race.first.line.lineno:>6} | checked({call})"
        assert mark == f"       | {' ' * len('checked(')}{'^' * len(call)}"
    assert text[first + 4].startswith("  second: cuMemsetD8Async writes on stream 1 of device 0")
    (details,) = (line for line in text if line.startswith("  details: "))
    for side in (race.first, race.second):
        assert f"{side.stream} is {side.handle:#x}" in details
        assert f"{side.handle:#x}" not in "".join(set(text) - {details})


def test_paths_are_relative_to_the_directory_in_which_people_read(
    seen: us.Observation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = seen.races[0].first.line
    assert line is not None
    monkeypatch.chdir(Path(line.filename).parent)
    assert f"\n    observed.py:{line.lineno} in fill\n" in str(seen)
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    assert f"\n    {line.filename}:{line.lineno} in fill\n" in str(seen)
    gone.rmdir()
    assert f"\n    {line.filename}:{line.lineno} in fill\n" in str(seen)


SOURCES = """
import userstream as us
from userstream.testing import simulate
simulate()
from cuda.bindings import driver
from cuda.core import Device

Device(0).set_current()
_, memory = driver.cuMemAlloc(4096)

def fill(stream):
\tä = "漢字"; driver.cuMemsetD8Async(
\t\tmemory, 1, 4096, stream)

with us.observe() as seen:
    stream = us.Stream.create(0)
    fill(stream.handle)
    fill(driver.cuStreamCreate(1)[1])
print(seen)
"""


def test_sources_with_tabs_wide_characters_and_several_lines_are_underlined(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(SOURCES)
    done = subprocess.run(
        [sys.executable, "program.py"], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    lines = done.stdout.splitlines()
    at = lines.index('    12 | ä = "漢字"; driver.cuMemsetD8Async(')
    before = len('ä = "....";') + 1  # each of the two takes two columns
    assert lines[at + 1] == f"       | {' ' * before}{'^' * 23}"
    assert "  first: cuMemsetD8Async writes on stream 1 of device 0, " in done.stdout
    assert "stream 1 of device 0, created at program.py:16 (userstream)\n" in done.stdout
    assert "stream 2 of device 0, created at program.py:18\n" in done.stdout


def test_a_program_without_its_source_is_reported_without(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        SOURCES.replace("print", "import os; os.remove('program.py'); print")
    )
    done = subprocess.run(
        [sys.executable, "program.py"], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert "\n    program.py:12 in fill\n" in done.stdout
    assert " | " not in done.stdout


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
    program = os.fsdecode(b"caf\xe9/race.py")  # no name in UTF-8
    (tmp_path / program).parent.mkdir()
    (tmp_path / program).write_text(RACE)
    options = ("--simulate", "--report", "seen.sarif", "--report", "seen.txt")
    done = subprocess.run(
        [sys.executable, "-m", "userstream", "observe", *options, program],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "GITHUB_ACTIONS": "true"},
    )
    assert done.returncode == 66
    (result,) = json.loads((tmp_path / "seen.sarif").read_text())["runs"][0]["results"]
    place = result["locations"][0]["physicalLocation"]
    assert place["artifactLocation"] == {"uri": "caf%E9/race.py"}
    assert place["region"] == {"startLine": 10, "startColumn": 1, "endColumn": 59}
    assert (tmp_path / "seen.txt").read_text().startswith("observed ")
    said = [line for line in done.stderr.splitlines() if line.startswith("::error ")]
    assert [line.split(",title")[0] for line in said] == [
        r"::error file=caf\udce9/race.py,line=9",
        r"::error file=caf\udce9/race.py,line=10",
    ]


def test_races_of_an_earlier_report_do_not_fail_a_run(tmp_path: Path) -> None:
    def observe(*options: str) -> subprocess.CompletedProcess[str]:
        return commands.observe(tmp_path, *options, "räce.py")

    (tmp_path / "räce.py").write_text(RACE)
    assert observe("--report", "known.json").returncode == 66
    done = observe("--baseline", "known.json")
    assert done.returncode == 0
    assert done.stderr.endswith("compared with known.json: 0 new, 0 fixed\n")
    document = json.loads((tmp_path / "known.json").read_text())
    document["races"][0]["key"] = "race=write-write memory=device line=old.py:a line=old.py:b"
    (tmp_path / "known.json").write_text(json.dumps(document))
    done = observe("--baseline", "known.json")
    assert done.returncode == 66
    assert "1 new, 1 fixed\n  fixed: race=write-write memory=device line=old.py:a" in done.stderr
    assert observe("--log", "run.uslog").returncode == 0
    command = [sys.executable, "-m", "userstream", "judge", "--baseline", "known.json", "run.uslog"]
    judged = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert judged.returncode == 66
    assert "1 new, 1 fixed" in judged.stdout
    (tmp_path / "known.json").write_text("[]")
    assert observe("--baseline", "known.json").returncode == 2


CONTROLS = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
ODD = """
import userstream as us
from cuda.bindings import driver
from cuda.core import Device

Device(0).set_current()
_, memory = driver.cuMemAlloc(4096)
one, other = us.get_stream(0, name="\\x1b[2J\\n\\u202e"), us.Stream.create(0)
def fill(): driver.cuMemsetD8Async(memory, 1, 4096, int(one.handle)) # \x1b[2J\u202e
for name in (fill.__code__.co_filename, "\\0", "pipe"):
    fill.__code__ = fill.__code__.replace(co_filename=name, co_name="\\x9b2J")
    fill()
    driver.cuMemsetD8Async(memory, 2, 4096, int(other.handle))
    one.sync(), other.sync()
"""


@needs_frames
def test_no_report_has_the_control_characters_of_the_program(tmp_path: Path) -> None:
    """A report is made whatever the names are, and without reading from a pipe."""
    program = tmp_path / "a\x1b[31m\n\u202e.py"
    program.write_text(ODD, encoding="utf-8")
    os.mkfifo(tmp_path / "pipe")
    formats = ("html", "json", "sarif", "trace.json", "txt")
    options = [option for each in formats for option in ("--report", f"seen.{each}")]
    # Coverage would look for a file whose name has a NUL.
    environment = {"GITHUB_ACTIONS": "true", **UNTRACED}
    done = commands.observe(tmp_path, *options, program.name, **environment)
    assert done.returncode == 66, done.stderr
    texts = [done.stderr, *((tmp_path / f"seen.{each}").read_text("utf-8") for each in formats)]
    assert [found for text in texts for found in CONTROLS.findall(text)] == []
    assert r"user stream '\x1b[2J\n\u202e' of device 0" in done.stderr
    assert r"     9 | def fill(): driver.cuMemsetD8Async(" in done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("::error ")]
    assert len(said) == 6
    assert said[0].startswith(r"::error file=a\x1b[31m%0A\u202e.py,line=9,")
    document = json.loads((tmp_path / "seen.sarif").read_text())
    validator()(document)
    for result in document["runs"][0]["results"]:
        assert not CONTROLS.search(result["message"]["text"])
