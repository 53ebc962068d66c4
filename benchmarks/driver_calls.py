"""Times of single driver calls, the lower bound for everything that is built on these calls."""

from __future__ import annotations

from cuda import core
from cuda.bindings import driver
from cuda.core import Device

import userstream as us
from benchmarks.harness import Comparison, Comparisons, Run, case

NBYTES = 4096


@case
def functions(run: Run) -> Comparisons:
    del run
    stream = us.get_stream(0)
    other = Device(0).create_stream()
    event = other.record()
    handle = stream.handle
    usual = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL  # so nothing is changed
    exchange = driver.cuThreadExchangeStreamCaptureMode
    buffer = Device(0).allocate(2 * NBYTES, stream=other)
    source, destination = int(buffer.handle), int(buffer.handle) + NBYTES

    yield Comparison(
        "driver functions, as cuda.bindings and cuda.core call them",
        {
            "nothing (a lambda)": lambda: None,
            "cuStreamIsCapturing": lambda: driver.cuStreamIsCapturing(handle),
            "cuEventRecord": lambda: core.Stream.record(other, event),
            "cuStreamWaitEvent": lambda: core.Stream.wait(stream, event),
            "cuStreamQuery": lambda: driver.cuStreamQuery(handle),
            "cuCtxGetCurrent": driver.cuCtxGetCurrent,
            "cuThreadExchangeStreamCaptureMode": lambda: exchange(usual),
            "cuMemcpyAsync": lambda: driver.cuMemcpyAsync(destination, source, NBYTES, handle),
        },
        number=500,
        plain=True,
    )
    buffer.close()
