"""The harness's arithmetic: medians, quartiles, ratios per round, limits."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Limit:
    """Upper limit for the first call of a comparison.

    Its own value if `against` is empty; otherwise its ratio to the fastest of those, or, if
    `added`, the difference. `measure` is which of the measured values it is about.
    """

    value: float | None  # None: there is no limit, but the ratio is shown
    against: tuple[str, ...] = ()
    stretch: float | None = None
    added: bool = False
    at_least: bool = False
    measure: int = 0

    def holds(self, found: float, limit: float) -> bool:
        """Return whether the measured values keep to a limit."""
        return found >= limit if self.at_least else found <= limit


def at_most(ratio: float, *against: str, stretch: float | None = None) -> Limit:
    """Take at most this many times what the fastest of the others takes."""
    return Limit(ratio, against, stretch)


def at_most_added(seconds: float, against: str) -> Limit:
    """Take at most so much more than another."""
    return Limit(seconds, (against,), added=True)


def at_least(ratio: float, against: str) -> Limit:
    """Reach at least this part of what another reaches."""
    return Limit(ratio, (against,), at_least=True)


def no_more_than(value: float, *, measure: int = 0) -> Limit:
    """Be at most this, whatever others are."""
    return Limit(value, measure=measure)


def shown(against: str, *, added: bool = False) -> Limit:
    """Show it beside another, without a limit."""
    return Limit(None, (against,), added=added)


@dataclass(frozen=True)
class Spread:
    """A median and the quartiles beside it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return that of some values, at least one."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


def compared(samples: Mapping[str, Sequence[float]], limit: Limit) -> list[float]:
    """Return what the limit is about, for each round: the rounds of all calls are the same."""
    ours = next(iter(samples.values()))
    if not limit.against:
        return list(ours)
    theirs = [min(each) for each in zip(*(samples[name] for name in limit.against), strict=True)]
    if limit.added:
        return [mine - other for mine, other in zip(ours, theirs, strict=True)]
    return [mine / other if other else math.nan for mine, other in zip(ours, theirs, strict=True)]


def verdict(found: float, limit: Limit) -> str | None:
    """Return the text that says whether the limit holds."""
    if limit.value is None:
        return None
    if not limit.holds(found, limit.value):
        return "missed"
    if limit.stretch is not None and limit.holds(found, limit.stretch):
        return "stretch met"
    return "met"


def significant(value: float) -> str:
    """Write a number with three digits, without an exponent."""
    size = abs(value)
    digits = 0 if size >= 100 or not size else 1 if size >= 10 else 2
    return f"{value:.{digits}f}"
