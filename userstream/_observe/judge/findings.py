"""Findings of one process as plain data, and of several processes as one report."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields, replace
from traceback import FrameSummary
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from .finding_types import Edit, Operation, Race, Stall, WrongStream, shown_path
from .lines import Line, Text
from .log import Frame

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

T = TypeVar("T")
Counted = TypeVar("Counted", Race, WrongStream)

_SHOWN = 20  # stalls in the text, or operations on streams to be avoided
_MOST_NAMED = 6  # processes that a line names one by one
_VERSION = 1  # of the JSON document
_ORDERED = "suspected, but ordered by something not seen (tried 3 times)"


@dataclass(frozen=True)
class Process:
    """An observed process."""

    pid: int
    rank: str | None
    command: Sequence[str]
    directory: str | None
    began: int  # nanoseconds since 1970
    monotonic: int  # the same moment on the clock of the log
    userstream: str  # the version

    def program(self) -> str:
        """Return a short name of the program that the process runs."""
        _, *arguments = self.command or [""]
        for at, argument in enumerate(arguments):
            if argument in ("-m", "-c"):
                name = "".join(arguments[at + 1 : at + 2])
                return f"-m {name}" if argument == "-m" else _of_code(name)
            if not argument.startswith("-"):
                return os.path.basename(argument)
        return os.path.basename(self.command[0]) if self.command else "?"


def _of_code(code: str) -> str:
    return "multiprocessing" if code.startswith("from multiprocessing.") else "-c"


@dataclass(frozen=True)
class Findings:
    """The findings of one process, which a judge made from its log."""

    process: Process
    seconds: float
    end: str | None  # why the recording ended; None: the log has no end
    races: tuple[Race, ...]  # possible ones as well
    stalls: tuple[Stall, ...]
    forbidden: tuple[Stall, ...]  # in blocks of no_stalls
    allowed: tuple[tuple[str, int], ...]  # reasons, and how many stalls each has allowed
    wrong_streams: tuple[WrongStream, ...]
    hangs: tuple[str, ...]  # reports of streams that did not go on
    calls: dict[str, int]
    streams: int
    not_seen: tuple[str, ...]
    timeline: dict[str, Any]

    def as_json(self) -> str:
        """Return the findings as JSON for `from_json`."""
        return json.dumps(self, default=_told)


# Those that JSON names, each as an object with one key.
_CLASSES: dict[str, Any] = {
    each.__name__: each for each in (Edit, Findings, Operation, Process, Race, Stall, WrongStream)
}
_FRAME = ("filename", "lineno", "name", "whose", "end_lineno", "colno", "end_colno")


def _told(value: Any) -> dict[str, Any]:
    if isinstance(value, FrameSummary):
        return {"Frame": [getattr(value, name, 0) for name in _FRAME]}
    return {type(value).__name__: {each.name: getattr(value, each.name) for each in fields(value)}}


def from_json(text: str | bytes | bytearray) -> Any:
    """Return the objects that `Findings.as_json` has written as JSON."""
    return json.loads(text, object_hook=_made)


def _made(told: dict[str, Any]) -> Any:
    """Return the object for a dictionary of JSON."""
    name, value = next(iter(told.items()), ("", {}))
    if name == "Frame":
        return Frame(*value)
    if name not in _CLASSES:
        return told
    facts = {key: tuple(each) if isinstance(each, list) else each for key, each in value.items()}
    return _CLASSES[name](**facts)


# -- several processes ----------------------------------------------------------------------------


class Found(NamedTuple, Generic[T]):
    """A race or a stall, and the numbers of the processes of a report that have it."""

    what: T
    processes: tuple[int, ...]


class Report:
    """The findings of all processes of a run, with one entry for equal findings.

    Parameters
    ----------
    findings : sequence of Findings
        Those of each process.
    possible : bool
        Whether possible races are reported like others.
    notes : sequence of str
        Sentences about the run, which come after the first line of the text.
    not_seen : sequence of str
        Sentences about what no process could record.
    """

    def __init__(
        self,
        findings: Sequence[Findings],
        *,
        possible: bool = False,
        notes: Sequence[str] = (),
        not_seen: Sequence[str] = (),
    ) -> None:
        self.findings = sorted(findings, key=lambda each: _order(each.process))
        self.notes = notes
        races = [(at, race) for at, each in enumerate(self.findings) for race in each.races]
        found = _merged(races, _key_of_race, _with_counts)
        self.certain = [each for each in found if not each.what.possible]
        self.possible = [each for each in found if each.what.possible]
        self.shows_possible = possible
        self.reported = found if possible else self.certain
        self.stalls = _merged_stalls(each.stalls for each in self.findings)
        self.forbidden = _merged_stalls(each.forbidden for each in self.findings)
        self.allowed = _summed(dict(each.allowed) for each in self.findings)
        wrong = [(at, one) for at, each in enumerate(self.findings) for one in each.wrong_streams]
        self.wrong_streams = _merged(wrong, _key_of_wrong_stream, _with_counts)
        self.calls = _summed(each.calls for each in self.findings)
        self.streams = sum(each.streams for each in self.findings)
        self.seconds = max((each.seconds for each in self.findings), default=0.0)
        self._more_unseen = not_seen

    @property
    def races(self) -> tuple[Race, ...]:
        """The reported races."""
        return tuple(each.what for each in self.reported)

    def not_seen(self) -> list[str]:
        """Return sentences about calls that could not be observed, each with its processes."""
        found: dict[str, list[int]] = {}
        for number, each in enumerate(self.findings):
            for sentence in each.not_seen:
                found.setdefault(sentence, []).append(number)
        told = []
        for sentence, processes in found.items():
            where = self.where(processes)
            told.append(f"{where}: {sentence}" if where else sentence)
        return [*told, *self._more_unseen]

    def hangs(self) -> list[str]:
        """Return the reports of streams that did not go on, each with its process."""
        told = []
        for number, each in enumerate(self.findings):
            where = self.where([number])
            told += [f"{where}: {text}" if where else text for text in each.hangs]
        return told

    def where(self, processes: Sequence[int]) -> str:
        """Return the names of processes, or an empty text in a report of one process."""
        if len(self.findings) == 1:
            return ""
        ranks = self._ranks()
        if all(number in ranks for number in processes):
            return _plural_ranks([ranks[number] for number in processes])
        if len(processes) > _MOST_NAMED:
            return f"{len(processes)} of {len(self.findings)} processes"
        return ", ".join(self.name(number) for number in processes)

    def name(self, number: int) -> str:
        """Return the name of a process."""
        rank = self._ranks().get(number)
        if rank is not None:
            return f"rank {rank}"
        process = self.findings[number].process
        of_rank = "" if process.rank is None else f"rank {process.rank}, "
        return f"{of_rank}process {process.pid} ({process.program()})"

    def _ranks(self) -> dict[int, int]:
        """Return ranks by number of process, for the first process of each rank."""
        ranks: dict[int, int] = {}
        for number, each in enumerate(self.findings):  # those that began first come first
            rank = each.process.rank
            if rank is not None and rank.isdecimal() and int(rank) not in ranks.values():
                ranks[number] = int(rank)
        return ranks

    # -- as data ----------------------------------------------------------------------------------

    def document(self) -> dict[str, Any]:
        """Return the findings as JSON-serializable data."""
        return {
            "version": _VERSION,
            "seconds": self.seconds,
            "processes": [self._process(number) for number in range(len(self.findings))],
            "races": [_told_of(each) for each in self.certain],
            "possible": [_told_of(each) for each in self.possible],
            "stalls": [_told_of(each) for each in self.stalls],
            "forbidden_stalls": [_told_of(each) for each in self.forbidden],
            "allowed_stalls": self.allowed,
            "wrong_streams": [_told_of(each) for each in self.wrong_streams],
            "hangs": self.hangs(),
            "calls": self.calls,
            "not_seen": self.not_seen(),
        }

    def _process(self, number: int) -> dict[str, Any]:
        found = self.findings[number]
        process = found.process
        return {
            "name": self.name(number),
            "pid": process.pid,
            "rank": process.rank,
            "command": list(process.command),
            "seconds": found.seconds,
            "end": found.end,
        }

    def document_of_page(self) -> dict[str, Any]:
        """Return the findings and the newest operations of each process, as the page shows them."""
        origins = [_origin(each) for each in self.findings]
        timelines = [
            {
                # Nanoseconds from the first operation of all processes to that of this one.
                "process": {"name": self.name(number), "offset": origin - min(origins)},
                **each.timeline,
                "frames": [[shown_path(file), *rest] for file, *rest in each.timeline["frames"]],
            }
            for number, (each, origin) in enumerate(zip(self.findings, origins, strict=True))
        ]
        document = {**self.document(), "streams": self.streams, "timelines": timelines}
        found: dict[str, Iterable[Found[Race] | Found[Stall] | Found[WrongStream]]] = {
            "races": self.certain,
            "possible": self.possible,
            "stalls": self.stalls,
            "wrong_streams": self.wrong_streams,
        }
        for name, every in found.items():
            document[name] = [
                {**each.what._for_page(), "processes": list(each.processes)} for each in every
            ]
        return document

    # -- as text ----------------------------------------------------------------------------------

    def lines(self) -> list[Line]:
        """Return the findings as lines of text."""
        lines: list[Line] = [Text(self._head(), "title"), *map(Text, self.notes)]
        for each in self.reported:
            lines += [Text(""), *each.what._lines(self.where(each.processes))]
        ordered = [each for each in self.possible if each.what.confirmed is False]
        if ordered and not self.shows_possible:
            lines += _heading(f"{_ORDERED}:")
            lines += [Text(f"  {_in_a_line(each.what)}", wraps=False) for each in ordered]
        for text in self.hangs():
            first, *rest = text.splitlines()
            lines += [*_heading(first), *map(Text, rest)]
        lines += self._listed("operations on streams to be avoided:", self.wrong_streams)
        lines += self._listed("waits in blocks of no_stalls:", self.forbidden)
        lines += self._listed("stalls:", self.stalls)
        if self.allowed:
            lines += _heading("stalls that are allowed:")
            lines += [Text(f"  {reason} ({count})") for reason, count in self.allowed.items()]
        unseen = self.not_seen()
        if unseen:
            lines += _heading("not seen:")
            lines += [Text(f"  {line}") for what in unseen for line in what.split("\n")]
        return lines

    def _head(self) -> str:
        calls = plural(sum(self.calls.values()), "driver call")
        found = f"{plural(len(self.reported), 'race')}, {plural(len(self.stalls), 'stall')}"
        if self.wrong_streams:
            found += f", {len(self.wrong_streams)} on streams to be avoided"
        processes = ""
        if len(self.findings) > 1:
            everywhere = self.where(range(len(self.findings)))
            ranks = f" ({everywhere})" if everywhere.startswith("ranks") else ""
            processes = f" in {len(self.findings)} processes{ranks}"
        on = f"{calls} on {plural(self.streams, 'stream')}"
        return f"observed {self.seconds:.3f} s, {on}{processes}: {found}"

    def _listed(self, title: str, found: Sequence[Found[Any]]) -> list[Line]:
        if not found:
            return []
        lines = _heading(title)
        for each in found[:_SHOWN]:
            where = self.where(each.processes)
            lines.append(Text(f"  {each.what}{where and f', {where}'}", wraps=False))
        if len(found) > _SHOWN:
            lines.append(Text(f"  and {len(found) - _SHOWN} more"))
        return lines


def _heading(title: str) -> list[Line]:
    return [Text(""), Text(title, "title")]


def _in_a_line(race: Race) -> str:
    sides = " and ".join(
        each.name if each.line is None else f"{each.line.filename}:{each.line.lineno}"
        for each in (race.first, race.second)
    )
    return f"{race.kind}: {sides}"


def _origin(found: Findings) -> int:
    """Return when the first operation of a timeline was queued, in nanoseconds since 1970."""
    origin: int = found.timeline["origin"] or found.process.monotonic
    return origin - found.process.monotonic + found.process.began


def _order(process: Process) -> tuple[bool, int, int]:
    """Return the place of a process in reports: by rank, and by the time of its begin."""
    rank = process.rank or ""
    return not rank.isdecimal(), int(rank) if rank.isdecimal() else 0, process.began


def _plural_ranks(ranks: list[int]) -> str:
    """Return ranks as text, such as "ranks 0-3, 6"."""
    spans: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1] = (spans[-1][0], rank)
        else:
            spans.append((rank, rank))
    told = ", ".join(f"{begin}-{end}" if end > begin else f"{begin}" for begin, end in spans)
    return f"rank {told}" if len(ranks) == 1 else f"ranks {told}"


def _merged(
    found: Iterable[tuple[int, T]], key: Callable[[T], Hashable], add: Callable[[T, T], T]
) -> list[Found[T]]:
    """Return one entry for all findings with the same key, with the numbers of their processes."""
    entries: dict[Hashable, Found[T]] = {}
    for number, each in found:
        before = entries.get(key(each))
        entries[key(each)] = (
            Found(each, (number,))
            if before is None
            else Found(add(before.what, each), (*before.processes, number))
        )
    return list(entries.values())


def _merged_stalls(found: Iterable[Sequence[Stall]]) -> list[Found[Stall]]:
    stalls = [(number, stall) for number, each in enumerate(found) for stall in each]
    return sorted(_merged(stalls, _key_of_stall, _both_stalls), key=lambda each: -each.what.seconds)


def _told_of(found: Found[Any]) -> dict[str, Any]:
    return {**found.what.as_dict(), "processes": list(found.processes)}


def _key_of_race(race: Race) -> Hashable:
    sides = (race.first, race.second)
    lines = [(_place(side.line), _place(side.captured)) for side in sides]
    return race.key, race.possible, *lines


def _key_of_stall(stall: Stall) -> Hashable:
    return stall.name, _place(stall.line)


def _place(line: FrameSummary | None) -> Hashable:
    return line and (line.filename, line.lineno)


def _key_of_wrong_stream(found: WrongStream) -> Hashable:
    return found.name, found.stream, _place(found.line)


def _with_counts(one: Counted, other: Counted) -> Counted:
    return replace(one, count=one.count + other.count)


def _both_stalls(stall: Stall, other: Stall) -> Stall:
    return replace(
        stall,
        seconds=stall.seconds + other.seconds,
        longest=max(stall.longest, other.longest),
        count=stall.count + other.count,
    )


def _summed(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for each in counts:
        for name, count in each.items():
            total[name] = total.get(name, 0) + count
    return dict(sorted(total.items()))


def plural(count: int, what: str) -> str:
    """Return a number with its noun."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
