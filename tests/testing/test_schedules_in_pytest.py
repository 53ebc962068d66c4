"""The pytest plugin: tests that run under many schedules, in runs of pytest of their own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from testing.test_pytest_plugin import run_tests

pytestmark = pytest.mark.simulated

# A copy that nothing orders after a fill, and one that is ordered.
PROGRAMS = """
import pytest
from cuda.bindings import driver
from cuda.core import Device
import userstream as us


class Buffers:
    def __init__(self, device):
        device.set_current()
        self.streams = [us.Stream.create(0), us.Stream.create(0)]
        self.one, self.other = (device.allocate(64, stream=self.streams[0]) for _ in range(2))
        self.one.fill(0, stream=self.streams[0])
        self.streams[0].sync()


@pytest.fixture
def buffers(simulated_gpus):
    return Buffers(simulated_gpus[0])


def copied(buffers, is_ordered, *values):
    for value in values:
        buffers.one.fill(value, stream=buffers.streams[0])
    if is_ordered:
        buffers.streams[1].wait(buffers.streams[0])
    buffers.other.copy_from(buffers.one, stream=buffers.streams[1])
    return us.asnumpy(buffers.other, producer=buffers.streams[1])[0]
"""
TESTS = (
    PROGRAMS
    + """

def test_right(buffers):
    assert copied(buffers, True, 1) == 1


def test_wrong(buffers):
    assert copied(buffers, False, 1) == 1


def test_in_between(buffers):
    assert copied(buffers, False, 1, 2) != 1
"""
)


def trace(output: str) -> str:
    """Return the order that a failure shows."""
    found = re.search(r"^The order.*:\n\n(.*?)\n\n", output, re.DOTALL | re.MULTILINE)
    assert found, output
    return found[1]


def test_an_order_that_fails_is_found_and_shown(tmp_path: Path) -> None:
    chosen = ("-k", "right or wrong")
    output, found = run_tests(tmp_path, TESTS, "--schedules", "5", "--races", *chosen)
    assert found == {"test_right": "PASSED", "test_wrong": "FAILED"}
    assert "pytest --schedule lazy 'test_it.py::test_wrong'" in output
    assert "read after write" in output  # of --races
    assert trace(output).startswith("thread 1  queues fill on stream 1\n")
    assert "ran in one order" not in output


def test_a_failing_order_runs_again_by_its_seed(tmp_path: Path) -> None:
    folder = tmp_path / "below"  # of the root of the tests
    folder.mkdir()
    chosen = ("--rootdir", str(tmp_path), "-k", "in_between")
    before, _ = run_tests(folder, TESTS, "--schedules", "40", *chosen, returncode=1)
    assert "The order, which needs 1 of 2 change points:" in before
    seed = re.search(r"pytest --schedule (0x[0-9a-f]+) 'test_it.py::test_in_between'", before)
    assert seed, before
    again, _ = run_tests(folder, TESTS, "--schedule", seed[1], *chosen, returncode=1)
    assert trace(again) == trace(before)


def test_a_broken_context_does_not_hide_how_it_broke(tmp_path: Path) -> None:
    """The test runs again after it has failed, and no fixture has reset the driver."""
    tests = """
    from cuda.bindings import driver
    import userstream as us
    from userstream import testing

    def test_it():
        with us.Stream.create(0) as stream:
            testing.async_error(stream, driver.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS)
            stream.sync()
    """
    output, _ = run_tests(
        tmp_path, tests, "--simulated-gpus", "1", "--schedules", "2", returncode=1
    )
    assert trace(output).startswith("thread 1  queues")
    assert "stream.sync()" in output


def test_each_run_has_fixtures_of_its_own_and_shares_those_of_the_module(tmp_path: Path) -> None:
    tests = """
    import pytest
    import userstream as us

    made = []

    @pytest.fixture(scope="module")
    def of_module():
        made.append("module")
        yield
        made.append("end of module")

    @pytest.fixture
    def of_test(of_module, simulated_gpus):
        made.append("test")
        yield
        made.append("end of test")

    @pytest.mark.schedules(1)
    def test_it(of_test):
        us.get_stream(0).launch_host_func(int)
        made.append("run")

    def test_without_a_choice(of_test):
        made.append("without")

    @pytest.mark.schedules(0)
    def test_after(simulated_gpus):
        runs = ["test", "run", "end of test"] * 4  # lazy, eager, and two seeds
        others = ["test", "without", "end of test"] * 2  # all orders are the same
        assert made == ["module", *runs, *others]
    """
    (tmp_path / "test_later.py").write_text(
        "import test_it\n\ndef test_later():\n    assert test_it.made[-1] == 'end of module'\n"
    )
    files = ("test_it.py", "test_later.py")
    _, found = run_tests(tmp_path, tests, "--schedules", "2", *files, returncode=0)
    passed = ("test_it", "test_without_a_choice", "test_after", "test_later")
    assert found == dict.fromkeys(passed, "PASSED")


def test_tests_on_another_driver_are_counted(tmp_path: Path) -> None:
    tests = "def test_one(): ...\ndef test_other(): ...\n"
    output, _ = run_tests(tmp_path, tests, "--schedules", "2", returncode=0)
    assert "userstream: 2 tests ran in one order: schedules need the simulated driver" in output


def test_other_outcomes_stay_what_they_are(tmp_path: Path) -> None:
    tests = """
    import pytest

    pytestmark = [pytest.mark.schedules(3), pytest.mark.usefixtures("simulated_gpus")]

    @pytest.mark.skip
    def test_skipped(): ...

    def test_skips():
        pytest.skip("why not")

    @pytest.mark.xfail(strict=True)
    def test_fails_as_expected():
        assert False

    @pytest.fixture
    def broken():
        raise ValueError

    def test_without_fixture(broken): ...

    @pytest.fixture
    def broken_in_the_end():
        yield
        raise ValueError

    def test_with_an_error_in_the_end(broken_in_the_end): ...
    """
    output, found = run_tests(tmp_path, tests)
    assert found == {
        "test_without_fixture": "ERROR",
        "test_with_an_error_in_the_end": "PASSED ERROR",
    }
    assert "1 passed, 2 skipped, 1 xfailed, 2 errors" in output


PARTS = (
    PROGRAMS
    + """

def test_parts(buffers, subtests):
    with subtests.test("right"):
        assert copied(buffers, True, 1) == 1
    with subtests.test("wrong"):
        assert copied(buffers, False, 2) == 2
    with subtests.test("skipped"):
        pytest.skip("why not")
"""
)


@pytest.mark.skipif(not hasattr(pytest, "Subtests"), reason="pytest 9 has subtests")
def test_subtests_are_told_once_with_the_order_in_which_one_fails(tmp_path: Path) -> None:
    output, _ = run_tests(tmp_path, PARTS, "-v", "--schedules", "3", returncode=1)
    told = re.findall(r"^test_it.py::test_parts (\S+)", output, re.MULTILINE)
    assert told == ["SUBPASSED[right]", "SUBFAILED[wrong]", "SUBSKIPPED[skipped]", "FAILED"]
    assert "contains 1 failed subtest\n" in output
    assert "pytest --schedule lazy 'test_it.py::test_parts'" in output
    assert "runs copy" in trace(output)
    # Other orders, which come before that which is asked for, fail no test.
    output, _ = run_tests(tmp_path, PARTS, "--schedule", "eager", returncode=0)
    assert "1 passed" in output


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    tests = """
    import pytest

    @pytest.mark.schedules(count=5, deep=2)
    def test_it(): ...
    """
    output, _ = run_tests(tmp_path, tests, returncode=4)
    assert "schedules(count=5, deep=2)" in output
    assert "count and depth: integers of at least 0" in output
    output, _ = run_tests(tmp_path, TESTS, "--schedule", "late", returncode=4)
    assert "argument --schedule: invalid" in output
