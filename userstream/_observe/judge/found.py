"""Findings of an observation: `Race`, `Stall` and `Operation`, and their suppressions."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from traceback import FrameSummary
from typing import Any

from .stacks import line_of

# Where `str.splitlines` ends a line: a suppression is one line.
_LINE_BREAK = re.compile(r"[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")

Stack = tuple[FrameSummary, ...]

_CERTAIN = ("exact", "declared")  # how an access is known that is known in every run


def _plain(value: Any) -> Any:
    """Return a value as JSON data; a frame becomes its file, line and function."""
    if isinstance(value, FrameSummary):
        return [value.filename, value.lineno, value.name]
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    if isinstance(value, (Operation, Race, Stall)):
        names = [each.name for each in fields(value) if not each.name.startswith("_")]
        return {name: _plain(getattr(value, name)) for name in names}
    return value


def _where(line: FrameSummary | None) -> str:
    return "(no Python)" if line is None else f"{line.filename}:{line.lineno} in {line.name}"


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
        How that is known: ``"exact"`` (the call says so), ``"declared"``, ``"learned"`` or
        ``"assumed"``.
    stream : str
        The stream, with its name and its handle.
    device : int or None
        The ordinal of its device.
    thread : str
        The thread that made the call.
    line : FrameSummary or None
        The line of the program that made it.
    stack : tuple of FrameSummary
        Its call stack, innermost frame last.

    Examples
    --------
    >>> import userstream as us
    >>> us.Operation("cuMemcpyAsync", "read", "exact", "stream 0x55", 0, "MainThread").access
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

    def __str__(self) -> str:
        return (
            f"{self.name} ({self.access}, {self.known}) on {self.stream}\n      {_where(self.line)}"
        )

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


def access_kind(first: Operation, second: Operation) -> str:
    """Return the kind of a race between two accesses: the same in every run.

    Whether a kernel writes is learned in some runs and assumed in others, so that its access is a
    "use", unless the other access only reads: then the kernel must be the one that writes.
    """
    return f"{_certain(second, first)} after {_certain(first, second)}"


def _certain(operation: Operation, other: Operation) -> str:
    if operation.known in _CERTAIN:
        return operation.access
    return "write" if other.known in _CERTAIN and other.access == "read" else "use"


@dataclass(frozen=True)
class Race:
    """Two operations on the same memory that nothing orders.

    Attributes
    ----------
    kind : str
        ``"read after write"``, ``"write after read"``, ``"write after write"``,
        ``"use after write"``, ``"write after use"``, ``"use after use"``, ``"use after free"``,
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
        ``"torch"`` or ``"cupy"`` if it is the memory of a tensor or an array, and that was asked.
    first, second : Operation
        The two, in the order in which they were queued.
    ordered_until : Operation or None
        The last operation on the stream of ``first`` that ``second`` is ordered after.
    possible : bool
        Whether it may be no race: something that cannot be observed may order the two, or what a
        kernel does is only assumed.
    count : int
        How often it was found between these two lines.
    advice : str
        What to do.

    Examples
    --------
    >>> import userstream as us
    >>> us.Race.__name__
    'Race'
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
    # Of both in the timeline, the last time that it was seen.
    _entries: tuple[int, int] = field(default=(-1, -1), repr=False, compare=False)
    _times: tuple[int, int] = field(default=(0, 0), repr=False, compare=False)

    @property
    def key(self) -> str:
        """The line that suppresses it, which is the same in every run.

        Examples
        --------
        >>> import userstream as us
        >>> isinstance(us.Race.key, property)
        True
        """
        facts = ((name, _LINE_BREAK.sub("?", value)) for name, value in self._facts().items())
        return " ".join(f"{name}={_word(value)}" for name, value in facts)

    def _facts(self) -> dict[str, str]:
        """Return the facts that a suppression can name."""
        kind = self.kind.replace(" ", "-")
        return {"race": kind, "first": _function(self.first), "second": _function(self.second)}

    def __str__(self) -> str:
        # Of a kernel only the first byte is known.
        size = f"{self.nbytes} bytes of " if self.nbytes > 1 else ""
        what = f"{self.kind}: {size}{self.memory} memory at {self.address:#x}"
        lines = [("possible " if self.possible else "") + what]
        if self.count > 1:
            lines[0] += f", {self.count} times"
        lines += [f"  first:  {self.first}", f"  second: {self.second}"]
        if self.framework is not None:
            line = line_of(self.allocated)
            where = "(no line is known)" if line is None else _where(line)
            lines.append(f"  allocated by {self.framework}: {where}")
        if self.ordered_until is not None:
            lines.append(
                f"  ordered until: {self.ordered_until.name} at {_where(self.ordered_until.line)}"
            )
        lines += [f"  {self.advice}", f"  suppress: {self.key}"]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Return the attributes as JSON-serializable data.

        Returns
        -------
        dict
            Made of numbers, strings, lists and dictionaries.

        Examples
        --------
        >>> import userstream as us
        >>> callable(us.Race.as_dict)
        True
        """
        return {**_plain(self), "key": self.key}

    def _for_page(self) -> dict[str, Any]:
        return {
            **self.as_dict(),
            "entries": self._entries,
            "allocated_at": _plain(line_of(self.allocated)),
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

    def __str__(self) -> str:
        times = f"{self.count} times, " if self.count > 1 else ""
        return f"{self.seconds * 1e3:.3f} ms in {self.name} ({times}{_where(self.line)})"

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


_KEYS = ("race", "first", "second")
# As lines name them.
_KINDS = (
    "read-after-write",
    "write-after-read",
    "write-after-write",
    "use-after-write",
    "write-after-use",
    "use-after-use",
    "use-after-free",
    "use-before-allocation",
    "host-overwrote-the-source-of-a-copy",
    "host-read-before-the-copy",
)

Suppression = dict[str, str]


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
    found: Suppression = {}
    try:
        words = shlex.split(line)
    except ValueError as error:  # a quotation that does not end
        raise ValueError(f"{where}: {line!r} is not a suppression: {error}") from None
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in _KEYS or not value:
            raise ValueError(
                f"{where}: {word!r} is not a suppression: it is a line such as "
                "`race=read-after-write first=train.py:step second=*`, with any of these keys"
            )
        if key == "race" and not any(_matches(kind, value) for kind in _KINDS):
            raise ValueError(  # or it would suppress nothing, and nobody would know why
                f"{where}: {word!r} is not a suppression: no race is called that; races are "
                f"{', '.join(_KINDS)}"
            )
        found[key] = value
    return found


class Baseline:
    """The races of an earlier report, which do not fail a run."""

    def __init__(self, path: str) -> None:
        """Read a report as JSON; raise `ValueError` if it is none."""
        try:
            self._keys = {race["key"] for race in json.loads(Path(path).read_text())["races"]}
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path}: this is no report as JSON, of --report seen.json") from None
        self._path = path

    def new(self, races: Iterable[Race]) -> list[Race]:
        """Return the races that the earlier report does not have."""
        return [race for race in races if race.key not in self._keys]

    def compared(self, races: Sequence[Race]) -> str:
        """Return how races differ from the earlier ones, as text."""
        new = self.new(races)
        fixed = sorted(self._keys - {race.key for race in races})
        lines = [f"compared with {self._path}: {len(new)} new, {len(fixed)} fixed"]
        return "\n".join([*lines, *(f"  fixed: {key}" for key in fixed)])


def covers(suppression: Suppression, race: Race) -> bool:
    """Return whether a suppression covers a race; its values may contain ``*`` and ``?``."""
    facts = race._facts()
    return all(
        any(
            _matches(fact, value)
            for fact in (_kinds(facts[key]) if key == "race" else [facts[key]])
        )
        for key, value in suppression.items()
    )


def _kinds(kind: str) -> list[str]:
    """Return the kinds by which a suppression of any run may name a kind."""
    second, after, first = kind.partition("-after-")
    if "use" not in (first, second) or first == "free":
        return [kind]
    seconds, firsts = (("read", "write") if each == "use" else (each,) for each in (second, first))
    found = [f"{later}{after}{earlier}" for later in seconds for earlier in firsts]
    return [kind, *(each for each in found if each != "read-after-read")]


def _matches(fact: str, value: str) -> bool:
    return fnmatch.fnmatchcase(fact, value.replace("[", "[[]"))  # names of kernels have some
