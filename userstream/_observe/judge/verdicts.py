"""Verdicts on the functions of the driver: followed, harmless or not followed.

`functions.FUNCTIONS` are followed, with their arguments. A function that queues work, makes order
or changes memory in a way that is not followed is counted when it is called, and named in
`not_seen`: what it does is never missed in silence. All others are harmless, each for the reason of
its group. A test compares these tables with the functions of the installed bindings.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from .functions import FUNCTIONS, Function
from .stacks import line_of

if TYPE_CHECKING:
    from .functions import Call
    from .world import World

_REASONS = {
    "a copy that is not followed": "cuFabricCpyBatchAsync",
    "a launch of a kind that is not followed": (
        "cuLaunch cuLaunchGrid cuLaunchGridAsync cuLaunchCooperativeKernelMultiDevice"
    ),
    "memory whose contents change unseen": "cuMemMapArrayAsync",
    "memory that others use unseen": (
        "cuIpcOpenMemHandle cuMemPoolImportPointer cuExternalMemoryGetMappedBuffer "
        "cuExternalMemoryGetMappedMipmappedArray cuGraphicsMapResources cuGraphicsUnmapResources "
        "cuEGLStreamConsumerAcquireFrame cuEGLStreamConsumerReleaseFrame "
        "cuEGLStreamProducerPresentFrame cuEGLStreamProducerReturnFrame"
    ),
    "order that is not followed": (
        "cuSignalExternalSemaphoresAsync cuWaitExternalSemaphoresAsync cuIpcOpenEventHandle "
        "cuEventCreateFromEGLSync cuStreamBeginRecaptureToGraph cuStreamBeginCaptureToCig "
        "cuStreamEndCaptureToCig"
    ),
    "nodes of graphs that are not followed": (
        "cuGraphAddExternalSemaphoresSignalNode cuGraphAddExternalSemaphoresWaitNode "
        "cuGraphAddNode_v3 cuGraphBatchMemOpNodeSetParams "
        "cuGraphExternalSemaphoresSignalNodeSetParams "
        "cuGraphExternalSemaphoresWaitNodeSetParams cuGraphExecBatchMemOpNodeSetParams "
        "cuGraphExecExternalSemaphoresSignalNodeSetParams "
        "cuGraphExecExternalSemaphoresWaitNodeSetParams"
    ),
}

# By name without version: why what the function does cannot be followed.
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
        r"cuGraphKernelNodeCopyAttributes|cuCtx(Enable|Disable)PeerAccess|"
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
        r"cuMem(AddressFree|AddressReserve|Create|Map|Release|RetainAllocationHandle)|"
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
    """Return whether a function is in a group of harmless ones."""
    return any(re.fullmatch(names, name) for names in HARMLESS.values())


class NotFollowed:
    """Counts calls of functions that are not followed."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._first: dict[str, str] = {}  # where each was called first

    def not_followed(self, call: Call) -> None:
        name = call.name
        if name not in self._first:
            line = line_of(self.world.stacks[call.stack])
            at = "" if line is None else f", first at {line.filename}:{line.lineno}"
            self._first[name] = at
        reason = NOT_FOLLOWED.get(name, "not followed")
        self.world.not_seen(f"{name}: {reason}{self._first[name]}")
