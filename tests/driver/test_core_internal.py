"""The compiled core: sequences of driver calls as one call."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver

import userstream as us
from conftest import SIMULATED
from helpers import (
    another_context,
    checked,
    device_current,
    device_memory,
    eventually,
    fill,
    grown,
    pinned_memory,
    run_python,
    upload,
)
from userstream import _built, _driver, testing
from userstream._driver import _core, account, core
from userstream._engine import dispatcher, watcher
from watching import Listener

NOT_READY = 600
SINGLETONS = (None, True, False)
CALLS = int(os.environ.get("USERSTREAM_CALLS", "100_000"))  # in which nothing may leak


@pytest.fixture(autouse=True)
def _loaded() -> None:
    us.get_stream(0)  # the driver is loaded


def which(result: int) -> tuple[str, int]:
    """The function that failed, and its code."""
    return core.FUNCTIONS[result >> 32], result & 0xFFFFFFFF


def mode_of_this_thread() -> int:
    previous = checked(driver.cuThreadExchangeStreamCaptureMode(driver.CUstreamCaptureMode(0)))
    checked(driver.cuThreadExchangeStreamCaptureMode(previous))
    return int(previous)


def test_a_query_tells_whether_a_stream_is_busy(producer):
    assert core.query(producer._lane.handle) == 0
    with testing.latch(producer):
        assert which(core.query(producer._lane.handle)) == ("cuStreamQuery", NOT_READY)
        assert core.query(int(producer._lane.handle)) == core.query(producer._lane.handle)
    producer.sync()
    assert core.query(producer._lane.handle) == 0


def test_no_capture_breaks_and_the_mode_is_as_before(producer):
    with us.Stream.create(0) as captured:
        captured.begin_capture(mode="global")
        before = mode_of_this_thread()
        assert core.query(producer._lane.handle) == 0
        assert mode_of_this_thread() == before
        captured.end_capture()  # it would tell of an invalid capture


def test_a_captured_stream_is_not_queried():
    with us.Stream.create(0) as captured:
        captured.begin_capture(mode="relaxed")
        assert core.query(captured._lane.handle) == core.CAPTURED
        captured.end_capture()  # it would tell of an invalid capture


def test_streams_are_free_unless_one_is_captured(producer):
    with us.Stream.create(0) as captured:
        assert core.are_free(producer._lane.handle, captured._lane.handle) is True
        captured.begin_capture(mode="relaxed")
        assert core.are_free(producer._lane.handle, captured._lane.handle) is False
        assert core.are_free(captured._lane.handle, producer._lane.handle) is False
        captured.end_capture()


def test_a_stream_is_in_its_context(producer):
    stream, context = producer._lane.handle, producer._lane.context
    assert core.is_in(stream, context) is core.is_in(int(stream), context) is True
    with another_context() as other:
        assert core.is_in(stream, other or 1) is False


LONG = 20 * 10**9  # nanoseconds, past which a test that waits for them has failed
EIGHT = (0, 0, 8, 0, 8)  # bytes, of memory that has so many


@pytest.fixture
def to_host(memory: int) -> Iterator[tuple[int, int]]:
    """Eight bytes of page-locked memory, and the memory of a device."""
    with pinned_memory(size=8) as address:
        ctypes.memset(address, 0xFF, 8)
        yield address, memory


def fetch(
    lane: Any,
    start: int,
    address: int,
    move: tuple[int, int, int, int, int] = EIGHT,
    *,
    after: Any = None,
    limit: int = LONG,
    parts: int = 1,
    out: int = 0,
) -> Any:
    with _driver.contexts.entered(lane.context):
        return core.fetch(lane, after, move, start, address, limit, parts, out)


def fetched(*given: Any, **more: Any) -> int:
    """Fetch until a copy is over in time, and return how many tries that took."""
    tries = 1
    while (answer := fetch(*given, **more)) is not True:
        assert isinstance(answer, core.Point)
        tries += 1
    return tries


def test_fetching_copies_and_waits_for_that(producer, memory, to_host):
    fill(producer, memory, 7)
    before = mode_of_this_thread()
    fetched(producer._lane, *to_host)
    assert mode_of_this_thread() == before
    assert ctypes.string_at(to_host[0], 8) == b"\7" * 8


def test_fetching_gives_up_in_time(producer, to_host):
    lane = producer._lane
    with testing.latch(producer):
        point = fetch(lane, *to_host, limit=1000)
        assert point.target is lane
        assert not point.is_done()
    producer.sync()
    assert point.is_done()  # its event was recorded behind the copy


@pytest.mark.parametrize("count", [1, 2, 3, 32])
@pytest.mark.parametrize("size", [8, 4096, 40_007])
def test_fetching_goes_on_to_other_memory_in_parts(producer, count, size):
    """The GPU is at work on the next part meanwhile, if the pages are enough for several."""
    expected = bytes(index % 251 for index in range(size))
    out = ctypes.create_string_buffer(size + 1)
    out[size] = b"x"
    with device_memory(0, size) as source, pinned_memory(size=size) as to:
        with device_current(0):
            upload(source, expected, size)
        copies = testing.calls("cuMemcpyAsync") if SIMULATED else 0
        move, to_out = (0, 0, size, 0, size), ctypes.addressof(out)
        tries = fetched(producer._lane, to, source, move, parts=count, out=to_out)
        if SIMULATED:
            parts = min(count, -(-size // 4096))
            if parts == 32:
                parts = 10  # of a page each
            assert testing.calls("cuMemcpyAsync") - copies == parts * tries
    assert out.raw == expected + b"x"


def test_what_is_late_does_not_go_on(producer, to_host):
    out = ctypes.create_string_buffer(b"before..", 8)
    with testing.latch(producer):
        point = fetch(producer._lane, *to_host, limit=1000, out=ctypes.addressof(out))
        assert not point.is_done()
    producer.sync()
    assert out.raw == b"before.."


@pytest.mark.no_races(False)  # whoever calls `fetch` knows that it has waited
def test_a_producer_is_followed_by_an_edge_only_while_it_is_busy(producer, memory, to_host):
    lane, theirs = us.get_stream(0)._lane, producer._lane
    fill(producer, memory, 1)
    producer.sync(timeout=20)
    waits = testing.calls("cuStreamWaitEvent") if SIMULATED else 0
    fetched(lane, *to_host, after=theirs)
    assert not SIMULATED or testing.calls("cuStreamWaitEvent") == waits
    with testing.latch(producer) as latch:
        fill(producer, memory, 2)
        point = fetch(lane, *to_host, after=theirs, limit=1000)
        assert not point.is_done()
        latch.release()
    us.wait(0, timeout=20)
    assert ctypes.string_at(to_host[0], 8) == bytes([2]) * 8
    with us.Stream.create(0) as captured:
        captured.begin_capture(mode="relaxed")
        assert fetch(lane, *to_host, after=captured._lane) is None
        captured.end_capture()


def test_a_bell_rings_for_a_long_copy(producer, to_host):
    lane, bell = us.get_stream(0)._lane, core.Bell()
    with testing.latch(producer) as latch:
        point = fetch(lane, *to_host, after=producer._lane, limit=1000)
        assert not point.is_blocking, "a short copy spares the interrupt"
        assert eventually(lambda: point.notify(bell))
        latch.release()
        assert bell.wait(20)
    assert point.is_done()


def test_nothing_is_fetched_on_a_captured_stream_or_beside_its_context(producer, to_host):
    given = (producer._lane, None, EIGHT, *to_host, LONG, 1, 0)
    with another_context():
        assert core.fetch(*given) is None
    with us.Stream.create(0) as captured:
        captured.begin_capture(mode="relaxed")
        assert fetch(captured._lane, *to_host) is None
        captured.end_capture()
    producer.sync()
    assert ctypes.string_at(to_host[0], 8) == b"\xff" * 8


def test_nothing_is_fetched_beyond_an_allocation(producer, memory, to_host):
    lane = producer._lane
    _status, *_, start, size = core.pointer(memory)
    below, above = memory - start, start + size - memory
    beyond = [
        (below + 1, 8),
        (0, above + 1),
        (below, size + 1),
        (-below - size, 1),
        (below, 1 << 63),
    ]
    for down, span in beyond:
        assert fetch(lane, *to_host, (0, 0, 8, down, span)) is None
    assert fetch(lane, to_host[0], 4096) is None
    assert ctypes.string_at(to_host[0], 8) == b"\xff" * 8
    fetched(lane, *to_host, (0, 0, 8, below, size))


def test_the_attributes_of_a_pointer(memory):
    for address in (0, 4096):  # unknown: the driver leaves the rest as it was
        assert core.pointer(address)[:2] == (0, 0)
    with pinned_memory() as pinned:
        assert core.pointer(pinned)[:2] == (0, 1)
        status, kind, managed, device, _context, start, size = core.pointer(memory + 1)
    assert (status, kind, managed, device) == (0, 2, 0, 0)
    assert start <= memory < start + size


@pytest.mark.simulated
def test_a_failure_to_ask_of_a_pointer_is_its_status(memory):
    with testing.inject("cuPointerGetAttributes", driver.CUresult.CUDA_ERROR_UNKNOWN):
        assert core.pointer(memory)[0] == 999


@pytest.mark.simulated
@pytest.mark.parametrize(
    "function", ["cuPointerGetAttributes", "cuMemcpyAsync", "cuEventRecord", "cuEventQuery"]
)
def test_a_failure_to_fetch_names_its_function(producer, to_host, function):
    before = mode_of_this_thread()
    events = len(producer._lane.pool.free)
    with testing.inject(function, driver.CUresult.CUDA_ERROR_UNKNOWN):
        with pytest.raises(us.DriverError) as caught:
            fetch(producer._lane, *to_host)
    assert (caught.value.function, caught.value.code) == (function, 999)
    assert mode_of_this_thread() == before
    assert len(producer._lane.pool.free) >= events
    producer.sync()


@pytest.mark.simulated
def test_a_failure_names_its_function_and_restores_the_mode(producer):
    before = mode_of_this_thread()
    with testing.inject("cuStreamQuery", driver.CUresult.CUDA_ERROR_UNKNOWN):
        assert which(core.query(producer._lane.handle)) == ("cuStreamQuery", 999)
    assert mode_of_this_thread() == before


@pytest.mark.simulated
def test_a_stream_that_cannot_be_asked_is_not_free(producer):
    with testing.inject("cuStreamIsCapturing", driver.CUresult.CUDA_ERROR_UNKNOWN):
        assert core.are_free(producer._lane.handle, producer._lane.handle) is False


@pytest.mark.simulated
def test_a_stream_that_cannot_be_asked_is_in_no_context(producer):
    with testing.inject("cuStreamGetCtx", driver.CUresult.CUDA_ERROR_UNKNOWN):
        assert core.is_in(producer._lane.handle, producer._lane.context) is False


def test_the_block_that_came_last_is_lent_until_nothing_uses_it():
    memory = (ctypes.c_char * 8)()
    where = ctypes.addressof(memory)
    blocks: dict[int, object] = {1: None, where: None}
    lease = core.lend(blocks, 8)
    assert lease.address == where
    assert list(blocks) == [1]
    array = np.ndarray((2,), "i4", lease)
    view = array[1:]
    del lease, array
    view[:] = -1
    assert list(blocks) == [1]
    del view
    assert list(blocks) == [1, where]
    assert memory.raw == b"\0\0\0\0\xff\xff\xff\xff"


def test_where_no_block_is_free_none_is_lent():
    assert core.lend({}, 8) is None


def test_a_block_comes_back_while_an_exception_is_on_its_way():
    blocks: dict[int, object] = {4096: None}

    def fail(_lease: object) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as raised:
        fail(core.lend(blocks, 8))
    assert not blocks  # the traceback has it
    raised.value.__traceback__ = None
    del raised
    assert list(blocks) == [4096]


def test_blocks_of_many_threads():
    blocks: dict[int, object] = dict.fromkeys(range(4096, 8 * 4096, 4096))
    lent: list[Any] = []
    wrong: list[int] = []

    def use() -> None:
        for _ in range(2000):
            lease = core.lend(blocks, 8)
            if lease is not None:
                lent.append(lease.address)
                if lent.count(lease.address) > 1:
                    wrong.append(lease.address)
                lent.remove(lease.address)

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert sorted(blocks) == list(range(4096, 8 * 4096, 4096))


def test_calls_of_many_threads(producer):
    wrong: list[int] = []

    def ask() -> None:
        for _ in range(2000):
            result = core.query(producer._lane.handle)
            if result or not core.are_free(producer._lane.handle, producer._lane.handle):
                wrong.append(result)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


class TestCore:
    def test_sources_that_have_changed_since_are_refused(self, monkeypatch):
        _built.check(_built.CORE, _core.SOURCE)
        with pytest.raises(ImportError, match=r"have changed since .* pip install -e \."):
            _built.check(_built.CORE, "12345678")
        monkeypatch.setattr(_built, "checksum", lambda _library: "12345678")
        with pytest.raises(ImportError, match="have changed since"):
            core.load_functions()  # of every first use of the driver

    @pytest.mark.parametrize("handle", [None, object(), -(2**70), 2**70])
    def test_what_is_no_handle_is_refused(self, handle):
        core.load_functions()
        with pytest.raises((TypeError, OverflowError, ValueError)):
            core.query(handle)

    def test_a_wrong_number_of_arguments_is_refused(self):
        with pytest.raises(TypeError, match="2 arguments were given, not 1"):
            core.query(1, 2)
        with pytest.raises(TypeError, match="1 functions were given"):
            _core.load(1)

    def test_a_function_without_an_address_is_refused(self):
        with pytest.raises(ValueError, match="function 0 has no address"):
            _core.load(*[0] * len(core.FUNCTIONS))

    @pytest.mark.parametrize("count", [0, core.MOST_PARTS + 1])
    def test_a_copy_in_no_parts_or_too_many_is_refused(self, producer, count):
        with pytest.raises(ValueError, match="not 1 to 32"):
            core.fetch(producer._lane, None, EIGHT, 0, 0, 0, count, 0)

    @pytest.mark.parametrize("arguments", [(), ({},), ([], 8), ({}, None), ({}, 1 << 70)])
    def test_what_cannot_be_lent_is_refused(self, arguments):
        with pytest.raises((TypeError, OverflowError)):
            core.lend(*arguments)

    def test_nothing_is_called_before_the_functions_are_loaded(self):
        done = run_python(
            """
            from userstream._driver import _core
            lane = _core.LaneState()
            lane.raw_handle, lane.is_context_independent = 1, True
            for stream in (1, lane):
                try:
                    _core.query(stream)
                except RuntimeError as error:
                    assert "have not been loaded" in str(error)
                else:
                    raise AssertionError
            """,
            simulate=None,
        )
        assert done.returncode == 0, done.stderr

    @pytest.mark.no_races(False)  # the analysis remembers what was called
    def test_no_call_leaks(self, producer, to_host):
        core.load_functions()
        lane, bell = producer._lane, core.Bell()
        stream, context = lane.handle, lane.context
        blocks: dict[int, object] = {1 << 40: None}
        array = np.zeros(1)
        given = [*to_host, stream, lane, context, blocks, array]

        calls: list[tuple[Any, tuple[Any, ...]]] = [
            *((core.query, (handle,)) for handle in (stream, int(stream))),
            (core.are_free, (stream, stream)),
            *((core.pointer, (address,)) for address in (to_host[1], 1 << 40)),
            (core.fetch, (lane, None, EIGHT, *to_host, LONG, 1, 0)),
            (core.point, (lane,)),
            (bell.ring, ()),
            (bell.wait, (0,)),
            (core.lend, (blocks, 8)),
            (core.lend, ({}, 8)),
            (core.address_of, (array,)),
            (core.address_of, (None,)),
            (core.query, (None,)),
            (core.are_free, (stream,)),
        ]

        def call_all(times: int) -> None:
            for _ in range(times // len(calls)):
                for function, arguments in calls:
                    with contextlib.suppress(TypeError):  # the last three
                        function(*arguments)
            producer.sync()

        with _driver.contexts.entered(context):
            call_all(2000)  # what is allocated once
            more = grown(lambda: call_all(CALLS), given)
        # Other threads allocate too; a call that leaks makes ten times as many.
        assert more < CALLS // 100


def test_none_and_bools_are_returned_as_new_references(producer):
    """Python 3.11 counts them, also if the core was built with the headers of a later Python."""
    calls = 1000
    before = [sys.getrefcount(each) for each in SINGLETONS]
    for _ in range(calls):
        _core.set_account(_core.PROGRAM)
    with testing.latch(producer) as latch:
        point = producer._lane.completion()
        for _ in range(calls):
            assert point.is_done() is False
        latch.release()
    producer.sync()
    for _ in range(calls):
        assert point.is_done() is True
    more = [sys.getrefcount(each) - count for each, count in zip(SINGLETONS, before, strict=True)]
    # Other threads hold a few more or less.
    assert max(map(abs, more)) < calls // 2, more


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python 3.11 cannot tell")
@pytest.mark.parametrize("shares_the_gil", [False, True])
@pytest.mark.parametrize("module", ["userstream", "userstream.testing"])
def test_a_subinterpreter_is_refused(module, shares_the_gil):
    code = f"""
        try:
            import _interpreters as interpreters
        except ImportError:  # Python 3.12
            import _xxsubinterpreters as interpreters
            new = interpreters.create(isolated={not shares_the_gil})
        else:
            new = interpreters.create("legacy" if {shares_the_gil} else "isolated")
        attempt = "try: import {module}\\nexcept ImportError as error: print(error, flush=True)"
        assert not interpreters.run_string(new, attempt)
        interpreters.destroy(new)
        """
    done = run_python(code, simulate=None)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("userstream cannot be imported in a subinterpreter"), done.stdout


# -- the account of a thread, as the recorder of `observe` reads it --------------------------------


def account_of_thread() -> int:
    """Return the account of the calling thread, read as the recorder reads it."""
    function = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_ubyte))(account.address())
    return function()[0]


def test_the_account_is_restored_after_a_call() -> None:
    assert account_of_thread() == account.PROGRAM
    assert account.on(account.HOUSEKEEPING, lambda: (account_of_thread(), 5)) == (
        account.HOUSEKEEPING,
        5,
    )
    assert account_of_thread() == account.PROGRAM
    with pytest.raises(ZeroDivisionError):
        account.on(account.FUTURE, lambda: 1 / 0)
    assert account_of_thread() == account.PROGRAM


def test_calls_nest_and_threads_have_accounts_of_their_own() -> None:
    def other() -> int:
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(account_of_thread()))
        thread.start()
        thread.join(10)
        return found[0]

    def outer() -> tuple[int, int, int]:
        return account.on(account.FUTURE, account_of_thread), account_of_thread(), other()

    expected = (account.FUTURE, account.HOUSEKEEPING, account.PROGRAM)
    assert account.on(account.HOUSEKEEPING, outer) == expected


def test_an_account_that_does_not_exist_is_refused() -> None:
    for wrong in (-1, 3):
        with pytest.raises(ValueError, match="there is no account"):
            account.on(wrong, account_of_thread)
        with pytest.raises(ValueError, match="there is no account"):
            account.set_for_thread(wrong)
    with pytest.raises(TypeError):
        account.on(account.PROGRAM)
    assert account_of_thread() == account.PROGRAM


def test_callbacks_and_host_functions_of_the_program_run_on_its_account() -> None:
    found: list[int] = []
    done = threading.Event()

    def look(*_: object) -> None:
        found.append(account_of_thread())
        if len(found) == 3:
            done.set()

    stream = us.get_stream(0)
    stream.launch_host_func(look)
    stream.add_callback(look)
    us.completion(stream).add_done_callback(look)
    assert done.wait(10)
    assert found == [account.PROGRAM] * 3


def test_the_threads_of_userstream_poll_on_the_account_of_a_future() -> None:
    found: dict[str, int] = {}

    class Point:
        target = None
        in_order = False

        def is_done(self) -> bool:
            found[threading.current_thread().name] = account_of_thread()
            return True

        def notify(self, _bell: object) -> bool:
            return False

    done = threading.Event()
    watcher.watch([watcher.Watch(Point(), Listener(lambda *_: done.set()))])
    assert done.wait(10)
    call = dispatcher.Call(done.set)
    call.completion = Point()
    done.clear()
    dispatcher.started().launch("no stream", call, lambda _: None)
    assert done.wait(10)
    assert found == {"userstream-watcher": account.FUTURE, "userstream-dispatcher": account.FUTURE}
