"""Kernel launches: the memory that parameters point to, and whether kernels write there."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from .log import text_of
from .memory import (
    ASSUMED,
    LEARNED,
    PAIR,
    READS,
    TOGETHER,
    TYPED,
    WRITES,
    Guesses,
    Learned,
)
from .world import Work

if TYPE_CHECKING:
    from .functions import Call
    from .memory import Span
    from .world import World


# In the names of kernels that take lists of tensors: those of the optimizers and of `cat` of
# PyTorch (TensorListMetadata, CatArrInputTensorMetadata ...), and of Apex and others after them.
_TABLE = "Metadata"

_WORD = struct.Struct("<Q")


class _Kernel:
    """A kernel, with the learned accesses of its parameters."""

    __slots__ = ("constant", "has_table", "learned", "name")

    def __init__(self, name: str | None = None, constant: frozenset[int] = frozenset()) -> None:
        self.name = name
        self.constant = constant  # offsets of the parameters that are pointers to const
        # Whether a parameter is a table of pointers that is filled in part: the rest is what was on
        # the stack of the host, which may be the address of anything.
        self.has_table = name is not None and _TABLE in name
        self.learned: Learned = dict.fromkeys(constant, READS)


class Launches:
    """Applies calls that launch kernels."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._kernels: dict[int, _Kernel] = {}
        self._unloaded: dict[int, _Kernel] = {}  # unless they are launched again

    def _kernel(self, handle: int) -> _Kernel:
        found = self._kernels.get(handle)
        if found is None:
            unloaded = self._unloaded
            found = unloaded.pop(handle) if handle in unloaded else _Kernel()
            self._kernels[handle] = found
        return found

    def unload(self, _: Call) -> None:
        """Forget the kernels that were not launched since the unload before this one.

        Which kernels a module has is not known. The recorder, too, asks for all of them again.
        """
        self._unloaded, self._kernels = self._kernels, {}

    def seen_kernel(self, call: Call) -> None:
        (handle,) = call.words
        symbol, demangled, offsets, _ = call.fetched
        name = readable(text_of(demangled or symbol))
        # It is seen for the first time, or the handle is another one's by now.
        if self._kernel(handle).name != name:
            constant = _constant(parameter_types(text_of(demangled)), offsets)
            self._kernels[handle] = _Kernel(name, constant)
            self.world.forget_works()

    def learned(self, call: Call) -> None:
        handle, offset, wrote, final, *more = call.words
        # Whether all of the memory that the parameter points to was compared.
        whole = not more or bool(more[0])
        kernel = self._kernel(handle)
        learned = kernel.learned
        before = learned.get(offset)
        if wrote == 1:
            learned[offset] = WRITES
        elif wrote and before != WRITES and offset not in kernel.constant:
            learned[offset] = TOGETHER
        elif final and not wrote and whole:
            # Else it may write further behind the pointer, and stays assumed to write.
            learned[offset] = READS
        if learned.get(offset) != before:
            self.world.forget_works()

    def described(
        self, handle: int, pointers: bytes
    ) -> tuple[str | None, tuple[Span, ...], Guesses | None]:
        """Return the name of a kernel, and its accesses with some parameters."""
        kernel = self._kernel(handle)
        touches, guesses = _touched(kernel, pointers)
        return kernel.name, touches, guesses

    def launch(self, call: Call) -> Work:
        kernel = self._kernel(call.words[call.function.roles["kernel"]])
        if call.function.stream is None:
            (handle,) = _WORD.unpack_from(call.fetched[1], 32)
            lane = self.world.clocks.lane(handle, call.context, call.thread)
        else:
            lane = self.world.lane(call)
        touches, guesses = _touched(kernel, call.fetched[0])
        work = Work(
            lane,
            kernel.name or call.name,
            touches,
            places=[None] * len(touches),
            guesses=guesses,
            is_kernel=True,
            loose=kernel.has_table,
        )
        self.world.perform(call, work)
        return work


def _constant(types: list[str], offsets: bytes) -> frozenset[int]:
    """Return the offsets of the parameters that are pointers to const."""
    found = [offset for (offset,) in struct.iter_unpack("<I", offsets)]
    if len(types) != len(found):
        return frozenset()
    return frozenset(
        offset for offset, kind in zip(found, types, strict=True) if kind.endswith("const*")
    )


def _touched(kernel: _Kernel, pointers: bytes) -> tuple[tuple[Span, ...], Guesses | None]:
    guesses = Guesses(kernel.learned, pointers)
    touches = []
    for address in dict.fromkeys(address for _, address in PAIR.iter_unpack(pointers)):
        guess = guesses.at(address)
        writes = guess.writes
        how = ASSUMED if writes is None else LEARNED
        if guess.only_reads(kernel.constant):
            how = TYPED
        touches.append((address, address + 1, writes is not False, how))
    is_guessed = not kernel.has_table and any(how == ASSUMED for *_, how in touches)
    return tuple(touches), guesses if is_guessed else None


def readable(text: str) -> str:
    """Return the demangled name of a C++ function without its parameters, or the given name.

    Its template arguments stay, which tell kernels of one name apart; its parameters do not.
    """
    text = text.removeprefix("void ").replace("(anonymous namespace)::", "")
    depth = 0
    for at, letter in enumerate(text):
        if letter in "<>":
            depth += 1 if letter == "<" else -1
        elif letter == "(" and not depth:
            return text[:at]
    return text


def parameter_types(text: str) -> list[str]:
    """Return the types of the parameters of a C++ function, by its demangled name.

    They are unknown, and none are returned, for a kernel with `extern "C"`.
    """
    if not text.endswith(")"):
        return []
    types, depth, end = [], 0, len(text) - 1
    for at in range(len(text) - 1, -1, -1):
        letter = text[at]
        if letter in ")>]}":
            depth += 1
        elif letter in "(<[{":
            depth -= 1
        if (depth == 1 and letter == ",") or depth == 0:
            types.append(text[at + 1 : end].strip())
            end = at
        if not depth:
            break
    return [] if types == [""] else types[::-1]
