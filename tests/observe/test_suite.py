"""The suite of mistakes that people made: each is found with both lines, and no repaired one is.

By default each program runs twice, with kernels that take another time. ``USERSTREAM_SUITE_RUNS``
has the number of runs: 100 show that verdict and key do not depend on timing.
"""

from __future__ import annotations

import os
import random
import re
from pathlib import Path

import pytest

import suite
import suite_table
from conformance.support import CUDA_12
from observed import needs_frames
from suite_table import FOUND, NOT_SEEN, Program, programs
from userstream import testing

RUNS = int(os.environ.get("USERSTREAM_SUITE_RUNS", "2"))

pytestmark = [
    pytest.mark.simulated,
    pytest.mark.no_races(False),  # they watch themselves
    needs_frames,
]
PROGRAMS = [each for each in programs() if not each.needs]
if CUDA_12:  # the simulated driver has cuMemcpyBatchAsync as CUDA 13 declares it
    PROGRAMS = [each for each in PROGRAMS if each.name != "batch_of_copies_to_a_busy_buffer"]
# These end the context. What the recorder looks at then never comes, and a process has 32 places
# for looks: without one, what a kernel does is not learned.
ENDS_CONTEXT = (
    "freed_on_the_default_stream",
    "freed_while_another_stream_reads",
    "graph_with_memory_that_was_freed",
    "used_after_free",
)
PROGRAMS.sort(key=lambda program: program.name in ENDS_CONTEXT)
EACH = pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)


def at_random_times() -> None:
    """Let kernels take another time in each run."""
    for kernel in suite.kernels():
        testing.duration(kernel, random.choice((0, 0, random.random() * 0.002)))


def test_every_program_says_whose_mistake_it_is() -> None:
    for program in programs():
        text = program.path.read_text(encoding="utf-8")
        assert re.fullmatch(r"https://\S+", program.link), program.name
        assert program.title.endswith("."), program.name
        assert len(text.splitlines()) <= 40, program.name
        assert len(program.lines) == 2, program.name
        assert "REPAIRED" in text, program.name
    titles = [program.title for program in programs()]
    assert len(set(titles)) == len(titles)


def test_the_page_has_what_was_measured() -> None:
    results = suite_table.measured()
    assert suite_table.PAGE.read_text(encoding="utf-8") == suite_table.page(results)
    (simulated,) = (each for each in results if each["where"] == "the simulated driver")
    assert [*simulated["programs"]] == [each.name for each in programs() if not each.needs]


@EACH
def test_the_mistake_is_found_with_both_lines_and_mended_by_the_advice(
    program: Program, tmp_path: Path
) -> None:
    verdicts, races = set(), ()
    for _ in range(RUNS):
        at_random_times()
        seen = suite.run(program)
        races = seen.races
        verdicts.add(suite.verdict(program, races))
        if program.expected == NOT_SEEN:
            assert seen.not_seen, program.reason
    (found,) = verdicts  # verdict and key are the same in every run
    if program.expected == NOT_SEEN:
        assert found.found != FOUND
        return
    assert (found.found, found.lines) == (program.expected, True), seen
    race = next(race for race in races if program.lines <= suite.named_lines(race))
    changed = suite.edited(program, race, tmp_path)
    assert changed is not None, race.advice
    left = suite.run(program, path=changed).races
    assert race.key not in {race.key for race in left}, changed.read_text()


@pytest.mark.parametrize(
    "name",
    [
        "cache_slot_reused_before_it_is_stored",
        "graph_input_written_beside_its_replay",
        "pinned_source_overwritten",
        "two_devices_without_an_edge",
    ],
)
def test_a_report_has_the_same_words_in_every_run(name: str) -> None:
    (program,) = (each for each in PROGRAMS if each.name == name)
    words = set()
    for _ in range(max(RUNS, 8)):
        at_random_times()
        races = sorted(map(str, suite.run(program).races))
        words.add(re.sub(r"0x[0-9a-f]+", "(address)", "\n".join(races)))
    assert len(words) == 1, "\n\n".join(words)


@EACH
def test_the_repaired_program_has_no_race(program: Program) -> None:
    for _ in range(RUNS):
        at_random_times()
        seen = suite.run(program, repaired=True)
        assert [race for race in seen.races if not race.possible] == [], seen
