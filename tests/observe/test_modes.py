"""`observe` is told by ``mode="read"`` what a block only reads: on the simulated driver."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver
from cuda.core import LaunchConfig, ObjectCode, launch

import userstream as us
from helpers import CAI, checked
from internals import allocate_unseen, listeners_of_borrows, lose_calls
from observed import (
    SIZE,
    a_room,
    captured,
    copy,
    engine_of,
    fill,
    handle,
    needs_frames,
    view,
)
from userstream.testing import Pointer, inject, kernel

pytestmark = [
    pytest.mark.simulated,
    pytest.mark.no_races(False),  # they watch themselves
    needs_frames,
]


UNKNOWN = driver.CUresult.CUDA_ERROR_UNKNOWN


@kernel("modes_sum")
def _sum(grid: Any, block: Any, to: Pointer, source: Pointer, n: np.int64) -> None:
    to.array(n, np.uint8)[:] = source.array(n, np.uint8)


def summing() -> Callable[..., None]:
    kernel = ObjectCode.from_ptx(b"any").get_kernel("modes_sum")

    def run(stream: us.Stream, to: int, source: int, count: int = 64) -> None:
        launch(stream, LaunchConfig(grid=1, block=1), kernel, to, source, np.int64(count))

    return run


def array(address: int) -> CAI:
    return CAI(address, (SIZE // 4,))


def borrowed(address: int, stream: us.Stream, mode: Any = "read") -> us.Borrow:
    return us.borrow(array(address), stream=stream, producer=None, mode=mode)


@contextmanager
def acquired(address: int, stream: us.Stream, mode: Any = "read") -> Iterator[None]:
    us.acquire(array(address), stream=stream, producer=None, mode=mode)
    yield
    us.release(array(address), stream=stream, producer=None)


Use = Callable[..., AbstractContextManager[object]]
EITHER = pytest.mark.parametrize("use", [borrowed, acquired], ids=["borrow", "acquire"])


def accesses(seen: us.Observation, address: int) -> list[str]:
    """Return how each access is known that is remembered there: what is not declared is guessed."""
    found = engine_of(seen).world.memory.find(address)
    assert found is not None
    there = [each for each in found.accesses if each.start <= address < each.end]
    assert not any(each.write for each in there if each.known == "declared")
    return ["guessed" if each.known in ("assumed", "learned") else each.known for each in there]


# -- what is declared ------------------------------------------------------------------------------


@EITHER
def test_two_kernels_that_only_read_do_not_race(use: Use) -> None:
    """Nor may they: with ``possible=True`` it would be said of kernels that are not known yet."""
    with a_room() as room:
        run = summing()
        with us.observe(possible=True) as seen:
            with use(room.x, room.a), use(room.x, room.b):
                run(room.a, room.y, room.x)
                run(room.b, room.pinned, room.x)
        assert seen.races == ()


@EITHER
def test_a_write_elsewhere_races_with_what_is_declared(use: Use) -> None:
    with a_room() as room:
        run = summing()
        with us.observe() as seen:
            with use(room.x, room.a):
                run(room.a, room.y, room.x)
                fill(room.x, room.b)
        (race,) = seen.races
    assert (race.kind, race.first.access, race.first.known) == (
        "write after read",
        "read",
        "declared",
    )
    assert "modes_sum reads (declared) on " in str(seen)


def test_it_counts_more_than_what_was_learned() -> None:
    """A neighbour's bytes may have changed while it was looked at."""
    with a_room() as room:
        run = summing()
        with us.observe() as seen:
            for value in range(6):
                checked(driver.cuMemsetD8Async(room.x, value, SIZE, handle(room.a)))
                run(room.a, room.y, room.x)
                room.a.sync()
            run(room.a, room.y, room.x)
            copy(room.pinned, room.y, room.b)
            us.wait_for_device(0)
            with borrowed(room.y, room.a):
                run(room.a, room.y, room.x)
                copy(room.pinned, room.y, room.b)
        (race,) = seen.races
    assert (race.first.known, race.count) == ("learned", 1)


def test_looks_that_fail_take_no_place_from_later_ones() -> None:
    """There are 32 places, and the end of a look that fails is marked once more."""
    with a_room() as room:
        run = summing()
        with us.observe() as seen:
            with inject("cuStreamWriteValue32", UNKNOWN, count=500, strict=False):
                for _ in range(40):
                    run(room.a, room.y, room.x)
            for value in range(20):
                checked(driver.cuMemsetD8Async(room.x, value, SIZE, handle(room.a)))
                run(room.a, room.y, room.x)
                room.a.sync()
            run(room.a, room.y, room.x)
            fill(room.y, room.b)
        (race,) = seen.races
    assert race.first.known == "learned"


def test_what_a_call_says_itself_stays_true() -> None:
    with a_room() as room, us.observe() as seen:
        with borrowed(room.x, room.a):
            fill(room.x, room.a)
            copy(room.y, room.x, room.b)
        (race,) = seen.races
    assert (race.kind, race.first.access, race.first.known) == (
        "read after write",
        "write",
        "exact",
    )


def test_the_way_back_is_put_in_order_as_ever() -> None:
    with a_room() as room:
        run = summing()
        with us.observe() as seen:
            with us.borrow(array(room.x), stream=room.a, producer=room.b, mode="read"):
                run(room.a, room.y, room.x)
            fill(room.x, room.b)
        assert seen.races == ()
        assert accesses(seen, room.x) == ["exact"]


def test_all_of_a_buffer_is_meant_and_nothing_beside_it() -> None:
    with a_room() as room, us.observe() as seen:
        run = summing()
        half, quarter = SIZE // 2, SIZE // 4
        places = [room.x, room.x + half, room.x + half + quarter - 1, room.x + half + quarter]
        part = CAI(room.x + half, (quarter // 4,))
        with us.borrow(part, stream=room.a, producer=None, mode="read"):
            for place in places:
                run(room.a, room.y, place, 8)
        known = [accesses(seen, place) for place in places]
    declared, guessed = ["declared"], ["guessed"]
    assert known == [guessed, declared, declared, guessed]


def test_an_address_means_its_allocation() -> None:
    with a_room() as room, us.observe() as seen:
        run = summing()
        pointer = driver.CUdeviceptr(room.x)
        with us.borrow(pointer, stream=room.a, producer=None, mode="read"):
            run(room.a, room.y, room.x + 64)
        assert accesses(seen, room.x + 64) == ["declared"]


def test_an_array_that_runs_backwards() -> None:
    with a_room() as room, us.observe() as seen:
        run = summing()
        backwards = CAI(room.x + 64, (17,), strides=(-4,))
        with us.borrow(backwards, stream=room.a, producer=None, mode="read"):
            run(room.a, room.y, room.x)
            run(room.a, room.y, room.x + 67)
            run(room.a, room.y, room.x + 68)
        found = [accesses(seen, room.x + at) for at in (0, 67, 68)]
    assert found == [["declared"], ["declared"], ["guessed"]]


def test_graphs_inside_of_a_block_and_blocks_inside_of_a_graph() -> None:
    with a_room() as room, us.observe() as seen:
        run = summing()
        plain = captured(room, lambda: run(room.a, room.y, room.x))

        def declared() -> None:
            with us.borrow(array(room.x), stream=room.a, producer=room.a, mode="read"):
                run(room.a, room.y, room.x)

        inside = captured(room, declared)
        for graph, mode in ((plain, "read"), (plain, "write"), (inside, "write")):
            room.a.sync()
            fill(room.x, room.a)
            with borrowed(room.x, room.a, mode):
                checked(driver.cuGraphLaunch(graph, handle(room.a)))
            expected = "guessed" if (graph, mode) == (plain, "write") else "declared"
            assert accesses(seen, room.x)[-1] == expected


def test_what_a_graph_fills_stays_written() -> None:
    with a_room() as room, us.observe() as seen:
        graph = captured(room, lambda: fill(room.x, room.a))
        with borrowed(room.x, room.a):
            checked(driver.cuGraphLaunch(graph, handle(room.a)))
        assert accesses(seen, room.x) == ["exact"]


# -- from when to when -----------------------------------------------------------------------------


@EITHER
def test_it_ends_with_the_block(use: Use) -> None:
    with a_room() as room:
        run = summing()
        with us.observe() as seen:
            run(room.a, room.y, room.x)
            with use(room.x, room.a):
                pass
            run(room.a, room.y, room.x)
            assert set(accesses(seen, room.x)) == {"guessed"}
            assert engine_of(seen).world.declarations.open == {}


def test_it_ends_with_a_block_that_is_left_by_an_error_or_not_at_all() -> None:
    with a_room() as room, us.observe() as seen:
        with pytest.raises(ZeroDivisionError), borrowed(room.x, room.a):
            raise ZeroDivisionError
        lost = borrowed(room.x, room.a)
        lost.__enter__()  # as if a Ctrl-C had come at the first step of its end
        del lost
        gc.collect()
        assert engine_of(seen).world.declarations.open == {}


def test_it_ends_even_if_a_ctrl_c_comes_as_that_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    with a_room() as room, us.observe() as seen:
        borrow = borrowed(room.x, room.a)
        with pytest.raises(KeyboardInterrupt), borrow:
            monkeypatch.setattr(type(seen._recorder), "note", interrupted)
        del borrow
        gc.collect()
        assert engine_of(seen).world.declarations.open == {}


def test_a_borrow_that_is_entered_again_declares_again() -> None:
    with a_room() as room, us.observe() as seen:
        run = summing()
        borrow = borrowed(room.x, room.a)
        for _ in range(2):
            with borrow:
                run(room.a, room.y, room.x)
                assert accesses(seen, room.x) == ["declared"]
            assert engine_of(seen).world.declarations.open == {}


@EITHER
@pytest.mark.parametrize(("outer", "inner"), [("read", "write"), ("write", "read")])
def test_of_nested_blocks_the_innermost_counts(use: Use, outer: Any, inner: Any) -> None:
    found = []
    with a_room() as room, us.observe() as seen:
        run = summing()
        with borrowed(room.y, room.a), use(room.x, room.a, outer):
            for where in (borrowed(room.x, room.a, inner), borrowed(room.y, room.b)):
                with where:
                    run(room.a, room.pinned, room.x)
                    found += accesses(seen, room.x)[-1:]
                    us.wait_for_device(0)
                    engine_of(seen).world.memory.trim(lambda _: True)
    known = {"read": "declared", "write": "guessed"}
    assert found == [known[inner], known[outer]]


def test_buffers_of_two_borrows_have_each_its_mode() -> None:
    with a_room() as room, us.observe() as seen:
        run = summing()
        with borrowed(room.x, room.a), borrowed(room.y, room.a, "write"):
            run(room.a, room.y, room.x)
        assert accesses(seen, room.x) == ["declared"]
        assert accesses(seen, room.y) == ["guessed"]


def test_another_thread_and_another_stream_have_declared_nothing() -> None:
    """The user stream is shared: one thread may read where another one writes."""
    with a_room() as room, us.observe() as seen:
        run = summing()

        def write() -> None:
            with borrowed(room.x, room.a, "write"):
                run(room.a, room.x, room.y)

        with borrowed(room.x, room.a):
            worker = threading.Thread(target=write)
            worker.start()
            worker.join()
            assert accesses(seen, room.x) == ["guessed"]
            room.b.wait(room.a)
            run(room.b, room.x, room.y)
            assert set(accesses(seen, room.x)) == {"guessed"}
            run(room.a, room.y, room.x)
            assert accesses(seen, room.x)[-1] == "declared"


def test_what_is_allocated_there_later_was_not_declared() -> None:
    with a_room() as room, us.observe() as seen:
        run = summing()
        address = int(checked(driver.cuMemAllocAsync(SIZE, handle(room.a))))
        us.acquire(array(address), stream=room.a, producer=None, mode="read")  # and not released
        run(room.a, room.y, address)
        assert accesses(seen, address)[-1] == "declared"
        engine = engine_of(seen)
        allocate_unseen(engine.world.memory, address, SIZE)
        run(room.a, room.y, address)
        assert accesses(seen, address)[-1] == "guessed"
        checked(driver.cuMemFreeAsync(address, handle(room.a)))


def test_what_is_acquired_to_be_written_inside_of_a_block_that_reads_may_be_written() -> None:
    with a_room() as room, us.observe() as seen:
        run = summing()
        with borrowed(room.x, room.a):
            with acquired(room.x, room.a, "write"):
                run(room.a, room.x, room.y)
                assert accesses(seen, room.x) == ["guessed"]
            run(room.a, room.y, room.x)
            assert accesses(seen, room.x)[-1] == "declared"
        us.acquire(array(room.x), stream=room.a, producer=None, mode="read")
        us.acquire(array(room.x), stream=room.a, producer=None)  # the last one counts
        run(room.a, room.x, room.y)
        assert accesses(seen, room.x)[-1] == "guessed"


def test_so_it_is_where_a_user_stream_is_acquired_the_quick_way() -> None:
    with a_room() as room, us.observe() as seen:
        run = summing()
        x = view(room.x, room.a)
        for _ in range(2):  # the first of a type is not quick
            with us.borrow(x, mode="read") as stream:
                us.acquire(x)
                run(stream, room.x, room.y)
                assert accesses(seen, room.x)[-1] == "guessed"
                us.release(x)
                run(stream, room.y, room.x)
                assert accesses(seen, room.x)[-1] == "declared"
            room.a.sync()


@pytest.mark.parametrize("heard_of", [False, True])
def test_what_is_allocated_there_inside_of_the_block_was_not_declared(heard_of: bool) -> None:
    with a_room() as room, us.observe() as seen:
        run = summing()
        if heard_of:
            fill(room.x, room.a)
        with borrowed(room.x, room.a):
            allocate_unseen(engine_of(seen).world.memory, room.x, SIZE, operation=object())
            run(room.a, room.x, room.y)
        assert accesses(seen, room.x)[-1] == "guessed"


def test_it_ends_where_its_end_may_have_been_lost() -> None:
    with a_room() as room, us.observe() as seen:
        run = summing()
        with borrowed(room.x, room.a):
            lose_calls(seen, 1)
            run(room.a, room.y, room.x)
            assert accesses(seen, room.x) == ["guessed"]


def test_ever_other_buffers_that_are_acquired_do_not_grow() -> None:
    with a_room() as room, us.observe() as seen:
        for at in range(1100):
            part = CAI(room.x + at, (1,))
            us.acquire(part, stream=room.a, producer=None, mode="read")
        (found,) = engine_of(seen).world.declarations.open.values()
        assert len(found) == 1024
        assert found[-1].start == room.x + 1099


def test_what_is_acquired_and_never_released_does_not_grow() -> None:
    with a_room() as room, us.observe() as seen:
        for _ in range(50):
            us.acquire(array(room.x), stream=room.a, producer=None, mode="read")
        (found,) = engine_of(seen).world.declarations.open.values()
        assert len(found) == 1
        us.release(array(room.x), stream=room.b, producer=None)  # it was not acquired there
        assert len(engine_of(seen).world.declarations.open) == 1
        us.release(array(room.x), stream=room.a, producer=None)
        assert engine_of(seen).world.declarations.open == {}


# -- what it costs the others ----------------------------------------------------------------------


def test_who_observes_nothing_meets_nothing_of_it() -> None:
    hooks = listeners_of_borrows()
    assert not any(hooks)
    with a_room() as room:
        with us.observe():
            assert all(hooks)
            left = borrowed(room.x, room.a)
            left.__enter__()
        assert not any(hooks)
        left.__exit__(None, None, None)  # begun while it was observed
        with borrowed(room.x, room.a) as stream, us.observe() as seen:  # and before
            assert stream is room.a
        assert seen.races == ()


@pytest.mark.parametrize("wrong", ["readwrite", "READ", "", None, True, 1, ["read"]], ids=repr)
@pytest.mark.parametrize("use", [us.borrow, us.acquire], ids=["borrow", "acquire"])
def test_another_mode_is_refused_before_anything_else(use: Callable[..., Any], wrong: Any) -> None:
    with pytest.raises(ValueError, match=r'mode must be "read", .* or "write", not'):
        use(object(), mode=wrong)


def test_a_mode_that_is_equal_is_that_mode() -> None:
    with a_room() as room:
        for mode in ("write", "read"):
            equal = "".join(mode)
            with us.borrow(array(room.x), producer=None, mode=equal) as stream:
                assert us.acquire(array(room.x), producer=None, mode=equal) is stream
                us.release(array(room.x), producer=None)
