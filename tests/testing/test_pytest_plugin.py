"""What the pytest plugin simulates: in runs of pytest of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from helpers import UNTRACED
from testing.programs import ROOT

pytestmark = pytest.mark.simulated

# Installed or not, and nothing of this run.
PLUGIN = ("-p", "pytest_userstream", "-c", "/dev/null")
# Other plugins take longer to load than the tests to run.
ALONE = {"PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}


def run_tests(
    directory: Path, tests: str, *options: str, returncode: int | None = None
) -> tuple[str, dict[str, str]]:
    """Run tests; return what pytest printed, and what became of each test."""
    (directory / "test_it.py").write_text(textwrap.dedent(tests))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rA", *PLUGIN, *options, "test_it.py"],
        capture_output=True,
        text=True,
        cwd=directory,
        env={**os.environ, **ALONE},
        timeout=100,
        check=False,
    )
    lines = [line.split(" - ")[0].split() for line in done.stdout.splitlines()]
    found: dict[str, str] = {}
    for line in lines:
        if len(line) > 1 and line[0] in ("PASSED", "FAILED", "ERROR") and "::" in line[1]:
            name = line[1].rpartition("::")[2]
            found[name] = f"{found[name]} {line[0]}" if name in found else line[0]
    if returncode is not None:
        assert done.returncode == returncode, done.stdout + done.stderr
    return done.stdout + done.stderr, found


@pytest.mark.parametrize("is_expected", [False, True])
def test_kernels_without_a_function_are_listed_once_if_a_test_fails(tmp_path, is_expected):
    output, _ = run_tests(
        tmp_path,
        f"""
        import pytest
        from cuda.bindings import driver

        @pytest.mark.parametrize("name", [b"scale", b"add", b"scale"])
        def test_it(simulated_gpus, name):
            simulated_gpus[0].set_current()
            module = driver.cuModuleLoadData(b"any")[1]
            found = driver.cuModuleGetFunction(module, name)[0] == 0
            assert found or {is_expected}
        """,
        returncode=0 if is_expected else 1,
    )
    assert output.count("kernels without a function") == (0 if is_expected else 1)
    assert ("\nscale, add\n" in output) is not is_expected


@pytest.mark.parametrize(
    ("options", "loader"),
    [((), "SourceFileLoader"), (("-p", "no:userstream"), "AssertionRewritingHook")],
    ids=["with the plugin", "without"],
)
def test_the_package_is_not_rewritten(tmp_path, options, loader):
    """Pytest goes by the files of an installed distribution that has a plugin."""
    for name in ("userstream", "pytest_userstream.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    distribution = tmp_path / "userstream-0.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: userstream\nVersion: 0\n")
    (distribution / "entry_points.txt").write_text("[pytest11]\nuserstream = pytest_userstream\n")
    (distribution / "RECORD").write_text("pytest_userstream.py,,\nuserstream/__init__.py,,\n")
    (tmp_path / "test_it.py").write_text("import userstream\nprint(userstream.__loader__)\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-s", "-c", "/dev/null", *options, "test_it.py"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={
            **os.environ,
            **UNTRACED,
            "PYTHONPATH": str(tmp_path),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTEST_ADDOPTS": "-p no:randomly",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "",
        },
        timeout=100,
        check=False,
    )
    assert f".{loader} object" in done.stdout, done.stdout + done.stderr


def test_the_fixture_gives_the_devices_and_a_fresh_state(tmp_path):
    tests = """
    from cuda.bindings import driver
    import userstream as us
    from userstream import testing

    def test_devices(simulated_gpus):
        assert [device.device_id for device in simulated_gpus] == [0, 1]
        testing.inject("cuStreamQuery", 700, count=9)
        testing.async_error(us.get_stream(0), 700)

    def test_nothing_is_left(simulated_gpus):
        assert "cuStreamCreateWithPriority" not in testing.calls()
        us.get_stream(0).sync(timeout=10)
    """
    _, found = run_tests(tmp_path, tests, returncode=0)
    assert found == {"test_devices": "PASSED", "test_nothing_is_left": "PASSED"}


def test_a_test_that_left_failing_work_behind_fails_no_other(tmp_path):
    tests = """
    import threading
    import time
    from cuda.core import Device
    from userstream import testing

    def allocated(gpu):
        gpu.set_current()
        stream = gpu.create_stream()
        return stream, gpu.allocate(64, stream=stream)

    def test_it_leaves_a_copy_from_memory_that_is_freed(simulated_gpus):
        stream, buffer = allocated(simulated_gpus[1])
        _, target = allocated(simulated_gpus[1])
        other = simulated_gpus[1].create_stream()
        held = testing.latch(other)
        held.__enter__()
        buffer.copy_to(target, stream=other)
        buffer.close()
        stream.sync()
        threading.Timer(0.3, held.release).start()

    def test_another(simulated_gpus):
        time.sleep(0.5)
        stream, buffer = allocated(simulated_gpus[1])
        buffer.fill(1, stream=stream)
        stream.sync()
    """
    _, found = run_tests(tmp_path, tests, returncode=0)
    assert list(found.values()) == ["PASSED", "PASSED"]


def test_the_option_simulates_every_test(tmp_path):
    tests = """
    from cuda.core import Device

    def test_without_a_fixture():
        assert len(Device.get_all_devices()) == 5

    def test_with_it(simulated_gpus):
        assert len(simulated_gpus) == 5
    """
    _, found = run_tests(tmp_path, tests, "--simulated-gpus", "5", returncode=0)
    assert list(found.values()) == ["PASSED", "PASSED"]


@pytest.mark.parametrize(("number", "text"), [("17", "0 to 16, not 17"), ("two", "invalid int")])
def test_a_number_that_makes_no_sense(tmp_path, number, text):
    output, found = run_tests(
        tmp_path, "def test_it(): ...", "--simulated-gpus", number, returncode=4
    )
    assert text in output
    assert not found


def test_a_conftest_may_simulate_before(tmp_path):
    (tmp_path / "conftest.py").write_text(
        "from userstream import testing\n"
        "def pytest_configure():\n    testing.simulate(devices=3, driver_version=12090)\n"
    )
    tests = "def test_it(simulated_gpus):\n    assert len(simulated_gpus) == 3"
    run_tests(tmp_path, tests, returncode=0)


def test_injected_failures_have_to_happen(tmp_path):
    tests = """
    import pytest
    import userstream as us

    def test_it_happens(simulated_gpus, injected):
        injected("cuStreamCreateWithPriority", 2)
        with us.UserStream() as mine, pytest.raises(us.DriverError, match="OUT_OF_MEMORY"):
            mine.get_stream(0)

    def test_by_what_is_done(injected):
        injected(stream=2)
        with us.UserStream() as mine, pytest.raises(us.DriverError, match="OUT_OF_MEMORY"):
            mine.get_stream(0)

    def test_it_does_not_happen(injected):
        injected("cuMemAlloc", 2)
        us.get_stream(0).sync()

    def test_it_is_over(injected):
        us.get_stream(0).sync()

    def test_it_may_not_happen(injected):
        injected("cuMemAlloc", 2, strict=False)
    """
    output, found = run_tests(tmp_path, tests)
    assert found == {
        "test_it_happens": "PASSED",
        "test_by_what_is_done": "PASSED",
        "test_it_does_not_happen": "PASSED ERROR",
        "test_it_is_over": "PASSED",
        "test_it_may_not_happen": "PASSED",
    }
    assert "UnusedInjection: inject('cuMemAlloc', 2) never fired. Called in its block: " in output


def test_kernels_in_tests(tmp_path):
    tests = """
    import numpy as np
    from cuda.core import LaunchConfig, ObjectCode, launch
    import userstream as us
    from userstream import testing

    @testing.kernel("negate")  # before there is a driver
    def negate(grid, block, x: testing.Pointer, n: np.int32):
        x.array(n, np.float32)[:] *= -1

    def test_negate(simulated_gpus):
        stream = us.get_stream(0)
        buffer = simulated_gpus[0].allocate(16, stream=stream)
        us.copyto(buffer, np.ones(4, np.float32).view(np.uint8))
        kernel = ObjectCode.from_ptx(b"any").get_kernel("negate")
        launch(stream, LaunchConfig(grid=1, block=4), kernel, buffer, np.int32(4))
        assert (us.asnumpy(buffer).view(np.float32) == -1).all()
    """
    run_tests(tmp_path, tests, returncode=0)


def test_the_plugin_alone_loads_nothing(tmp_path):
    tests = """
    import sys

    def test_it():
        assert not {"userstream", "cuda", "cuda.core", "numpy"} & set(sys.modules)
    """
    run_tests(tmp_path, tests, returncode=0)
