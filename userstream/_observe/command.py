"""``python -m userstream observe``: watch a program, and report at its end.

``--report FILE``
    Write a report there, as `Observation.save` does by the suffix; repeatable.
``--html FILE``, ``--json FILE``
    The same for these two.
``--log FILE``
    Only record what the program does, for ``python -m userstream judge FILE``.
``--fail-on WHAT``
    ``races``, which is the default, ``stalls``, both with a comma, or ``nothing``: what makes the
    exit status of a program that succeeded 66.
``--suppress FILE``
    Do not report the races that this file names.
``--baseline FILE``
    Races that are in this report, a ``.json`` of an earlier run, do not count for the exit status.
``--possible``
    Report also what something unseen may put in order.
``--strict-threads``
    As ``observe(threads="strict")``.
``--allocations``
    As ``observe(allocations=True)``.
``--simulate``
    Run the program on the simulated driver.

The program's own exit status is kept otherwise. The report goes to stderr, after an exception too;
files are saved before. Relative paths are those of the directory that the command was started in.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import importlib.machinery
import importlib.util
import io
import os
import pkgutil
import sys
import threading
from contextlib import suppress
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from userstream import testing
from userstream._observe.judge.__main__ import add_shared_options
from userstream._observe.judge.reports import github_annotations
from userstream._observe.observation import Observation
from userstream.errors import DriverNotFoundError, NotSupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from userstream._observe.judge.found import Race

FOUND = 66  # the exit status of a program that succeeded, and has races
_REFUSED = 2
_INTERRUPTED = 130
_FLUSH_FAILED = 120  # Python's own exit status if it cannot write what is left in stdout
_TIMELINE = 100_000  # operations that the page shows
_FAIL_ON = {"races", "stalls", "nothing"}
_WITH_VALUE = ("--report", "--html", "--json", "--log", "--fail-on", "--suppress", "--baseline")
_LEAST_DESCRIPTOR = 500  # of the copy of stderr: programs close and compare the lower ones


def main(arguments: Sequence[str]) -> int:
    """Run the command; return its exit status."""
    options = _parse(arguments)
    if options.simulate:
        testing.simulate()
    seen = _observation(options)
    program = _prepared(options)
    stderr = _Stderr()
    try:
        seen.__enter__()
    except (NotSupportedError, DriverNotFoundError) as error:
        here = " (here: --simulate)" if isinstance(error, DriverNotFoundError) else ""
        _refuse(f"{error}{here}")
    process = os.getpid()
    try:
        status = program()
    finally:
        if os.getpid() == process:
            flushed = _flush()
            _report(seen, options, stderr)
    if os.getpid() != process:  # a child that the program forked: the report is its parent's
        return status
    if status == 0 and _fails(seen, options):
        return FOUND
    return status or (0 if flushed else _FLUSH_FAILED)


def _fails(seen: Observation, options: argparse.Namespace) -> bool:
    with suppress(Exception):  # the analysis failed, as the report says
        races: Sequence[Race] = seen.races
        if options.baseline is not None:
            races = options.baseline.new(races)
        return bool(
            ("races" in options.fail_on and races) or ("stalls" in options.fail_on and seen.stalls)
        )
    return False


# -- the command line -----------------------------------------------------------------------------


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m userstream observe",
        usage="%(prog)s [options] (program.py | -m module) [arguments of the program ...]",
        description="Watch the streams of a program; report races and stalls at its end.",
        allow_abbrev=False,
    )
    parser.add_argument("--html", metavar="FILE", help="write a page of the streams to FILE")
    parser.add_argument("--json", metavar="FILE", help="write the whole report to FILE")
    parser.add_argument(
        "--log", metavar="FILE", help="only record to FILE, for `python -m userstream judge FILE`"
    )
    parser.add_argument(
        "--fail-on",
        type=_fail_on,
        default={"races"},
        metavar="WHAT",
        help=f"races (default), stalls, both with a comma, or nothing: exit with {FOUND} then",
    )
    parser.add_argument(
        "--suppress", metavar="FILE", help="do not report the races that a line of FILE names"
    )
    add_shared_options(parser)
    parser.add_argument(
        "--allocations", action="store_true", help="name the lines that allocated tensors"
    )
    parser.add_argument("--simulate", action="store_true", help="run on the simulated driver")
    parser.add_argument("-m", metavar="MODULE", dest="module", help="the program is a module")
    mine, program = _split(arguments)
    options = parser.parse_args(mine)
    if options.module is not None:
        program = [options.module, *program]
    options.program = program
    if not program:
        parser.error("there is no program to watch")
    for name, end in (("html", ".html"), ("json", ".json")):
        path = getattr(options, name)
        if path is not None and not path.endswith(end):
            parser.error(f"the name of that file ends in {end}, not as in {path!r}")
    reports = [*options.report, *filter(None, (options.html, options.json))]
    if options.log is not None and (reports or options.suppress):
        parser.error("reports and --suppress are for the judge of a log, not for --log")
    for path in [*reports, *filter(None, [options.log])]:
        if not os.path.isdir(os.path.dirname(path) or "."):
            parser.error(f"there is no directory for {path!r}")
        if os.path.isdir(path) or not _is_writable(path):
            parser.error(f"{path!r} cannot be written")
    # The program may change the directory.
    options.reports = [os.path.abspath(path) for path in reports]
    options.log = None if options.log is None else os.path.abspath(options.log)
    return options


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
        if not argument.startswith("-"):
            break
        at += 2 if argument in _WITH_VALUE else 1
    return list(arguments[:at]), list(arguments[at:])


def _is_writable(path: str) -> bool:
    where = path if os.path.exists(path) else os.path.dirname(path) or "."
    return os.access(where, os.W_OK)


def _fail_on(text: str) -> set[str]:
    words = set(text.split(","))
    if not words <= _FAIL_ON:
        raise argparse.ArgumentTypeError(f"{text!r} is not races, stalls or nothing")
    return words


def _observation(options: argparse.Namespace) -> Observation:
    try:
        return Observation(
            possible=options.possible,
            suppress=options.suppress or (),
            threads="strict" if options.strict_threads else "shared",
            timeline=_TIMELINE if options.reports else 0,
            allocations=options.allocations,
            log=options.log,
            judge="thread" if options.log is None else "later",
        )
    except (OSError, ValueError, NotSupportedError) as error:
        _refuse(str(error))


def _refuse(message: str) -> NoReturn:
    print(f"python -m userstream observe: {message}", file=sys.stderr)
    raise SystemExit(_REFUSED)


# -- the program ----------------------------------------------------------------------------------


def _prepared(options: argparse.Namespace) -> Callable[[], int]:
    """Return a function that runs the program as Python would and returns its exit status."""
    name, *more = options.program
    module = ModuleType("__main__")
    vars(module)["__builtins__"] = __builtins__
    sys.argv = [name, *more]
    if options.module is None:
        code = _code_of_file(name, module)
        return lambda: _run(lambda: code, module)

    def code_of_module() -> CodeType:  # while watching: that imports the packages around it
        found = _code_of_module(name, module)
        sys.argv[0] = module.__file__ or name
        return found

    return lambda: _run(code_of_module, module)


def _code_of_file(path: str, module: ModuleType) -> CodeType:
    absolute = os.path.abspath(path)
    if _is_package_path(absolute):  # a directory, or an archive, with a `__main__`
        sys.path[: 0 if sys.flags.safe_path else 1] = [absolute]
        spec = importlib.machinery.PathFinder.find_spec("__main__", [absolute])
        if spec is None:
            _refuse(f"can't find '__main__' module in {absolute!r}")
        return _code_of_spec(spec, module)
    try:
        with io.open_code(absolute) as file:
            code: CodeType | None = pkgutil.read_code(file)
        if code is None:
            with io.open_code(absolute) as file:
                source = file.read()
    except OSError as error:
        _refuse(f"can't open file {absolute!r}: {error.strerror}")
    if not sys.flags.safe_path:  # with it, the first entry is another one's
        sys.path[0] = os.path.dirname(os.path.realpath(absolute))
    module.__file__ = absolute
    loader = importlib.machinery.SourceFileLoader("__main__", absolute)
    vars(module).update(__loader__=loader, __package__=None, __cached__=None, __spec__=None)
    if code is not None:
        return code
    return _compiled(source, absolute)


def _compiled(source: bytes, path: str) -> CodeType:
    try:
        code: CodeType = compile(source, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        sys.excepthook(type(error), error.with_traceback(None), None)
        raise SystemExit(1) from None
    return code


def _is_package_path(path: str) -> bool:
    if os.path.isdir(path):
        return True
    return os.path.isfile(path) and pkgutil.get_importer(path) is not None


def _code_of_module(name: str, module: ModuleType) -> CodeType:
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name += ".__main__"
            spec = importlib.util.find_spec(name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        _refuse(f"error while finding the module {name!r}: {error}")
    if spec is None:
        _refuse(f"no module named {name!r}")
    return _code_of_spec(spec, module)


def _code_of_spec(spec: importlib.machinery.ModuleSpec, module: ModuleType) -> CodeType:
    loader: Any = spec.loader
    code = loader.get_code(spec.name) if hasattr(loader, "get_code") else None
    if not isinstance(code, CodeType):
        _refuse(f"there is no code of {spec.name!r}")
    module.__file__ = spec.origin
    vars(module).update(
        __loader__=loader, __package__=spec.parent, __cached__=spec.cached, __spec__=spec
    )
    return code


def _run(get_code: Callable[[], CodeType], module: ModuleType) -> int:
    """Run the program, and wait for its threads; return its exit status."""
    # The module stays there: threads of the program, its functions of `atexit`, `pickle`, and
    # processes that it spawns look for it.
    sys.modules["__main__"] = module
    status = 0
    try:
        exec(get_code(), vars(module))
    except SystemExit as leaving:
        status = _status(leaving)
    except BaseException as error:
        _show(error)
        status = _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    try:
        # As Python does next: what they queue is the program's too. Workers of executors do not end
        # unless they are told to, which this does as well.
        threading._shutdown()  # type: ignore[attr-defined]
    except KeyboardInterrupt as error:  # which ends the wait, and does not change the status
        _show(error)
    return status


def _show(error: BaseException) -> None:
    """Print the traceback of an error of the program, by `sys.excepthook`."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    try:
        sys.excepthook(type(error), error, trace)
    except BaseException:  # Python goes on as well
        sys.__excepthook__(type(error), error, trace)


def _status(leaving: SystemExit) -> int:
    code = leaving.code
    if code is None or isinstance(code, int):
        return code or 0
    with suppress(OSError, ValueError, AttributeError):  # it may have closed stderr
        sys.stderr.write(f"{code}\n")
    return 1


# -- the report -----------------------------------------------------------------------------------


class _Stderr:
    """A duplicate of the stderr descriptor with which the command was started."""

    def __init__(self) -> None:
        self._descriptor = -1
        self._file: tuple[int, int] | None = None
        with suppress(OSError):  # it was started without one
            self._descriptor = fcntl.fcntl(2, fcntl.F_DUPFD_CLOEXEC, _LEAST_DESCRIPTOR)
            self._file = self._identity()

    def _identity(self) -> tuple[int, int]:
        status = os.fstat(self._descriptor)
        return status.st_dev, status.st_ino

    def write(self, text: str) -> None:
        """Write text, unless the descriptor is closed or belongs to another file."""
        data = f"{text}\n".encode("utf-8", "backslashreplace")
        with suppress(OSError):
            # A program that closes all descriptors may have a file of its own there by now.
            while data and self._file is not None and self._identity() == self._file:
                data = data[os.write(self._descriptor, data) :]


def _flush() -> bool:
    """Flush stdout and stderr; return whether stdout could be flushed."""
    with suppress(OSError, ValueError, AttributeError):  # it may be closed, replaced or removed
        sys.stderr.flush()
    try:
        sys.stdout.flush()
    except (ValueError, AttributeError):
        return True
    except OSError:
        with suppress(OSError, ValueError, AttributeError):
            # Python tries once more as it ends, and would change the exit status.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, sys.stdout.fileno())
            os.close(null)
        return False
    return True


def _report(seen: Observation, options: argparse.Namespace, stderr: _Stderr) -> None:
    """Stop, save the files, and print the report. A failure of one step skips no other."""
    said = []

    def attempt(what: str, do: Callable[[], object]) -> None:
        try:
            do()
        except Exception as error:
            said.append(f"python -m userstream observe: {what}: {type(error).__name__}: {error}")

    what = "the analysis failed" if options.log is None else f"{options.log!r} is not complete"
    attempt(what, seen.stop)
    for path in options.reports:
        attempt(f"{path!r} was not written", functools.partial(seen.save, path))
    if options.log is None:
        attempt("there is no report", lambda: said.insert(0, str(seen)))
        if options.baseline is not None:
            compare = options.baseline.compared
            attempt("it was not compared", lambda: said.append(f"\n{compare(seen.races)}"))
        if os.environ.get("GITHUB_ACTIONS") == "true":
            attempt("there are no annotations", lambda: said.append(seen._ask(github_annotations)))
    else:
        said.append(f"recorded: judge it with `python -m userstream judge {options.log}`")
    stderr.write("\n".join(said))
