"""Copies to the host: `asnumpy`."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from cuda.bindings import driver
from cuda.core import Device

import userstream as us
from benchmarks.harness import Call, Comparison, Comparisons, Run, case
from benchmarks.limits import Limit, at_most
from benchmarks.work import Interface

TORCH, CUPY = "tensor.cpu().numpy()", "cupy.asnumpy(array)"
BARE = "cuMemcpyDtoHAsync, cuStreamSynchronize"
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SIZES = {4 * KIB: ("4 KiB", 301), MIB: ("1 MiB", 201), 64 * MIB: ("64 MiB", 15), GIB: ("1 GiB", 7)}
LIMITS: dict[tuple[str, int], tuple[Limit, ...]] = {
    (TORCH, MIB): (at_most(0.45, TORCH),),
    (TORCH, GIB): (at_most(0.25, TORCH),),
    (CUPY, MIB): (at_most(0.45, CUPY),),
    (CUPY, GIB): (at_most(0.5, CUPY),),
    (BARE, GIB): (at_most(1.11, BARE),),
}


def sizes(run: Run) -> list[int]:
    return [size for size in SIZES if size <= run.scaled(GIB, MIB) // (4 if run.simulated else 1)]


def copying(name: str, size: int, calls: dict[str, Call], peer: str) -> Comparison:
    """Return the comparison of a size."""
    text, rounds = SIZES[size]
    limits = LIMITS.get((peer, size), ())
    return Comparison(f"{name}, {text}", calls, limits, number=1, rounds=rounds)


def same(*arrays: Any) -> None:
    """Insist that what is compared gives the same."""
    for array in arrays[1:]:
        np.testing.assert_array_equal(arrays[0], array)


def of_torch(tensor: Any) -> Callable[[], Any]:
    return lambda: tensor.cpu().numpy()


@case
def torch(run: Run) -> Comparisons:
    torch = run.need("torch")
    for size in sizes(run):
        tensor = torch.full((size // 4,), 7.0, device="cuda:0")
        calls: dict[str, Call] = {
            "us.asnumpy(tensor)": partial(us.asnumpy, tensor),
            TORCH: of_torch(tensor),
        }
        same(*(call() for call in calls.values()))
        yield copying("asnumpy(tensor)", size, calls, TORCH)


@case
def cupy(run: Run) -> Comparisons:
    cupy = run.need("cupy")
    for size in sizes(run):
        array = cupy.asarray(np.full(size // 4, 7, "f4"))
        calls: dict[str, Call] = {
            "us.asnumpy(array)": partial(us.asnumpy, array),
            CUPY: partial(cupy.asnumpy, array),
        }
        same(*(call() for call in calls.values()))
        yield copying("asnumpy(cupy array)", size, calls, CUPY)


@case
def small(run: Run) -> Comparisons:
    torch, cupy = run.need("torch"), run.need("cupy")
    tensor = torch.full((KIB,), 7.0, device="cuda:0")
    array = cupy.asarray(np.full(KIB, 7, "f4"))
    calls: dict[str, Call] = {
        "us.asnumpy(tensor)": partial(us.asnumpy, tensor),
        TORCH: of_torch(tensor),
        CUPY: partial(cupy.asnumpy, array),
    }
    same(*(call() for call in calls.values()))
    limits = (at_most(1.1, TORCH, CUPY),)
    yield Comparison(
        "asnumpy(tensor), 4 KiB, and both frameworks", calls, limits, number=1, rounds=301
    )


@contextmanager
def pinned(nbytes: int) -> Iterator[tuple[int, Any]]:
    """Yield the address of page-locked memory and an array on it."""
    result, memory = driver.cuMemHostAlloc(nbytes, 0)
    if result != driver.CUresult.CUDA_SUCCESS:
        raise MemoryError(f"cuMemHostAlloc of {nbytes} bytes: {result.name}")
    try:
        yield (
            int(memory),
            np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(int(memory))),
        )
    finally:
        driver.cuMemFreeHost(memory)


@case
def into_pinned(run: Run) -> Comparisons:
    """Compare with what the driver takes for it, which is the least."""
    theirs = Device(0).create_stream()
    handle = us.get_stream(0).handle

    def bare(to: int, source: int, nbytes: int) -> None:
        driver.cuMemcpyDtoHAsync(to, source, nbytes, handle)
        driver.cuStreamSynchronize(handle)

    for size in sizes(run):
        with Device(0).allocate(size, stream=theirs) as buffer, pinned(size) as (address, out):
            buffer.fill(7, stream=theirs)
            theirs.sync()
            source = int(buffer.handle)
            array = Interface(source, size, theirs)
            bare(address, source, size)
            same(out, us.asnumpy(array))
            calls: dict[str, Call] = {
                "us.asnumpy(array, out=pinned)": partial(us.asnumpy, array, out=out),
                BARE: partial(bare, address, source, size),
            }
            yield copying("asnumpy(out=pinned)", size, calls, BARE)


@case
def torch_into_pinned(run: Run) -> Comparisons:
    """Compare with the copy to pinned memory that users of PyTorch write by hand."""
    torch = run.need("torch")
    stream, by_copy = torch.cuda.current_stream(0), "pinned.copy_(tensor), synchronize"
    for size in sizes(run):
        tensor = torch.full((size,), 7, dtype=torch.uint8, device="cuda:0")
        place = torch.empty(size, dtype=torch.uint8, pin_memory=True)

        def by_hand(tensor: Any = tensor, place: Any = place) -> Any:
            place.copy_(tensor, non_blocking=True)
            stream.synchronize()
            return place.numpy()

        calls: dict[str, Call] = {
            "us.asnumpy(tensor, out=pinned)": partial(us.asnumpy, tensor, out=place.numpy()),
            by_copy: by_hand,
        }
        same(*(call() for call in calls.values()))
        yield copying("asnumpy(tensor, out=pinned)", size, calls, by_copy)


@case
def queued(run: Run) -> Comparisons:
    """Compare what it costs the host to queue a copy that it can wait for later."""
    torch = run.need("torch")
    by_hand = "pinned.copy_(tensor, non_blocking=True), record_event"
    for size in (4 * KIB, MIB):
        tensor = torch.full((size,), 7, dtype=torch.uint8, device="cuda:0")
        place = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        out = us.pinned_like(tensor)

        def queue(tensor: Any = tensor, place: Any = place) -> Any:
            place.copy_(tensor, non_blocking=True)
            return torch.cuda.current_stream(0).record_event()

        calls: dict[str, Call] = {
            "us.asnumpy_async(tensor, out=pinned)": partial(us.asnumpy_async, tensor, out=out),
            by_hand: queue,
        }
        same(us.asnumpy_async(tensor, out=out).result(timeout=60), tensor.cpu().numpy())
        title = f"asnumpy_async(tensor, out=pinned), {SIZES[size][0]}, queued"
        yield Comparison(title, calls, number=1, rounds=201)


@case
def ahead(run: Run) -> Comparisons:
    """Compare loops whose results the host reads, two buffers ahead and with a wait each."""
    torch = run.need("torch")
    steps, size = run.scaled(16, 4), run.scaled(64 * MIB, MIB)
    weights = torch.randn(4096, 4096, device="cuda:0")
    result = torch.empty(size // 4, device="cuda:0")
    ours = [us.pinned_like(result) for _ in range(2)]
    theirs = [torch.empty(size // 4, pin_memory=True) for _ in range(2)]
    sums: list[Any] = []

    def step(number: int) -> None:
        (weights @ weights).sum()
        result.fill_(number)

    def read(host: Any) -> None:
        sums.append(host.sum())  # reads each byte, as writing it to a file does

    def queued() -> None:
        copies: deque[us.Completion[Any]] = deque()
        for number in range(steps):
            step(number)
            if len(copies) == 2:
                read(copies.popleft().result(timeout=60))
            copies.append(us.asnumpy_async(result, out=ours[number % 2]))
        while copies:
            read(copies.popleft().result(timeout=60))

    def by_hand() -> None:
        copies: deque[tuple[Any, Any]] = deque()
        for number in range(steps):
            step(number)
            if len(copies) == 2:
                place, event = copies.popleft()
                event.synchronize()
                read(place.numpy())
            place = theirs[number % 2]
            place.copy_(result, non_blocking=True)
            copies.append((place, torch.cuda.current_stream(0).record_event()))
        while copies:
            place, event = copies.popleft()
            event.synchronize()
            read(place.numpy())

    def blocking() -> None:
        for number in range(steps):
            step(number)
            read(us.asnumpy(result, out=ours[0]))

    by_torch = "pinned.copy_(x, non_blocking=True), 2 ahead"
    calls: dict[str, Call] = {
        "us.asnumpy_async(x, out=pinned), 2 ahead": queued,
        by_torch: by_hand,
        "us.asnumpy(x, out=pinned)": blocking,
    }
    found = []
    for call in calls.values():
        sums.clear()
        call()
        found.append(list(sums))
    same(*found)
    title = f"{steps} steps, {size // MIB} MiB of each read on the host"
    yield Comparison(title, calls, (at_most(1.05, by_torch),), number=1, rounds=11)


VIEWS: dict[str, Callable[[Any], Any]] = {
    ".T": lambda x: x.T,
    "[::2]": lambda x: x[::2],
    "[:, ::2]": lambda x: x[:, ::2],
    "[:, :1000]": lambda x: x[:, :1000],
}


def views(host: Any, whole: Any, name: str, peer: str, copy: Callable[[Any], Any]) -> Comparisons:
    """Compare the copies of what is not contiguous."""
    for text, view in VIEWS.items():
        part = view(whole)
        calls: dict[str, Call] = {
            f"us.asnumpy(x{text})": partial(us.asnumpy, part),
            peer: partial(copy, part),
        }
        same(view(host), *(call() for call in calls.values()))
        title = f"asnumpy of a {len(host)}² f4 {name}, x{text}"
        yield Comparison(title, calls, (at_most(1.0, peer),), number=1, rounds=21)


def square(run: Run) -> Any:
    n = run.scaled(4096, 1024)
    return np.arange(n * n, dtype="f4").reshape(n, n)


@case
def strided(run: Run) -> Comparisons:
    torch, host = run.need("torch"), square(run)
    whole = torch.from_numpy(host).to("cuda:0")
    yield from views(host, whole, "tensor", TORCH, lambda part: part.cpu().numpy())


@case
def strided_cupy(run: Run) -> Comparisons:
    cupy, host = run.need("cupy"), square(run)
    yield from views(host, cupy.asarray(host), "cupy array", CUPY, cupy.asnumpy)
