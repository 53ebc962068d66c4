"""Advice for a race: a sentence, and where the source tells how, the change of the program."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from .clocks import LEGACY_NAME, NODE_NAME
from .found import Edit
from .log import PROGRAM
from .source import source_of
from .stacks import Frame

if TYPE_CHECKING:
    from traceback import FrameSummary

    from .found import Operation, Race
    from .source import Source, StreamName

Between = tuple["FrameSummary | None", "FrameSummary | None"]

_WRITES = (ast.Assign, ast.AugAssign, ast.AnnAssign)


class _Place(NamedTuple):
    """Where an operation stands in the source of the program."""

    source: Source
    file: str
    statement: ast.stmt
    stream: StreamName | None

    def before(self, code: str, statement: ast.stmt | None = None) -> Edit:
        """Return the edit that inserts code before a statement."""
        found = self.source.whole_line(statement or self.statement)
        return self._edit(found.lineno, found.lineno, found, code)

    def after(self, code: str) -> Edit:
        """Return the edit that inserts code after the statement."""
        found = self.source.whole_line(self.statement)
        line = (found.end_lineno or found.lineno) + 1
        return self._edit(line, line, found, code)

    def without(self) -> Edit:
        """Return the edit that removes the statement."""
        found = self.source.whole_line(self.statement)
        end = (found.end_lineno or found.lineno) + 1
        if self.source.is_alone(found):
            return self._edit(found.lineno, end, found, "pass")
        return Edit(self.file, found.lineno, end, "")

    def _edit(self, line: int, end: int, like: ast.stmt, code: str) -> Edit:
        indentation = self.source.indentation(like.lineno)
        text = "".join(f"{indentation}{each}\n" for each in code.splitlines())
        return Edit(self.file, line, end, text)


def advised(race: Race, between: Between | None = None) -> Race:
    """Return a race with advice, and with the edits of the program that follow the advice.

    Parameters
    ----------
    race : Race
        The race.
    between : tuple of FrameSummary or None, optional
        Of a write by the host: the line after which it came, and the line before.
    """
    if race.kind == "host overwrote the source of a copy":
        return _overwritten(race, between or (None, None))
    if race.kind == "host read before the copy":
        first = _place(race.first)
        return replace(
            race,
            advice=f"wait for the copy at {_where(race.first)} before the host reads its result",
            edits=() if first is None else _host_wait_after(first),
        )
    if race.kind == "use after free" and race.first.access == "free":
        return _freed_first(race)
    return replace(race, advice=_sentence(race), edits=_edge(race))


def _sentence(race: Race) -> str:
    first, second = race.first, race.second
    where = _where(second)
    if race.kind == "use after free":
        return (
            f"let {second.stream} wait for {first.stream} before the memory is freed at {where}, "
            "or free it on the stream that uses it last (torch: tensor.record_stream)"
        )
    if second.stream == NODE_NAME:
        return (
            f"let the node that is added at {where} depend on the one that is added at "
            f"{_where(first)}"
        )
    if race.kind == "use before allocation":
        return (
            f"let {second.stream} wait for {first.stream}, on which the memory was allocated, "
            f"before {where}"
        )
    return (
        f"nothing orders {second.stream} after {first.stream}: let it wait before {where}, or "
        f"use `with us.borrow(buffer) as stream:` and queue {where} on `stream`"
    )


# -- an edge between two streams -------------------------------------------------------------------


def _edge(race: Race) -> tuple[Edit, ...]:
    """Return the edit that makes the stream of the second wait for that of the first."""
    first, second = _place(race.first), _place(race.second)
    if first is None or second is None or first.stream is None or second.stream is None:
        return ()
    waits, awaited = second.stream, first.stream
    if first.file != second.file:
        return ()
    is_named = awaited.text != waits.text  # else of another call, another turn or another thread
    if is_named and second.source.is_visible(awaited.text, first.statement, second.statement):
        # Inside of a block another stream is current.
        at = waits.place if awaited.is_current else second.statement
        return (second.before(_wait(waits, awaited), at),)
    return _host_wait_after(first)


def _wait(waits: StreamName, awaited: StreamName) -> str:
    one, other = waits.text, awaited.text
    libraries = {waits.library, awaited.library}
    code = "".join(f"{each}\n" for each in (waits.code, awaited.code) if each)
    if libraries == {"torch"}:
        return f"{code}{one}.wait_stream({other})"
    if libraries == {"cupy"}:
        return f"{code}{one}.wait_event({other}.record())"
    if libraries == {"numba"}:
        return f"{code}done = cuda.event()\ndone.record({other})\ndone.wait({one})"
    if libraries == {"core"}:
        return f"{code}{one}.wait({other})"
    if len(libraries) == 1:
        (module,) = libraries
        return (
            f"done = {module}.cuEventCreate(0)[1]\n{module}.cuEventRecord(done, {other})\n"
            f"{module}.cuStreamWaitEvent({one}, done, 0)"
        )
    return f"{code}us.get_stream({one}).wait({other})"


# -- memory that is freed --------------------------------------------------------------------------


def _freed_first(race: Race) -> Race:
    first, second = race.first, race.second
    text = f"free the memory after its last use at {_where(second)}, and not at {_where(first)}"
    freed, used = _place(first), _place(second)
    edits: tuple[Edit, ...] = ()
    if freed is not None and used is not None and freed.file == used.file:
        source = freed.source
        if source.function(freed.statement) is source.function(used.statement):
            code = ast.unparse(freed.statement)
            edits = (freed.without(), used.after(code))
    return replace(race, advice=text, edits=edits)


# -- the host --------------------------------------------------------------------------------------


def _overwritten(race: Race, between: Between) -> Race:
    copy = _place(race.first)
    before, after = (None if frame is None else _place_of(frame) for frame in between)
    written: list[ast.stmt] = []
    if before is not None and after is not None and before.file == after.file:
        written = before.source.between(before.statement, after.statement)
        stores = [each for each in written if _stores(each)]
        written = stores or written
    second, told = race.second, _where(race.second)
    if len(written) == 1 and second.line is not None:
        second = replace(second, line=_moved(second.line, written[0].lineno))
        told = _where(second)
    elif written:
        told = f"lines {written[0].lineno} to {written[-1].lineno} of {_file(before)}"
    elif between[0] is not None:
        told = f"a line between {_line(between[0])} and {_where(second)}"
    edits: tuple[Edit, ...] = ()
    if copy is not None:
        edits = _host_wait_after(copy)
        if len(written) == 1 and before is not None and copy.stream is not None:
            place = copy._replace(source=before.source, file=before.file, statement=written[0])
            visible = before.source.is_visible(copy.stream.text, copy.statement, written[0])
            if copy.file == before.file and visible:
                edits = (place.before(_host_wait(copy.stream)),)
    text = (
        f"the copy at {_where(race.first)} may read what {told} wrote later: wait for the copy "
        "before its source is written again, or copy from another buffer"
    )
    return replace(race, second=second, advice=text, edits=edits)


def _moved(frame: FrameSummary, line: int) -> FrameSummary:
    return Frame(frame.filename, line, frame.name, PROGRAM)


def _stores(statement: ast.stmt) -> bool:
    """Return whether a statement writes to elements of an array."""
    if isinstance(statement, _WRITES):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        return any(isinstance(each, ast.Subscript) for each in targets)
    return False


def _host_wait(stream: StreamName) -> str:
    code = f"{stream.code}\n" if stream.code else ""
    if stream.library in {"torch", "cupy", "numba"}:
        return f"{code}{stream.text}.synchronize()"
    if stream.library == "core":
        return f"{code}{stream.text}.sync()"
    return f"{code}{stream.library}.cuStreamSynchronize({stream.text})"


def _host_wait_after(place: _Place) -> tuple[Edit, ...]:
    return () if place.stream is None else (place.after(_host_wait(place.stream)),)


# -- lines -----------------------------------------------------------------------------------------


def _place(operation: Operation) -> _Place | None:
    """Return where an operation stands in the source, if that can be read."""
    place = None if operation.line is None else _place_of(operation.line, operation.name)
    if place is not None and operation.stream.startswith(LEGACY_NAME):
        return place._replace(stream=place.source.default_stream(place.statement))
    return place


def _place_of(frame: FrameSummary, name: str = "") -> _Place | None:
    source = source_of(frame)
    statement = None if source is None else source.statement(frame)
    if source is None or statement is None:
        return None
    stream = source.stream(statement, frame.lineno or 0, name)
    return _Place(source, frame.filename, statement, stream)


def _file(place: _Place | None) -> str:
    return "" if place is None else place.file.rpartition("/")[2]


def _line(frame: FrameSummary) -> str:
    return f"{frame.filename.rpartition('/')[2]}:{frame.lineno}"


def _where(operation: Operation) -> str:
    return operation.name if operation.line is None else _line(operation.line)
