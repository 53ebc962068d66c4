"""Compiling the simulated driver, and the cache of what was compiled."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from testing.programs import ROOT, run
from userstream.testing import _build

COMPILERS = [name for name in ("gcc", "clang") if shutil.which(name)]
pytestmark = pytest.mark.skipif(not COMPILERS, reason="needs a C compiler")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    directory = tmp_path / "cache"
    monkeypatch.setenv("USERSTREAM_CACHE_DIR", str(directory))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("USERSTREAM_CFLAGS", raising=False)
    return directory


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """Sources that compile at once."""
    sources = tmp_path / "driver"
    sources.mkdir()
    (sources / "driver.c").write_text('#include "driver.h"\nint answer = ANSWER;\n')
    (sources / "driver.h").write_text("#define ANSWER 42\n")
    monkeypatch.setattr(_build, "SOURCES", sources)
    return sources


@pytest.mark.parametrize("compiler", COMPILERS)
def test_the_sources_compile_without_warnings(compiler, tmp_path):
    flags = ["-Wall", "-Wextra", "-Werror", *_build.FLAGS]
    sources = sorted(map(str, _build.SOURCES.glob("*.c")))
    done = subprocess.run(
        [compiler, *flags, *sources, "-o", str(tmp_path / "driver.so")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_only_the_functions_of_the_driver_are_visible():
    nm = shutil.which("nm")
    if not nm:
        pytest.skip("needs nm")
    names = subprocess.run(
        [nm, "-D", "--defined-only", _build.library()], capture_output=True, text=True, check=True
    ).stdout.split()[2::3]
    assert names
    assert all(name.startswith(("cu", "userstream_")) for name in names), names


def test_no_line_is_long():
    for source in _build.SOURCES.glob("*.[ch]"):
        for number, line in enumerate(source.read_text().splitlines(), 1):
            assert len(line) <= 100, (source.name, number)


def test_the_result_is_used_again(cache, tiny):
    first = _build.library()
    time = first.stat().st_mtime_ns
    assert _build.library() == first
    assert first.stat().st_mtime_ns == time


def test_nothing_else_is_left_in_the_cache(cache, tiny):
    path = _build.library()
    assert list(cache.iterdir()) == [path]


@pytest.mark.parametrize("changed", ["driver.c", "driver.h"])
def test_changed_sources_are_compiled_again(cache, tiny, changed):
    first = _build.library()
    (tiny / changed).write_text((tiny / changed).read_text() + "\n")
    assert _build.library() != first


def test_other_flags_give_another_result(cache, tiny, monkeypatch):
    first = _build.library()
    monkeypatch.setenv("USERSTREAM_CFLAGS", "-O0 -DSOMETHING")
    assert _build.library() != first


def test_another_compiler_gives_another_result(cache, tiny, tmp_path, monkeypatch):
    first = _build.library()
    wrapper = tmp_path / "other-cc"
    wrapper.write_text(f'#!/bin/sh\nexec {COMPILERS[0]} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CC", str(wrapper))
    assert _build.library() != first


def test_the_compiler_may_have_arguments(cache, tiny, monkeypatch):
    monkeypatch.setenv("CC", f"{COMPILERS[0]} -O0")
    assert _build.library().exists()


def test_the_cache_is_private(cache, tiny):
    _build.library()
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


@pytest.mark.parametrize("right", [0o020, 0o002], ids=["group", "world"])
def test_a_cache_that_others_can_write_is_refused(cache, tiny, right):
    cache.mkdir()
    cache.chmod(0o700 | right)
    with pytest.raises(RuntimeError, match=r"others can write .*chmod go-w"):
        _build.library()


def test_a_cache_of_another_user_is_refused(cache, tiny, monkeypatch):
    cache.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: cache.stat().st_uid + 1)
    with pytest.raises(RuntimeError, match=r"belongs to another user.*USERSTREAM_CACHE_DIR"):
        _build.library()


def test_a_cache_that_is_a_file(cache, tiny):
    cache.write_text("")
    with pytest.raises(RuntimeError, match=r"cannot make .*USERSTREAM_CACHE_DIR"):
        _build.library()


def test_a_cache_that_cannot_be_written(cache, tiny, monkeypatch):
    refuse_files(monkeypatch, cache)
    with pytest.raises(RuntimeError, match=r"cannot write .*read-only.*USERSTREAM_CACHE_DIR"):
        _build.library()


def test_a_cache_that_can_only_be_read_is_used(cache, tiny, monkeypatch):
    first = _build.library()
    refuse_files(monkeypatch, cache)
    assert _build.library() == first


def refuse_files(monkeypatch, cache):
    """As a directory of mode 0500 does, which root may write nevertheless."""
    mkstemp = tempfile.mkstemp

    def refuse(*arguments, **keywords):
        if keywords.get("dir") == cache:
            raise PermissionError(errno.EACCES, "read-only")
        return mkstemp(*arguments, **keywords)

    monkeypatch.setattr(tempfile, "mkstemp", refuse)


def compilations(tmp_path, monkeypatch):
    """Count what is linked from here on."""
    log = tmp_path / "compilations"
    log.touch()
    wrapper = tmp_path / "counting-cc"
    wrapper.write_text(
        f'#!/bin/sh\ncase " $* " in *" -shared "*) echo x >> {log};; esac\n'
        f'exec {COMPILERS[0]} "$@"\n'
    )
    wrapper.chmod(0o755)
    monkeypatch.setenv("CC", str(wrapper))
    return lambda: len(log.read_text().split())


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda path: os.truncate(path, path.stat().st_size // 2), id="cut short"),
        pytest.param(lambda path: os.truncate(path, 0), id="empty"),
        pytest.param(lambda path: path.write_bytes(path.read_bytes()[:-1]), id="a byte short"),
        pytest.param(lambda path: path.write_bytes(b"\0" + path.read_bytes()[1:]), id="changed"),
        pytest.param(lambda path: path.chmod(0o770), id="the group can write it"),
        pytest.param(lambda path: path.chmod(0o707), id="all can write it"),
        pytest.param(lambda path: path.rename(path.with_suffix(".old")), id="gone"),
        pytest.param(
            lambda path: path.symlink_to(path.rename(path.with_suffix(".old"))), id="a link"
        ),
        pytest.param(lambda path: (path.unlink(), os.mkfifo(path)), id="a pipe"),
    ],
)
def test_a_library_that_is_not_fit_is_replaced(cache, tiny, tmp_path, monkeypatch, spoil):
    count = compilations(tmp_path, monkeypatch)
    path = _build.library()
    good = path.read_bytes()
    spoil(path)
    assert _build.library() == path
    assert count() == 2
    assert path.read_bytes() == good
    assert stat.S_IMODE(path.stat(follow_symlinks=False).st_mode) == 0o700
    assert _build.library() == path
    assert count() == 2


def test_a_library_that_another_user_put_there_is_not_loaded(cache, tiny, tmp_path, monkeypatch):
    """Before the directory was closed to others, as the message of `simulate` asks."""
    count = compilations(tmp_path, monkeypatch)
    path = _build.library()
    planted = path.stat()
    fstat = os.fstat

    def of_another(descriptor):
        found = fstat(descriptor)
        if found.st_ino != planted.st_ino:
            return found
        fields = list(found)
        fields[stat.ST_UID] += 1
        return os.stat_result(fields)

    monkeypatch.setattr(os, "fstat", of_another)
    assert _build.library() == path
    assert count() == 2


def test_a_directory_in_the_place_of_the_library(cache, tiny):
    path = _build.library()
    path.unlink()
    path.mkdir()
    with pytest.raises(RuntimeError, match=r"cannot write .*irectory.*USERSTREAM_CACHE_DIR"):
        _build.library()
    assert list(cache.iterdir()) == [path]


@pytest.mark.parametrize(
    "script", ["exit 0", 'for last; do :; done; rm -f "$last"'], ids=["nothing", "no file"]
)
def test_a_compiler_that_leaves_nothing(cache, tiny, tmp_path, monkeypatch, script):
    wrapper = tmp_path / "idle-cc"
    wrapper.write_text(f"#!/bin/sh\n{script}\n")
    wrapper.chmod(0o755)
    monkeypatch.setenv("CC", str(wrapper))
    with pytest.raises(RuntimeError, match=r"idle-cc.* reports success and left no library"):
        _build.library()
    assert list(cache.iterdir()) == []


def test_a_umask_that_lets_the_group_write(cache, tiny):
    before = os.umask(0o002)
    try:
        path = _build.library()
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    finally:
        os.umask(before)


def test_no_home(cache, tiny, monkeypatch):
    monkeypatch.delenv("USERSTREAM_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", _no_home)
    with pytest.raises(RuntimeError, match="USERSTREAM_CACHE_DIR"):
        _build.library()


def test_a_home_that_cannot_be_used(cache):
    """End to end: HOME is no directory, as in a container that runs with any user."""
    done = run(
        "from userstream import testing; testing.simulate()",
        environment={"HOME": "/dev/null", "XDG_CACHE_HOME": "", "USERSTREAM_CACHE_DIR": ""},
    )
    assert done.returncode != 0
    assert "cannot make a cache directory" in done.stderr.splitlines()[-1]
    assert "USERSTREAM_CACHE_DIR" in done.stderr.splitlines()[-1]


def test_no_home_and_no_user(tmp_path):
    """End to end: the user of the process has no entry among the users, and there is no HOME."""
    done = run(
        """
import os, pwd
del os.environ["HOME"]
def unknown(uid):
    raise KeyError(f"getpwuid(): uid not found: {uid}")
pwd.getpwuid = unknown
from userstream import testing
testing.simulate()
""",
        environment={"XDG_CACHE_HOME": "", "USERSTREAM_CACHE_DIR": ""},
    )
    assert done.returncode != 0
    assert "cannot make a cache directory" in done.stderr.splitlines()[-1]


def _no_home():
    raise RuntimeError("Could not determine home directory.")


def test_the_places_of_the_cache(cache, tiny, tmp_path, monkeypatch):
    monkeypatch.delenv("USERSTREAM_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert _build.library().parent == tmp_path / "xdg" / "userstream"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert _build.library().parent == tmp_path / "home" / ".cache" / "userstream"


def test_a_compiler_behind_ccache(cache, tiny, tmp_path, monkeypatch):
    """CC="ccache gcc", as many build machines set it."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "ccache").write_text('#!/bin/sh\nexec "$@"\n')
    (tools / "ccache").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    plain = _build.library()
    monkeypatch.setenv("CC", f"ccache {COMPILERS[0]}")
    assert _build.library() != plain
    assert _build.library().exists()


def test_no_compiler(cache, tiny, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match=r"no C compiler.*gcc.*clang.*build-essential"):
        _build.library()


def test_a_compiler_that_does_not_exist(cache, tiny, monkeypatch):
    monkeypatch.setenv("CC", "/nowhere/cc")
    with pytest.raises(RuntimeError, match=r"'/nowhere/cc' that \$CC names was not found"):
        _build.library()


def test_sources_that_do_not_compile(cache, tiny):
    (tiny / "driver.c").write_text("this is no C\n")
    with pytest.raises(RuntimeError, match=r"could not be compiled with .*\n.*driver.c"):
        _build.library()
    assert list(cache.iterdir()) == []


def test_a_system_that_is_not_linux(cache, tiny, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(RuntimeError, match="Linux only, not on darwin"):
        _build.library()


@pytest.mark.parametrize("answer", [ValueError("unrecognized"), None], ids=["error", "none"])
def test_a_system_without_glibc(cache, tiny, monkeypatch, answer):
    def confstr(name):
        assert name == "CS_GNU_LIBC_VERSION"
        if answer is not None:
            raise answer

    monkeypatch.setattr(os, "confstr", confstr)
    with pytest.raises(RuntimeError, match=r"glibc.*musl"):
        _build.library()


@pytest.mark.timeout(240)
def test_processes_that_race_for_the_cache(cache, tmp_path, monkeypatch):
    """Eight start with an empty cache: one compiles, and all load the same whole library."""
    count = compilations(tmp_path, monkeypatch)
    code = """
from userstream import testing
testing.simulate()
from cuda.bindings import driver
assert driver.cuInit(0)[0] == 0
"""
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": str(ROOT), "USERSTREAM_CACHE_DIR": str(cache)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(8)
    ]
    for program in programs:
        _, errors = program.communicate(timeout=200)
        assert program.returncode == 0, errors
    assert [path.suffix for path in cache.iterdir()] == [".so"]
    assert count() == 1


def test_a_compilation_that_cannot_be_alone(cache, tiny, monkeypatch):
    """Some file systems lock no directories: then each process compiles for itself."""

    def no_locks(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert _build.library().exists()


def test_the_message_reaches_the_user(cache):
    """End to end: what a user without a compiler sees."""
    done = run(
        "from userstream import testing; testing.simulate()", environment={"CC": "/nowhere/cc"}
    )
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1].startswith("RuntimeError: the C compiler '/nowhere/cc'")


@pytest.mark.parametrize("variable", ["CC", "USERSTREAM_CFLAGS"])
def test_an_unfinished_quotation(variable, cache, tiny, monkeypatch):
    monkeypatch.setenv(variable, "'gcc")
    with pytest.raises(RuntimeError, match=rf"{variable} is \"'gcc\": No closing quotation"):
        _build.library()
