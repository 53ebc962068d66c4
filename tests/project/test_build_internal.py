"""The native libraries: how the installation compiles them, and that they match their sources."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import userstream as us
from helpers import run_python
from userstream import _built

ROOT = Path(__file__).parents[2]
PACKAGE = Path(us.__file__).parent
LIBRARIES = (
    _built.CORE,
    _built.RECORDER,
    _built.SIMULATED_DRIVER,
    _built.SIMULATED_NVML,
)
INCLUDE = Path(sysconfig.get_path("include"))
pytestmark = pytest.mark.skipif(
    not (PACKAGE / _built.CORE.sources).exists(), reason="a wheel has left out the C files"
)


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("hatchling")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("USERSTREAM_CFLAGS", raising=False)
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def package(tmp_path: Path, hook: ModuleType) -> Iterator[Path]:
    """A package whose C files compile quickly."""
    for library in LIBRARIES:
        (tmp_path / library.sources).mkdir(parents=True)
        (tmp_path / library.sources / "answer.c").write_text("int answer(void) { return 42; }\n")
    # From these, a C file is made.
    shutil.copytree(PACKAGE / "_observe" / "judge", tmp_path / "_observe" / "judge")
    for name in ("__init__.py", "_observe/native/rules.py", "_observe/native/parts.h"):
        shutil.copy(PACKAGE / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
@pytest.mark.parametrize("free_threaded", [False, True])
@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_the_c_files_have_no_warnings(
    compiler: str, free_threaded: bool, library: _built.Library, tmp_path: Path
) -> None:
    if not shutil.which(compiler) or not (INCLUDE / "Python.h").exists():
        pytest.skip(f"needs {compiler} and the headers of Python")
    if free_threaded and (library is not _built.CORE or sys.version_info < (3, 13)):
        pytest.skip("these files or headers know no free threading")
    sources = sorted((PACKAGE / library.sources).glob("*.c"))
    flags = ["-std=c11", "-O1", "-Wall", "-Wextra"]  # -O1 finds what -O2 finds, sooner
    if library is _built.CORE:
        flags += ["-Wpedantic", "-Wconversion", "-Wshadow", "-isystem", str(INCLUDE)]
    if free_threaded:  # as far as the headers of a Python with the GIL declare it
        flags.append("-DPy_GIL_DISABLED=1")
    command = [compiler, *flags, "-c", *map(str, sources)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert sources
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_no_line_of_c_is_long(library: _built.Library) -> None:
    for source in (PACKAGE / library.sources).glob("*.[ch]"):
        for number, line in enumerate(source.read_text().splitlines(), 1):
            assert len(line) <= 100, (source.name, number)


@pytest.mark.skipif(not shutil.which("nm"), reason="needs nm")
def test_the_simulated_driver_exports_the_functions_of_the_driver() -> None:
    library = PACKAGE / _built.SIMULATED_DRIVER.file
    command = ["nm", "-D", "--defined-only", str(library)]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[2::3]
    assert len(names) > 100
    assert all(name.startswith(("cu", "userstream_")) for name in names), names


def test_the_simulated_driver_can_stand_on_the_library_path() -> None:
    done = run_python(
        """
        from cuda.bindings import driver
        assert driver.cuInit(0)[0] == 0
        print(driver.cuDeviceGetCount()[1])
        """,
        simulate=None,
        LD_LIBRARY_PATH=str((PACKAGE / _built.SIMULATED_DRIVER.file).parent),
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) > 0


def test_all_is_compiled_into_the_package(hook: ModuleType, package: Path) -> None:
    hook.build(package)
    for library in hook.LIBRARIES:
        assert (package / library.file).read_bytes()[:4] == b"\x7fELF"
    assert list(package.rglob("*.new")) == []


def test_the_flags_count(hook: ModuleType, package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USERSTREAM_CFLAGS", "-DANSWER=42")
    (package / _built.RECORDER.sources / "answer.c").write_text("int answer = ANSWER;\n")
    hook.build(package)
    monkeypatch.setenv("USERSTREAM_CFLAGS", "")
    with pytest.raises(hook.BuildError, match=r"answer\.c.* failed:\n(.*\n)*.*ANSWER"):
        hook.build(package)


def test_a_compiler_may_have_arguments_and_stand_behind_a_cache(
    hook: ModuleType, package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "ccache"
    cache.write_text('#!/bin/sh\nexec "$@"\n')
    cache.chmod(0o755)
    monkeypatch.setenv("CC", f"{cache} {hook.installed_compiler()[0]} -O0")
    hook.build(package)


@pytest.mark.parametrize(
    ("compiler", "message"),
    [
        ("/nowhere/cc", "'/nowhere/cc' does not run"),
        ("false", "false .* failed"),
    ],
)
def test_a_compiler_that_does_not_work(
    compiler: str,
    message: str,
    hook: ModuleType,
    package: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CC", compiler)
    with pytest.raises(hook.BuildError, match=message):
        hook.build(package)
    assert not any((package / library.file).exists() for library in hook.LIBRARIES)


@pytest.mark.parametrize("variable", ["CC", "USERSTREAM_CFLAGS"])
def test_an_unfinished_quotation(
    variable: str, hook: ModuleType, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "'gcc")
    with pytest.raises(SystemExit, match=rf"{variable} is \"'gcc\": No closing quotation"):
        hook.build(package)


def test_the_headers_of_python_are_missing(
    hook: ModuleType, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: "/nowhere")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    with pytest.raises(
        hook.BuildError,
        match=rf"^the headers of Python are missing .*: install python{version}-dev .*try again$",
    ):
        hook.build(package)


@pytest.mark.parametrize(
    ("system", "answer"), [("darwin", "glibc 2.39"), ("linux", ValueError("unrecognized"))]
)
def test_a_system_without_cuda(
    system: str, answer: Any, hook: ModuleType, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def confstr(name: str) -> str:
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(os, "confstr", confstr)
    with pytest.raises(hook.BuildError, match=r"Linux only, not on darwin|GNU C library"):
        hook.build(package)


def test_without_a_compiler_pip_is_asked_for_one(
    hook: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def dependencies(target: str) -> list[str]:
        made = object.__new__(hook.NativeLibraries)
        monkeypatch.setattr(hook.NativeLibraries, "target_name", target)
        return made.dependencies()  # type: ignore[no-any-return]

    assert dependencies("wheel") == []
    monkeypatch.setenv("PATH", str(tmp_path))
    assert dependencies("wheel") == ["ziglang>=0.13"]
    assert dependencies("sdist") == []
    monkeypatch.setenv("CC", "/nowhere/cc")  # an error of the build, not of the requirements
    assert dependencies("wheel") == []


@pytest.mark.timeout(300)
def test_ziglang_compiles_where_there_is_no_compiler(
    hook: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ziglang")
    if not (INCLUDE / "Python.h").exists():
        pytest.skip("needs the headers of Python")
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.so.1")
    shutil.copytree(PACKAGE, tmp_path / "userstream", ignore=ignored)
    monkeypatch.setattr(hook, "installed_compiler", lambda: None)
    hook.build(tmp_path / "userstream")
    done = run_python(
        f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        from userstream import _built, testing
        testing.simulate()
        _built.load(_built.RECORDER)
        import userstream as us
        us.wait(us.get_stream(0), timeout=10)
        print(us.__path__[0])
        """,
        simulate=None,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == str(tmp_path / "userstream")


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_a_checkout_that_has_changed_is_not_used(library: _built.Library, tmp_path: Path) -> None:
    package = tmp_path / "userstream"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    source = next((package / library.sources).glob("*.c"))
    source.write_text(source.read_text() + "/* changed */\n")
    simulated = "from userstream import testing; testing.simulate()"
    use = {
        "core": f"{simulated}; import userstream; userstream.get_stream(0)",
        "recorder": "from userstream import _built; _built.load(_built.RECORDER)",
        "simulated_driver": simulated,
        "simulated_nvml": simulated,
    }[library.name]
    done = run_python(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {use}", simulate=None)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: the sources of userstream/{library.file} have changed since userstream was "
        "installed; reinstall: pip install -e ."
    )


def test_a_changed_table_of_functions_asks_for_a_new_recorder(tmp_path: Path) -> None:
    package = tmp_path / "userstream"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    table = package / "_observe" / "judge" / "functions.py"
    table.write_text(table.read_text() + "# changed\n")
    use = "from userstream import _built; _built.load(_built.RECORDER)"
    done = run_python(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {use}", simulate=None)
    assert "the sources of userstream/_observe/recorder.so have changed" in done.stderr


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_a_library_that_is_missing_is_named(library: _built.Library, tmp_path: Path) -> None:
    package = tmp_path / "userstream"
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.so.1")
    shutil.copytree(PACKAGE, package, ignore=ignored)
    use = (
        "import userstream"
        if library is _built.CORE
        else (f"from userstream import _built; _built.load(_built.{library.name.upper()})")
    )
    if library is not _built.CORE:
        for core in PACKAGE.glob("_driver/_core*.so"):
            shutil.copy2(core, package / "_driver")
    done = run_python(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {use}", simulate=None)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: ")
    assert done.stderr.splitlines()[-1].endswith("; reinstall: pip install -e .")
