"""Arrays of any layout in device memory, and copies of them on a given stream."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from cuda.bindings import driver

import userstream as us
from helpers import CAI, address, checked, device_current, device_memory, upload


class DeviceArray(CAI):
    """An array in device memory that is laid out as a view of host memory."""

    def __init__(self, view: np.ndarray, where: int, device: int = 0) -> None:
        described = view.__array_interface__
        strides = None if 0 in view.shape else view.strides
        super().__init__(
            where,
            view.shape,
            typestr=described["typestr"],
            descr=described["descr"],
            strides=strides,
        )
        self.address, self.device, self.view = where, device, view

    def at(self, where: int) -> DeviceArray:
        """Return an array of the same layout at another address."""
        return DeviceArray(self.view, where, self.device)


def span(view: np.ndarray) -> tuple[int, int]:
    """Return the bytes of a view before its first element, and from its lowest to its highest."""
    steps = [(count - 1) * stride for count, stride in zip(view.shape, view.strides, strict=True)]
    before = -sum(step for step in steps if step < 0)
    return before, before + sum(step for step in steps if step > 0) + view.itemsize


@contextmanager
def on_device(view: np.ndarray, device: int = 0) -> Iterator[DeviceArray]:
    """Put a view of host memory on a device, with what lies between its elements."""
    offset, size = span(view) if view.size else (0, 1)
    with device_memory(device, size) as where, device_current(device):
        if view.size:
            upload(where, address(view) - offset, size)
        yield DeviceArray(view, where + offset, device)


def read(memory: DeviceArray, view: np.ndarray) -> np.ndarray:
    """Read the memory of a view from the device, as bytes."""
    offset, size = span(view)
    found = np.empty(size, "u1")
    with device_current(memory.device):
        checked(driver.cuMemcpyDtoH(address(found), memory.address - offset, size))
    return found


def memory_of(view: np.ndarray) -> np.ndarray:
    """Return the memory of a view, as bytes."""
    offset, size = span(view)
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address(view) - offset))


def to_host(
    source: Any, stream: us.Stream, out: np.ndarray | None = None, timeout: float | None = None
) -> Any:
    return us.asnumpy(source, out=out, stream=stream, producer=None, timeout=timeout)


def copy_on(stream: us.Stream, to: Any, source: Any, timeout: float | None = None) -> None:
    us.copyto(to, source, stream=stream, producer=None, timeout=timeout)
