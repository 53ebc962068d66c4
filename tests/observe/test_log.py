"""Logs of observations, and ``python -m userstream judge``."""

from __future__ import annotations

import json
import os
import random
import signal
import stat
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import userstream as us
from browser import data_of
from helpers import THOROUGH, run_python
from observed import SIZE, a_room, copy, fill, findings_of, judge_of, without_time
from userstream import __main__

pytestmark = [
    pytest.mark.simulated,
    pytest.mark.no_races(False),  # they watch themselves
]

RACE = """
import os, signal, sys, time
import userstream as us
from cuda.bindings import driver
from cuda.core import Device

Device(0).set_current()
_, memory = driver.cuMemAlloc(4096)
one, other = us.Stream.create(0), us.Stream.create(0)

def first():
    driver.cuMemsetD8Async(memory, 1, 4096, int(one.handle))

def second():
    driver.cuMemsetD8Async(memory, 2, 4096, int(other.handle))

first()
second()
one.sync()
other.sync()
if sys.argv[1:] == ["killed"]:
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Return a log of races, with calls of several kinds."""
    path = tmp_path / "run.uslog"
    with a_room() as room, us.observe(log=path) as seen:
        for _ in range(3):
            fill(room.x, room.a)
            fill(room.x, room.b)
            copy(room.y, room.x, room.a)
            room.a.sync()
    assert len(seen.races) >= 2
    return path


class Judged(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


Judge = Callable[..., Judged]


@pytest.fixture
def judge(capsys: pytest.CaptureFixture[str]) -> Judge:
    """Return a function that runs the command `judge` in this process, which has loaded it."""

    def judge(*arguments: object) -> Judged:
        capsys.readouterr()
        try:
            status = __main__.main(["judge", *map(str, arguments)])
        except SystemExit as end:
            status = end.code
        return Judged(status, *capsys.readouterr())

    return judge


def recorded(
    tmp_path: Path, *arguments: str, **environment: str
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Record a program with a race; return its log as well."""
    program, directory = tmp_path / "race.py", tmp_path / "logs"
    program.write_text(RACE)
    options = ("observe", "--simulate", "--log", str(directory), str(program), *arguments)
    done = subprocess.run(
        [sys.executable, "-m", "userstream", *options],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    (path,) = directory.iterdir()
    return done, path


def test_a_log_gives_the_findings_of_the_observation(tmp_path: Path) -> None:
    path = tmp_path / "run.uslog"
    with a_room() as room, us.observe(log=path, possible=True) as seen:
        fill(room.x, room.a)
        fill(room.x, room.b)
    assert [race.kind for race in seen.races] == ["write after write"]
    assert findings_of(path) == without_time(seen.as_dict())
    assert str(judge_of(path).races()[0]) == str(seen.races[0])


def test_a_log_that_is_named_twice_is_judged_once(log: Path, judge: Judge) -> None:
    once = judge(log)
    link = log.with_name("link.uslog")
    link.symlink_to(log)
    relative = os.path.relpath(log)
    assert judge(log, relative, log.parent, link) == once
    pipe, end = os.pipe()
    os.write(end, log.read_bytes())
    os.close(end)
    assert judge(f"/dev/fd/{pipe}", f"/proc/self/fd/{pipe}") == once
    os.close(pipe)


def test_the_name_of_a_log_cannot_change_the_terminal(tmp_path: Path, judge: Judge) -> None:
    (tmp_path / "a\x1b[2J\r.uslog").write_text("no log")
    done = judge(tmp_path)
    assert "/a\\x1b[2J\\r.uslog: this is no log" in done.stderr


def test_only_its_owner_can_read_a_log(log: Path) -> None:
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


def test_a_log_has_no_values_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "a-value-of-the-environment")
    with us.observe(log=tmp_path / "run.uslog"):
        us.get_stream(0).record()
    assert b"a-value-of-the-environment" not in (tmp_path / "run.uslog").read_bytes()


def test_the_command_records_and_the_judge_reports(tmp_path: Path, judge: Judge) -> None:
    done, path = recorded(tmp_path)
    assert done.returncode == 0
    said = f"recorded 1 process: judge with `python -m userstream judge {path.parent}`\n"
    assert done.stderr == said
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    command = [sys.executable, "-m", "userstream", "judge", str(path.parent)]
    for name in ("run.json", "run.html"):
        command += ["--report", str(tmp_path / name)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 66, found.stderr
    assert ": 1 race, " in found.stdout
    assert "race.py:12 in first" in found.stdout
    (race,) = json.loads((tmp_path / "run.json").read_text())["races"]
    assert race["key"] == ("race=write-write memory=device line=race.py:first line=race.py:second")
    assert "cuMemsetD8Async" in (tmp_path / "run.html").read_text()
    (tmp_path / "known.txt").write_text(f"{race['key']}\n")
    assert judge(path, "--suppress", tmp_path / "known.txt").returncode == 0


def test_a_program_that_is_killed_leaves_what_was_recorded(tmp_path: Path, judge: Judge) -> None:
    done, path = recorded(tmp_path, "killed")
    assert done.returncode == -signal.SIGKILL
    found = judge(path)
    assert found.returncode == 66
    assert "race.py:15 in second" in found.stdout
    assert "the program was killed, was replaced by exec, or still runs" in found.stdout


def test_several_logs_become_one_report(tmp_path: Path, judge: Judge) -> None:
    directory = tmp_path / "all"
    directory.mkdir()
    for rank in ("0", "1", "3"):
        done, log = recorded(tmp_path, RANK=rank)
        assert done.returncode == 0, done.stderr
        log.rename(directory / f"{rank}.uslog")
        log.parent.rmdir()
    (directory / "notes.txt").write_text("not a log")
    found = judge(directory, "--report", tmp_path / "all.json", "--report", tmp_path / "all.html")
    assert found.returncode == 66, found.stderr
    head, _, race, *_ = found.stdout.splitlines()
    assert " on 6 streams in 3 processes (ranks 0-1, 3): 1 race, " in head
    assert race.startswith("write after write, 3 times, ranks 0-1, 3: 4096 bytes of device memory")
    document = json.loads((tmp_path / "all.json").read_text())
    assert [each["rank"] for each in document["processes"]] == ["0", "1", "3"]
    assert [each["name"] for each in document["processes"]] == ["rank 0", "rank 1", "rank 3"]
    (race,) = document["races"]
    assert (race["processes"], race["count"]) == ([0, 1, 2], 3)
    page = data_of((tmp_path / "all.html").read_text())
    assert [each["process"]["name"] for each in page["timelines"]] == ["rank 0", "rank 1", "rank 3"]
    for each in page["timelines"]:  # a slow allocation is there too: a stall
        told = [each["names"][entry[0]] for entry in each["entries"]]
        assert told.count("cuMemsetD8Async") == 2
        assert [entry[6] & 1 for entry in each["entries"]][-2:] == [1, 1]  # the host waits
    offsets = [each["process"]["offset"] for each in page["timelines"]]
    assert offsets == sorted(offsets)
    assert offsets[0] == 0 < offsets[1]


def test_a_race_of_one_process_of_several_names_it(tmp_path: Path, log: Path, judge: Judge) -> None:
    _, other = recorded(tmp_path)
    found = judge(log, other)
    assert found.returncode == 66
    pids = [judge_of(each).header["pid"] for each in (log, other)]
    for pid in pids:
        assert f", process {pid} (" in found.stdout
    assert " in 2 processes: " in found.stdout


@pytest.mark.parametrize(
    ("kinds", "status"),
    [("nothing", 0), ("stalls,races", 66), ("use-after-free", 0), ("write-write", 66)],
)
def test_it_fails_on_what_is_chosen(log: Path, judge: Judge, kinds: str, status: int) -> None:
    assert judge(log, "--fail-on", kinds).returncode == status


def test_a_log_that_cannot_be_read_leaves_the_others(
    tmp_path: Path, log: Path, judge: Judge
) -> None:
    (tmp_path / "other.uslog").write_bytes(b"something else")
    found = judge(log, tmp_path / "other.uslog", tmp_path / "missing.uslog")
    assert found.returncode == 2
    assert "race" in found.stdout
    assert f"{tmp_path}/other.uslog: this is no log" in found.stderr
    assert f"{tmp_path}/missing.uslog: [Errno 2]" in found.stderr
    (tmp_path / "empty").mkdir()
    found = judge(tmp_path / "empty")
    assert (found.returncode, found.stdout) == (2, "")
    assert "there are no logs (*.uslog) in it" in found.stderr


def test_a_directory_that_vanishes_meanwhile_leaves_the_others(
    tmp_path: Path, log: Path, judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, scandir = tmp_path / "gone", os.scandir
    gone.mkdir()

    def scan(path: Any) -> Any:
        if os.fspath(path) == str(gone):
            gone.rmdir()
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scan)
    assert judge(tmp_path).returncode == 66
    assert not gone.exists()


def test_the_judge_runs_without_userstream(log: Path, judge: Judge) -> None:
    folder = Path(us.__file__).parent / "_observe"
    program = f"import sys; sys.path.insert(0, {str(folder)!r}); import judge.__main__ as m; "
    command = [sys.executable, "-I", "-S", "-c", f"{program}sys.exit(m.main())", str(log)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (66, "")
    assert judge(log).stdout == done.stdout


def test_a_log_that_was_cut_off_is_judged_up_to_there(log: Path) -> None:
    whole, chance = log.read_bytes(), random.Random(0)
    header = 8 + struct.unpack_from("<I", whole, 8)[0]
    for _ in range(1000 if THOROUGH else 100):
        at = chance.randrange(header, len(whole))
        log.write_bytes(whole[:at])
        found = judge_of(log)
        assert found.end is None
        assert "what came after the end of this log" in found.not_seen()[-1]
    log.write_bytes(whole)
    assert judge_of(log).end == "the end of the observation"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _: b"", "no log of"),
        (lambda _: b"PK\x03\x04 something else", "no log of"),
        (lambda whole: whole[:20], "no header"),
        (lambda whole: whole[:7] + b"\x09" + whole[8:], "version 9 of the format"),
        (lambda whole: whole[:7] + b"\x00" + whole[8:], "version 1 of the format"),
    ],
)
def test_what_is_no_log_is_refused_in_a_sentence(
    log: Path, judge: Judge, change: Any, message: str
) -> None:
    log.write_bytes(change(log.read_bytes()))
    done = judge(log)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_records_of_later_versions_are_skipped(log: Path) -> None:
    expected, whole = findings_of(log), log.read_bytes()
    size = struct.unpack_from("<I", whole, 8)[0]  # of the header, which stands for any record
    later = whole[8:12] + struct.pack("<H", 0xFFEE) + whole[14 : 8 + size]
    log.write_bytes(whole[: 8 + size] + later + whole[8 + size :])
    assert findings_of(log) == expected


def test_an_observation_that_is_only_recorded_has_no_findings(tmp_path: Path) -> None:
    path = tmp_path / "run.uslog"
    with a_room() as room, us.observe(log=path, judge="later") as seen:
        fill(room.x, room.a)
        fill(room.x, room.b)
        with pytest.raises(RuntimeError, match="only recorded"):
            seen.check()
    with pytest.raises(RuntimeError, match="python -m userstream judge"):
        str(seen)
    assert [race["nbytes"] for race in findings_of(path)["races"]] == [SIZE]


def test_a_log_that_cannot_be_written_any_more_harms_no_findings(
    tmp_path: Path, judge: Judge
) -> None:
    done = run_python(
        """
        import errno, resource, sys
        import userstream as us
        from cuda.bindings import driver
        from cuda.core import Device

        Device(0).set_current()
        _, memory = driver.cuMemAlloc(4096)
        one, other = us.Stream.create(0), us.Stream.create(0)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        seen = us.observe(log=sys.argv[1])
        try:
            with seen:
                assert not seen.races  # the begin of the log is in the file
                for _ in range(1000):
                    driver.cuMemsetD8Async(memory, 1, 4096, int(one.handle))
                    driver.cuMemsetD8Async(memory, 2, 4096, int(other.handle))
        except OSError as error:
            assert error.errno == errno.EFBIG
        else:
            raise AssertionError("a log that is not whole is one")
        assert {race.kind for race in seen.races} == {"write after write"}
        one.sync(), other.sync()
        """,
        str(tmp_path / "run.uslog"),
    )
    assert done.returncode == 0, done.stderr
    assert "the program was killed" in judge(tmp_path / "run.uslog").stdout


def test_a_log_that_cannot_be_created_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "missing" / "run.uslog", "/dev/full"):
        with pytest.raises(OSError, match=r"No such|No space"), us.observe(log=path):
            pass
    with us.observe() as seen:  # nothing is left half-begun
        pass
    assert seen.races == ()


def test_what_makes_no_sense_is_refused(log: Path, judge: Judge) -> None:
    with pytest.raises(
        ValueError, match='judge must be "thread", "process" or "later", not \'never\''
    ):
        us.observe(judge="never")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='judge="later" needs log='):
        us.observe(judge="later")
    assert judge().returncode == 2
    assert judge(log.with_name("missing.uslog")).returncode == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--log", "new", "--html", "b.html"),
            "--report, --suppress, --baseline and --hang-after are for the",
        ),
        (("--hang-after", "-1"), "argument --hang-after: '-1' is not a number of seconds, at "),
        (("--stall", "nan"), "argument --stall: 'nan' is not a number of seconds, at least 0"),
        (("--log", "a file"), "--log 'a file': File exists; a directory is made there"),
        (
            ("--log", "full"),
            "--log 'full' has logs of an earlier run: remove them, or name another",
        ),
    ],
)
def test_options_that_cannot_be_served_are_refused(
    options: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    (tmp_path / "a file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full/1-1.uslog").touch()
    command = [sys.executable, "-m", "userstream", "observe", *options, os.devnull]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert not (tmp_path / "new").exists()
