"""Order between streams: interruptions and drivers that lack calls."""

from __future__ import annotations

import gc
import types
from typing import Any

import numpy as np
import pytest

import userstream as us
from helpers import (
    CAI,
    Delegating,
    is_blocked,
    running,
)
from userstream import _driver, _table, _unentered, testing
from uses import borrow, is_waited_for

pytestmark = pytest.mark.usefixtures("no_garbage")


def test_a_ctrl_c_at_the_end_of_an_activation(
    torch: types.ModuleType, cupy: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, within = us.get_stream(0), _driver.contexts.within
    before = cupy.cuda.get_current_stream(0)
    for after in (False, True):
        hits = [KeyboardInterrupt]

        def interrupted(*arguments: Any, after: bool = after, hits: Any = hits) -> Any:
            result = within(*arguments) if after or not hits else None
            if hits:
                raise hits.pop()
            return result

        block = stream.activate("torch", "cupy")
        block.__enter__()
        with monkeypatch.context() as patch:
            patch.setattr(_driver.contexts, "within", interrupted)
            with pytest.raises(KeyboardInterrupt):
                block.__exit__(None, None, None)
        assert torch.cuda.current_stream(0).cuda_stream == 0
        assert cupy.cuda.get_current_stream(0) is before


def test_a_driver_that_has_no_such_edges(monkeypatch: pytest.MonkeyPatch, memory: int) -> None:
    """Before CUDA 12.5: as if it were not wanted."""
    monkeypatch.setattr(_driver.streams, "has_context_events", lambda: False)
    with pytest.raises(us.UnknownProducerError, match="producer="):
        us.acquire(CAI(memory, stream=None))


def test_torch_is_asked_once_for_a_gpu(
    torch: types.ModuleType, monkeypatch: pytest.MonkeyPatch, memory: int
) -> None:
    """It asks the runtime each time, and each edge with a device looks at its current stream."""
    asked: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: asked.append(True) or True)
    for _ in range(3):
        borrow(CAI(memory, stream=None))
    assert len(asked) == 1


def test_nothing_piles_up(buffer: CAI, mine: us.Stream) -> None:
    """Neither what was passed nor what is acquired and never released."""
    us.get_stream(0)
    noted = us.UserStream.get()._uses
    for _ in range(20):
        borrow(buffer, stream=mine)
    kept = [CAI(buffer.interface["data"][0], stream=-1) for _ in range(_table._MOST_ACQUIRED + 20)]
    for each in kept:
        us.acquire(each, stream=mine)
    with testing.latch(mine):
        us.acquire(buffer, stream=mine)
        assert is_waited_for(buffer)
    us.wait(buffer, timeout=20)
    gc.collect()
    assert len(noted._acquired) <= _table._MOST_ACQUIRED
    assert len(noted.pending) <= _table._MOST_ACQUIRED + 1
    us.release(kept, stream=mine)
    us.release(buffer, stream=mine)
    mine.sync(timeout=20)
    us.wait(buffer, timeout=20)
    assert not noted._acquired


SIZE = 256
NEW = np.full(SIZE, 7, "u1")


def delegating(address: int, producer: us.Stream, **more: Any) -> Delegating:
    return Delegating(address, producer, shape=(SIZE,), typestr="|u1", **more)


@pytest.mark.simulated
def test_a_driver_that_cannot_let_a_context_wait(
    producer: us.Stream, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(_context: object, _event: object) -> None:
        raise us.NotSupportedError("cuCtxWaitEvent is not in the installed driver")

    monkeypatch.setattr(_driver.streams, "let_context_wait", missing)
    with testing.latch(us.get_stream(0)) as latch:
        with running(lambda: us.copyto(delegating(memory, producer), NEW)) as result:
            assert is_blocked(result)
            latch.release()
            result()


def test_blocks_reuse_their_warnings(memory: int) -> None:
    """A destructor would lose a Ctrl-C that arrives in it: none runs for an entered block."""
    buffer = CAI(memory, stream=-1)
    with us.borrow(buffer):
        pass
    spare = list(_unentered.spare)
    assert spare
    for _ in range(10):
        with us.borrow(buffer), us.borrow(buffer):
            pass
    assert len(_unentered.spare) <= len(spare) + 1
    assert all(each in _unentered.spare for each in spare)
    assert all(each.code is None for each in _unentered.spare), "which would keep modules alive"
