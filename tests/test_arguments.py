"""Arguments that mean the same everywhere, and what says so where they do not fit."""

from __future__ import annotations

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
