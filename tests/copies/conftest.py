"""Fixtures of the tests of copies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import userstream as us
from internals import pinned_limit


@pytest.fixture
def no_cache() -> Iterator[None]:
    """Let every result be pageable."""
    before = pinned_limit()
    us.UserStream.set_pinned_limit(0)
    yield
    us.UserStream.set_pinned_limit(before)
