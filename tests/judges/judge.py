"""A pytest plugin: another project's tests as judges of the simulated driver.

``-p judge --judged-by=FILE`` compares the tests that fail with those that FILE names, one a line,
followed by ``#`` and the reason. The run fails if another test fails, and also if one of FILE
passes, which is to be removed from it then. A line names the end of a test's id.
"""

from __future__ import annotations

from pathlib import Path

import pytest

outcomes: dict[str, bool] = {}  # whether each test has failed, by its id


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--judged-by", metavar="FILE", help="the tests that fail, and why")


def known_failures(config: pytest.Config) -> list[str]:
    known = []
    path = config.getoption("--judged-by")
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        test, _, reason = line.partition(" # ")
        if test.startswith("#") or not test.strip():
            continue
        if not reason:
            raise pytest.UsageError(f"{path}: no reason is given for {test}")
        known.append(test.strip())
    return known


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    outcomes[report.nodeid] = outcomes.get(report.nodeid, False) or report.failed


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--judged-by") is None or not outcomes:
        return
    known = known_failures(session.config)
    wrong = []
    for test, has_failed in outcomes.items():
        is_known = any(test.endswith(end) for end in known)
        if has_failed and not is_known:
            wrong.append(f"not in the list of failures: {test}")
        if is_known and not has_failed:
            wrong.append(f"passes, and is in the list of failures: {test}")
    print("", *wrong, sep="\n")
    session.exitstatus = pytest.ExitCode.TESTS_FAILED if wrong else pytest.ExitCode.OK
