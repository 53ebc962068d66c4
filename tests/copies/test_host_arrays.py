"""New arrays in page-locked memory: `pinned_empty` and `pinned_like`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import userstream as us
from helpers import address, array, content, device_memory, eventually, fill, refused_in_a_child
from internals import (
    address_of,
    free_pinned,
    pinned_limit,
    pinned_total,
    place_of,
    refuse_staging,
    release_held,
    spin_for_ever,
    stage_at_most,
    watch_fetches,
)
from userstream import testing

pytestmark = pytest.mark.usefixtures("no_garbage")

KIB, MIB = 1 << 10, 1 << 20
SIZE = 256 * KIB
NUMBERS = np.arange(6.0).reshape(2, 3)


@pytest.fixture(autouse=True)
def _limit() -> Iterator[None]:
    before = pinned_limit()
    us.UserStream.set_pinned_limit(64 * MIB)
    yield
    us.UserStream.set_pinned_limit(before)


@pytest.fixture
def large() -> Iterator[int]:
    """The address of memory that is more than is copied aside."""
    with device_memory(0, SIZE) as address:
        yield address


def as_bytes(address: int, producer: us.Stream) -> Any:
    return array(address, producer, shape=(SIZE,), typestr="|u1")


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((2, 3)),
        np.zeros(()),
        np.zeros((0, 3)),
        np.zeros((2, 3)).T,
        np.zeros(6)[::-2],
        np.zeros(3, "M8[s]"),
        np.zeros(3, [("a", "i2"), ("b", "f8")]),
        np.broadcast_to(np.zeros(1), 4),
    ],
    ids=repr,
)
def test_the_address_of_its_first_element(array: np.ndarray) -> None:
    assert address_of(array) == address(array)


@pytest.mark.parametrize("dtype", [float, "f4", np.uint8, "(2,)i2", [("a", "i2"), ("b", "f8")]])
@pytest.mark.parametrize("shape", [(), 3, np.int64(3), (2, 3), [2, 3], (0, 3), 0])
def test_it_is_as_numpys_empty(shape: Any, dtype: Any) -> None:
    made, expected = us.pinned_empty(shape, dtype), np.empty(shape, dtype)
    assert (made.shape, made.dtype, made.strides) == (
        expected.shape,
        expected.dtype,
        expected.strides,
    )
    assert made.flags.writeable
    assert made.flags.c_contiguous
    if made.nbytes:
        made[...] = np.zeros((), made.dtype)
        place = place_of(address(made))
        assert place is not None
        assert place.kind == "pinned"
        assert place.covers(address(made), made.nbytes)


def test_the_dtype_by_default() -> None:
    assert us.pinned_empty(2).dtype == float


@pytest.mark.parametrize(
    "like",
    [
        np.ones((2, 3, 4), "f4"),
        np.ones((2, 3, 4), "f4", order="F"),
        np.ones((2, 3, 4), "f4").transpose(1, 0, 2),
        np.ones((4, 6), "f4")[::-1, ::2],
        np.ones((0, 3)),
        np.ones(()),
    ],
    ids=lambda like: f"{like.shape} {like.strides}",
)
def test_it_is_as_numpys_empty_like(like: np.ndarray) -> None:
    made, expected = us.pinned_like(like), np.empty_like(like)
    assert (made.shape, made.dtype, made.strides) == (
        expected.shape,
        expected.dtype,
        expected.strides,
    )
    assert us.pinned_like(like, "u1").dtype == np.uint8


def test_one_like_an_array_whose_elements_share_memory() -> None:
    made = us.pinned_like(np.broadcast_to(np.ones(3), (2, 3)))
    made[:] = NUMBERS
    np.testing.assert_array_equal(made, NUMBERS)


def test_one_like_a_buffer_on_a_device(memory: int, producer: us.Stream) -> None:
    buffer = array(memory, producer, shape=(2, 3), typestr="<i2", strides=(2, 4))
    made = us.pinned_like(buffer)
    assert (made.shape, made.dtype, made.strides) == ((2, 3), np.dtype("i2"), (2, 4))
    assert us.asnumpy(buffer, out=made) is made


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (lambda: us.pinned_empty(-1), ValueError, "negative length: -1"),
        (lambda: us.pinned_empty((2, -3)), ValueError, r"negative length: \(2, -3\)"),
        (lambda: us.pinned_empty(2.5), TypeError, "float"),  # type: ignore[arg-type]
        (lambda: us.pinned_empty((2, "3")), TypeError, "each length in shape must be an integer"),  # type: ignore[arg-type]
        (lambda: us.pinned_empty(True), TypeError, "must be an integer, not True"),
        (lambda: us.pinned_empty(2, object), TypeError, "cannot hold Python objects"),
        (lambda: us.pinned_like(np.array([{}])), TypeError, "cannot hold Python objects"),
        (lambda: us.pinned_empty(2, "nothing"), TypeError, "nothing"),
        (lambda: us.pinned_like([1, 2]), us.UnsupportedBufferError, "not a buffer"),
    ],
)
def test_bad_input(use: Callable[[], object], error: type[Exception], message: str) -> None:
    before = pinned_total()
    with pytest.raises(error, match=message):
        use()
    assert pinned_total() == before


def test_it_counts_in_the_limit() -> None:
    assert eventually(lambda: (free_pinned(), pinned_total() == 0)[1])
    held = us.pinned_empty(48 * MIB, "u1")
    assert pinned_total() == 48 * MIB
    with pytest.raises(
        MemoryError, match=r"arrays use 50331648 bytes.* the limit is 67108864; .*LIMIT"
    ):
        us.pinned_empty(17 * MIB, "u1")
    where = address(held)
    del held
    assert address(us.pinned_empty(48 * MIB, "u1")) == where, "it is used again"


def test_what_is_free_is_no_reason_to_refuse() -> None:
    """It is of another size, and is freed in a thread of its own."""
    assert eventually(lambda: (free_pinned(), pinned_total() == 0)[1])
    held = [us.pinned_empty(4 * MIB, "u1") for _ in range(16)]
    held.clear()
    large = us.pinned_empty(60 * MIB, "u1")
    large[:] = 1
    assert eventually(lambda: pinned_total() <= 64 * MIB)


def test_a_closed_registry() -> None:
    with us.UserStream() as mine:
        mine.pinned_empty(3)
    with pytest.raises(us.ClosedError):
        mine.pinned_empty(3)
    with pytest.raises(us.ClosedError):
        mine.pinned_like(np.ones(3))


def test_a_forked_child_is_refused() -> None:
    refused_in_a_child("lambda: us.pinned_empty(3),")


@pytest.fixture
def _no_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_staging(monkeypatch)


@pytest.mark.parametrize("cut", [slice(None), slice(100, -100), slice(None, None, -1)])
@pytest.mark.usefixtures("_no_staging")
def test_copies_use_it_directly(cut: slice, large: int, producer: us.Stream) -> None:
    place = us.pinned_empty(SIZE, "u1")
    part = place[cut]
    buffer = array(large, producer, shape=part.shape, typestr="|u1")
    if cut.step is not None:  # reversed elements are copied one by one, so rows of them
        part = place.reshape(64, -1)[cut]
        buffer = array(large, producer, shape=part.shape, typestr="|u1")
    part[...] = np.arange(part.size, dtype="u1").reshape(part.shape)
    expected = part.copy()
    us.copyto(buffer, part)
    part[...] = 0
    assert us.asnumpy(buffer, out=part) is part
    np.testing.assert_array_equal(part, expected)
    part[...] = 0
    us.copyto(part, buffer)
    np.testing.assert_array_equal(part, expected)


@pytest.mark.parametrize("mib", [1, 4])
def test_all_parts_together_have_the_timeout(
    mib: int, producer: us.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is waited for without a look at the clock of the others."""
    us.get_stream(0)
    out = np.empty(mib << 20, "u1")
    with device_memory(0, out.nbytes) as memory:
        buffer = array(memory, producer, shape=out.shape, typestr="|u1")
        waited = watch_fetches(monkeypatch)
        spin_for_ever(monkeypatch)
        us.asnumpy(buffer, out=out)
        with testing.latch(producer):
            with pytest.raises(us.WaitTimeout):
                us.asnumpy(buffer, out=out, timeout=0.05)
        us.wait_for_device(0, timeout=20)
    (parts, always), (again, bounded) = waited
    assert parts == again == mib * 2
    assert always == 10**10
    assert parts * bounded <= 50_000_000


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("place", [us.pinned_empty, np.empty])
def test_an_array_is_filled_wherever_it_is(
    place: Callable[..., Any], turned: bool, late: bool, large: int, producer: us.Stream
) -> None:
    """In one run of bytes, whether that is over at once or not, and in C order or not."""
    shape = (SIZE // 1000, 1, 1000)
    buffer = array(large, producer, shape=shape, typestr="|u1")
    expected = np.arange(np.prod(shape), dtype="u1").reshape(shape)
    us.copyto(buffer, expected)
    out = place(shape, "u1")
    out[...] = 0
    if turned:
        source = array(large, producer, shape=shape[::-1], typestr="|u1", strides=(1, 1000, 1000))
        expected, view = expected.T, out.T
    else:
        source, view = buffer, out
    with contextlib.ExitStack() as held:
        if late:
            latch = held.enter_context(testing.latch(producer))
            release = threading.Timer(0.05, latch.release)
            release.start()
            held.callback(release.join)
        assert us.asnumpy(source, out=view, timeout=20) is view
    np.testing.assert_array_equal(view, expected)


def test_a_source_is_copied_aside_while_the_stream_is_busy(large: int, producer: us.Stream) -> None:
    """So that the call need not wait, and the array can be reused."""
    buffer = as_bytes(large, producer)
    place = us.pinned_empty(SIZE, "u1")
    place[:] = 1
    us.copyto(buffer, place)
    with testing.latch(producer) as latch:
        us.copyto(buffer, place)
        place[:] = 2
        latch.release()
    us.wait(buffer)
    assert content(large, SIZE) == {1}


def read(place: np.ndarray, buffer: Any) -> None:
    us.asnumpy(buffer, out=place, timeout=0)


def written(place: np.ndarray, buffer: Any) -> None:
    us.copyto(buffer, place, timeout=0)  # too large to be copied aside


@pytest.mark.parametrize("use", [read, written])
def test_it_is_kept_while_a_copy_is_under_way(
    use: Callable[[np.ndarray, Any], None],
    large: int,
    producer: us.Stream,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though the call has ended, and the copy used a view of it."""
    stage_at_most(monkeypatch, 4096)
    buffer = as_bytes(large, producer)
    fill(producer, large, 7, SIZE)
    producer.sync()
    us.asnumpy(buffer)
    place = us.pinned_empty((2, SIZE), "u1")
    place[:] = 3
    where = address(place)
    with testing.latch(us.get_stream(0)) as latch:
        with contextlib.suppress(us.WaitTimeout):
            use(place[1], buffer)
        del place
        others = [us.pinned_empty((2, SIZE), "u1") for _ in range(3)]
        for other in others:
            other[:] = 9
        assert where not in map(address, others)
        latch.release()
        us.wait_for_device(0, timeout=20)
    release_held()
    assert address(us.pinned_empty((2, SIZE), "u1")) == where
    assert content(large, SIZE) == ({7} if use is read else {3})
