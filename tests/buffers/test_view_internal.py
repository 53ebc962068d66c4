"""A view looks at a buffer once, whatever a call does with it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cuda.core import Buffer

import userstream as us
from helpers import (
    CAI,
    DLPack,
)
from userstream import _buffers, testing
from userstream._buffers.view import Layout, View, cached, contiguous_strides


class Counted(CAI):
    """An array that counts how often it is looked at."""

    reads = 0

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        self.reads += 1
        return self.interface


class Both(Counted):
    """One that speaks DLPack as well."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)

    def __dlpack__(self, **_: Any) -> Any:
        return object()


def borrow(buffer: Any) -> None:
    with us.borrow(buffer):
        pass


CALLS: list[Callable[[Any], object]] = [
    us.get_stream,
    us.device_of,
    us.describe,
    us.wait,
    us.acquire,
    us.release,
    borrow,
    us.asnumpy,
    lambda buffer: us.copyto(buffer, np.zeros(4, "f4")),
    lambda buffer: us.copyto(np.zeros(4, "f4"), buffer),
]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", [Counted, Both])
def test_the_interface_is_read_once(
    call: Callable[[Any], object], kind: type[Counted], memory: int, producer: us.Stream
) -> None:
    us.get_stream(0)
    call(kind(memory, stream=int(producer.handle)))
    counted = kind(memory, stream=int(producer.handle))
    call(counted)
    assert counted.reads <= 1


class Exporting:
    """One that is told by a capsule alone, and counts how often it is exported."""

    def __init__(self, address: int) -> None:
        self.address, self.exports = address, 0

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)

    def __dlpack__(self, *, stream: int | None = None, **how: Any) -> Any:
        self.exports += 1
        return Buffer.from_handle(self.address, 16, owner=self).__dlpack__(**how)


@pytest.mark.parametrize("call", CALLS[:8])
def test_it_is_exported_once(call: Callable[[Any], object], memory: int) -> None:
    us.get_stream(0)
    exporting = Exporting(memory)
    call(exporting)
    assert exporting.exports <= 1


@pytest.mark.simulated
@pytest.mark.parametrize("call", CALLS[:7])
def test_the_driver_is_asked_once_about_the_pointer(
    call: Callable[[Any], object], memory: int
) -> None:
    us.get_stream(0)
    before = testing.calls("cuPointerGetAttributes")
    call(Counted(memory, stream=1))
    assert testing.calls("cuPointerGetAttributes") == before + 1


@pytest.mark.usefixtures("no_garbage")
def test_a_view_is_no_cycle(memory: int) -> None:
    array = CAI(memory, stream=4711)
    alive = weakref.ref(array)
    view = _buffers.view_of(array)
    view.info()
    assert [unit.producer.handle for unit in view.units] == [4711]
    del array, view
    assert alive() is None, gc.get_referrers(alive())


def test_an_answer_that_failed_is_asked_for_again() -> None:
    class Flaky(View):
        source = "flaky"
        asked = 0

        @cached
        def layout(self) -> Layout:
            self.asked += 1
            if self.asked == 1:
                raise ValueError("not now")
            return Layout(self.asked)

    view = Flaky(object())
    with pytest.raises(ValueError, match="not now"):
        _ = view.layout
    assert view.layout is view.layout == Layout(2)


# -- the table of rules -----------------------------------------------------------------------


def test_the_table_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_buffers, "_MOST_TYPES", 8)
    for number in range(50):
        kind = type(f"Array{number}", (DLPack,), {})
        assert us.get_stream(kind(2, 0)) is us.get_stream(0)
        with pytest.raises(us.UnsupportedBufferError):
            us.get_stream(type(f"Odd{number}", (), {})())
        assert len(_buffers.view_classes) + len(_buffers._unsupported_types) <= 8


@pytest.mark.parametrize(
    "shape", [(), (3,), (2, 3), (4, 1, 5), (0,), (0, 3), (3, 0), (2, 0, 4), (1, 1)]
)
def test_contiguous_strides_are_numpys(shape: tuple[int, ...]) -> None:
    assert contiguous_strides(shape, 8) == np.empty(shape, dtype="f8").strides
