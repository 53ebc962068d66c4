"""A copy stays in the memory of its arrays, whatever shape and strides they report."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver
from cuda.core import Buffer

import userstream as us
from helpers import (
    CAI,
    another_context,
    checked,
    device_current,
    device_memory,
    entered,
    fill,
    managed_memory,
    pinned_memory,
    primary_context,
    virtual_memory,
    write,
)
from internals import let_all_be_mapped, place_of, report_pieces
from userstream import testing

SIZE = 4096
GUARD = 0x5A

OUT = {
    "past the end": {"shape": (1025,)},
    "before the begin": {"shape": (2,), "strides": (-4,)},
    "a step past the end": {"shape": (2, 8), "strides": (SIZE - 28, 4)},
    "columns past the end": {"shape": (33, 32), "strides": (4, 128)},
    "backwards": {"shape": (1025,), "strides": (-4,), "at": SIZE - 4},
    "into the next": {"shape": (2, 4), "strides": (SIZE, 4)},
    "every second": {"shape": (513,), "strides": (8,)},
    "2**31": {"shape": (2, 4), "strides": (1 << 31, 4)},
    "2**32": {"shape": (2, 4), "strides": (1 << 32, 4)},
    "-2**32": {"shape": (2, 4), "strides": (-(1 << 32), 4)},
    "2**63": {"shape": (2, 4), "strides": (1 << 63, 4)},
    "-2**63": {"shape": (2, 4), "strides": (-(1 << 63), 4)},
    "2**64": {"shape": (2, 4), "strides": (1 << 64, 4)},  # around to the same place
    "2**70": {"shape": (2, 4), "strides": (1 << 70, 4)},
    "there and back": {"shape": (2, 2), "strides": (1 << 70, -(1 << 70))},
    "a shape of 2**70": {"shape": (1 << 70,)},
    "a shape of 2**62 by 2": {"shape": (1 << 62, 2), "strides": (0, 0)},
    "a broadcast of 2**70": {"shape": (1 << 70,), "strides": (0,)},
    "an empty one of 2**70": {"shape": (0, 1 << 70)},
}


@pytest.fixture
def block() -> Iterator[int]:
    """The address of memory of which all is an allocation's own."""
    with device_memory(0, SIZE) as address:
        fill(us.get_stream(0), address, GUARD, SIZE)
        us.wait(0)
        yield address


def interface(block: int, *, at: int = 0, **more: Any) -> CAI:
    return CAI(block + at, stream=None, **more)


def numbers(shape: tuple[int, ...]) -> Any:
    return np.broadcast_to(np.float32(3), shape if max(shape) < 1 << 20 else ())


USES: dict[str, Callable[[CAI], object]] = {
    "asnumpy": us.asnumpy,
    "asnumpy with out=": lambda wrong: us.asnumpy(wrong, out=np.empty((2, 4), "f4")),
    "copyto": lambda wrong: us.copyto(wrong, numbers(wrong.interface["shape"])),
    "copyto the host": lambda wrong: us.copyto(np.empty((2, 4), "f4"), wrong),
    "copyto itself": lambda wrong: us.copyto(wrong, wrong),
}
COPIES = ["cuMemcpyAsync", "cuMemcpy3DAsync", "cuMemcpyPeerAsync", "cuEventRecord"]


@pytest.mark.simulated
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("wrong", OUT)
def test_what_reaches_out_is_refused_before_cuda_is_touched(
    wrong: str, use: str, block: int
) -> None:
    us.get_stream(0)
    before = [testing.calls(each) for each in COPIES]
    with pytest.raises(us.UnsupportedBufferError, match=r"extends beyond its memory|can have"):
        USES[use](interface(block, **OUT[wrong]))
    assert [testing.calls(each) for each in COPIES] == before


@pytest.mark.parametrize("wrong", OUT)
def test_nothing_beside_it_is_read_or_written(wrong: str, block: int) -> None:
    for use in USES.values():
        with pytest.raises(us.UnsupportedBufferError):
            use(interface(block, **OUT[wrong]))
    assert set(us.asnumpy(interface(block, shape=(SIZE,), typestr="|u1"))) == {GUARD}


def test_the_message_says_what_is_needed_and_what_is_there(block: int) -> None:
    with pytest.raises(us.UnsupportedBufferError) as caught:
        us.asnumpy(interface(block, shape=(2, 4), strides=(-SIZE, 4)))
    for part in ("(2, 4)", f"({-SIZE}, 4)", f"{block:#x}", f"{block - SIZE:#x}", f"has {SIZE}"):
        assert part in str(caught.value)


def test_an_axis_that_takes_no_step_may_have_any_stride(block: int) -> None:
    for stride in (1 << 70, -(1 << 70), 1 << 63):
        one = interface(block, shape=(1, 4), strides=(stride, 1), typestr="|u1")
        us.copyto(one, np.arange(4, dtype="u1"))
        assert us.asnumpy(one).tolist() == [[0, 1, 2, 3]]
        every = interface(block, shape=(1, 2), strides=(stride, 2), typestr="|u1")
        assert us.asnumpy(every).tolist() == [[0, 2]]
        empty = interface(block, shape=(0, 2), strides=(stride, stride))
        assert us.asnumpy(empty).shape == (0, 2)


def test_random_layouts_are_right_or_refused(block: int) -> None:
    random = np.random.default_rng(17)
    content = np.frombuffer(random.bytes(SIZE), "u1")
    write(block, content)
    refused = 0
    for _ in range(300):
        axes = random.integers(1, 4)
        shape = tuple(map(int, random.integers(1, 12, axes)))
        strides = tuple(map(int, random.integers(-500, 500, axes)))
        at = int(random.integers(0, SIZE - 3))
        wrong = interface(block, at=at, shape=shape, strides=strides)
        offsets = sum(
            np.arange(count).reshape([-1 if each == axis else 1 for each in range(axes)]) * step
            for axis, (count, step) in enumerate(zip(shape, strides, strict=True))
        )
        first = at + np.asarray(offsets)
        if first.min() < 0 or first.max() + 4 > SIZE:
            refused += 1
            with pytest.raises(us.UnsupportedBufferError, match="extends beyond"):
                us.asnumpy(wrong)
            with pytest.raises(us.UnsupportedBufferError, match="extends beyond"):
                us.copyto(wrong, np.float32(0))
        else:
            expected = content[first[..., None] + np.arange(4)].copy().view("<u4")[..., 0]
            assert us.asnumpy(wrong).view("<u4").tolist() == expected.tolist()
    assert 30 < refused < 270
    assert (us.asnumpy(interface(block, shape=(SIZE,), typestr="|u1")) == content).all()


@pytest.mark.parametrize("memory", [device_memory, managed_memory, pinned_memory])
def test_buffers_of_cuda_core_that_say_too_much(
    memory: Callable[..., contextlib.AbstractContextManager[int]],
) -> None:
    with memory(0, 256) as address:
        wrong = Buffer.from_handle(address, 1 << 30, owner=object())
        with pytest.raises(us.UnsupportedBufferError, match="extends beyond"):
            us.asnumpy(wrong)
        with (
            device_memory(0) as other,
            pytest.raises(us.UnsupportedBufferError, match="extends beyond"),
        ):
            us.copyto(wrong, CAI(other, (), stream=None, typestr="|u1"), producer=None)


@pytest.mark.simulated
def test_arrays_of_frameworks_that_say_too_much(block: int, cupy: Any, torch: Any) -> None:
    array = cupy.ndarray(0, block + SIZE - 8)
    tensor = torch.Tensor(torch.device("cuda", 0), block + SIZE - 20)
    for wrong in (array, tensor):
        with pytest.raises(us.UnsupportedBufferError, match="extends beyond"):
            us.asnumpy(wrong, producer=None)
        with pytest.raises(us.UnsupportedBufferError, match="extends beyond"):
            us.copyto(wrong, np.zeros((), "f4"), producer=None)


def test_memory_that_was_freed_or_is_not_there(block: int, torch: Any) -> None:
    tensor = torch.Tensor(torch.device("cuda", 0), 512)
    with pytest.raises(us.UnsupportedBufferError, match="not in memory that the CUDA driver knows"):
        us.asnumpy(tensor, producer=None)


def test_memory_that_is_mapped_piece_by_piece(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    report_pieces(monkeypatch, block, SIZE, SIZE // 4)
    array = interface(block, shape=(SIZE,), typestr="|u1")
    with pytest.raises(us.UnsupportedBufferError, match="extends beyond"):
        us.asnumpy(array)  # these are allocations, and another one begins where one ends
    let_all_be_mapped(monkeypatch)
    assert set(us.asnumpy(array)) == {GUARD}
    for wrong in ({"shape": (SIZE + 1,)}, {"shape": (2,), "strides": (-1,)}, OUT["2**70"]):
        with pytest.raises(us.UnsupportedBufferError, match="extends beyond"):
            us.asnumpy(interface(block, **{"typestr": "|u1", **wrong}))


def test_what_may_be_mapped() -> None:
    context = primary_context(0)
    with device_memory(0) as whole, pinned_memory(0) as pinned, managed_memory(0) as managed:
        for address in (whole, pinned, managed):
            place = place_of(address)
            assert place is not None
            assert not place._may_be_mapped()
    with entered(context):
        stream = us.get_stream(0)._live()
        pooled = int(checked(driver.cuMemAllocAsync(256, stream)))
        place = place_of(pooled)
        assert place is not None
        assert not place._may_be_mapped()
        checked(driver.cuMemFreeAsync(pooled, stream))


@pytest.mark.simulated
def test_a_tensor_that_was_made_in_another_context(torch: Any) -> None:
    """Its framework tells the device: only where the memory begins and ends is asked."""
    with another_context():
        memory = int(checked(driver.cuMemAlloc(24)))
        try:
            tensor = torch.Tensor(torch.device("cuda", 0), memory)
            numbers = np.arange(6, dtype="f4").reshape(2, 3)
            us.copyto(tensor, numbers, producer=None)
            assert us.asnumpy(tensor, producer=None).tolist() == numbers.tolist()
            tensor.address += 4
            with pytest.raises(us.UnsupportedBufferError, match="extends beyond"):
                us.asnumpy(tensor, producer=None)
        finally:
            us.wait_for_device(0)
            checked(driver.cuMemFree(memory))


def test_memory_of_two_allocations_in_one_range() -> None:
    """The expandable segments of PyTorch are such memory."""
    kind, access = virtual_memory()
    least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    with device_current(0):
        piece = int(checked(driver.cuMemGetAllocationGranularity(kind, least)))
        base = int(checked(driver.cuMemAddressReserve(3 * piece, 0, 0, 0)))
        made = [checked(driver.cuMemCreate(piece, kind, 0)) for _ in range(2)]
        for i, each in enumerate(made):
            checked(driver.cuMemMap(base + i * piece, piece, 0, each, 0))
        checked(driver.cuMemSetAccess(base, 2 * piece, [access], 1))
        try:
            numbers = np.arange(2 * piece // 4, dtype="u4")
            whole = CAI(base, numbers.shape, typestr="<u4")
            us.copyto(whole, numbers, producer=None)
            assert (us.asnumpy(whole, producer=None) == numbers).all()
            # The driver tells how far the reservation goes, and refuses what is not mapped there.
            for wrong in (
                {"shape": (numbers.size + 1,)},
                {"shape": (2, 2), "strides": (2 * piece, 4)},
            ):
                with pytest.raises((us.UnsupportedBufferError, us.DriverError)):
                    us.asnumpy(CAI(base, **{"typestr": "<u4", **wrong}), producer=None)
            with pytest.raises(us.UnsupportedBufferError, match="extends beyond"):
                us.asnumpy(CAI(base, (2,), typestr="<u4", strides=(-4,)), producer=None)
        finally:
            us.wait_for_device(0)
            checked(driver.cuMemUnmap(base, 2 * piece))
            for each in made:
                checked(driver.cuMemRelease(each))
            checked(driver.cuMemAddressFree(base, 3 * piece))
