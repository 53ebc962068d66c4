"""The simulated driver: settings, order of memory, registration of kernels, and its hook."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from cuda.bindings import driver
from cuda.core import LaunchConfig, ObjectCode, launch

import userstream as us
from helpers import checked, current_context, device_memory
from userstream import _process, testing
from userstream.testing import _kernels, _simulated, inject, kernel, latch

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("no_garbage")]

NOT_READY = driver.CUresult.CUDA_ERROR_NOT_READY
PATIENCE = 20


# -- settings and memory ---------------------------------------------------------------------------


def test_a_stream_reads_what_was_written_before_the_release(stream, monkeypatch):
    """ARM may otherwise show the word that releases the stream before earlier writes."""
    fenced = []
    monkeypatch.setattr(
        _process, "fence", lambda: fenced.append(driver.cuStreamQuery(stream.handle))
    )
    with latch(stream):
        pass
    assert fenced == [(NOT_READY,)]


def test_the_same_settings_again_do_nothing():
    settings = _simulated._settings
    testing.simulate(settings.devices)
    testing.simulate(
        settings.devices, driver_version=settings.driver_version, memory=settings.memory
    )
    assert _simulated._settings == settings


@pytest.mark.parametrize(
    "other", [{"devices": 3}, {"driver_version": 12080}, {"memory": 1 << 20}], ids=str
)
def test_other_settings_later_are_refused(other):
    settings = {"devices": _simulated._settings.devices, **other}
    devices = settings.pop("devices")
    with pytest.raises(RuntimeError, match=r"already runs with devices=.*needs another process"):
        testing.simulate(devices, **settings)


# -- kernels ---------------------------------------------------------------------------------------


def test_a_launch_of_a_function_that_is_being_registered(stream, monkeypatch):
    """The driver knows the kernel a moment before Python does."""
    told, go_on = threading.Event(), threading.Event()
    seen = []

    class Slow(dict):
        def __setitem__(self, key, value):
            told.set()
            go_on.wait(PATIENCE)
            super().__setitem__(key, value)

    def fresh(grid, block):
        seen.append(grid)

    monkeypatch.setattr(_kernels, "_by_id", Slow(_kernels._by_id))
    thread = threading.Thread(target=lambda: kernel("fresh")(fresh))
    thread.start()
    assert told.wait(PATIENCE)
    launch(stream, LaunchConfig(grid=1, block=1), ObjectCode.from_ptx(b"any").get_kernel("fresh"))
    time.sleep(0.05)
    go_on.set()
    thread.join()
    stream.sync(timeout=PATIENCE)
    assert seen == [(1, 1, 1)]


# -- the hook for every driver call ----------------------------------------------------------------


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
    library = _simulated._side_door("a test")
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
    assert not library.userstream_observe(observer), "there is a hook already"
    try:
        yield calls
    finally:
        assert library.userstream_observe(None)
    assert set(contexts) <= {current_context() or None}


@pytest.mark.no_races(False)  # the hook is that of the tests
def test_the_hook_is_called_at_the_begin_and_the_end_of_a_call() -> None:
    stream = us.get_stream(0)
    handle = int(stream.handle)
    with device_memory(0) as address, observed() as calls:
        checked(driver.cuMemsetD8Async(address, 7, 100, handle))
    words = (address, 7, 100, handle)
    assert calls == [(0, "cuMemsetD8Async", words, 0), (1, "cuMemsetD8Async", words, 0)]


@pytest.mark.no_races(False)  # the hook is that of the tests
def test_the_hook_is_called_for_a_call_without_arguments_and_for_a_failure() -> None:
    with observed() as calls, inject("cuCtxSynchronize", 700):
        driver.cuCtxSynchronize()
    assert [(site, words, result) for site, _, words, result in calls[:2]] in (
        [(0, (), 0), (1, (), 700)],
        [(0, (0,), 0), (1, (0,), 700)],  # cuCtxSynchronize_v2, of bindings for CUDA 13
    )


@pytest.mark.no_races(False)  # the hook is that of the tests
def test_the_hook_is_not_called_after_its_removal() -> None:
    with observed() as calls:
        pass
    driver.cuCtxGetCurrent()
    assert not calls


@pytest.mark.no_races(False)  # the hook is that of the tests
def test_the_hook_is_set_and_removed_while_threads_call_the_driver() -> None:
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


@pytest.mark.no_races(False)  # the hook is that of the tests
def test_every_function_has_a_name_of_its_own() -> None:
    with observed():
        library = _simulated._side_door("a test")
        names = []
        while (name := library.userstream_symbol(len(names))) is not None:
            names.append(name)
    assert len(names) == len(set(names)) > 100
