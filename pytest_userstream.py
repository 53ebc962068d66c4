"""The pytest plugin of userstream: tests whose streams are watched.

``--races`` watches every test, and fails those with races; the marker ``no_races`` does that for a
test without the option, and ``no_races(False)`` leaves one out; the fixture ``observe`` is the
observation itself, for tests that look at it.

A module of its own, as pytest loads it in every run: it imports nothing of userstream, and so
nothing of CUDA, before a test is watched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from userstream import Observation

_MARKER = "no_races(watch=True): fail this test if its streams race; False: do not watch it"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("userstream", "streams of CUDA")
    group.addoption("--races", action="store_true", help="fail the tests whose streams race")
    group.addoption(
        "--races-suppress", metavar="FILE", help="races that are not reported, as userstream does"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", _MARKER)


@pytest.fixture
def observe(request: pytest.FixtureRequest) -> Iterator[Observation]:
    """Watch the streams of the test: `userstream.observe`, entered."""
    with _observation(request.config) as seen:
        yield seen


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Watch a test, and fail it if it is one that may have no races."""
    if not _is_watched(item):
        return (yield)
    with _observation(item.config) as seen:
        try:
            result = yield
        except BaseException:
            seen.stop()
            if seen.races:
                item.add_report_section("call", "races", str(seen))
            raise
    if seen.races:
        pytest.fail(str(seen), pytrace=False)
    return result


def _is_watched(item: pytest.Item) -> bool:
    if "observe" in getattr(item, "fixturenames", ()):
        return False  # it looks itself
    marker = item.get_closest_marker("no_races")
    if marker is None:
        return bool(item.config.getoption("--races"))
    return bool(marker.args[0] if marker.args else marker.kwargs.get("watch", True))


def _observation(config: pytest.Config) -> Observation:
    import userstream

    return userstream.observe(suppress=config.getoption("--races-suppress") or ())
