"""Activations of the user stream in frameworks, and what is handed over from them."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable

import pytest

import standins
import userstream as us
from helpers import (
    CAI,
    device_count,
    device_current,
    entered,
    eventually,
    in_thread,
    primary_context,
)
from userstream import testing

pytestmark = pytest.mark.usefixtures("no_garbage")


# -- who produces -------------------------------------------------------------------------------


def edges(use: Callable[[], object], function: str = "cuStreamWaitEvent") -> int:
    """Return how many edges something makes, or calls of another function of the driver."""
    before = testing.calls(function)
    use()
    return testing.calls(function) - before


# -- activation ---------------------------------------------------------------------------------


def test_what_a_block_shows_of_itself(torch: types.ModuleType, memory: int) -> None:
    stream = us.get_stream(0)
    tensor = torch.Tensor(torch.device("cuda", 0), memory)
    block, both = us.borrow(tensor), us.borrow(tensor, tensor)
    assert repr(block) == "<userstream.borrow of 1 buffer: not entered>"
    assert repr(both) == "<userstream.borrow of 2 buffers: not entered>"
    with both, block:
        assert repr(block) == f"<userstream.borrow of 1 buffer: on {stream!r}>"
    with (activation := stream.activate("torch")):
        assert repr(activation) == f"<userstream.Stream.activate of {stream!r}: torch>"


def test_activation(torch: types.ModuleType, cupy: types.ModuleType, memory: int) -> None:
    stream = us.get_stream(0)
    before = cupy.cuda.get_current_stream(0)
    tensor, other = torch.Tensor(torch.device("cuda", 0), memory), cupy.ndarray(0, memory)

    def current() -> tuple[int, int]:
        return torch.cuda.current_stream(0).cuda_stream, cupy.cuda.get_current_stream(0).ptr

    ours = int(stream.handle)
    for block, inside in (
        (us.borrow(tensor, activate=True), (ours, 0)),
        (us.borrow(other, activate=True), (0, ours)),
        (us.borrow(tensor, activate="cupy"), (0, ours)),
        (us.borrow(tensor, activate=["torch", "cupy"]), (ours, ours)),
        (us.borrow(tensor, activate=iter(["torch", "cupy"])), (ours, ours)),
        (us.borrow(tensor, other, activate=True), (ours, ours)),
        (us.borrow(tensor), (0, 0)),
        (stream.activate("torch"), (ours, 0)),
        (stream.activate(), (ours, ours)),
    ):
        for error in (None, KeyError):
            try:
                with block as given:
                    assert given is stream
                    assert current() == inside
                    if error is not None:
                        raise error
            except KeyError:
                pass
            assert current() == (0, 0)
            assert cupy.cuda.get_current_stream(0) is before


def test_activation_orders_the_arenas(torch: types.ModuleType, producer: us.Stream) -> None:
    torch.cuda.set_stream(torch.cuda.ExternalStream(int(producer.handle), 0))
    stream = us.get_stream(0)
    with testing.latch(producer) as latch:
        with stream.activate("torch"):
            assert not stream.is_done
        latch.release()
    with testing.latch(stream) as latch:
        with stream.activate("torch"):
            pass
        assert not producer.is_done
        latch.release()


def test_what_was_made_current_inside_does_not_stay(cupy: types.ModuleType) -> None:
    before = cupy.cuda.stream._BaseStream(0, 0).use()
    with us.get_stream(0).activate("cupy"):
        with (
            device_current(0),
            cupy.cuda.stream._BaseStream(77, 0),
        ):
            pass
        assert cupy.cuda.get_current_stream(0).ptr == int(us.get_stream(0).handle)
        cupy.cuda.stream._BaseStream(88, 0).use()
    assert cupy.cuda.get_current_stream(0) is before


@pytest.mark.usefixtures("torch")
def test_activation_belongs_to_its_thread(memory: int) -> None:
    for block in (
        us.get_stream(0).activate("torch"),
        us.borrow(CAI(memory, stream=None), activate="torch"),
    ):
        block.__enter__()
        with pytest.raises(RuntimeError, match="in the thread where it began"):
            in_thread(lambda block=block: block.__exit__(None, None, None))
        block.__exit__(None, None, None)


@pytest.mark.parametrize("first", [None, "cupy"])
def test_activation_of_what_is_imported_in_the_block(
    first: str | None, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its work goes to its own current stream, unnoticed but for the warning."""
    for name in ("torch", "cupy", "warp"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    if first is not None:
        request.getfixturevalue(first)
    stream = us.get_stream(0)

    def import_inside(name: str, *named: str) -> None:
        with stream.activate(*named):
            monkeypatch.setitem(sys.modules, name, getattr(standins, name)())
        monkeypatch.delitem(sys.modules, name)

    with pytest.warns(RuntimeWarning, match=r"^torch was imported after .*import it") as caught:
        import_inside("torch")
    assert caught[0].filename == __file__
    import_inside("warp")  # which would have to be named
    if first is not None:
        import_inside("torch", first)
    with stream.activate():
        monkeypatch.setitem(sys.modules, "something", types.ModuleType("something"))

    def fail() -> None:
        with stream.activate():
            monkeypatch.setitem(sys.modules, "torch", standins.torch())
            raise KeyError

    with pytest.raises(KeyError):
        fail()


def test_activation_of_what_has_no_current_stream(torch: types.ModuleType, memory: int) -> None:
    stream = us.get_stream(0)
    for name in ("jax", "numba", "Torch", ""):
        with pytest.raises(ValueError, match="no current stream"):
            stream.activate(name)
    with pytest.raises(ValueError, match="not imported"):
        stream.activate("dali")
    with pytest.raises(TypeError):
        stream.activate(torch)  # type: ignore[arg-type]
    us.close(timeout=10)
    with pytest.raises(ValueError, match="none of the buffers"):
        us.borrow(CAI(memory, stream=None), activate=True).__enter__()
    assert not us.streams()
    assert torch.cuda.current_stream(0).cuda_stream == 0


def test_hand_over(torch: types.ModuleType, producer: us.Stream, memory: int) -> None:
    tensor = torch.Tensor(torch.device("cuda", 0), memory)
    torch.cuda.set_stream(torch.cuda.ExternalStream(int(producer.handle), 0))
    stream = us.get_stream(0)
    with testing.latch(stream) as latch:
        us.hand_over(tensor, [tensor])
        assert not producer.is_done
        latch.release()
    assert tensor.recorded == [int(producer.handle)] * 2
    with stream.activate("torch"):
        us.hand_over(tensor)
    assert len(tensor.recorded) == 2, "it is used where it was made"
    with us.Stream.create(0) as mine, testing.latch(mine) as latch:
        us.hand_over(tensor, stream=mine)
        assert not producer.is_done
        latch.release()
    with pytest.raises(us.UnsupportedBufferError, match="no framework"):
        us.hand_over(CAI(memory))


def test_hand_over_joins_no_capture(
    torch: types.ModuleType, producer: us.Stream, memory: int
) -> None:
    tensor = torch.Tensor(torch.device("cuda", 0), memory)
    torch.cuda.set_stream(torch.cuda.ExternalStream(int(producer.handle), 0))
    with us.Stream.create(0) as mine, mine.capture():
        with pytest.raises(us.CaptureError, match="would become part"):
            us.hand_over(tensor, stream=mine)
        assert not producer.is_capturing


@pytest.mark.simulated
def test_activation_adds_no_edge_to_those_of_the_borrow(
    torch: types.ModuleType, producer: us.Stream, memory: int
) -> None:
    tensor = torch.Tensor(torch.device("cuda", 0), memory)
    torch.cuda.set_stream(torch.cuda.ExternalStream(int(producer.handle), 0))
    us.get_stream(0)

    def use() -> None:
        with us.borrow(tensor, activate=True):
            pass

    assert edges(use) == 2


def test_hand_over_to_a_default_stream(torch: types.ModuleType, memory: int) -> None:
    """The default stream of the device of the result, whichever device is current."""
    tensor = torch.Tensor(torch.device("cuda", 0), memory)
    with us.Stream.create(0) as theirs:
        torch.cuda.set_stream(torch.cuda.ExternalStream(int(theirs.handle), 0))
        with device_current(0):
            latch = testing.latch(us.Stream.legacy_default())
            latch.__enter__()
        elsewhere = primary_context(device_count() - 1)
        with entered(elsewhere):
            us.hand_over(tensor, stream=us.Stream.legacy_default())
        assert not eventually(lambda: theirs.is_done, 0.03)
        latch.release()
        theirs.sync(timeout=10)
