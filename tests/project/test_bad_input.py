"""Bad input gets a clear error before CUDA is touched, and nothing is lost or made."""

from __future__ import annotations

from collections import UserString
from collections.abc import Callable

import numpy as np
import pytest
from cuda.bindings import driver

import userstream as us
from helpers import CAI, DLPack, checked, on
from userstream import testing


class Raising:
    def __dlpack_device__(self) -> tuple[int, int]:
        raise RuntimeError("broken on purpose")


BAD = {
    "numpy": (lambda: np.zeros(3), us.HostBufferError, "numpy.ndarray is in host memory"),
    "numpy in a list": (lambda: [np.zeros(3)], us.HostBufferError, "host memory"),
    "cpu dlpack": (lambda: DLPack(1, 0), us.HostBufferError, "host memory"),
    "pinned": (lambda: DLPack(3, 0), us.HostBufferError, "pinned"),
    "bytes": (lambda: b"abc", us.UnsupportedBufferError, "names no device"),
    "none in a list": (lambda: [None], us.UnsupportedBufferError, r"target\[0\] is None"),
    "none deeper": (
        lambda: {"a": [on(0), None]},
        us.UnsupportedBufferError,
        r"target\['a'\]\[1\] is None",
    ),
    "number in a list": (lambda: [0], us.UnsupportedBufferError, r"target\[0\] is 0"),
    "empty list": (list, us.InvalidDeviceError, "an empty list names no device"),
    "empty nested": (lambda: [[], {}], us.InvalidDeviceError, "names no device"),
    "too high": (lambda: 99, us.InvalidDeviceError, "no CUDA device 99: this process sees"),
    "negative": (lambda: -1, us.InvalidDeviceError, "no CUDA device -1"),
    "numpy integer": (lambda: np.int64(99), us.InvalidDeviceError, "no CUDA device 99"),
    "bool": (lambda: True, us.UnsupportedBufferError, "True names no device"),
    "float": (lambda: 0.0, us.UnsupportedBufferError, "0.0 names no device"),
    "str": (lambda: "gpu:0", us.UnsupportedBufferError, "'gpu:0' names no device"),
    "object": (object, us.UnsupportedBufferError, "names no device"),
    "type": (lambda: DLPack, us.UnsupportedBufferError, "names no device"),
    "range": (lambda: range(2), us.UnsupportedBufferError, "names no device"),
    "stream 0": (lambda: CAI(4096, stream=0), us.UnsupportedBufferError, "its stream is 0"),
    "no data": (lambda: _without("data"), us.UnsupportedBufferError, "malformed"),
    "no shape": (lambda: _without("shape"), us.UnsupportedBufferError, "malformed"),
    "data no tuple": (lambda: CAI(0, data=7), us.UnsupportedBufferError, "malformed"),
    "data no int": (lambda: CAI("x"), us.UnsupportedBufferError, "its address is 'x'"),
    "empty CAI": (lambda: CAI(0, shape=(0,)), us.UnsupportedBufferError, "has address 0"),
    "host address": (
        lambda: CAI(np.zeros(99).ctypes.data),
        us.UnsupportedBufferError,
        "not in memory that the CUDA driver knows",
    ),
    "rocm": (lambda: DLPack(10, 0), us.UnsupportedBufferError, "type 10 .ROCm"),
    "vulkan": (lambda: DLPack(7, 0), us.UnsupportedBufferError, "type 7 .Vulkan"),
    "odd dlpack": (lambda: DLPack(99, 0), us.UnsupportedBufferError, "type 99 .unknown"),
    "dlpack ordinal": (lambda: DLPack(2, 99), us.InvalidDeviceError, "no CUDA device 99"),
    "dlpack text": (lambda: DLPack(2, "0"), us.UnsupportedBufferError, "failed: 'str'"),
    "dlpack none": (lambda: DLPack(None, 0), us.UnsupportedBufferError, "failed: 'NoneType'"),
    "dlpack fraction": (lambda: DLPack(2, 0.5), us.UnsupportedBufferError, "failed: 'float'"),
    "dlpack managed": (lambda: DLPack(13, 0), us.UnsupportedBufferError, "is not exported"),
    "dlpack raises": (Raising, us.UnsupportedBufferError, "broken on purpose"),
}


def _without(key: str) -> CAI:
    array = CAI(4096)
    del array.interface[key]
    return array


@pytest.mark.parametrize("function", [us.get_stream, us.wait, us.wait_for_device])
@pytest.mark.parametrize(("make", "error", "match"), BAD.values(), ids=BAD.keys())
def test_bad_targets(
    function: Callable[[object], object],
    make: Callable[[], object],
    error: type[Exception],
    match: str,
) -> None:
    checked(driver.cuInit(0))
    if _simulated():
        testing.reset()
    with pytest.raises(error, match=match):
        function(make())
    assert us.streams() == {}
    if _simulated():
        for call in ("cuStreamCreateWithPriority", "cuStreamQuery", "cuDevicePrimaryCtxRetain"):
            assert testing.calls(call) == 0, call


@pytest.mark.parametrize(
    "key", ["numpy", "bool", "str", "stream 0", "rocm", "dlpack managed", "dlpack raises"]
)
@pytest.mark.parametrize("function", [us.device_of, us.describe])
def test_bad_buffers(function: Callable[[object], object], key: str) -> None:
    make, error, _match = BAD[key]
    with pytest.raises(error):
        function(make())


@pytest.mark.parametrize(
    ("use", "error", "advice"),
    [
        (lambda: us.get_stream(1 << 40), us.InvalidDeviceError, "address is passed as .*CUdevice"),
        (lambda: us.describe(1 << 40), us.UnsupportedBufferError, "address is passed as .*CUdevi"),
        (lambda: us.asnumpy(0), us.UnsupportedBufferError, "^0 is not a buffer: .*numpy.asarray"),
        (lambda: us.describe([on(0)]), us.UnsupportedBufferError, "^list is not a .*; pass what"),
        (
            lambda: us.copyto(np.ones(1), [1.0]),
            us.UnsupportedBufferError,
            "list is neither; numpy.asar",
        ),
        (
            lambda: us.copyto(0.0, np.ones(1)),
            us.UnsupportedBufferError,
            "float is neither; numpy.asar",
        ),
        (
            lambda: us.device_of(us.Stream.legacy_default()),
            us.UnsupportedBufferError,
            r"Stream is not a GPU.*; a stream of userstream or cuda.core has its",
        ),
        (us.acquire, ValueError, "pass those that the work reads or writes"),
        (
            lambda: us.acquire(on(0), us.Stream.legacy_default()),
            us.UnsupportedBufferError,
            r"buffers\[1\] is .*Stream, which is not a GPU.*; pass a stream as stream= or",
        ),
        (
            lambda: us.borrow(on(0), np.ones(1)).__enter__(),
            us.HostBufferError,
            r"^buffers\[1\]: this numpy.ndarray is in host memory",
        ),
        (
            lambda: us.acquire({"images": [on(0), np.ones(1)]}),
            us.HostBufferError,
            r"^buffers\[0\]\['images'\]\[1\]: this numpy.ndarray is in host memory",
        ),
        (
            lambda: us.get_stream([on(0), np.ones(1)]),
            us.HostBufferError,
            r"^target\[1\]: this numpy.ndarray is in host memory",
        ),
        (lambda: us.acquire(np.ones(1)), us.HostBufferError, "^this numpy.ndarray is in host"),
        (
            lambda: us.get_stream(0).__enter__(),
            TypeError,
            r"only streams of Stream.create\(\) are; to let .*`with stream.activate\(\):`",
        ),
        (
            lambda: us.get_stream(0).wait(us.get_stream(0), timeout=5),  # type: ignore[arg-type]
            TypeError,
            r"no argument 'timeout': it makes the stream wait, .*stream.sync\(timeout=...\)",
        ),
        (
            lambda: np.asarray(us.completion(us.get_stream(0))),
            TypeError,
            r"a Completion, .*completion.result\(timeout=...\), or await it",
        ),
        (
            lambda: us.borrow(on(0), activate=3).__enter__(),  # type: ignore[arg-type]
            TypeError,
            "activate= takes True, the name of a framework, or several names, not 3",
        ),
    ],
)
def test_what_to_do_instead(use: Callable[[], object], error: type[Exception], advice: str) -> None:
    with pytest.raises(error, match=advice):
        use()


@pytest.mark.multi_device
def test_several_devices_have_no_one_stream() -> None:
    with pytest.raises(us.DeviceMismatchError, match=r"devices \[1, 0\]") as caught:
        us.get_stream([on(1), on(0), on(1)])
    assert caught.value.devices == (1, 0)
    assert us.streams() == {}


def _cycle() -> list[object]:
    cycle: list[object] = []
    cycle.append({"again": cycle})
    return cycle


@pytest.mark.parametrize("make", [_cycle, lambda: UserString("a")])
@pytest.mark.parametrize("function", [us.get_stream, us.acquire, us.hand_over, us.asnumpy])
def test_a_collection_without_end(
    function: Callable[[object], object], make: Callable[[], object]
) -> None:
    with pytest.raises(us.UnsupportedBufferError, match="contain itself"):
        function(make())


def test_collections_may_be_deep() -> None:
    nested: object = on(0)
    for _ in range(50):
        nested = [nested]
    assert us.get_stream(nested) is us.get_stream(0)


def test_what_looks_like_an_int_but_is_a_buffer() -> None:
    class Scalar(DLPack):
        def __index__(self) -> int:
            return 99

    assert us.get_stream(Scalar(2, 0)) is us.get_stream(0)


def _simulated() -> bool:
    from conftest import SIMULATED

    return SIMULATED


class Secretive:
    """Like a tensor, whose repr copies it to the host."""

    def __repr__(self) -> str:
        raise AssertionError("its repr was taken")

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)


def test_no_repr_of_a_users_object_is_taken() -> None:
    key = Secretive()
    assert us.get_stream({key: on(0), "a": [key]}) is us.get_stream(0)

    class Odd:
        __repr__ = Secretive.__repr__

    for target in (Odd(), [Odd()], {key: Odd()}):
        with pytest.raises(us.UnsupportedBufferError, match="Odd"):
            us.get_stream(target)
    with pytest.raises(TypeError, match="Odd"):
        us.Stream.create(Odd())  # type: ignore[arg-type]
