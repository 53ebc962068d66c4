"""The log of an observation: what it consists of, and how it is written and read.

A log is a magic number and blocks. All numbers are little-endian. A block is its type and the
number of its bytes (two ``uint32``), its bytes, and zeros up to a multiple of 8. A definition comes
before the first record that refers to it. A reader skips blocks of unknown types, and a log that
was cut off ends with its last whole block.

========== =========================================================================================
Block      Contents
========== =========================================================================================
HEADER     JSON: version of the format and of userstream, process, command, platform, times, and the
           watched functions: number, name, and what their arguments mean
CODES      JSON: a list of number, file, name, first line, table of lines (Base64), and whose it is
STACKS     for each: number, count of frames (``uint32``), then code and offset of each, innermost
           first
FACTS      JSON: names of streams by handle, devices of contexts, primary contexts of green ones,
           names of threads; only what is new
THREADS    JSON: the threads that are alive
RECORDS    the records of calls, see `read_records`
BLOCKS     JSON: blocks of caching allocators: begin, end, time, framework, frames
UNSEEN     JSON: what was not recorded, with how often, until now
END        JSON: seconds, and why the recording ended
========== =========================================================================================
"""

from __future__ import annotations

import base64
import json
import struct
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

from .functions import Fetch, Function

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import BinaryIO

MAGIC = b"uslog\r\n\x00"
MAJOR, MINOR = 1, 0  # a reader refuses another major version; minor ones add types of blocks

HEADER, CODES, STACKS, FACTS, THREADS, RECORDS, BLOCKS, UNSEEN, END = range(1, 10)

_BLOCK = struct.Struct("<II")
_PAIR = struct.Struct("<II")

# Whose code a frame runs.
PROGRAM, LIBRARY, OWN = range(3)


class LogError(Exception):
    """A file is not a log, or a log of a version that this judge cannot read."""


class Code(NamedTuple):
    """A code object, as stacks refer to it."""

    number: int
    file: str
    name: str
    first_line: int
    lines: bytes  # the table of locations
    whose: int


class Block(NamedTuple):
    """A block of a log."""

    type: int
    data: bytes

    def json(self) -> Any:
        """Return the contents of a block that is JSON."""
        return json.loads(self.data)


def block(type_: int, contents: Any) -> Block:
    """Return a block with JSON in it."""
    return Block(type_, json.dumps(contents, separators=(",", ":")).encode())


def functions_block(functions: dict[int, tuple[str, Function]]) -> list[Any]:
    """Return the watched functions as JSON data for the header."""
    return [[number, name, asdict(function)] for number, (name, function) in functions.items()]


def read_functions(found: list[Any]) -> dict[int, tuple[str, Function]]:
    """Return the watched functions of a header, by number."""
    functions = {}
    for number, name, fields in found:
        fields["fetches"] = tuple(Fetch(**each) for each in fields["fetches"])
        fields["operands"] = tuple(
            tuple(each) if isinstance(each, list) else each for each in fields["operands"]
        )
        functions[number] = (name, Function(**fields))
    return functions


def codes_block(codes: Iterable[Code]) -> Block:
    """Return a block of definitions of code objects."""
    return block(
        CODES,
        [(*each[:4], base64.b64encode(each.lines).decode(), each.whose) for each in codes],
    )


def read_codes(found: Block) -> Iterator[Code]:
    """Return the definitions in a block of code objects."""
    for number, file, name, first_line, lines, whose in found.json():
        yield Code(number, file, name, first_line, base64.b64decode(lines), whose)


def stacks_block(stacks: Iterable[tuple[int, list[tuple[int, int]]]]) -> Block:
    """Return a block of definitions of stacks: numbers, with codes and offsets."""
    parts = []
    for number, frames in stacks:
        parts.append(_PAIR.pack(number, len(frames)))
        parts += [_PAIR.pack(*frame) for frame in frames]
    return Block(STACKS, b"".join(parts))


def read_stacks(found: Block) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Return the definitions in a block of stacks."""
    pairs = list(_PAIR.iter_unpack(found.data))
    at = 0
    while at < len(pairs):
        number, count = pairs[at]
        yield number, pairs[at + 1 : at + 1 + count]
        at += 1 + count


class Writer:
    """Writes blocks to a file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        file.write(MAGIC)

    def write(self, found: Block) -> None:
        """Write one block; a reader finds it at once."""
        size = len(found.data)
        padding = bytes(-size % 8)
        self._file.write(b"".join((_BLOCK.pack(found.type, size), found.data, padding)))
        self._file.flush()


def read_blocks(file: BinaryIO) -> Iterator[Block]:
    """Return the blocks of a log, up to the last whole one.

    Raises
    ------
    LogError
        The file is no log, or of a version that is not known.
    """
    if file.read(len(MAGIC)) != MAGIC:
        raise LogError("this is no log of `python -m userstream observe --log`")
    is_first = True
    while len(head := file.read(_BLOCK.size)) == _BLOCK.size:
        type_, size = _BLOCK.unpack(head)
        data = file.read(size + -size % 8)
        if len(data) < size:
            return
        found = Block(type_, data[:size])
        if is_first:
            _check_version(found)
            is_first = False
        yield found


def _check_version(first: Block) -> None:
    try:
        major, minor = first.json()["format"]
    except (ValueError, KeyError, TypeError):
        raise LogError("this log has no header") from None
    if major != MAJOR:
        raise LogError(
            f"this log has version {major}.{minor} of the format, and this judge reads version "
            f"{MAJOR}: judge it with the userstream that recorded it, or a later one"
        )
