"""Order with the producer of a buffer: `acquire` and `borrow`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cuda.bindings import driver
from cuda.core import Device

import userstream as us
from benchmarks.harness import Comparison, Comparisons, Run, case
from benchmarks.limits import at_most
from benchmarks.work import Interface, external
from userstream.typing import Producer

EDGE = ("cuStreamIsCapturing", "cuStreamIsCapturing", "cuEventRecord", "cuStreamWaitEvent")


def borrowing(*buffers: Any, producer: Producer = "auto") -> Callable[[], None]:
    """Return what begins and ends a borrow."""

    def borrow() -> None:
        with us.borrow(*buffers, producer=producer):
            pass

    return borrow


def beside_torch(torch: Any, where: str) -> Comparisons:
    """Compare with ``wait_stream`` between the user stream and PyTorch's current one."""
    tensors = [torch.zeros(16, device="cuda:0") for _ in range(8)]
    tensor = tensors[0]
    user = external(torch, us.get_stream(tensor))

    def there() -> None:
        user.wait_stream(torch.cuda.current_stream())

    def there_and_back() -> None:
        user.wait_stream(torch.cuda.current_stream())
        torch.cuda.current_stream().wait_stream(user)

    one, two = "user.wait_stream(current_stream())", "two wait_stream"
    yield Comparison(
        f"acquire(tensor), {where}",
        {"us.acquire(tensor)": lambda: us.acquire(tensor), one: there},
        (at_most(0.22, one, stretch=0.16),),
        driver=EDGE,
    )
    yield Comparison(
        f"borrow(tensor) in and out, {where}",
        {"with us.borrow(tensor): pass": borrowing(tensor), two: there_and_back},
        (at_most(0.25, two, stretch=0.18),),
        driver=EDGE * 2,
    )
    single = "with us.borrow(tensor): pass"
    yield Comparison(
        f"borrow of 8 tensors of one stream, {where}",
        {"with us.borrow(*tensors): pass": borrowing(*tensors), single: borrowing(tensor)},
        (at_most(1.8, single),),
    )


@case
def torch_default_stream(run: Run) -> Comparisons:
    yield from beside_torch(run.need("torch"), "default stream")


@case
def torch_side_stream(run: Run) -> Comparisons:
    torch = run.need("torch")
    with torch.cuda.stream(torch.cuda.Stream(0)):
        yield from beside_torch(torch, "side stream")


@case
def cupy(run: Run) -> Comparisons:
    array = run.need("cupy").zeros(16)
    handle = int(us.get_stream(array).handle)
    export = "array.__dlpack__(stream=handle)"
    yield Comparison(
        "acquire(cupy array)",
        {
            "us.acquire(array)": lambda: us.acquire(array),
            export: lambda: array.__dlpack__(stream=handle),
        },
        (at_most(0.6, export),),
        driver=EDGE,
    )


@case
def interface(run: Run) -> Comparisons:
    """Arrays that name their stream, beside cuda.core's own wait for that stream."""
    del run
    theirs, nbytes = Device(0).create_stream(), 64
    with Device(0).allocate(8 * nbytes, stream=theirs) as memory:
        address = int(memory.handle)
        arrays = [Interface(address + n * nbytes, nbytes, theirs) for n in range(8)]
        array, stream = arrays[0], us.get_stream(arrays[0])

        def there_and_back() -> None:
            stream.wait(theirs)
            theirs.wait(stream)

        yield Comparison(
            "acquire(array with an interface)",
            {
                "us.acquire(array)": lambda: us.acquire(array),
                "user.wait(theirs)": lambda: stream.wait(theirs),
            },
        )
        single = "with us.borrow(array): pass"
        yield Comparison(
            "borrow(array with an interface)",
            {single: borrowing(array), "two waits of cuda.core": there_and_back},
        )
        yield Comparison(
            "borrow of 8 arrays of one stream",
            {"with us.borrow(*arrays): pass": borrowing(*arrays), single: borrowing(array)},
        )
        untold = driver.CUdeviceptr(address)
        yield Comparison(
            "borrow of an address: with everything on the device, or one stream",
            {
                "with us.borrow(pointer): pass": borrowing(untold),
                "with us.borrow(pointer, producer=theirs): pass": borrowing(
                    untold, producer=us.Stream.from_handle(theirs)
                ),
            },
        )
        us.wait(array)
