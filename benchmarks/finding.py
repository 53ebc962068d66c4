"""Finding the stream of a buffer: `get_stream`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from cuda.bindings import driver
from cuda.core import Device
from cuda.core.utils import StridedMemoryView

import userstream as us
from benchmarks.harness import Comparison, Comparisons, Run, case
from benchmarks.limits import at_most, at_most_added, shown

ADDED = 250e-9
POINTER = "its interface, cuPointerGetAttribute"


def view_of(array: Any) -> Callable[[], int]:
    """Return how to ask cuda.core for the device of an array."""
    return lambda: StridedMemoryView.from_any_interface(array, stream_ptr=-1).device_id


def pointer_of(array: Any) -> Callable[[], Any]:
    """Return how to ask the driver for the device of an array."""
    ordinal = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    ask = driver.cuPointerGetAttribute
    return lambda: ask(ordinal, array.__cuda_array_interface__["data"][0])


def beside(name: str, array: Any, peer: str, call: Callable[[], Any]) -> Comparison:
    """Compare with the one attribute or call that answers it."""
    calls = {f"us.get_stream({name})": lambda: us.get_stream(array), peer: call}
    return Comparison(f"get_stream of {name}", calls, (at_most_added(ADDED, peer),))


@case
def torch(run: Run) -> Comparisons:
    torch = run.need("torch")
    tensor = torch.zeros(16, device="cuda:0")
    view = "StridedMemoryView(tensor).device_id"
    yield Comparison(
        "get_stream of a torch tensor",
        {"us.get_stream(tensor)": lambda: us.get_stream(tensor), view: view_of(tensor)},
        (at_most(0.5, view, stretch=0.4),),
    )


@case
def cupy(run: Run) -> Comparisons:
    array = run.need("cupy").zeros(16)
    view = "StridedMemoryView(array).device_id"
    yield Comparison(
        "get_stream of a cupy array",
        {"us.get_stream(array)": lambda: us.get_stream(array), view: view_of(array)},
        (at_most(0.35, view, stretch=0.3),),
    )


@case
def jax(run: Run) -> Comparisons:
    array = run.need("jax.numpy").zeros(16)
    peer = "array.device.local_hardware_id"
    yield beside("jax array", array, peer, lambda: array.device.local_hardware_id)


@case
def numba(run: Run) -> Comparisons:
    array = run.need("numba.cuda").to_device(np.zeros(16))
    yield beside("numba array", array, POINTER, pointer_of(array))


@case
def rmm(run: Run) -> Comparisons:
    buffer = run.need("rmm").DeviceBuffer(size=1024)
    yield beside("rmm buffer", buffer, POINTER, pointer_of(buffer))


class OnlyDLPack:
    """An array of a library that nobody knows."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)

    def __dlpack__(self, **_: Any) -> Any:
        raise BufferError("only its device is asked for")


@case
def dlpack(run: Run) -> Comparisons:
    del run
    array = OnlyDLPack()
    yield beside("DLPack array", array, "array.__dlpack_device__()", array.__dlpack_device__)


@case
def cuda_core(run: Run) -> Comparisons:
    del run
    with Device(0).allocate(64, stream=Device(0).create_stream()) as buffer:
        peer = "buffer.device_id"
        calls = {"us.get_stream(buffer)": lambda: us.get_stream(buffer)}
        calls[peer] = lambda: buffer.device_id
        yield Comparison("get_stream of a cuda.core buffer", calls, (shown(peer, added=True),))
