"""Which findings are not to be reported: lines of ``key=value``, as the reports print them."""

from __future__ import annotations

import fnmatch
import os
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from userstream._observe.found import Race

_KEYS = ("race", "first", "second")
# As lines name them.
_KINDS = (
    "read-after-write",
    "write-after-read",
    "write-after-write",
    "use-after-write",
    "write-after-use",
    "use-after-use",
    "use-after-free",
    "use-before-allocation",
    "host-overwrote-the-source-of-a-copy",
    "host-read-before-the-copy",
)

Suppression = dict[str, str]


def read(given: str | os.PathLike[str] | Iterable[str]) -> list[Suppression]:
    """Read a file of suppressions, or take the lines that are given."""
    if isinstance(given, (str, os.PathLike)):
        path = Path(given)
        told = path.read_text(encoding="utf-8").splitlines()
        return [_parse(line, f"{path}:{n}") for n, line in _lines(told)]
    lines = list(given) if isinstance(given, Iterable) else [given]
    if not all(isinstance(line, str) for line in lines):
        raise TypeError("suppress= takes the path of a file, or an iterable of lines (str)")
    return [_parse(line, f"line {n}") for n, line in _lines(lines)]


def _lines(lines: Iterable[str]) -> list[tuple[int, str]]:
    numbered = enumerate((line.strip() for line in lines), 1)
    return [(n, line) for n, line in numbered if line and not line.startswith("#")]


def _parse(line: str, where: str) -> Suppression:
    found: Suppression = {}
    try:
        words = shlex.split(line)
    except ValueError as error:  # a quotation that does not end
        raise ValueError(f"{where}: {line!r} is not a suppression: {error}") from None
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in _KEYS or not value:
            raise ValueError(
                f"{where}: {word!r} is not a suppression: it is a line such as "
                "`race=read-after-write first=train.py:step second=*`, with any of these keys"
            )
        if key == "race" and not any(_matches(kind, value) for kind in _KINDS):
            raise ValueError(  # or it would suppress nothing, and nobody would know why
                f"{where}: {word!r} is not a suppression: no race is called that; races are "
                f"{', '.join(_KINDS)}"
            )
        found[key] = value
    return found


def covers(suppression: Suppression, race: Race) -> bool:
    """Tell whether a race is not to be reported; values may have ``*`` and ``?``."""
    facts = race._facts()
    return all(
        any(
            _matches(fact, value)
            for fact in (_kinds(facts[key]) if key == "race" else [facts[key]])
        )
        for key, value in suppression.items()
    )


def _kinds(kind: str) -> list[str]:
    """Return the names that may stand for a kind: a line may say what another run has learned."""
    second, after, first = kind.partition("-after-")
    if "use" not in (first, second) or first == "free":
        return [kind]
    seconds, firsts = (("read", "write") if each == "use" else (each,) for each in (second, first))
    found = [f"{later}{after}{earlier}" for later in seconds for earlier in firsts]
    return [kind, *(each for each in found if each != "read-after-read")]


def _matches(fact: str, value: str) -> bool:
    return fnmatch.fnmatchcase(fact, value.replace("[", "[[]"))  # names of kernels have some
