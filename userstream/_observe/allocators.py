"""The caching allocators that are asked which line allocated what, if the user wants to know."""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections import deque
from dataclasses import replace
from traceback import FrameSummary
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from userstream import _process
from userstream._observe.stacks import is_own, line_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from userstream._observe.found import Race, Stack
    from userstream._observe.logger import Logger
    from userstream._observe.stacks import Stacks

    T = TypeVar("T")


class Block(NamedTuple):
    """The memory of a tensor or an array, as long as nothing else is given the same bytes."""

    start: int
    end: int
    time: int  # on the clock of the logger; 0 for what was there before all others
    stack: Callable[[], Stack]  # of who asked for it
    framework: str


class Blocks:
    """All that are known, of any time."""

    def __init__(self, blocks: Iterable[Block] = ()) -> None:
        self._newest_first = sorted(blocks, key=lambda block: -block.time)

    def at(self, address: int, time: int) -> Block | None:
        """Return the block that an address was in at some time; 0 is the end of all time."""
        for block in self._newest_first:
            if block.start <= address < block.end and (not time or block.time <= time):
                return block
        return None

    def name(self, race: Race) -> Race:
        """Return a race with the block that it is about, if that is known.

        Whether it is one is settled: the stream that a block was allocated on may be given it again
        before others have done with it, and may not touch it then.
        """
        first, second = (self.at(race.address, time) for time in race._times)
        block = first or second
        if block is None:
            return race
        stack = () if first is None else first.stack()
        named = replace(race, allocated=stack, framework=block.framework)
        if second is None or first is second:
            return named
        line = line_of(second.stack())
        where = "" if line is None else f" at {line.filename}:{line.lineno}"
        return replace(
            named,
            advice=f"it was freed in between, and allocated again{where}: keep it until "
            f"{race.first.stream} has done with it (torch: tensor.record_stream), or let "
            f"{race.second.stream} wait for {race.first.stream}",
        )


class Allocator(Protocol):
    """One of them. It is told to begin until it does, once its framework is there."""

    framework: str

    def begin(self) -> None: ...
    def blocks(self) -> list[Block]: ...
    def end(self) -> None: ...


class Allocators:
    """Those of PyTorch and CuPy. A failure in one of them is reported, and harms nothing else."""

    def __init__(self, logger: Logger, stacks: Stacks) -> None:
        self._torch: Allocator = TorchHistory()
        self._cupy: Allocator = CupyHook(logger, stacks)  # in the thread that begins
        self._lock = _process.Lock()  # the thread that reads the log looks for them as well
        self._ended = False
        self._races = 0
        self._blocks = Blocks()
        self.failures: dict[str, str] = {}  # by framework

    def begin(self) -> None:
        """Begin with those that are there."""
        with self._lock:
            self._try(self._cupy, self._cupy.begin)
        self.look()

    def look(self) -> None:
        """Begin with what has come since."""
        with self._lock:
            if not self._ended:
                self._try(self._torch, self._torch.begin)

    def blocks(self, races: int) -> Blocks:
        """Return all blocks. They are asked for if there are more races than the last time."""
        with self._lock:
            if not self._ended and races != self._races:
                found: list[Block] = []
                for each in (self._torch, self._cupy):
                    found += self._try(each, each.blocks) or ()
                self._blocks = Blocks(found)
                self._races = races
            return self._blocks

    def finish(self) -> None:
        """Switch off what any thread can; the blocks that were read are kept."""
        with self._lock:
            self._ended = True
            self._try(self._torch, self._torch.end)

    def end(self) -> None:
        """Leave them as they were; in the thread that called `begin`."""
        with self._lock:
            self._ended = True
            for each in (self._torch, self._cupy):
                self._try(each, each.end)

    def _try(self, allocator: Allocator, do: Callable[[], T]) -> T | None:
        if allocator.framework in self.failures and do != allocator.end:
            return None
        try:
            return do()
        except Exception as error:  # of what is private in a framework, and may change
            self.failures.setdefault(allocator.framework, f"{type(error).__name__}: {error}")
            return None


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


_MOST_OF_CUPY = 20_000  # allocations that are kept


class CupyHook:
    """Takes note of what CuPy's memory pools give to this thread, from `begin` to `end`."""

    framework = "cupy"

    def __init__(self, logger: Logger, stacks: Stacks) -> None:
        self._logger = logger
        self._stacks = stacks
        self._blocks: deque[Block] = deque(maxlen=_MOST_OF_CUPY)
        self._hook: Any = None
        self._thread = 0

    def begin(self) -> None:
        """Begin, if CuPy is there: its hooks are of the thread that enters them."""
        cupy = sys.modules.get("cupy")
        cuda = None if cupy is None else vars(cupy).get("cuda")
        kind = getattr(cuda, "MemoryHook", None)
        if kind is None or self._hook is not None:
            return
        self._thread = threading.get_ident()
        self._hook = _hook(kind, self._allocated)
        self._hook.__enter__()

    def _allocated(self, start: int, size: int) -> None:
        if self._hook is None or not start:
            return
        stack = functools.partial(self._stack, self._logger.own_stack())
        block = Block(start, start + size, time.monotonic_ns(), stack, self.framework)
        self._blocks.append(block)

    def _stack(self, index: int) -> Stack:
        stack = self._stacks[index]
        while stack and is_own(stack[-1].filename):
            stack = stack[:-1]
        return stack

    def blocks(self) -> list[Block]:
        """Return what was noted."""
        return list(self._blocks.copy())  # a thread adds to it

    def end(self) -> None:
        """Take note no longer. In another thread the hook stays, and does nothing."""
        if self._hook is not None and self._thread == threading.get_ident():
            self._hook.__exit__(None, None, None)
        self._hook = None  # only now: a signal handler may raise in between


def _hook(kind: type, allocated: Any) -> Any:
    """Return a hook of CuPy's type, which is there only if CuPy is."""

    def malloc_postprocess(_: object, **told: int) -> None:
        allocated(told["mem_ptr"], told["mem_size"])

    members = {"malloc_postprocess": malloc_postprocess}
    # Each has a name of its own: one of the same name may have stayed with this thread.
    made = type("Hook", (kind,), members)()
    made.name = f"userstream.observe {id(made):#x}"
    return made
