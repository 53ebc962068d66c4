"""Copies to the host: `asnumpy`."""

from __future__ import annotations

from typing import Any

import numpy as np
from cuda.bindings import driver
from cuda.core import Device

import userstream as us
from benchmarks.harness import Comparison, Comparisons, Run, case
from benchmarks.numbers import Limit, at_most
from benchmarks.work import Interface

TORCH, CUPY = "tensor.cpu().numpy()", "cupy.asnumpy(array)"
BARE = "cuMemcpyDtoHAsync, cuStreamSynchronize"
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SIZES = {4 * KIB: ("4 KiB", 301), MIB: ("1 MiB", 201), 64 * MIB: ("64 MiB", 15), GIB: ("1 GiB", 7)}
RATIOS = {MIB: (0.45, 0.45), GIB: (0.25, 0.5)}  # to PyTorch, to CuPy


def sizes(run: Run) -> list[int]:
    return [size for size in SIZES if size <= run.scaled(GIB, MIB)]


def same(*arrays: Any) -> None:
    """Insist that what is compared does the same."""
    for array in arrays[1:]:
        np.testing.assert_array_equal(arrays[0], array)


def limits(size: int, peer: str) -> tuple[Limit, ...]:
    if size not in RATIOS:
        return ()
    return (at_most(RATIOS[size][peer == CUPY], peer),)


@case
def torch(run: Run) -> Comparisons:
    torch = run.need("torch")
    for size in sizes(run):
        text, rounds = SIZES[size]
        tensor = torch.full((size // 4,), 7.0, device="cuda:0")
        calls = {"us.asnumpy(tensor)": lambda t=tensor: us.asnumpy(t)}
        calls[TORCH] = lambda t=tensor: t.cpu().numpy()
        same(*(call() for call in calls.values()))
        shown = limits(size, TORCH)
        yield Comparison(f"asnumpy(tensor), {text}", calls, shown, number=1, rounds=rounds)


@case
def cupy(run: Run) -> Comparisons:
    cupy = run.need("cupy")
    for size in sizes(run):
        text, rounds = SIZES[size]
        array = cupy.asarray(np.full(size // 4, 7, "f4"))
        calls = {"us.asnumpy(array)": lambda a=array: us.asnumpy(a)}
        calls[CUPY] = lambda a=array: cupy.asnumpy(a)
        same(*(call() for call in calls.values()))
        shown = limits(size, CUPY)
        yield Comparison(f"asnumpy(cupy array), {text}", calls, shown, number=1, rounds=rounds)


@case
def small(run: Run) -> Comparisons:
    torch, cupy = run.need("torch"), run.need("cupy")
    tensor = torch.zeros(KIB, device="cuda:0")
    array = cupy.zeros(KIB, dtype="f4")
    yield Comparison(
        "asnumpy(tensor), 4 KiB, beside the faster of both",
        {
            "us.asnumpy(tensor)": lambda: us.asnumpy(tensor),
            TORCH: lambda: tensor.cpu().numpy(),
            CUPY: lambda: cupy.asnumpy(array),
        },
        (at_most(1.1, TORCH, CUPY),),
        number=1,
        rounds=301,
    )


def pinned_array(nbytes: int) -> tuple[Any, np.ndarray]:
    """Return page-locked memory and an array on it."""
    result, memory = driver.cuMemHostAlloc(nbytes, 0)
    if result != driver.CUresult.CUDA_SUCCESS:
        raise MemoryError(f"cuMemHostAlloc of {nbytes} bytes: {result.name}")
    import ctypes

    return memory, np.frombuffer((ctypes.c_ubyte * nbytes).from_address(int(memory)), "u1")


@case
def into_pinned(run: Run) -> Comparisons:
    """Without a framework: what the driver alone takes for it is the limit."""
    theirs = Device(0).create_stream()
    for size in sizes(run):
        text, rounds = SIZES[size]
        with Device(0).allocate(size, stream=theirs) as buffer:
            buffer.fill(7, stream=theirs)
            theirs.sync()
            array = Interface(int(buffer.handle), size, theirs)
            memory, out = pinned_array(size)
            pointer, address, handle = int(buffer.handle), int(memory), us.get_stream(0).handle

            def bare(
                to: int = address, source: int = pointer, n: int = size, s: Any = handle
            ) -> None:
                driver.cuMemcpyDtoHAsync(to, source, n, s)
                driver.cuStreamSynchronize(s)

            bare()
            same(out, us.asnumpy(array))
            calls = {"us.asnumpy(array, out=pinned)": lambda a=array, o=out: us.asnumpy(a, out=o)}
            calls |= {BARE: bare}
            shown = (at_most(1.11, BARE),) if size == GIB else ()
            name = f"asnumpy(out=pinned), {text}"
            yield Comparison(name, calls, shown, number=1, rounds=rounds)
            del out, calls
            driver.cuMemFreeHost(memory)


VIEWS = {
    ".T": lambda x: x.T,
    "[::2]": lambda x: x[::2],
    "[:, ::2]": lambda x: x[:, ::2],
    "[:, :1000]": lambda x: x[:, :1000],
}


@case
def strided(run: Run) -> Comparisons:
    yield from views(run, "torch", TORCH)


@case
def strided_cupy(run: Run) -> Comparisons:
    yield from views(run, "cupy", CUPY)


def views(run: Run, framework: str, peer: str) -> Comparisons:
    """Compare the copies of what is not contiguous."""
    module, n = run.need(framework), run.scaled(4096, 256)
    host = np.arange(n * n, dtype="f4").reshape(n, n)
    whole = module.asarray(host, device="cuda:0") if peer == TORCH else module.asarray(host)
    for text, view in VIEWS.items():
        part = view(whole)
        theirs = (
            (lambda p=part: p.cpu().numpy()) if peer == TORCH else lambda p=part: module.asnumpy(p)
        )
        calls = {"us.asnumpy(view)": lambda p=part: us.asnumpy(p), peer: theirs}
        same(view(host), *(call() for call in calls.values()))
        name = f"asnumpy of a {framework} {n}² f4 {text}"
        yield Comparison(name, calls, (at_most(1.0, peer),), number=1, rounds=21)
