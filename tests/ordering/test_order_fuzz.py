"""Random buffers, writers, users and captures: an order may be refused, but it is never lost.

Either the writers are held, and what they write must be seen; or the user of the buffers is held,
and what is written after it must stay. The first cases are the same in every run; for
``USERSTREAM_FUZZ`` seconds others follow. A failure tells its seed, and ``USERSTREAM_FUZZ_SEED``
draws that case alone.
"""

from __future__ import annotations

import random
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest
from cuda.bindings import driver

import standins
import userstream as us
from helpers import (
    CAI,
    Delegating,
    array,
    checked,
    content,
    copy,
    device_current,
    device_memory,
    fill,
    is_blocked,
    running,
    seeds,
    write,
)
from internals import order_by_device
from ordering.test_liars import LIARS, Ignoring, core_buffer, dtype_of
from userstream import testing

# A call of a real driver may wait for the streams that are held, to load what it needs.
pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("no_garbage")]

COUNT = 150
SIZE = 256
BEFORE, THEIRS, OURS, NEXT = 1, 2, 3, 4  # who wrote the bytes


# -- buffers, by what they tell of the stream that writes them ------------------------------------


class Both(Ignoring, CAI):
    """The interface names the stream; DLPack ignores the one that it is given."""

    def __init__(self, address: int, stream: us.Stream) -> None:
        Ignoring.__init__(self, address, stream)
        CAI.__init__(self, address, stream=int(stream.handle))


class Known(Delegating):
    """Of a type that is known to order a consumer by DLPack, in the context of its device."""

    def __dlpack__(self, *, stream: int, **_: Any) -> object:
        with device_current():
            event = self.producer.record()
        us.Stream.from_handle(stream).wait_event(event)
        return object()


def _handle(stream: us.Stream) -> int:
    """Return what frameworks say: their default stream is 0."""
    return 0 if int(stream.handle) == 1 else int(stream.handle)


def _torch(address: int, stream: us.Stream) -> Any:
    torch, handle = sys.modules["torch"], _handle(stream)
    torch.cuda.set_stream(types.SimpleNamespace(cuda_stream=handle, device=0))
    return torch.Tensor(torch.device("cuda", 0), address)


def _cupy(address: int, stream: us.Stream) -> Any:
    cupy = sys.modules["cupy"]
    cupy.cuda.stream._BaseStream(_handle(stream), 0).use()
    return cupy.ndarray(0, address)


def _warp(address: int, stream: us.Stream) -> Any:
    warp = sys.modules["warp"]
    device = warp.get_device("cuda:0")
    device.stream = warp.Stream(device, cuda_stream=_handle(stream) or None)
    return standins.WarpArray(device, address)


def _tvm_ffi(address: int, stream: us.Stream) -> Any:
    tvm_ffi = sys.modules["tvm_ffi"]
    tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", 0), _handle(stream)).__enter__()
    return standins.TvmTensor(0, core_buffer(address, stream))


# Their arrays tell nothing: the current stream does, which is the writer's.
FRAMEWORKS: dict[str, Callable[[int, us.Stream], Any]] = {
    "torch": _torch,
    "cupy": _cupy,
    "warp": _warp,
    "tvm_ffi": _tvm_ffi,
}
ARRAYS: dict[str, Callable[[int, us.Stream], Any]] = {
    **FRAMEWORKS,
    **{kind.__name__: kind for kind in LIARS},
    "interface": array,
    "interface and DLPack": Both,
    "known DLPack": Known,
}
BUFFERS: dict[str, Callable[[int, us.Stream], Any]] = {
    **ARRAYS,
    "address": lambda address, _: driver.CUdeviceptr(address),
    "list": lambda address, stream: [array(address, stream), driver.CUdeviceptr(address)],
}


# -- one case -------------------------------------------------------------------------------------


def foreign(flags: int) -> us.Stream:
    """Create a stream that userstream knows by its handle alone."""
    handle = int(checked(driver.cuStreamCreate(flags)))
    return us.Stream.from_handle(types.SimpleNamespace(__cuda_stream__=lambda: (0, handle)))


class Scene:
    """Memory and streams, for all cases of a test."""

    def __init__(self, memory: list[int]) -> None:
        self.addresses, self.seen, (self.ours,) = memory[:3], memory[3:6], memory[6:]
        write(self.ours, np.full(SIZE, OURS, "u1"))
        self.streams = {
            "created": us.Stream.create(0),
            "created, blocking": us.Stream.create(0, nonblocking=False),
            "foreign": foreign(1),
            "foreign, blocking": foreign(0),
            "named": us.get_stream(0, name="named"),
            "part": us.get_stream(0, name="part", sms=16),
            "legacy": us.Stream.legacy_default(),
        }
        self.users = {**self.streams, "of another device": us.Stream.create(1)}


@pytest.fixture
def scene(
    torch: object, cupy: object, warp: object, tvm_ffi: object, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Scene]:
    order_by_device(monkeypatch, False)  # as the cases set it
    with ExitStack() as memory, device_current():
        scene = Scene([memory.enter_context(device_memory(0, SIZE)) for _ in range(7)])
        yield scene
        for name in ("foreign", "foreign, blocking"):
            checked(driver.cuStreamDestroy(int(scene.streams[name].handle)))


@dataclass
class Drawn:
    """A case, as names: of the buffers, of the streams that write them, and so on."""

    kinds: list[str]
    writers: list[str]
    user: str
    captured: str | None
    mode: driver.CUstreamCaptureMode
    unknown: Literal["device", "raise"]
    producer: Literal["auto", "device"]
    by_device: bool

    @classmethod
    def by(cls, draw: random.Random, scene: Scene, *, single: bool) -> Drawn:
        count = 1 if single else draw.randint(1, 3)
        writers = draw.choices([*scene.streams], k=count)
        user = draw.choice(["user", *scene.users])
        busy = {*writers, user}
        # The legacy stream cannot be captured, nor used while others are, whatever we do.
        idle = scene.streams.keys() - {*busy, "legacy"} if "legacy" not in busy else ()
        return cls(
            kinds=draw.sample([*(ARRAYS if single else BUFFERS)], count),
            writers=writers,
            user=user,
            captured=draw.choice([None] * 6 + sorted(idle)),
            mode=draw.choice([*driver.CUstreamCaptureMode]),
            unknown=draw.choice(["device", "device", "raise"]),
            producer=draw.choice(["auto"] * 6 + ["device"]),
            by_device=draw.random() < 0.1,
        )

    def may_be_refused(self, error: Exception) -> bool:
        if isinstance(error, us.UnknownProducerError):
            return self.unknown == "raise" and not self.by_device
        return isinstance(error, us.CaptureError) and self.captured is not None


class Case:
    """The drawn case as objects, with initialized memory."""

    def __init__(self, drawn: Drawn, scene: Scene, registry: us.UserStream) -> None:
        for framework in FRAMEWORKS.values():  # as if there had been no case before
            framework(0, scene.streams["legacy"])
        self.drawn, self.registry, self.refused = drawn, registry, False
        self.user = registry.get_stream(0)  # unless another one is passed
        self.captured = scene.streams[drawn.captured] if drawn.captured else None
        self.writers = [scene.streams[name] for name in drawn.writers]
        self.addresses = scene.addresses[: len(self.writers)]
        self.seen = scene.seen[: len(self.writers)]
        self.ours = scene.ours
        self.buffers = [
            BUFFERS[kind](address, writer)
            for kind, address, writer in zip(drawn.kinds, self.addresses, self.writers, strict=True)
        ]
        self.how: dict[str, Any] = {"producer": drawn.producer}
        if drawn.user in scene.users:
            self.how["stream"] = self.user = scene.users[drawn.user]
        settle()  # a case that was refused has looked at nothing: it may still write
        for address in (*self.addresses, *self.seen):
            checked(driver.cuMemsetD8(address, BEFORE, SIZE))
        settle()

    def write(self, value: int) -> None:
        """Queue writes of the frameworks."""
        for stream, address in zip(self.writers, self.addresses, strict=True):
            fill(stream, address, value)

    @contextmanager
    def meanwhile(self) -> Iterator[None]:
        """Begin the drawn capture; expect the block to be refused if the capture requires that."""
        told = False
        if self.captured is not None:
            checked(driver.cuStreamBeginCapture(int(self.captured.handle), self.drawn.mode))
        try:
            yield
        except us.UserStreamError as error:
            if not self.drawn.may_be_refused(error):
                raise
            self.refused, told = True, bool(getattr(error, "__notes__", None))
        finally:
            if self.captured is not None:
                status, graph = driver.cuStreamEndCapture(int(self.captured.handle))
                if status == 0:
                    checked(driver.cuGraphDestroy(graph))
                else:
                    assert self.drawn.captured == "foreign", "a capture was broken that can be seen"
                    assert told, "a capture was broken in silence"


def settle() -> None:
    for device in range(2):
        with device_current(device):
            checked(driver.cuCtxSynchronize())


def each_case(scene: Scene, check: Callable[[Case], None], *, single: bool) -> None:
    for seed in seeds(COUNT):
        drawn = Drawn.by(random.Random(seed), scene, single=single)
        try:
            with (
                pytest.MonkeyPatch.context() as patch,
                us.UserStream(unknown=drawn.unknown) as registry,
            ):
                order_by_device(patch, drawn.by_device)
                check(Case(drawn, scene, registry))
        except BaseException as error:
            error.add_note(f"USERSTREAM_FUZZ_SEED={seed}: {drawn}")
            raise


# -- in -------------------------------------------------------------------------------------------


def borrow_in(case: Case) -> set[int] | None:
    with case.registry.borrow(*case.buffers, **case.how) as stream, device_current():
        for seen, address in zip(case.seen, case.addresses, strict=True):
            copy(stream, seen, address)
    return None


def copyto_from(case: Case) -> set[int] | None:
    (buffer,) = case.buffers
    shape = us.describe(buffer).shape or (SIZE,)
    target = CAI(case.seen[0], shape, typestr=dtype_of(buffer).str)
    case.registry.copyto(target, buffer, timeout=10, **case.how)
    return None


def asnumpy(case: Case) -> set[int] | None:
    found = case.registry.asnumpy(*case.buffers, timeout=10, **case.how)
    return set(np.ascontiguousarray(found).view("u1").ravel().tolist())


def asnumpy_async(case: Case) -> set[int] | None:
    found = case.registry.asnumpy_async(*case.buffers, **case.how).result(timeout=10)
    return set(np.ascontiguousarray(found).view("u1").ravel().tolist())


@pytest.mark.parametrize("use", [borrow_in, copyto_from, asnumpy, asnumpy_async])
def test_what_was_written_is_seen(use: Callable[[Case], set[int] | None], scene: Scene) -> None:
    """Later than our use is queued."""

    def check(case: Case) -> None:
        with ExitStack() as held:
            latches = [held.enter_context(testing.latch(stream)) for stream in case.writers]
            case.write(THEIRS)
            with case.meanwhile(), running(lambda: use(case)) as result:
                is_blocked(result, 0.01)
                time.sleep(0.002)  # what is not ordered goes on
                for latch in latches:
                    latch.release()
                found = result()
        if not case.refused:
            nbytes = SIZE if use is borrow_in else us.describe(case.buffers[0]).nbytes or SIZE
            for seen in case.seen if found is None else ():
                assert content(seen, nbytes) == {THEIRS}, "stale"
            assert found in (None, {THEIRS}), "stale"

    each_case(scene, check, single=use is not borrow_in)


# -- out ------------------------------------------------------------------------------------------


def _fill(case: Case, stream: us.Stream) -> None:
    """Copy, as a stream of another device may, which does not fill."""
    with device_current():
        for address in case.addresses:
            copy(stream, address, case.ours)


def borrow_out(case: Case) -> None:
    with case.registry.borrow(*case.buffers, **case.how) as stream:
        _fill(case, stream)


def release(case: Case) -> None:
    _fill(case, case.user)
    case.registry.release(*case.buffers, **case.how)


def copyto_to(case: Case) -> None:
    (buffer,) = case.buffers
    info = us.describe(buffer)
    ours = np.full(info.nbytes or SIZE, OURS, "u1").view(dtype_of(buffer))
    case.registry.copyto(buffer, ours.reshape(info.shape or SIZE), timeout=10, **case.how)


@pytest.mark.parametrize("use", [borrow_out, release, copyto_to])
def test_what_is_written_next_stays(use: Callable[[Case], None], scene: Scene) -> None:
    """Earlier than ours is done."""

    def check(case: Case) -> None:
        with testing.latch(case.user) as latch:
            with case.meanwhile(), running(lambda: use(case)) as result:
                if is_blocked(result, 0.01):
                    latch.release()  # the host waits for ours, instead of the writers
                result()
                case.write(NEXT)
                time.sleep(0.002)  # what is not ordered goes on
        if not case.refused:
            nbytes = us.describe(case.buffers[0]).nbytes if use is copyto_to else None
            for address in case.addresses:
                assert content(address, nbytes or SIZE) == {NEXT}, "overtaken"

    each_case(scene, check, single=use is copyto_to)
