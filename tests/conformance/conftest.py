"""Fixtures: a current context, and streams, events and memory that are destroyed after the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from cuda.bindings import driver, runtime

from conformance.support import NON_BLOCKING, SUCCESS, Background, Graphs, Word, current, ok
from conftest import SIMULATED
from userstream import testing


def free(call: Callable[[], tuple[driver.CUresult]]) -> None:
    """Free memory, which waits for the device; but not forever, if a test left a stream held."""
    testing.reset()
    assert Background(call).answer == (SUCCESS,)


MakeStream = Callable[..., driver.CUstream]
MakeEvent = Callable[..., driver.CUevent]
MakeMemory = Callable[..., int]


@pytest.fixture(scope="session")
def contexts() -> Iterator[list[driver.CUcontext]]:
    """The primary contexts of all devices."""
    ok(driver.cuInit(0))
    count = ok(driver.cuDeviceGetCount())
    yield [ok(driver.cuDevicePrimaryCtxRetain(device)) for device in range(count)]
    # A GPU that many processes share takes minutes to release one: the end of the process does it.
    for device in range(count if SIMULATED else 0):
        ok(Background(lambda device=device: driver.cuDevicePrimaryCtxRelease(device)).answer)


@pytest.fixture(autouse=True)
def context(contexts: list[driver.CUcontext]) -> Iterator[driver.CUcontext]:
    """The primary context of device 0, current in the test."""
    testing.reset()
    with current(contexts[0]):
        yield contexts[0]
        assert int(ok(driver.cuCtxGetCurrent())) == int(contexts[0]), "the test changed the context"
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
        assert ok(driver.cuThreadExchangeStreamCaptureMode(mode)) == mode
        testing.reset()


@pytest.fixture
def other_context(contexts: list[driver.CUcontext]) -> driver.CUcontext:
    """The primary context of device 1."""
    if len(contexts) < 2:
        pytest.skip("needs two devices")
    return contexts[1]


@pytest.fixture
def make_stream(context: driver.CUcontext) -> Iterator[MakeStream]:
    made = []

    def make(
        flags: int = NON_BLOCKING, priority: int = 0, context: driver.CUcontext = context
    ) -> driver.CUstream:
        with current(context):
            made.append(ok(driver.cuStreamCreateWithPriority(flags, priority)))
        return made[-1]

    yield make
    for stream in made:
        driver.cuStreamDestroy(stream)


@pytest.fixture
def stream(make_stream: MakeStream) -> driver.CUstream:
    """A non-blocking stream."""
    return make_stream()


@pytest.fixture
def make_event(context: driver.CUcontext) -> Iterator[MakeEvent]:
    made = []

    def make(flags: int = 2, context: driver.CUcontext = context) -> driver.CUevent:
        with current(context):
            made.append(ok(driver.cuEventCreate(flags)))
        return made[-1]

    yield make
    for event in made:
        driver.cuEventDestroy(event)


@pytest.fixture
def event(make_event: MakeEvent) -> driver.CUevent:
    """An event without timing."""
    return make_event()


@pytest.fixture
def make_memory(context: driver.CUcontext) -> Iterator[MakeMemory]:
    """Device memory."""
    made = []

    def make(size: int = 256, context: driver.CUcontext = context) -> int:
        with current(context):
            made.append(ok(driver.cuMemAlloc(size)))
        return int(made[-1])

    yield make
    for address in made:
        free(lambda address=address: driver.cuMemFree(address))


@pytest.fixture
def memory(make_memory: MakeMemory) -> int:
    """256 bytes of device memory."""
    return make_memory()


@pytest.fixture
def pinned(context: driver.CUcontext) -> Iterator[int]:
    """The address of 256 zero bytes of pinned host memory."""
    address = ok(driver.cuMemHostAlloc(256, driver.CU_MEMHOSTALLOC_PORTABLE))
    Word(address, 8).value = 0
    for offset in range(0, 256, 8):
        Word(address + offset, 8).value = 0
    yield address
    free(lambda: driver.cuMemFreeHost(address))


@pytest.fixture
def word(pinned: int) -> Word:
    """A word of pinned memory, zero."""
    return Word(pinned)


@pytest.fixture
def graphs(context: driver.CUcontext) -> Iterator[Graphs]:
    """Makes graphs and executables."""
    made = Graphs()
    yield made
    made.destroy()


@pytest.fixture
def no_runtime_error(context: driver.CUcontext) -> Iterator[None]:
    """The runtime remembers the last error: forget it before the test and after it."""
    runtime.cudaGetLastError()
    yield
    runtime.cudaGetLastError()
