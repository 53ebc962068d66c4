"""Compiles the simulated driver at its first use and keeps the result.

``$CC`` names the compiler, ``$USERSTREAM_CFLAGS`` adds flags (a sanitizer, say), and
``$USERSTREAM_CACHE_DIR`` the directory for the result.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent / "driver"
FLAGS = (
    "-std=c11",
    "-O1",
    "-g",
    "-fPIC",
    "-fexceptions",  # a worker thread that Python ends unwinds through our frames
    "-fvisibility=hidden",
    "-shared",
    "-pthread",
    "-Wl,-soname,libcuda.so.1",
)


def library() -> Path:
    """Give the path of the simulated driver, compiled unless that was done before."""
    _check_platform()
    compiler = _compiler()
    flags = [*FLAGS, *_words("USERSTREAM_CFLAGS")]
    directory = _cache_directory()
    path = directory / f"simulated-driver-{_fingerprint(compiler, flags)}.so"
    if not path.exists():
        _compile(compiler, flags, path)
    return path


def _check_platform() -> None:
    if not sys.platform.startswith("linux"):
        raise RuntimeError(f"the simulated driver runs on Linux only, not on {sys.platform}")
    try:
        glibc = os.confstr("CS_GNU_LIBC_VERSION")
    except (ValueError, OSError):
        glibc = None
    if not glibc:
        raise RuntimeError(
            "the simulated driver needs the GNU C library (glibc), as CUDA does; "
            "this Python runs on another one (musl?)"
        )


def _compiler() -> list[str]:
    """Find a C compiler: its command line."""
    command = _words("CC")
    if command:
        if not shutil.which(command[0]):
            raise RuntimeError(f"the C compiler {command[0]!r} that $CC names was not found")
        return command
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    raise RuntimeError(
        "the simulated driver is compiled at its first use, and there is no C compiler: install "
        "gcc or clang (Debian and Ubuntu: build-essential; Fedora: gcc; conda: c-compiler), "
        "or let $CC name one"
    )


def _words(variable: str) -> list[str]:
    """Split what an environment variable says as a shell would."""
    text = os.environ.get(variable, "")
    try:
        return shlex.split(text)
    except ValueError as error:
        raise RuntimeError(f"${variable} is {text!r}: {error}") from None


def _chosen_directory() -> Path:
    chosen = os.environ.get("USERSTREAM_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "userstream"


def _cache_directory() -> Path:
    """Make a directory that only this user can write, as what lies there gets loaded."""
    advice = "let $USERSTREAM_CACHE_DIR name a directory of your own for the simulated driver"
    try:
        directory = _chosen_directory()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.stat()
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        raise RuntimeError(f"cannot make a cache directory: {error}; {advice}") from error
    if found.st_uid != os.geteuid():
        raise RuntimeError(f"the cache directory {directory} belongs to another user; {advice}")
    if stat.S_IMODE(found.st_mode) & (stat.S_IWGRP | stat.S_IWOTH):
        raise RuntimeError(
            f"others can write the cache directory {directory}: "
            f"remove that right (chmod go-w), or {advice}"
        )
    if not os.access(directory, os.W_OK | os.X_OK):
        raise RuntimeError(f"cannot write the cache directory {directory}; {advice}")
    return directory


def _fingerprint(compiler: list[str], flags: list[str]) -> str:
    """Make a name that changes with the sources, the compiler and the flags."""
    version = subprocess.run([*compiler, "--version"], capture_output=True, check=False)
    digest = hashlib.sha256()
    for part in (shlex.join(compiler).encode(), version.stdout, shlex.join(flags).encode()):
        digest.update(part + b"\0")
    for source in sorted(SOURCES.glob("*.[ch]")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:24]


def _compile(compiler: list[str], flags: list[str], path: Path) -> None:
    """Compile beside `path`, then rename: a process that races gets the one or the other."""
    sources = sorted(str(source) for source in SOURCES.glob("*.c"))
    try:
        descriptor, unfinished = tempfile.mkstemp(suffix=".so", prefix=".", dir=path.parent)
    except OSError as error:
        raise RuntimeError(
            f"cannot write the cache directory {path.parent}: {error}; let $USERSTREAM_CACHE_DIR "
            "name a directory of your own for the simulated driver"
        ) from error
    os.close(descriptor)
    try:
        command = [*compiler, *flags, *sources, "-o", unfinished]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(
                f"the simulated driver could not be compiled with {shlex.join(compiler)!r}:\n"
                f"{done.stderr.strip()}"
            )
        os.replace(unfinished, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(unfinished)
