"""The maker of records on a GPU: CUPTI's callbacks, which see every driver call of the process.

CUPTI comes with the CUDA toolkit, with PyTorch, and as a wheel of its own. It needs no privilege.
It has one subscriber at a time: while we observe no profiler can, and the other way round.
"""

from __future__ import annotations

import ctypes
import os
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from userstream import _driver
from userstream._observe.judge import verdicts
from userstream._observe.judge.functions import FUNCTIONS, Function
from userstream._observe.logger import DRIVER_FUNCTIONS, Driver, Logger, address_of
from userstream.errors import NotSupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

_DRIVER_DOMAIN = 1
_MOST_CALLBACKS = 2048
_TAKEN = (12, 39)  # CUPTI_ERROR_MAX_LIMIT_REACHED, ..._MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED
_INSTALL = (
    "install it with `pip install nvidia-cuda-cupti` (CUDA 13) or `pip install "
    "nvidia-cuda-cupti-cu12` (CUDA 12)"
)
_OWN_DEFAULT_STREAM = re.compile(r"_pt[sd][zs]$")  # of a program whose stream 0 is the thread's

# Bytes of each argument, in the order of C. 8: pointers, handles, addresses and sizes; 4: integers
# and enumerations.
_SIGNATURES = {
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
    "cuStreamQuery": "8",
    "cuStreamSynchronize": "8",
    "cuCtxSynchronize": "",
    "cuCtxSynchronize_v2": "8",
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
    "cuGraphAddKernelNode_v2": "88",  # of these the first two are enough
    "cuGraphAddMemcpyNode": "88",
    "cuGraphAddMemsetNode": "88",
    "cuGraphAddChildGraphNode": "88",
    "cuGraphAddNode_v2": "88",
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


def signature(name: str) -> str:
    """Return the bytes of each argument of a function, by its name without ``_ptsz``."""
    return _SIGNATURES.get(name, "")  # of a function that is not followed no argument is read


def watched(symbol: str) -> tuple[str, Function] | None:
    """Return what is watched on a GPU: the same, but for what the driver calls otherwise."""
    batch = FUNCTIONS["cuMemcpyBatchAsync"]
    if symbol == "cuMemcpyBatchAsync":  # of CUDA 12, one argument more
        return symbol, replace(batch, words=9, stream=8)
    if symbol == "cuMemcpyBatchAsync_v2":
        return symbol, batch
    return verdicts.watched(symbol)


class Cupti:
    """Lets CUPTI tell the logger of each call."""

    def __init__(self) -> None:
        _driver.library.ensure()
        for device in range(_driver.library.device_count()):
            _driver.contexts.primary_context_if_active(
                device
            )  # so that reports can tell the device
        self._library = _library()
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._names: dict[int, str] = {}

    def functions(self) -> dict[int, tuple[str, Function]]:
        """Return what is watched, by CUPTI's number of each function."""
        found = {}
        text = ctypes.c_char_p()
        for number in range(1, _MOST_CALLBACKS):
            if self._library.cuptiGetCallbackName(_DRIVER_DOMAIN, number, ctypes.byref(text)):
                continue
            full = (text.value or b"").decode()
            symbol = _OWN_DEFAULT_STREAM.sub("", full)
            named = watched(symbol)
            if named is None:
                continue
            name, function = named
            if symbol != full and function.stream is None:
                function = replace(function, roles={**function.roles, "default": 2})
            found[number] = (name, function)
            self._names[number] = full
        return found

    def driver(self) -> Driver:
        """Return the functions that the logger calls; an old driver lacks some."""
        there = (getattr(self._cuda, name, None) for name in DRIVER_FUNCTIONS.values())
        return Driver(*(None if each is None else address_of(each) for each in there))

    def begin(self, logger: Logger) -> Callable[[], None]:
        """Tell the logger from now on; return what ends that."""
        for number, full in self._names.items():
            symbol = _OWN_DEFAULT_STREAM.sub("", full)
            named = watched(symbol)
            stream = None if symbol == full or named is None else named[1].stream
            logger.cupti_signature(number, signature(symbol), stream)
        subscriber = ctypes.c_void_p()
        self._check(
            self._library.cuptiSubscribe(ctypes.byref(subscriber), logger.cupti_call, None),
            "cuptiSubscribe",
        )

        def end() -> None:
            self._library.cuptiUnsubscribe(subscriber)

        try:
            for number in self._names:
                enabled = self._library.cuptiEnableCallback(1, subscriber, _DRIVER_DOMAIN, number)
                self._check(enabled, "cuptiEnableCallback")
        except BaseException:
            end()
            raise
        return end

    def _check(self, status: int, what: str) -> None:
        if not status:
            return
        if status in _TAKEN:
            raise NotSupportedError(
                "another tool uses CUPTI in this process (torch.profiler, Nsight, a sanitizer?), "
                "which serves one at a time: observe() takes its turn when that has ended"
            )
        text = ctypes.c_char_p()
        self._library.cuptiGetResultString(status, ctypes.byref(text))
        said = (text.value or str(status).encode()).decode()
        raise NotSupportedError(f"nothing can be observed: {what} returned {said}")


def _library() -> ctypes.CDLL:
    """Load CUPTI: the one that is loaded already, as two of them do not work; else any."""
    path = _loaded() or _installed()
    try:
        library = ctypes.CDLL(path or "libcupti.so")
        library.cuptiSubscribe.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
        library.cuptiUnsubscribe.argtypes = [ctypes.c_void_p]
        library.cuptiEnableCallback.argtypes = [
            ctypes.c_uint32,
            ctypes.c_void_p,
            ctypes.c_int,
            ctypes.c_uint32,
        ]
        library.cuptiGetCallbackName.argtypes = [ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p]
        library.cuptiGetResultString.argtypes = [ctypes.c_int, ctypes.c_void_p]
    except (OSError, AttributeError) as error:
        raise NotSupportedError(
            f"observe() sees the calls of a GPU through CUPTI, which was not found: {_INSTALL} "
            f"({error})"
        ) from error
    return library


def _loaded() -> str | None:
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            path = line.rstrip("\n").split(maxsplit=5)[-1]
            if re.match(r"libcupti\.so(\.|$)", os.path.basename(path)):
                return path
    return None


def _installed() -> str | None:
    from cuda import pathfinder

    try:
        path: str | None = pathfinder.load_nvidia_dynamic_lib("cupti").abs_path
    except Exception:  # older versions do not know it, and each says so in its own way
        path = _of_wheel()
    return path


def _of_wheel() -> str | None:
    import importlib.metadata

    for name in ("nvidia-cuda-cupti", "nvidia-cuda-cupti-cu13", "nvidia-cuda-cupti-cu12"):
        try:
            files = importlib.metadata.files(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            if re.match(r"libcupti\.so", file.name):
                return os.fspath(file.locate())
    return None
