"""The table: a block for each comparison, at most 100 columns wide."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.limits import significant
from benchmarks.report import Row

WIDTH = 98
HEAD = f"{'':42}{'median':>9}{'quartiles':>18}  ratio"
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def quantity(value: float, unit: str) -> str:
    """Write a value with its unit, times in what suits them."""
    if unit == "s":
        scale, unit = next(
            ((scale, name) for scale, name in _UNITS if abs(value) >= scale), _UNITS[-1]
        )
        return f"{significant(value / scale)} {unit}"
    if unit == "share":
        return f"{value:.1%}"
    return f"{significant(value)} {unit}".rstrip()


def block(row: Row, driver: Mapping[str, float], *, targets: bool = False) -> Iterator[str]:
    """Write a row of the report; `driver` has the seconds that each driver function takes."""
    found = _with_target if targets else _found
    unit = row["unit"]
    single = len(row["calls"]) == 1
    if not single:
        yield row["name"]
    compared = {tuple(each["against"]): each for each in row["compared"]}
    for number, (name, call) in enumerate(row["calls"].items()):
        between = _between(call["quartiles"], unit) if len(call["samples"]) > 1 else ""
        line = f"{row['name']:42.42}" if single else f"  {name:40.40}"
        line += f"{quantity(call['median'], unit):>9}{between:>18}"
        alone = [each for against, each in compared.items() if against == (name,)]
        if number == 0:
            alone = [each for against, each in compared.items() if not against]
        yield (line + "".join(f"  {found(each, unit)}" for each in alone)).rstrip()
    for against, each in compared.items():
        if len(against) > 1:
            yield f"  {'the fastest of these':67}  {found(each, unit)}"
    if row["driver"] and all(name in driver for name in row["driver"]):
        share = sum(driver[name] for name in row["driver"])
        ours = next(iter(row["calls"].values()))["median"]
        text = f"of that {quantity(share, 's')} ({share / ours:.0%}) in the driver: "
        yield from _wrapped(text + _counted(row["driver"]), "  ")


def _between(quartiles: Sequence[float], unit: str) -> str:
    first, last = (quantity(value, unit) for value in quartiles)
    number, _, scale = first.partition(" ")
    return f"{number if last.endswith(' ' + scale) else first} - {last}"


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=" " * len(indent))


def _counted(names: list[str]) -> str:
    return ", ".join(
        name if names.count(name) == 1 else f"{names.count(name)}*{name}"
        for name in dict.fromkeys(names)
    )


def _text(each: Row, unit: str, value: float) -> str:
    if each["kind"] == "ratio":
        return f"{value:.2f}"
    sign = "+" if each["kind"] == "added" and value >= 0 else ""
    return sign + quantity(value, unit)


def _found(each: Row, unit: str) -> str:
    """Write a ratio or a difference; a value alone stands there already."""
    return _text(each, unit, each["median"]) if each["kind"] != "value" else ""


def _with_target(each: Row, unit: str) -> str:
    """Write the same beside the target of the developers."""
    found = _found(each, unit)
    if "limit" not in each:
        return found
    sign = "≥" if each["at_least"] else "≤"
    limit = _text(each, unit, each["limit"])
    stretch = f" [{_text(each, unit, each['stretch'])}]" if each["stretch"] is not None else ""
    said = {"missed": "MISSED", "stretch met": "stretch", "met": "met", None: ""}[each["verdict"]]
    return f"{found:>5} {sign} {limit}{stretch} {said}".rstrip()


def summary(report: Row, *, targets: bool = False) -> Iterator[str]:
    """Write what was left out or went wrong, and which targets were missed."""
    if targets:
        yield from _judged(report)
    for what in ("skipped", "failed"):
        for name, why in report[what].items():
            yield from _wrapped(f"{name}: {why.strip().splitlines()[-1]}", f"{what:7} ")


def _judged(report: Row) -> Iterator[str]:
    judged = [(row, each) for row in report["rows"] for each in row["compared"] if each["verdict"]]
    missed = [(row, each) for row, each in judged if each["verdict"] == "missed"]
    if judged:
        yield f"{len(judged) - len(missed)} of {len(judged)} targets met"
    else:
        yield "No target was judged: they are for a GPU."
    for row, each in missed:
        against = f", beside {' and '.join(each['against'])}" if each["against"] else ""
        yield from _wrapped(
            f"{row['name']}{against}: {_with_target(each, row['unit']).strip()}", "missed  "
        )


def heading(where: Mapping[str, Any]) -> Iterator[str]:
    """Write where this runs."""
    gpus = ", ".join(str(name) for name in where["gpus"])
    if where["simulated"]:
        gpus = f"SIMULATED DRIVER, {len(where['gpus'])} devices: the cost of Python, no GPU's"
    yield gpus
    kernel = f"driver {where['driver']}, " if where["driver"] else ""
    yield f"{kernel}CUDA {where['cuda']}, {where['cpus']} CPUs ({where['processor']})"
    versions = where["versions"].items()
    yield from _wrapped(", ".join(f"{name} {version}" for name, version in versions if version))
    yield f"{where['date']}{', quick: numbers mean nothing' if where['quick'] else ''}"
