"""The history that PyTorch's caching allocator keeps of itself."""

from __future__ import annotations

import functools
import sys
import time
from traceback import FrameSummary
from typing import TYPE_CHECKING, Any

from userstream._observe.blocks import Block

if TYPE_CHECKING:
    from collections.abc import Iterator

    from userstream._observe.found import Stack

_MOST = 20_000  # allocations and frees that are kept on each device: each takes a few kB


class TorchHistory:
    """Lets PyTorch keep it from `begin` to `end`, unless it does so anyway."""

    framework = "torch"

    def __init__(self) -> None:
        self._memory: Any = None  # the module, since it keeps it
        self._is_ours = False

    def begin(self) -> None:
        """Begin, if PyTorch is there and has used CUDA: to ask it earlier would initialize CUDA."""
        torch: Any = sys.modules.get("torch")
        if self._memory is not None or torch is None:
            return
        cuda = vars(torch).get("cuda")  # it may be in the middle of its import
        is_initialized = getattr(cuda, "is_initialized", None)
        if cuda is None or is_initialized is None or not is_initialized():
            return
        self._memory = cuda.memory
        if not torch._C._cuda_isHistoryEnabled():
            self._is_ours = True  # before it is: a signal handler may raise in between
            # With the stacks of who allocates: those of who frees would be taken in destructors.
            cuda.memory._record_memory_history(
                "all", context="alloc", stacks="python", max_entries=_MOST
            )

    def blocks(self) -> list[Block]:
        """Return what it has kept, and what is in use and older than that."""
        return [] if self._memory is None else list(self._read())

    def _read(self) -> Iterator[Block]:
        snapshot = self._memory._snapshot()
        ahead = _ahead()
        kept = set()
        for trace in snapshot["device_traces"]:
            for entry in trace:
                if entry["action"] == "alloc":
                    kept.add(entry["addr"])
                    began = int(entry["time_us"]) * 1000 - ahead
                    yield self._block(entry["addr"], entry["size"], began, entry)
        for segment in snapshot["segments"]:
            address = segment["address"]
            for block in segment["blocks"]:
                if block["state"] == "active_allocated" and address not in kept:
                    yield self._block(address, block["size"], 0, block)
                address += block["size"]

    def _block(self, start: int, size: int, began: int, told: dict[str, Any]) -> Block:
        frames = told.get("frames") or []
        return Block(start, start + size, began, functools.partial(_stack, frames), self.framework)

    def end(self) -> None:
        """Keep it no longer, unless it was kept before."""
        if self._is_ours:
            self._memory._record_memory_history(None)
            self._is_ours = False  # only now: a signal handler may raise in between
        self._memory = None


def _ahead() -> int:
    """Return how far the clock of PyTorch's entries is ahead of the logger's, in nanoseconds."""

    def look() -> tuple[int, int]:
        before, there, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        return after - before, there - (before + after) // 2

    # The thread may lose its processor in the middle of a look.
    return min(look() for _ in range(8))[1]


def _stack(frames: list[dict[str, Any]]) -> Stack:
    return tuple(
        FrameSummary(each["filename"], each["line"], each["name"], lookup_line=False)
        for each in reversed(frames)
    )
