"""The begin and the end of an observation: forks, and exceptions of signal handlers."""

from __future__ import annotations

import random
import threading
from typing import Literal

import pytest

import userstream as us
from helpers import THOROUGH, UNTRACED, in_threads, run_python
from interrupts import cut_short
from observed import a_room, fill

pytestmark = [
    pytest.mark.simulated,
    pytest.mark.no_races(False),  # these tests observe themselves
]


# -- forks ----------------------------------------------------------------------------------------

# The parent uses the driver by another library only: userstream's own marks say nothing.
FORK = """
import os, sys, threading
import userstream as us
from cuda.bindings import driver

seen = us.observe(judge="{judge}").__enter__()
driver.cuInit(0)
assert not us._process.forked
busy = True

def call():
    while busy:
        driver.cuDriverGetVersion()

threads = [threading.Thread(target=call, daemon=True) for _ in range(2)]
for thread in threads:
    thread.start()
children = []
for _ in range({times}):
    child = os.fork()
    if child == 0:
        {child}
    children.append(child)
statuses = [os.waitpid(child, 0)[1] for child in children]
busy = False
seen.stop()
assert statuses == [0] * len(children), statuses
assert seen.races == ()
"""


@pytest.mark.parametrize(
    "child",
    [
        "seen.stop(); assert seen.races == (); os._exit(0)",
        "sys.exit(0)",
        "own = us.observe().__enter__(); own.stop(); assert own.races == (); sys.exit(0)",
    ],
    ids=["stop", "exit", "observe"],
)
@pytest.mark.parametrize("judge", ["thread", "process"])
def test_a_forked_child_does_not_hang(child: str, judge: str) -> None:
    times = 10 if THOROUGH else 4
    done = run_python(FORK.format(child=child, judge=judge, times=times))
    assert done.returncode == 0, done.stderr


# -- signal handlers ------------------------------------------------------------------------------


def test_an_exception_anywhere_leaves_an_observation_that_can_end() -> None:
    """The next observation begins each time, whether or not the block of this one was left.

    One place of four is tried, and all in a thorough run.
    """

    def observe() -> None:
        with us.observe() as seen:
            pass
        assert seen.races == ()

    observe()  # loads the recorder
    step = 1 if THOROUGH else 4
    at = random.randrange(step)
    while cut_short(observe, at):
        observe()
        at += step
    assert at > 50
    observe()


SIGNALS = """
import random, signal, threading, time
import userstream as us

class Cut(Exception):
    pass

def handler(*_):
    if armed:
        raise Cut

# A function of its own: where a loop goes back, Python may handle a signal outside of a `try` that
# is around the loop.
def attempt():
    signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-4, 0.01))
    while time.monotonic() < end:  # a finalizer may swallow the exception
        with us.observe() as seen:
            kept[:] = [seen]
            us.get_stream(0).record()
        seen.races

armed = False
with us.observe() as seen:  # imports what it needs: an import that is cut short is not tried here
    us.get_stream(0).record()
assert seen.races == ()
signal.signal(signal.SIGALRM, handler)
end = time.monotonic() + 4
cuts = 0
while time.monotonic() < end or cuts < 20:
    kept = []
    armed = True
    try:
        attempt()
    except Cut:
        cuts += 1
    except RuntimeError as error:
        armed = False
        if not isinstance(error.__context__, Cut):  # as of `threading`, if it is cut short
            raise
        cuts += 1
    armed = False
    signal.setitimer(signal.ITIMER_REAL, 0)
    if kept:
        seen = kept.pop()
        seen.stop()
        seen.races
        del seen
    with us.observe() as seen:
        us.get_stream(0).record()
    assert seen.races == ()
"""


def test_signals_at_random_moments_refuse_and_hang_nothing() -> None:
    done = run_python(SIGNALS, **UNTRACED)
    assert done.returncode == 0, done.stderr


def test_an_observation_that_nobody_holds_ends() -> None:
    us.observe().__enter__()
    with us.observe() as seen:
        pass
    assert seen.races == ()


@pytest.mark.parametrize("judge", ["thread", "process"])
def test_a_program_that_joins_all_threads_does_not_wait_for_the_observer(
    judge: Literal["thread", "process"],
) -> None:
    before = threading.enumerate()
    with us.observe(judge=judge) as seen:
        assert seen.races == ()
        assert threading.enumerate() == before


def test_a_second_observation_is_refused_and_the_first_one_goes_on() -> None:
    with a_room() as room, us.observe() as seen:
        other = us.observe()
        with pytest.raises(RuntimeError, match="already being observed"):
            other.__enter__()
        fill(room.x, room.a)
        fill(room.x, room.b)
        assert [race.kind for race in seen.races] == ["write after write"]
    with other:  # it was not used
        pass


def test_threads_begin_and_end_observations_in_turn() -> None:
    refused = []

    def work() -> None:
        for _ in range(20):
            try:
                with us.observe() as seen:
                    pass
                assert seen.races == ()
            except RuntimeError as error:
                refused.append(str(error))

    in_threads(work, 4)
    assert all("already being observed" in each for each in refused)
