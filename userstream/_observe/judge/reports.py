"""Reports of a judge as files: a page, data, SARIF, a trace for Perfetto, and text."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .page import page

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from traceback import FrameSummary

    from . import Judge
    from .found import Operation, Race

_SARIF = "https://json.schemastore.org/sarif-2.1.0.json"
_RULES = "https://userstream.readthedocs.io/en/latest/howto/find-a-race.html"


def suffix_of(name: str) -> str:
    """Return the suffix by which a name chooses the kind of a report.

    Raises
    ------
    ValueError
        The name ends in none of them.
    """
    for suffix in WRITERS:
        if name.endswith(suffix):
            return suffix
    *others, last = WRITERS
    raise ValueError(f"a report is saved as {', '.join(others)} or {last}, not as {name!r}")


def text_of(judge: Judge, suffix: str, seconds: float) -> str:
    """Return the report of the kind that a suffix chooses."""
    return WRITERS[suffix](judge, seconds)


def save(path: str, text: str) -> None:
    """Write a file whole or not at all: an existing one is replaced, or stays as it is."""
    if os.path.exists(path) and not os.path.isfile(path):  # such as /dev/stdout
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        return
    directory = os.path.dirname(os.path.abspath(path))
    descriptor, name = tempfile.mkstemp(prefix=".userstream-", dir=directory)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        mode = os.stat(path).st_mode if os.path.exists(path) else 0o666 & ~_umask()
        os.chmod(name, mode & 0o777)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def github_annotations(judge: Judge) -> str:
    """Return the races as commands of GitHub Actions, which shows them at their lines."""
    lines = []
    for race in judge.races():
        for side, other in ((race.first, race.second), (race.second, race.first)):
            if side.line is None:
                continue
            text = f"{race.kind} with {_place(other)}: {race.advice}"
            place = f"file={_relative(judge, side.line)},line={side.line.lineno}"
            lines.append(f"::error {place},title=userstream: {race.kind}::{_escaped(text)}")
    return "\n".join(lines)


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _place(operation: Operation) -> str:
    line = operation.line
    return operation.name if line is None else f"{line.filename}:{line.lineno}"


def _relative(judge: Judge, line: FrameSummary) -> str:
    """Return a file relative to the directory that was observed, if the file lies in it."""
    directory = judge.header.get("directory")
    path = Path(line.filename)
    if directory and path.is_relative_to(directory):
        return path.relative_to(directory).as_posix()
    return path.as_posix()


# -- the kinds -------------------------------------------------------------------------------------


def _html(judge: Judge, seconds: float) -> str:
    return page(judge.document_of_page(seconds))


def _json(judge: Judge, seconds: float) -> str:
    return json.dumps(judge.document(seconds), indent=1) + "\n"


def _text(judge: Judge, seconds: float) -> str:
    return judge.report(seconds) + "\n"


def _sarif(judge: Judge, _: float) -> str:
    races = judge.races()
    kinds = sorted({race.kind for race in races})
    driver = {
        "name": "userstream",
        "version": judge.header.get("userstream", ""),
        "informationUri": _RULES,
        "rules": [
            {
                "id": kind.replace(" ", "-"),
                "shortDescription": {"text": kind},
                "helpUri": _RULES,
            }
            for kind in kinds
        ],
    }
    run = {"tool": {"driver": driver}, "results": [_result(judge, race) for race in races]}
    return json.dumps({"$schema": _SARIF, "version": "2.1.0", "runs": [run]}, indent=1) + "\n"


def _result(judge: Judge, race: Race) -> dict[str, Any]:
    second, first = _location(judge, race.second), _location(judge, race.first)
    return {
        "ruleId": race.kind.replace(" ", "-"),
        "level": "warning" if race.possible else "error",
        "message": {"text": f"{race.kind} with {_place(race.first)}: {race.advice}"},
        "locations": [second] if second else [],
        "relatedLocations": [{**first, "message": {"text": "the first of the two"}}]
        if first
        else [],
        "occurrenceCount": race.count,
        "partialFingerprints": {"userstreamKey/v1": race.key},
    }


def _location(judge: Judge, operation: Operation) -> dict[str, Any] | None:
    line = operation.line
    if line is None or line.filename.startswith("<"):
        return None
    relative = _relative(judge, line)
    uri = Path(relative).as_uri() if os.path.isabs(relative) else relative
    return {
        "physicalLocation": {
            "artifactLocation": {"uri": uri},
            "region": {"startLine": line.lineno or 1},
        }
    }


def _trace(judge: Judge, seconds: float) -> str:
    return json.dumps({"traceEvents": list(_events(judge, seconds))}) + "\n"


def _events(judge: Judge, seconds: float) -> Iterator[dict[str, Any]]:
    """Return the events of a trace: a row for each stream and thread, arrows for edges and races.

    An operation lasts as long as the call that queued it: when the GPU ran it is not known.
    """
    told = judge.document_of_page(seconds)["timeline"]
    process = judge.header.get("pid", 0)
    for row, each in enumerate(told["rows"]):
        title = {"name": f"{each['kind']}: {each['name']}"}
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": row, "args": title}
    places = []
    for name, row, thread, stack, began, lasted, *_ in told["entries"]:
        shown, *frames = told["stacks"][stack]
        where = told["frames"][frames[shown]] if shown >= 0 else None
        at = {"pid": process, "tid": thread if row < 0 else row, "ts": began / 1000}
        places.append(at)
        arguments = {} if where is None else {"line": f"{where[0]}:{where[1]} in {where[2]}"}
        event = {"ph": "X", "name": told["names"][name], "dur": max(lasted, 1) / 1000}
        yield {**event, **at, "args": arguments}
    arrows = [
        ("edge", before, after)
        for after, entry in enumerate(told["entries"])
        for before in entry[7]
    ]
    for race in judge.races():
        first, second = (entry - told["first"] for entry in race._entries)
        if 0 <= first < len(places) and 0 <= second < len(places):
            arrows.append((race.kind, first, second))
    for number, (kind, before, after) in enumerate(arrows):
        arrow = {"name": kind, "cat": "edge" if kind == "edge" else "race", "id": number}
        yield {"ph": "s", **arrow, **places[before]}
        yield {"ph": "f", "bp": "e", **arrow, **places[after]}


WRITERS: dict[str, Callable[[Judge, float], str]] = {
    ".html": _html,
    ".trace.json": _trace,
    ".json": _json,
    ".sarif": _sarif,
    ".txt": _text,
}
