"""The log of the recorder, and the declarations that C and Python share."""

from __future__ import annotations

import ctypes
import re
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from cuda.bindings import driver

import userstream as us
from observed import a_room, fill
from userstream._observe import logger
from userstream._observe.judge import functions, log
from userstream._observe.logger import the_logger

pytestmark = [
    pytest.mark.simulated,
    pytest.mark.no_races(False),  # the log is used here
]

NOTE = log.UNSEEN


def test_c_and_python_declare_the_same() -> None:
    library = the_logger()._library
    library.recorder_numbers.restype = ctypes.c_char_p
    pairs = (pair.split("=") for pair in library.recorder_numbers().decode().split())
    numbers = {name: int(number, 16) for name, number in pairs}
    assert len(numbers) > 20
    for name, number in numbers.items():
        assert getattr(log, name) == number, name
    assert library.recorder_options_size() == ctypes.sizeof(logger._Options)


def records(data: bytes) -> Iterator[tuple[int, list[int], int]]:
    """Return the types, the words and the numbers of records."""
    at = 0
    while at < len(data):
        size, type_, _, _, number, *_, count = log.HEAD.unpack_from(data, at)
        yield type_, list(struct.unpack_from(f"<{count}Q", data, at + log.HEAD.size)), number
        at += size


def rest_of_log(recorder: logger.Logger) -> bytes:
    """End the log, and take what was not received."""
    recorder.end("the end of the test")
    data, is_closed = b"", False
    while (piece := recorder.receive(0.01)) or not is_closed:
        data += piece
        is_closed = is_closed or recorder.close()
    return data


def test_lost_records_are_told_of_where_they_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/missing")  # no file takes what does not fit
    recorder = the_logger()
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


PAGE = Path(__file__).parents[2] / "docs" / "reference" / "log-format.md"


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
    followed = {re.sub(r"_v\d+$", "", name) for name in functions.FUNCTIONS}
    unknown = {name for name in names - followed if functions.watched(name) is None}
    assert {name for name in unknown if not functions.is_harmless(name)} == set()
    assert not followed & functions.NOT_FOLLOWED.keys()
