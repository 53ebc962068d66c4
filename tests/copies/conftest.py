"""Fixtures of the tests of copies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import userstream as us
from internals import pinned_limit


@pytest.fixture
def no_cache() -> Iterator[None]:
    """Make every result pageable, by a limit of 0 for page-locked memory."""
    before = pinned_limit()
    us.UserStream.set_pinned_limit(0)
    yield
    us.UserStream.set_pinned_limit(before)
