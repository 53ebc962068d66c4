"""Arguments that mean the same everywhere, and what says so where they do not fit."""

from __future__ import annotations

import asyncio
import re
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver

import userstream as us
from helpers import CAI
from userstream import testing


def borrow(*buffers: CAI, **how: Any) -> None:
    with us.borrow(*buffers, **how):
        pass


# Every argument that is a stream, and nothing else.
TAKES_A_STREAM: dict[str, Callable[[CAI, Any], object]] = {
    "acquire": lambda x, stream: us.acquire(x, stream=stream),
    "acquire, producer": lambda x, stream: us.acquire(x, producer=stream),
    "release": lambda x, stream: us.release(x, stream=stream),
    "release, producer": lambda x, stream: us.release(x, producer=stream),
    "borrow": lambda x, stream: borrow(x, stream=stream),
    "borrow, producer": lambda x, stream: borrow(x, producer=stream),
    "hold": lambda x, stream: us.hold(x, stream=stream),
    "hand_over": lambda x, stream: us.hand_over(x, stream=stream),
    "asnumpy": lambda x, stream: us.asnumpy(x, stream=stream),
    "asnumpy, producer": lambda x, stream: us.asnumpy(x, producer=stream),
    "copyto": lambda x, stream: us.copyto(x, np.ones(4, "f4"), stream=stream),
    "copyto, producer": lambda x, stream: us.copyto(x, np.ones(4, "f4"), producer=stream),
    "Stream.wait": lambda x, stream: us.get_stream(x).wait(stream),
    "copy_attributes_from": lambda x, stream: us.get_stream(x).copy_attributes_from(stream),
    "latch": lambda x, stream: testing.latch(stream),
}


@pytest.mark.parametrize("number", [1, 3, np.int64(1)], ids=repr)
@pytest.mark.parametrize("use", TAKES_A_STREAM.values(), ids=TAKES_A_STREAM)
def test_a_number_is_no_stream(use: Callable[[CAI, Any], object], number: Any, memory: int) -> None:
    """It is a device elsewhere, and 1 would be the legacy default stream."""
    used = CAI(memory, stream=-1)
    us.get_stream(used)
    with pytest.raises(TypeError, match=r"Stream\.from_handle\(.*Stream\.legacy_default\(\)"):
        use(used, number)


@pytest.mark.parametrize("use", TAKES_A_STREAM.values(), ids=TAKES_A_STREAM)
def test_a_handle_is_made_a_stream(use: Callable[[CAI, Any], object], memory: int) -> None:
    if use is TAKES_A_STREAM["hand_over"]:
        pytest.skip("of frameworks' buffers only")
    with us.Stream.create(0) as stream:
        handle = int(stream.handle)
        use(CAI(memory, stream=-1), us.Stream.from_handle(handle))
        if use is not TAKES_A_STREAM["Stream.wait"]:
            use(CAI(memory, stream=-1), driver.CUstream(handle))


TAKES_A_NAME: dict[str, Callable[..., object]] = {
    "acquire": us.acquire,
    "release": us.release,
    "borrow": borrow,
    "asnumpy": us.asnumpy,
    "copyto": lambda x, **how: us.copyto(x, np.ones(4, "f4"), **how),
    "hold": lambda x, **how: (us.get_stream(x, name="io"), us.hold(x, **how)),
}


@pytest.mark.parametrize("use", TAKES_A_NAME.values(), ids=TAKES_A_NAME)
def test_a_name_wherever_a_stream(use: Callable[..., object], memory: int) -> None:
    for _ in range(2):  # the second time the stream is there
        use(CAI(memory, stream=-1), name="io")
        assert list(us.streams()) == [(0, "io")]
    with us.Stream.create(0) as stream, pytest.raises(ValueError, match="pass no stream= as well"):
        use(CAI(memory, stream=-1), name="io", stream=stream)
    for wrong, error in (("", ValueError), (1, TypeError)):
        with pytest.raises(error, match="name must"):
            use(CAI(memory, stream=-1), name=wrong)


def test_a_name_of_frameworks_buffers(torch: types.ModuleType, memory: int) -> None:
    """Both the short way and the long one."""
    tensor = torch.Tensor(torch.device("cuda", 0), memory)
    for name in ("first", "second"):
        for _ in range(2):
            assert us.acquire(tensor, name=name) is us.get_stream(0, name=name)
            with us.borrow(tensor, name=name, activate=True) as stream:
                us.hand_over(tensor, name=name)
            assert stream is us.get_stream(0, name=name)
    assert (0, None) not in us.streams()
    with pytest.raises(ValueError, match="pass no stream= as well"):
        us.hand_over(tensor, name="first", stream=stream)


@pytest.mark.parametrize("use", TAKES_A_STREAM.values(), ids=TAKES_A_STREAM)
def test_a_name_is_no_stream(use: Callable[[CAI, Any], object], memory: int) -> None:
    if use in (TAKES_A_STREAM[name] for name in ("Stream.wait", "copy_attributes_from", "latch")):
        pytest.skip("takes no name")
    with pytest.raises(TypeError, match=r"name='io'"):
        use(CAI(memory, stream=-1), "io")


def test_several_targets(memory: int) -> None:
    """Of any kind, with one deadline."""
    first, second = us.get_stream(0), us.Stream.create(0)
    for late in (first, second):
        with testing.latch(late) as latch:
            with pytest.raises(us.WaitTimeout) as caught:
                us.wait(CAI(memory, stream=-1), second, 0, timeout=0)
            assert caught.value.streams == (repr(late),)
            future = us.completion(0, second)
            assert not future.done()
            with pytest.raises(us.WaitTimeout):
                asyncio.run(us.wait_async(0, second, timeout=0))
            latch.release()
        future.result(timeout=20)
        us.wait(0, second, timeout=20)
    second.close()


def test_several_targets_of_a_name() -> None:
    us.get_stream(0, name="io")
    with pytest.raises(
        us.NoUserStreamError, match="device 0 has no unnamed user stream, only 'io'"
    ):
        us.wait(0, timeout=20)
    us.wait(0, 0, name="io", timeout=20)


def test_what_streams_there_are() -> None:
    with pytest.raises(us.NoUserStreamError, match=r"no user stream: .*get_stream\(0\) makes one$"):
        us.wait(0)
    us.get_stream(0)
    us.get_stream(0, name="copies")
    with pytest.raises(us.NoUserStreamError) as caught:
        us.wait(0, name="copy")
    assert str(caught.value) == (
        "device 0 has no user stream named 'copy', only the unnamed one and 'copies': can only "
        "wait on user streams; get_stream(0, name='copy') makes one"
    )


@pytest.mark.parametrize("seconds", [999, 0.5])
def test_seconds_that_pass_for_a_device(seconds: float) -> None:
    us.get_stream(0)
    for wait in (us.wait, us.completion, lambda *to: asyncio.run(us.wait_async(*to))):
        with pytest.raises(us.UserStreamError) as caught:
            wait(0, seconds)
        (note,) = caught.value.__notes__
        assert note == f"if {seconds} is a timeout, pass it by name: timeout={seconds}"
    with pytest.raises(us.InvalidDeviceError) as caught:
        us.wait(999)
    assert not hasattr(caught.value, "__notes__")


def test_a_name_is_no_target() -> None:
    for use in (us.get_stream, us.wait, us.completion):
        with pytest.raises(us.UnsupportedBufferError, match=r"selected by name='io'$"):
            use("io")


def test_what_is_to_be_a_list(memory: int) -> None:
    """Iterables such as ``model.parameters()`` and ``batch.values()``."""
    buffers = [CAI(memory)]
    for several in (iter(buffers), {*buffers}, {"x": buffers[0]}.values(), (x for x in buffers)):
        for use in (us.get_stream, us.wait, us.acquire, us.hold, borrow):
            with pytest.raises(us.UnsupportedBufferError, match=r"; make a list of it$"):
                use(several)
        us.acquire(list(several))


def test_what_is_no_buffer(memory: int) -> None:
    stream = us.get_stream(0)
    with pytest.raises(
        us.UnsupportedBufferError, match=r"^buffers\[1\] is 3, .* not a GPU buffer; .* address as"
    ):
        us.acquire(CAI(memory), 3)  # type: ignore[arg-type]
    with pytest.raises(
        us.UnsupportedBufferError, match=r"\['n'\] is 3, .*; sequences and mappings"
    ):
        us.acquire({"n": 3})
    for use in (us.acquire, us.hold, us.hand_over):
        with pytest.raises(us.UnsupportedBufferError, match=r"is a userstream.Stream, .* stream="):
            use(stream)


def test_an_address_is_no_stream(memory: int) -> None:
    """`Stream.from_handle` takes one, so the message must not come from there."""
    with pytest.raises(us.UnsupportedStreamError, match=r"^stream=: a stream is a CUstream or"):
        us.asnumpy(CAI(memory), stream="io")


def test_a_priority_that_is_clamped() -> None:
    us.get_stream(0)
    _, greatest = us.Stream.priority_range(0)
    with pytest.raises(ValueError, match=rf"0, not {greatest} \(which -100 is clamped to\): "):
        us.get_stream(0, priority=-100)


def test_devices_in_words() -> None:
    assert us.get_stream("cuda:0") is us.get_stream(0) is us.get_stream("cuda")
    with us.Stream.create("cuda:0") as stream:
        assert stream.device.device_id == 0
    with pytest.raises(us.InvalidDeviceError, match="no CUDA device 99"):
        us.get_stream("cuda:99")
    for wrong in ("cuda:", "cuda:-1", "cuda:x", "cpu", "tensor", "cuda 0"):
        with pytest.raises(us.UnsupportedBufferError, match="names no device"):
            us.get_stream(wrong)


@pytest.mark.multi_device
def test_the_second_device_in_words() -> None:
    assert us.get_stream("cuda:1") is us.get_stream(1)


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("synchronize", "stream.sync(timeout=...)"),
        ("query", "stream.is_done"),
        ("wait_stream", "stream.wait(stream)"),
        ("record_event", "stream.record()"),
        ("ptr", "int(stream.handle)"),
        ("cuda_stream", "int(stream.handle)"),
        ("device_id", "stream.device.device_id"),
        ("use", "stream.activate(...), in a with statement"),
    ],
)
def test_what_others_call_it(name: str, here: str) -> None:
    stream = us.get_stream(0)
    with pytest.raises(AttributeError) as caught:
        getattr(stream, name)
    assert str(caught.value) == (
        f"'Stream' object has no attribute {name!r}; in userstream that is {here}"
    )
    assert (caught.value.name, caught.value.obj) == (name, stream)
    assert not hasattr(stream, name), "who asks finds out what kind of stream it is"
    assert getattr(stream, name, 7) == 7


def test_a_name_that_nobody_uses() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'snyc'$"):
        us.get_stream(0).snyc()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("Event", "stream.record(), and stream.wait_event(event)"),
        ("current_stream", "us.get_stream(buffer)"),
        ("default_stream", "us.Stream.legacy_default() or us.Stream.per_thread_default()"),
        ("stream", "us.get_stream(buffer), and stream.activate() in a with statement"),
        ("synchronize", "us.wait(buffer), or us.wait_for_device(0)"),
    ],
)
def test_what_others_call_it_in_their_modules(name: str, here: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(us, name)
    assert str(caught.value) == (
        f"module 'userstream' has no attribute {name!r}; in userstream that is {here}"
    )
    for owner, method in re.findall(r"(us\.Stream|us|stream)\.(\w+)\(", here):
        assert hasattr(us if owner == "us" else us.Stream, method), method
    assert not hasattr(us, name)
