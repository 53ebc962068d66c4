"""Compiles the native libraries of the package when it is installed.

Where there is no C compiler, pip installs `ziglang` for the build, whose compiler is used instead.
`CC` names a compiler, and `USERSTREAM_CFLAGS` adds flags (a sanitizer, for instance).
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).parent
FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
FLAGS = (
    "-std=c11",
    "-O2",
    "-fPIC",
    "-fvisibility=hidden",
    "-pthread",
)
# A thread that Python ends at exit unwinds through frames of C, and releases their locks.
UNWINDING = ("-fexceptions",)
# The libraries of ziglang lack the function that releases the locks (__gcc_personality_v0).
UNWINDING_OF_ZIG = ("-fno-exceptions", "-funwind-tables")

_spec = importlib.util.spec_from_file_location("_built", ROOT / "userstream/_built.py")
built = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(built)

# Free-threaded Python has no stable ABI before 3.15: its core is for one version.
_ENDING = sysconfig.get_config_var("EXT_SUFFIX") if FREE_THREADED else ".abi3.so"
CORE = built.CORE
CORE.file += _ENDING
LIBRARIES = (CORE, built.RECORDER, built.SIMULATED_DRIVER, built.SIMULATED_NVML)


class NativeLibraries(BuildHookInterface):
    """Adds the native libraries to a wheel, and to the checkout of an editable installation."""

    def dependencies(self) -> list[str]:
        """Return the requirements of the build beside hatchling."""
        needs_compiler = self.target_name == "wheel" and installed_compiler() is None
        return ["ziglang>=0.13"] if needs_compiler else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the libraries into the package, and add them to the wheel."""
        if self.target_name != "wheel":
            return
        try:
            build(ROOT / "userstream")
        except BuildError as error:
            raise SystemExit(f"userstream cannot be installed: {error}") from None
        build_data["artifacts"] += [f"userstream/{library.file}" for library in LIBRARIES]
        build_data["pure_python"] = False
        if FREE_THREADED:
            build_data["infer_tag"] = True
        else:
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"cp311-abi3-{platform}"


class BuildError(Exception):
    """The libraries cannot be compiled. The message says what to install or change."""


def build(package: Path) -> None:
    """Compile the libraries from the C files in a package folder, and put them there."""
    check_platform()
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").exists():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise BuildError(
            f"the headers of Python are missing ({headers}/Python.h): install python{version}-dev "
            f"(Debian, Ubuntu) or python{version}-devel (Fedora), and try again"
        )
    compiler, unwinding = installed_compiler(), UNWINDING
    if compiler is None:
        compiler, unwinding = [sys.executable, "-m", "ziglang", "cc"], UNWINDING_OF_ZIG
    flags = [*FLAGS, *unwinding, *_words("USERSTREAM_CFLAGS")]
    with (
        tempfile.TemporaryDirectory() as directory,
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads,
    ):
        commands, objects = [], {}
        for library in LIBRARIES:
            include = [f"-I{headers}"] if library is CORE else []
            objects[library] = []
            made_files = [_checksum(package, library, directory)]
            if library is built.RECORDER:
                include = [f"-I{package / library.sources}"]
                made_files.append(_rules(package, directory))
            for source in [*_sources(package, library), *made_files]:
                made = f"{directory}/{library.name}-{source.stem}.o"
                objects[library].append(made)
                commands.append([*compiler, *flags, *include, "-c", str(source), "-o", made])
        for _ in threads.map(_run, commands):  # raises what a thread raised
            pass
        links, new = [], f".{os.getpid()}.new"  # another installation may be compiling here
        for library in LIBRARIES:
            (package / library.file).parent.mkdir(exist_ok=True)
            link = ["-shared", *library.link_flags, *objects[library]]
            links.append([*compiler, *flags, *link, "-o", f"{package / library.file}{new}"])
        for _ in threads.map(_run, links):
            pass
    for library in LIBRARIES:
        # By a new name first: a running program may have loaded the library of this checkout.
        os.replace(f"{package / library.file}{new}", package / library.file)


def check_platform() -> None:
    """Raise `BuildError` where CUDA has no driver library: without Linux or glibc."""
    if not sys.platform.startswith("linux"):
        raise BuildError(f"it runs on Linux only, not on {sys.platform}")
    try:
        glibc = os.confstr("CS_GNU_LIBC_VERSION")
    except (ValueError, OSError):
        glibc = None
    if not glibc:
        raise BuildError("it needs the GNU C library (glibc), as CUDA does")


def installed_compiler() -> list[str] | None:
    """Return the command of a C compiler: from `CC`, else from Python's build, else a usual one."""
    chosen = _words("CC")
    if chosen:
        return chosen
    from_python = shlex.split(sysconfig.get_config_var("CC") or "")
    for command in (from_python, ["cc"], ["gcc"], ["clang"]):
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


def _sources(package: Path, library: Any) -> list[Path]:
    return sorted((package / library.sources).glob("*.c"))


def _checksum(package: Path, library: Any, directory: str) -> Path:
    """Write a C file with the checksum of a library's C files; see `_built.check`."""
    file = Path(directory, f"{library.name}_checksum.c")
    value = built.checksum(library, str(package))
    visible = '__attribute__((visibility("default")))'
    file.write_text(f'{visible} const char {library.symbol}[] = "{value}";\n', encoding="utf-8")
    return file


def _rules(package: Path, directory: str) -> Path:
    """Write the C file with what is recorded of each driver function, from the judge's table."""
    folder = package / "_observe"
    sys.path.insert(0, str(folder))
    try:
        table = importlib.import_module("judge.functions")
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.split(".")[0] == "judge"]:
            del sys.modules[name]
    spec = importlib.util.spec_from_file_location("rules", folder / "native" / "rules.py")
    rules = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rules)
    version = re.search(r'^__version__ = "(.*)"', (package / "__init__.py").read_text(), re.M)[1]
    file = Path(directory, "rules.c")
    file.write_text(rules.source(table.FUNCTIONS, table.NOT_FOLLOWED, version), encoding="utf-8")
    return file


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"the C compiler {command[0]!r} does not run: {error}") from None
    if done.returncode:
        raise BuildError(f"{shlex.join(command)} failed:\n{done.stdout}{done.stderr}")
