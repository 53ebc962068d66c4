"""The registry while its streams are being made or given away."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest

import userstream as us
from helpers import in_thread, running
from userstream._engine import lanes
from userstream._stream import stream as stream_module


def test_a_stream_that_was_given_away_stays() -> None:
    for give in (lambda s: s.handle, lambda s: s.__cuda_stream__()):
        stream = us.get_stream(0)
        give(stream)
        key, still_there = id(stream), weakref.ref(stream)
        us.close()
        del stream
        gc.collect()
        assert us.get_stream(0) is still_there()
        assert key in stream_module._given_away
    with us.UserStream() as mine:
        stream = mine.get_stream(0)
        give(stream)
        stream.close()
    assert id(stream) not in stream_module._given_away


def test_a_stream_that_is_made_while_its_registry_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine, create = us.UserStream(), lanes.create
    begun, go_on = threading.Event(), threading.Event()

    def create_slowly(*arguments: Any, **more: Any) -> Any:
        begun.set()
        go_on.wait(20)
        return create(*arguments, **more)

    monkeypatch.setattr(lanes, "create", create_slowly)
    refused: list[us.ClosedError] = []

    def make() -> None:
        try:
            mine.get_stream(0)
        except us.ClosedError as error:
            refused.append(error)

    making = threading.Thread(target=make)
    # At the last moment: the wait is over.
    monkeypatch.setattr(us.UserStream, "close", lambda _: (making.start(), begun.wait(20)))
    closing = threading.Thread(target=mine.__exit__, args=(None, None, None))
    closing.start()
    assert begun.wait(20)
    closing.join(20)
    assert not closing.is_alive(), "it is not held up"
    go_on.set()
    making.join(20)
    assert len(refused) == 1
    assert not mine._table.named.get(None)
    with pytest.raises(us.ClosedError):
        mine.get_stream(0)


def test_a_stream_that_the_driver_holds_up_holds_up_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``cuStreamCreate`` may wait for a free of another thread, and that for a busy device."""
    mine, create = us.UserStream(), lanes.create
    idle = mine.get_stream(0)
    begun, go_on = threading.Event(), threading.Event()

    def create_slowly(*arguments: Any, name: str | None, **more: Any) -> Any:
        if name == "late":
            begun.set()
            assert go_on.wait(20)
        return create(*arguments, name=name, **more)

    monkeypatch.setattr(lanes, "create", create_slowly)
    with (
        running(lambda: mine.get_stream(0, name="late")) as first,
        running(lambda: mine.get_stream(0, name="late")) as second,
    ):
        try:
            assert begun.wait(20)
            other = in_thread(lambda: mine.get_stream(0, name="other"))
            in_thread(lambda: mine.wait_all(timeout=20))
            in_thread(other.close)
            in_thread(lambda: mine.close(timeout=20))
            assert not mine.streams()
            assert in_thread(lambda: mine.get_stream(0)) is idle
        finally:
            go_on.set()
    assert first() is second()
    mine.close(timeout=20)


def test_a_signal_handler_that_makes_the_stream_that_is_being_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine, create = us.UserStream(), lanes.create
    found: list[us.Stream] = []

    def interrupted(*arguments: Any, **more: Any) -> Any:
        stream = create(*arguments, **more)
        monkeypatch.setattr(lanes, "create", create)
        found.append(mine.get_stream(0))
        return stream

    monkeypatch.setattr(lanes, "create", interrupted)
    assert mine.get_stream(0) is found[0]
    found[0].close()
    assert not mine.streams()
    assert mine.get_stream(0) is not found[0]
    mine.close(timeout=20)
