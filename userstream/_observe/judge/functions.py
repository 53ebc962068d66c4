"""The recorded driver functions with their arguments, and the records of their calls.

A row says what a call means (the name of a method of `Engine`) and which word of its arguments is
what. Both makers of records, the simulated driver and CUPTI, give all arguments in the order of C.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


ENTER = 1  # recorded at its begin: what the call frees may be reused before its end
LEAVE = 2

MEMORY = 1  # tables that a call makes the recorder clear
KERNELS = 2
ALL = MEMORY | KERNELS


@dataclass(frozen=True)
class Fetch:
    """Bytes to copy from where a word points: a size, or a size times another word."""

    word: int
    size: int
    count: int | None = None


@dataclass(frozen=True)
class Function:
    """The meaning of the arguments of one driver function; numbers are indices of words."""

    means: str
    words: int
    stream: int | None = None
    operands: tuple[int | tuple[int, int], ...] = ()  # destination, source; (word, offset) within
    size: int | None = None
    frees: int | None = None
    allocates: int | None = None
    fetches: tuple[Fetch, ...] = ()
    sites: int = LEAVE
    waits: bool = False  # the host may wait in the call: a stall
    orders_host: bool = False  # success tells the host that work has completed
    ends_stream: bool = False
    forgets: int = 0  # bits: MEMORY, KERNELS
    roles: dict[str, int] = field(default_factory=dict)  # further words by name


def _copies() -> dict[str, Function]:
    found = {}
    for name in ("cuMemcpyAsync", "cuMemcpyDtoDAsync_v2", "cuMemcpyHtoDAsync_v2"):
        found[name] = Function("copy", 4, stream=3, operands=(0, 1), size=2)
    found["cuMemcpyDtoHAsync_v2"] = found["cuMemcpyAsync"]
    for name in ("cuMemcpy", "cuMemcpyHtoD_v2", "cuMemcpyDtoH_v2"):
        found[name] = Function("copy_now", 3, operands=(0, 1), size=2, waits=True, orders_host=True)
    # "For transfers from device to device memory, no host-side synchronization is performed."
    found["cuMemcpyDtoD_v2"] = Function("copy_now", 3, operands=(0, 1), size=2, waits=True)
    found["cuMemcpyWithAttributesAsync"] = Function("copy", 5, stream=4, operands=(0, 1), size=2)
    found["cuMemcpyPeerAsync"] = Function("copy", 6, stream=5, operands=(0, 2), size=4)
    found["cuMemcpyPeer"] = Function(
        "copy_now", 5, operands=(0, 2), size=4, waits=True, orders_host=True
    )
    arrays = (Fetch(0, 8, count=3), Fetch(1, 8, count=3), Fetch(2, 8, count=3))
    found["cuMemcpyBatchAsync"] = Function("copy_batch", 8, stream=7, fetches=arrays)
    # Offsets of the memory types of both sides in CUDA_MEMCPY2D and CUDA_MEMCPY3D.
    for dimensions, size, destination, source in ((2, 128, 72, 16), (3, 200, 120, 32)):
        shape = Fetch(0, size)
        within = ((0, destination), (0, source))
        found[f"cuMemcpy{dimensions}DAsync_v2"] = Function(
            f"copy_{dimensions}d", 2, stream=1, operands=within, fetches=(shape,)
        )
        found[f"cuMemcpy{dimensions}D_v2"] = Function(
            f"copy_{dimensions}d",
            1,
            operands=within,
            fetches=(shape,),
            waits=True,
            orders_host=True,
        )
    found["cuMemcpy2DUnaligned_v2"] = found["cuMemcpy2D_v2"]
    found["cuMemcpy3DPeerAsync"] = found["cuMemcpy3DAsync_v2"]
    return found


def _fills() -> dict[str, Function]:
    found = {}
    for bits in (8, 16, 32):
        width = {"width": bits // 8}
        found[f"cuMemsetD{bits}Async"] = Function(
            "fill", 4, stream=3, operands=(0,), size=2, roles=width
        )
        found[f"cuMemsetD{bits}_v2"] = Function("fill", 3, operands=(0,), size=2, roles=width)
        shaped = {**width, "pitch": 1, "height": 4}
        found[f"cuMemsetD2D{bits}Async"] = Function(
            "fill", 6, stream=5, operands=(0,), size=3, roles=shaped
        )
        found[f"cuMemsetD2D{bits}_v2"] = Function("fill", 5, operands=(0,), size=3, roles=shaped)
    return found


def _memory() -> dict[str, Function]:
    both = ENTER | LEAVE
    new = (Fetch(0, 8),)
    found = {
        name: Function(
            "allocate", words, allocates=0, size=1, fetches=new, waits=True, roles={"kind": kind}
        )
        for name, words, kind in (
            ("cuMemAlloc_v2", 2, 2),
            ("cuMemAllocManaged", 3, 3),
            ("cuMemAllocHost_v2", 2, 1),
            ("cuMemHostAlloc", 3, 1),
        )
    }
    found["cuMemHostRegister_v2"] = Function("register", 3, size=1, waits=True)
    found["cuMemAllocAsync"] = Function(
        "allocate_async", 3, stream=2, allocates=0, size=1, fetches=new
    )
    found["cuMemAllocFromPoolAsync"] = Function(
        "allocate_async", 4, stream=3, allocates=0, size=1, fetches=new, roles={"pool": 2}
    )
    for name in ("cuMemFree_v2", "cuMemFreeHost", "cuMemHostUnregister"):
        found[name] = Function("free", 1, frees=0, sites=both, waits=True, orders_host=True)
    found["cuMemUnmap"] = Function("unmap", 2, frees=0, size=1, sites=ENTER)
    found["cuIpcCloseMemHandle"] = Function("unmap", 1, frees=0, sites=ENTER)
    found["cuMemPoolDestroy"] = Function("drop_pool", 1, sites=ENTER, forgets=MEMORY)
    found["cuMemFreeAsync"] = Function("free_async", 2, stream=1, frees=0, sites=both)
    return found


def _order() -> dict[str, Function]:
    found = {
        "cuEventRecord": Function("record", 2, stream=1),
        "cuEventRecordWithFlags": Function("record", 3, stream=1, roles={"flags": 2}),
        "cuStreamWaitEvent": Function("wait_event", 3, stream=0),
        "cuCtxRecordEvent": Function("record_context", 2),
        "cuCtxWaitEvent": Function("wait_context", 2),
        "cuEventQuery": Function("know_event", 1, orders_host=True),
        "cuEventSynchronize": Function("know_event", 1, orders_host=True, waits=True),
        "cuEventElapsedTime": Function("know_events", 3, orders_host=True),
        "cuEventDestroy_v2": Function("drop_event", 1, sites=ENTER),
        "cuStreamQuery": Function("know_stream", 1, stream=0, orders_host=True),
        "cuStreamSynchronize": Function("know_stream", 1, stream=0, orders_host=True, waits=True),
        "cuCtxSynchronize": Function("know_context", 0, orders_host=True, waits=True),
        "cuCtxSynchronize_v2": Function("know_context", 1, orders_host=True, waits=True),
        "cuStreamDestroy_v2": Function("drop_stream", 1, stream=0, sites=ENTER, ends_stream=True),
        "cuStreamBatchMemOp_v2": Function("values", 4, stream=0, fetches=(Fetch(2, 48, count=1),)),
        "cuLaunchHostFunc": Function("host_function", 3, stream=0),
        "cuLaunchHostFunc_v2": Function("host_function", 4, stream=0),
        "cuStreamAddCallback": Function("host_function", 4, stream=0),
    }
    found["cuEventElapsedTime_v2"] = found["cuEventElapsedTime"]
    for bits in (32, 64):
        found[f"cuStreamWaitValue{bits}_v2"] = Function("wait_value", 4, stream=0)
        found[f"cuStreamWriteValue{bits}_v2"] = Function(
            "write_value", 4, stream=0, roles={"written": 1, "bytes": bits // 8}
        )
    return found


def _graphs() -> dict[str, Function]:
    made = (Fetch(0, 8),)
    unseen = Function("unseen_node", 2)
    return {
        "cuStreamBeginCapture_v2": Function("begin_capture", 2, stream=0),
        "cuStreamBeginCaptureToGraph": Function("begin_capture", 6, stream=0),
        "cuStreamEndCapture": Function("end_capture", 2, stream=0, fetches=(Fetch(1, 8),)),
        "cuGraphInstantiateWithFlags": Function("instantiate", 3, fetches=made),
        "cuGraphInstantiateWithParams": Function("instantiate", 3, fetches=made),
        "cuGraphInstantiate_v2": Function("instantiate", 5, fetches=made),
        "cuGraphExecUpdate_v2": Function("update_graph", 3),
        "cuGraphClone": Function("clone_graph", 2, fetches=made),
        "cuGraphLaunch": Function("launch_graph", 2, stream=1),
        "cuGraphDestroy": Function("drop_graph", 1, sites=ENTER),
        "cuGraphExecDestroy": Function("drop_graph", 1, sites=ENTER),
        **dict.fromkeys(
            (
                "cuGraphAddKernelNode_v2",
                "cuGraphAddMemcpyNode",
                "cuGraphAddMemsetNode",
                "cuGraphAddChildGraphNode",
                "cuGraphAddNode_v2",
            ),
            unseen,
        ),
    }


def _kernels() -> dict[str, Function]:
    launch = {"kernel": 0, "parameters": 9, "extra": 10}
    cooperative = {"kernel": 0, "parameters": 9}
    extended = {"configuration": 0, "kernel": 1, "parameters": 2, "extra": 3}
    return {
        "cuLaunchKernel": Function("launch", 11, stream=8, roles=launch),
        "cuLaunchCooperativeKernel": Function("launch", 10, stream=8, roles=cooperative),
        "cuLaunchKernelEx": Function("launch", 4, fetches=(Fetch(0, 56),), roles=extended),
    }


def _contexts() -> dict[str, Function]:
    made = (Fetch(0, 8),)
    return {
        "cuDevicePrimaryCtxRetain": Function("context", 2, fetches=made, roles={"device": 1}),
        "cuCtxCreate_v2": Function("context", 3, fetches=made, roles={"device": 2}),
        "cuCtxCreate_v3": Function("context", 5, fetches=made, roles={"device": 4}),
        "cuCtxCreate_v4": Function("context", 4, fetches=made, roles={"device": 3}),
        "cuCtxDestroy_v2": Function("drop_context", 1, sites=ENTER, forgets=ALL),
        "cuDevicePrimaryCtxReset_v2": Function("drop_device", 1, sites=ENTER, forgets=ALL),
        # The last release destroys the context: what was known is asked for again.
        "cuDevicePrimaryCtxRelease_v2": Function("load", 1, sites=ENTER, forgets=MEMORY),
        "cuModuleUnload": Function("unload", 1, sites=ENTER, forgets=ALL),
        "cuLibraryUnload": Function("unload", 1, sites=ENTER, forgets=ALL),
        "cuModuleLoadData": Function("load", 2, waits=True),
        "cuModuleLoadDataEx": Function("load", 5, waits=True),
        "cuModuleLoad": Function("load", 2, waits=True),
        "cuLibraryLoadData": Function("load", 8, waits=True),
    }


FUNCTIONS: dict[str, Function] = {
    **_copies(),
    **_fills(),
    **_memory(),
    **_order(),
    **_graphs(),
    **_kernels(),
    **_contexts(),
}


# Pseudo functions: first sights of the recorder.
SEEN_MEMORY = 0xFFFE
SEEN_STREAM = 0xFFFD
SOURCE_CHANGED = 0xFFFC
SEEN_KERNEL = 0xFFFB
LEARNED = 0xFFFA
# Notes of the program, in the order of the calls.
DECLARED = 0xFFF9
DECLARED_NO_MORE = 0xFFF8
LOST = 0xFFF7  # records are missing here: how many
NOT_COMPARED = 0xFFF6  # sources of copies that the host may overwrite unseen: how many

_HEAD = struct.Struct("<IHBBhBxiQQQQQ")
HEAD_SIZE = _HEAD.size
_LENGTH = struct.Struct("<Q")
# Accounts: whose wait or query a call is. A test compares the numbers with `_driver.account`.
PROGRAM = 0  # the program has waited, or has asked
FUTURE = 1  # a future was told: the program may have looked at it, which cannot be seen
HOUSEKEEPING = 2  # the program does not hear the answer

_LEAVING = 1  # the site of a call that comes back


class Call:
    """One record: a driver call at its begin or its end, or a note."""

    __slots__ = (
        "account",
        "began",
        "context",
        "ended",
        "entry",
        "fetched",
        "function",
        "leaving",
        "name",
        "number",
        "result",
        "stack",
        "thread",
        "what",
        "words",
    )

    # Set by the engine.
    name: str
    function: Function

    def __init__(  # noqa: PLR0917 -- made for each record: keywords would take longer
        self,
        what: int,
        leaving: bool,
        result: int,
        account: int,
        stack: int,
        thread: int,
        began: int,
        ended: int,
        context: int,
        number: int,
        words: tuple[int, ...],
        fetched: list[bytes],
    ) -> None:
        self.what = what  # the maker's number of the function
        self.leaving = leaving
        self.result = result
        self.account = account  # on which the thread made the call
        self.stack = stack
        self.thread = thread
        self.began = began  # nanoseconds
        self.ended = ended
        self.context = context
        self.number = number
        self.words = words
        self.fetched = fetched
        self.entry = -1  # in the timeline


def read_log(chunk: bytes) -> Iterator[Call]:
    """Read the records of a chunk of the log."""
    at, until = 0, len(chunk)
    while at < until:
        size, what, site, count, result, account, stack, thread, began, ended, context, number = (
            _HEAD.unpack_from(chunk, at)
        )
        end = at + size
        at += _HEAD.size
        words = _words(count).unpack_from(chunk, at)
        at += 8 * count
        fetched = []
        while at < end:
            (length,) = _LENGTH.unpack_from(chunk, at)
            at += 8
            fetched.append(chunk[at : at + length])
            at += length + 7 & ~7
        leaving = site == _LEAVING
        yield Call(
            what,
            leaving,
            result,
            account,
            stack,
            thread,
            began,
            ended,
            context,
            number,
            words,
            fetched,
        )


@functools.cache
def _words(count: int) -> struct.Struct:
    """Return the compiled format of a number of words. Cached: there are millions of records."""
    return struct.Struct(f"<{count}Q")
