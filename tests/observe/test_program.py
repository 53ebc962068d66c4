"""The program of ``python -m userstream observe`` runs as Python runs it, and is reported on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from userstream import testing

pytestmark = pytest.mark.simulated  # what it runs is

ROOT = Path(__file__).parents[2]
OBSERVE = ("-m", "userstream", "observe", "--simulate")

FACTS = """
    import atexit, multiprocessing, pickle, sys, threading

    class Mine:
        pass

    def main_module(_=0):
        module = sys.modules["__main__"]
        return module.__name__, module.Mine.__module__, module.Mine is Mine

    def tell(where):
        pickle.loads(pickle.dumps(Mine()))
        print(where, main_module(), flush=True)

    if __name__ == "__main__":
        atexit.register(tell, "exit")
        thread = threading.Thread(target=lambda: (go_on.wait(), tell("thread")))
        go_on = threading.Event()
        thread.start()
        print(__file__, sys.path[0], sys.argv, __package__, __spec__ and __spec__.name)
        print([path for path in sys.path if "given" in path])
        if "spawn" in sys.argv:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(main_module, [1]))
        go_on.set()
"""

RACE = """
    import sys
    import userstream as us
    from cuda.core import Device

    Device(0).set_current()
    one, other = us.Stream.create(0), us.Stream.create(0)
    buffer = Device(0).allocate(1024, stream=one)
    other.wait(one)
    buffer.fill(7, stream=one)
    buffer.fill(8, stream=other)
    one.sync(), other.sync()
"""


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))


def python(
    where: Path, *arguments: str, status: int | None = 0, **more: str
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}/given/path", **more}
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=where,
        env=environment,
        check=False,
    )
    assert status is None or done.returncode == status, done.stderr
    return done


@pytest.mark.parametrize(
    ("flags", "program"),
    [
        ((), ("folder/program.py", "an argument", "spawn")),
        ((), ("link.py",)),
        ((), ("folder",)),
        ((), ("-m", "package.module", "--html", "x")),
        ((), ("-mpackage",)),
        (("-P",), ("folder/program.py",)),
        (("-P",), ("folder",)),
    ],
    ids=["file", "link", "folder", "module", "package", "-P", "-P folder"],
)
def test_a_program_runs_as_without(
    flags: tuple[str, ...], program: tuple[str, ...], tmp_path: Path
) -> None:
    for name in ("folder/program.py", "folder/__main__.py", "package/module.py"):
        write(tmp_path / name, FACTS)
    write(tmp_path / "package/__main__.py", FACTS)
    write(tmp_path / "package/__init__.py", "")
    (tmp_path / "link.py").symlink_to(tmp_path / "folder" / "program.py")
    plain = python(tmp_path, *flags, *program)
    watched = python(tmp_path, *flags, *OBSERVE, *program)
    assert watched.stdout == plain.stdout
    assert "exit" in plain.stdout
    assert "thread" in plain.stdout
    assert ": 0 races" in watched.stderr


@pytest.mark.parametrize("first", ["driver", "runtime", "nvrtc", "cufile"])
def test_a_program_may_begin_with_any_module_of_cuda_bindings(first: str, tmp_path: Path) -> None:
    write(tmp_path / "program.py", f"import cuda.bindings.{first}\n{textwrap.dedent(RACE)}")
    done = python(tmp_path, *OBSERVE, "program.py", status=66)
    assert ": 1 race" in done.stderr


def test_a_program_may_begin_with_userstream_on_the_driver_that_is_installed(
    tmp_path: Path,
) -> None:
    """Another thread then loads the driver, while the import of userstream has not returned."""
    write(
        tmp_path / "program.py",
        """
        import faulthandler
        faulthandler.dump_traceback_later(30, exit=True)
        import userstream
        print("ran")
        """,
    )
    installed = {"LD_LIBRARY_PATH": testing.library_path()}
    done = python(tmp_path, "-m", "userstream", "observe", "program.py", status=None, **installed)
    assert done.stdout == "ran\n", done.stderr


def test_a_userstream_that_cannot_be_imported_stops_no_program(tmp_path: Path) -> None:
    write(tmp_path / "broken/userstream/__init__.py", "raise RuntimeError('not this one')")
    write(
        tmp_path / "program.py",
        """
        import sys
        sys.path.insert(0, "broken")
        from cuda.bindings import driver
        print(driver.cuInit(0))
        """,
    )
    done = python(tmp_path, *OBSERVE, "program.py")
    assert "CUDA_SUCCESS" in done.stdout
    assert "Traceback" not in done.stderr


def test_two_hyphens_end_the_options(tmp_path: Path) -> None:
    write(tmp_path / "program.py", "import sys; print(sys.argv)")
    done = python(tmp_path, *OBSERVE, "--", "program.py", "--json", "--", "-m")
    assert done.stdout == "['program.py', '--json', '--', '-m']\n"


@pytest.mark.parametrize(
    ("program", "message"),
    [(("nothing.py",), "can't open file"), (("-m",), "expected one argument")],
)
def test_a_program_that_is_not_there_is_refused(
    program: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    done = python(tmp_path, *OBSERVE, *program, status=2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_relative_paths_are_those_of_the_start(tmp_path: Path) -> None:
    write(tmp_path / "known.txt", "race=use-after-free\n")
    write(tmp_path / "program.py", f"import os; os.chdir('/')\n{textwrap.dedent(RACE)}")
    files = ("--json", "seen.json", "--html", "seen.html", "--suppress", "known.txt")
    python(tmp_path, *OBSERVE, *files, "program.py", status=66)
    assert len(json.loads((tmp_path / "seen.json").read_text())["races"]) == 1
    assert "write after write" in (tmp_path / "seen.html").read_text()


ENDS = {
    "closed files": "sys.stdout.close(); sys.stderr.close()",
    "no files": "sys.stdout = sys.stderr = None",
    "other files": "import io; sys.stdout = sys.stderr = io.StringIO()",
    "closed descriptors": "import os; os.close(1); os.close(2)",
    "all descriptors": "import os; os.closerange(0, 4096)",
    "descriptors of a file": (
        "import os; os.closerange(0, 4096); file = open('mine.txt', 'w'); "
        "[os.dup2(file.fileno(), n) for n in (1, 2, 500, 501)]"
    ),
    "a hook that fails": "sys.excepthook = None; raise KeyError",
}


@pytest.mark.parametrize("end", ENDS)
def test_whatever_the_program_does_with_its_files_the_report_is_saved(
    end: str, tmp_path: Path
) -> None:
    write(tmp_path / "program.py", f"{textwrap.dedent(RACE)}\n{ENDS[end]}\n")
    done = python(tmp_path, *OBSERVE, "--json", "seen.json", "program.py", status=None)
    assert done.returncode == (1 if "raise" in ENDS[end] else 66), done.stderr
    assert len(json.loads((tmp_path / "seen.json").read_text())["races"]) == 1
    if "descriptors" not in end:
        assert "1 race" in done.stderr
    mine = tmp_path / "mine.txt"
    assert not mine.exists() or mine.read_text() == ""


@pytest.mark.parametrize("status", [0, 3])
def test_a_reader_that_goes_away_loses_neither_report_nor_status(
    status: int, tmp_path: Path
) -> None:
    program = f"{textwrap.dedent(RACE)}\nprint('one line')\nsys.exit({status})\n"
    write(tmp_path / "program.py", program)
    call = [sys.executable, *OBSERVE, "--json", "seen.json", "program.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}
    read, written = os.pipe()
    os.close(read)
    done, plain = (
        subprocess.run(
            each, stdout=written, stderr=written, cwd=tmp_path, env=environment, check=False
        )
        for each in (call, [sys.executable, "-c", f"print('one line'); exit({status})"])
    )
    os.close(written)
    assert done.returncode == plain.returncode  # Python could not flush stdout
    assert len(json.loads((tmp_path / "seen.json").read_text())["races"]) == 1


def test_a_disk_that_is_full_loses_neither_the_other_report_nor_the_status(
    tmp_path: Path,
) -> None:
    if not os.access("/dev/full", os.W_OK):
        pytest.skip("needs /dev/full")
    write(tmp_path / "program.py", RACE)
    (tmp_path / "seen.html").symlink_to("/dev/full")
    files = ("--json", "seen.json", "--html", "seen.html")
    done = python(tmp_path, *OBSERVE, *files, "program.py", status=66)
    assert len(json.loads((tmp_path / "seen.json").read_text())["races"]) == 1
    assert "seen.html' was not written: No space left on device" in done.stderr
    assert "1 race" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_file_that_cannot_be_written_is_refused_before_the_program_runs(tmp_path: Path) -> None:
    write(tmp_path / "program.py", "print('not run')")
    (tmp_path / "folder.json").mkdir()
    done = python(tmp_path, *OBSERVE, "--json", "folder.json", "program.py", status=2)
    assert "'folder.json' cannot be written" in done.stderr
    assert done.stdout == ""
