"""The pytest plugin of userstream: tests without a GPU, and tests whose streams are watched.

``--simulated-gpus N`` puts the simulated driver in the place of CUDA's for the whole run, and the
fixture ``simulated_gpus`` from the first test on that has it; that gives the devices, and a fresh
state to each test. The fixture ``injected`` is `userstream.testing.inject`, whose failures have to
happen until the end of the test.

``--races`` watches every test, and fails those with races; the marker ``no_races`` does that for a
test without the option, and ``no_races(False)`` leaves one out; the fixture ``observe`` is the
observation itself, for tests that look at it. ``--races-confirm`` makes races happen, as
`observe(confirm=True)` does.

The marker ``no_stalls`` fails a test in which the host waits for the GPU.

``--schedules N`` runs every test in N + 2 orders of what its streams and threads do; the marker
``schedules(N)`` does that for a test without the option. A test that fails in one of them says how
``--schedule SEED`` runs it in that order alone.

A module of its own, as pytest loads it in every run: it imports nothing of userstream, and so
nothing of CUDA, before a test uses it.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import pytest
from _pytest.runner import runtestprotocol

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from cuda.core import Device

    from userstream import Observation
    from userstream.testing import inject, schedule

_SUPPRESSED = pytest.StashKey[list[str]]()  # the lines of --races-suppress
_CONFIRMED = pytest.StashKey[str]()  # the file of --races-confirm-from
_MARKERS = (
    "no_races(watch=True): fail this test if its streams race; False: do not watch it",
    "no_stalls: fail this test if the host waits for the GPU in it",
    "schedules(count=200, depth=3): run this test under so many schedules, and two more; 0: none",
)
_SCHEDULE = pytest.StashKey["schedule"]()  # under which a test runs now
_UNSCHEDULED = pytest.StashKey[int]()  # how many tests ran in one order, for want of a simulation


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
    group.addoption(
        "--races-confirm",
        action="store_true",
        help="with --races: make races happen when their lines run again in the test",
    )
    group.addoption(
        "--races-confirm-from",
        metavar="FILE",
        help="the same, and hold the races of FILE, a report as .json, from the first time on",
    )
    group.addoption(
        "--schedules", metavar="N", type=int, help="run every test in N orders of its streams"
    )
    group.addoption(
        "--schedule",
        metavar="SEED",
        type=_seed,
        help="run every test in one order: 'lazy', 'eager' or a number, as a failure shows it",
    )


def _keep_from_rewriting(pluginmanager: pytest.PytestPluginManager) -> None:
    """Exclude userstream from the rewriting of asserts.

    Pytest rewrites the assertions of all that is installed with a plugin. Where it cannot keep the
    result, as in a fresh container, that takes four times as long as the import itself. A pytest
    whose inside is another one rewrites as before.
    """
    marked = getattr(getattr(pluginmanager, "rewrite_hook", None), "_must_rewrite", None)
    if isinstance(marked, set):
        marked.discard("userstream")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker; simulate, as long as nothing has called the driver."""
    for marker in _MARKERS:
        config.addinivalue_line("markers", marker)
    path = config.getoption("--races-suppress")
    if path is not None:
        config.stash[_SUPPRESSED] = _suppressed(config.invocation_params.dir / path)
    path = config.getoption("--races-confirm-from")
    if path is not None:
        config.stash[_CONFIRMED] = _report(str(config.invocation_params.dir / path))
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
    from userstream._observe.judge.finding_types import read_suppressions

    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        read_suppressions(path)
    except (OSError, ValueError) as error:
        raise pytest.UsageError(f"--races-suppress: {error}") from error
    return lines


def _report(path: str) -> str:
    """Return the path of a report as JSON if it is one."""
    from userstream._observe.judge.trials import reported_pairs

    try:
        reported_pairs(path)
    except (OSError, ValueError) as error:
        raise pytest.UsageError(f"--races-confirm-from: {error}") from error
    return path


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
    """Watch a test, and fail it if it is one that may have no races; run it under its schedule."""
    run = item.stash.get(_SCHEDULE, None)
    scheduled: AbstractContextManager[object] = nullcontext() if run is None else run
    if not _is_watched(item):
        with _no_stalls(item), scheduled:
            return (yield)
    with _observation(item.config) as seen:
        try:
            with _no_stalls(item), scheduled:
                result = yield
        except BaseException:
            seen.stop()
            if seen.races:
                item.add_report_section("call", "races", str(seen))
            raise
    if seen.races:
        pytest.fail(str(seen), pytrace=False)
    return result


@contextmanager
def _no_stalls(item: pytest.Item) -> Iterator[None]:
    """Fail a test with the marker ``no_stalls`` if the host waits for the GPU in it."""
    if item.get_closest_marker("no_stalls") is None:
        yield
        return
    import userstream

    try:
        with userstream.no_stalls():
            yield
    except userstream.StallError as error:
        pytest.fail(str(error), pytrace=False)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report tests that no schedule ran; list the kernels without a function, if tests failed."""
    unscheduled = terminalreporter.config.stash.get(_UNSCHEDULED, 0)
    if unscheduled:
        terminalreporter.write_line(
            f"userstream: {unscheduled} {'tests' if unscheduled > 1 else 'test'} ran in one order: "
            "schedules need the simulated driver from the start (--simulated-gpus 2)"
        )
    simulated = sys.modules.get("userstream.testing._simulated")
    names = simulated.missing_kernels() if simulated else []
    if names and any(terminalreporter.stats.get(kind) for kind in ("failed", "error")):
        terminalreporter.section("kernels without a function (userstream.testing.kernel)")
        terminalreporter.write_line(", ".join(names))


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
    """Refuse markers with arguments that they do not have."""
    for item in items:
        for marker in item.iter_markers("schedules"):
            try:
                wanted = _wanted(*marker.args, **marker.kwargs)
            except TypeError:
                wanted = None
            if wanted is None or not all(type(value) is int and value >= 0 for value in wanted):
                raise pytest.UsageError(
                    f"{item.nodeid}: schedules({_shown(marker)}): the marker takes two arguments, "
                    "count and depth: integers of at least 0"
                )
        for marker in item.iter_markers("no_stalls"):
            if marker.args or marker.kwargs:
                raise pytest.UsageError(
                    f"{item.nodeid}: no_stalls({_shown(marker)}): the marker takes no arguments"
                )
        for marker in item.iter_markers("no_races"):
            try:
                watch = _watch(*marker.args, **marker.kwargs)
            except TypeError:
                watch = None
            if not isinstance(watch, bool):
                raise pytest.UsageError(
                    f"{item.nodeid}: no_races({_shown(marker)}): the marker takes one argument, "
                    "watch: True or False"
                )


def _shown(marker: pytest.Mark) -> str:
    """Return the arguments of a marker as text."""
    return ", ".join([*map(repr, marker.args), *(f"{k}={v!r}" for k, v in marker.kwargs.items())])


def _observation(config: pytest.Config) -> Observation:
    import userstream

    return userstream.observe(
        suppress=config.stash.get(_SUPPRESSED, ()),
        confirm=config.getoption("--races-confirm"),
        confirm_from=config.stash.get(_CONFIRMED, None),
    )


# -- schedules ------------------------------------------------------------------------------------


def _seed(text: str) -> int | str:
    """Return the value of ``--schedule``."""
    return text if text in ("lazy", "eager") else int(text, 0)


def _wanted(count: int = 200, depth: int = 3) -> tuple[int, int]:
    """Return the arguments of a marker ``schedules``."""
    return count, depth


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a test under schedules, if it is to be."""
    runs = _Runs.of(item)
    if runs is None:
        return None
    reports = runs.reports(nextitem)
    if reports is None:  # it was skipped: once more as any other test
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


class _Runs:
    """The runs of one test under schedules; for each run its fixtures are set up anew."""

    def __init__(self, item: pytest.Item, count: int, depth: int, only: int | str | None) -> None:
        self._item = item
        self._depth = depth
        self._seeds = [*range(count)] if only is None else [only]
        self._stops = only is None  # at the first failure
        self._seconds = 0.0

    @classmethod
    def of(cls, item: pytest.Item) -> _Runs | None:
        """Return the runs of a test; `None` if it is to run once, under no schedule."""
        marker = item.get_closest_marker("schedules")
        option: int | None = item.config.getoption("--schedules")
        only = item.config.getoption("--schedule")
        if marker is None and option is None and only is None:
            return None
        count, depth = _wanted() if marker is None else _wanted(*marker.args, **marker.kwargs)
        if not count or not isinstance(item, pytest.Function):
            return None
        if not _is_simulated(item):
            stash = item.config.stash
            stash[_UNSCHEDULED] = stash.get(_UNSCHEDULED, 0) + 1
            return None
        return cls(item, count if option is None else option, depth, only)

    def reports(self, nextitem: pytest.Item | None) -> list[pytest.TestReport] | None:
        """Run the test until it fails, and return the last reports; `None` if it is skipped.

        The two extremes come first. They also tell how many choices there are, which the change
        points of the seeds depend on. Without a choice every order is the same: two runs are all.
        """
        length = 1
        seeds = [*(seed for seed in ("lazy", "eager") if seed not in self._seeds), *self._seeds]
        for number, seed in enumerate(seeds, 1):
            is_last = number == len(seeds)
            run, reports = self._run(seed, length, None, nextitem if is_last else self._item.parent)
            if any(report.skipped for report in _of_test(reports)) and not is_last:
                return None
            if _failed(reports) and (is_last or self._stops):
                reports = self._shortest(run, reports, nextitem)
                break
            if isinstance(seed, str):
                length = max(length, run.choices)
            if self._stops and not run.choices:
                del seeds[number + 1 :]
        return reports

    def _run(
        self, seed: int | str, length: int, changes: int | None, following: Any
    ) -> tuple[schedule, list[pytest.TestReport]]:
        """Run the test, and end the fixtures that what follows does not use.

        That is the next test for the last run. For others it is what the test is in, so that the
        fixtures of the module stay.
        """
        from userstream import testing

        run = testing.schedule(seed, depth=self._depth, length=length)
        if changes is not None:
            run._changes = changes
        self._item.stash[_SCHEDULE] = run
        subtests, manager = _Subtests(), self._item.config.pluginmanager
        manager.register(subtests)
        try:
            reports = runtestprotocol(self._item, log=False, nextitem=following)
        finally:
            manager.unregister(subtests)
            del self._item.stash[_SCHEDULE]
        for report in reports:
            if report.when == "call":
                self._seconds += report.duration
                report.duration = self._seconds
                subtests.end(report, self._item)
        return run, [*subtests.reports, *reports]

    def _shortest(
        self, run: schedule, reports: list[pytest.TestReport], nextitem: pytest.Item | None
    ) -> list[pytest.TestReport]:
        """Return the reports of a failure without the change points that it does not need.

        An error of the first run, which breaks the context, must not fail the others.
        """
        from userstream import testing

        points = range(1, self._depth) if isinstance(run.seed, int) else ()
        changes = run._changes
        for point in points:
            fewer = changes & ~(1 << point)
            testing.reset()
            if _failed(self._run(run.seed, run.length, fewer, self._item.parent)[1]):
                changes = fewer
        testing.reset()
        shortest, again = self._run(run.seed, run.length, changes, nextitem)
        if _failed(again):
            run, reports = shortest, again
            needed = f", which needs {changes.bit_count()} of {len(points)} change points"
            order = f"The order{needed if points else ''}:"
        else:
            order = "In the same order again the test passes. The order that failed:"
        seed = hex(run.seed) if isinstance(run.seed, int) else run.seed
        path = os.path.relpath(self._item.path, self._item.config.invocation_params.dir)
        test = f"{path}::{self._item.nodeid.partition('::')[2]}"  # from there, not from the root
        command = f"pytest --schedule {seed} {test!r}"
        text = f"{order}\n\n{run.trace}\n\nTo run the test in this order again: {command}"
        for report in _of_test(reports):
            if report.failed:
                report.sections.append(("schedule", text))
        return reports


class _Subtests:
    """Plugin for one run of a test: keeps the reports of its subtests, to be logged with its own.

    Pytest logs them in each run, while the reports of the test itself are logged after the last.
    """

    def __init__(self) -> None:
        self.reports: list[pytest.TestReport] = []
        self._outcomes: list[Any] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep a report; what counts failures sees one that passed."""
        self.reports.append(report)
        self._outcomes.append(report.outcome)
        report.outcome = "passed"

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self) -> tuple[str, str, str]:
        """Print nothing for a report."""
        return "", "", ""

    def end(self, report: pytest.TestReport, item: pytest.Item) -> None:
        """Fail a test whose subtests have failed, as pytest does where the report is printed."""
        for each, outcome in zip(self.reports, self._outcomes, strict=True):
            each.outcome = outcome
        failed = self._outcomes.count("failed")
        if failed and report.passed:
            report.outcome = "failed"
            report.longrepr = f"contains {failed} failed subtest{'s' if failed > 1 else ''}"
        with suppress(ImportError):  # before pytest 9
            from _pytest.subtests import failed_subtests_key

            item.config.stash[failed_subtests_key].clear()


def _of_test(reports: list[pytest.TestReport]) -> list[pytest.TestReport]:
    """Return the reports of a test without those of its subtests."""
    return [report for report in reports if type(report) is pytest.TestReport]


def _failed(reports: list[pytest.TestReport]) -> bool:
    return any(report.failed for report in reports)


def _is_simulated(item: pytest.Item) -> bool:
    """Return whether a test runs on the simulated driver. On a GPU it runs once."""
    if "simulated_gpus" in getattr(item, "fixturenames", ()):
        return True
    simulated = sys.modules.get("userstream.testing._simulated")
    return simulated is not None and bool(simulated.is_simulated())
