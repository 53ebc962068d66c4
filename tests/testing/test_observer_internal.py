"""The hook of the simulated driver: who is told of every driver call."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from cuda.bindings import driver

import userstream as us
from helpers import checked, current_context, device_memory
from userstream.testing import inject
from userstream.testing._simulated import _side_door

pytestmark = [
    pytest.mark.simulated,
    pytest.mark.no_races(False),  # the hook is theirs
]

Call = tuple[int, str, tuple[int, ...], int]
OBSERVER = ctypes.CFUNCTYPE(
    None,
    ctypes.c_int,
    ctypes.c_uint,
    ctypes.POINTER(ctypes.c_uint64),
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_void_p,
)


@contextmanager
def observed() -> Iterator[list[Call]]:
    library = _side_door("a test")
    library.userstream_symbol.restype = ctypes.c_char_p
    library.userstream_observe.restype = ctypes.c_bool
    calls: list[Call] = []
    contexts: list[int | None] = []
    mine = threading.get_ident()

    def note(
        site: int,
        function: int,
        words: ctypes.Array[ctypes.c_uint64],
        count: int,
        result: int,
        context: int | None,
    ) -> None:
        if threading.get_ident() == mine:
            name = library.userstream_symbol(function).decode()
            calls.append((site, name, tuple(words[:count]), result))
            contexts.append(context)

    observer = OBSERVER(note)
    assert library.userstream_observe(observer)
    assert not library.userstream_observe(observer), "there is one already"
    try:
        yield calls
    finally:
        assert library.userstream_observe(None)
    assert set(contexts) <= {current_context() or None}


def test_a_call_is_told_at_its_begin_and_its_end_with_its_arguments() -> None:
    stream = us.get_stream(0)
    handle = int(stream.handle)
    with device_memory(0) as address, observed() as calls:
        checked(driver.cuMemsetD8Async(address, 7, 100, handle))
    words = (address, 7, 100, handle)
    assert calls == [(0, "cuMemsetD8Async", words, 0), (1, "cuMemsetD8Async", words, 0)]


def test_a_call_without_arguments_and_one_that_fails_are_told() -> None:
    with observed() as calls, inject("cuCtxSynchronize", 700):
        driver.cuCtxSynchronize()
    assert [(site, words, result) for site, _, words, result in calls[:2]] in (
        [(0, (), 0), (1, (), 700)],
        [(0, (0,), 0), (1, (0,), 700)],  # cuCtxSynchronize_v2, of bindings for CUDA 13
    )


def test_nothing_is_told_any_more_once_the_observer_was_taken_away() -> None:
    with observed() as calls:
        pass
    driver.cuCtxGetCurrent()
    assert not calls


def test_an_observer_comes_and_goes_while_threads_call_the_driver() -> None:
    end = threading.Event()

    def call() -> None:
        while not end.is_set():
            driver.cuDeviceGetCount()

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(50):
            with observed():
                driver.cuDeviceGetCount()
    finally:
        end.set()
        for thread in threads:
            thread.join()


def test_every_function_has_a_name_of_its_own() -> None:
    with observed():
        library = _side_door("a test")
        names = []
        while (name := library.userstream_symbol(len(names))) is not None:
            names.append(name)
    assert len(names) == len(set(names)) > 100
