"""The recorder: its log, the declarations that C and Python share, and CUPTI as its source."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import struct
import subprocess
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cuda.bindings import driver

import observed
import userstream as us
from observed import a_room, fill
from userstream._observe import notes, recording
from userstream._observe.judge import functions, log
from userstream._observe.judge.functions import FUNCTIONS
from userstream._observe.observation import record_this_process
from userstream._observe.recording import the_recorder
from userstream.testing import _simulated

pytestmark = [
    pytest.mark.simulated,
    pytest.mark.no_races(False),  # the log is used here
]

NOTE = log.UNSEEN


def test_c_and_python_declare_the_same() -> None:
    library = the_recorder()._library
    library.recorder_numbers.restype = ctypes.c_char_p
    pairs = (pair.split("=") for pair in library.recorder_numbers().decode().split())
    numbers = {name: int(number, 16) for name, number in pairs}
    assert len(numbers) > 20
    for name, number in numbers.items():
        assert getattr(log, name) == number, name
    assert library.recorder_options_size() == ctypes.sizeof(recording._Options)


def records(data: bytes) -> Iterator[tuple[int, list[int], int]]:
    """Return the types, the words and the numbers of records."""
    at = 0
    while at < len(data):
        size, type_, _, _, number, *_, count = log.HEAD.unpack_from(data, at)
        yield type_, list(struct.unpack_from(f"<{count}Q", data, at + log.HEAD.size)), number
        at += size


def rest_of_log(recorder: recording.Recorder) -> bytes:
    """End the log, and take what was not received."""
    recorder.end("the end of the test")
    data, is_closed = b"", False
    while (piece := recorder.receive(0.01)) or not is_closed:
        data += piece
        is_closed = is_closed or recorder.close()
    return data


def test_lost_records_are_told_of_where_they_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/missing")  # no file takes what does not fit
    recorder = the_recorder()
    recorder.begin(judges_here=True, memory=1 << 20)
    recorder._library.recorder_watch(4000, b"cuMemUnmap")

    def call(number: int) -> None:
        for site in (0, 1):
            recorder._library.recorder_call(
                site, 4000, (ctypes.c_uint64 * 2)(number, 1), 2, 0, None
            )

    for number in range(1, 40_001):
        call(number)
    data = b""
    while piece := recorder.receive(0.2):
        data += piece
    call(40_001)  # for which there is room again
    data += rest_of_log(recorder)
    last = missing = told = 0
    for type_, words, _ in records(data[8:]):
        if type_ == log.LOST:
            (told,) = words
        elif type_ == 4000:
            missing += words[0] - last - 1
            last = words[0]
            assert told == missing, "it is said before the first call that comes after them"
    assert missing > 0
    numbers = [number for *_, number in records(data[8:])]
    assert numbers == [*range(numbers[0], numbers[0] + len(numbers))]


@pytest.mark.parametrize("spills", [True, False], ids=["to a file", "with no room anywhere"])
def test_a_slow_judge_reports_nothing_that_it_cannot_know(
    spills: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path if spills else tmp_path / "missing"))
    goes_on = threading.Event()
    with a_room() as room, us.observe(memory=4 << 20) as seen:
        judge = seen._judging.judge  # type: ignore[attr-defined]  # that of a thread
        take = judge.take
        judge.take = lambda data: goes_on.wait(60) and take(data)
        fill(room.x, room.a)
        for _ in range(60_000):
            fill(room.y, room.a, 8)
        room.b.wait(room.a)
        goes_on.set()
        assert seen.races == ()  # which waits until all that has room was judged
        fill(room.x, room.b)
        assert seen.races == (), "the edge may have been lost"
        fill(room.x, room.a)
        assert len(seen.races) == 1
    is_whole = seen.as_dict()["calls"]["cuMemsetD8Async"] == 60_003
    lost = [said for said in seen.not_seen if "came faster than they could be analyzed" in said]
    assert (is_whole, len(lost)) == (spills, int(not spills))


@pytest.mark.parametrize("cut", range(12))
def test_a_table_of_locations_that_ends_early_gives_what_it_has(cut: int) -> None:
    table = test_c_and_python_declare_the_same.__code__.co_linetable
    whole = log.line_table(table, 1)
    part = log.line_table(table[: len(table) - cut], 1)
    assert part == whole[: len(part)]
    assert len(part) >= len(whole) - cut


ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "log-format.md"


@pytest.mark.skipif(not PAGE.exists(), reason="needs the documentation")
def test_the_page_of_the_format_says_what_a_log_has() -> None:
    page = PAGE.read_text(encoding="utf-8")
    types = re.findall(r"^\| (0xFF..) \| ([A-Z_]+) \|", page, re.MULTILINE)
    names = {
        name
        for name, value in vars(log).items()
        if name.isupper() and value in range(0xFF00, 0x10000)
    }
    assert {name for _, name in types} == names
    assert types == [(f"0xFF{getattr(log, name) & 0xFF:02X}", name) for _, name in types]
    assert f"version {log.MAJOR} of its format" in page
    fields = re.findall(r"^\| (\d+) \| (\d+) \|", page, re.MULTILINE)
    sizes = [struct.calcsize(f"<{code}") for code in re.findall(r"\d*\w", log.HEAD.format[1:])]
    begins = [sum(sizes[:at]) for at in range(len(sizes))]
    offsets = [(str(begin), str(8 * size)) for begin, size in zip(begins, sizes, strict=True)]
    assert fields == offsets[:-1]  # and what fills the head up
    assert f"head of {log.HEAD.size} bytes" in page


def test_every_function_of_the_driver_has_a_verdict() -> None:
    """A new version of the bindings brings functions that nobody has thought about."""
    names = {
        name
        for name, value in vars(driver).items()
        if re.match(r"cu[A-Z]", name) and not isinstance(value, type)
    }
    assert len(names) > 400
    followed = {re.sub(r"_v\d+$", "", name) for name in FUNCTIONS}
    unknown = {name for name in names - followed if functions.watched(name) is None}
    assert {name for name in unknown if not functions.is_harmless(name)} == set()
    assert not followed & functions.NOT_FOLLOWED.keys()


def test_a_thread_that_loses_its_processor_between_two_clocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late = iter([0, 5_000_000])

    def monotonic() -> int:
        return 1_000_000_000 + next(late, 0)

    clocks = types.SimpleNamespace(monotonic_ns=monotonic, time_ns=lambda: 3_000_000_000)
    monkeypatch.setattr(notes, "time", clocks)
    assert notes._ahead() == 2_000_000_000


# -- CUPTI as the source of driver calls: a stand-in of it over the simulated driver ---------------

STAND_IN = ROOT / "tests" / "support" / "cupti.c"
RULES = Path(recording.__file__).with_name("native") / "rules.py"


def _module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compiled(path: Path, *flags: str) -> str:
    if not (ROOT / "hatch_build.py").exists():
        pytest.skip("needs the sources")
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
    monkeypatch.setattr(recording, "path_of_cupti", lambda: path)
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
        seen._recorder._library.recorder_watch(NUMBER, name.encode())
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
    monkeypatch.setattr(recording, "path_of_cupti", lambda: older)
    monkeypatch.setattr(_simulated, "is_simulated", lambda: False)
    seen, kind = observed.watched(observed.REPORTED[0])
    assert {race.kind for race in seen.races} == {kind}


def test_without_cupti_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_simulated, "is_simulated", lambda: False)
    monkeypatch.setattr(recording, "path_of_cupti", lambda: "libcupti-of-nobody.so")
    with pytest.raises(us.NotSupportedError, match="pip install nvidia-cuda-cupti"), us.observe():
        pass


def test_what_is_no_cupti_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_simulated, "is_simulated", lambda: False)
    monkeypatch.setattr(recording, "path_of_cupti", lambda: "libm.so.6")
    with pytest.raises(us.NotSupportedError, match=r"libm\.so\.6 is no CUPTI"), us.observe():
        pass


def test_a_process_that_outlives_the_command_runs_as_without(tmp_path: Path) -> None:
    record_this_process({"USERSTREAM_RECORD": str(tmp_path / "removed")})
    with us.observe():  # none has begun
        pass
