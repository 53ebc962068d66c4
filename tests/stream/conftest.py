"""Fixtures of the tests of streams."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import userstream as us
from internals import pin_word


@pytest.fixture
def stream() -> Iterator[us.Stream]:
    """A stream of the test's own, whose work completes before the next test."""
    # Page-lock a word now: a later call that did so would wait for a stream that a test holds.
    pin_word()
    with us.Stream.create(0) as stream:
        yield stream
        if not stream.is_closed:
            stream.sync(timeout=20)
