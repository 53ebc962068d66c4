"""The log of the recorder, and the declarations that C and Python share."""

from __future__ import annotations

import ctypes
import re
import struct
from pathlib import Path

import pytest
from cuda.bindings import driver

from userstream._observe import logger
from userstream._observe.judge import functions, stacks, verdicts
from userstream._observe.judge import log as log_format
from userstream._observe.logger import Driver, the_logger

pytestmark = [
    pytest.mark.simulated,
    pytest.mark.no_races(False),  # the log is used here
]

NOTE = 1


def test_c_and_python_declare_the_same() -> None:
    library = the_logger()._library
    library.logger_numbers.restype = ctypes.c_char_p
    pairs = (pair.split("=") for pair in library.logger_numbers().decode().split())
    for name, number in pairs:
        assert getattr(functions, name) == int(number, 16), name
    sizes = (ctypes.c_uint32 * 4)()
    library.logger_sizes(sizes)
    structures = (logger._Rule, Driver, logger.Layout)
    assert [*sizes] == [*map(ctypes.sizeof, structures), functions.HEAD_SIZE]


def test_a_gap_is_recorded_where_the_records_are_missing() -> None:
    log = the_logger()
    log.begin(Driver())
    try:
        number = 0
        while number < 520:  # more than the log has room for
            log.note(NOTE, [number], bytes(200_000))
            number += 1
        found: list[tuple[int, int]] = []
        chunk, lost, _ = log.read()
        assert lost
        found += [(each.what, each.words[0]) for each in functions.read_log(chunk)]
        log.note(NOTE, [number], b"")  # there is room again
        while chunk := log.read()[0]:
            found += [(each.what, each.words[0]) for each in functions.read_log(chunk)]
    finally:
        log.end()
    written = 520 - lost
    assert found == [
        *((NOTE, each) for each in range(written)),
        (functions.LOST, lost),
        (NOTE, 520),
    ]


@pytest.mark.parametrize("cut", range(12))
def test_a_table_of_locations_that_ends_early_gives_what_it_has(cut: int) -> None:
    table = test_c_and_python_declare_the_same.__code__.co_linetable
    whole = stacks.line_table(table, 1)
    part = stacks.line_table(table[: len(table) - cut], 1)
    assert part == whole[: len(part)]
    assert len(part) >= len(whole) - cut


PAGE = Path(__file__).parents[2] / "docs" / "reference" / "log-format.rst"


def test_the_page_of_the_format_says_what_a_log_has() -> None:
    blocks, records = PAGE.read_text(encoding="utf-8").split("\nRecords\n")
    rows = re.findall(r"^   \* - (\d+)\n     - ([A-Z]+)$", blocks, re.MULTILINE)
    assert len(rows) == 9
    assert rows == [(str(getattr(log_format, name)), name) for _, name in rows]
    assert f"version {log_format.MAJOR}.{log_format.MINOR} of its format" in blocks
    fields = re.findall(r"^   \* - (\d+)\n     - (\d+)$", records, re.MULTILINE)
    layout, at = functions._HEAD.format.lstrip("<"), 0
    offsets = []
    for code in layout:
        size = struct.calcsize(f"<{code}")
        if code != "x":
            offsets.append((str(at), str(8 * size)))
        at += size
    assert fields == offsets
    assert f"a head of {at} bytes" in records
    for name in ("SEEN_MEMORY", "SEEN_STREAM", "SEEN_KERNEL", "SOURCE_CHANGED", "LEARNED", "LOST"):
        assert f"{getattr(functions, name):#06X}".replace("X", "x") in records, name


def test_every_function_of_the_driver_has_a_verdict() -> None:
    """A new version of the bindings brings functions that nobody has thought about."""
    names = {
        name
        for name, value in vars(driver).items()
        if re.match(r"cu[A-Z]", name) and not isinstance(value, type)
    }
    assert len(names) > 400
    names, followed = (
        {re.sub(r"_v\d+$", "", name) for name in each} for each in (names, functions.FUNCTIONS)
    )
    unknown = names - followed - verdicts.NOT_FOLLOWED.keys()
    assert {name for name in unknown if not verdicts.is_harmless(name)} == set()
    assert not followed & verdicts.NOT_FOLLOWED.keys()
