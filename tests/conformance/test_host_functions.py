"""Host functions and callbacks: functions of the C library, as no Python runs on driver threads."""

from __future__ import annotations

import ctypes
import time

import pytest
from cuda.bindings import driver

from conformance.support import (
    A_WHILE,
    INVALID_VALUE,
    LEGACY,
    NOT_READY,
    SUCCESS,
    UNSUPPORTED,
    Capture,
    Result,
    Word,
    becomes,
    elsewhere,
    finishes,
    ok,
    stays,
)
from userstream.testing import latch

_libc = ctypes.CDLL(None)


class Semaphore:
    """A semaphore of the C library, which host functions post and wait for."""

    def __init__(self) -> None:
        self._memory = ctypes.create_string_buffer(64)
        assert _libc.sem_init(self._memory, 0, 0) == 0

    @property
    def address(self) -> int:
        return ctypes.addressof(self._memory)

    @property
    def value(self) -> int:
        value = ctypes.c_int()
        assert _libc.sem_getvalue(self._memory, ctypes.byref(value)) == 0
        return value.value

    def post(self) -> None:
        _libc.sem_post(self._memory)


def launch(stream, function, argument):
    """`cuLaunchHostFunc` without the bindings, some of which take the GIL around the function."""
    call = ctypes.CDLL("libcuda.so.1").cuLaunchHostFunc
    call.argtypes = [ctypes.c_void_p] * 3
    return (Result(call(int(stream), ctypes.cast(function, ctypes.c_void_p), argument)),)


@pytest.fixture
def semaphore():
    return Semaphore()


def post(stream, semaphore):
    return launch(stream, _libc.sem_post, semaphore.address)


class Blocker:
    """Blocks the host functions of a context, for as long as the with block lasts."""

    def __init__(self, stream) -> None:
        self.stream = stream
        self.begun = Semaphore()
        self.semaphore = Semaphore()

    def __enter__(self):
        ok(launch(self.stream, _libc.sem_post, self.begun.address))
        ok(launch(self.stream, _libc.sem_wait, self.semaphore.address))
        assert becomes(1, lambda: self.begun.value)
        time.sleep(A_WHILE)  # for the second one to begin
        return self

    def __exit__(self, *exc_info):
        self.semaphore.post()
        assert finishes(self.stream)


def test_a_host_function_is_called(stream, semaphore):
    assert post(stream, semaphore) == (SUCCESS,)
    assert finishes(stream)
    assert semaphore.value == 1


def test_a_host_function_waits_for_its_turn(stream, semaphore):
    with latch(stream) as held:
        ok(post(stream, semaphore))
        assert stays(0, lambda: semaphore.value)
        held.release()
        assert finishes(stream)
    assert semaphore.value == 1


def test_later_work_waits_for_a_host_function(stream, word):
    with Blocker(stream):
        word.write(stream, 1)
        assert stays((NOT_READY, 0), lambda: (driver.cuStreamQuery(stream)[0], word.value))
    assert word.value == 1


def test_an_event_after_a_host_function_waits_for_it(stream, event):
    with Blocker(stream):
        ok(driver.cuEventRecord(event, stream))
        assert stays((NOT_READY,), lambda: driver.cuEventQuery(event))
    assert driver.cuEventQuery(event) == (SUCCESS,)


def test_host_functions_of_a_context_run_one_at_a_time(make_stream, semaphore):
    blocked, other = make_stream(), make_stream()
    with Blocker(blocked):
        ok(post(other, semaphore))
        assert stays(0, lambda: semaphore.value)
    assert becomes(1, lambda: semaphore.value)


def test_other_work_goes_on_beside_a_blocked_host_function(make_stream, word):
    blocked, other = make_stream(), make_stream()
    with Blocker(blocked):
        word.write(other, 1)
        assert finishes(other)
        assert word.value == 1


@pytest.mark.multi_device
def test_host_functions_of_another_context_run(make_stream, semaphore, other_context):
    blocked, other = make_stream(), make_stream(context=other_context)
    with Blocker(blocked):
        ok(post(other, semaphore))
        assert finishes(other)
        assert semaphore.value == 1


def test_host_functions_run_in_the_order_of_the_stream(stream, semaphore, word):
    for value in range(1, 4):
        ok(post(stream, semaphore))
        word.write(stream, value)
    assert finishes(stream)
    assert (semaphore.value, word.value) == (3, 3)


def test_a_host_function_on_the_legacy_stream(semaphore):
    ok(post(LEGACY, semaphore))
    assert finishes(LEGACY)
    assert semaphore.value == 1


def test_a_host_function_needs_no_context(stream, semaphore):
    assert elsewhere(lambda: post(stream, semaphore)) == (SUCCESS,)
    assert finishes(stream)
    assert semaphore.value == 1


def test_a_host_function_in_a_capture_is_called_by_the_launch(stream, semaphore):
    with Capture(stream) as capture:
        ok(post(stream, semaphore))
        graph = ok(capture.end())
    assert semaphore.value == 0
    executable = ok(driver.cuGraphInstantiate(graph, 0))
    ok(driver.cuGraphLaunch(executable, stream))
    assert finishes(stream)
    assert semaphore.value == 1
    ok(driver.cuGraphExecDestroy(executable))
    ok(driver.cuGraphDestroy(graph))


# ---- callbacks --------------------------------------------------------------


# `labs` as a callback: a function of the C library that minds neither its arguments nor its result.
CALLBACK = driver.CUstreamCallback(ctypes.cast(_libc.labs, ctypes.c_void_p).value)


def test_a_callback_has_no_flags(stream):
    assert driver.cuStreamAddCallback(stream, CALLBACK, 0, 1) == (INVALID_VALUE,)


def test_a_callback_cannot_be_captured(stream):
    with Capture(stream):
        assert driver.cuStreamAddCallback(stream, CALLBACK, 0, 0) == (UNSUPPORTED,)


def test_later_work_waits_for_a_callback(stream, pinned):
    with latch(stream) as held:
        assert driver.cuStreamAddCallback(stream, CALLBACK, 0, 0) == (SUCCESS,)
        Word(pinned).write(stream, 1)
        assert stays(0, lambda: Word(pinned).value)
        held.release()
        assert finishes(stream)
    assert Word(pinned).value == 1
