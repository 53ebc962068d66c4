"""``python -m userstream observe``, and the pytest plugin."""

from __future__ import annotations

import ctypes.util
import errno
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import commands

pytestmark = pytest.mark.simulated  # what it runs is

ROOT = Path(__file__).parents[2]

RACE = """
    import sys
    import userstream as us
    from cuda.core import Device

    Device(0).set_current()
    one, other = us.Stream.create(0), us.Stream.create(0)
    buffer = Device(0).allocate(1024, stream=one)
    other.wait(one)
    buffer.fill(7, stream=one)
    {order}
    buffer.fill(8, stream=other)
    one.sync(), other.sync()
"""


def command(tmp_path: Path, program: str, *options: str) -> subprocess.CompletedProcess[str]:
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent(program))
    program = "program" if "-m" in options else str(file)
    path = environment()["PYTHONPATH"]
    return commands.observe(tmp_path, *options, program, "an argument", PYTHONPATH=path)


def refused(tmp_path: Path, *options: str) -> str:
    """Return why `observe` refuses its options."""
    done = commands.observe(tmp_path, *options)
    assert (done.returncode, done.stdout) == (2, "")
    return done.stderr


def environment() -> dict[str, str]:
    path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    # Other plugins take longer to load than the tests to run.
    alone = {"PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return {**os.environ, "PYTHONPATH": path, **alone}


def racy(end: str = "") -> str:
    return textwrap.dedent(RACE.format(order="")) + end


def ordered(end: str = "") -> str:
    return textwrap.dedent(RACE.format(order="other.wait(one)")) + end


@pytest.mark.parametrize("options", [(), ("-m",)])
def test_a_program_with_a_race_exits_with_66(tmp_path: Path, options: tuple[str, ...]) -> None:
    done = command(tmp_path, racy("print(sys.argv[1])"), *options)
    assert done.returncode == 66, done.stderr
    assert done.stdout == "an argument\n"
    assert "write after write" in done.stderr
    assert "\n    program.py:10 in <module>\n" in done.stderr


def test_it_asks_the_allocators_if_told_to(tmp_path: Path) -> None:
    program = """
        import sys, time, types

        import userstream
        asked = []
        torch = sys.modules["torch"] = types.ModuleType("torch")
        memory = types.SimpleNamespace(_record_memory_history=lambda *how, **_: asked.append(how))
        torch.cuda = types.SimpleNamespace(is_initialized=lambda: True, memory=memory)
        torch._C = types.SimpleNamespace(_cuda_isHistoryEnabled=lambda: False)
        while not asked:
            time.sleep(0.01)
        print(asked[0][0])
    """
    done = command(tmp_path, program, "--allocations")
    assert (done.returncode, done.stdout) == (0, "all\n"), done.stderr


def test_a_program_without_keeps_its_status(tmp_path: Path) -> None:
    for end, status in (("sys.exit(3)", 3), ("sys.exit('no')", 1), ("sys.exit()", 0)):
        done = command(tmp_path, ordered(end))
        assert done.returncode == status, done.stderr
        assert ": 0 races, " in done.stderr


def test_the_report_comes_after_an_exception_too(tmp_path: Path) -> None:
    done = command(tmp_path, racy("raise KeyError('here')"))
    assert done.returncode == 1
    trace, _, report = done.stderr.partition("KeyError: 'here'")
    assert trace.startswith("Traceback")
    assert "runpy" not in trace
    assert "1 race, " in report


@pytest.mark.parametrize(
    "way",
    [
        "threading.Thread(target=work).start()",
        "executor = concurrent.futures.ThreadPoolExecutor(); executor.submit(work)",
    ],
    ids=["thread", "executor"],
)
@pytest.mark.parametrize("end", ["", "sys.exit(3)"], ids=["falls off its end", "exits"])
def test_the_threads_that_it_leaves_are_watched_to_their_end(
    tmp_path: Path, way: str, end: str
) -> None:
    program = f"""
        import concurrent.futures, sys, threading, time

        def work():
            time.sleep(0.2)
{textwrap.indent(racy(), "            ")}
        {way}
        {end}
    """
    done = command(tmp_path, program)
    assert "1 race, " in done.stderr
    assert done.returncode == (3 if end else 66), done.stderr


def test_a_forked_child_ends_as_without_and_its_parent_reports(tmp_path: Path) -> None:
    fork = """
        import os

        child = os.fork()
        if child:
            _, status = os.waitpid(child, 0)
            print(os.waitstatus_to_exitcode(status))
    """
    done = command(tmp_path, racy(textwrap.dedent(fork)))
    assert (done.returncode, done.stdout) == (66, "0\n"), done.stderr
    assert done.stderr.count("observed ") == 1
    assert "Error" not in done.stderr


def test_ctrl_c_ends_the_wait_for_threads_as_without(tmp_path: Path) -> None:
    program = """
        import os, signal, threading, time

        def work():
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)

        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Thread(target=work).start()
    """
    done = command(tmp_path, program)
    assert done.returncode == 0, done.stderr
    assert "KeyboardInterrupt" in done.stderr
    assert " 0 races, " in done.stderr


def test_it_fails_on_what_is_chosen(tmp_path: Path) -> None:
    """More choices are tried with `judge`, which goes by the same function."""
    assert command(tmp_path, racy(), "--fail-on", "use-after-free,read-write").returncode == 0
    assert command(tmp_path, racy(), "--fail-on", "stalls,write-write").returncode == 66
    said = "'luck' is not races, confirmed, stalls, streams, nothing or a kind of"
    assert said in refused(tmp_path, "--fail-on", "luck", "program.py")


def test_it_fails_on_work_on_the_legacy_default_stream(tmp_path: Path) -> None:
    program = ordered("buffer.fill(9, stream=Device(0).default_stream)\n")
    failed = command(tmp_path, program, "--fail-on", "streams")
    assert failed.returncode == 66, failed.stderr
    assert " 0 races, " in failed.stderr
    assert "  cuMemsetD8Async on the legacy default stream of device 0 (" in failed.stderr


def test_it_saves_and_suppresses(tmp_path: Path) -> None:
    report, known = tmp_path / "seen.json", tmp_path / "known.txt"
    assert command(tmp_path, racy(), "--json", str(report)).returncode == 66
    (race,) = json.loads(report.read_text())["races"]
    known.write_text(race["key"])
    assert command(tmp_path, racy(), "--suppress", str(known)).returncode == 0
    known.write_text("what?")
    assert "is not a suppression" in refused(tmp_path, "--suppress", str(known), "program.py")


def test_it_writes_a_page(tmp_path: Path) -> None:
    page = tmp_path / "seen.html"
    assert command(tmp_path, racy(), "--html", str(page)).returncode == 66
    assert "write after write" in page.read_text()
    said = refused(tmp_path, "--html", "seen.txt", "program.py")
    assert "ends in .html, not as in 'seen.txt'" in said
    said = refused(tmp_path, "--html", "nowhere/seen.html", "program.py")
    assert "there is no directory for 'nowhere/seen.html'" in said


def test_a_system_that_cannot_pass_the_options_on_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_file(*_: object) -> int:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))  # as under `ulimit -f 0`

    monkeypatch.setattr(os, "memfd_create", no_file)
    assert "the program cannot be started: File too large" in refused(tmp_path, "program.py")


SCRIPT = os.path.join(os.path.dirname(sys.executable), "userstream")


@pytest.mark.skipif(not os.path.exists(SCRIPT), reason="userstream is not installed here")
@pytest.mark.parametrize("command", ["", "observe", "judge"])
def test_the_script_and_the_module_are_the_same_and_name_themselves(command: str) -> None:
    told = []
    for called in ([SCRIPT], [sys.executable, "-m", "userstream"]):
        arguments = [*called, *filter(None, [command]), "--help"]
        told.append(subprocess.run(arguments, capture_output=True, text=True, check=True).stdout)
    script, module = (
        " ".join(each.replace("python -m userstream", "userstream").split()) for each in told
    )
    assert script == module
    assert "python -m" not in told[0]
    assert told[1].startswith("usage: python -m userstream")


def test_a_program_can_come_on_stdin() -> None:
    call = [sys.executable, "-m", "userstream", "observe", "--simulate", "-", "7"]
    program = "import sys; print(sys.argv)"
    done = subprocess.run(
        call, input=program, capture_output=True, text=True, env=environment(), check=False
    )
    assert (done.returncode, done.stdout) == (0, "['-', '7']\n"), done.stderr


def test_nothing_to_watch_is_refused(tmp_path: Path) -> None:
    assert "there is no program to watch" in refused(tmp_path)


@pytest.mark.simulated
@pytest.mark.skipif(ctypes.util.find_library("cuda") is not None, reason="there is a driver")
def test_without_a_driver_it_names_the_option_for_a_simulated_one(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("")
    call = [sys.executable, "-m", "userstream", "observe", "program.py"]
    done = subprocess.run(
        call, capture_output=True, text=True, cwd=tmp_path, env=environment(), check=False
    )
    assert done.returncode == 2
    assert "--simulate" in done.stderr


TESTS = """
    import pytest
    from userstream import testing

    testing.simulate()

    def work(order):
        import userstream as us
        from cuda.core import Device

        Device(0).set_current()
        one, other = us.Stream.create(0), us.Stream.create(0)
        buffer = Device(0).allocate(1024, stream=one)
        other.wait(one)
        buffer.fill(7, stream=one)
        if order:
            other.wait(one)
        buffer.fill(8, stream=other)
        one.sync(), other.sync()
        one.wait(other)
        buffer.close(one)

    def test_racy():
        work(False)

    def test_ordered():
        work(True)

    @pytest.mark.no_races
    def test_marked():
        work(False)

    @pytest.mark.no_races(False)
    def test_left_out():
        work(False)

    def test_fixture(observe):
        work(False)
        assert [race.kind for race in observe.races] == ["write after write"]

    def test_fails_by_itself():
        work(False)
        assert False

    @pytest.fixture
    def worked():
        work(False)

    def test_fixture_races(worked):
        pass

    def test_watched_fixture_races(observe, worked):
        observe.check()

    @pytest.mark.no_stalls
    def test_waits():
        work(True)

    @pytest.mark.no_stalls
    def test_waits_for_nothing():
        import userstream as us

        us.get_stream(0).sync()

    def test_watches_itself():
        import userstream as us

        with us.observe():
            pass
"""


def run_tests(
    tmp_path: Path, *options: str, tests: str = TESTS, more: str = "", status: int = 1
) -> tuple[str, dict[str, str]]:
    (tmp_path / "test_it.py").write_text(textwrap.dedent(tests) + more)
    plugin = ("-p", "pytest_userstream")  # installed or not
    call = [sys.executable, "-m", "pytest", "-rA", *plugin, *options]
    done = subprocess.run(
        [*call, "test_it.py"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment(),
        check=False,
    )
    assert done.returncode == status, done.stderr
    lines = (line.split(" - ")[0].split() for line in done.stdout.splitlines())
    found = {
        line[1].rpartition("::")[2]: line[0]
        for line in lines
        if len(line) > 1 and line[0] in ("PASSED", "FAILED", "ERROR")
    }
    return done.stdout + done.stderr, found


def test_the_plugin_fails_tests_with_races(tmp_path: Path) -> None:
    output, found = run_tests(tmp_path, "--races")
    assert found == {
        "test_racy": "FAILED",
        "test_ordered": "PASSED",
        "test_marked": "FAILED",
        "test_left_out": "PASSED",
        "test_fixture": "PASSED",
        "test_fails_by_itself": "FAILED",
        "test_fixture_races": "PASSED",
        "test_watched_fixture_races": "FAILED",
        "test_waits": "FAILED",
        "test_waits_for_nothing": "PASSED",
        "test_watches_itself": "FAILED",
    }
    assert "marked no_races(False)" in output
    assert "write after write" in output
    assert output.count("1 race, ") >= 3
    assert "the host waited for the GPU in a block of no_stalls:" in output


def test_without_the_option_only_marked_tests_are_watched(tmp_path: Path) -> None:
    _, found = run_tests(tmp_path)
    assert [name for name, what in found.items() if what == "FAILED"] == [
        "test_marked",
        "test_fails_by_itself",
        "test_watched_fixture_races",
        "test_waits",
    ]


def test_the_plugin_suppresses(tmp_path: Path) -> None:
    (tmp_path / "known.txt").write_text("race=write-write line=test_it.py:work\n")
    _, found = run_tests(tmp_path, "--races", "--races-suppress", "known.txt")
    assert [name for name, what in found.items() if what == "FAILED"] == [
        "test_fixture",
        "test_fails_by_itself",
        "test_waits",
        "test_watches_itself",
    ]
    assert found["test_racy"] == "PASSED"


REPEATED = """
def test_repeated():
    for _ in range(20):
        work(False)
        time.sleep(0.05)  # for the judge
"""


def test_the_plugin_makes_races_happen(tmp_path: Path) -> None:
    options = ("--races", "--races-confirm", "-k", "test_repeated")
    said, _ = run_tests(tmp_path, *options, more="import time\n" + REPEATED)
    assert "made to happen" in said


def test_the_plugin_holds_the_races_of_a_report(tmp_path: Path) -> None:
    lines = textwrap.dedent(TESTS).splitlines()
    first, second = (
        {"line": [str(tmp_path / "test_it.py"), number, "work"], "stream": "one", "handle": 1}
        for number, line in enumerate(lines, 1)
        if "buffer.fill" in line
    )
    report = {"races": [{"first": first, "second": second}], "possible": []}
    (tmp_path / "seen.json").write_text(json.dumps(report))
    options = ("--races", "--races-confirm-from", "seen.json", "-k", "racy or marked")
    said, _ = run_tests(tmp_path, *options)
    assert "made to happen" in said


def test_the_plugin_reads_suppressions_once_from_where_pytest_started(tmp_path: Path) -> None:
    (tmp_path / "known.txt").write_text("race=write-write line=test_it.py:work\n")
    (tmp_path / "conftest.py").write_text(
        "import os, pytest\n"
        "@pytest.hookimpl(tryfirst=True)\n"
        "def pytest_runtest_setup():\n"
        "    os.chdir('/')\n"
        "    if os.path.exists(KNOWN): os.remove(KNOWN)\n"
        f"KNOWN = {str(tmp_path / 'known.txt')!r}\n"
    )
    _, found = run_tests(tmp_path, "--races", "--races-suppress", "known.txt")
    assert found["test_racy"] == "PASSED"
    assert found["test_marked"] == "PASSED"


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("--races-suppress", None),
        ("--races-suppress", "race=luck"),
        ("--races-confirm-from", "race=luck"),
    ],
)
def test_the_plugin_refuses_a_bad_file_once(option: str, text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "known.txt").write_text(text)
    output, found = run_tests(tmp_path, option, "known.txt", status=4)
    assert found == {}
    assert output.count(f"{option}: ") == 1
    assert "known.txt" in output


@pytest.mark.parametrize("arguments", ['"x", 1', "wach=False", "None", "True, True"])
def test_a_marker_with_other_arguments_is_refused(arguments: str, tmp_path: Path) -> None:
    test = f"import pytest\n@pytest.mark.no_races({arguments})\ndef test_that(): pass\n"
    output, found = run_tests(tmp_path, tests=test, status=4)
    assert found == {}
    assert "test_it.py::test_that: no_races(" in output
    assert "the marker takes one argument, watch: True or False" in output


def test_the_marker_of_stalls_takes_no_arguments(tmp_path: Path) -> None:
    test = "import pytest\n@pytest.mark.no_stalls(1)\ndef test_that(): pass\n"
    output, found = run_tests(tmp_path, tests=test, status=4)
    assert found == {}
    assert "test_it.py::test_that: no_stalls(1): the marker takes no arguments" in output


def test_the_plugin_loads_nothing_until_it_is_used(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import sys\n"
        "def test_nothing():\n"
        "    assert not {'userstream', 'cuda.core', 'cuda.bindings.driver'} & set(sys.modules)\n"
    )
    plugin = ("-p", "pytest_userstream")
    call = [sys.executable, "-m", "pytest", "-q", *plugin, "test_it.py"]
    done = subprocess.run(
        call, capture_output=True, text=True, cwd=tmp_path, env=environment(), check=False
    )
    assert done.returncode == 0, done.stdout
