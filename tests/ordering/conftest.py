"""Fixtures of the tests of order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import userstream as us
from helpers import CAI


@pytest.fixture
def buffer(memory: int) -> CAI:
    return CAI(memory, stream=-1)


@pytest.fixture
def mine() -> Iterator[us.Stream]:
    with us.Stream.create(0) as stream:
        yield stream
