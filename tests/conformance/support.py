"""What the conformance tests share. They speak to the driver alone: ``cuda.bindings.driver``."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import cuda.bindings
import numpy as np
import pytest
from cuda.bindings import driver

from conftest import SIMULATED
from userstream import testing

Result = driver.CUresult
SUCCESS = Result.CUDA_SUCCESS
NOT_READY = Result.CUDA_ERROR_NOT_READY
INVALID_VALUE = Result.CUDA_ERROR_INVALID_VALUE
ILLEGAL_STATE = Result.CUDA_ERROR_ILLEGAL_STATE
INVALID_CONTEXT = Result.CUDA_ERROR_INVALID_CONTEXT
INVALID_DEVICE = Result.CUDA_ERROR_INVALID_DEVICE
INVALID_HANDLE = Result.CUDA_ERROR_INVALID_HANDLE

NON_BLOCKING = 1
BLOCKING = 0
LEGACY = driver.CUstream(1)
PER_THREAD = driver.CUstream(2)
NULL = driver.CUstream(0)

PATIENCE = 30.0 if SIMULATED else 100.0  # seconds until a test gives up; processes share a GPU
A_WHILE = 0.05  # seconds after which what has not happened is taken to be held up


# cuda-bindings that answer 0 for the device ordinal of any memory.
_VERSION = tuple(int(part) for part in cuda.bindings.__version__.split(".")[:3])
CUDA_12 = _VERSION[0] == 12  # some functions take or answer less
told_ordinals = pytest.mark.skipif(
    (12, 9, 6) <= _VERSION <= (12, 9, 8) or (13, 2, 0) <= _VERSION < (13, 4, 4),
    reason="these cuda-bindings answer 0 for any device ordinal",
)


def ok(answer: tuple[Any, ...]) -> Any:
    """The values of a call that has to succeed."""
    result, *values = answer
    assert result == SUCCESS, result
    return values[0] if len(values) == 1 else tuple(values)


def becomes(expected: object, look: Callable[[], object]) -> bool:
    """Whether `look` answers `expected` before the patience ends."""
    deadline = time.monotonic() + PATIENCE
    while look() != expected:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def finishes(stream: driver.CUstream) -> bool:
    """Whether the stream runs empty, without an unbounded driver call."""
    return becomes((SUCCESS,), lambda: driver.cuStreamQuery(stream))


def completes(event: driver.CUevent) -> bool:
    return becomes((SUCCESS,), lambda: driver.cuEventQuery(event))


def stays(expected: object, look: Callable[[], object]) -> bool:
    """Whether `look` answers `expected` for a while."""
    deadline = time.monotonic() + A_WHILE
    while time.monotonic() < deadline:
        if look() != expected:
            return False
        time.sleep(0.005)
    return True


def program(code: str, *arguments: str, **environment: str) -> str:
    """What a program prints. It finds the driver of these tests as the loader does."""
    variables = {**os.environ, **environment}
    if SIMULATED:
        variables["LD_LIBRARY_PATH"] = testing.library_path()
    done = subprocess.run(
        [sys.executable, "-S", "-c", code, *arguments],
        env=variables,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout


class Background:
    """A call on another thread, which may block. Never waits for it without a bound."""

    def __init__(self, call: Callable[[], Any], context: driver.CUcontext | None = None) -> None:
        self._call = call
        self._context = context
        self._answer: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            if self._context is None:
                self._answer = self._call()
            else:
                with current(self._context):
                    self._answer = self._call()
        except BaseException as error:
            self._error = error

    @property
    def is_blocked(self) -> bool:
        self._thread.join(A_WHILE)
        return self._thread.is_alive()

    @property
    def answer(self) -> Any:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "the call did not return"
        if self._error is not None:
            raise self._error
        return self._answer


def elsewhere(call: Callable[[], Any], context: driver.CUcontext | None = None) -> Any:
    """The answer of a call on another thread: without a current context, or with the given one."""
    return Background(call, context).answer


@contextmanager
def current(context: driver.CUcontext) -> Iterator[None]:
    ok(driver.cuCtxPushCurrent(context))
    try:
        yield
    finally:
        ok(driver.cuCtxPopCurrent())


@contextmanager
def no_context() -> Iterator[None]:
    """Inside, the calling thread has no current context."""
    popped = []
    while int(ok(driver.cuCtxGetCurrent())):
        popped.append(ok(driver.cuCtxPopCurrent()))
    try:
        yield
    finally:
        for context in reversed(popped):
            ok(driver.cuCtxPushCurrent(context))


@contextmanager
def capture_mode(mode: driver.CUstreamCaptureMode) -> Iterator[None]:
    before = ok(driver.cuThreadExchangeStreamCaptureMode(mode))
    try:
        yield
    finally:
        ok(driver.cuThreadExchangeStreamCaptureMode(before))


class Word:
    """A word of pinned memory that streams write and the test reads."""

    def __init__(self, address: int, width: int = 4) -> None:
        self.address = address
        self._type = ctypes.c_uint32 if width == 4 else ctypes.c_uint64

    @property
    def value(self) -> int:
        return int(self._type.from_address(self.address).value)

    @value.setter
    def value(self, value: int) -> None:
        self._type.from_address(self.address).value = value

    def write(self, stream: driver.CUstream, value: int) -> None:
        ok(driver.cuStreamWriteValue32(stream, self.address, value, 0))


Mode = driver.CUstreamCaptureMode
GLOBAL = Mode.CU_STREAM_CAPTURE_MODE_GLOBAL
THREAD_LOCAL = Mode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
RELAXED = Mode.CU_STREAM_CAPTURE_MODE_RELAXED
MODES = {"global": GLOBAL, "thread-local": THREAD_LOCAL, "relaxed": RELAXED}

Status = driver.CUstreamCaptureStatus
NOT_CAPTURING = Status.CU_STREAM_CAPTURE_STATUS_NONE
ACTIVE = Status.CU_STREAM_CAPTURE_STATUS_ACTIVE
INVALIDATED = Status.CU_STREAM_CAPTURE_STATUS_INVALIDATED

UNSUPPORTED = Result.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
CAPTURE_INVALIDATED = Result.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
IMPLICIT = Result.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT


class Capture:
    """A capture that is ended, and its graph destroyed, whatever the test does."""

    def __init__(self, stream: driver.CUstream, mode: driver.CUstreamCaptureMode = GLOBAL) -> None:
        self.stream = stream
        self._mode = mode
        self._ended = False

    def __enter__(self) -> Self:
        ok(driver.cuStreamBeginCapture(self.stream, self._mode))
        return self

    def __exit__(self, *exc_info: object) -> None:
        if not self._ended:
            result, graph = driver.cuStreamEndCapture(self.stream)
            if result == SUCCESS:
                ok(driver.cuGraphDestroy(graph))

    @property
    def status(self) -> driver.CUstreamCaptureStatus:
        return ok(driver.cuStreamIsCapturing(self.stream))

    def end(self) -> tuple[driver.CUresult, driver.CUgraph]:
        """The answer of the end: the caller destroys the graph."""
        self._ended = True
        result, graph = driver.cuStreamEndCapture(self.stream)
        return result, graph

    def end_result(self) -> driver.CUresult:
        result, graph = self.end()
        if result == SUCCESS:
            ok(driver.cuGraphDestroy(graph))
        return result


def node_count(graph: driver.CUgraph) -> int:
    return int(ok(driver.cuGraphGetNodes(graph, 0))[1])


def nodes_of(graph: driver.CUgraph) -> list[driver.CUgraphNode]:
    nodes, count = ok(driver.cuGraphGetNodes(graph, node_count(graph)))
    return list(nodes[: int(count)])


def node_types(graph: driver.CUgraph) -> list[int]:
    """The types of its nodes, sorted."""
    return sorted(int(ok(driver.cuGraphNodeGetType(node))) for node in nodes_of(graph))


class Graphs:
    """Makes graphs and executables, which are destroyed after the test."""

    def __init__(self) -> None:
        self._made: list[tuple[Callable[[Any], tuple[driver.CUresult]], Any]] = []

    def create(self) -> driver.CUgraph:
        return self.keep(ok(driver.cuGraphCreate(0)))

    def keep(self, graph: driver.CUgraph) -> driver.CUgraph:
        self._made.append((driver.cuGraphDestroy, graph))
        return graph

    def capture(self, stream: driver.CUstream, queue: Callable[[], object]) -> driver.CUgraph:
        """A graph of what a function queues."""
        with Capture(stream, RELAXED) as capture:
            queue()
            return self.keep(ok(capture.end()))

    def instantiate(self, graph: driver.CUgraph, flags: int = 0) -> driver.CUgraphExec:
        executable = ok(driver.cuGraphInstantiate(graph, flags))
        self._made.append((driver.cuGraphExecDestroy, executable))
        return executable

    def destroy(self) -> None:
        while self._made:
            destroy, handle = self._made.pop()
            ok(destroy(handle))


# add_to(int *x, int n, int value): one thread for each element.
ADD_PTX = b"""
.version 6.4
.target sm_75
.address_size 64

.visible .entry conformance_add(
    .param .u64 x,
    .param .u32 n,
    .param .u32 value
)
{
    .reg .pred %p;
    .reg .b32 %r<7>;
    .reg .b64 %rd<5>;

    ld.param.u64 %rd1, [x];
    ld.param.u32 %r1, [n];
    ld.param.u32 %r2, [value];
    mov.u32 %r3, %ctaid.x;
    mov.u32 %r4, %ntid.x;
    mov.u32 %r5, %tid.x;
    mad.lo.s32 %r6, %r3, %r4, %r5;
    setp.ge.s32 %p, %r6, %r1;
    @%p bra done;
    cvta.to.global.u64 %rd2, %rd1;
    mul.wide.s32 %rd3, %r6, 4;
    add.s64 %rd4, %rd2, %rd3;
    ld.global.u32 %r3, [%rd4];
    add.s32 %r3, %r3, %r2;
    st.global.u32 [%rd4], %r3;
done:
    ret;
}
\0"""


@testing.kernel("conformance_add")
def add(grid, block, x: testing.Pointer, n: np.int32, value: np.int32):
    threads = min(int(n), grid[0] * block[0])
    if threads:
        x.array(threads, np.int32)[:] += value
