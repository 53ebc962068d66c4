"""The caching allocators that are asked which line allocated what, if the user wants to know."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

from userstream import _process
from userstream._observe.blocks import Block, Blocks
from userstream._observe.cupy_hook import CupyHook
from userstream._observe.torch_history import TorchHistory

if TYPE_CHECKING:
    from collections.abc import Callable

    from userstream._observe.logger import Logger
    from userstream._observe.stacks import Stacks

    T = TypeVar("T")


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
