"""Many threads, many devices, all at once. ``USERSTREAM_LOAD_SECONDS`` makes it longer.

A program of its own: nothing is alive in it but what it made, so it can count what is left.
"""

from __future__ import annotations

import ctypes
import os
import random
import threading
import time

import numpy as np
from cuda.bindings import driver

from userstream import testing
from userstream.testing import _simulated

SECONDS = float(os.environ.get("USERSTREAM_LOAD_SECONDS", "1"))
THREADS = 12

# A free waits for streams that are held, and what would let go of them may wait for the free.
no_hold = threading.Lock()


def ok(answer):
    result, *values = answer
    assert result == driver.CUresult.CUDA_SUCCESS, result
    return values[0] if len(values) == 1 else tuple(values)


@testing.kernel("load_add")
def load_add(grid, block, x: testing.Pointer, n: np.int32):
    x.array(n, np.int32)[:] += 1


class Worker:
    """Uses all that the driver offers, in random order, and checks what comes out."""

    def __init__(self, seed, devices, deadline):
        self.random = random.Random(seed)
        self.devices = devices
        self.deadline = deadline
        self.rounds = 0

    def __call__(self):
        while time.monotonic() < self.deadline:
            device = self.random.randrange(self.devices)
            context = ok(driver.cuDevicePrimaryCtxRetain(device))
            ok(driver.cuCtxPushCurrent(context))
            try:
                self.random.choice([self.chain, self.memory, self.graph, self.hold, self.kernel])()
            finally:
                ok(driver.cuCtxPopCurrent())
                ok(driver.cuDevicePrimaryCtxRelease(device))
            self.rounds += 1

    def chain(self):
        """Values written on two streams that wait for each other come in order."""
        first, second = ok(driver.cuStreamCreate(1)), ok(driver.cuStreamCreate(0))
        event = ok(driver.cuEventCreate(2))
        address = ok(driver.cuMemHostAlloc(64, 0))
        for value in range(10):
            ok(driver.cuStreamWriteValue32(first, address, value, 0))
            ok(driver.cuEventRecord(event, first))
            ok(driver.cuStreamWaitEvent(second, event, 0))
            ok(driver.cuStreamWaitValue32(second, address, value, 1))
            ok(driver.cuEventRecord(event, second))
            ok(driver.cuStreamWaitEvent(first, event, 0))
        ok(driver.cuStreamSynchronize(first))
        ok(driver.cuEventSynchronize(event))
        ok(driver.cuEventDestroy(event))
        ok(driver.cuStreamDestroy(second))
        ok(driver.cuStreamDestroy(first))
        with no_hold:
            ok(driver.cuMemFreeHost(address))

    def kernel(self):
        """Launches by a library of its own, and once more as a graph."""
        stream = ok(driver.cuStreamCreate(1))
        library = ok(driver.cuLibraryLoadData(b"any", [], [], 0, [], [], 0))
        kernel = ok(driver.cuLibraryGetKernel(library, b"load_add"))
        function = ok(driver.cuKernelGetFunction(kernel))
        count = self.random.randrange(1, 1 << 12)
        address = ok(driver.cuMemAllocAsync(4 * count, stream))
        ok(driver.cuMemsetD32Async(address, 0, count, stream))
        arguments = (int(address), count), (ctypes.c_void_p, ctypes.c_int)
        launches = self.random.randrange(1, 8)
        for _ in range(launches):
            shape = 1, 1, 1, 1, 1, 1, 0
            ok(driver.cuLaunchKernel(function, *shape, stream, arguments, 0))
        ok(driver.cuLibraryUnload(library))  # what is queued runs nevertheless
        host = np.empty(count, np.int32)
        ok(driver.cuMemcpyDtoHAsync(host.ctypes.data, address, host.nbytes, stream))
        ok(driver.cuMemFreeAsync(address, stream))
        ok(driver.cuStreamSynchronize(stream))
        assert (host == launches).all()
        ok(driver.cuStreamDestroy(stream))

    def memory(self):
        stream = ok(driver.cuStreamCreate(1))
        size = self.random.randrange(1, 1 << 16)
        value = self.random.randrange(256)
        source = ok(driver.cuMemAllocAsync(size, stream))
        destination = ok(driver.cuMemAllocAsync(size, stream))
        host = bytearray(size)
        view = (ctypes.c_char * size).from_buffer(host)
        ok(driver.cuMemsetD8Async(source, value, size, stream))
        ok(driver.cuMemcpyDtoDAsync(destination, source, size, stream))
        ok(driver.cuMemcpyDtoHAsync(ctypes.addressof(view), destination, size, stream))
        ok(driver.cuMemFreeAsync(source, stream))
        ok(driver.cuMemFreeAsync(destination, stream))
        ok(driver.cuStreamDestroy(stream))
        del view
        assert host == bytes([value]) * size

    def graph(self):
        stream, event = ok(driver.cuStreamCreate(1)), ok(driver.cuEventCreate(2))
        address = ok(driver.cuMemHostAlloc(64, 0))
        ok(driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode(2)))
        ok(driver.cuStreamWriteValue32(stream, address, 5, 0))
        ok(driver.cuEventRecord(event, stream))
        graph = ok(driver.cuStreamEndCapture(stream))
        executable = ok(driver.cuGraphInstantiate(graph, 0))
        ok(driver.cuGraphDestroy(graph))
        for _ in range(3):
            ok(driver.cuGraphLaunch(executable, stream))
        ok(driver.cuGraphExecDestroy(executable))
        ok(driver.cuStreamSynchronize(stream))
        ok(driver.cuStreamDestroy(stream))
        ok(driver.cuEventDestroy(event))
        with no_hold:
            ok(driver.cuMemFreeHost(address))

    def hold(self):
        stream, event = ok(driver.cuStreamCreate(1)), ok(driver.cuEventCreate(2))
        with no_hold, testing.latch(stream) as held:
            ok(driver.cuEventRecord(event, stream))
            assert driver.cuEventQuery(event)[0] == driver.CUresult.CUDA_ERROR_NOT_READY
            held.release()
            ok(driver.cuEventSynchronize(event))
        ok(driver.cuStreamDestroy(stream))
        ok(driver.cuEventDestroy(event))


def main():
    testing.simulate(devices=4)
    ok(driver.cuInit(0))
    devices = ok(driver.cuDeviceGetCount())
    kept = [ok(driver.cuDevicePrimaryCtxRetain(device)) for device in range(devices)]
    before = _simulated.stats()
    deadline = time.monotonic() + SECONDS
    workers = [Worker(seed, devices, deadline) for seed in range(THREADS)]
    errors = []

    def run(worker):
        try:
            worker()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(worker,), daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS + 30)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    assert errors == []
    assert all(worker.rounds for worker in workers)
    assert len(kept) == devices
    after = _simulated.stats()
    assert (after.streams, after.events) == (before.streams, before.events)
    assert after.holds == before.holds
    assert after.captures == before.captures
    for device in range(devices):
        ok(driver.cuDevicePrimaryCtxRelease(device))


if __name__ == "__main__":
    main()
