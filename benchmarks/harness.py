"""Comparisons, and how they are measured: in turns, round by round, in one process."""

from __future__ import annotations

import gc
import importlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cuda.bindings import driver

from benchmarks.limits import Limit


class Skipped(Exception):
    """Raised by a case whose requirements are missing."""


def settle() -> None:
    """Wait for the work that earlier calls queued, so that it does not delay the next call."""
    driver.cuCtxSynchronize()


Call = Callable[[], Any]


@dataclass(frozen=True)
class Comparison:
    """Calls that do the same, ours first."""

    name: str
    calls: Mapping[str, Call]
    limits: tuple[Limit, ...] = ()
    # So many calls are timed as one. With 1 the result is let go of after the clock has stopped.
    number: int = 1000
    rounds: int = 31
    before: Callable[[], object] = settle  # before each sample, not timed
    # What the calls return, instead of being timed: (what, unit) of each value.
    measures: tuple[tuple[str, str], ...] = (("", "s"),)
    returns: bool = False
    plain: bool = False  # without the ratios that have no limit
    # The driver functions that ours calls, for their share of its time.
    driver: tuple[str, ...] = ()


Comparisons = Iterator[Comparison]
# For each call and each of the measures, the value of each round.
Samples = dict[str, list[list[float]]]


@dataclass(frozen=True)
class Run:
    """Interface of a case to the run: settings, samples and comparisons."""

    quick: bool = False
    simulated: bool = False

    @property
    def judges(self) -> bool:
        """True if targets are judged: on a GPU, with enough rounds."""
        return not (self.quick or self.simulated)

    def scaled(self, full: Any, quick: Any) -> Any:
        """Choose by how thorough it is to be."""
        return quick if self.quick else full

    def need_gpu(self) -> None:
        """Skip the case on the simulated driver."""
        if self.simulated:
            raise Skipped("needs a GPU")

    def need(self, name: str) -> Any:
        """Import a framework."""
        self.need_gpu()
        try:
            return importlib.import_module(name)
        except ImportError as error:
            raise Skipped(f"{name} cannot be imported: {error}") from error


Case = Callable[[Run], Comparisons]
cases: dict[str, Case] = {}  # by "subject.name"


def case(function: Case) -> Case:
    """Register a function as a case of the command."""
    cases[f"{function.__module__.rpartition('.')[2]}.{function.__name__}"] = function
    return function


def measure(comparison: Comparison, run: Run) -> Samples:
    """Call everything once, and then in rounds; each round begins with another call."""
    rounds = run.scaled(comparison.rounds, min(comparison.rounds, 3))
    number = run.scaled(comparison.number, min(comparison.number, 20))
    calls = list(comparison.calls.items())
    samples: Samples = {name: [[] for _ in comparison.measures] for name, _ in calls}
    if rounds > 1:
        for _, call in calls:
            comparison.before()
            call()
    for turn in range(rounds):
        first = turn % len(calls)
        for name, call in calls[first:] + calls[:first]:
            comparison.before()
            values = _returned(call()) if comparison.returns else (timed(call, number),)
            for seen, value in zip(samples[name], values, strict=True):
                seen.append(value)
    return samples


def _returned(values: Any) -> tuple[float, ...]:
    return values if isinstance(values, tuple) else (values,)


def timed(call: Call, number: int = 1) -> float:
    """Return the seconds that a call takes, without the garbage collector."""
    collects = gc.isenabled()
    gc.disable()
    try:
        if number == 1:
            start = time.perf_counter()
            result = call()
            seconds = time.perf_counter() - start
            del result
            return seconds
        turns = range(number)
        start = time.perf_counter()
        for _ in turns:
            call()
        return (time.perf_counter() - start) / number
    finally:
        if collects:
            gc.enable()
