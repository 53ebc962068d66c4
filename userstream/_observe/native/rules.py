"""The recorder's table of functions in C, made from `SIGNATURES` and the judge's `FUNCTIONS`.

`hatch_build.py` loads this file by its path when the package is built. It imports the standard
library alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

# Bytes of each argument, in the order of C, as CUPTI's structures have them. 8: pointers, handles,
# addresses and sizes; 4: integers and enumerations.
SIGNATURES = {
    "cuMemcpy": "888",
    "cuMemcpyHtoD_v2": "888",
    "cuMemcpyDtoH_v2": "888",
    "cuMemcpyDtoD_v2": "888",
    "cuMemcpyAsync": "8888",
    "cuMemcpyHtoDAsync_v2": "8888",
    "cuMemcpyDtoHAsync_v2": "8888",
    "cuMemcpyDtoDAsync_v2": "8888",
    "cuMemcpyWithAttributesAsync": "88888",
    "cuMemcpyPeer": "88888",
    "cuMemcpyPeerAsync": "888888",
    "cuMemcpyBatchAsync": "888888888",
    "cuMemcpyBatchAsync_v2": "88888888",
    "cuMemcpy2D_v2": "8",
    "cuMemcpy2DUnaligned_v2": "8",
    "cuMemcpy3D_v2": "8",
    "cuMemcpy2DAsync_v2": "88",
    "cuMemcpy3DAsync_v2": "88",
    "cuMemcpy3DPeerAsync": "88",
    "cuMemsetD8_v2": "818",
    "cuMemsetD16_v2": "828",
    "cuMemsetD32_v2": "848",
    "cuMemsetD8Async": "8188",
    "cuMemsetD16Async": "8288",
    "cuMemsetD32Async": "8488",
    "cuMemsetD2D8_v2": "88188",
    "cuMemsetD2D16_v2": "88288",
    "cuMemsetD2D32_v2": "88488",
    "cuMemsetD2D8Async": "881888",
    "cuMemsetD2D16Async": "882888",
    "cuMemsetD2D32Async": "884888",
    "cuMemAlloc_v2": "88",
    "cuMemAllocManaged": "884",
    "cuMemAllocHost_v2": "88",
    "cuMemHostAlloc": "884",
    "cuMemHostRegister_v2": "884",
    "cuMemAllocAsync": "888",
    "cuMemAllocFromPoolAsync": "8888",
    "cuMemFree_v2": "8",
    "cuMemFreeHost": "8",
    "cuMemHostUnregister": "8",
    "cuMemMap": "88888",
    "cuMemUnmap": "88",
    "cuIpcCloseMemHandle": "8",
    "cuMemPoolDestroy": "8",
    "cuMemFreeAsync": "88",
    "cuEventRecord": "88",
    "cuEventRecordWithFlags": "884",
    "cuStreamWaitEvent": "884",
    "cuCtxRecordEvent": "88",
    "cuCtxWaitEvent": "88",
    "cuEventQuery": "8",
    "cuEventSynchronize": "8",
    "cuEventElapsedTime": "888",
    "cuEventElapsedTime_v2": "888",
    "cuEventDestroy_v2": "8",
    "cuIpcGetEventHandle": "88",
    "cuIpcOpenEventHandle": "8",
    "cuWaitExternalSemaphoresAsync": "8848",
    "cuSignalExternalSemaphoresAsync": "8848",
    "cuGraphicsMapResources": "488",
    "cuGraphicsUnmapResources": "488",
    "cuStreamQuery": "8",
    "cuStreamSynchronize": "8",
    "cuCtxSynchronize": "",
    "cuCtxSynchronize_v2": "8",
    "cuStreamCreate": "84",
    "cuStreamCreateWithPriority": "844",
    "cuGreenCtxStreamCreate": "8844",
    "cuStreamDestroy_v2": "8",
    "cuStreamBatchMemOp_v2": "8484",
    "cuLaunchHostFunc": "888",
    "cuLaunchHostFunc_v2": "8884",
    "cuStreamAddCallback": "8884",
    "cuStreamWaitValue32_v2": "8844",
    "cuStreamWaitValue64_v2": "8884",
    "cuStreamWriteValue32_v2": "8844",
    "cuStreamWriteValue64_v2": "8884",
    "cuStreamBeginCapture_v2": "84",
    "cuStreamBeginCaptureToGraph": "888884",
    "cuStreamEndCapture": "88",
    "cuGraphInstantiateWithFlags": "888",
    "cuGraphInstantiateWithParams": "888",
    "cuGraphInstantiate_v2": "88888",
    "cuGraphExecUpdate_v2": "888",
    "cuGraphClone": "88",
    "cuGraphLaunch": "88",
    "cuGraphDestroy": "8",
    "cuGraphExecDestroy": "8",
    "cuMemcpy3DPeer": "8",
    "cuMemcpy3DWithAttributesAsync": "888",
    "cuMemcpy3DBatchAsync": "88888",
    "cuMemcpy3DBatchAsync_v2": "8888",
    "cuMemBatchDecompressAsync": "88488",
    "cuMemDiscardBatchAsync": "88888",
    "cuMemDiscardAndPrefetchBatchAsync": "88888888",
    "cuMemcpyHtoAAsync_v2": "88888",
    "cuMemcpyAtoHAsync_v2": "88888",
    "cuMemcpyHtoA_v2": "8888",
    "cuMemcpyAtoH_v2": "8888",
    "cuMemcpyDtoA_v2": "8888",
    "cuMemcpyAtoD_v2": "8888",
    "cuMemcpyAtoA_v2": "88888",
    "cuArrayCreate_v2": "88",
    "cuArray3DCreate_v2": "88",
    "cuArrayDestroy": "8",
    "cuTexObjectCreate": "8888",
    "cuSurfObjectCreate": "88",
    "cuMemAllocPitch_v2": "88884",
    "cuCtxFromGreenCtx": "88",
    "cuGreenCtxRecordEvent": "88",
    "cuGreenCtxWaitEvent": "88",
    "cuStreamUpdateCaptureDependencies": "8884",
    "cuStreamUpdateCaptureDependencies_v2": "88884",
    "cuGraphCreate": "84",
    "cuGraphAddKernelNode_v2": "88888",
    "cuGraphAddMemcpyNode": "888888",
    "cuGraphAddMemsetNode": "888888",
    "cuGraphAddHostNode": "88888",
    "cuGraphAddChildGraphNode": "88888",
    "cuGraphAddEmptyNode": "8888",
    "cuGraphAddEventWaitNode": "88888",
    "cuGraphAddEventRecordNode": "88888",
    "cuGraphAddExternalSemaphoresSignalNode": "88888",
    "cuGraphAddExternalSemaphoresWaitNode": "88888",
    "cuGraphAddMemAllocNode": "88888",
    "cuGraphAddMemFreeNode": "88888",
    "cuGraphAddBatchMemOpNode": "88888",
    "cuGraphAddNode": "88888",
    "cuGraphAddNode_v2": "888888",
    "cuGraphAddNode_v3": "888888",
    "cuGraphKernelNodeSetParams_v2": "88",
    "cuGraphExecKernelNodeSetParams_v2": "888",
    "cuGraphMemcpyNodeSetParams": "88",
    "cuGraphExecMemcpyNodeSetParams": "8888",
    "cuGraphMemsetNodeSetParams": "88",
    "cuGraphExecMemsetNodeSetParams": "8888",
    "cuGraphHostNodeSetParams": "88",
    "cuGraphExecHostNodeSetParams": "888",
    "cuGraphEventRecordNodeSetEvent": "88",
    "cuGraphExecEventRecordNodeSetEvent": "888",
    "cuGraphEventWaitNodeSetEvent": "88",
    "cuGraphExecEventWaitNodeSetEvent": "888",
    "cuGraphExecChildGraphNodeSetParams": "888",
    "cuGraphNodeSetParams": "88",
    "cuGraphNodeSetParams_v2": "88",
    "cuGraphExecNodeSetParams": "888",
    "cuGraphNodeSetEnabled": "884",
    "cuGraphDestroyNode": "8",
    "cuGraphAddDependencies": "8888",
    "cuGraphAddDependencies_v2": "88888",
    "cuGraphRemoveDependencies": "8888",
    "cuGraphRemoveDependencies_v2": "88888",
    "cuLaunchKernel": "84444444888",
    "cuLaunchCooperativeKernel": "8444444488",
    "cuLaunchKernelEx": "8888",
    "cuDevicePrimaryCtxRetain": "84",
    "cuCtxCreate_v2": "844",
    "cuCtxCreate_v3": "88444",
    "cuCtxCreate_v4": "8844",
    "cuCtxDestroy_v2": "8",
    "cuDevicePrimaryCtxReset_v2": "4",
    "cuDevicePrimaryCtxRelease_v2": "4",
    "cuModuleLoad": "88",
    "cuModuleLoadData": "88",
    "cuModuleLoadDataEx": "88488",
    "cuModuleUnload": "8",
    "cuLibraryLoadData": "88884884",
    "cuLibraryUnload": "8",
}

# Asynchronous operations that can be held until another one has run.
_HELD_BACK = {
    *("copy", "copy_batch", "copy_2d", "copy_3d", "copy_array", "copy_3d_with_attributes"),
    *("copy_3d_batch", "fill", "launch", "launch_graph", "free_async", "allocate_async"),
    *("discard", "decompress"),
}

_NO_WORD = 255
_ENTER, _LEAVE = 1, 2
_EVENTS = {"know_event": (0, 1), "know_events": (1, 2)}  # the first word with an event, how many


def source(functions: Mapping[str, Any], not_followed: Iterable[str], version: str) -> str:
    """Return the C file: what is recorded of each function, sorted by name."""
    rows = [
        f'    {{"{name}", "{SIGNATURES.get(name, "")}", {_rule(function)}}},'
        for name, function in sorted(functions.items())
    ]
    names = [f'    "{name}",' for name in sorted(not_followed)]
    return "\n".join(
        [
            '#include "parts.h"',
            "",
            f'const char recorder_version[] = "{version}";',
            "",
            "const NamedRule named_rules[] = {",
            *rows,
            "};",
            "const size_t named_rule_count = sizeof named_rules / sizeof *named_rules;",
            "",
            "const char *const not_followed[] = {",
            *names,
            "};",
            "const size_t not_followed_count = sizeof not_followed / sizeof *not_followed;",
            "",
        ]
    )


def _rule(function: Any) -> str:
    """Return the initializer of a `Rule` of `parts.h`."""
    is_copy = function.means == "copy"
    value_in_memory = not function.roles.keys().isdisjoint({"bytes", "value_count"})
    event, events = _EVENTS.get(function.means, (_NO_WORD, 0))
    members = {
        "sites": function.sites,
        "words": function.words,
        "stream": _word(function.stream),
        "ends_stream": int(function.ends_stream),
        "frees": _word(function.frees),
        "freed": _word(function.size if function.frees is not None else None),
        "allocates": _word(function.allocates),
        "allocated": _word(function.size if function.allocates is not None else None),
        "placed": function.roles.get("placed", 0),
        "source_size": _word(function.size if is_copy else None),
        "orders_host": int(function.orders_host),
        "ends_context": int(function.means in {"know_context", "free"}),
        "records": _word(0 if function.means == "record" else None),
        "event": event,
        "events": events,
        "failures": int(function.frees is not None or function.means == "end_capture"),
        "forgets": function.forgets,
        "holds": _holds(function),
        "kernel": _word(function.roles.get("kernel")),
        "parameters": _word(function.roles.get("parameters")),
        "extra": _word(function.roles.get("extra")),
        "configuration": _word(function.roles.get("configuration")),
        "node": _word(function.roles.get("node", function.roles.get("kernel_node"))),
        "node_is_any": int("node" in function.roles),
        "value": _word(function.roles.get("value") if value_in_memory else None),
        "value_bytes": function.roles.get("bytes", 0),
        "value_count": _word(function.roles.get("value_count")),
        "awaits": int(function.means in {"wait_value", "values"}),
        "batch": _word(3 if function.means == "copy_batch" else None),
        "addresses": _braced(_addresses(function)),
        "fetches": _braced(_fetches(function)),
    }
    return _braced(f".{name} = {value}" for name, value in members.items())


def _holds(function: Any) -> str:
    """Return what a call is for ``holds.c``."""
    has_stream = function.stream is not None or "configuration" in function.roles
    is_release = function.means == "load" and function.forgets  # the last one ends the context
    if is_release or function.means in {"drop_context", "drop_device"}:
        return "ENDS_CONTEXT"
    if function.waits or function.means in {"load", "unload"}:
        return "BLOCKS_HOST"
    return "HELD_BACK" if has_stream and function.means in _HELD_BACK else "0"


def _addresses(function: Any) -> Iterable[str]:
    for operand in (*function.operands, None, None)[:2]:
        if isinstance(operand, tuple):
            yield f"{{{operand[0]}, 1, {operand[1]}}}"
        else:
            yield f"{{{_word(operand)}, 0, 0}}"


def _fetches(function: Any) -> Iterable[str]:
    sites = _LEAVE if function.allocates is not None else _ENTER | _LEAVE
    for fetch in function.fetches:
        yield f"{{{fetch.size}, {fetch.word}, {_word(fetch.count)}, {sites}, 0}}"
    if not function.fetches:
        yield "{0}"


def _word(number: int | None) -> int:
    return _NO_WORD if number is None else number


def _braced(parts: Iterable[str]) -> str:
    return "{" + ", ".join(parts) + "}"
