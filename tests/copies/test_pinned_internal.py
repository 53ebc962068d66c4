"""The cache of page-locked memory: when memory is used again, and when it is not."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver

import userstream as us
from device_copies import DeviceArray, to_host
from helpers import (
    address,
    checked,
    device_memory,
    eventually,
    in_thread,
    needs_host_pools,
    run_python,
    running,
    untraced,
)
from internals import nothing_is_being_freed
from interrupts import BINDINGS, HERE, Cut, cut_short
from userstream import _driver, testing
from userstream._copies import pinned as _pinned
from userstream._copies.staging import trim
from userstream._driver import host_pools
from userstream._driver.core import Lease
from userstream._engine import held_objects, watcher
from userstream.testing import _simulated

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _cache() -> Iterator[None]:
    """Every test starts with an empty cache and a bound of 64 MiB."""
    before = _pinned.limit()
    assert eventually(nothing_is_left)
    _pinned.set_limit(64 * MIB)
    yield
    _pinned.set_limit(before)


def free_all() -> None:
    gc.collect()
    thread = trim()
    if thread is not None:
        thread.join(30)


def nothing_is_left() -> bool:
    free_all()
    return _pinned._total == 0  # the thread of somebody else's trim may still be at it


def take(nbytes: int) -> Lease | None:
    return _pinned.take(nbytes, 0)


def array(nbytes: int) -> np.ndarray:
    """Take memory as results do: a view keeps it, and nothing else."""
    lease = take(nbytes)
    assert lease is not None
    return np.ndarray((nbytes,), "u1", lease)


def place(array: np.ndarray) -> _driver.pointers.Place:
    """Ask the driver about the middle of an array."""
    found = _driver.pointers.place_of(address(array) + array.nbytes // 2)
    assert found is not None
    return found


@pytest.fixture
def no_pools(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, Any]]:
    """Start without pools of host memory, and close those that the test opened."""
    pools: dict[int, Any] = {}
    monkeypatch.setattr(host_pools, "_pools", pools)
    yield pools
    free_all()
    for pool in pools.values():
        pool.close()


def test_memory_is_used_again() -> None:
    first = array(5000)
    where = address(first)
    second = array(5000)
    assert address(second) != where
    del first
    assert address(array(5000)) == where


def test_any_view_keeps_it() -> None:
    first = array(5000)
    where = address(first)
    view = first.view("<f4")[3:9].reshape(2, 3).T
    memory = memoryview(view[0])
    del first, view
    assert address(array(5000)) != where
    memory.release()
    assert address(array(5000)) == where


def test_in_whatever_thread_it_goes() -> None:
    held = [array(5000)]
    where = address(held[0])
    in_thread(held.clear)
    assert address(array(5000)) == where


def test_a_garbage_collection_while_the_lock_is_held() -> None:
    cycle: list[object] = [array(5000)]
    where = address(cycle[0])  # type: ignore[arg-type]
    cycle.append(cycle)
    del cycle
    with _pinned._counting:
        gc.collect()
    assert address(array(5000)) == where


def test_an_array_that_a_finalizer_saves_is_not_used_again() -> None:
    saved = []

    class Phoenix:
        def __del__(self) -> None:
            saved.append(self.array)

    bird = Phoenix()
    bird.array, bird.itself = array(5000), bird
    where = address(bird.array)
    del bird
    gc.collect()
    assert address(saved[0]) == where
    assert address(array(5000)) != where


@pytest.mark.parametrize("nbytes", [1, 4096, 4097, 65536, 65537, 10**6, 10**8, 2**30 + 1])
def test_little_is_wasted(nbytes: int) -> None:
    size = _pinned.rounded(nbytes)
    assert nbytes <= size <= max(nbytes + 4095, nbytes * 9 // 8)
    assert _pinned.rounded(size) == size


def test_what_users_hold_counts() -> None:
    held = [array(16 * MIB) for _ in range(4)]
    assert take(4096) is None
    held.pop()
    assert take(16 * MIB) is not None


def test_at_the_bound_a_larger_block_does() -> None:
    held = [array(16 * MIB) for _ in range(4)]
    where = address(held.pop())
    assert address(array(9 * MIB)) == where
    assert take(3 * MIB) is None  # far too large for that


def test_at_the_bound_smaller_blocks_make_room() -> None:
    held = [array(16 * MIB) for _ in range(3)]
    smaller = [array(4 * MIB) for _ in range(4)]
    smaller.clear()
    assert take(14 * MIB) is None
    assert eventually(lambda: _pinned._total <= 50 * MIB)
    held.append(array(14 * MIB))


def test_too_large_for_ever_frees_nothing() -> None:
    where = address(array(4096))
    assert take(65 * MIB) is None
    assert address(array(4096)) == where


def test_a_limit_of_nothing() -> None:
    _pinned.set_limit(0)
    assert take(1) is None
    with pytest.raises(ValueError, match="at least 0"):
        _pinned.set_limit(-1)


def test_a_lower_limit_frees() -> None:
    array(MIB)
    _pinned.set_limit(4096)
    assert eventually(lambda: _pinned._total == 0)


def test_trim_frees_what_nobody_holds() -> None:
    held = array(MIB)
    array(2 * MIB)
    free_all()
    assert _pinned._total == MIB
    held[:] = 1
    del held
    free_all()
    assert _pinned._total == 0
    assert trim() is None


def test_without_a_thread_memory_stays_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    where = address(array(MIB))
    _pinned.set_limit(MIB)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        us.close()
        assert take(MIB // 16) is None, "there is no room, and none can be made"
    assert address(array(MIB)) == where
    free_all()
    assert _pinned._total == 0


def test_close_at_exit() -> None:
    """From Python 3.12 on no thread can be started then."""
    done = run_python(
        """
        import atexit
        import userstream as us
        from cuda.core import Device

        atexit.register(us.close)
        Device(0).set_current()
        stream = us.get_stream(0)
        us.asnumpy(Device(0).allocate(64, stream=stream), producer=stream)
        """
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("default", [False, True])
def test_the_gpu_may_be_at_work_when_memory_is_given_back(default: bool) -> None:
    needs_host_pools()
    assert place(array(MIB)).context == 0, "memory of a pool: to free other would never end"
    held = us.Stream.legacy_default() if default else us.get_stream(0)
    context = _driver.contexts.primary_context(0)
    with us.Stream.create(0) as other, _driver.contexts.entered(context), testing.latch(held):
        thread = trim()
        assert thread is not None
        other.record()
        array(2 * MIB)
        thread.join(30)
        assert not thread.is_alive()
        assert _pinned._total == 2 * MIB


def test_a_capture_elsewhere_survives_a_new_pool(no_pools: dict[int, Any]) -> None:
    needs_host_pools()
    with us.Stream.create(0) as captured:
        with captured.capture("global"):
            where = address(in_thread(lambda: array(MIB)))
            assert address(array(MIB)) == where
            free_all()
    assert list(no_pools) == [0]


def test_all_devices_may_access_it() -> None:
    needs_host_pools()
    where = address(array(MIB))
    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE
    pool = checked(driver.cuPointerGetAttribute(attribute, where))
    for device in range(_driver.library.device_count()):
        location = driver.CUmemLocation()
        location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = device
        assert int(checked(driver.cuMemPoolGetAccess(pool, location))) == 3, "read and write"


def test_the_driver_knows_where_it_begins_and_ends() -> None:
    held = [array(5000), array(5000)]
    for each in held:
        found = place(each)
        assert (found.kind, found.start) == ("pinned", address(each))
        assert found.size >= 5000


@pytest.mark.simulated
def test_where_the_driver_knows_no_range() -> None:
    """It is copied to as ordinary memory is."""
    with device_memory(0, 5000) as source:
        memory = DeviceArray(np.empty(5000, "u1"), source)
        expected = to_host(memory, us.get_stream(0)).copy()
        out = array(5000)
        with testing.inject("cuMemGetAddressRange", 1):
            found = place(out)
        assert found.kind == "pinned"
        assert not found.covers(address(out), 1)
        with testing.inject("cuMemGetAddressRange", 1):
            to_host(memory, us.get_stream(0), np.frombuffer(out.data, "u1"))
        assert (out == expected).all()


@pytest.mark.usefixtures("no_pools")
def test_without_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver would make one, but copies to it would fail."""
    monkeypatch.setattr(host_pools, "device_attribute", lambda device, which: 0)
    held = array(MIB)
    found = place(held)
    assert (found.kind, found.context) == ("pinned", int(_driver.contexts.primary_context(0)))
    del held
    free_all()
    assert _pinned._total == 0


@pytest.mark.usefixtures("no_pools")
def test_where_the_driver_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA 12.6 has pools, but lacks the query."""
    needs_host_pools()

    def ask(device: int, which: driver.CUdevice_attribute) -> int:
        if which == host_pools._SUPPORTED:
            raise us.DriverError("cuDeviceGetAttribute failed", function="cuDeviceGetAttribute")
        return _driver.library.device_attribute(device, which)

    monkeypatch.setattr(host_pools, "device_attribute", ask)
    assert place(array(MIB)).context == 0, "the memory is of a pool"


@pytest.mark.simulated
@pytest.mark.usefixtures("no_garbage")
@pytest.mark.parametrize(
    "function",
    [
        "cuMemAllocFromPoolAsync",
        "cuMemPoolCreate",
        "cuMemPoolSetAccess",
        "cuStreamCreate",
        "cuStreamQuery",
    ],
)
def test_where_the_driver_refuses_a_pool(function: str, no_pools: dict[int, Any]) -> None:
    before = _simulated.stats()
    testing.reset()
    with testing.inject(function, 801, this_thread=True):
        held = array(MIB)
    assert place(held).context, "the memory is of no pool"
    del held
    free_all()
    while no_pools:
        no_pools.popitem()[1].close()
    after = _simulated.stats()
    assert (after.streams, after.allocations) == (before.streams, before.allocations)
    made = testing.calls("cuMemPoolCreate") - (function == "cuMemPoolCreate")
    assert testing.calls("cuMemPoolDestroy") == made


def test_an_allocation_waits_for_no_work_of_others(memory: int) -> None:
    """Not even where the pool's own stream has to: what is held here holds all of the device."""
    array(4096)  # opens the pool
    with testing.latch(us.get_stream(0)) as latch:
        us.release(driver.CUdeviceptr(memory))
        with running(lambda: [array(MIB), array(2 * MIB)]) as result:
            held = result()  # which fails if it does not end
            for each in held:
                each[:] = 1
            latch.release()
    us.wait_for_device(0, timeout=20)
    assert place(array(4 * MIB)).context == place(array(4096)).context, "of the pool again"


@pytest.mark.simulated
@pytest.mark.usefixtures("no_garbage")
def test_two_threads_that_open_a_pool_at_once(
    no_pools: dict[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []

    class OpenedTwice(host_pools._HostPool):
        def open(self, device: int) -> None:
            if not no_pools:
                opened.append(OpenedTwice(device))
                no_pools[device] = opened[0]
                opened[0].open(device)
            super().open(device)

    monkeypatch.setattr(host_pools, "_HostPool", OpenedTwice)
    before = _simulated.stats().streams
    assert host_pools._pool_of(0) is opened[0]
    assert _simulated.stats().streams == before + 1


def test_memory_in_use_stays_out_until_the_gpu_got_there() -> None:
    stream = us.get_stream(0)
    lease = take(5000)
    assert lease is not None
    where = address(np.ndarray(1, "u1", lease))
    with testing.latch(stream) as latch:
        us.hold(lease, stream=stream)
        del lease
        assert address(array(5000)) != where
        latch.release()
        # The watcher may take the lease out of the queue before this sweep, and drop it later.
        assert eventually(lambda: (held_objects.sweep(), where in _pinned._free[8192])[1])


def test_many_threads() -> None:
    """No two arrays are on the same memory."""
    failures = []

    def work(number: int) -> None:
        random = np.random.default_rng(number)
        held: list[np.ndarray] = []
        for _ in range(300):
            lease = take(int(random.integers(1, 100_000)))
            if lease is None:
                held.clear()
                continue
            mine = np.ndarray(100, "u1", lease)
            mine[:] = number
            held.append(mine)
            failures.extend(each for each in held if not (each == number).all())
            del held[: int(random.integers(0, 3))]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()  # or it has memory in the next test
    assert not failures


@pytest.mark.simulated
def test_a_failed_allocation_does_not_count() -> None:
    with (
        testing.inject("cuMemAllocFromPoolAsync", 2, this_thread=True),
        testing.inject("cuMemHostAlloc", 2, this_thread=True),
        pytest.raises(us.DriverError) as error,
    ):
        take(MIB)
    assert error.value.function == "cuMemHostAlloc"
    assert _pinned._total == 0


@pytest.mark.simulated
def test_what_could_not_be_freed_counts() -> None:
    array(MIB)
    array(2 * MIB)
    with testing.inject("cuMemFreeAsync", 1):
        free_all()
    assert _pinned._total in (MIB, 2 * MIB)
    _pinned._moving.clear()  # for the next test


@pytest.mark.simulated
@pytest.mark.usefixtures("no_garbage")
def test_trim_really_frees() -> None:
    before = _simulated.stats().allocations
    array(MIB)
    assert _simulated.stats().allocations == before + 1
    free_all()
    assert _simulated.stats().allocations == before


@pytest.fixture
def no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the environment set the limit, as in a program that sets none."""
    monkeypatch.setattr(_pinned, "_limit", None)
    monkeypatch.delenv(_pinned.LIMIT_VARIABLE, raising=False)


@pytest.mark.usefixtures("no_limit")
def test_the_environment_sets_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_pinned.LIMIT_VARIABLE, "-1")
    with pytest.raises(ValueError, match="must be a number of bytes, not '-1'"):
        _pinned.limit()
    monkeypatch.setenv(_pinned.LIMIT_VARIABLE, "12345")
    assert _pinned.limit() == 12345


@pytest.mark.usefixtures("no_limit")
@pytest.mark.parametrize("given", [None, ""])
def test_the_limit_by_default(given: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if given is not None:
        monkeypatch.setenv(_pinned.LIMIT_VARIABLE, given)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert _pinned.limit() == min(4 << 30, memory // 8)


def test_exit_and_fork_free_nothing() -> None:
    done = run_python(
        """
        import os, sys
        import numpy as np
        import userstream as us
        from userstream import _driver, testing
        from userstream._engine import held_objects
        from userstream._copies import pinned as _pinned
        from userstream._copies.staging import trim

        stream = us.get_stream(0)
        def array():
            return np.ndarray(5000, "u1", _pinned.take(5000, 0))
        held = [array(), array()]
        held.pop()
        child = os.fork()
        if child == 0:
            held.clear()
            assert trim() is None
            with _pinned._counting:
                os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        held.append(array())
        latch = testing.latch(stream)
        latch.__enter__()  # never released: exit does not wait
        print("end")
        """
    )
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr


def test_interrupting_a_wait_keeps_the_memory(no_garbage: None) -> None:
    stream = us.get_stream(0)
    with device_memory(0, 5000) as source:
        memory = DeviceArray(np.empty(5000, "u1"), source)
        where = address(to_host(memory, stream))
        with testing.latch(stream) as latch:
            main = threading.main_thread().ident

            def interrupt() -> None:
                assert eventually(lambda: bool(held_objects.in_use))
                threading.Event().wait(0.02)
                signal.pthread_kill(main, signal.SIGINT)

            with untraced(), running(interrupt), pytest.raises(KeyboardInterrupt):
                to_host(memory, stream)
            assert address(array(5000)) != where
            latch.release()

            def is_free() -> bool:
                held_objects.sweep()  # the watcher may be at it, and free the memory a bit later
                return where in _pinned._free.get(_pinned.rounded(5000), {})

            assert eventually(is_free)


def no_other_thread_has_a_block() -> bool:
    """Sweep; return whether neither the watcher nor a thread that frees has taken a block."""
    gc.collect()
    held_objects.sweep()
    watches = watcher._watcher._daemon._thread and watcher._watcher._pause != threading.TIMEOUT_MAX
    return not watches and nothing_is_being_freed()


def accounted(lost: int = 0) -> int:
    """Check that each block is free, except so many; make those free; return the count of bytes.

    A block that another thread has in hand would seem to be lost, and be freed twice.
    """
    assert eventually(nothing_is_being_freed, 30)
    total = _pinned._count()
    assert not _pinned._moving
    free = {(size, each) for size, blocks in _pinned._free.items() for each in blocks}
    blocks = {(memory.size, address) for address, memory in _pinned._blocks.items()}
    missing = blocks - free - set(_pinned._leaving)
    assert len(missing) <= lost
    assert free | set(_pinned._leaving) <= blocks
    assert sum(size for size, _ in blocks) == total == _pinned._total
    for size, where in missing:
        _pinned._free_blocks(size)[where] = None
    return total


@pytest.mark.simulated
@pytest.mark.parametrize("refused", [None, "cuMemPoolCreate", "cuMemAllocFromPoolAsync"])
@pytest.mark.parametrize("opened", [False, True])
def test_a_signal_loses_at_most_the_block_that_is_allocated(
    opened: bool, refused: str | None, request: pytest.FixtureRequest
) -> None:
    """Neither a free block, nor the pool, nor the count."""
    free_all()
    assert accounted() == 0
    pools = request.getfixturevalue("no_pools")
    if opened and refused != "cuMemPoolCreate":
        array(5000)
        free_all()

    before, made, lost = _simulated.stats(), len(pools), 0

    def lost_blocks() -> int:
        return _simulated.stats().allocations - before.allocations - len(_pinned._blocks)

    for at in itertools.count():
        with contextlib.ExitStack() as stack:
            if refused is not None:
                stack.enter_context(testing.inject(refused, 801, count=1 << 20))
            came = cut_short(lambda: array(MIB), at)
            testing.reset()
        # A block that was allocated in vain is freed in the order of the pool's stream.
        assert eventually(lambda most=lost + 1: lost_blocks() <= most), f"signal {at}"
        lost = lost_blocks()
        accounted(lost=1)
        streams = _simulated.stats().streams - before.streams
        assert streams == len(pools) - made, f"signal {at}: a pool is lost"
        if not came:
            break
        thread = trim() if at % 3 else None  # otherwise the next call takes the free block
        if thread is not None:
            thread.join(30)
        if not opened and pools and not _pinned._blocks:
            pools.popitem()[1].close()
    assert at > 20
    assert lost < at / 2, "at most places nothing is lost"


@pytest.mark.simulated
@pytest.mark.usefixtures("no_garbage")
def test_a_signal_while_the_pool_is_held_up(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    array(4096)  # opens the pool
    with testing.latch(us.get_stream(0)):  # which needs memory at its first use
        us.release(driver.CUdeviceptr(memory))
    us.wait_for_device(0, timeout=20)
    free_all()
    monkeypatch.setattr(host_pools, "_PATIENCE", 0)
    for at in itertools.count():
        with testing.latch(us.get_stream(0)) as latch:
            us.release(driver.CUdeviceptr(memory))
            came = cut_short(lambda: array(MIB), at)
            latch.release()
        us.wait_for_device(0, timeout=20)
        accounted(lost=1)
        if not came:
            break
        free_all()
    assert at > 20


@pytest.mark.simulated
def test_a_signal_loses_at_most_one_block_that_is_to_be_freed() -> None:
    for at in itertools.count():
        held = [array(MIB), array(MIB), array(2 * MIB)]
        held.clear()
        came = cut_short(trim, at)
        accounted(lost=1)
        assert eventually(nothing_is_left), f"signal {at}"
        if not came:
            break


def test_a_signal_before_free_blocks_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call does it."""

    def signal(*_: object) -> None:
        raise Cut

    array(MIB)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", signal)
        with pytest.raises(Cut):
            trim()
    assert accounted() == MIB
    free_all()
    assert accounted() == 0


@pytest.mark.simulated
def test_a_storm_of_signals() -> None:
    """Each loses one block at most. A real timer: they come while others are handled, too."""
    free_all()
    stream = us.get_stream(0)
    signals, delays = 0, np.random.default_rng(1)

    def interrupt(_number: int, frame: FrameType | None) -> None:
        nonlocal signals
        if frame is not None and frame.f_code.co_filename.startswith((HERE, BINDINGS)):
            signals += 1
            raise Cut

    with untraced(), device_memory(0, 7 * 4096) as source:
        before = signal.signal(signal.SIGALRM, interrupt)
        end = time.monotonic() + 0.5
        try:
            while time.monotonic() < end:
                for pages in range(1, 7):
                    with contextlib.suppress(Cut):
                        signal.setitimer(signal.ITIMER_REAL, delays.uniform(1e-4, 2e-3), 1e-4)
                        to_host(DeviceArray(np.empty(pages * 4096, "u1"), source), stream)
                        trim()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        stream.sync()
    assert eventually(no_other_thread_has_a_block)
    # The second of two signals may leave a use, or a block that was being moved.
    lost = len(held_objects.in_use)
    held_objects.in_use.clear()
    while _pinned._moving:
        memory = _pinned._moving.pop()
        if memory.address is None:
            lost += 1
        else:
            _pinned._blocks[memory.address] = memory
    accounted(lost=signals - lost)
    assert eventually(nothing_is_left)


def test_ctrl_c_while_the_driver_allocates() -> None:
    """A real timer interrupts the slow allocation, sooner and later."""
    free_all()
    _pinned.set_limit(4 * MIB)

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with untraced():
            for i in range(40):
                try:
                    signal.setitimer(signal.ITIMER_REAL, 20e-6 * (i + 1))
                    array(4 * MIB)
                    threading.Event().wait(0.01)
                except KeyboardInterrupt:
                    pass
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                accounted(lost=1)
    finally:
        signal.signal(signal.SIGALRM, before)
    free_all()
    assert accounted() == 0
