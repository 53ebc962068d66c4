"""Findings of an observation: `Race`, `Stall`, `WrongStream`, and their suppressions."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import textwrap
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from traceback import FrameSummary
from typing import Any, NamedTuple, TypeVar

from .lines import CONTROLS, Line, Text, excerpt, printable, render
from .log import line_of

_T = TypeVar("_T")

Stack = tuple[FrameSummary, ...]
Apart = tuple[int, int, int, int]  # two addresses, and when each was used

FREED_IN_USE = "freed while in use"  # the kind of a race
_CERTAIN = ("exact", "declared", "typed")  # how an access is known that is known in every run


def _plain(value: Any, path: Callable[[str], str] = str) -> Any:
    """Return a value as JSON data; a frame becomes its file, line and function."""
    if isinstance(value, FrameSummary):
        return [path(value.filename), value.lineno, value.name]
    if isinstance(value, tuple):
        return [_plain(each, path) for each in value]
    if isinstance(value, Edit):
        return {**vars(value), "file": path(value.file)}
    if isinstance(value, (Operation, Race, Stall, WrongStream)):
        names = [each.name for each in fields(value) if not each.name.startswith("_")]
        return {name: _plain(getattr(value, name), path) for name in names}
    return value


def _where(line: FrameSummary | None) -> str:
    if line is None:
        return "(no Python)"
    return f"{shown_path(line.filename)}:{line.lineno} in {line.name}"


def shown_path(file: str) -> str:
    """Return the path of a file, relative to the current directory if the file is below it."""
    try:
        return file.removeprefix(f"{os.getcwd()}/")
    except OSError:  # the directory is gone
        return file


_DOING = {
    "exact": "{}s",
    "declared": "{}s (declared)",
    "typed": "{}s (by its type)",
    "learned": "{}s (learned)",
    "assumed": "may {} (assumed)",
}


@dataclass(frozen=True)
class Operation:
    """One side of a race: an operation, its stream, and the line that queued it.

    Attributes
    ----------
    name : str
        The driver call or the kernel.
    access : str
        ``"read"``, ``"write"``, ``"free"`` or ``"allocate"``.
    known : str
        How that is known: ``"exact"`` (the call says so), ``"declared"``, ``"typed"`` (by the type
        of a kernel's parameter), ``"learned"`` or ``"assumed"``.
    stream : str
        The stream, as reports name it.
    device : int or None
        The ordinal of its device.
    thread : str
        The thread that made the call.
    line : FrameSummary or None
        The line of the program that made it. Of a node of a graph, the line that launched the
        graph.
    stack : tuple of FrameSummary
        Its call stack, innermost frame last.
    captured : FrameSummary or None
        Of a node of a graph, the line that captured it.
    handle : int or None
        The handle of the stream; `None` of the host and of default streams.
    origin : str
        Where the stream was created, or first used; empty if that is not known.
    since : FrameSummary or None
        Of a write of the host of which only the neighbors are known: the line of the last call
        before it. ``line`` is that of the next call.

    Examples
    --------
    >>> import userstream as us
    >>> us.Operation("cuMemcpyAsync", "read", "exact", "stream 1", 0, "MainThread").access
    'read'
    """

    name: str
    access: str
    known: str
    stream: str
    device: int | None
    thread: str
    line: FrameSummary | None = None
    stack: Stack = field(default=(), repr=False)
    captured: FrameSummary | None = None
    handle: int | None = None
    origin: str = ""
    since: FrameSummary | None = None

    def __str__(self) -> str:
        return render(self._lines())

    def _lines(self, role: str = "") -> list[Line]:
        """Return the lines of a report about the operation, as one side of a race."""
        label = f"  {role}: " if role else ""
        thread = "" if self.thread == "MainThread" else f", by {self.thread}"
        on = "by the host" if self.stream == "the host" else f"on {self.stream}"
        origin = f", {self.origin}" if self.origin else ""
        doing = f"{self.name} {_DOING[self.known].format(self.access)} {on}"
        if self.name.endswith(" of the host"):  # no call: "a write of the host"
            doing = f"the host {self.access}s"
        said = Text(f"{label}{doing}{origin}{thread}", role, len(label))
        graph = "in a graph launched at " if self.captured else ""
        if self.since is not None:
            since, until = _where(self.since), _where(self.line)
            return [said, Text(f"    between {since} and {until}", wraps=False)]
        lines: list[Line] = [said, Text(f"    {graph}{_where(self.line)}", wraps=False)]
        lines += [] if self.line is None else excerpt(self.line, role)
        if self.captured is not None:
            lines.append(Text(f"    and captured at {_where(self.captured)}", wraps=False))
            lines += excerpt(self.captured, role)
        return lines

    def as_dict(self) -> dict[str, Any]:
        """Return the attributes as JSON-serializable data.

        Returns
        -------
        dict
            Made of numbers, strings, lists and dictionaries.

        Examples
        --------
        >>> import userstream as us
        >>> us.Operation("cuMemcpy", "read", "exact", "stream 1", 0, "main").as_dict()["name"]
        'cuMemcpy'
        """
        told: dict[str, Any] = _plain(self)
        return told


def accesses_of(first: Operation, second: Operation) -> tuple[str, str]:
    """Return the accesses of two racing operations, worded alike in every run.

    Whether a kernel writes is learned in some runs and assumed in others, so that its access is a
    "use", unless the other access only reads: then the kernel must be the one that writes.
    """
    return _access(first, second), _access(second, first)


def _access(operation: Operation, other: Operation) -> str:
    if operation.known in _CERTAIN:
        return operation.access
    return "write" if other.known in _CERTAIN and other.access == "read" else "use"


@dataclass(frozen=True)
class Edit:
    r"""A change of the program: lines of a file that are replaced.

    Attributes
    ----------
    file : str
        The path of the file.
    line, end : int
        The lines from ``line`` up to, and not including, ``end`` are replaced. If both are equal,
        the code is inserted before that line.
    code : str
        The lines that come there, as they are to be written.

    Examples
    --------
    >>> import userstream as us
    >>> us.Edit("train.py", 31, 31, "    side.wait(main)\n").code
    '    side.wait(main)\n'
    """

    file: str
    line: int
    end: int
    code: str

    def __str__(self) -> str:
        place = printable(f"{shown_path(self.file)}:{self.line}")
        if not self.code:
            return f"{place}: remove this line"
        what = "insert before it" if self.line == self.end else "replace it by"
        code = textwrap.dedent(self.code).rstrip().split("\n")
        return "\n".join([f"{place}: {what}", *(f"  {printable(line)}" for line in code)])


@dataclass(frozen=True)
class Race:
    """Two operations on the same memory that nothing orders.

    Attributes
    ----------
    kind : str
        ``"read after write"``, ``"write after read"``, ``"write after write"``,
        ``"use after write"``, ``"write after use"``, ``"use after use"``, ``"use after free"``,
        ``"freed while in use"``,
        ``"use before allocation"``, ``"host overwrote the source of a copy"`` or
        ``"host read before the copy"``. The *use* of a kernel is a read or a write. Whether that is
        learned differs between runs; ``first.access`` and ``second.access`` say what this run has
        learned.
    address, nbytes : int
        The memory that both touch.
    memory : str
        ``"device"``, ``"pinned"``, ``"managed"`` or ``"unknown"``.
    allocated : tuple of FrameSummary
        Where it was allocated; empty if that was before the observation. Of a tensor or an array,
        with ``observe(allocations=True)``, the line that allocated that; else the one for which its
        framework got memory from the driver, which may be another one.
    framework : str or None
        ``"torch"`` or ``"cupy"`` if it is the memory of a tensor or an array, and
        ``allocations=True``.
    first, second : Operation
        The two operations, in the order in which they were queued.
    ordered_until : Operation or None
        The last operation on the stream of ``first`` that ``second`` is ordered after.
    possible : bool
        Whether it may not be a race: something that cannot be observed may order the two, or the
        accesses of a kernel are only assumed.
    reason : str
        Why it is only possible; empty if it is certain.
    count : int
        How often it was found between these two lines.
    advice : str
        What to do.
    edits : tuple of Edit
        The same as a change of the program, where its source tells how.
    confirmed : bool or None
        Of ``observe(confirm=True)``. `True`: the race was made to happen: ``first`` was held, and
        ``second`` ran before. `False`: something that is not seen orders the two: ``second`` waited
        for ``first`` each time; the race is only possible then. `None`: neither is shown.
    remedied : bool or None
        Whether the missing edge between the streams orders the two, which was tried after the race
        was made to happen; `None` if it was not tried. Of two that race in both directions, as in
        a loop, the edge of one direction was tried.
    undecided : str
        Why ``observe(confirm=True)`` shows neither; empty otherwise.

    Examples
    --------
    >>> import userstream as us
    >>> first, second = us.Stream.create(0), us.Stream.create(0)
    >>> buffer = first.device.allocate(64, stream=first)
    >>> second.wait(first)
    >>> with us.observe() as seen:
    ...     buffer.fill(1, stream=first)
    ...     buffer.fill(2, stream=second)  # nothing orders it after the first fill
    >>> (race,) = seen.races
    >>> race.kind, race.first.name, race.count
    ('write after write', 'cuMemsetD8Async', 1)
    """

    kind: str
    address: int
    nbytes: int
    memory: str
    allocated: Stack = field(repr=False)
    framework: str | None
    first: Operation
    second: Operation
    ordered_until: Operation | None
    possible: bool
    count: int
    advice: str
    reason: str = ""
    edits: tuple[Edit, ...] = ()
    confirmed: bool | None = None
    remedied: bool | None = None
    undecided: str = ""
    # Of both in the timeline, the last time that it was seen.
    _entries: tuple[int, int] = field(default=(-1, -1), repr=False, compare=False)
    _times: tuple[int, int] = field(default=(0, 0), repr=False, compare=False)
    # Whether `second` also races with a later `first`, as of the next turn of a loop.
    _is_mutual: bool = field(default=False, repr=False, compare=False)
    # The two race only if one of these pairs of addresses is in the same buffer.
    _apart: tuple[Apart, ...] = field(default=(), repr=False, compare=False)

    @property
    def key(self) -> str:
        """The line that suppresses the race, which is the same in every run.

        It does not depend on which of the two was first, nor on what was learned of a kernel.
        ``observe(suppress=)`` takes such lines.

        Examples
        --------
        >>> import userstream as us
        >>> with us.observe() as seen:
        ...     stream = us.get_stream(0)
        >>> [race.key for race in seen.races]
        []
        """
        names, memory, lines = self._facts()
        facts = [("race", names[0]), ("memory", memory), *(("line", line) for line in lines)]
        told = ((name, CONTROLS.sub("?", value)) for name, value in facts)
        return " ".join(f"{name}={_word(value)}" for name, value in told)

    def _facts(self) -> tuple[list[str], str, tuple[str, str]]:
        """Return the facts for suppressions: names of the kind, memory, both lines in order."""
        lines = sorted((_function(self.first), _function(self.second)))
        return _names_of_kind(self), self.memory, (lines[0], lines[1])

    def __str__(self) -> str:
        return render(self._lines())

    def _lines(self, where: str = "") -> list[Line]:
        """Return the lines of a report about the race; `where` names its processes."""
        kind = ("possible " if self.possible else "") + self.kind
        times = f", {self.count} times" if self.count > 1 else ""
        # Of a kernel only the first byte is known.
        size = f"{self.nbytes} bytes of " if self.nbytes > 1 else ""
        memory = f"{size}{self.memory} memory at {self.address:#x}"
        head = f"{kind}{times}{where and f', {where}'}: {memory}"
        lines: list[Line] = [Text(head, "warning" if self.possible else "error", len(kind))]
        lines += [*self.first._lines("first"), *self.second._lines("second")]
        if self.framework is not None:
            line = line_of(self.allocated)
            at = "(no line is known)" if line is None else _where(line)
            lines.append(Text(f"  allocated by {self.framework}: {at}", wraps=False))
        until = self.ordered_until
        if until is not None:
            lines.append(Text(f"  ordered until: {until.name} at {_where(until.line)}"))
        if self.confirmed:
            lines.append(Text(f"  {self._trial()}", "error", 14))
        elif self.undecided:
            lines.append(Text(f"  {self._trial()}"))
        if self.reason:
            lines.append(Text(f"  possible only: {self.reason}", "warning", 16))
        lines.append(Text(f"  fix: {self.advice}", "fix", 6))
        for edit in self.edits:
            place, *code = str(edit).splitlines()
            lines.append(Text(f"    {place}", wraps=False))
            lines += [Text(f"    {line}", "fix", wraps=False) for line in code]
        handles = {
            f"{side.stream} is {side.handle:#x}"
            for side in (self.first, self.second)
            if side.handle is not None
        }
        if handles:
            lines.append(Text(f"  details: {', '.join(sorted(handles))}", "faint"))
        lines.append(Text(f"  suppress: {self.key}", "faint", wraps=False))
        return lines

    def _trial(self) -> str:
        """Return the outcome of the trials, or the reason why the trials show nothing."""
        if not self.confirmed:
            return self.undecided and f"not made to happen: {self.undecided}"
        fix = "was not tried"
        if self.remedied is not None:
            one = ", in one of the directions," if self._is_mutual else ""
            holds = "holds" if self.remedied else "does not hold"
            fix = f"was tried as an edge{one} and {holds}"
        return f"made to happen: second ran while first was held; the fix {fix}"

    def as_dict(self) -> dict[str, Any]:
        """Return the attributes as JSON-serializable data.

        Returns
        -------
        dict
            Made of numbers, strings, lists and dictionaries.

        Examples
        --------
        >>> import userstream as us
        >>> with us.observe() as seen:
        ...     stream = us.get_stream(0)
        >>> [race.as_dict()["kind"] for race in seen.races]
        []
        """
        return {**_plain(self), "key": self.key}

    def _for_page(self) -> dict[str, Any]:
        return {
            **_plain(self, shown_path),
            "entries": self._entries,
            "trial": self._trial(),
            "allocated_at": _plain(line_of(self.allocated), shown_path),
        }


def _word(text: str) -> str:
    return shlex.quote(text) if re.search(r"[\s'\"\\]", text) else text


def _function(operation: Operation) -> str:
    if operation.line is None:
        return operation.name
    return f"{operation.line.filename.rpartition('/')[2]}:{operation.line.name}"


@dataclass(frozen=True)
class Stall:
    """A driver call in which the host waited, or was held up.

    Attributes
    ----------
    name : str
        The driver call.
    seconds : float
        Total duration of these calls from this line.
    longest : float
        Duration of the longest of them.
    count : int
        Number of calls.
    stream : str or None
        The stream, if the call names one.
    thread : str
        The thread that made the first of them.
    line : FrameSummary or None
        The line of the program that made them.
    stack : tuple of FrameSummary
        The call stack of the first one, innermost frame last.

    Examples
    --------
    >>> import userstream as us
    >>> us.Stall("cuStreamSynchronize", 0.5, 0.5, 1, None, "MainThread").seconds
    0.5
    """

    name: str
    seconds: float
    longest: float
    count: int
    stream: str | None
    thread: str
    line: FrameSummary | None = None
    stack: Stack = field(default=(), repr=False)
    _block: int = field(default=0, repr=False, compare=False)  # of no_stalls

    def __str__(self) -> str:
        times = f"{self.count} times, " if self.count > 1 else ""
        where = printable(f"{self.name} ({times}{_where(self.line)})")
        return f"{self.seconds * 1e3:.3f} ms in {where}"

    def as_dict(self) -> dict[str, Any]:
        """Return the attributes as JSON-serializable data.

        Returns
        -------
        dict
            Made of numbers, strings, lists and dictionaries.

        Examples
        --------
        >>> import userstream as us
        >>> us.Stall("cuCtxSynchronize", 0.5, 0.5, 1, None, "main").as_dict()["count"]
        1
        """
        told: dict[str, Any] = _plain(self)
        return told

    def _for_page(self) -> dict[str, Any]:
        told: dict[str, Any] = _plain(self, shown_path)
        return told


@dataclass(frozen=True)
class WrongStream:
    """Operations that a line of the program has queued on a stream to be avoided.

    Attributes
    ----------
    name : str
        The driver call or the kernel.
    stream : str
        The stream, as reports name it.
    device : int or None
        The ordinal of its device.
    count : int
        Number of these operations from this line.
    thread : str
        The thread that queued the first of them.
    line : FrameSummary or None
        The line of the program that queued them.
    stack : tuple of FrameSummary
        The call stack of the first one, innermost frame last.

    Examples
    --------
    >>> import userstream as us
    >>> us.WrongStream("cuMemsetD8Async", "the legacy default stream", 0, 2, "MainThread").count
    2
    """

    name: str
    stream: str
    device: int | None
    count: int
    thread: str
    line: FrameSummary | None = None
    stack: Stack = field(default=(), repr=False)

    def __str__(self) -> str:
        times = f"{self.count} times, " if self.count > 1 else ""
        return printable(f"{self.name} on {self.stream} ({times}{_where(self.line)})")

    def as_dict(self) -> dict[str, Any]:
        """Return the attributes as JSON-serializable data.

        Returns
        -------
        dict
            Made of numbers, strings, lists and dictionaries.

        Examples
        --------
        >>> import userstream as us
        >>> us.WrongStream("copy", "the legacy default stream", 0, 2, "main").as_dict()["count"]
        2
        """
        told: dict[str, Any] = _plain(self)
        return told

    def _for_page(self) -> dict[str, Any]:
        told: dict[str, Any] = _plain(self, shown_path)
        return told


_ACCESSES = ("read", "use", "write")
# The names of races in lines: pairs of accesses without order, and the others.
KINDS = (
    *(f"{one}-{other}" for one in _ACCESSES for other in _ACCESSES if one <= other),
    "use-after-free",
    "freed-while-in-use",
    "use-before-allocation",
    "host-overwrote-the-source-of-a-copy",
    "host-read-before-the-copy",
)
_MEMORIES = ("device", "pinned", "managed", "unknown")


class Suppression(NamedTuple):
    """The races that a line of a file of suppressions covers. Patterns may have ``*`` and ``?``."""

    race: str = "*"
    memory: str = "*"
    lines: tuple[str, ...] = ()  # of either operation


def read_suppressions(given: str | os.PathLike[str] | Iterable[str]) -> list[Suppression]:
    """Read a file of suppressions, or take the lines that are given."""
    if isinstance(given, (str, os.PathLike)):
        path = Path(given)
        told = path.read_text(encoding="utf-8").splitlines()
        return [_parse(line, f"{path}:{n}") for n, line in _lines(told)]
    lines = list(given) if isinstance(given, Iterable) else [given]
    if not all(isinstance(line, str) for line in lines):
        raise TypeError("suppress= takes the path of a file, or an iterable of lines (str)")
    return [_parse(line, f"line {n}") for n, line in _lines(lines)]


def _lines(lines: Iterable[str]) -> list[tuple[int, str]]:
    numbered = enumerate((line.strip() for line in lines), 1)
    return [(n, line) for n, line in numbered if line and not line.startswith("#")]


def _parse(line: str, where: str) -> Suppression:
    found: dict[str, list[str]] = {"race": [], "memory": [], "line": []}
    try:
        words = shlex.split(line)
    except ValueError as error:  # a quotation that does not end
        raise ValueError(f"{where}: {line!r} is not a suppression: {error}") from None
    for word in words:
        key, equals, value = word.partition("=")
        patterns = found.get(key)
        if not equals or not value or patterns is None:
            raise ValueError(
                f"{where}: {word!r} is not a suppression: it is a line such as "
                "`race=read-write memory=device line=train.py:step line=*`, with any of these keys"
            )
        _check_pattern(key, value, f"{where}: {word!r}")
        patterns.append(value)
    for key, most in (("race", 1), ("memory", 1), ("line", 2)):
        if len(found[key]) > most:
            raise ValueError(f"{where}: {line!r} is not a suppression: it has too many {key}=")
    one = {key: found[key][0] for key in ("race", "memory") if found[key]}
    return Suppression(**one, lines=tuple(found["line"]))


def _check_pattern(key: str, value: str, where: str) -> None:
    """Raise `ValueError` for a pattern that could suppress nothing."""
    if key == "race" and not any(_matches(kind, value) for kind in KINDS):
        raise ValueError(
            f"{where} is not a suppression: no race is called that; races are {', '.join(KINDS)}"
        )
    if key == "memory" and not any(_matches(kind, value) for kind in _MEMORIES):
        raise ValueError(f"{where} is not a suppression: memory is one of {', '.join(_MEMORIES)}")


def read_report(path: str, take: Callable[[Any], _T]) -> _T:
    """Return what `take` gets from a report as JSON; raise `ValueError` for another file."""
    try:
        return take(json.loads(Path(path).read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f"{path}: not a report as JSON, which `observe --report seen.json` writes"
        ) from None


class Baseline:
    """The races of an earlier report, which do not fail a run."""

    def __init__(self, path: str) -> None:
        """Read a report as JSON; raise `ValueError` for a file that is no report."""
        self._keys = read_report(path, lambda report: {race["key"] for race in report["races"]})
        self.path = path

    def new(self, races: Iterable[Race]) -> list[Race]:
        """Return the races that the earlier report does not have."""
        return [race for race in races if race.key not in self._keys]

    def compared(self, races: Sequence[Race]) -> str:
        """Return the difference between races and those of the earlier report, as text."""
        new = self.new(races)
        fixed = sorted(self._keys - {race.key for race in races})
        lines = [f"compared with {self.path}: {len(new)} new, {len(fixed)} fixed"]
        return "\n".join(map(printable, [*lines, *(f"  fixed: {key}" for key in fixed)]))


def covers(suppression: Suppression, race: Race) -> bool:
    """Return whether a suppression covers a race."""
    names, memory, lines = race._facts()
    if not _matches(memory, suppression.memory):
        return False
    if not any(_matches(name, suppression.race) for name in names):
        return False
    return any(all(map(_matches, ordered, suppression.lines)) for ordered in (lines, lines[::-1]))


def is_of_kind(race: Race, kinds: Container[str]) -> bool:
    """Return whether a race has one of the names in `KINDS`."""
    return any(name in kinds for name in _names_of_kind(race))


def _names_of_kind(race: Race) -> list[str]:
    """Return the names of the kind of a race in lines, first that of its key.

    A "use" of a kernel may be called a read or a write. Memory that is freed while it is in use is
    also used after it is freed, if threads do both: which of the two comes first may differ.
    """
    if race.kind == FREED_IN_USE:
        return ["use-after-free", "freed-while-in-use"]
    if not all(word in _ACCESSES for word in race.kind.split(" after ")):
        return [race.kind.replace(" ", "-")]
    accesses = accesses_of(race.first, race.second)
    could_be = [("use", "read", "write") if each == "use" else (each,) for each in accesses]
    pairs = [(one, other) for one in could_be[0] for other in could_be[1]]
    return ["-".join(sorted(pair)) for pair in pairs if pair != ("read", "read")]


def _matches(fact: str, value: str) -> bool:
    return fnmatch.fnmatchcase(fact, value.replace("[", "[[]"))  # names of kernels have some
