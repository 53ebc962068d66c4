"""`observe` on memory that graphs allocate and free: each launch makes it anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from cuda.bindings import driver

import userstream as us
from helpers import checked
from observed import SIZE, Room, a_room, captured, copy, fill, handle
from userstream.testing import reset

pytestmark = [
    pytest.mark.simulated,
    pytest.mark.no_races(False),  # they watch themselves
]


def allocating(room: Room, *, free: bool = False) -> tuple[Callable[[], None], int]:
    """Return what launches a graph that allocates and fills, and perhaps frees; the address."""
    made: list[int] = []

    def work() -> None:
        made.append(int(checked(driver.cuMemAllocAsync(SIZE, handle(room.a)))))
        fill(made[0], room.a)
        if free:
            checked(driver.cuMemFreeAsync(made[0], handle(room.a)))

    graph: Any = captured(room, work)
    return lambda: checked(driver.cuGraphLaunch(graph, handle(room.a))), made[0]


def test_what_each_launch_makes_is_not_what_was_freed() -> None:
    with a_room() as room, us.observe() as seen:
        launch, address = allocating(room)
        for _ in range(3):
            launch()
            copy(room.x, address, room.a)
            checked(driver.cuMemFreeAsync(address, handle(room.a)))
        assert seen.races == (), seen


def test_what_is_freed_in_each_launch_is_made_in_each() -> None:
    with a_room() as room, us.observe() as seen:
        launch, _ = allocating(room, free=True)
        for _ in range(3):
            launch()
        assert seen.races == (), seen


def test_what_follows_in_a_graph_at_the_address_of_what_was_freed_stays() -> None:
    with a_room() as room, us.observe() as seen:
        made = []

        def work() -> None:
            for _ in range(2):
                made.append(int(checked(driver.cuMemAllocAsync(SIZE, handle(room.a)))))
                fill(made[-1], room.a)
                if len(made) == 1:
                    checked(driver.cuMemFreeAsync(made[0], handle(room.a)))

        graph = captured(room, work)
        checked(driver.cuGraphLaunch(graph, handle(room.a)))
        copy(room.x, made[1], room.a)
        checked(driver.cuMemFreeAsync(made[1], handle(room.a)))
        assert seen.races == (), seen


def races(work: Callable[[Room], None], suppress: Sequence[str] = ()) -> list[us.Race]:
    """Return the races of what may go wrong this time, or not."""
    with a_room() as room:
        with us.observe(suppress=suppress) as seen:
            work(room)
        for stream in (room.a, room.b):
            driver.cuStreamSynchronize(handle(stream))
        reset()
    return list(seen.races)


def test_another_stream_has_to_wait_for_the_launch() -> None:
    def work(room: Room) -> None:
        launch, address = allocating(room)
        launch()
        copy(room.x, address, room.b)
        room.a.wait(room.b)
        checked(driver.cuMemFreeAsync(address, handle(room.a)))

    (race,) = races(work)
    assert race.kind == "read after write"
    assert race.first.captured is not None
    assert race.first.captured.name == "fill"


def test_another_stream_has_to_be_done_before_it_is_freed() -> None:
    def work(room: Room) -> None:
        launch, address = allocating(room)
        launch()
        room.b.wait(room.a)
        copy(room.x, address, room.b)
        checked(driver.cuMemFreeAsync(address, handle(room.a)))

    (race,) = races(work)
    assert (race.kind, race.first.access) == ("freed while in use", "read")
    assert race.key.startswith("race=use-after-free ")  # it may be seen in the other order as well
    for kind in ("use-after-free", "freed-while-in-use"):
        assert races(work, [f"race={kind}"]) == []


def test_what_a_graph_frees_is_free() -> None:
    def work(room: Room) -> None:
        launch, address = allocating(room)
        free: Any = captured(room, lambda: checked(driver.cuMemFreeAsync(address, handle(room.a))))
        launch()
        room.b.wait(room.a)
        copy(room.x, address, room.b)
        checked(driver.cuGraphLaunch(free, handle(room.a)))

    (race,) = races(work)
    assert race.kind == "freed while in use"
    assert race.second.captured is not None
