"""Host waits: what they cost when there is nothing to wait for, and when there is."""

from __future__ import annotations

import time

from cuda import core
from cuda.core import Device

import userstream as us
from benchmarks.harness import Comparison, Comparisons, Run, case
from benchmarks.limits import at_most
from benchmarks.work import Spinner

SYNC = "cuda.core.Stream.sync()"
TORCH = "torch.cuda.synchronize()"
DRIVER = ("cuStreamIsCapturing", "cuStreamQuery", *["cuThreadExchangeStreamCaptureMode"] * 2)


def core_stream(stream: us.Stream) -> core.Stream:
    """Return the same stream without our methods."""
    return core.Stream.from_handle(int(stream.handle))


@case
def idle(run: Run) -> Comparisons:
    del run
    with Device(0).allocate(64, stream=Device(0).create_stream()) as buffer:
        theirs = core_stream(us.get_stream(buffer))
        calls = {"us.wait(buffer)": lambda: us.wait(buffer), SYNC: theirs.sync}
        limits = (at_most(1.6, SYNC, stretch=1.45),)
        yield Comparison("wait(cuda.core buffer), idle", calls, limits, driver=DRIVER)


@case
def idle_torch(run: Run) -> Comparisons:
    torch = run.need("torch")
    tensor = torch.zeros(16, device="cuda:0")
    theirs = core_stream(us.get_stream(tensor))
    yield Comparison(
        "wait(tensor), idle",
        {
            "us.wait(tensor)": lambda: us.wait(tensor),
            SYNC: theirs.sync,
            TORCH: torch.cuda.synchronize,
        },
        (at_most(1.6, SYNC, stretch=1.45), at_most(0.4, TORCH)),
        driver=DRIVER,
    )


@case
def busy(run: Run) -> Comparisons:
    torch = run.need("torch")
    tensor = torch.zeros(16, device="cuda:0")
    stream = us.get_stream(tensor)
    yield Comparison(
        "wait(tensor), 200 µs of work left",
        {
            "us.wait(tensor)": lambda: us.wait(tensor),
            'us.wait(tensor, policy="spin")': lambda: us.wait(tensor, policy="spin"),
            SYNC: core_stream(stream).sync,
        },
        (at_most(1.1, SYNC),),
        number=1,
        rounds=101,
        before=Spinner(torch).on(stream, 200e-6),
    )


@case
def all_gpus(run: Run) -> Comparisons:
    torch = run.need("torch")
    us.close()  # of the streams that others left, none is waited for
    streams = [us.get_stream(device) for device in range(torch.cuda.device_count())]
    queues = [Spinner(torch, device).on(stream, 50e-3) for device, stream in enumerate(streams)]

    def all_of_them() -> float:
        for queue in queues:
            queue()
        begin = time.perf_counter()
        us.wait_all()
        return time.perf_counter() - begin

    def slowest() -> float:
        took: list[float] = []
        for queue, stream in zip(queues, streams, strict=True):
            queue()
            begin = time.perf_counter()
            core_stream(stream).sync()
            took.append(time.perf_counter() - begin)
        return max(took)

    alone = "the slowest stream alone, sync()"
    yield Comparison(
        f"wait_all of {len(streams)} GPU{'s' * (len(streams) > 1)}, 50 ms of work on each",
        {"us.wait_all()": all_of_them, alone: slowest},
        (at_most(1.05, alone),),
        rounds=11,
        returns=True,
    )
