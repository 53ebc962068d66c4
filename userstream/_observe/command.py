"""``userstream observe``: watch a program, and report at its end.

The program runs as plain Python runs it, as the child of `judge.supervisor`, by which this process
replaces itself once it has read its options. The environment says what is recorded of the program
and its children: ``USERSTREAM_RECORD`` names the directory of their logs. A process that imports
userstream or cuda.core records itself (`startup`); into any other the driver loads the recorder.
"""

from __future__ import annotations

import argparse
import ctypes
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from userstream import _built
from userstream._observe.judge.__main__ import (
    FOUND,
    LOGS,
    add_shared_options,
    judge_options,
    operations_of,
    seconds,
)
from userstream._observe.judge.supervisor import INJECTION, Options
from userstream._observe.judge.trials import reported_pairs
from userstream._observe.recording import path_of_cupti

if TYPE_CHECKING:
    from collections.abc import Sequence

_HERE = os.path.dirname(os.path.abspath(__file__))
_STARTUP = os.path.join(_HERE, "startup")  # of Python: has a sitecustomize.py
_WITH_VALUE = (
    *("--report", "--html", "--json", "--log", "--fail-on", "--suppress", "--baseline"),
    *("--timeline", "--stall", "--hang-after", "--confirm-from"),
)


def main(arguments: Sequence[str], called: str) -> NoReturn:
    """Run the command under the name that it was called by; end the process as the program does."""
    parser = _parser(called)
    mine, program = _split(arguments)
    options = parser.parse_args(mine)
    if options.module is not None:
        program = [options.module, *program]
    if not program:
        parser.error("there is no program to watch")
    _check_files(parser, options)
    if not options.simulate and not _has_driver():
        parser.error(
            "there is no CUDA driver here (libcuda.so.1): --simulate runs on a simulated one"
        )
    told = Options(
        called=called,
        program=_command_of(program, is_module=options.module is not None),
        name=program[0],
        environment=_environment(options),
        children=options.children,
        simulated=options.simulate,
        log=options.log,
        reports=options.report,
        judge={**judge_options(options), "hang_after": options.hang_after},
        operations=operations_of(options),
        baseline=options.baseline and options.baseline.path,
        fail_on=sorted(options.fail_on),
    )
    # The driver of each process loads this library, unless another tool has asked for its own.
    os.environ.setdefault(INJECTION, os.path.join(_built.PACKAGE, _built.RECORDER.file))
    try:
        _become_supervisor(json.dumps(told._asdict()))
    except OSError as error:  # such as a limit of the size of files, `ulimit -f`
        parser.error(f"the program cannot be started: {error.strerror}")


def _become_supervisor(options: str) -> NoReturn:
    """Replace this process by the supervisor, which has no threads and imports no dependency."""
    descriptor = os.memfd_create("options", 0)  # inherited
    with open(descriptor, "w", encoding="utf-8", closefd=False) as file:
        file.write(options)
    os.lseek(descriptor, 0, os.SEEK_SET)
    start = (
        f"import sys; sys.path.append({_HERE!r}); "
        f"from judge.supervisor import main; main({descriptor})"
    )
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", start])


# -- the command line -----------------------------------------------------------------------------


def _parser(called: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"{called} observe",
        usage="%(prog)s [options] (program.py | -m module) [arguments of the program ...]",
        description="Watch the streams of a program; report races and stalls at its end.",
        epilog=f"The exit status is the program's own, or {FOUND} if it succeeded and has races.",
        allow_abbrev=False,
    )
    add_shared_options(parser)
    parser.add_argument("--html", metavar="FILE", help="the same as --report FILE, for .html")
    parser.add_argument("--json", metavar="FILE", help="the same as --report FILE, for .json")
    parser.add_argument(
        "--log",
        metavar="DIRECTORY",
        help=f"only record, to a log for each process in DIRECTORY, for `{called} judge DIRECTORY`",
    )
    parser.add_argument(
        "--children",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="watch the processes that the program starts as well, or not",
    )
    parser.add_argument(
        "--allocations",
        action="store_true",
        help="name the lines that allocated tensors, and report those that are freed while in use",
    )
    parser.add_argument(
        "--confirm",
        action="store_true",
        help="make suspected races happen when their lines run again: hold the first operation",
    )
    parser.add_argument(
        "--confirm-from",
        type=_report_to_confirm,
        metavar="FILE",
        help="as --confirm, and hold those of FILE, an earlier report as .json, from the first "
        "time on",
    )
    parser.add_argument(
        "--hang-after",
        type=seconds,
        metavar="SECONDS",
        help="report what holds up the streams when nothing has moved for so long; SIGUSR1 asks "
        "for the same at once",
    )
    parser.add_argument("--simulate", action="store_true", help="run on the simulated driver")
    parser.add_argument("-m", metavar="MODULE", dest="module", help="the program is a module")
    return parser


def _report_to_confirm(path: str) -> str:
    try:
        reported_pairs(path)
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return os.path.abspath(path)


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments of the command, and those of the program."""
    at = 0
    while at < len(arguments):
        argument = arguments[at]
        if argument == "--":
            return list(arguments[:at]), list(arguments[at + 1 :])
        if argument.startswith("-m"):
            after = at + (2 if argument == "-m" else 1)
            return list(arguments[:after]), list(arguments[after:])
        if not argument.startswith("-") or argument == "-":  # a program on stdin
            break
        at += 2 if argument in _WITH_VALUE else 1
    return list(arguments[:at]), list(arguments[at:])


def _check_files(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Exit with an error if a file could not be written at the end of the program."""
    for name, end in (("html", ".html"), ("json", ".json")):
        path = getattr(options, name)
        if path is not None:
            if not path.endswith(end):
                parser.error(f"the name of that file ends in {end}, not as in {path!r}")
            options.report.append(path)
    for path in options.report:
        if not os.path.isdir(os.path.dirname(path) or "."):
            parser.error(f"there is no directory for {path!r}")
        if os.path.isdir(path) or not _is_writable(path):
            parser.error(f"{path!r} cannot be written")
    if options.log is None:
        return
    if options.report or options.suppress or options.baseline or options.hang_after is not None:
        parser.error(
            "--report, --suppress, --baseline and --hang-after are for the judge of logs, not for "
            "--log"
        )
    try:
        os.makedirs(options.log, mode=0o700, exist_ok=True)
    except OSError as error:
        parser.error(f"--log {options.log!r}: {error.strerror}; a directory is made there")
    if any(Path(options.log).glob(LOGS)):
        parser.error(
            f"--log {options.log!r} has logs of an earlier run: remove them, or name another"
        )


def _is_writable(path: str) -> bool:
    where = path if os.path.exists(path) else os.path.dirname(path) or "."
    return os.access(where, os.W_OK)


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


# -- the program ----------------------------------------------------------------------------------


def _command_of(program: Sequence[str], *, is_module: bool) -> list[str]:
    """Return the command that runs a program: a file of Python, or what a shell would run."""
    # The flags of this interpreter, as multiprocessing passes them on.
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    if getattr(sys.stdout, "write_through", False):
        flags.append("-u")
    if is_module:
        return [sys.executable, *flags, "-m", *program]
    name, *arguments = program
    if os.path.isfile(name):
        with io.open_code(os.path.abspath(name)) as file:
            if file.read(4) == b"\x7fELF":
                return [os.path.abspath(name), *arguments]
    elif not os.path.exists(name) and os.sep not in name:
        found = shutil.which(name)  # such as torchrun
        if found is not None:
            return [found, *arguments]
    return [sys.executable, *flags, name, *arguments]


def _environment(options: argparse.Namespace) -> dict[str, str]:
    """Return the variables by which the program, and its children, are recorded."""
    environment = {"PYTHONPATH": _before(_STARTUP, "PYTHONPATH")}
    if options.allocations:
        environment["USERSTREAM_RECORD_ALLOCATIONS"] = "1"
    if options.confirm or options.confirm_from:
        environment["USERSTREAM_RECORD_CONFIRM"] = options.confirm_from or ""
    if options.simulate:
        libraries = os.path.join(_built.PACKAGE, os.path.dirname(_built.SIMULATED_DRIVER.file))
        environment["LD_LIBRARY_PATH"] = _before(libraries, "LD_LIBRARY_PATH")
        environment["USERSTREAM_SIMULATE"] = "1"
    else:
        environment["USERSTREAM_CUPTI"] = os.environ.get("USERSTREAM_CUPTI") or path_of_cupti()
    return environment


def _before(path: str, variable: str) -> str:
    """Return a search path with `path` in front, and no empty entry, which means the directory."""
    return os.pathsep.join(filter(None, (path, os.environ.get(variable))))
