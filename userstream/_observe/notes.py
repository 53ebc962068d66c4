"""Notes of the log: what Python adds to the driver calls, in the order of the calls of each thread.

What the program declares only to read, its waits for the GPU and which of them are allowed; and
the blocks of the caching allocators of PyTorch and CuPy: the lines that allocate and free them.
"""

from __future__ import annotations

import importlib
import itertools
import math
import struct
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from userstream import _hooks, _process, _targets
from userstream._copies.layout import spread
from userstream._observe.judge import log
from userstream._ordering.borrow import READ

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from userstream._buffers.view import View
    from userstream._observe.recording import Recorder
    from userstream._ordering.borrow import Borrow
    from userstream._stream.stream import Stream

    T = TypeVar("T")

# -- declarations, and waits of the program --------------------------------------------------------

_PER_NOTE = 2000  # ranges in one record


class _Block:
    """Recorded begin of a block. The destructor records the end, unless `end` has."""

    __slots__ = ("_number", "_recorder")

    def __init__(self, recorder: Recorder, number: int) -> None:
        self._recorder = recorder
        self._number = number

    def end(self) -> None:
        if self._number:
            self._recorder.note(log.DECLARED_NO_MORE, (self._number, 0))
            self._number = 0  # last: if a signal handler raises before, `__del__` records the end

    __del__ = end


class Declaring:
    """Listener of `_hooks`, from `begin` to `end`."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._numbers = itertools.count(1)
        # Only with something that is only read does it matter what else may be written.
        self._any_read = False
        self._any_acquired = False
        self._listeners: list[tuple[list[Any], Any]] = [
            (_hooks.borrow_entered, self._entered),
            (_hooks.borrow_left, self._left),
            (_hooks.buffers_acquired, self._acquired),
            (_hooks.buffers_released, self._released),
            (_hooks.user_stream_created, self._created),
            (_hooks.host_waits, self._host_waits),
            (_hooks.stalls_allowed, self._stalls_allowed),
            (_hooks.wait_timed_out, self._timed_out),
        ]

    def begin(self) -> None:
        for hook, listener in self._listeners:
            hook.append(listener)

    def end(self) -> None:
        # Idempotent: after an exception of a signal handler the observation ends again.
        for hook, listener in self._listeners:
            while listener in hook:
                hook.remove(listener)

    def _entered(self, borrow: Borrow, stream: Stream) -> None:
        reads = borrow.mode == READ
        if not (reads or self._any_read):
            return
        self._any_read = True
        number = next(self._numbers)
        borrow.noted = _Block(self._recorder, number)
        self._declare(number, reads, stream, borrow._arguments[0])

    def _left(self, borrow: Borrow) -> None:
        block = getattr(borrow, "noted", None)
        if block is not None:
            block.end()

    def _acquired(self, stream: Stream, buffers: Iterable[Any], reads: bool) -> None:
        if reads or self._any_read:
            self._any_read = self._any_acquired = True
            self._declare(0, reads, stream, buffers)

    def _released(self, stream: Stream, buffers: Iterable[Any]) -> None:
        if self._any_acquired:
            words = (0, int(stream._resolve().handle or 0))
            for part in _ranges(buffers):
                self._recorder.note(log.DECLARED_NO_MORE, words, part)

    def _declare(self, number: int, reads: bool, stream: Stream, buffers: Iterable[Any]) -> None:
        words = (number, int(reads), int(stream.handle))
        for part in _ranges(buffers):
            self._recorder.note(log.DECLARED, words, part)

    def _created(self, stream: Stream) -> None:
        self._recorder.note_json(log.NAMES, {"streams": {int(stream.handle): name_of(stream)}})

    def _host_waits(self, begins: bool) -> None:
        self._recorder.note(log.HOST_WAITS, (int(begins),))

    def _stalls_allowed(self, reason: str | None) -> None:
        told = b"" if reason is None else reason.encode(errors="replace")
        self._recorder.note(log.STALLS_ALLOWED, (int(reason is not None),), told)

    def _timed_out(self) -> None:
        self._recorder.note(log.TIMED_OUT)


def name_of(stream: Stream) -> str:
    """Return the name of a user stream in reports."""
    return f"user stream {stream.name!r}" if stream.name else "the user stream"


def _ranges(buffers: Iterable[Any]) -> list[bytes]:
    """Return the packed address ranges of buffers, cut into parts for one record each."""
    found: list[tuple[int, int]] = []
    try:
        for view in _targets.views_in(buffers):
            found += _ranges_of(view)
    except Exception:  # of a framework that does not say where its buffers are
        return [b""]
    packed = [struct.pack("<2Q", *each) for each in found]
    return [b"".join(packed[at : at + _PER_NOTE]) for at in range(0, len(packed), _PER_NOTE)] or [
        b""
    ]


def _ranges_of(view: View) -> Iterator[tuple[int, int]]:
    if view.parts is not None:
        for part in view.parts:
            yield from _ranges_of(part)
        return
    layout = view.layout
    if not layout.address or layout.is_empty:
        return
    start, end = layout.address, layout.address + (layout.nbytes or 0)
    if layout.shape is not None and layout.strides is not None and layout.nbytes:
        itemsize = layout.nbytes // math.prod(layout.shape)
        span = spread(layout.shape, layout.strides, itemsize)
        start -= span.offset
        end = start + span.nbytes
    yield start, end


# -- blocks of caching allocators ------------------------------------------------------------------


class Allocator(Protocol):
    """Interface to a framework's allocator; `begin` has no effect until the framework is loaded."""

    framework: str
    tells: str  # a clause for `not_seen`, should it fail

    def begin(self) -> None: ...
    def end(self) -> None: ...


class Allocators:
    """The allocators of PyTorch and CuPy. A failure of one is reported and harms no other."""

    def __init__(self, recorder: Recorder) -> None:
        self._torch = TorchHistory()
        self._frees: Allocator = TorchFrees(recorder)
        self._cupy: Allocator = CupyHook(recorder)  # of the thread that calls `begin`
        self._lock = _process.Lock()  # also taken by the thread of the session
        self._ended = False
        self._races = 0
        self._failures: dict[Allocator, str] = {}

    def unseen(self) -> list[str]:
        """Return sentences that say which blocks are not known."""
        return [f"{allocator.tells}: {why}" for allocator, why in self._failures.items()]

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
                self._try(self._frees, self._frees.begin)

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
            self._try(self._frees, self._frees.end)

    def end(self) -> None:
        """Restore both allocators, in the thread that called `begin`."""
        with self._lock:
            self._ended = True
            for each in (self._torch, self._frees, self._cupy):
                self._try(each, each.end)

    def _try(self, allocator: Allocator, do: Callable[[], T]) -> T | None:
        if allocator in self._failures and do != allocator.end:
            return None
        try:
            return do()
        except Exception as error:  # private interfaces of a framework may change
            self._failures.setdefault(allocator, f"{type(error).__name__}: {error}")
            return None


_MOST_ENTRIES = 20_000  # allocations and frees that are kept on each device: each takes a few kB


class TorchHistory:
    """The memory history of PyTorch, switched on from `begin` to `end` unless it is on."""

    framework = "torch"
    tells = "which lines allocate for torch"

    def __init__(self) -> None:
        self._memory: Any = None  # the module, once the history is on
        self._is_ours = False

    def begin(self) -> None:
        """Begin if PyTorch has initialized CUDA: an earlier request would initialize CUDA."""
        torch = None if self._memory is not None else _torch()
        if torch is None:
            return
        cuda = torch.cuda
        self._memory = cuda.memory
        if not torch._C._cuda_isHistoryEnabled():
            self._is_ours = True  # first: a signal handler may raise before the next line
            # Stacks of allocations only: those of frees would be taken in destructors.
            cuda.memory._record_memory_history(
                "all", context="alloc", stacks="python", max_entries=_MOST_ENTRIES
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


def _torch() -> Any:
    """Return PyTorch, if it is loaded and has initialized CUDA."""
    torch: Any = sys.modules.get("torch")
    cuda = None if torch is None else vars(torch).get("cuda")  # PyTorch may be half imported
    is_initialized = getattr(cuda, "is_initialized", None)
    return torch if is_initialized is not None and is_initialized() else None


class _TorchTrace:
    """The trace of PyTorch's allocator, which tells when a block is allocated or freed.

    PyTorch, whose own sanitizer uses it, cannot switch the trace off: after the first observation
    it calls functions that do nothing.
    """

    def __init__(self) -> None:
        self.recorder: Recorder | None = None  # of the observation that is told
        self._torch: Any = None  # whose trace is on
        self._is_over = sys.is_finalizing  # modules may be gone when the last tensors are freed

    def begin(self, torch: Any, recorder: Recorder) -> None:
        """Send the blocks to an observation from now on."""
        if self._torch is not torch:
            trace = importlib.import_module("torch.cuda._gpu_trace")
            trace.register_callback_for_memory_allocation(self._allocated)
            trace.register_callback_for_memory_deallocation(self._freed)
            torch._C._activate_gpu_trace()
            self._torch = torch
        self.recorder = recorder

    def _allocated(self, address: int) -> None:
        recorder = self.recorder  # another thread may end the observation
        if recorder is not None:
            module = self._torch._C
            stream = module._cuda_getCurrentRawStream(module._cuda_getDevice())
            recorder.note(log.BLOCK, (address, address, stream), b"torch")

    def _freed(self, address: int) -> None:
        recorder = self.recorder
        if recorder is not None and not self._is_over():
            recorder.note(log.BLOCK_FREED, (address, address), b"torch")


_torch_trace = _TorchTrace()


class TorchFrees:
    """Sends an observation the blocks that PyTorch allocates and frees."""

    framework = "torch"
    tells = "what torch frees while another stream uses it"

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def begin(self) -> None:
        """Begin if PyTorch has initialized CUDA."""
        torch = None if _torch_trace.recorder is self._recorder else _torch()
        if torch is not None:
            _torch_trace.begin(torch, self._recorder)

    def end(self) -> None:
        """Send the observation no more blocks."""
        if _torch_trace.recorder is self._recorder:
            _torch_trace.recorder = None


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
        """Return the blocks in the form that a log has."""
        return {"frames": [*self._frames], "stacks": [*self._stacks], "blocks": self._rows}


class CupyHook:
    """A memory hook that records the blocks that CuPy's pools give to one thread."""

    framework = "cupy"
    tells = "which lines allocate for cupy, and what it frees while another stream uses it"

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._hook: Any = None
        self._thread = 0
        self._stream: Any = None  # returns the current stream
        self._is_over = sys.is_finalizing  # modules may be gone when the last arrays are freed

    def begin(self) -> None:
        """Enter the hook if CuPy is loaded. A hook serves the thread that enters it."""
        cupy = sys.modules.get("cupy")
        cuda: Any = None if cupy is None else vars(cupy).get("cuda")
        kind = getattr(cuda, "MemoryHook", None)
        if kind is None or self._hook is not None:
            return
        self._thread = threading.get_ident()
        self._stream = cuda.get_current_stream
        self._hook = _hook(kind, self._allocated, self._freed)
        self._hook.__enter__()

    def _allocated(self, start: int, size: int) -> None:
        if self._hook is not None and start:
            words = (start, start + size, self._stream().ptr)
            self._recorder.note(log.BLOCK, words, self.framework.encode())

    def _freed(self, start: int, size: int) -> None:
        if self._hook is not None and not self._is_over():
            self._recorder.note(log.BLOCK_FREED, (start, start + size), self.framework.encode())

    def end(self) -> None:
        """Leave the hook. In another thread the hook stays and does nothing."""
        if self._hook is not None and self._thread == threading.get_ident():
            self._hook.__exit__(None, None, None)
        self._hook = None  # only now: a signal handler may raise in between


def _hook(kind: type, allocated: Any, freed: Any) -> Any:
    """Return an instance of a subclass of CuPy's hook."""

    def malloc_postprocess(_: object, **told: int) -> None:
        allocated(told["mem_ptr"], told["mem_size"])

    def free_preprocess(_: object, **told: int) -> None:
        freed(told["mem_ptr"], told["mem_size"])

    members = {"malloc_postprocess": malloc_postprocess, "free_preprocess": free_preprocess}
    # A unique name: CuPy refuses a second hook of the same name in a thread.
    made = type("Hook", (kind,), members)()
    made.name = f"userstream.observe {id(made):#x}"
    return made
