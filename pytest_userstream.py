"""The pytest plugin of userstream: tests without a GPU, and tests whose streams are watched.

``--simulated-gpus N`` puts the simulated driver in the place of CUDA's for the whole run, and the
fixture ``simulated_gpus`` from the first test on that has it; that gives the devices, and a fresh
state to each test. The fixture ``injected`` is `userstream.testing.inject`, whose failures have to
happen until the end of the test.

``--races`` watches every test, and fails those with races; the marker ``no_races`` does that for a
test without the option, and ``no_races(False)`` leaves one out; the fixture ``observe`` is the
observation itself, for tests that look at it.

A module of its own, as pytest loads it in every run: it imports nothing of userstream, and so
nothing of CUDA, before a test uses it.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from pathlib import Path

    from cuda.core import Device

    from userstream import Observation
    from userstream.testing import inject

_SUPPRESSED = pytest.StashKey[list[str]]()  # the lines of --races-suppress
_MARKER = "no_races(watch=True): fail this test if its streams race; False: do not watch it"


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Add the options."""
    _keep_from_rewriting(pluginmanager)
    group = parser.getgroup("userstream", "streams of CUDA")
    group.addoption(
        "--simulated-gpus", metavar="N", type=int, help="run on a simulated driver with N GPUs"
    )
    group.addoption("--races", action="store_true", help="fail the tests whose streams race")
    group.addoption(
        "--races-suppress",
        metavar="FILE",
        help="do not report the races that a line of FILE names, as userstream.observe(suppress=)",
    )


def _keep_from_rewriting(pluginmanager: pytest.PytestPluginManager) -> None:
    """Let userstream be imported as it is.

    Pytest rewrites the assertions of all that is installed with a plugin. Where it cannot keep the
    result, as in a fresh container, that takes four times as long as the import itself. A pytest
    whose inside is another one rewrites as before.
    """
    marked = getattr(getattr(pluginmanager, "rewrite_hook", None), "_must_rewrite", None)
    if isinstance(marked, set):
        marked.discard("userstream")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker; simulate, as long as nothing has called the driver."""
    config.addinivalue_line("markers", _MARKER)
    path = config.getoption("--races-suppress")
    if path is not None:
        config.stash[_SUPPRESSED] = _suppressed(config.invocation_params.dir / path)
    devices = config.getoption("--simulated-gpus")
    if devices is None:
        return
    from userstream import testing

    try:
        testing.simulate(devices)
    except (RuntimeError, ValueError) as error:
        raise pytest.UsageError(f"--simulated-gpus {devices}: {error}") from error


def _suppressed(path: Path) -> list[str]:
    """Return the lines of a file of suppressions."""
    from userstream._observe.judge.found import read_suppressions

    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        read_suppressions(path)
    except (OSError, ValueError) as error:
        raise pytest.UsageError(f"--races-suppress: {error}") from error
    return lines


@pytest.fixture
def simulated_gpus() -> Iterator[tuple[Device, ...]]:
    """Simulate GPUs: the devices; no injection, error or count is left from another test."""
    import userstream
    from userstream import testing
    from userstream.testing import _simulated

    if not _simulated.is_simulated():  # with how many devices is the option's affair, or conftest's
        testing.simulate()
    from cuda.core import Device

    devices = tuple(Device.get_all_devices())
    for device in devices:
        # What an earlier test left queued may fail yet, as its buffers are gone: this test would
        # get that error. A stream that is still held there never ends.
        with suppress(userstream.UserStreamError):
            userstream.wait_for_device(device, timeout=1)
    testing.reset()
    yield devices
    testing.reset()


@pytest.fixture
def injected(simulated_gpus: tuple[Device, ...]) -> Iterator[Callable[..., inject]]:  # noqa: ARG001
    """Inject failures: as `userstream.testing.inject`, and each has to happen in the test."""
    from userstream import testing

    with ExitStack() as stack:

        def inject_until_the_end(*args: Any, **kwargs: Any) -> inject:
            return stack.enter_context(testing.inject(*args, **kwargs))

        yield inject_until_the_end


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
    return _watch(*marker.args, **marker.kwargs)


def _watch(watch: bool = True) -> bool:
    """Return the argument of a marker ``no_races``."""
    return watch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse `no_races` markers with arguments that the marker does not have."""
    for item in items:
        for marker in item.iter_markers("no_races"):
            try:
                watch = _watch(*marker.args, **marker.kwargs)
            except TypeError:
                watch = None
            if not isinstance(watch, bool):
                given = [*map(repr, marker.args), *(f"{k}={v!r}" for k, v in marker.kwargs.items())]
                raise pytest.UsageError(
                    f"{item.nodeid}: no_races({', '.join(given)}): the marker takes one argument, "
                    "watch: True or False"
                )


def _observation(config: pytest.Config) -> Observation:
    import userstream

    return userstream.observe(suppress=config.stash.get(_SUPPRESSED, ()))
