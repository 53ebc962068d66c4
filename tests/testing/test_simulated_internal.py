"""The simulated driver: its settings, and the order of memory that it promises."""

from __future__ import annotations

import pytest
from cuda.bindings import driver
from cuda.core import (
    Device,
)

from userstream import _process, testing
from userstream.testing import (
    _simulated,
    latch,
    reset,
)

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("no_garbage")]


Result = driver.CUresult

NOT_READY = Result.CUDA_ERROR_NOT_READY


@pytest.fixture(autouse=True)
def device():
    reset()
    device = Device(0)
    before = driver.cuCtxGetCurrent()[1]
    device.set_current()
    yield device
    driver.cuCtxSetCurrent(before)
    reset()


@pytest.fixture
def stream(device):
    stream = device.create_stream()
    yield stream
    stream.close()


def test_a_stream_reads_what_was_written_before_the_release(stream, monkeypatch):
    """On ARM as well, where the word that lets it go on may be there before the rest."""
    fenced = []
    monkeypatch.setattr(
        _process, "fence", lambda: fenced.append(driver.cuStreamQuery(stream.handle))
    )
    with latch(stream):
        pass
    assert fenced == [(NOT_READY,)]


@pytest.mark.simulated
def test_the_same_settings_again_do_nothing():
    settings = _simulated._settings
    testing.simulate(settings.devices)
    testing.simulate(
        settings.devices, driver_version=settings.driver_version, memory=settings.memory
    )
    assert _simulated._settings == settings


@pytest.mark.simulated
@pytest.mark.parametrize(
    "other", [{"devices": 3}, {"driver_version": 12080}, {"memory": 1 << 20}], ids=str
)
def test_other_settings_later_are_refused(other):
    settings = {"devices": _simulated._settings.devices, **other}
    devices = settings.pop("devices")
    with pytest.raises(RuntimeError, match=r"already runs with devices=.*needs another process"):
        testing.simulate(devices, **settings)
