"""Advice for a race: a sentence, and where the source tells how, the change of the program."""

from __future__ import annotations

import ast
import functools
import os
import stat
import tokenize
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from .clocks import LEGACY_NAME, NODE_NAME
from .finding_types import FREED_IN_USE, Edit
from .functions import FUNCTIONS
from .log import PROGRAM, Frame

if TYPE_CHECKING:
    from collections.abc import Iterator
    from traceback import FrameSummary

    from .finding_types import Operation, Race


class Between(NamedTuple):
    """Two lines between which the host has written."""

    before: FrameSummary | None = None
    after: FrameSummary | None = None
    # Whether the two driver calls were made in functions that these lines call.
    before_calls: bool = False
    after_calls: bool = False


# Of NumPy and ctypes; those of PyTorch end in an underscore.
_WRITING = frozenset({"copyto", "fill", "memmove", "memset", "put"})
_WRITES = (ast.Assign, ast.AugAssign, ast.AnnAssign)


_COLLECTIVE = "ncclDevKernel"  # how the names of NCCL's kernels begin


class _Place(NamedTuple):
    """Position of an operation in the source of the program."""

    source: Source
    file: str
    statement: ast.stmt
    stream: StreamName | None

    def before(self, code: str, statement: ast.stmt | None = None) -> tuple[Edit, ...]:
        """Return the edit that inserts code before a statement, if that is possible."""
        found = self.source.whole_line(statement or self.statement)
        return () if found is None else (self._edit(found.lineno, found.lineno, found, code),)

    def after(self, code: str) -> tuple[Edit, ...]:
        """Return the edit that inserts code after the statement, if that is possible."""
        found = self.source.whole_line(self.statement)
        is_last = isinstance(self.statement, (ast.Return, ast.Raise))
        if found is None or is_last or hasattr(self.statement, "body") or self._has_tail(found):
            return ()
        line = (found.end_lineno or found.lineno) + 1
        if line > len(self.source.lines):  # no newline ends the file
            return ()
        return (self._edit(line, line, found, code),)

    def without(self) -> tuple[Edit, ...]:
        """Return the edit that removes the statement, if the statement has lines of its own."""
        found = self.source.whole_line(self.statement)
        if found is not self.statement or self._has_tail(found):
            return ()
        end = (found.end_lineno or found.lineno) + 1
        if self.source.is_alone(found):
            return (self._edit(found.lineno, end, found, "pass"),)
        return (Edit(self.file, found.lineno, end, ""),)

    def _has_tail(self, statement: ast.stmt) -> bool:
        """Return whether another statement follows on the last line of a statement."""
        line = self.source.lines[(statement.end_lineno or statement.lineno) - 1]
        return line.encode()[statement.end_col_offset or 0 :].lstrip().startswith(b";")

    def _edit(self, line: int, end: int, like: ast.stmt, code: str) -> Edit:
        indentation = self.source.indentation(like.lineno)
        text = "".join(f"{indentation}{each}\n" for each in code.split("\n"))
        return Edit(self.file, line, end, text)


def advised(race: Race, between: Between | None = None) -> Race:
    """Return a race with advice, and with the edits of the program that follow the advice.

    Parameters
    ----------
    race : Race
        The race.
    between : Between, optional
        Of a write by the host: the line after which it came, and the line before.
    """
    if race.kind == "host overwrote the source of a copy":
        return _overwritten(race, between or Between())
    if race.kind == "host read before the copy":
        first = _place(race.first)
        return replace(
            race,
            advice=f"wait for the copy at {_where(race.first)} before the host reads its result",
            edits=() if first is None else _host_wait_after(first),
        )
    if race.kind == "use after free" and race.first.access == "free":
        return _freed_first(race)
    if race.first.name.startswith(_COLLECTIVE):
        return _collective_first(race)
    edits = _edge(race)
    if race._is_mutual and edits:
        back = _edge(replace(race, first=race.second, second=race.first))
        edits = tuple(sorted({*back, *edits}, key=lambda edit: edit.line)) if back else ()
    return replace(race, advice=_sentence(race), edits=edits)


def _sentence(race: Race) -> str:
    first, second = race.first, race.second
    where = _where(second)
    if race.kind == FREED_IN_USE:
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
    wait = f"after {first.stream}: let it wait before {where}"
    if race._is_mutual:
        wait = (
            f"after {first.stream}, nor the other way round: let each wait for the other, before "
            f"{where} and before {_where(first)}"
        )
    return (
        f"nothing orders {second.stream} {wait}, or use `with us.borrow(buffer) as stream:` and "
        f"queue {where} on `stream`"
    )


# -- an edge between two streams -------------------------------------------------------------------


def _edge(race: Race) -> tuple[Edit, ...]:
    """Return the edit that makes the stream of the second operation wait for the first stream."""
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
        return second.before(_wait(waits, awaited), at)
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


def _collective_first(race: Race) -> Race:
    """Advise to wait for the work of a collective, whose stream is NCCL's own.

    ``wait()`` of the work that ``torch.distributed`` returns makes the current stream wait.
    """
    first, second = _place(race.first), _place(race.second)
    edits: tuple[Edit, ...] = ()
    if first is not None and second is not None and first.file == second.file:
        match first.statement:
            case ast.Assign(targets=[ast.Name(id=work)], value=ast.Call()) if (
                second.source.is_visible(work, first.statement, second.statement)
            ):
                edits = second.before(f"{work}.wait()")
    return replace(
        race,
        advice=(
            f"the collective at {_where(race.first)} runs on a stream of NCCL: call wait() of the "
            f"work that it returns before {_where(race.second)}"
        ),
        edits=edits,
    )


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
            removed, added = freed.without(), used.after(code)
            edits = (*removed, *added) if removed and added else ()
    return replace(race, advice=text, edits=edits)


# -- the host --------------------------------------------------------------------------------------


def _overwritten(race: Race, between: Between) -> Race:
    copy = _place(race.first)
    before, after = (None if frame is None else _place_of(frame) for frame in between[:2])
    written: list[ast.stmt] = []
    if before is not None and after is not None and before.file == after.file:
        written = before.source.between(before.statement, after.statement)
        # The host may have written in a function that made one of the calls as well.
        written = [
            *([before.statement] if between.before_calls else []),
            *written,
            *([after.statement] if between.after_calls else []),
        ]
        names = set() if copy is None else _names(copy.statement)
        stores = [each for each in written if _stores(each)]
        # Rather what writes to the buffer that the copy names.
        written = [each for each in stores if _names(each) & names] or stores or written
    second, told = race.second, _where(race.second)
    if len(written) == 1 and second.line is not None:
        second = replace(second, line=_moved(second.line, written[0].lineno))
        told = _where(second)
    elif written:
        told = f"lines {written[0].lineno} to {written[-1].lineno} of {_file(before)}"
    elif between.before is not None:
        told = f"a line between {_line(between.before)} and {_where(second)}"
    if len(written) != 1:
        second = replace(second, since=between.before)
    edits: tuple[Edit, ...] = ()
    if copy is not None:
        edits = _host_wait_after(copy)
        if len(written) == 1 and before is not None and copy.stream is not None:
            place = copy._replace(source=before.source, file=before.file, statement=written[0])
            visible = before.source.is_visible(copy.stream.text, copy.statement, written[0])
            if copy.file == before.file and visible:
                edits = place.before(_host_wait(copy.stream))
    text = (
        f"the copy at {_where(race.first)} may read what {told} wrote later: wait for the copy "
        "before its source is written again, or copy from another buffer"
    )
    return replace(race, second=second, advice=text, edits=edits)


def _moved(frame: FrameSummary, line: int) -> FrameSummary:
    return Frame(frame.filename, line, frame.name, PROGRAM)


def _stores(statement: ast.stmt) -> bool:
    """Return whether a statement writes to elements of an array, or calls a function that does."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        called = ast.unparse(statement.value.func).rpartition(".")[2]
        return called in _WRITING or (called.endswith("_") and not called.startswith("_"))
    if isinstance(statement, _WRITES):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        return any(isinstance(each, ast.Subscript) for each in targets)
    return False


def _names(statement: ast.stmt) -> set[str]:
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}


def _host_wait(stream: StreamName) -> str:
    code = f"{stream.code}\n" if stream.code else ""
    if stream.library in {"torch", "cupy", "numba"}:
        return f"{code}{stream.text}.synchronize()"
    if stream.library == "core":
        return f"{code}{stream.text}.sync()"
    return f"{code}{stream.library}.cuStreamSynchronize({stream.text})"


def _host_wait_after(place: _Place) -> tuple[Edit, ...]:
    return () if place.stream is None else place.after(_host_wait(place.stream))


# -- lines -----------------------------------------------------------------------------------------


def _place(operation: Operation) -> _Place | None:
    """Return the position of an operation in the source, if the source can be read."""
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


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_WITHS = (ast.With, ast.AsyncWith)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_MOST = 1 << 21  # bytes of a file that are read


class StreamName(NamedTuple):
    """An expression for the stream of an operation, as the program has it at a line."""

    text: str
    # Whose streams have which methods: "core", "torch", "cupy", "numba", or the name of the module
    # of driver functions, which are given a handle.
    library: str
    place: ast.stmt  # the outermost statement in which the expression means that stream
    is_current: bool = False  # not named there: the one that is current
    code: str = ""  # which the expression needs before


class Source:
    """The source of one file."""

    def __init__(self, text: str) -> None:
        self.lines = text.split("\n")  # as Python does: a form feed ends no line
        self._tree = ast.parse(text)
        self._parents: dict[ast.AST, ast.AST] = {}
        self._statements: dict[int, ast.stmt] = {}  # the innermost one of each line
        for node in ast.walk(self._tree):
            for child in ast.iter_child_nodes(node):
                self._parents[child] = node
            if isinstance(node, ast.stmt):
                for line in range(node.lineno, (node.end_lineno or 0) + 1):
                    found = self._statements.get(line)
                    if found is None or node.lineno >= found.lineno:
                        self._statements[line] = node
        self.imports = {
            name: alias.name
            for node in ast.walk(self._tree)
            if isinstance(node, ast.Import)
            for alias in node.names
            for name in (alias.asname or alias.name.partition(".")[0],)
        }

    # -- statements -------------------------------------------------------------------------------

    def statement(self, frame: FrameSummary) -> ast.stmt | None:
        """Return the innermost statement of the line of a frame, if it is in that function."""
        found = self._statements.get(frame.lineno or 0)
        name = frame.name.rpartition(".")[2]
        if found is None or self.function_name(found) != name:
            return None
        return found

    def function(self, node: ast.AST) -> ast.AST:
        """Return the function that a node is in, or the module."""
        while node in self._parents:
            node = self._parents[node]
            if isinstance(node, _FUNCTIONS):
                return node
        return node

    def function_name(self, node: ast.AST) -> str:
        """Return the name of the function that a node is in, as frames have it."""
        found = self.function(node)
        if isinstance(found, ast.Lambda):
            return "<lambda>"
        return getattr(found, "name", "<module>")

    def outer(self, node: ast.AST) -> Iterator[ast.AST]:
        """Return the nodes around a node, from the inside up to its function."""
        end = self.function(node)
        while node is not end and node in self._parents:
            node = self._parents[node]
            if node is not end:
                yield node

    def whole_line(self, statement: ast.stmt) -> ast.stmt | None:
        """Return the innermost statement around one that begins its line.

        It is `None` if that is another function or a loop, or if there are several on the line.
        """
        found: ast.AST = statement
        while isinstance(found, ast.stmt):
            if not self.lines[found.lineno - 1][: found.col_offset].strip():
                return found
            found = self._parents[found]
            if isinstance(found, (*_FUNCTIONS, *_LOOPS)):
                break
        return None

    def is_alone(self, statement: ast.stmt) -> bool:
        """Return whether a statement is the only one of a block."""
        parent = self._parents[statement]
        return any(value == [statement] for _, value in ast.iter_fields(parent))

    def indentation(self, line: int) -> str:
        """Return the white space at the begin of a line."""
        text = self.lines[line - 1]
        return text[: len(text) - len(text.lstrip())]

    def between(self, before: ast.stmt, after: ast.stmt) -> list[ast.stmt]:
        """Return the statements that may run after one statement and before another one.

        They are in the same function, and are simple statements.
        """
        function = self.function(before)
        if self.function(after) is not function:
            return []
        if before.lineno < after.lineno:
            spans = [(before.end_lineno or before.lineno, after.lineno)]
        else:
            loops = [each for each in self.outer(after) if isinstance(each, _LOOPS)]
            around = [each for each in loops if each in list(self.outer(before))]
            if not around:
                return []
            loop = around[0]
            spans = [
                (before.end_lineno or before.lineno, (loop.end_lineno or 0) + 1),
                (loop.lineno, after.lineno),
            ]
        found = [
            node
            for node in ast.walk(function)
            if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Delete))
            and self.function(node) is function
            and any(start < node.lineno < end for start, end in spans)
        ]
        return sorted(found, key=lambda node: node.lineno)

    # -- streams ----------------------------------------------------------------------------------

    def stream(self, statement: ast.stmt, line: int, call: str) -> StreamName | None:
        """Return the expression for the stream on which a line queued a call."""
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and node.lineno <= line <= (node.end_lineno or 0):
                if any(isinstance(each, _COMPREHENSIONS) for each in self.outer(node)):
                    continue  # its names mean nothing outside
                found = self._argument(node, call)
                if found is not None:
                    return StreamName(*found, statement)
        for node in self.outer(statement):
            if isinstance(node, _WITHS):
                for item in node.items:
                    named = self._entered(item.context_expr)
                    if named is not None:
                        return StreamName(*named, node)
        for library, method in (("torch", "current_stream"), ("cupy", "get_current_stream")):
            for alias, name in self.imports.items():
                if name == library:
                    text = f"{alias}.cuda.{method}()"
                    return StreamName(text, library, statement, is_current=True)
        return None

    def default_stream(self, statement: ast.stmt) -> StreamName:
        """Return an expression for the legacy default stream at a statement."""
        for library, text in (("torch", "cuda.default_stream()"), ("cupy", "cuda.Stream.null")):
            for alias, name in self.imports.items():
                if name == library:
                    return StreamName(f"{alias}.{text}", library, statement)
        names = [each for each, name in self.imports.items() if name == "userstream"]
        text = f"{(names or ['userstream'])[0]}.Stream.legacy_default()"
        return StreamName(text, "core", statement, code="" if names else "import userstream")

    def _argument(self, node: ast.Call, call: str) -> tuple[str, str] | None:
        """Return the argument of a call that is a stream."""
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        for keyword in node.keywords:
            if keyword.arg == "stream":
                return _object_of(keyword.value)
        if isinstance(node.func, ast.Subscript) and isinstance(node.func.slice, ast.Tuple):
            parts = node.func.slice.elts  # kernel[grid, block, stream] of Numba
            return _object_of(parts[2], "numba") if len(parts) > 2 else None
        if name.startswith("cu"):
            place = _place_of_stream(call) if call.startswith(name) else None
            if place is None:
                return None
            number, words = place
            if any(isinstance(each, ast.Starred) for each in node.args):
                number -= words  # from the end
            if not -len(node.args) <= number < len(node.args):
                return None
            return _object_of(node.args[number], ast.unparse(node.func)[: -len(name) - 1])
        return _object_of(node.args[0]) if name in {"launch", "close"} and node.args else None

    def _entered(self, node: ast.expr) -> tuple[str, str] | None:
        """Return the stream that a block makes current."""
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name.endswith("cuda.stream") and node.args:
                return ast.unparse(node.args[0]), "torch"
            return None
        if isinstance(node, (ast.Name, ast.Attribute)) and "cupy" in self.imports.values():
            return ast.unparse(node), "cupy"
        return None

    def is_visible(self, text: str, at: ast.stmt, to: ast.stmt) -> bool:
        """Return whether an expression at one statement means the same at another one."""
        one, other = self.function(at), self.function(to)
        if one is other:
            return True
        root = ast.parse(text, mode="eval").body
        while isinstance(root, (ast.Attribute, ast.Subscript, ast.Call)):
            root = root.func if isinstance(root, ast.Call) else root.value
        if not isinstance(root, ast.Name):
            return False
        if root.id == "self":
            return self._parents.get(one) is self._parents.get(other)
        return not (_binds(one, root.id) or _binds(other, root.id))


@functools.cache
def _place_of_stream(call: str) -> tuple[int, int] | None:
    """Return the index of the stream among the arguments of a driver function, and their number."""
    for name, function in FUNCTIONS.items():
        if name.startswith(call) and function.stream is not None:
            # In Python what a call returns is no argument.
            returned = function.means == "allocate_async"
            return function.stream - returned, function.words - returned
    return None


def _object_of(node: ast.expr, library: str = "core") -> tuple[str, str] | None:
    """Return the expression of a stream, also from that of its handle, and its library."""
    if isinstance(node, ast.Call) and len(node.args) == 1 and ast.unparse(node.func) == "int":
        node = node.args[0]
    if isinstance(node, ast.Attribute) and node.attr == "handle":
        node, library = node.value, "core"
    if not isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)):
        return None  # a call may make another one each time
    return ast.unparse(node), library


def _binds(function: ast.AST, name: str) -> bool:
    """Return whether a function has a variable of its own of that name."""
    if isinstance(function, ast.Module):
        return False
    arguments = getattr(function, "args", None)
    if arguments is not None:
        for each in ast.walk(arguments):
            if isinstance(each, ast.arg) and each.arg == name:
                return True
    return any(
        isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store)
        for node in ast.walk(function)
    )


@functools.lru_cache(maxsize=64)
def _read(path: str, time: int) -> Source | None:
    del time  # another file by now is read again
    try:
        with tokenize.open(path) as file:  # in the encoding that the file names
            return Source(file.read(_MOST))
    except (OSError, ValueError, SyntaxError, RecursionError):
        return None


def source_of(frame: FrameSummary | None) -> Source | None:
    """Return the source of the file of a frame, if it can be read."""
    if frame is None or frame.filename.startswith("<"):
        return None
    try:
        found = os.stat(frame.filename)
    except (OSError, ValueError):
        return None
    return _read(frame.filename, found.st_mtime_ns) if stat.S_ISREG(found.st_mode) else None
