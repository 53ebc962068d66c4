"""The report and the self-check on damaged installations, drivers and devices."""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from cuda.bindings import driver

import userstream
from commands import STEPS, bare, document, run_bare
from helpers import device_count, primary_context
from userstream import _driver, _report, testing

CUresult = driver.CUresult


@bare
@pytest.mark.simulated
def test_a_machine_without_a_gpu_runs_on_the_simulated_driver() -> None:
    done = run_bare()
    assert done.returncode == 0
    assert done.stdout.startswith(f"SIMULATED DRIVER: {_report.NO_GPU}.\n")
    assert document(run_bare("--json"))["simulated"]


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

    monkeypatch.setattr(_report, "is_gpu_machine", load)
    assert main()[0] == 0


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
    found.driver = _report.DriverFacts("580.95.05", "13.0")
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
