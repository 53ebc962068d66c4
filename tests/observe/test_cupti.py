"""CUPTI as the source of driver calls: a stand-in of it over the simulated driver."""

from __future__ import annotations

import ctypes
import importlib.util
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import observed
import userstream as us
from userstream._observe import logger
from userstream._observe.judge import log
from userstream._observe.judge.functions import FUNCTIONS
from userstream.testing import _simulated

ROOT = Path(__file__).parents[2]
STAND_IN = ROOT / "tests" / "support" / "cupti.c"
RULES = Path(logger.__file__).with_name("logger") / "rules.py"


def _module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pytestmark = [
    pytest.mark.simulated,  # test_observe.py runs on a GPU, where CUPTI is itself
    pytest.mark.no_races(False),
    pytest.mark.skipif(not (ROOT / "hatch_build.py").exists(), reason="needs the sources"),
]


def _compiled(path: Path, *flags: str) -> str:
    compiler = _module(ROOT / "hatch_build.py").installed_compiler()
    if compiler is None:
        pytest.skip("needs a C compiler")
    rows = "".join(f'    {{"{name}", "{sizes}"}},\n' for name, sizes in SIGNATURES.items())
    table = f"static const char *const signatures[][2] = {{\n{rows}}};\n"
    source = path.with_suffix(".c")
    source.write_text(table + STAND_IN.read_text(encoding="utf-8"), encoding="utf-8")
    command = [*compiler, "-std=gnu11", "-shared", "-fPIC", *flags, str(source), "-o", str(path)]
    subprocess.run(command, check=True)
    return str(path)


SIGNATURES = _module(RULES).SIGNATURES if RULES.exists() else {}


@pytest.fixture(scope="module", params=["one", "several"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the path of a CUPTI that serves one subscriber, or several."""
    flags = ["-DSEVERAL=40"] if request.param == "several" else []
    return _compiled(tmp_path_factory.mktemp("cupti") / f"libcupti-{request.param}.so", *flags)


@pytest.fixture
def cupti(path: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.CDLL]:
    monkeypatch.setattr(logger, "path_of_cupti", lambda: path)
    monkeypatch.setattr(_simulated, "is_simulated", lambda: False)
    library = ctypes.CDLL(path)
    library.stand_in_call.argtypes = [
        *(ctypes.c_int, ctypes.c_uint),
        *(ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p),
    ]
    yield library
    library.stand_in_refuse(0, b"")


P, U, B, H = ctypes.c_void_p, ctypes.c_uint, ctypes.c_ubyte, ctypes.c_ushort

# As the driver declares them: the compiler of C and ctypes lay them out the same way.
DECLARED: dict[str, list[Any]] = {
    "cuLaunchKernel": [P, U, U, U, U, U, U, U, P, P, P],
    "cuLaunchCooperativeKernel": [P, U, U, U, U, U, U, U, P, P],
    "cuMemsetD8Async": [P, B, P, P],
    "cuMemsetD2D16Async": [P, P, H, P, P, P],
    "cuMemsetD32_v2": [P, U, P],
    "cuMemcpyPeerAsync": [P, P, P, P, P, P],
    "cuStreamWaitValue32_v2": [P, P, U, U],
    "cuStreamWaitValue64_v2": [P, P, P, U],
    "cuStreamBatchMemOp_v2": [P, U, P, U],
    "cuStreamBeginCaptureToGraph": [P, P, P, P, P, U],
    "cuCtxCreate_v3": [P, P, U, U, U],
    "cuMemHostAlloc": [P, P, U],
}
NUMBER = 3000


def test_every_function_has_a_signature() -> None:
    for name, function in FUNCTIONS.items():
        if name != "cuGraphExecUpdate_v2":
            assert len(SIGNATURES[name]) >= function.words, name


@pytest.mark.parametrize("name", DECLARED)
def test_arguments_are_read_as_c_lays_them_out(
    cupti: ctypes.CDLL, name: str, tmp_path: Path
) -> None:
    kinds = DECLARED[name]
    assert len(kinds) == len(SIGNATURES[name])
    fields = [(f"a{i}", kind) for i, kind in enumerate(kinds)]
    arguments = type("Arguments", (ctypes.Structure,), {"_fields_": fields})
    # No addresses, so that the recorder reads nothing there.
    values = [(i + 1) * 0x11 & (1 << 8 * ctypes.sizeof(kind)) - 1 for i, kind in enumerate(kinds)]
    given = arguments(*values)
    pointers = [i for i, fetch in enumerate(FUNCTIONS[name].fetches) if fetch.word < len(values)]
    if pointers or name in ("cuLaunchKernel", "cuLaunchCooperativeKernel"):
        given = arguments(
            *[0 if kind is P else value for kind, value in zip(kinds, values, strict=True)]
        )
    with us.observe(log=tmp_path / "run.uslog", judge="later") as seen:
        seen._logger._library.recorder_watch(NUMBER, name.encode())
        cupti.stand_in_call(1, NUMBER, ctypes.addressof(given), 0, 77)
        cupti.stand_in_call(2, NUMBER, ctypes.addressof(given), 0, 77)  # of another domain
    (words,) = _recorded(tmp_path / "run.uslog")
    assert words == [getattr(given, field) or 0 for field, _ in fields][: len(words)]
    assert len(words) == FUNCTIONS[name].words


def _recorded(path: Path) -> Iterator[list[int]]:
    """Return the words of the calls of the function that a test lets be recorded."""
    data, at = path.read_bytes(), 8
    while at < len(data):
        size, type_, site, *_, count = log.HEAD.unpack_from(data, at)
        if type_ == NUMBER and site == 1:
            yield list(struct.unpack_from(f"<{count}Q", data, at + log.HEAD.size))
        at += size


@pytest.mark.parametrize("case", [*observed.REPORTED, *observed.SILENT])
def test_it_finds_the_same(cupti: ctypes.CDLL, case: Callable[[Any], str | None]) -> None:
    seen, kind = observed.watched(case)
    assert {race.kind for race in seen.races} == ({kind} if kind else set()), seen
    assert cupti.stand_in_enabled() == 0, "it has ended"


def test_another_subscriber_is_named(cupti: ctypes.CDLL, path: str) -> None:
    for status, said in ((39, "another tool uses CUPTI"), (12, "another"), (3, "OF_THE_TEST")):
        cupti.stand_in_refuse(status, b"CUPTI for Kineto")
        with pytest.raises(us.NotSupportedError, match=said) as refused, us.observe():
            pass
        if status != 3:
            holder = "CUPTI for Kineto" if "several" in path else "torch.profiler, Nsight"
            assert holder in str(refused.value)
    cupti.stand_in_refuse(0, b"")
    with us.observe():
        pass


def test_an_older_structure_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    older = _compiled(tmp_path / "libcupti-13.0.so", "-DSEVERAL=32")
    monkeypatch.setattr(logger, "path_of_cupti", lambda: older)
    monkeypatch.setattr(_simulated, "is_simulated", lambda: False)
    seen, kind = observed.watched(observed.REPORTED[0])
    assert {race.kind for race in seen.races} == {kind}


def test_without_cupti_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_simulated, "is_simulated", lambda: False)
    monkeypatch.setattr(logger, "path_of_cupti", lambda: "libcupti-of-nobody.so")
    with pytest.raises(us.NotSupportedError, match="pip install nvidia-cuda-cupti"), us.observe():
        pass


def test_what_is_no_cupti_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_simulated, "is_simulated", lambda: False)
    monkeypatch.setattr(logger, "path_of_cupti", lambda: "libm.so.6")
    with pytest.raises(us.NotSupportedError, match=r"libm\.so\.6 is no CUPTI"), us.observe():
        pass
