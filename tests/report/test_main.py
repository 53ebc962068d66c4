"""``python -m userstream``: the report, the self-check, the exit status."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cuda.bindings import driver

import userstream
from commands import STEPS, bare, document, run_bare
from conftest import SIMULATED
from helpers import run_python
from userstream import __main__, testing

CUresult = driver.CUresult
LAST_STEPS = ["wait_all", "close", "unchanged"]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a user does, on the driver of these tests."""
    return run_bare(*(["--simulate"] if SIMULATED else []), *arguments, **environment)


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

    page = (Path(__file__).parents[2] / "docs/reference/command.md").read_text()
    found = document(run("--json")) | {"frameworks": {}, "environment": {}}
    assert {"ok", "uuid", "ms"} < keys(found)
    assert {key for key in keys(found) if f"`{key}`" not in page} == set()


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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--simulate", "observe", "program.py"], "observe comes first, then its options: "),
        (["--json", "judge", "run.uslog"], "judge comes first, then its options: "),
        (["--simulated"], "unrecognized arguments: --simulated"),
        (["observ", __file__], f"; to watch a program: python -m userstream observe {__file__}"),
    ],
)
def test_arguments_in_the_wrong_place(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        __main__.main(arguments)
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err.splitlines()[-1]


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


# -- what fails --------------------------------------------------------------------------------


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
