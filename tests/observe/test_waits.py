"""Waits of the program: what follows a wait is ordered after the work that was waited for."""

from __future__ import annotations

import asyncio
import inspect
import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import userstream as us
from observed import SIZE, Room, a_room, fill, until, view

pytestmark = [
    pytest.mark.simulated,
    pytest.mark.no_races(False),  # these tests observe themselves
]


def kinds(seen: us.Observation) -> list[str]:
    return [race.kind for race in seen.races]


def _sync_event(room: Room) -> None:
    event = room.a.record()
    until(lambda: event.is_done)


def _call_back(room: Room) -> None:
    called = threading.Event()
    us.completion(room.a).add_done_callback(lambda _: called.set())
    assert called.wait(10)


async def _await(make: Callable[[], Any]) -> None:
    await make()


WAITS: dict[str, Callable[[Room], object]] = {
    "wait": lambda room: us.wait(room.a),
    "wait(timeout)": lambda room: us.wait(room.a, timeout=10),
    "wait(buffer)": lambda room: us.wait(view(room.x, room.a)),
    "wait_all": lambda room: us.wait_all(),
    "wait_for_device": lambda room: us.wait_for_device(0),
    "Stream.sync": lambda room: room.a.sync(),
    "Stream.sync(timeout)": lambda room: room.a.sync(timeout=10),
    "Stream.is_done": lambda room: until(lambda: room.a.is_done),
    "Event.is_done": _sync_event,
    "Event.sync": lambda room: room.a.record().sync(),
    "asnumpy": lambda room: us.asnumpy(view(room.x, room.a), stream=room.a),
    "asnumpy, user stream": lambda room: us.asnumpy(view(room.x, room.a)),
    "copyto(host)": lambda room: us.copyto(np.empty(SIZE, np.uint8), view(room.x, room.a)),
}


def on_user_stream(room: Room) -> bool:
    """Put the stream of a case behind the user stream, for waits that are for user streams."""
    us.get_stream(0).wait(room.a)
    return True


@pytest.mark.parametrize("name", WAITS)
def test_what_follows_a_wait_of_the_program_is_ordered(name: str) -> None:
    with a_room() as room, us.observe() as seen:
        fill(room.x, room.a)
        on_user_stream(room)
        WAITS[name](room)
        fill(room.x, room.b)
    assert kinds(seen) == []


ENDS: dict[str, Callable[[us.UserStream], object]] = {
    "UserStream.close": lambda mine: mine.close(),
    "UserStream.close(timeout)": lambda mine: mine.close(timeout=10),
    "UserStream.wait_all": lambda mine: mine.wait_all(),
    "UserStream.wait_for_device": lambda mine: mine.wait_for_device(0),
    "UserStream.wait": lambda mine: mine.wait(0),
}


@pytest.mark.parametrize("name", ["with", *ENDS])
def test_what_follows_the_end_of_a_registry_is_ordered(name: str) -> None:
    with a_room() as room, us.observe() as seen:
        if name == "with":
            with us.UserStream() as mine:
                fill(room.x, mine.get_stream(0))
        else:
            mine = us.UserStream()
            fill(room.x, mine.get_stream(0))
            ENDS[name](mine)
        fill(room.x, room.b)
        assert kinds(seen) == []
        mine.close()


FUTURES: dict[str, Callable[[Room], object]] = {
    "completion": lambda room: us.completion(room.a).result(10),
    "Completion.result": lambda room: us.completion(room.a).result(),
    "Completion.exception": lambda room: us.completion(room.a).exception(10),
    "Completion.done": lambda room: until(us.completion(room.a).done),
    "Completion.add_done_callback": _call_back,
    "Completion.__await__": lambda room: asyncio.run(_await(lambda: us.completion(room.a))),
    "wait_async": lambda room: asyncio.run(_await(lambda: us.wait_async(room.a))),
    "wait_all_async": lambda room: asyncio.run(_await(us.wait_all_async)),
    "asnumpy_async": lambda room: asyncio.run(
        _await(lambda: us.asnumpy_async(view(room.x, room.a)))
    ),
}


@pytest.mark.parametrize("name", FUTURES)
def test_what_follows_a_future_is_possibly_ordered(name: str) -> None:
    """Who looks at a future cannot be seen: such a race is possible at most."""
    with a_room() as room, us.observe() as seen:
        fill(room.x, room.a)
        on_user_stream(room)
        FUTURES[name](room)
        fill(room.x, room.b)
    assert kinds(seen) == []


def test_what_follows_a_borrow_is_not_ordered_by_it() -> None:
    """A borrow asks events for userstream's own sake: the program does not hear the answers."""
    with a_room() as room, us.observe() as seen:
        with us.borrow(view(room.x, room.a), stream=room.b) as stream:
            fill(room.x, stream)
        us.hold(object(), stream=room.b)
        fill(room.x, room.stream())
    assert kinds(seen) == ["write after write"]


# Names that neither wait nor query whether work has completed.
NO_WAITS = {
    *("acquire", "borrow", "describe", "device_of", "get_stream", "hand_over", "hold", "observe"),
    *("no_stalls", "pinned_empty", "pinned_like", "release", "stall_allowed", "streams"),
    *("UserStream.get", "UserStream.unknown", "UserStream.set_pinned_limit"),
    *(f"Stream.{name}" for name in ("create", "from_handle", "legacy_default", "close", "handle")),
    *(f"Stream.{name}" for name in ("per_thread_default", "priority_range", "device", "context")),
    *(f"Stream.{name}" for name in ("resources", "name", "sms", "flags", "is_nonblocking")),
    *(f"Stream.{name}" for name in ("priority", "stream_id", "wait", "wait_event", "record")),
    *(f"Stream.{name}" for name in ("activate", "is_capturing", "capture_info", "capture")),
    *(f"Stream.{name}" for name in ("begin_capture", "end_capture", "create_graph_builder")),
    *(f"Stream.{name}" for name in ("capture_mode", "write_value_32", "write_value_64")),
    *(f"Stream.{name}" for name in ("wait_value_32", "wait_value_64", "batch_mem_op")),
    *(f"Stream.{name}" for name in ("memcpy_dtod", "attach_mem_async", "get_attribute")),
    *(f"Stream.{name}" for name in ("set_attribute", "copy_attributes_from")),
    *(f"Stream.{name}" for name in ("launch_host_func", "add_callback")),
    *("Completion.cancel", "Completion.cancelled"),
    *("with Borrow", "with Observation", "with Stream"),  # that of a Stream closes it
}


def public_names() -> set[str]:
    """Return the public functions, methods, properties and context managers."""
    public = {name: getattr(us, name) for name in us.__all__}
    names = {name for name, each in public.items() if inspect.isroutine(each)}
    names |= {f"UserStream.{name}" for name in vars(us.UserStream).keys() - names}
    for kind in (us.Stream, us.Completion):
        names |= {f"{kind.__name__}.{name}" for name in vars(kind)}
    names = {name for name in names if name.rpartition(".")[2][0] != "_"}
    classes = [each for each in public.values() if isinstance(each, type)]
    return names | {f"with {each.__name__}" for each in classes if hasattr(each, "__exit__")}


def test_every_public_name_is_a_wait_a_future_or_neither() -> None:
    """A new function, method or context manager belongs into one of the tables above."""
    tables = (*WAITS, *FUTURES, "with UserStream", *(name.partition(".")[2] for name in ENDS))
    tried = {re.split("[(,]", name)[0] for name in tables}  # without the arguments
    assert public_names() - tried == NO_WAITS
