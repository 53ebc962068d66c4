"""Fixtures of the tests of order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import userstream as us
from helpers import CAI, device_memory


@pytest.fixture
def buffer(memory: int) -> CAI:
    return CAI(memory, stream=-1)


@pytest.fixture
def mine() -> Iterator[us.Stream]:
    with us.Stream.create(0) as stream:
        yield stream


@pytest.fixture
def other() -> Iterator[int]:
    """The address of 256 other bytes on device 0."""
    with device_memory(0) as address:
        yield address
