"""One test tree, run on the simulated driver and on a real GPU.

``USERSTREAM_TEST_DRIVER=simulated`` or ``real`` decides; by default it is the real driver where
there is an NVIDIA device node, and the simulated one where there is none.
"""

from __future__ import annotations

import gc
import itertools
import os
import signal
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import standins

if TYPE_CHECKING:
    from observed import Room

DEVICES = 4  # simulated

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX would take most memory
# The driver maps streams onto this many hardware queues, 8 by default. Work that waits at the head
# of a queue holds up every stream of that queue: an idle one would wait for another one's latch.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def _simulate() -> bool:
    choice = os.environ.get("USERSTREAM_TEST_DRIVER")
    if choice not in (None, "simulated", "real"):
        raise pytest.UsageError('USERSTREAM_TEST_DRIVER must be "simulated" or "real"')
    if choice is not None:
        return choice == "simulated"
    return not (Path("/dev/nvidiactl").exists() or Path("/dev/nvidia0").exists())


SIMULATED = _simulate()


def pytest_configure(config: pytest.Config) -> None:
    # A shell lets what it starts in the background ignore Ctrl-C, for which some tests would wait.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if SIMULATED:
        from userstream import testing

        os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # it hides simulated devices as well
        testing.simulate(devices=DEVICES)


def pytest_report_header() -> list[str]:
    from cuda.bindings import __version__ as bindings
    from cuda.core import __version__ as core

    from userstream import _driver

    driver = "simulated driver" if SIMULATED else "real driver"
    version, devices = _driver.library.version(), _driver.library.device_count()
    return [
        f"userstream: {driver} (CUDA {version}), {devices} devices, "
        f"cuda-bindings {bindings}, cuda-core {core}"
    ]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from userstream import _driver

    reasons = {
        "simulated": (not SIMULATED, "needs the simulated driver"),
        "gpu": (SIMULATED, "needs a real GPU"),
        "multi_device": (_driver.library.device_count() < 2, "needs two devices"),
    }
    for item in items:
        for mark, (applies, reason) in reasons.items():
            if applies and item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """Leave the tests themselves out of the garbage collections, of which many tests need some."""
    gc.collect()
    gc.freeze()


_finished = itertools.count(1)


def pytest_runtest_logfinish() -> None:
    """Leave out the reports of earlier tests as well, of which pytest keeps thousands."""
    if next(_finished) % 100 == 0:
        gc.unfreeze()  # of what was alive the last time, some is garbage by now
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def _leave_nothing() -> Iterator[None]:
    """Every test starts with an empty registry, and leaves the current context as it was."""
    import userstream as us
    from helpers import current_context, eventually
    from internals import forget_given_streams, nothing_is_being_freed

    before = current_context()
    yield
    # A block that is not freed, because of the reset, counts from then on.
    eventually(nothing_is_being_freed, 5)
    if SIMULATED:
        from userstream import testing

        testing.reset()
    us.close(timeout=20)
    # Or a stream that a framework still holds would come back in the next test, as it is.
    us.UserStream.get()._table.dropped.clear()
    forget_given_streams()
    assert current_context() == before, "the test, or what it tested, left another context current"


@pytest.fixture
def no_garbage() -> Iterator[None]:
    """Keep destructors of objects of earlier tests from disturbing captures and counts."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def producer() -> Iterator[Any]:
    """A stream of a framework's, on device 0."""
    import userstream as us

    with us.Stream.create(0) as stream:
        yield stream


@pytest.fixture
def stream() -> Iterator[Any]:
    """A stream of the test's own, on device 0."""
    import userstream as us

    with us.Stream.create(0) as stream:
        yield stream


@pytest.fixture
def memory() -> Iterator[int]:
    """The address of 256 bytes on device 0."""
    from helpers import device_memory

    with device_memory(0) as address:
        yield address


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    monkeypatch.setitem(sys.modules, "torch", standins.torch())
    return sys.modules["torch"]


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = standins.cupy()
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setitem(sys.modules, "cupy.cuda", module.cuda)
    return module


@pytest.fixture
def jax(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = standins.jax()
    monkeypatch.setitem(sys.modules, "jax", module)
    monkeypatch.setitem(sys.modules, "jax.core", module.core)
    return module


@pytest.fixture
def room() -> Iterator[Room]:
    """Two streams and two buffers, to race with."""
    from observed import a_room

    with a_room() as room:
        yield room


@pytest.fixture(scope="module")
def can_be_watched() -> None:
    """Skip where nothing can be observed: CUPTI is missing, or another tool has it."""
    import userstream as us

    try:
        with us.observe():
            pass
    except us.NotSupportedError as error:
        pytest.skip(str(error))


@pytest.fixture
def warp(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    monkeypatch.setitem(sys.modules, "warp", standins.warp())
    return sys.modules["warp"]


@pytest.fixture
def tvm_ffi(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    monkeypatch.setitem(sys.modules, "tvm_ffi", standins.tvm_ffi())
    from userstream._buffers import tvm_ffi

    tvm_ffi._device.cache_clear()
    yield sys.modules["tvm_ffi"]
    tvm_ffi._device.cache_clear()  # or a test with the real one would get devices of this one


@pytest.fixture
def cvcuda(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    monkeypatch.setitem(sys.modules, "cvcuda", standins.cvcuda())
    return sys.modules["cvcuda"]
