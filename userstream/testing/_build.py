"""Compiles the simulated driver, or another library in C, at its first use and keeps the result.

What is kept ends with a seal, the digest of what comes before it: a library that was cut short
would kill the process that loads it. (The loader does not look behind the end of a library.)

``$CC`` names the compiler, ``$USERSTREAM_CFLAGS`` adds flags (a sanitizer, say), and
``$USERSTREAM_CACHE_DIR`` the directory for the result.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCES = Path(__file__).parent / "driver"
FLAGS = (
    "-std=c11",
    "-O1",
    "-g1",  # for the lines of a crash: all of -g takes a fifth longer
    "-fPIC",
    "-fexceptions",  # a worker thread that Python ends unwinds through our frames
    "-fvisibility=hidden",
    "-shared",
    "-pthread",
    "-Wl,-soname,libcuda.so.1",
)


@dataclass(frozen=True)
class Source:
    """What is compiled: all the C files of a directory."""

    directory: Path
    flags: tuple[str, ...]
    file: str  # what the result is called
    what: str  # what messages call it

    @property
    def advice(self) -> str:
        return f"let $USERSTREAM_CACHE_DIR name a directory of your own for {self.what}"


def simulated_driver() -> Source:
    """Give what the simulated driver is compiled of."""
    return Source(SOURCES, FLAGS, "simulated-driver", "the simulated driver")


def library(source: Source | None = None) -> Path:
    """Give the path of the simulated driver (or another), compiled unless that was done before."""
    source = source or simulated_driver()
    _check_platform(source)
    compiler = _compiler(source)
    flags = [*source.flags, *_words("USERSTREAM_CFLAGS")]
    directory = _cache_directory(source)
    path = directory / f"{source.file}-{_fingerprint(source, compiler, flags)}.so"
    if not _is_fit(path):
        with _alone_in(directory):
            if not _is_fit(path):
                _compile(source, compiler, flags, path)
    return path


def _check_platform(source: Source) -> None:
    if not sys.platform.startswith("linux"):
        raise RuntimeError(f"{source.what} runs on Linux only, not on {sys.platform}")
    try:
        glibc = os.confstr("CS_GNU_LIBC_VERSION")
    except (ValueError, OSError):
        glibc = None
    if not glibc:
        raise RuntimeError(
            f"{source.what} needs the GNU C library (glibc), as CUDA does; "
            "this Python runs on another one (musl?)"
        )


def _compiler(source: Source) -> list[str]:
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
        f"{source.what} is compiled at its first use, and there is no C compiler: install "
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


def _cache_directory(source: Source) -> Path:
    """Make a directory that only this user can write, as what lies there gets loaded."""
    try:
        directory = _chosen_directory()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.stat()
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        raise RuntimeError(f"cannot make a cache directory: {error}; {source.advice}") from error
    if found.st_uid != os.geteuid():
        raise RuntimeError(
            f"the cache directory {directory} belongs to another user; {source.advice}"
        )
    if _others_can_write(found):
        raise RuntimeError(
            f"others can write the cache directory {directory}: "
            f"remove that right (chmod go-w), or {source.advice}"
        )
    return directory


def _others_can_write(found: os.stat_result) -> bool:
    return bool(stat.S_IMODE(found.st_mode) & (stat.S_IWGRP | stat.S_IWOTH))


def _is_fit(path: Path) -> bool:
    """Tell whether a library is there, whole, and this user's own.

    Others may have put one there while the directory was still open to them.
    """
    try:
        with open(path, "rb", opener=_open_no_link) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                return False
            if _others_can_write(found):
                return False
            contents = file.read()
    except OSError:
        return False
    seal = _seal(contents[: -hashlib.sha256().digest_size])
    return len(contents) > len(seal) and contents.endswith(seal)


def _open_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe would wait for a writer


def _seal(contents: bytes) -> bytes:
    return hashlib.sha256(contents).digest()


@contextlib.contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """Let processes that start together compile once. Where the system cannot, each compiles."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        # Not by closing alone: a child that was forked meanwhile has the descriptor too.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _fingerprint(source: Source, compiler: list[str], flags: list[str]) -> str:
    """Make a name that changes with the sources, the compiler and the flags."""
    version = subprocess.run([*compiler, "--version"], capture_output=True, check=False)
    digest = hashlib.sha256()
    for part in (shlex.join(compiler).encode(), version.stdout, shlex.join(flags).encode()):
        digest.update(part + b"\0")
    for file in sorted(source.directory.glob("*.[ch]")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:24]


def _compile(source: Source, compiler: list[str], flags: list[str], path: Path) -> None:
    """Compile beside `path`, then rename: a process that races gets the one or the other."""
    with _refused_writes(source, path.parent):
        descriptor, unfinished = tempfile.mkstemp(suffix=".so", prefix=".", dir=path.parent)
    os.close(descriptor)
    try:
        _run_compiler(source, compiler, flags, unfinished)
        with _refused_writes(source, path.parent):
            _finish(unfinished, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(unfinished)


@contextlib.contextmanager
def _refused_writes(source: Source, directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RuntimeError(
            f"cannot write the cache directory {directory}: {error}; {source.advice}"
        ) from error


def _run_compiler(source: Source, compiler: list[str], flags: list[str], output: str) -> None:
    """Compile the files beside each other, as many as there are processors, and link them."""
    files = sorted(source.directory.glob("*.c"))
    of_linker = ("-shared", "-Wl,")
    compile_one = [*compiler, *(flag for flag in flags if not flag.startswith(of_linker)), "-c"]

    def run(command: list[str]) -> None:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(
                f"{source.what} could not be compiled with {shlex.join(compiler)!r}:\n"
                f"{done.stderr.strip()}"
            )

    with (
        tempfile.TemporaryDirectory(prefix=".", dir=os.path.dirname(output)) as directory,
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads,
    ):
        made = {file: os.path.join(directory, f"{file.stem}.o") for file in files}
        commands = [[*compile_one, str(file), "-o", made[file]] for file in files]
        for _ in threads.map(run, commands):  # raises what a thread raised
            pass
        run([*compiler, *flags, *made.values(), "-o", output])
    if not _is_library(output):
        raise RuntimeError(
            f"{source.what} was not compiled: {shlex.join(compiler)!r} reports success "
            "and left no library; does $CC name a C compiler that links?"
        )


def _is_library(output: str) -> bool:
    try:
        with open(output, "rb") as file:
            return file.read(4) == b"\x7fELF"
    except OSError:
        return False


def _finish(unfinished: str, path: Path) -> None:
    os.chmod(unfinished, 0o700)  # the linker left it with the rights that the umask allows
    with open(unfinished, "r+b") as file:
        contents = file.read()
        file.write(_seal(contents))
    os.replace(unfinished, path)
