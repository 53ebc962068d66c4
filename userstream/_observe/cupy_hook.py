"""A hook of CuPy's memory pools, which are asked by the thread that begins the observation."""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from userstream._observe.blocks import Block
from userstream._observe.stacks import is_own

if TYPE_CHECKING:
    from userstream._observe.found import Stack
    from userstream._observe.logger import Logger
    from userstream._observe.stacks import Stacks

_MOST = 20_000  # allocations that are kept


class CupyHook:
    """Takes note of what CuPy's memory pools give to this thread, from `begin` to `end`."""

    framework = "cupy"

    def __init__(self, logger: Logger, stacks: Stacks) -> None:
        self._logger = logger
        self._stacks = stacks
        self._blocks: deque[Block] = deque(maxlen=_MOST)
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
