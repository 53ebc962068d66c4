"""Waits for a buffer, wherever this registry uses it."""

from __future__ import annotations

import types
from collections.abc import Callable
from contextlib import ExitStack

import pytest
from cuda.bindings import driver

import userstream as us
from helpers import CAI
from userstream import testing
from uses import borrow, is_waited_for

USES: dict[str, Callable[..., us.Stream]] = {
    "borrow": borrow,
    "borrow without keeping": lambda buffer, **how: borrow(buffer, keep=False, **how),
    "borrow of a list": lambda buffer, **how: borrow([{"a": buffer}], **how),
    "acquire": us.acquire,
    "release": lambda buffer, **how: (us.release(buffer, **how), us.acquire(buffer, **how))[1],
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("where", ["user", "name", "stream", "named stream"])
def test_each_stream_held(
    where: str, use: Callable[..., us.Stream], buffer: CAI, mine: us.Stream
) -> None:
    named = us.get_stream(0, name="io")
    how = {"user": {}, "name": {"name": "io"}, "stream": {"stream": mine}}
    held = {"user": us.get_stream(0), "stream": mine}.get(where, named)
    with testing.latch(held):
        assert use(buffer, **how.get(where, {"stream": named})) == held
        assert is_waited_for(buffer)
        assert is_waited_for([buffer])
    us.wait(buffer, timeout=20)


def test_all_of_them(buffer: CAI, mine: us.Stream) -> None:
    streams = [us.get_stream(0), us.get_stream(0, name="io"), mine]
    for stream in streams:
        borrow(buffer, stream=stream)
    with ExitStack() as stack:
        latches = [stack.enter_context(testing.latch(stream)) for stream in streams]
        for stream in streams:
            borrow(buffer, stream=stream, producer=None)
        for latch, stream in zip(latches, streams, strict=True):
            with pytest.raises(us.WaitTimeout) as caught:
                us.wait(buffer, timeout=0)
            assert repr(stream) in caught.value.streams
            latch.release()
            stream.sync(timeout=20)
    us.wait(buffer, timeout=20)


def test_inside_of_a_block(buffer: CAI, mine: us.Stream) -> None:
    with us.borrow(buffer, stream=mine), testing.latch(mine):
        assert is_waited_for(buffer)


def test_of_a_tensor(torch: types.ModuleType, memory: int) -> None:
    """Borrowed the short way."""
    tensor = torch.Tensor(torch.device("cuda", 0), memory)
    io = us.get_stream(tensor, name="io")
    us.get_stream(tensor)
    with testing.latch(io):
        borrow(tensor, name="io")
        assert is_waited_for(tensor)
        assert not is_waited_for(0), "the user stream alone"
    us.wait(tensor, timeout=20)


def test_of_an_address(memory: int, mine: us.Stream) -> None:
    us.get_stream(0)
    with testing.latch(mine):
        borrow(driver.CUdeviceptr(memory), stream=mine, producer=None)
        assert is_waited_for(driver.CUdeviceptr(memory))
        assert not is_waited_for(driver.CUdeviceptr(memory + 64))


def test_without_a_user_stream(buffer: CAI, mine: us.Stream) -> None:
    with testing.latch(mine):
        borrow(buffer, stream=mine)
        assert is_waited_for(buffer)
        with pytest.raises(us.NoUserStreamError):
            us.wait(0)
        with pytest.raises(us.NoUserStreamError):
            us.wait(buffer, name="io")


def test_what_is_passed_is_not_waited_for(buffer: CAI, mine: us.Stream) -> None:
    us.get_stream(0)
    borrow(buffer, stream=mine)
    us.acquire(buffer, stream=mine)
    us.release(buffer, stream=mine)
    mine.sync(timeout=20)
    with testing.latch(mine):  # for the work of somebody else
        us.wait(buffer, timeout=20)


def test_others_are_not_waited_for(buffer: CAI, memory: int, mine: us.Stream) -> None:
    us.get_stream(0)
    other = CAI(memory, stream=-1)
    with us.UserStream() as registry:
        registry.get_stream(0)
        with testing.latch(mine):
            borrow(buffer, stream=mine)
            assert is_waited_for(buffer)
            assert not is_waited_for(other), "another buffer"
            assert not is_waited_for(buffer, by=registry), "another registry"


def test_what_cannot_be_waited_for(buffer: CAI, mine: us.Stream) -> None:
    us.get_stream(0)
    with mine.capture():
        us.acquire(buffer, stream=mine)
        us.wait(buffer, timeout=20)
    us.acquire(buffer, stream=mine)
    mine.close()
    us.wait(buffer, timeout=20)
    assert not us.UserStream.get()._uses.pending


def test_a_usual_borrow_notes_nothing(buffer: CAI) -> None:
    with testing.latch(us.get_stream(0)):
        borrow(buffer)
        us.acquire(buffer)
        us.release(buffer)
        assert not us.UserStream.get()._uses.pending
