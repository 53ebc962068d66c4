"""What tests of kernels in graphs work with."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

import userstream as us
from helpers import device_current, device_memory
from userstream.testing import reset

PATIENCE = 20


@pytest.fixture
def stream() -> Iterator[us.Stream]:
    with device_current(0), us.Stream.create(0) as stream:
        yield stream
        reset()


@pytest.fixture
def address(stream: us.Stream) -> Iterator[int]:
    """The address of four numbers, all 0."""
    with device_memory(0) as address:
        stream.sync(timeout=PATIENCE)
        ctypes.memset(address, 0, 16)
        yield address
        reset()
        stream.sync(timeout=PATIENCE)
