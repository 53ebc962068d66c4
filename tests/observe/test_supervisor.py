"""``userstream observe`` is the parent of its program: whatever ends it, there is a report."""

from __future__ import annotations

import itertools
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import commands
from helpers import UNTRACED

pytestmark = pytest.mark.simulated  # what it runs is

ROOT = Path(__file__).parents[2]
OBSERVE = (sys.executable, "-m", "userstream", "observe", "--simulate")

RACE = """
    import os, signal, sys, time
    import userstream as us
    from cuda.bindings import driver
    from cuda.core import Device

    def race():
        Device(0).set_current()
        _, memory = driver.cuMemAlloc(4096)
        one, other = us.Stream.create(0), us.Stream.create(0)
        driver.cuMemsetD8Async(memory, 1, 4096, int(one.handle))
        driver.cuMemsetD8Async(memory, 2, 4096, int(other.handle))
        one.sync(), other.sync()
        time.sleep(0.2)  # the log is written 50 times a second

    if __name__ == "__main__":
        race()
"""


def write(path: Path, text: str, more: str = "") -> None:
    path.write_text(textwrap.dedent(text) + textwrap.dedent(more))


def _path() -> str:
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": _path()}


def observe(
    where: Path, *arguments: str, **more: str
) -> tuple[subprocess.CompletedProcess[str], Any]:
    """Observe `program.py`; return how that ended, and the report as JSON."""
    report = where / "seen.json"
    arguments = ("--report", str(report), *(arguments or ("program.py",)))
    done = commands.observe(where, *arguments, **{"PYTHONPATH": _path(), **more})
    return done, json.loads(report.read_text()) if report.exists() else None


ENDS = {
    "os._exit(3)": (3, "ended with exit status 3"),
    "raise KeyError": (1, "ended with exit status 1"),
    "os.kill(os.getpid(), signal.SIGKILL)": (-9, "was killed by signal 9 (SIGKILL)"),
    "import ctypes; ctypes.string_at(8)": (-11, "was killed by signal 11 (SIGSEGV)"),
    "os.kill(os.getpid(), signal.SIGTERM)": (-15, "was killed by signal 15 (SIGTERM)"),
}


@pytest.mark.parametrize("end", ENDS)
def test_after_any_end_there_is_a_report_that_says_how_it_ended(end: str, tmp_path: Path) -> None:
    write(tmp_path / "program.py", RACE, f"    {end}\n")
    done, document = observe(tmp_path)
    status, said = ENDS[end]
    assert done.returncode == status, done.stderr
    assert f"\nprogram.py {said}\n" in done.stderr
    assert [race["kind"] for race in document["races"]] == ["write after write"]
    (process,) = document["processes"]
    assert (process["end"] is None) is (status < 0 or "_exit" in end)
    assert not list(tmp_path.glob("core*"))


def test_an_end_in_order_goes_without_saying(tmp_path: Path) -> None:
    write(tmp_path / "program.py", RACE)
    done, _ = observe(tmp_path)
    assert done.returncode == 66
    assert "ended" not in done.stderr
    assert "not seen" not in done.stderr


def test_a_program_without_cuda_has_nothing_to_report(tmp_path: Path) -> None:
    write(tmp_path / "program.py", "import sys; print(sorted(sys.modules)); sys.exit(4)")
    done, document = observe(tmp_path, **UNTRACED)  # coverage imports json
    assert done.returncode == 4
    assert done.stderr.splitlines() == [
        "observed 0.000 s, 0 driver calls on 0 streams: 0 races, 0 stalls",
        "program.py ended with exit status 4",
        "no process used CUDA: nothing was observed",
    ]
    assert document["processes"] == []
    assert not re.search("userstream|ctypes|json", done.stdout), "it starts as fast as without"


def test_a_log_that_could_not_be_written_is_named_with_the_cause(tmp_path: Path) -> None:
    # Without bytecode: Python would leave files in its cache that end at the limit.
    limit = """
        import resource, sys
        sys.dont_write_bytecode = True
        resource.setrlimit(resource.RLIMIT_FSIZE, (40, 40))
    """
    write(tmp_path / "program.py", limit, RACE)
    done, _ = observe(tmp_path, **UNTRACED)  # coverage writes a file
    assert done.returncode == 67, done.stderr
    assert re.search(r"process \d+: this log has no header: .*`ulimit -f`", done.stderr)
    assert "no process used CUDA" not in done.stderr


@pytest.mark.parametrize(
    "first",
    [
        "from cuda.bindings import driver",
        "from cuda.core import Device",
        "import os; os.environ.clear(); os.environ['USERSTREAM_SIMULATE'] = '1'",
    ],
)
def test_a_program_is_recorded_whatever_it_imports_first(first: str, tmp_path: Path) -> None:
    write(tmp_path / "program.py", f"{first}\n{textwrap.dedent(RACE)}")
    done, document = observe(tmp_path)
    assert done.returncode == 66, done.stderr
    assert len(document["races"]) == 1


WITHOUT_BINDINGS = """
    import ctypes

    cuda = ctypes.CDLL("libcuda.so.1")
    pointer, size = ctypes.c_void_p, ctypes.c_size_t(4096)
    context, memory, one, other = (pointer() for _ in range(4))
    assert cuda.cuInit(0) == 0
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert cuda.cuCtxSetCurrent(context) == 0
    assert cuda.cuMemAlloc_v2(ctypes.byref(memory), size) == 0
    for stream in (one, other):
        assert cuda.cuStreamCreate(ctypes.byref(stream), 1) == 0
    for stream in (one, other):
        assert cuda.cuMemsetD8Async(memory, 1, size, stream) == 0
"""


@pytest.mark.parametrize("more", ["", "import userstream"])
def test_a_program_that_imports_no_bindings_is_recorded(more: str, tmp_path: Path) -> None:
    write(tmp_path / "program.py", WITHOUT_BINDINGS, more)
    done, document = observe(tmp_path)
    assert done.returncode == 66, done.stderr
    (race,) = document["races"]
    assert race["kind"] == "write after write"
    assert document["not_seen"] == []


def test_each_program_is_recorded_that_takes_the_place_of_another(tmp_path: Path) -> None:
    """The second one runs in another environment of Python."""
    become = "import os, time; time.sleep(0.4); os.execv({0!r}, [{0!r}, *{1!r}])"
    second = become.format(sys.executable, ["-I", "-S", "second.py"])
    write(tmp_path / "program.py", WITHOUT_BINDINGS, second)
    write(tmp_path / "second.py", WITHOUT_BINDINGS, become.format(sys.executable, ["third.py"]))
    write(tmp_path / "third.py", RACE)
    done, document = observe(tmp_path)
    assert done.returncode == 66, done.stderr
    assert len({process["pid"] for process in document["processes"]}) == 1
    assert [len(race["processes"]) for race in document["races"]] == [1, 1, 1]
    assert "was replaced by exec" in done.stderr


def test_allocations_are_asked_for_where_a_framework_is_imported(tmp_path: Path) -> None:
    write(tmp_path / "torch.py", "")
    write(tmp_path / "program.py", "import sys, torch; print('userstream' in sys.modules)")
    for options, said in (((), "False"), (("--allocations",), "True"), (("--confirm",), "True")):
        done, _ = observe(tmp_path, *options, "program.py")
        assert (done.returncode, done.stdout.strip()) == (0, said), done.stderr


def test_the_recorder_of_another_tool_stays(tmp_path: Path) -> None:
    write(tmp_path / "program.py", "import os; print(os.environ['CUDA_INJECTION64_PATH'])")
    done, _ = observe(tmp_path, CUDA_INJECTION64_PATH="/of/another/tool.so")
    assert done.stdout == "/of/another/tool.so\n"


# -- signals --------------------------------------------------------------------------------------

HANDLES = """
    import os, signal, sys, time

    def handle(number, _):
        got.append(signal.Signals(number).name)

    got = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGRTMIN):
        signal.signal(number, handle)
    print(os.getppid(), flush=True)
    until = time.monotonic() + 10
    while not set(sys.argv[1:]) <= set(got) and time.monotonic() < until:
        time.sleep(0.02)
    time.sleep(0.2)  # for what should not come
    print(*got)
    sys.exit(5)
"""


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Any]:
    """Start a program under `observe`; each is killed at the end."""
    processes = []

    def start(*arguments: str, **how: Any) -> Any:
        command = [*OBSERVE, *arguments]
        how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **how}
        process = subprocess.Popen(command, text=True, cwd=tmp_path, env=environment(), **how)
        processes.append(process)
        return process

    yield start
    for process in processes:
        with process:
            process.kill()


def test_signals_go_on_to_the_program(tmp_path: Path, started: Any) -> None:
    write(tmp_path / "program.py", HANDLES)
    names = ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGRTMIN"]
    process = started("program.py", *names)
    assert int(process.stdout.readline()) == process.pid
    for name in names:
        process.send_signal(getattr(signal, name))
    out, err = process.communicate()
    assert sorted(out.split()) == sorted(names)
    assert process.returncode == 5, err
    assert "program.py ended with exit status 5" in err


def test_a_key_of_the_terminal_reaches_the_program_once(tmp_path: Path) -> None:
    write(tmp_path / "program.py", HANDLES)
    pid, terminal = pty.fork()
    if not pid:
        os.chdir(tmp_path)
        os.execve(sys.executable, [*OBSERVE, "program.py", "SIGINT"], environment())
    said = b""
    try:
        while b"\n" not in said:
            said += os.read(terminal, 1000)
        os.write(terminal, b"\x03")
        _, status = os.waitpid(pid, 0)
        while select.select([terminal], (), (), 0)[0]:
            said += os.read(terminal, 10000)
    except OSError:  # Linux: the other end is closed
        pass
    finally:
        os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 5
    assert said.count(b"SIGINT") == 1
    assert b"program.py ended with exit status 5" in said


def test_a_program_that_signals_its_group_does_not_hear_it_twice(
    tmp_path: Path, started: Any
) -> None:
    write(
        tmp_path / "program.py", HANDLES.replace("    until =", "    os.killpg(0, 10)\n    until =")
    )
    process = started("program.py", "SIGUSR1", start_new_session=True)
    out, err = process.communicate()
    assert out.split()[1:] == ["SIGUSR1"], err


HANGS = """
    import sys
    import userstream as us
    from cuda.core import Device
    from userstream.testing import latch

    Device(0).set_current()
    stream = us.Stream.create(0)
    with latch(stream):
        sys.stdin.read()
"""


def test_a_program_that_hangs_is_reported_after_some_time_and_when_it_is_asked_for(
    tmp_path: Path, started: Any
) -> None:
    write(tmp_path / "program.py", HANGS)
    process = started("--hang-after", "0.1", "program.py", stdin=subprocess.PIPE)

    def heard(cause: str) -> list[str]:
        (head,) = itertools.islice((line for line in process.stderr if cause in line), 1)
        assert re.match(r"process \d+: ", head)
        return [process.stderr.readline().strip() for _ in range(2)]

    after_time = heard(": nothing has moved for 0.1 s; ")
    process.send_signal(signal.SIGUSR1)  # of which the program would die
    assert heard(": SIGUSR1; ") == after_time
    assert after_time[0].startswith("stream 1 of device 0: cuStreamWaitValue32_v2 at program.py:9 ")
    assert after_time[1].endswith(", which no stream writes")
    _, err = process.communicate("")
    assert process.returncode == 0
    assert "\n\nnothing has moved for 0.1 s; " in err  # in the report as well


def test_a_program_ends_with_its_supervisor(tmp_path: Path, started: Any) -> None:
    write(
        tmp_path / "program.py", "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    )
    process = started("program.py")
    pid = int(process.stdout.readline())
    process.kill()
    process.wait()
    until = time.monotonic() + 10
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < until:
        time.sleep(0.01)
    assert not os.path.exists(f"/proc/{pid}")


def test_who_reads_the_output_waits_for_the_program_alone(tmp_path: Path, started: Any) -> None:
    program = "print(flush=True); import os, time; os.close(1); time.sleep(60)"
    write(tmp_path / "program.py", program)
    process = started("program.py")
    assert process.stdout.read() == "\n"  # up to its end
    assert process.poll() is None


def test_files_that_do_not_block_get_the_whole_report(tmp_path: Path, started: Any) -> None:
    call = "        driver.cuMemsetD8Async(memory, 3, 4096, int(one.handle))\n"
    program = RACE.replace("        one.sync()", 150 * call + "        one.sync()")
    write(tmp_path / "program.py", program, "    os.set_blocking(2, False)\n")
    process = started("program.py")
    time.sleep(3)
    _, err = process.communicate()
    assert process.returncode == 66
    assert err.count("  suppress: ") == int(re.search(r": (\d+) races, ", err)[1]) > 100
    assert len(err) > 1 << 16, "more than a pipe takes at once"


# -- children -------------------------------------------------------------------------------------

CHILDREN = {
    "subprocess": """
        import subprocess, sys
        subprocess.run([sys.executable, "race.py"], check=True)
    """,
    "shell": """
        import os, sys
        assert os.system(f"cd / && {sys.executable} {os.getcwd()}/race.py") == 0
    """,
    "spawn": """
        import multiprocessing
        import race
        if __name__ == "__main__":
            child = multiprocessing.get_context("spawn").Process(target=race.race)
            child.start(), child.join()
    """,
    "forkserver": """
        import multiprocessing
        def work():
            import race
            race.race()
        if __name__ == "__main__":
            child = multiprocessing.get_context("forkserver").Process(target=work)
            child.start(), child.join()
    """,
}


@pytest.mark.parametrize("way", CHILDREN)
def test_children_are_recorded_as_well(way: str, tmp_path: Path) -> None:
    write(tmp_path / "race.py", RACE)
    write(tmp_path / "program.py", CHILDREN[way])
    done, document = observe(tmp_path)
    assert done.returncode == 66, done.stderr
    (race,) = document["races"]
    assert race["first"]["line"] == [str(tmp_path / "race.py"), 11, "race"]
    assert "was not recorded" not in done.stderr


def test_processes_with_the_same_race_share_an_entry(tmp_path: Path) -> None:
    write(tmp_path / "race.py", RACE)
    program = """
        import os, subprocess, sys
        children = [
            subprocess.Popen([sys.executable, "race.py"], env={**os.environ, "RANK": str(rank)})
            for rank in range(3)
        ]
        for child in children:
            child.wait()
    """
    write(tmp_path / "program.py", program)
    done, document = observe(tmp_path)
    assert done.returncode == 66, done.stderr
    assert " in 3 processes (ranks 0-2): 1 race, " in done.stderr
    assert "\nwrite after write, 3 times, ranks 0-2: " in done.stderr
    assert [each["rank"] for each in document["processes"]] == ["0", "1", "2"]


def test_without_children_the_program_alone_is_recorded(tmp_path: Path) -> None:
    write(tmp_path / "race.py", RACE)
    write(
        tmp_path / "program.py", CHILDREN["subprocess"], "import userstream as us; us.get_stream(0)"
    )
    done, document = observe(tmp_path, "--no-children", "program.py")
    assert (done.returncode, document["races"]) == (0, [])
    assert len(document["processes"]) == 1
    assert "not seen" not in done.stderr


def test_a_process_that_was_not_recorded_is_named_with_the_reason(tmp_path: Path) -> None:
    write(tmp_path / "race.py", RACE.replace("0.2", "5"))  # a busy machine looks seldom
    program = """
        import os, subprocess, sys
        kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "PATH")}
        subprocess.run([sys.executable, "race.py"], env={**kept, "PYTHONPATH": sys.argv[1]})
        raise SystemExit(0)
    """
    write(tmp_path / "program.py", program)
    done, document = observe(tmp_path, "program.py", str(ROOT))
    assert done.returncode == 0, done.stderr
    (said,) = document["not_seen"]
    assert re.fullmatch(
        r"process \d+ \(python.* race.py\) used CUDA and was not recorded: "
        r"its environment lacks USERSTREAM_RECORD .*",
        said,
    )


def test_what_the_program_leaves_behind_holds_nothing_up(tmp_path: Path) -> None:
    write(tmp_path / "race.py", RACE, "    open('racing', 'w').close(); time.sleep(60)")
    program = """
        import os, subprocess, sys, time
        files = {name: subprocess.DEVNULL for name in ("stdout", "stderr")}
        child = subprocess.Popen([sys.executable, "race.py"], start_new_session=True, **files)
        while not os.path.exists("racing"):
            time.sleep(0.05)
        print(child.pid)
    """
    write(tmp_path / "program.py", program)
    began = time.monotonic()
    done, document = observe(tmp_path)
    assert time.monotonic() - began < 30
    os.kill(int(done.stdout), signal.SIGKILL)
    assert done.returncode == 66
    assert len(document["races"]) == 1
    assert "or still runs" in done.stderr


# -- how Python starts ----------------------------------------------------------------------------


def test_the_users_own_sitecustomize_runs(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    write(tmp_path / "site/sitecustomize.py", "import builtins; builtins.mine = __file__")
    write(tmp_path / "program.py", "import sitecustomize as s; print(mine == s.__file__, s.mine)")
    path = os.pathsep.join((str(tmp_path / "site"), str(ROOT)))
    plain = subprocess.run(
        [sys.executable, "program.py"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    done, _ = observe(tmp_path, PYTHONPATH=path)
    assert "has no attribute 'mine'" in plain.stderr
    assert plain.stderr in done.stderr
    write(tmp_path / "program.py", "import sitecustomize; print(mine == sitecustomize.__file__)")
    assert observe(tmp_path, PYTHONPATH=path)[0].stdout == "True\n"
    write(tmp_path / "site/sitecustomize.py", "import not_there")
    done, _ = observe(tmp_path, PYTHONPATH=path)
    assert "Error in sitecustomize; " in done.stderr
    assert "No module named 'not_there'" in done.stderr


@pytest.mark.parametrize("flags", [("-u",), ("-X", "dev"), ("-O",), ("-W", "error"), ("-s",)])
def test_the_program_gets_the_flags_of_the_interpreter(
    flags: tuple[str, ...], tmp_path: Path
) -> None:
    program = (
        "import sys; print(sys.flags, sys._xoptions, sys.warnoptions, sys.stdout.write_through)"
    )
    write(tmp_path / "program.py", program)
    told = [
        subprocess.check_output(
            [sys.executable, *flags, *command, "program.py"],
            text=True,
            cwd=tmp_path,
            env=environment(),
            stderr=subprocess.DEVNULL,
        )
        for command in ((), OBSERVE[1:])
    ]
    assert told[0] == told[1]


def test_a_command_on_the_path_is_a_program_too(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    write(tmp_path / "bin/racer", f"#!{sys.executable}\n", RACE)
    (tmp_path / "bin/racer").chmod(0o755)
    path = os.pathsep.join((str(tmp_path / "bin"), os.environ["PATH"]))
    done, document = observe(tmp_path, "racer", PATH=path)
    assert done.returncode == 66, done.stderr
    assert len(document["races"]) == 1
