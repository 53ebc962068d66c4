"""``python -m userstream``: the report, the self-check, the exit status."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from ctypes.util import find_library
from pathlib import Path
from typing import Any

import pytest
from cuda.bindings import driver

import userstream
from conftest import SIMULATED
from helpers import device_count, primary_context, run_python
from userstream import __main__, _driver, _report, testing

CUresult = driver.CUresult
STEPS = [
    "get_stream",
    "one_stream",
    "allocate",
    "resolve",
    "copy",
    "wait",
    "bytes",
    "wait_for_device",
    "free",
    "unchanged",
]
LAST_STEPS = ["wait_all", "close", "unchanged"]

# Not by loading the driver: the simulated one has its name.
bare = pytest.mark.skipif(
    any(Path(node).exists() for node in _report.DEVICE_NODES) or find_library("cuda") is not None,
    reason="this machine has a device node or a driver",
)


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a user does, on the driver of these tests."""
    return run_bare(*(["--simulate"] if SIMULATED else []), *arguments, **environment)


def run_bare(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "userstream", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **environment},
    )


def document(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert done.stdout == json.dumps(found, indent=2) + "\n", "nothing else on stdout"
    assert found["ok"] == (done.returncode == 0)
    return found


def test_json() -> None:
    found = document(run("--json"))
    assert list(found) == [
        "simulated",
        "ok",
        "versions",
        "platform",
        "driver",
        "devices",
        "frameworks",
        "environment",
        "problems",
        "self_check",
    ]
    assert (found["simulated"], found["ok"], found["problems"]) == (SIMULATED, True, [])
    assert list(found["versions"]) == [
        "python",
        "userstream",
        "cuda-core",
        "cuda-bindings",
        "numpy",
    ]
    assert found["versions"]["userstream"] == userstream.__version__
    assert all(found["versions"].values())
    assert list(found["driver"]) == ["version", "cuda"]
    assert found["driver"]["cuda"].split(".")[0].isdigit()
    for ordinal, device in enumerate(found["devices"]):
        assert list(device) == ["ordinal", "name", "compute_capability", "memory", "uuid"]
        assert device["ordinal"] == ordinal
        assert device["name"]
        assert device["memory"] > 1 << 20
        assert len(device["uuid"]) == 40


def test_json_of_the_self_check() -> None:
    found = document(run("--json"))
    *devices, last = found["self_check"]
    assert [section["device"] for section in devices] == list(range(len(found["devices"])))
    assert last["device"] is None
    for section in found["self_check"]:
        names = LAST_STEPS if section is last else STEPS
        assert [step["name"] for step in section["steps"]] == names
        for step in section["steps"]:
            assert list(step) == ["name", "title", "status", "ms", "error"]
            assert (step["status"], step["error"]) == ("ok", None)
            assert step["ms"] >= 0


def test_every_key_is_documented() -> None:
    def keys(value: Any) -> set[str]:
        if isinstance(value, list):
            return set().union(*map(keys, value))
        if not isinstance(value, dict):
            return set()
        return set(value).union(*(keys(it) for it in value.values()))

    page = (Path(__file__).parents[2] / "docs/reference/command.rst").read_text()
    found = document(run("--json")) | {"frameworks": {}, "environment": {}}
    assert {"ok", "uuid", "ms"} < keys(found)
    assert {key for key in keys(found) if f"``{key}``" not in page} == set()


def test_text() -> None:
    done = run()
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[-1] == "ok: every check passed" + (
        ", on the simulated driver" if SIMULATED else ""
    )
    assert lines[0].startswith("SIMULATED DRIVER" if SIMULATED else "Versions")
    assert max(map(len, lines)) <= 80
    assert "Self-check, device 0" in lines
    assert "\033" not in done.stdout
    assert not any(line != line.rstrip() for line in lines)
    checked = lines[lines.index("Self-check, device 0") + 1 :][: len(STEPS)]
    assert all(line.startswith("  ok  ") and line.endswith(" ms") for line in checked)
    assert len({len(line) for line in checked}) == 1, "the times are aligned"


@bare
@pytest.mark.simulated
def test_a_machine_without_a_gpu_runs_on_the_simulated_driver() -> None:
    done = run_bare()
    assert done.returncode == 0
    assert done.stdout.startswith(f"SIMULATED DRIVER: {_report.NO_GPU}.\n")
    assert document(run_bare("--json"))["simulated"]


@pytest.mark.parametrize("options", [["--json"], []], ids=["json", "text"])
def test_a_reader_that_goes_away_gets_no_traceback(options: list[str]) -> None:
    there, here = os.pipe()
    os.close(there)  # as `head` does once it has its lines
    with open(here, "wb") as gone:
        done = subprocess.run(
            [sys.executable, "-m", "userstream", *(["--simulate"] if SIMULATED else []), *options],
            stdout=gone,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_simulate_on_any_machine() -> None:
    done = run_bare("--simulate")
    assert done.returncode == 0
    assert done.stdout.startswith("SIMULATED DRIVER: --simulate was passed.\n")
    found = document(run_bare("--simulate", "--json"))
    assert found["simulated"]
    assert len(found["devices"]) == 2


@bare
@pytest.mark.simulated
def test_require_gpu_without_a_gpu() -> None:
    done = run_bare("--require-gpu")
    assert done.returncode == 1
    assert "--require-gpu was passed" in done.stdout
    assert "SIMULATED" not in done.stdout
    assert done.stderr == ""
    found = document(run_bare("--require-gpu", "--json"))
    assert (found["simulated"], found["driver"]) == (False, None)
    assert (found["devices"], found["self_check"]) == ([], [])
    assert found["problems"][0]["type"] == "DriverNotFoundError"


@pytest.mark.gpu
def test_require_gpu_with_a_gpu() -> None:
    assert not document(run_bare("--require-gpu", "--json"))["simulated"]


def test_require_gpu_and_simulate_exclude_each_other() -> None:
    done = run_bare("--require-gpu", "--simulate")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.endswith("error: --simulate and --require-gpu are mutually exclusive\n")


@bare
@pytest.mark.simulated
def test_a_device_node_without_a_driver_is_a_failure() -> None:
    done = run_python(
        """
        import sys
        from userstream import __main__
        from userstream import _report

        _report.DEVICE_NODES = ("/dev/null",)
        sys.exit(__main__.main(sys.argv[1:]))
        """,
        "--json",
        simulate=None,
    )
    found = document(done)
    assert (found["simulated"], found["driver"], found["ok"]) == (False, None, False)
    (problem,) = found["problems"]
    assert (problem["about"], problem["type"]) == ("driver", "DriverNotFoundError")
    assert "no NVIDIA driver could be loaded" in problem["message"]


def test_what_makes_a_gpu_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_report, "LIBRARY", "libnothing-of-that-name.so.1")
    monkeypatch.setattr(_report, "DEVICE_NODES", (str(tmp_path / "nvidiactl"),))
    assert not _report.is_gpu_machine()
    monkeypatch.setattr(_report, "DEVICE_NODES", ("/nowhere", str(tmp_path)))
    assert _report.is_gpu_machine()
    monkeypatch.setattr(_report, "DEVICE_NODES", ())
    monkeypatch.setattr(_report, "LIBRARY", "libc.so.6")
    assert _report.is_gpu_machine()


@pytest.mark.simulated
def test_simulate_loads_no_real_driver(
    main: Callable[..., tuple[int, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load() -> bool:
        raise AssertionError("only one driver can be loaded")

    monkeypatch.setattr(_report, "_driver_loads", load)
    monkeypatch.setattr(_report, "DEVICE_NODES", ())
    assert main()[0] == 0


def test_a_simulated_driver_that_is_stale_is_a_problem(
    main: Callable[..., tuple[int, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def simulate() -> None:
        raise ImportError("the C files have changed; reinstall: pip install -e .")

    monkeypatch.setattr(testing, "simulate", simulate)
    code, found = main("--simulate", "--json")
    assert (code, found["problems"][0]["about"]) == (1, "simulated driver")


def test_frameworks_are_listed_and_not_imported(tmp_path: Path) -> None:
    for name, version in [("torch", "2.9.0"), ("cupy_cuda13x", "13.6.0"), ("torchvision", "1")]:
        information = tmp_path / f"{name}-{version}.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    (tmp_path / "damaged-1.dist-info").mkdir()
    for name in ("torch", "cupy"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')")
    code = """
        import sys
        from userstream import __main__

        status = __main__.main(["--json", *sys.argv[1:]])
        frameworks = {"torch", "cupy", "jax", "numba", "rmm", "nvidia.dali"}
        assert not frameworks & set(sys.modules), frameworks & set(sys.modules)
        sys.exit(status)
        """
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    arguments = ["--simulate"] if SIMULATED else []
    found = document(run_python(code, *arguments, simulate=None, PYTHONPATH=path))
    assert found["frameworks"]["torch"] == "2.9.0"
    assert found["frameworks"]["cupy-cuda13x"] == "13.6.0"
    assert "torchvision" not in found["frameworks"]


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("cupy", True),
        ("cupy-cuda12x", True),
        ("jax", True),
        ("jax-cuda13-plugin", True),
        ("numba-cuda", True),
        ("nvidia-dali-cuda120", True),
        ("nvidia-dali-cuda130", True),
        ("rmm-cu13", True),
        ("pylibraft-cu13", True),
        ("cvcuda-cu13", True),
        ("nvidia-nvimgcodec-cu13", True),
        ("warp-lang", True),
        ("apache-tvm-ffi", True),
        ("jaxlib", False),
        ("pytorch-lightning", False),
    ],
)
def test_names_of_frameworks(name: str, known: bool) -> None:
    assert bool(_report.FRAMEWORKS.fullmatch(name)) == known


def test_the_environment() -> None:
    matters = {
        "CUDA_LAUNCH_BLOCKING": "0",
        "CUDA_MODULE_LOADING": "LAZY",
        "CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM": "0",
        "CUPY_CUDA_PER_THREAD_DEFAULT_STREAM": "1",
        "NUMBA_CUDA_PER_THREAD_DEFAULT_STREAM": "1",
        "USERSTREAM_SYNC": "",
        "USERSTREAM_OF_THE_FUTURE": "\033[31mé",
    }
    found = document(run("--json", **matters, SECRET_TOKEN="s3cret"))["environment"]
    assert matters.items() <= found.items()
    assert "SECRET_TOKEN" not in found
    done = run(**matters, USERSTREAM_NAME="é", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert r"  \xe9" in done.stdout
    assert r"'\x1b[31m\xe9'" in done.stdout
    assert "\033" not in done.stdout


def test_the_version_of_the_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "version"
    monkeypatch.setattr(_report, "KERNEL_DRIVER", file)
    assert _report._kernel_driver_version() is None
    for text, version in [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun  6\n", "535.54.03"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  R", "580.95.05"),
        ("something else", None),
    ]:
        file.write_text(text)
        assert _report._kernel_driver_version() == version


# -- what fails --------------------------------------------------------------------------------


@pytest.fixture
def main(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, Any]]:
    """Run the command in this process, so that faults can be injected."""
    monkeypatch.setattr(testing, "simulate", lambda: None)  # it runs, with more devices

    def main(*arguments: str) -> tuple[int, Any]:
        status = __main__.main(["--simulate", *arguments])
        out, err = capsys.readouterr()
        assert err == ""
        return status, json.loads(out) if "--json" in arguments else out

    return main


def statuses(section: dict[str, Any]) -> list[str]:
    return [step["status"] for step in section["steps"]]


@pytest.mark.simulated
def test_a_step_that_fails(main: Callable[..., tuple[int, Any]]) -> None:
    copies = 3  # a device
    with testing.inject(
        "cuMemcpyAsync", CUresult.CUDA_ERROR_INVALID_VALUE, skip=copies, this_thread=True
    ):
        status, found = main("--json")
    assert (status, found["ok"], found["problems"]) == (1, False, [])
    first, second, *others = found["self_check"]
    assert statuses(second) == ["ok"] * 4 + ["failed"] + ["not run"] * 5
    failed = second["steps"][4]
    assert failed["name"] == "copy"
    assert failed["ms"] > 0
    assert "CUDA_ERROR_INVALID_VALUE" in failed["error"]["message"]
    assert failed["error"]["type"] == "CUDAError"
    assert second["steps"][5]["ms"] is None
    for section in (first, *others):
        assert set(statuses(section)) == {"ok"}


@pytest.mark.simulated
def test_a_step_that_fails_as_text(main: Callable[..., tuple[int, Any]]) -> None:
    error = CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with testing.inject("cuStreamCreateWithPriority", error, this_thread=True):
        status, out = main()
    assert status == 1
    lines = out.splitlines()
    assert lines[-1] == "failed: not every check passed, on the simulated driver"
    at = lines.index("Self-check, device 0")
    assert lines[at + 1].startswith("  failed   get_stream(0)")
    assert all(line.startswith(" " * 11) for line in lines[at + 2 : at + 4])
    told = " ".join(line.strip() for line in lines[at + 2 : at + 4])
    assert told.startswith("DriverError: cuStreamCreateWithPriority")
    assert "CUDA_ERROR_OUT_OF_MEMORY" in told
    assert any(line.startswith("  not run  wait(buffer)") for line in lines)
    assert max(map(len, lines)) <= 80


@pytest.mark.simulated
@pytest.mark.parametrize(
    ("function", "step"),
    [
        ("cuMemHostAlloc", "allocate"),
        ("cuStreamQuery", "wait"),
        ("cuCtxRecordEvent", "wait_for_device"),
        ("cuMemFreeHost", "free"),
    ],
)
def test_each_step_can_fail(main: Callable[..., tuple[int, Any]], function: str, step: str) -> None:
    with testing.inject(function, CUresult.CUDA_ERROR_UNKNOWN, this_thread=True):
        status, found = main("--json")
    assert status == 1
    steps = {found["name"]: found for found in found["self_check"][0]["steps"]}
    assert steps[step]["status"] == "failed"
    assert steps[step]["error"]["type"] == "DriverError"
    assert f"{function}" in steps[step]["error"]["message"]
    assert set(statuses(found["self_check"][1])) == {"ok"}


def test_bytes_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = _report._DeviceCheck.copy

    def damage(self: _report._DeviceCheck) -> None:
        copy(self)
        self.sent = bytes([self.sent[0] ^ 1]) + self.sent[1:]

    monkeypatch.setattr(_report._DeviceCheck, "copy", damage)
    *sections, last = _report.check(device_count())
    for section in sections:
        step = section.steps[STEPS.index("bytes")]
        assert step.status == "failed"
        assert step.error == _report.Problem(
            "bytes", "SelfCheckError", "1 of 1,048,576 bytes differ from what was sent"
        )
    assert last.ok


def test_a_copy_that_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(self: _report._DeviceCheck) -> None:
        ctypes.memset(self.pinned[1], 0, _report.SIZE)

    monkeypatch.setattr(_report._DeviceCheck, "copy", nothing)
    section = next(_report.check(1))
    assert [step.name for step in section.steps if step.status == "failed"] == ["bytes"]


@pytest.mark.simulated
def test_an_error_of_the_gpu(
    main: Callable[..., tuple[int, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = _report._DeviceCheck.copy

    def fail(self: _report._DeviceCheck) -> None:
        copy(self)
        testing.async_error(self.stream, CUresult.CUDA_ERROR_ILLEGAL_ADDRESS)

    monkeypatch.setattr(_report._DeviceCheck, "copy", fail)
    status, found = main("--json")
    assert status == 1
    for section in found["self_check"][:-1]:
        wait = section["steps"][STEPS.index("wait")]
        assert (wait["status"], wait["error"]["type"]) == ("failed", "DriverError")
    wait_all, close, _ = found["self_check"][-1]["steps"]
    assert wait_all["error"]["type"] == "WaitErrors"
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in wait_all["error"]["message"]
    assert close["status"] == "not run"


def test_a_gpu_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_report, "TIMEOUT", 0.05)
    with ExitStack() as held:
        copy = _report._DeviceCheck.copy

        def hold(self: _report._DeviceCheck) -> None:
            held.enter_context(testing.latch(self.stream))
            copy(self)

        monkeypatch.setattr(_report._DeviceCheck, "copy", hold)
        section, last = _report.check(1)
        failed = {step.name: step.error for step in section.steps if step.status == "failed"}
        assert list(failed) == ["wait"]
        assert failed["wait"] is not None
        assert failed["wait"].type == "WaitTimeout"
        assert last.steps[0].error is not None
        assert last.steps[0].error.type == "WaitTimeout"


@pytest.mark.multi_device
def test_another_current_device_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    compare = _report._DeviceCheck.compare

    def leave_current(self: _report._DeviceCheck) -> None:
        compare(self)
        driver.cuCtxPushCurrent(primary_context(self.device))

    monkeypatch.setattr(_report._DeviceCheck, "compare", leave_current)
    try:
        section = next(_report.check(2))
        assert [step.name for step in section.steps if step.status == "failed"] == ["unchanged"]
    finally:
        while int(driver.cuCtxGetCurrent()[1]):
            driver.cuCtxPopCurrent()


def test_what_cannot_be_left(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck(ExitStack):
        def close(self) -> None:
            super().close()
            raise RuntimeError("no way out")

    monkeypatch.setattr(_report, "ExitStack", Stuck)
    section = next(_report.check(device_count()))
    assert [step.name for step in section.steps] == [*STEPS, "leave"]
    assert section.steps[-1].error == _report.Problem("leave", "RuntimeError", "no way out")
    assert not section.ok


@pytest.mark.simulated
def test_a_fact_that_cannot_be_had(main: Callable[..., tuple[int, Any]]) -> None:
    with testing.inject("cuDeviceGetUuid", CUresult.CUDA_ERROR_UNKNOWN, this_thread=True):
        status, found = main("--json")
    assert status == 1
    device, *others = found["devices"]
    assert device == dict.fromkeys(device) | {"ordinal": 0}
    assert all(other["uuid"] for other in others)
    (problem,) = found["problems"]
    assert (problem["about"], problem["type"]) == ("device 0", "DriverError")
    assert all(set(statuses(section)) == {"ok"} for section in found["self_check"])
    with testing.inject("cuDeviceGetUuid", CUresult.CUDA_ERROR_UNKNOWN, this_thread=True):
        status, out = main()
    assert status == 1
    assert "Devices\n  0  unknown\n  1  Sim" in out
    assert "Problems\n  device 0: DriverError: cuDeviceGetUuid" in out


@pytest.mark.simulated
def test_facts_of_damaged_installations(
    main: Callable[..., tuple[int, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> dict[str, str]:
        raise ZeroDivisionError("metadata")

    monkeypatch.setattr(_report, "_frameworks", broken)
    monkeypatch.setattr(_report, "PACKAGES", ("numpy", "not-installed-anywhere"))
    status, found = main("--json")
    assert status == 1
    assert found["frameworks"] == {}
    assert found["versions"]["not-installed-anywhere"] is None
    (problem,) = found["problems"]
    assert problem == {"about": "frameworks", "type": "ZeroDivisionError", "message": "metadata"}
    assert "not-installed-anywhere  unknown" in main()[1]


@pytest.mark.simulated
def test_no_device() -> None:
    done = run_python(
        """
        import functools, sys
        from userstream import __main__, testing

        testing.simulate = functools.partial(testing.simulate, devices=0)
        sys.exit(__main__.main(["--json", "--simulate"]))
        """,
        simulate=None,
    )
    found = document(done)
    assert (found["devices"], found["self_check"], found["ok"]) == ([], [], False)
    assert found["problems"][0]["type"] == "DriverNotFoundError"


def test_a_driver_that_sees_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_driver.library, "device_count", lambda: 0)
    found = _report.gather(with_driver=True)
    assert found.problems == [
        _report.Problem("devices", "DriverNotFoundError", "the driver sees no device")
    ]


# -- how it looks ------------------------------------------------------------------------------


@pytest.mark.simulated
def test_colour(
    main: Callable[..., tuple[int, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    assert "\033" not in main()[1], "stdout is no terminal"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    with testing.inject("cuMemHostAlloc", CUresult.CUDA_ERROR_UNKNOWN, this_thread=True):
        out = main()[1]
    assert f"{_report.GREEN}ok     {_report.PLAIN}" in out
    assert f"{_report.RED}failed {_report.PLAIN}" in out
    assert f"\n{_report.BOLD}Devices{_report.PLAIN}\n" in out
    assert "\033" not in json.dumps(main("--json")[1])
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\033" not in main()[1]
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert "\033" not in main()[1]


def test_usual_values_fit(capsys: pytest.CaptureFixture[str]) -> None:
    found = _report.gather(with_driver=False)
    found.driver = _report.Driver("580.95.05", "13.0")
    uuid = "GPU-01234567-89ab-cdef-0123-456789abcdef"
    name = "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition"
    found.devices = [_report.DeviceFacts(10, name, "12.0", 98 << 30, uuid)]
    devices = ",".join([uuid] * 8)
    found.environment = {"CUDA_VISIBLE_DEVICES": devices, "USERSTREAM_SYNC": "1"}
    found.problems = [_report.Problem("driver", "DriverError", "word " * 60 + "\n" + "word " * 60)]
    _report.print_facts(found, simulated=False)
    title = "get_stream(10), while device 11 is current"
    error = _report.Problem("get_stream", "WaitTimeout", "word " * 60)
    _report.print_section(
        _report.Section(10, [_report.Step("get_stream", title, "failed", 60_000.123, error)])
    )
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "  driver         580.95.05, for CUDA 13.0" in lines
    assert "     compute capability 12.0, 98.0 GiB" in lines
    at, end = lines.index("Environment") + 1, lines.index("  USERSTREAM_SYNC       1")
    assert "".join(line[24:] for line in lines[at:end]) == devices


def test_it_uses_a_registry_of_its_own() -> None:
    sections = list(_report.check(device_count()))
    assert all(section.ok for section in sections)
    assert len(userstream.streams()) == 0
