"""`observe(judge="process")`: a judge that does not compete with the program."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cuda.bindings import driver

import userstream as us
from helpers import checked, run_python
from observed import (
    REPORTED,
    SILENT,
    SIZE,
    Room,
    a_room,
    fill,
    needs_frames,
    watched,
)

pytestmark = [
    pytest.mark.simulated,
    pytest.mark.no_races(False),  # these tests observe themselves
]


def judges() -> Iterator[int]:
    """Return the numbers of the child processes that judge."""
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            status = (directory / "stat").read_text().rpartition(")")[2].split()
            command = (directory / "cmdline").read_bytes()
        except OSError:  # it has ended
            continue
        if int(status[1]) == os.getpid() and b".workers import answer" in command:
            yield int(directory.name)


@needs_frames
@pytest.mark.parametrize("case", [*REPORTED[::6], *SILENT[::12]])
def test_the_findings_are_those_of_a_thread(case: Callable[[Room], Any]) -> None:
    seen, kind = watched(case, "process")  # which compares them with those of the log
    assert {race.kind for race in seen.races} == ({kind} if case in REPORTED else set())


def test_it_answers_until_all_calls_that_came_before(tmp_path: Path) -> None:
    page = tmp_path / "seen.html"
    with a_room() as room, us.observe(judge="process", timeline=10) as seen:
        fill(room.x, room.a)
        assert seen.races == ()
        fill(room.x, room.b)
        assert [race.nbytes for race in seen.races] == [SIZE]
        seen.save(page)
    assert "cuMemsetD8Async" in page.read_text()
    assert "1 race, 0 stalls, 2 driver calls" in repr(seen)
    assert list(judges()) == []


def test_several_threads_ask_at_once() -> None:
    counts: list[int] = []
    with a_room() as room, us.observe(judge="process") as seen:

        def ask() -> None:
            counts.extend(len(seen.races) for _ in range(5))

        fill(room.x, room.a)
        fill(room.x, room.b)
        threads = [threading.Thread(target=ask) for _ in range(3)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    assert counts == [1] * 15


def test_the_arguments_reach_it() -> None:
    """So does the one that keeps the heap of glibc small."""
    with a_room() as room, us.observe(judge="process", stall=0.0) as seen:
        fill(room.x, room.a)
        fill(room.x, room.b)
        (race,) = seen.races
        checked(driver.cuCtxSynchronize())
        (judge,) = judges()
        environment = Path(f"/proc/{judge}/environ").read_bytes().split(b"\0")
    assert seen.stalls
    assert any(each.startswith(b"MALLOC_MMAP_THRESHOLD_=") for each in environment)
    with a_room() as room, us.observe(judge="process", suppress=[race.key]) as seen:
        fill(room.x, room.a)
        fill(room.x, room.b)
    assert seen.races == ()


def test_a_judge_that_is_killed_takes_the_program_along_nowhere() -> None:
    with a_room() as room, us.observe(judge="process") as seen:
        fill(room.x, room.a)
        fill(room.x, room.b)
        assert len(seen.races) == 1
        (judge,) = judges()
        os.kill(judge, signal.SIGKILL)
        time.sleep(0.1)
        for _ in range(1000):
            fill(room.x, room.b)
        assert len(seen.races) == 1  # what was answered stays
        (said,) = seen.not_seen
        assert said == "what came after 2 calls: the process of the judge has ended (SIGKILL)"
    assert seen.not_seen == (said,)
    assert list(judges()) == []


def test_a_block_without_stalls_needs_a_judge() -> None:
    with a_room() as room, us.observe(judge="process"):
        fill(room.x, room.a)
        with pytest.raises(us.StallError), us.no_stalls():
            checked(driver.cuCtxSynchronize())
        (judge,) = judges()
        os.kill(judge, signal.SIGKILL)
        time.sleep(0.1)
        with pytest.raises(RuntimeError, match="the judge of the observation"), us.no_stalls():
            fill(room.x, room.a)


def test_nothing_is_left_behind() -> None:
    def files() -> set[str]:
        return set(os.listdir("/proc/self/fd"))

    with a_room() as room:
        fill(room.x, room.a)
        before = files()
        for _ in range(3):
            with us.observe(judge="process"):
                fill(room.x, room.a)
        seen = us.observe(judge="process").__enter__()
        del seen  # nobody holds it any more
        gc.collect()
        with us.observe():  # begins when that one has ended
            pass
        assert files() == before
    assert list(judges()) == []


def test_a_program_that_closes_all_descriptors_goes_on() -> None:
    done = run_python(
        """
        import os
        import userstream as us
        with us.observe(judge="process") as seen:
            us.wait(us.get_stream(0))
            os.closerange(3, 4096)
            us.wait(us.get_stream(0))
        assert "the process of the judge has ended" in seen.not_seen[-1], seen.not_seen
        """
    )
    assert done.returncode == 0, done.stderr
