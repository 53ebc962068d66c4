"""Helpers of several test modules: device memory, arrays, threads, processes."""

from __future__ import annotations

import gc
import importlib
import operator
import os
import secrets
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar
from uuid import UUID

import numpy as np
import pytest
from cuda.bindings import driver
from cuda.core.graph import Graph, GraphDefinition

import standins
import userstream as us
from userstream import testing

T = TypeVar("T")


def checked(answer: tuple[Any, ...]) -> Any:
    """Return what a driver function gave, and insist that it succeeded."""
    status, *values = answer
    assert status == driver.CUresult.CUDA_SUCCESS, status
    return values[0] if len(values) == 1 else values


def current_context() -> int:
    return int(checked(driver.cuCtxGetCurrent()))


def device_count() -> int:
    checked(driver.cuInit(0))
    return int(checked(driver.cuDeviceGetCount()))


def driver_version() -> int:
    return int(checked(driver.cuDriverGetVersion()))


def device_attribute(which: driver.CUdevice_attribute, device: int = 0) -> int:
    checked(driver.cuInit(0))
    return int(checked(driver.cuDeviceGetAttribute(which, checked(driver.cuDeviceGet(device)))))


def device_uuid(device: int) -> str:
    """Return the UUID of a device as ``nvidia-smi -L`` shows it."""
    checked(driver.cuInit(0))
    uuid = checked(driver.cuDeviceGetUuid(checked(driver.cuDeviceGet(device))))
    return f"GPU-{UUID(bytes=bytes(uuid.bytes))}"


def primary_context(device: int) -> driver.CUcontext:
    """Return the primary context of a device, which stays retained."""
    checked(driver.cuInit(0))
    return checked(driver.cuDevicePrimaryCtxRetain(checked(driver.cuDeviceGet(device))))


@contextmanager
def entered(context: driver.CUcontext) -> Iterator[None]:
    """Make a context current for a block."""
    before = checked(driver.cuCtxGetCurrent())
    checked(driver.cuCtxSetCurrent(context))
    try:
        yield
    finally:
        checked(driver.cuCtxSetCurrent(before))


def device_current(device: int = 0) -> AbstractContextManager[None]:
    """Make the primary context of a device current inside."""
    return entered(primary_context(device))


def instantiated(graph: GraphDefinition, device: int = 0) -> Graph:
    """Make a graph executable, which takes a current context."""
    with device_current(device):
        return graph.instantiate()


def pooled_events(device: int = 0) -> list[int]:
    """Return the events in the pool of a device."""
    return [*us.get_stream(device)._resolve().pool.free]


def reclaim(stream: us.Stream) -> None:
    """Let no call ask for the blocking event of an earlier wait: an injection would hit that."""
    assert eventually(stream._resolve().completion().is_done)


@contextmanager
def another_context(device: int = 0) -> Iterator[None]:
    """Make a context that is not the primary one, current inside and destroyed at the end."""
    import cuda.bindings

    ordinal = checked(driver.cuDeviceGet(device))
    old = cuda.bindings.__version__.startswith("12.")
    context = checked(driver.cuCtxCreate(*((0, ordinal) if old else (None, 0, ordinal))))
    try:
        yield
    finally:
        checked(driver.cuCtxDestroy(context))


@contextmanager
def device_memory(device: int = 0, size: int = 256) -> Iterator[int]:
    """Allocate device memory in the primary context; yield its address."""
    context = primary_context(device)
    with entered(context):
        pointer = checked(driver.cuMemAlloc(size))
    try:
        yield int(pointer)
    finally:
        with entered(context):
            checked(driver.cuMemFree(pointer))


def needs_host_pools() -> None:
    """Skip a test where a real driver says that it has no pools of host memory."""
    from conftest import SIMULATED

    which = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HOST_NUMA_MEMORY_POOLS_SUPPORTED
    if not device_attribute(which):
        assert not SIMULATED, "the simulated driver has them"
        pytest.skip("this driver has no pools of host memory")


@contextmanager
def pinned_memory(device: int = 0, size: int = 256) -> Iterator[int]:
    context = primary_context(device)
    with entered(context):
        address = int(checked(driver.cuMemHostAlloc(size, 0)))
    try:
        yield address
    finally:
        with entered(context):
            checked(driver.cuMemFreeHost(address))


@contextmanager
def managed_memory(device: int = 0, size: int = 256) -> Iterator[int]:
    context = primary_context(device)
    flags = driver.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL
    with entered(context):
        pointer = checked(driver.cuMemAllocManaged(size, flags))
    try:
        yield int(pointer)
    finally:
        with entered(context):
            checked(driver.cuMemFree(pointer))


def address(array: np.ndarray) -> int:
    """Return the address of the first element of an array on the host."""
    return int(array.__array_interface__["data"][0])


def fill(stream: us.Stream, address: int, value: int, size: int = 256) -> None:
    """Queue a write of one byte everywhere."""
    checked(driver.cuMemsetD8Async(address, value, size, stream._live()))


def copy(stream: us.Stream, destination: int, source: int, size: int = 256) -> None:
    """Queue a copy on the device."""
    checked(driver.cuMemcpyDtoDAsync(destination, source, size, stream._live()))


def upload(address: int, source: object, size: int) -> None:
    """Write device memory of the current context, for whatever stream comes next.

    From pageable memory alone the call may return before the device has it.
    """
    checked(driver.cuMemcpyHtoD(address, source, size))
    checked(driver.cuStreamSynchronize(driver.CUstream(driver.CU_STREAM_LEGACY)))


def write(address: int, array: np.ndarray, device: int = 0) -> None:
    """Write the elements of an array to memory of a device."""
    with device_current(device):
        upload(address, np.ascontiguousarray(array), array.nbytes)


def content(address: int, size: int = 256) -> set[int]:
    """Return the bytes that memory consists of, after the work that is queued on its device."""
    host = bytearray(size)
    which = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    with device_current(int(checked(driver.cuPointerGetAttribute(which, address)))):
        checked(driver.cuCtxSynchronize())
        checked(driver.cuMemcpyDtoH(host, address, size))
    return set(host)


class CAI:
    """An array with nothing but ``__cuda_array_interface__``; it says that nothing is pending."""

    def __init__(self, address: int, shape: tuple[int, ...] = (4,), **more: Any) -> None:
        self.interface = {
            "shape": shape,
            "typestr": "<f4",
            "data": (address, False),
            "version": 3,
            "stream": -1,
            **more,
        }

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.interface


def array(address: int, stream: us.Stream | None = None, **more: Any) -> CAI:
    """Return an array that names its producer's stream, or that nothing is pending."""
    return CAI(address, stream=-1 if stream is None else int(stream._live()), **more)


class DLPack:
    """An array with nothing but the device query of DLPack."""

    def __init__(self, kind: Any, ordinal: Any) -> None:
        self.answer = (kind, ordinal)

    def __dlpack_device__(self) -> tuple[Any, Any]:
        return self.answer

    def __dlpack__(self, **_: Any) -> Any:
        raise BufferError("this one is not exported")


class Delegating(standins.DrJitArray, CAI):
    """An array that says by its interface where it is, and by DLPack how it is ordered.

    It is of a type that is known to order a consumer.
    """

    def __init__(self, address: int, producer: us.Stream, **more: Any) -> None:
        super().__init__(address, **{"stream": None, **more})
        self.producer = producer

    def __dlpack_device__(self) -> tuple[Any, Any]:
        return (2, self.producer.device.device_id)

    def __dlpack__(self, *, stream: int, **_: Any) -> object:
        us.Stream.from_handle(stream).wait(self.producer)
        return object()


class Exporting(standins.DrJitArray):
    """A DLPack array whose type is known to order a consumer's stream after its own stream."""

    class Capsule:
        pass

    def __init__(self, stream: us.Stream, device: int = 0) -> None:
        self.stream, self.device = stream, device
        self.asked: list[int] = []  # the streams of consumers
        self.capsule: weakref.ref[Any] | None = None

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, self.device)

    def __dlpack__(self, *, stream: int) -> Any:
        self.asked.append(stream)
        us.Stream.from_handle(stream).wait(self.stream)
        capsule = self.Capsule()
        self.capsule = weakref.ref(capsule)
        return capsule


def on(device: int) -> DLPack:
    """Return a buffer on a device."""
    return DLPack(2, device)


def in_thread(function: Callable[[], T]) -> T:
    """Run a function in a new thread, which has no context, and return what it returns."""
    with running(function) as result:
        pass
    return result()


def in_threads(function: Callable[[], object], count: int) -> None:
    """Run a function in several threads at once, and wait for their ends."""
    threads = [threading.Thread(target=function) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def virtual_memory(device: int = 0) -> tuple[driver.CUmemAllocationProp, driver.CUmemAccessDesc]:
    """Describe memory of a device for ``cuMemCreate``, and its use for ``cuMemSetAccess``."""
    memory, access = driver.CUmemAllocationProp(), driver.CUmemAccessDesc()
    memory.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    for location in (memory.location, access.location):
        location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = device
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return memory, access


@contextmanager
def running(function: Callable[[], T]) -> Iterator[Callable[[], T]]:
    """Run a function in a thread beside the block; what is yielded waits for its result."""
    outcome: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(function())
        except BaseException as error:
            errors.append(error)

    def result() -> T:
        thread.join(30)
        if thread.is_alive():
            frame = sys._current_frames()[thread.ident]
            raise AssertionError("it did not end:\n" + "".join(traceback.format_stack(frame)))
        if errors:
            raise errors[0]
        return outcome[0]

    result.thread = thread = threading.Thread(target=run, daemon=True)  # type: ignore[attr-defined]
    thread.start()
    try:
        yield result
    finally:
        thread.join(30)


def is_blocked(result: Any, seconds: float = 0.05) -> bool:
    """Return whether a thread of `running` is still at work after a while."""
    result.thread.join(seconds)
    return bool(result.thread.is_alive())


def is_held(stream: us.Stream) -> bool:
    """Return whether a stream is still busy after a while."""
    return not eventually(lambda: stream.is_done, 0.03)


def waits_for(stream: us.Stream, use: Callable[[], us.Stream]) -> bool:
    """Return whether the stream that uses a buffer comes after the work queued on a stream."""
    with testing.latch(stream) as latch:
        user = use()
        held = is_held(user)
        latch.release()
        user.sync(timeout=30)
    return held


@contextmanager
def untraced() -> Iterator[None]:
    """Measure no coverage, which takes a lock of its own: a Ctrl-C in there is a deadlock."""
    tracer = sys.gettrace()
    sys.settrace(None)
    try:
        yield
    finally:
        sys.settrace(tracer)


def eventually(condition: Callable[[], bool], seconds: float = 30) -> bool:
    """Wait until a condition holds; tell whether it did in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


# Whether tests repeat what they repeat as often as a night allows.
THOROUGH = os.environ.get("USERSTREAM_THOROUGH") == "1"

# For programs that must run without coverage: its tracer imports modules, writes a file, and keeps
# locks locked if a signal handler raises while it holds them.
UNTRACED = {"COVERAGE_PROCESS_START": "", "COVERAGE_PROCESS_CONFIG": ""}


def run_python(
    code: str, *arguments: str, simulate: int | None = 2, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter, on the same driver as these tests.

    `simulate` is the number of simulated devices; `None` calls nothing beforehand.
    """
    from conftest import SIMULATED

    start = f"from userstream import testing; testing.simulate({simulate})\n"
    text = (start if SIMULATED and simulate is not None else "") + textwrap.dedent(code)
    process = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-c", text, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    try:
        out, err = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)  # it says where it hangs
        raise AssertionError("the process hangs:\n" + "\n".join(process.communicate())) from None
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def framework(name: str) -> types.ModuleType:
    """Return a module of a real framework, or skip the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except ImportError as error:
            pytest.skip(f"{name} cannot be imported: {error}")


def seeds(count: int) -> Iterator[int]:
    """Yield the seeds of the cases that a test draws: so many that are the same in every run.

    ``USERSTREAM_FUZZ`` seconds others follow, and ``USERSTREAM_FUZZ_SEED`` is the only one instead.
    """
    given = os.environ.get("USERSTREAM_FUZZ_SEED")
    if given is not None:
        yield int(given)
        return
    yield from range(count)
    end = time.monotonic() + float(os.environ.get("USERSTREAM_FUZZ", "0"))
    while time.monotonic() < end:
        yield secrets.randbits(40)


def grown(work: Callable[[], object], given: Sequence[object]) -> int:
    """Do some work; insist on no more references to `given`; return the blocks Python has more.

    The watcher holds the last objects of earlier work and of this work a bit longer.
    """
    references, blocks = [*map(sys.getrefcount, given)], sys.getallocatedblocks()
    work()
    blocks = sys.getallocatedblocks() - blocks
    assert eventually(lambda: all(map(operator.ge, references, map(sys.getrefcount, given)))), (
        references,
        [*map(sys.getrefcount, given)],
    )
    return blocks


def refused_in_a_child(uses: str) -> None:
    """Insist that a forked child gets `ForkedError` from each of some calls on a ``stream``."""
    done = run_python(
        f"""
        import os
        import userstream as us

        stream = us.Stream.create(0)
        event = stream.record()
        child = os.fork()
        if child == 0:
            for use in ({uses}):
                try:
                    use()
                except us.ForkedError:
                    continue
                os._exit(1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        """
    )
    assert done.returncode == 0, done.stderr


def held_while(
    stream: us.Stream,
    use: Callable[[Any], object],
    memory: int,
    producer: us.Stream | None = None,
) -> list[bool]:
    """Return whether a buffer is alive while the stream is held, and whether afterwards."""
    buffer = array(memory, producer)
    alive = weakref.ref(buffer)
    with testing.latch(stream) as latch:
        use(buffer)
        del buffer
        gc.collect()
        during = alive() is not None
        latch.release()
    eventually(lambda: alive() is None)
    return [during, alive() is not None]
