"""Blocks of the caching allocators of PyTorch and CuPy, with the lines that allocated them."""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from userstream import _process
from userstream._observe.judge.log import BLOCK

if TYPE_CHECKING:
    from collections.abc import Callable

    from userstream._observe.logger import Logger

    T = TypeVar("T")


class Allocator(Protocol):
    """Interface to a framework's allocator; `begin` has no effect until the framework is loaded."""

    framework: str

    def begin(self) -> None: ...
    def end(self) -> None: ...


class Allocators:
    """The allocators of PyTorch and CuPy. A failure of one is reported and harms no other."""

    def __init__(self, logger: Logger) -> None:
        self._torch = TorchHistory()
        self._cupy: Allocator = CupyHook(logger)  # of the thread that calls `begin`
        self._lock = _process.Lock()  # also taken by the thread of the session
        self._ended = False
        self._races = 0
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

    def blocks(self, races: int) -> dict[str, Any] | None:
        """Return all blocks of PyTorch if there are more races than at the last call.

        Those of CuPy are recorded as they are allocated.
        """
        with self._lock:
            if self._ended or races == self._races:
                return None
            self._races = races
            return self._try(self._torch, self._torch.blocks)

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

    def blocks(self) -> dict[str, Any] | None:
        """Return the blocks of the history, and older blocks that are in use, as a log has them."""
        if self._memory is None:
            return None
        snapshot = self._memory._snapshot()
        ahead = _ahead()
        kept = set()
        rows = _Rows(self.framework)
        for trace in snapshot["device_traces"]:
            for entry in trace:
                if entry["action"] == "alloc":
                    kept.add(entry["addr"])
                    began = int(entry["time_us"]) * 1000 - ahead
                    rows.add(entry["addr"], entry["size"], began, entry)
        for segment in snapshot["segments"]:
            address = segment["address"]
            for block in segment["blocks"]:
                if block["state"] == "active_allocated" and address not in kept:
                    rows.add(address, block["size"], 0, block)
                address += block["size"]
        return rows.as_dict()

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


class _Rows:
    """Blocks, with each frame and each stack once."""

    def __init__(self, framework: str) -> None:
        self._framework = framework
        self._frames: dict[tuple[str, int, str], int] = {}
        self._stacks: dict[tuple[int, ...], int] = {}
        self._rows: list[tuple[int, int, int, str, int]] = []

    def add(self, start: int, size: int, began: int, told: dict[str, Any]) -> None:
        """Add a block, and the stack of its allocation, whose innermost frame comes first."""
        stack = tuple(
            self._frames.setdefault(
                (each["filename"], each["line"], each["name"]), len(self._frames)
            )
            for each in reversed(told.get("frames") or [])
        )
        number = self._stacks.setdefault(stack, len(self._stacks))
        self._rows.append((start, start + size, began, self._framework, number))

    def as_dict(self) -> dict[str, Any]:
        """Return what a log has."""
        return {"frames": [*self._frames], "stacks": [*self._stacks], "blocks": self._rows}


class CupyHook:
    """A memory hook that records the blocks that CuPy's pools give to one thread."""

    framework = "cupy"

    def __init__(self, logger: Logger) -> None:
        self._logger = logger
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
        if self._hook is not None and start:
            self._logger.note(BLOCK, (start, start + size), self.framework.encode())

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
