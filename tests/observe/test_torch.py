"""`observe(allocations=True)` asks PyTorch which line allocated a tensor: a stand-in."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator

import pytest
from cuda.bindings import driver

import observed
import standins
import userstream as us
from helpers import checked, device_memory
from internals import keep_few_allocations
from observed import Room, a_room, captured, copy, fill, needs_frames

pytestmark = [
    pytest.mark.simulated,  # gpu: real PyTorch, in test_programs.py
    pytest.mark.no_races(False),  # they watch themselves
    needs_frames,
]

SEGMENT = 1 << 16
SIZE = 1 << 10


@pytest.fixture
def memory(
    torch: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> Iterator[standins.TorchMemory]:
    with a_room(), device_memory(0, SEGMENT) as segment:
        memory = standins.TorchMemory(torch, segment, SEGMENT)
        for name, module in memory.modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        yield memory


def test_chunks_of_a_segment_are_no_race(memory: standins.TorchMemory, room: Room) -> None:
    with us.observe(allocations=True, possible=True) as seen:
        for stream in (room.a, room.b) * 3:
            tensor = memory.malloc(SIZE)
            fill(tensor, stream, SIZE)
            copy(room.y if stream is room.a else room.x, tensor, stream, SIZE)
    assert seen.races == ()
    assert memory.snapshots == 0  # what nobody needs is not asked for


def test_a_race_names_the_line_that_allocated_the_tensor(
    memory: standins.TorchMemory, room: Room
) -> None:
    def weights() -> int:
        return memory.malloc(SIZE)

    with us.observe(allocations=True) as seen:
        memory.malloc(SIZE)
        tensor = weights()
        memory.malloc(SIZE)
        fill(tensor, room.a, SIZE)
        copy(room.y, tensor + 256, room.b, SIZE - 256)
        (race,) = seen.races
        assert [frame.name for frame in race.allocated] == ["<module>", "weights"]
    assert seen.races == (race,)
    assert (race.framework, race.kind) == ("torch", "read after write")
    line = weights.__code__.co_firstlineno + 1
    assert f"/test_torch.py:{line} in weights\n" in str(seen)
    assert seen.as_dict()["races"][0]["framework"] == "torch"
    assert seen.not_seen == ()
    assert memory.history is None  # as it was


def test_memory_that_another_tensor_was_given_too_early(
    memory: standins.TorchMemory, room: Room
) -> None:
    """Read on a stream that PyTorch was not told of: the next tensor overwrites it."""
    with us.observe(allocations=True) as seen:
        room.b.wait(room.a)
        first = memory.malloc(SIZE)
        copy(room.y, first, room.b, SIZE)
        memory.free(first)  # without record_stream
        second = memory.malloc(SIZE)
        assert second == first
        fill(second, room.a, SIZE)
    (race,) = (each for each in seen.races if each.kind != "freed while in use")
    assert race.kind == "write after read"
    assert race.allocated[-1].lineno is not None
    own = test_memory_that_another_tensor_was_given_too_early.__code__.co_firstlineno
    assert race.allocated[-1].lineno - own == 6
    assert "it was freed in between, and allocated again" in race.advice
    assert f"{__file__}:{own + 9}: keep it until" in race.advice
    assert "record_stream" in race.advice


def test_memory_of_a_tensor_that_was_there_before(memory: standins.TorchMemory, room: Room) -> None:
    """It has no line: that of the next tensor with its memory would be another one's."""
    first = memory.malloc(SIZE)
    with us.observe(allocations=True) as seen:
        copy(room.y, first, room.b, SIZE)
        memory.free(first)
        assert memory.malloc(SIZE) == first
        fill(first, room.a, SIZE)
    (race,) = seen.races
    assert (race.framework, race.allocated) == ("torch", ())
    line = test_memory_of_a_tensor_that_was_there_before.__code__.co_firstlineno + 6
    assert f"it was freed in between, and allocated again at {__file__}:{line}: " in race.advice


def test_a_block_that_is_used_again_on_its_own_stream_is_no_race(
    memory: standins.TorchMemory, room: Room
) -> None:
    with us.observe(allocations=True, possible=True) as seen:
        for _ in range(4):
            tensor = memory.malloc(SIZE)
            fill(tensor, room.a, SIZE)
            room.b.wait(room.a)
            copy(room.y, tensor, room.b, SIZE)
            event = room.b.record()  # as record_stream does when the tensor goes
            event.sync()
            memory.free(tensor)
    assert seen.races == ()


def test_what_the_history_has_lost_is_named_as_long_as_it_is_used(
    memory: standins.TorchMemory, room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_few_allocations(monkeypatch, 8)
    with us.observe(allocations=True) as seen:
        weights = memory.malloc(SIZE)
        for _ in range(20):
            memory.free(memory.malloc(2 * SIZE))
        fill(weights, room.a, SIZE)
        copy(room.y, weights, room.b, SIZE)
    (race,) = seen.races
    assert race.framework == "torch"
    assert race.allocated[-1].name.startswith("test_what_the_history_has_lost")


def test_what_was_allocated_before_is_torchs_and_has_no_line(
    memory: standins.TorchMemory, room: Room
) -> None:
    tensor = memory.malloc(SIZE)
    with us.observe(allocations=True) as seen:
        fill(tensor, room.a, SIZE)
        copy(room.y, tensor, room.b, SIZE)
    (race,) = seen.races
    assert (race.framework, race.allocated) == ("torch", ())
    assert "allocated by torch: (no line is known)" in str(race)


def test_a_history_that_is_kept_already_stays(memory: standins.TorchMemory, room: Room) -> None:
    memory.record()
    tensor = memory.malloc(SIZE)
    with us.observe(allocations=True) as seen:
        fill(tensor, room.a, SIZE)
        copy(room.y, tensor, room.b, SIZE)
    assert memory.history
    assert memory.most == 1 << 62
    assert seen.races[0].allocated[-1].name.startswith("test_a_history")


def test_torch_that_uses_cuda_later(memory: standins.TorchMemory, room: Room) -> None:
    """To ask it earlier would initialize CUDA."""
    memory.initialized = False
    with us.observe(allocations=True) as seen:
        seen._allocators.look()  # type: ignore[union-attr] -- as the thread does
        assert memory.history is None
        memory.initialized = True
        observed.until(lambda: memory.history is not None)
        tensor = memory.malloc(SIZE)
        fill(tensor, room.a, SIZE)
        copy(room.y, tensor, room.b, SIZE)
    assert seen.races[0].framework == "torch"
    assert memory.history is None


def test_torch_without_such_a_history(memory: standins.TorchMemory, room: Room) -> None:
    def refuses(*_: object, **how: object) -> None:
        raise RuntimeError("cudaMallocAsync does not yet support recordHistory")

    sys.modules["torch"].cuda.memory._record_memory_history = refuses
    with us.observe(allocations=True) as seen:
        fill(room.x, room.a)
        copy(room.y, room.x, room.b)
    (race,) = seen.races
    assert race.framework is None
    assert [what for what in seen.not_seen if "cudaMallocAsync does not yet" in what] == [
        "which lines allocate for torch: RuntimeError: cudaMallocAsync does not yet support "
        "recordHistory"
    ]


def test_a_tensor_that_is_freed_while_another_stream_uses_it(
    memory: standins.TorchMemory, room: Room
) -> None:
    """Nobody is given its memory in this run."""
    memory.stream = observed.handle(room.a)
    with us.observe(allocations=True) as seen:
        tensor = memory.malloc(SIZE)
        room.b.wait(room.a)
        copy(room.y, tensor, room.b, SIZE)
        memory.free(tensor)
        assert seen.races == ()  # the order may come later
        memory.malloc(2 * SIZE)
    (race,) = seen.races
    assert (race.kind, race.possible) == ("freed while in use", False)
    assert race.first.name == "cuMemcpyAsync"
    assert race.second.line is not None
    own = test_a_tensor_that_is_freed_while_another_stream_uses_it.__code__.co_firstlineno
    (freed,) = (frame for frame in race.second.stack if frame.filename == __file__)
    assert freed.lineno == own + 9
    assert race.framework == "torch"
    assert "second: the allocator of torch frees on " in str(race)
    assert "record_stream" in race.advice
    assert seen.not_seen == ()


def _told_the_allocator(memory: standins.TorchMemory, room: Room, tensor: int) -> None:
    memory.free(tensor, observed.handle(room.b))


def _waited_before(memory: standins.TorchMemory, room: Room, tensor: int) -> None:
    room.a.wait(room.b)
    memory.free(tensor)


def _waited_after(memory: standins.TorchMemory, room: Room, tensor: int) -> None:
    memory.free(tensor)
    room.a.wait(room.b)


def _synchronized(memory: standins.TorchMemory, room: Room, tensor: int) -> None:
    memory.free(tensor)
    room.b.sync()


def _other_stream_allocates(memory: standins.TorchMemory, room: Room, tensor: int) -> None:
    memory.free(tensor)
    memory.stream = observed.handle(room.b)


@pytest.mark.parametrize(
    "ends",
    [_told_the_allocator, _waited_before, _waited_after, _synchronized, _other_stream_allocates],
)
def test_a_tensor_that_is_freed_in_order(
    ends: Callable[[standins.TorchMemory, Room, int], None],
    memory: standins.TorchMemory,
    room: Room,
) -> None:
    memory.stream = observed.handle(room.a)
    with us.observe(allocations=True, possible=True) as seen:
        tensor = memory.malloc(SIZE)
        room.b.wait(room.a)
        copy(room.y, tensor, room.b, SIZE)
        ends(memory, room, tensor)
        memory.malloc(2 * SIZE)
    assert seen.races == ()


@pytest.mark.parametrize("is_ordered", [False, True])
def test_a_tensor_of_the_default_stream_that_is_freed(
    is_ordered: bool, memory: standins.TorchMemory, room: Room
) -> None:
    with us.observe(allocations=True, possible=True) as seen:
        for _ in range(3):
            tensor = memory.malloc(SIZE)
            fill(tensor, observed.LEGACY, SIZE)
            checked(driver.cuStreamSynchronize(observed.LEGACY))
            copy(room.y, tensor, room.b, SIZE)
            memory.free(tensor, *[observed.handle(room.b)] * is_ordered)
            memory.malloc(2 * SIZE)
            room.b.sync()
    assert [race.kind for race in seen.races] == ["freed while in use"] * (not is_ordered)


def test_uses_by_an_earlier_owner_are_not_those_of_a_freed_tensor(
    memory: standins.TorchMemory, room: Room
) -> None:
    memory.stream = observed.handle(room.a)
    with us.observe(allocations=True) as seen:
        tensor = memory.malloc(SIZE)
        copy(room.y, tensor, room.b, SIZE)
        memory.free(tensor, observed.handle(room.b))
        assert memory.malloc(SIZE) == tensor  # PyTorch would wait for the event first
        memory.free(tensor)
        memory.malloc(2 * SIZE)
    assert seen.races == ()


def test_the_trace_of_torch_is_switched_on_once(memory: standins.TorchMemory, room: Room) -> None:
    """PyTorch cannot switch it off."""
    for _ in range(2):
        with us.observe(allocations=True):
            memory.free(memory.malloc(SIZE))
    assert (len(memory.allocated), len(memory.deallocated)) == (1, 1)
    memory.free(memory.malloc(SIZE))  # told to nobody


def test_torch_without_such_a_trace(memory: standins.TorchMemory, room: Room) -> None:
    del sys.modules["torch"]._C._activate_gpu_trace
    with us.observe(allocations=True) as seen:
        tensor = memory.malloc(SIZE)
        fill(tensor, room.a, SIZE)
        copy(room.y, tensor, room.b, SIZE)
    assert seen.races[0].framework == "torch"
    (unseen,) = seen.not_seen
    assert unseen.startswith("what torch frees while another stream uses it: AttributeError: ")


@pytest.mark.parametrize("there", ["nothing", "half"])
def test_torch_that_is_not_there(there: str, room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    if there == "half":  # in the middle of its import
        monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    with us.observe(allocations=True) as seen:
        fill(room.x, room.a)
        copy(room.y, room.x, room.b)
    assert seen.races[0].framework is None
    assert seen.not_seen == ()


def test_nobody_is_asked_by_default(memory: standins.TorchMemory, room: Room) -> None:
    with us.observe() as seen:
        assert memory.history is None
        tensor = memory.malloc(SIZE)
        fill(tensor, room.a, SIZE)
        copy(room.y, tensor, room.b, SIZE)
    assert seen.races[0].framework is None
    assert memory.snapshots == 0


def test_an_observation_that_fails_to_begin_leaves_no_history(
    memory: standins.TorchMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = us.observe(allocations=True)

    assert seen._allocators is not None
    begin = seen._allocators.begin

    def begin_and_fail() -> None:
        begin()
        assert memory.history is not None
        raise ZeroDivisionError

    monkeypatch.setattr(seen._allocators, "begin", begin_and_fail)
    with pytest.raises(ZeroDivisionError):
        seen.__enter__()
    assert memory.history is None
    with us.observe():
        pass


def test_a_ctrl_c_while_it_ends_leaves_nothing_switched_on(
    memory: standins.TorchMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = us.Borrow.__enter__

    def interrupted(_: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    seen = us.observe(allocations=True)
    with seen:
        assert memory.history is not None
        monkeypatch.setattr(type(seen._session.done), "wait", interrupted)  # type: ignore[union-attr]
        with pytest.raises(KeyboardInterrupt):
            seen.stop()
    assert memory.history is None
    assert us.Borrow.__enter__ is before
    with us.observe():
        pass


def test_a_part_of_a_graph_is_of_the_time_of_its_launch(
    memory: standins.TorchMemory, room: Room
) -> None:
    with us.observe(allocations=True) as seen:
        tensor = memory.malloc(SIZE)
        graph = captured(room, lambda: copy(room.y, tensor, room.a, SIZE))
        fill(tensor, room.b, SIZE)
        checked(driver.cuGraphLaunch(graph, observed.handle(room.a)))
        memory.free(tensor)
        assert memory.malloc(SIZE) == tensor  # another one, which has nothing to do with it
        (race,) = (each for each in seen.races if each.kind != "freed while in use")
    assert race.framework == "torch"
    assert "freed in between" not in race.advice
