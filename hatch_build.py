"""Compiles the native libraries of the package when it is installed.

Where there is no C compiler, pip installs `ziglang` for the build, whose compiler is used instead.
`CC` names a compiler, and `USERSTREAM_CFLAGS` adds flags (a sanitizer, for instance).
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).parent
FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
FLAGS = (
    "-std=c11",
    "-O2",
    "-fPIC",
    "-fexceptions",  # a thread that Python ends at exit unwinds through frames of C
    "-fvisibility=hidden",
    "-pthread",
)


class Library(NamedTuple):
    """A native library. Folders and files are relative to the package."""

    name: str
    sources: str
    file: str
    is_extension: bool = False
    link_flags: tuple[str, ...] = ()


CORE = Library(
    "core",
    "_driver/native",
    # Free-threaded Python has no stable ABI before 3.15: its core is for one version.
    f"_driver/_core{sysconfig.get_config_var('EXT_SUFFIX') if FREE_THREADED else '.abi3.so'}",
    is_extension=True,
)
LIBRARIES = (CORE,)


class NativeLibraries(BuildHookInterface):
    """Adds the native libraries to a wheel, and to the checkout of an editable installation."""

    def dependencies(self) -> list[str]:
        """Return what the build needs beside hatchling."""
        return [] if self.target_name != "wheel" or _installed_compiler() else ["ziglang>=0.13"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the libraries beside their sources, and name them to the wheel."""
        if self.target_name != "wheel":
            return
        build(ROOT / "userstream")
        build_data["artifacts"] += [f"userstream/{library.file}" for library in LIBRARIES]
        build_data["pure_python"] = False
        if FREE_THREADED:
            build_data["infer_tag"] = True
        else:
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"cp311-abi3-{platform}"


def build(package: Path, libraries: tuple[Library, ...] = LIBRARIES) -> None:
    """Compile libraries into a package folder, which may be a copy without the sources."""
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").exists():
        raise SystemExit(
            f"userstream needs the headers of Python ({headers / 'Python.h'} does not exist): "
            f"install {_headers_package()}, then install userstream again"
        )
    compiler = _installed_compiler() or [sys.executable, "-m", "ziglang", "cc"]
    flags = [*FLAGS, *_words("USERSTREAM_CFLAGS")]
    with (
        tempfile.TemporaryDirectory() as directory,
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads,
    ):
        objects: dict[Library, list[str]] = {}
        commands = []
        for library in libraries:
            made = objects[library] = []
            for source in _sources(library, Path(directory)):
                made.append(f"{directory}/{library.name}-{source.stem}.o")
                includes = [f"-I{headers}"] if library.is_extension else []
                commands.append([*compiler, *flags, *includes, "-c", str(source), "-o", made[-1]])
        list(threads.map(_run, commands))  # raises what a thread raised
        for library in libraries:
            # Renamed when complete: a program of this checkout may be loading the library now.
            path = package / library.file
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_name(f".{path.name}.{os.getpid()}")
            link = ["-shared", *library.link_flags, *objects[library]]
            _run([*compiler, *flags, *link, "-o", str(unfinished)])
            unfinished.replace(path)


def _sources(library: Library, directory: Path) -> list[Path]:
    """Return the C files of a library, with a generated one that has their checksum."""
    spec = importlib.util.spec_from_file_location("_built", ROOT / "userstream/_built.py")
    built = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(built)
    sources = ROOT / "userstream" / library.sources
    checksum = directory / f"{library.name}_checksum.c"
    checksum.write_text(
        f'__attribute__((visibility("default"))) const char userstream_{library.name}_source[] = '
        f'"{built.checksum(str(sources))}";\n'
    )
    return [*sorted(sources.glob("*.c")), checksum]


def _installed_compiler() -> list[str] | None:
    """Return the command of a C compiler: of `CC`, of Python's own build, or a usual one."""
    chosen = _words("CC")
    if chosen:
        return chosen if shutil.which(chosen[0]) else None
    of_python = shlex.split(sysconfig.get_config_var("CC") or "")
    for command in (of_python, ["cc"], ["gcc"], ["clang"]):
        if command and shutil.which(command[0]):
            return command
    return None


def _words(variable: str) -> list[str]:
    """Split an environment variable as a shell would."""
    text = os.environ.get(variable, "")
    try:
        return shlex.split(text)
    except ValueError as error:
        raise SystemExit(f"${variable} is {text!r}: {error}") from None


def _headers_package() -> str:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return f"python{version}-dev (Debian and Ubuntu) or python{version}-devel (Fedora)"


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)} failed:\n{done.stderr}")
