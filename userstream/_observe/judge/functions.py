"""The recorded driver functions with their arguments, and the records of their calls.

A row says what a call means (a method of a subject of `Engine`, such as `Copies`) and what each
word of its arguments is. The simulated driver and CUPTI give all arguments in the order of C.

All other functions have a verdict as well. A function that queues work, makes order or changes
memory in a way that is not followed is counted when it is called, and named in `not_seen`: what it
does is never missed in silence. The rest are harmless, each for the reason of its group. A test
compares these tables with the functions of the installed bindings.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

ENTER = 1  # recorded at its begin: what the call frees may be reused before its end
LEAVE = 2

MEMORY = 1  # tables that a call makes the recorder clear
KERNELS = 2
STRANGERS = 4  # words of launches that were no addresses
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
    forgets: int = 0  # bits: MEMORY, KERNELS, STRANGERS
    # How many of the words, with what is fetched, say which `Work` a call queues; 0: more than that
    repeats: int = 0
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
    # The last of them begins with the order in which the sources are read.
    arrays = (*(Fetch(each, 8, count=3) for each in range(3)), Fetch(4, 4))
    found["cuMemcpyBatchAsync"] = Function("copy_batch", 9, stream=8, fetches=arrays)  # CUDA 12
    found["cuMemcpyBatchAsync_v2"] = Function("copy_batch", 8, stream=7, fetches=arrays)
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
    found["cuMemcpy3DPeer"] = found["cuMemcpy3D_v2"]
    found["cuMemcpy3DWithAttributesAsync"] = Function(
        "copy_3d_with_attributes", 3, stream=2, fetches=(Fetch(0, 112),)
    )
    shaped = (Fetch(1, 112, count=0),)
    # Of CUDA 12 first, as of batches of other copies.
    found["cuMemcpy3DBatchAsync"] = Function("copy_3d_batch", 5, stream=4, fetches=shaped)
    found["cuMemcpy3DBatchAsync_v2"] = Function("copy_3d_batch", 4, stream=3, fetches=shaped)
    found["cuMemBatchDecompressAsync"] = Function(
        "decompress", 5, stream=4, fetches=(Fetch(0, 64, count=1),)
    )
    ranges = (Fetch(0, 8, count=2), Fetch(1, 8, count=2))
    found["cuMemDiscardBatchAsync"] = Function("discard", 5, stream=4, fetches=ranges)
    found["cuMemDiscardAndPrefetchBatchAsync"] = Function("discard", 8, stream=7, fetches=ranges)
    return {**found, **_array_copies()}


def _array_copies() -> dict[str, Function]:
    """Return the copies from and to the bytes of CUDA arrays."""
    to, source = {"to_offset": 1}, {"from_offset": 2}
    copies = {
        "HtoAAsync": Function("copy_array", 5, stream=4, operands=(0, 2), size=3, roles=to),
        "AtoHAsync": Function("copy_array", 5, stream=4, operands=(0, 1), size=3, roles=source),
        "HtoA": Function(
            "copy_array", 4, operands=(0, 2), size=3, roles=to, waits=True, orders_host=True
        ),
        "AtoH": Function(
            "copy_array", 4, operands=(0, 1), size=3, roles=source, waits=True, orders_host=True
        ),
        "DtoA": Function("copy_array", 4, operands=(0, 2), size=3, roles=to, waits=True),
        "AtoD": Function("copy_array", 4, operands=(0, 1), size=3, roles=source, waits=True),
        "AtoA": Function(
            *("copy_array", 5),
            operands=(0, 2),
            size=4,
            roles={"to_offset": 1, "from_offset": 3},
            waits=True,
        ),
    }
    made, shape = Fetch(0, 8), {"cuArrayCreate_v2": 24, "cuArray3DCreate_v2": 40}
    return {
        **{f"cuMemcpy{name}_v2": function for name, function in copies.items()},
        **{
            name: Function("create_array", 2, fetches=(made, Fetch(1, size)))
            for name, size in shape.items()
        },
        "cuArrayDestroy": Function("drop_array", 1, sites=ENTER),
        "cuTexObjectCreate": Function("texture", 4),
        "cuSurfObjectCreate": Function("texture", 2),
    }


def _fills() -> dict[str, Function]:
    found = {}
    for bits in (8, 16, 32):
        width = {"width": bits // 8}
        found[f"cuMemsetD{bits}Async"] = Function(
            "fill", 4, stream=3, operands=(0,), size=2, roles=width, repeats=4
        )
        found[f"cuMemsetD{bits}_v2"] = Function("fill", 3, operands=(0,), size=2, roles=width)
        shaped = {**width, "pitch": 1, "height": 4}
        found[f"cuMemsetD2D{bits}Async"] = Function(
            "fill", 6, stream=5, operands=(0,), size=3, roles=shaped, repeats=6
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
    found["cuMemAllocPitch_v2"] = Function(
        "allocate_pitch", 5, allocates=0, fetches=(Fetch(0, 8), Fetch(1, 8)), waits=True
    )
    placed = {"placed": 1}  # the caller chose the address
    found["cuMemHostRegister_v2"] = Function(
        "register", 3, allocates=0, size=1, waits=True, roles=placed
    )
    found["cuMemAllocAsync"] = Function(
        "allocate_async", 3, stream=2, allocates=0, size=1, fetches=new
    )
    found["cuMemAllocFromPoolAsync"] = Function(
        "allocate_async", 4, stream=3, allocates=0, size=1, fetches=new, roles={"pool": 2}
    )
    for name in ("cuMemFree_v2", "cuMemFreeHost", "cuMemHostUnregister"):
        found[name] = Function("free", 1, frees=0, sites=both, waits=True, orders_host=True)
    found["cuMemMap"] = Function("map", 5, allocates=0, size=1, roles=placed)
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
        "cuCtxFromGreenCtx": Function("green_context", 2, fetches=(Fetch(0, 8),)),
        "cuGreenCtxRecordEvent": Function("record_green", 2),
        "cuGreenCtxWaitEvent": Function("wait_green", 2),
        "cuEventQuery": Function("know_event", 1, orders_host=True),
        "cuEventSynchronize": Function("know_event", 1, orders_host=True, waits=True),
        "cuEventElapsedTime": Function("know_events", 3, orders_host=True),
        "cuEventDestroy_v2": Function("drop_event", 1, sites=ENTER),
        "cuIpcGetEventHandle": Function("export_event", 2),
        "cuIpcOpenEventHandle": Function("open_event", 1, fetches=(Fetch(0, 8),)),
        "cuWaitExternalSemaphoresAsync": Function("wait_external", 4, stream=3),
        "cuSignalExternalSemaphoresAsync": Function("signal_external", 4, stream=3),
        "cuGraphicsMapResources": Function("wait_external", 3, stream=2),
        "cuGraphicsUnmapResources": Function("signal_external", 3, stream=2),
        "cuStreamQuery": Function("know_stream", 1, stream=0, orders_host=True),
        "cuStreamSynchronize": Function("know_stream", 1, stream=0, orders_host=True, waits=True),
        "cuCtxSynchronize": Function("know_context", 0, orders_host=True, waits=True),
        "cuCtxSynchronize_v2": Function("know_context", 1, orders_host=True, waits=True),
        "cuStreamCreate": Function("new_stream", 2, fetches=(Fetch(0, 8),)),
        "cuStreamCreateWithPriority": Function("new_stream", 3, fetches=(Fetch(0, 8),)),
        "cuGreenCtxStreamCreate": Function("new_stream", 4, fetches=(Fetch(0, 8),)),
        "cuStreamDestroy_v2": Function("drop_stream", 1, stream=0, sites=ENTER, ends_stream=True),
        "cuStreamBatchMemOp_v2": Function(
            "values",
            4,
            stream=0,
            fetches=(Fetch(2, 48, count=1),),
            roles={"value": 2, "value_count": 1},
        ),
        "cuLaunchHostFunc": Function("host_function", 3, stream=0),
        "cuLaunchHostFunc_v2": Function("host_function", 4, stream=0),
        "cuStreamAddCallback": Function("host_function", 4, stream=0),
    }
    found["cuEventElapsedTime_v2"] = found["cuEventElapsedTime"]
    for bits in (32, 64):
        word = {"value": 1, "bytes": bits // 8}
        found[f"cuStreamWaitValue{bits}_v2"] = Function("wait_value", 4, stream=0, roles=word)
        found[f"cuStreamWriteValue{bits}_v2"] = Function("write_value", 4, stream=0, roles=word)
    return found


def _graphs() -> dict[str, Function]:
    made = (Fetch(0, 8),)
    return {
        "cuStreamBeginCapture_v2": Function("begin_capture", 2, stream=0),
        "cuStreamBeginCaptureToGraph": Function("begin_capture", 6, stream=0),
        "cuStreamEndCapture": Function("end_capture", 2, stream=0, fetches=(Fetch(1, 8),)),
        "cuStreamUpdateCaptureDependencies": Function("capture_dependencies", 4, stream=0),
        "cuStreamUpdateCaptureDependencies_v2": Function("capture_dependencies", 5, stream=0),
        "cuGraphCreate": Function("create_graph", 2, fetches=made),
        "cuGraphInstantiateWithFlags": Function("instantiate", 3, fetches=made),
        "cuGraphInstantiateWithParams": Function("instantiate", 3, fetches=made),
        "cuGraphInstantiate_v2": Function("instantiate", 5, fetches=made),
        "cuGraphExecUpdate_v2": Function("update_graph", 3),
        "cuGraphClone": Function("clone_graph", 2, fetches=made),
        "cuGraphLaunch": Function("launch_graph", 2, stream=1),
        "cuGraphDestroy": Function("drop_graph", 1, sites=ENTER),
        "cuGraphExecDestroy": Function("drop_graph", 1, sites=ENTER),
        **_nodes(),
    }


# CUgraphNodeType, and the bytes of its structure, if a function has one of its own.
_NODE_TYPES = {
    "Kernel": (0, 0),
    "Memcpy": (1, 200),
    "Memset": (2, 40),
    "Host": (3, 0),
    "ChildGraph": (4, 0),
    "Empty": (5, 0),
    "EventWait": (6, 0),
    "EventRecord": (7, 0),
    "ExternalSemaphoresSignal": (8, 0),
    "ExternalSemaphoresWait": (9, 0),
    "MemAlloc": (10, 120),
    "MemFree": (11, 0),
    "BatchMemOp": (12, 0),
}
_NODE = 256  # bytes of a CUgraphNodeParams


def _nodes() -> dict[str, Function]:
    """Return the functions that add nodes to graphs, and that change nodes."""

    def node(means: str, kind: str, words: int, at: int, *fetches: Fetch) -> Function:
        number, size = _NODE_TYPES[kind]
        roles = {"type": number}
        if kind == "Kernel":
            roles["kernel_node"] = at
        elif size:
            fetches += (Fetch(at, size),)
        elif kind in {"ChildGraph", "EventWait", "EventRecord", "MemFree"}:
            roles["value"] = at
        return Function(means, words, fetches=fetches, roles=roles)

    def any_node(means: str, words: int, at: int, *fetches: Fetch) -> Function:
        return Function(means, words, fetches=(*fetches, Fetch(at, _NODE)), roles={"node": at})

    new = (Fetch(0, 8), Fetch(2, 8, count=3))
    found = {
        f"cuGraphAdd{kind}Node{'_v2' if kind == 'Kernel' else ''}": node(
            "add_node", kind, {"Memcpy": 6, "Memset": 6, "Empty": 4}.get(kind, 5), 4, *new
        )
        for kind in _NODE_TYPES
    }
    made = found["cuGraphAddMemAllocNode"]
    found["cuGraphAddMemAllocNode"] = replace(made, forgets=STRANGERS)
    found["cuGraphAddNode"] = any_node("add_node", 5, 4, *new)
    for version in ("_v2", "_v3"):
        found[f"cuGraphAddNode{version}"] = any_node(
            "add_node", 6, 5, Fetch(0, 8), Fetch(2, 8, count=4)
        )
    for kind, suffix in (("Kernel", "_v2"), ("Memcpy", ""), ("Memset", ""), ("Host", "")):
        name = f"{kind}NodeSetParams{suffix}"
        found[f"cuGraph{name}"] = node("set_node", kind, 2, 1)
        words = 4 if kind.startswith("Mem") else 3
        found[f"cuGraphExec{name}"] = node("set_executable_node", kind, words, 2)
    for kind in ("EventRecord", "EventWait"):
        found[f"cuGraph{kind}NodeSetEvent"] = node("set_node", kind, 2, 1)
        found[f"cuGraphExec{kind}NodeSetEvent"] = node("set_executable_node", kind, 3, 2)
    found["cuGraphExecChildGraphNodeSetParams"] = node("set_executable_node", "ChildGraph", 3, 2)
    for name in ("cuGraphNodeSetParams", "cuGraphNodeSetParams_v2"):
        found[name] = any_node("set_node", 2, 1)
    found["cuGraphExecNodeSetParams"] = any_node("set_executable_node", 3, 2)
    found["cuGraphNodeSetEnabled"] = Function("enable_node", 3)
    found["cuGraphDestroyNode"] = Function("drop_node", 1, sites=ENTER)
    for version, words, count in (("", 4, 3), ("_v2", 5, 4)):
        pairs = (Fetch(1, 8, count=count), Fetch(2, 8, count=count))
        for what, means in (("Add", "add_dependencies"), ("Remove", "remove_dependencies")):
            found[f"cuGraph{what}Dependencies{version}"] = Function(means, words, fetches=pairs)
    return found


def _kernels() -> dict[str, Function]:
    launch = {"kernel": 0, "parameters": 9, "extra": 10}
    cooperative = {"kernel": 0, "parameters": 9}
    extended = {"configuration": 0, "kernel": 1, "parameters": 2, "extra": 3}
    return {
        "cuLaunchKernel": Function("launch", 11, stream=8, roles=launch, repeats=9),
        "cuLaunchCooperativeKernel": Function("launch", 10, stream=8, roles=cooperative, repeats=9),
        "cuLaunchKernelEx": Function(
            "launch", 4, fetches=(Fetch(0, 56),), roles=extended, repeats=2
        ),
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


# Accounts: whose wait or query a call is. A test compares the numbers with `_driver.account`.
PROGRAM = 0  # the program has waited, or has asked
FUTURE = 1  # a future was told: the program may have looked at it, which cannot be seen
HOUSEKEEPING = 2  # the program does not hear the answer


class Call:
    """One record: a driver call at its begin or its end, or a record that is no call.

    The engine has one object, with which it takes each record of the log: who is given it may keep
    what is in it, and not the object.
    """

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
        "waits",
        "words",
    )

    def __init__(self) -> None:
        self.name = ""  # of the function
        self.function = _NO_FUNCTION
        self.leaving = 0  # 1 for a call that comes back
        self.result = 0
        self.account = PROGRAM  # on which the thread made the call
        self.stack = -1
        self.thread = 0  # the log's number of it
        self.began = self.ended = 0  # nanoseconds
        self.context = 0
        self.number = 0  # of the record
        self.words: list[int] = []
        self.fetched: list[bytes] = []
        self.entry = -1  # in the timeline
        self.waits = False  # the host may wait in the call, as far as its arguments tell


_NO_FUNCTION = Function("", 0)


# -- Verdicts on the functions that are not recorded -----------------------------------------------

_REASONS = {
    "a copy that is not followed": "cuFabricCpyBatchAsync",
    "a launch of a kind that is not followed": (
        "cuLaunch cuLaunchGrid cuLaunchGridAsync cuLaunchCooperativeKernelMultiDevice"
    ),
    "memory whose contents change unseen": "cuMemMapArrayAsync",
    "an array whose memory others use by other handles": "cuMipmappedArrayGetLevel cuArrayGetPlane",
    "memory that others use unseen": (
        "cuIpcOpenMemHandle cuMemPoolImportPointer cuExternalMemoryGetMappedBuffer "
        "cuExternalMemoryGetMappedMipmappedArray cuEGLStreamConsumerAcquireFrame "
        "cuEGLStreamConsumerReleaseFrame cuEGLStreamProducerPresentFrame "
        "cuEGLStreamProducerReturnFrame"
    ),
    "order that is not followed": (
        "cuEventCreateFromEGLSync cuStreamBeginRecaptureToGraph cuStreamBeginCaptureToCig "
        "cuStreamEndCaptureToCig"
    ),
    "nodes of graphs that are not followed": (
        "cuGraphBatchMemOpNodeSetParams cuGraphExecBatchMemOpNodeSetParams"
    ),
}

# Why what a function does cannot be followed, by its name without a version.
NOT_FOLLOWED = {name: reason for reason, names in _REASONS.items() for name in names.split()}

# Regular expressions for the names of functions that neither queue work, nor make order, nor change
# memory that a program can use, by the reason.
HARMLESS = {
    "asks for a fact": (
        r"cu\w*(Get|Query|IsLoaded|IsCapturing|CanAccessPeer|FindInClone|Enumerate|Occupancy)\w*"
        r"|cuOccupancy\w*|cuDevice(ComputeCapability|TotalMem)|cuLogsCurrent|cuGraphDebugDotPrint"
    ),
    "makes or drops an object that is seen when it is used": (
        r"cu(Array|Array3D|MipmappedArray|TexObject|SurfObject|TexRef|UserObject|Link|GreenCtx|"
        r"LogicalEndpoint|Multicast|MemPool)(Create|Destroy)|cuEventCreate|cuGraphCreate|"
        r"cuGraphConditionalHandleCreate|"
        r"cuUserObject(Retain|Release)|cuGraph(Retain|Release)UserObject|cuTensorMap\w+|"
        r"cuImportExternal\w+|cuDestroyExternal\w+|cuGraphics\w*[Rr]egister\w+|cuVDPAUCtxCreate|"
        r"cuDevResourceGenerateDesc|cuDevSmResourceSplit\w*|cuCtxFromGreenCtx|cuGraphAddEmptyNode"
    ),
    "changes a setting": (
        r"cu\w*Set(Attribute|AttributeGlobal|CacheConfig|SharedMemConfig|SharedSize|BlockShape|"
        r"Limit|Flags|MapFlags|Access|MemPool|Current|ParamsSize|GraphMemAttribute)|"
        r"cu(TexRef|SurfRef)Set\w+|cuParamSet\w+|cuMemAdvise|cuStreamCopyAttributes|"
        r"cuGraphKernelNodeCopyAttributes|cuGraph(Exec)?ExternalSemaphores(Signal|Wait)NodeSetParams|"
        r"cuCtx(Enable|Disable)PeerAccess|"
        r"cuCtx(PushCurrent|PopCurrent|Attach|Detach|ResetPersistingL2Cache)|"
        r"cuThreadExchangeStreamCaptureMode|cuDevice(Register|Unregister)AsyncNotification|"
        r"cuProfiler(Start|Stop)|cu(Coredump|Logs)\w+|cuEGLStream\w*(Connect|Disconnect)\w*"
    ),
    "loads code, or is over when it returns": (
        r"cuInit|cuLink\w+|cuModuleLoadFatBinary|cuLibraryLoadFromFile|cuFuncLoad|cuGraphUpload|"
        r"cuDeviceGraphMemTrim|cuMemPoolTrimTo|cuFlushGPUDirectRDMAWrites"
    ),
    "moves memory between processors, with the same contents": (
        r"cuMemPrefetch(Batch)?Async|cuStreamAttachMemAsync"
    ),
    "prepares memory that is seen when it is used": (
        r"cuMem(AddressFree|AddressReserve|Create|Release|RetainAllocationHandle)|"
        r"cuMem(Pool)?(Export|Import)\w*(Handle|Pointer)|cuMulticast\w+|cuLogicalEndpoint\w+"
    ),
    "stops the whole process, or ends with it": r"cuCheckpoint\w+",
}


_COUNTED = Function("not_followed", 0)
_VERSION = re.compile(r"_v\d+$")
_OWN_DEFAULT_STREAM = re.compile(r"_pt[sd][zs]$")  # of a program whose stream 0 is the thread's


def watched(symbol: str) -> tuple[str, Function] | None:
    """Return name and meaning of what is recorded of a function, or `None` if nothing is.

    Of a function that is not followed it is recorded that it was called.
    """
    name = _OWN_DEFAULT_STREAM.sub("", symbol)
    function = FUNCTIONS.get(name)
    if function is None:
        name = _VERSION.sub("", name)
        return (name, _COUNTED) if name in NOT_FOLLOWED else None
    if name != symbol and function.stream is None:
        function = replace(function, roles={**function.roles, "default": 2})
    return name, function


def is_harmless(name: str) -> bool:
    """Return whether a function, of any version, is in a group of harmless ones."""
    plain = _VERSION.sub("", name)
    return any(re.fullmatch(names, plain) for names in HARMLESS.values())
