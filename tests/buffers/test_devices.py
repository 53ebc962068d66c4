"""Devices of cuda.core and of the frameworks."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest
from cuda.core import Device

import standins
import userstream as us
from helpers import in_thread


@pytest.mark.parametrize("device", [0, np.int32(0), Device(0)], ids=repr)
def test_devices(device: object) -> None:
    assert us.get_stream(device) is us.get_stream(0)
    us.wait(device, timeout=10)
    us.wait_for_device(device, timeout=10)
    us.Stream.create(device).close()  # type: ignore[arg-type]


def test_torch_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = standins.torch()
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert us.get_stream(torch.device("cuda", 0)) is us.get_stream(0)
    assert us.get_stream(torch.device("cuda")) is us.get_stream(0), "the current one"
    with pytest.raises(us.InvalidDeviceError, match="not a CUDA device"):
        us.get_stream(torch.device("cpu"))
    with pytest.raises(us.InvalidDeviceError, match="no CUDA device 99"):
        us.get_stream(torch.device("cuda", 99))


@pytest.mark.multi_device
def test_a_torch_device_without_index_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = standins.torch()
    monkeypatch.setitem(sys.modules, "torch", torch)

    def current() -> us.Stream:
        Device(1).set_current()
        return us.get_stream(torch.device("cuda"))

    assert in_thread(current).device.device_id == 1


def test_cupy_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = standins.cupy()
    monkeypatch.setitem(sys.modules, "cupy.cuda", cupy.cuda)
    assert us.get_stream(cupy.cuda.Device(0)) is us.get_stream(0)


def test_warp_devices(warp: types.ModuleType) -> None:
    assert us.get_stream(warp.get_device("cuda:0")) is us.get_stream(0)
    with pytest.raises(us.InvalidDeviceError, match="not a CUDA device"):
        us.get_stream(warp.Device(-1))


def test_tvm_ffi_devices(tvm_ffi: types.ModuleType) -> None:
    assert us.get_stream(tvm_ffi.device("cuda", 0)) is us.get_stream(0)
    with pytest.raises(us.InvalidDeviceError, match="not a CUDA device"):
        us.get_stream(tvm_ffi.device("cpu", 0))


def test_jax_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    jax = standins.jax()
    monkeypatch.setitem(sys.modules, "jax", jax)
    assert us.get_stream(jax.Device(0)) is us.get_stream(0)
    with pytest.raises(us.InvalidDeviceError, match="not a CUDA device"):
        us.get_stream(jax.Device(0, "cpu"))


def test_the_protocols_of_the_annotations() -> None:
    from helpers import CAI, on
    from userstream import typing

    assert isinstance(us.get_stream(0), typing.StreamLike)
    assert isinstance(on(0), typing.DLPackBuffer)
    assert isinstance(CAI(4096), typing.CUDAArrayInterface)
    for kind in (typing.StreamLike, typing.DLPackBuffer, typing.CUDAArrayInterface):
        assert not isinstance(object(), kind)
