"""Blocks of the caching allocators of PyTorch and CuPy, with the lines that allocated them."""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from userstream import _process
from userstream._observe.judge.blocks import Block, Blocks
from userstream._observe.judge.log import OWN
from userstream._observe.judge.stacks import Frame
from userstream._observe.recording import stack_of, whose

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from userstream._observe.judge.stacks import Stack
    from userstream._observe.logger import Logger

    T = TypeVar("T")


class Allocator(Protocol):
    """Interface to a framework's allocator; `begin` has no effect until the framework is loaded."""

    framework: str

    def begin(self) -> None: ...
    def blocks(self) -> list[Block]: ...
    def end(self) -> None: ...


class Allocators:
    """The allocators of PyTorch and CuPy. A failure of one is reported and harms no other."""

    def __init__(self, logger: Logger) -> None:
        self._torch: Allocator = TorchHistory()
        self._cupy: Allocator = CupyHook(logger)  # of the thread that calls `begin`
        self._lock = _process.Lock()  # also taken by the thread of the session
        self._ended = False
        self._races = 0
        self._blocks = Blocks()
        self.failures: dict[str, str] = {}  # by framework

    def unseen(self) -> list[str]:
        """Return sentences that say which blocks are not known."""
        return [
            f"which lines allocate for {framework}: {why}"
            for framework, why in self.failures.items()
        ]

    def begin(self) -> None:
        """Begin with the frameworks that are loaded."""
        with self._lock:
            self._try(self._cupy, self._cupy.begin)
        self.look()

    def look(self) -> None:
        """Begin with PyTorch if it was loaded since."""
        with self._lock:
            if not self._ended:
                self._try(self._torch, self._torch.begin)

    def blocks(self, races: int) -> Blocks:
        """Return all blocks, read anew if there are more races than at the last call."""
        with self._lock:
            if not self._ended and races != self._races:
                found: list[Block] = []
                for each in (self._torch, self._cupy):
                    found += self._try(each, each.blocks) or ()
                self._blocks = Blocks(found)
                self._races = races
            return self._blocks

    def finish(self) -> None:
        """End the history of PyTorch, which any thread can. The blocks stay readable."""
        with self._lock:
            self._ended = True
            self._try(self._torch, self._torch.end)

    def end(self) -> None:
        """Restore both allocators, in the thread that called `begin`."""
        with self._lock:
            self._ended = True
            for each in (self._torch, self._cupy):
                self._try(each, each.end)

    def _try(self, allocator: Allocator, do: Callable[[], T]) -> T | None:
        if allocator.framework in self.failures and do != allocator.end:
            return None
        try:
            return do()
        except Exception as error:  # private interfaces of a framework may change
            self.failures.setdefault(allocator.framework, f"{type(error).__name__}: {error}")
            return None


_MOST = 20_000  # allocations and frees that are kept on each device: each takes a few kB


class TorchHistory:
    """The memory history of PyTorch, switched on from `begin` to `end` unless it is on."""

    framework = "torch"

    def __init__(self) -> None:
        self._memory: Any = None  # the module, once the history is on
        self._is_ours = False

    def begin(self) -> None:
        """Begin if PyTorch has initialized CUDA: an earlier request would initialize CUDA."""
        torch: Any = sys.modules.get("torch")
        if self._memory is not None or torch is None:
            return
        cuda = vars(torch).get("cuda")  # PyTorch may be half imported
        is_initialized = getattr(cuda, "is_initialized", None)
        if cuda is None or is_initialized is None or not is_initialized():
            return
        self._memory = cuda.memory
        if not torch._C._cuda_isHistoryEnabled():
            self._is_ours = True  # first: a signal handler may raise before the next line
            # Stacks of allocations only: those of frees would be taken in destructors.
            cuda.memory._record_memory_history(
                "all", context="alloc", stacks="python", max_entries=_MOST
            )

    def blocks(self) -> list[Block]:
        """Return the blocks of the history, and older blocks that are in use."""
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
        """Switch the history off, unless it was on before."""
        if self._is_ours:
            self._memory._record_memory_history(None)
            self._is_ours = False  # only now: a signal handler may raise in between
        self._memory = None


def _ahead() -> int:
    """Return the offset of the clock of PyTorch's history to the log's, in nanoseconds."""

    def look() -> tuple[int, int]:
        before, there, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        return after - before, there - (before + after) // 2

    # The thread may be preempted between two clocks: take the closest pair.
    return min(look() for _ in range(8))[1]


def _stack(frames: list[dict[str, Any]]) -> Stack:
    return tuple(
        Frame(each["filename"], each["line"], each["name"], whose(each["filename"]))
        for each in reversed(frames)
    )


_MOST_OF_CUPY = 20_000  # allocations that are kept


class CupyHook:
    """A memory hook that records the blocks that CuPy's pools give to one thread."""

    framework = "cupy"

    def __init__(self, logger: Logger) -> None:
        self._logger = logger
        self._blocks: deque[Block] = deque(maxlen=_MOST_OF_CUPY)
        self._hook: Any = None
        self._thread = 0

    def begin(self) -> None:
        """Enter the hook if CuPy is loaded. A hook serves the thread that enters it."""
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
        stack = stack_of(self._logger, index)
        while stack and getattr(stack[-1], "whose", None) == OWN:
            stack = stack[:-1]
        return stack

    def blocks(self) -> list[Block]:
        """Return the recorded blocks."""
        return list(self._blocks.copy())  # a thread adds to it

    def end(self) -> None:
        """Leave the hook. In another thread the hook stays and does nothing."""
        if self._hook is not None and self._thread == threading.get_ident():
            self._hook.__exit__(None, None, None)
        self._hook = None  # only now: a signal handler may raise in between


def _hook(kind: type, allocated: Any) -> Any:
    """Return an instance of a subclass of CuPy's hook."""

    def malloc_postprocess(_: object, **told: int) -> None:
        allocated(told["mem_ptr"], told["mem_size"])

    members = {"malloc_postprocess": malloc_postprocess}
    # A unique name: CuPy refuses a second hook of the same name in a thread.
    made = type("Hook", (kind,), members)()
    made.name = f"userstream.observe {id(made):#x}"
    return made
