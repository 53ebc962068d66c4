"""Reports as files: a page, data, SARIF, a trace for Perfetto, and text."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from .lines import Source, excerpt, printable, render

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from traceback import FrameSummary

    from .finding_types import Operation, Race, WrongStream
    from .findings import Found, Report

_SARIF = "https://json.schemastore.org/sarif-2.1.0.json"
_WRONG_STREAM = "wrong stream"
_ERRORS = "backslashreplace"  # names of files may have parts of other encodings
_RULES = "https://userstream.readthedocs.io/en/latest/howto/find-a-race.html"


def suffix_of(name: str) -> str:
    """Return the suffix by which a name chooses the format of a report.

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


def text_of(report: Report, suffix: str) -> str:
    """Return a report in the format that a suffix chooses."""
    return WRITERS[suffix](report)


def needs_timeline(suffix: str) -> bool:
    """Return whether a format shows operations beside the findings."""
    return suffix in (".html", ".trace.json")


def save(path: str, text: str) -> None:
    """Write a file whole or not at all: an existing one is replaced, or stays as it is."""
    if os.path.exists(path) and not os.path.isfile(path):  # such as /dev/stdout
        with open(path, "w", encoding="utf-8", errors=_ERRORS) as file:
            file.write(text)
        return
    directory = os.path.dirname(os.path.abspath(path))
    descriptor, name = tempfile.mkstemp(prefix=".userstream-", dir=directory)
    try:
        with open(descriptor, "w", encoding="utf-8", errors=_ERRORS) as file:
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


def github_annotations(report: Report) -> str:
    """Return the races as commands of GitHub Actions, which shows them at their lines."""
    lines = []
    for race, processes in report.reported:
        where = report.where(processes)
        title = f"userstream: {race.kind}{where and f' ({where})'}"
        for side, other in ((race.first, race.second), (race.second, race.first)):
            if side.line is None:
                continue
            text = f"{race.kind} with {_place(other)}: {race.advice}"
            file = _relative(report, processes[0], side.line.filename)
            place = f"file={_property(file)},line={side.line.lineno}"
            lines.append(f"::error {place},title={_property(title)}::{_escaped(text)}")
    return "\n".join(lines)


def _property(text: str) -> str:
    return _escaped(text).replace(":", "%3A").replace(",", "%2C")


def _escaped(text: str) -> str:
    return printable(text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A"))


def _place(operation: Operation) -> str:
    line = operation.line
    return operation.name if line is None else f"{line.filename}:{line.lineno}"


def _uri(report: Report, process: int, file: str) -> str:
    relative = _relative(report, process, file)
    scheme = "file://" if os.path.isabs(relative) else ""
    return scheme + quote(relative, errors="surrogateescape")


def _relative(report: Report, process: int, file: str) -> str:
    """Return a file relative to the directory of its process, if the file lies in it."""
    directory = report.findings[process].process.directory
    path = Path(file)
    if directory and path.is_relative_to(directory):
        return path.relative_to(directory).as_posix()
    return path.as_posix()


def notebook(report: Report) -> str:
    """Return a report for a notebook: its text, with the page folded in below."""
    text = html.escape(render(report.lines()))
    frame = html.escape(_html(report))  # in a frame of its own, whose scripts reach nothing else
    return (
        f"<pre>{text}</pre><details><summary>Timeline</summary>"
        f'<iframe sandbox="allow-scripts" style="width: 100%; height: 600px; border: 0" '
        f'srcdoc="{frame}"></iframe></details>'
    )


# -- the formats -----------------------------------------------------------------------------------


def _html(report: Report) -> str:
    return page(report.document_of_page())


def _json(report: Report) -> str:
    return json.dumps(report.document(), indent=1) + "\n"


def _text(report: Report) -> str:
    return render(report.lines()) + "\n"


def _sarif(report: Report) -> str:
    kinds = sorted({race.kind for race, _ in report.reported})
    kinds += [_WRONG_STREAM] if report.wrong_streams else []
    driver = {
        "name": "userstream",
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
    versions = {each.process.userstream for each in report.findings} - {""}
    if versions:
        driver["version"] = max(versions)
    run = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "results": [
            *(_result(report, found) for found in report.reported),
            *(_result_of_wrong_stream(report, found) for found in report.wrong_streams),
        ],
    }
    return json.dumps({"$schema": _SARIF, "version": "2.1.0", "runs": [run]}, indent=1) + "\n"


def _result(report: Report, found: Found[Race]) -> dict[str, Any]:
    race, processes = found
    second = _location(report, processes[0], race.second.line)
    first = _location(report, processes[0], race.first.line)
    where = report.where(processes)
    text = f"{race.kind} with {_place(race.first)}{where and f' ({where})'}: {race.advice}"
    return {
        "ruleId": race.kind.replace(" ", "-"),
        "level": "warning" if race.possible else "error",
        "message": {"text": printable(text)},
        "locations": [second] if second else [],
        "relatedLocations": [{**first, "message": {"text": "the first of the two"}}]
        if first
        else [],
        "occurrenceCount": race.count,
        "partialFingerprints": {"userstreamKey/v1": race.key},
        "fixes": _fixes(report, processes[0], race),
    }


def _result_of_wrong_stream(report: Report, found: Found[WrongStream]) -> dict[str, Any]:
    wrong, processes = found
    location = _location(report, processes[0], wrong.line)
    return {
        "ruleId": _WRONG_STREAM.replace(" ", "-"),
        "level": "warning",
        "message": {"text": printable(f"{wrong.name} on {wrong.stream}")},
        "locations": [location] if location else [],
        "occurrenceCount": wrong.count,
    }


def _fixes(report: Report, process: int, race: Race) -> list[dict[str, Any]]:
    """Return the edits of a race as one fix, with the changes of each file together."""
    changes: dict[str, list[dict[str, Any]]] = {}
    for edit in race.edits:
        region = {"startLine": edit.line, "startColumn": 1, "endLine": edit.end, "endColumn": 1}
        changes.setdefault(_uri(report, process, edit.file), []).append(
            {"deletedRegion": region, "insertedContent": {"text": edit.code}}
        )
    if not changes:
        return []
    return [
        {
            "description": {"text": race.advice},
            "artifactChanges": [
                {"artifactLocation": {"uri": uri}, "replacements": replacements}
                for uri, replacements in changes.items()
            ],
        }
    ]


def _location(report: Report, process: int, line: FrameSummary | None) -> dict[str, Any] | None:
    if line is None or line.filename.startswith("<"):
        return None
    return {
        "physicalLocation": {
            "artifactLocation": {"uri": _uri(report, process, line.filename)},
            "region": {"startLine": line.lineno or 1, **_columns(line)},
        }
    }


def _columns(line: FrameSummary) -> dict[str, int]:
    """Return the columns of a call, which SARIF counts from 1, and in characters."""
    for source in excerpt(line, ""):
        if isinstance(source, Source) and source.end and line.end_lineno == line.lineno:
            indent = source.indent
            return {"startColumn": indent + source.start + 1, "endColumn": indent + source.end + 1}
    return {}


def _trace(report: Report) -> str:
    return json.dumps({"traceEvents": list(_events(report))}) + "\n"


def _events(report: Report) -> Iterator[dict[str, Any]]:
    """Return the events of a trace: a row for each stream and thread, arrows for edges and races.

    An operation lasts as long as the call that queued it: when the GPU ran it is not known.
    """
    told = report.document_of_page()
    places: list[list[dict[str, Any]]] = []
    arrows: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
    for number, timeline in enumerate(told["timelines"]):
        name = {"name": timeline["process"]["name"]}
        yield {"ph": "M", "name": "process_name", "pid": number + 1, "tid": 0, "args": name}
        for row, each in enumerate(timeline["rows"]):
            title = {"name": f"{each['kind']}: {each['name']}"}
            yield {"ph": "M", "name": "thread_name", "pid": number + 1, "tid": row, "args": title}
        places.append([])
        for event in _operations(number, timeline):
            places[number].append({key: event[key] for key in ("pid", "tid", "ts")})
            yield event
        for after, entry in enumerate(timeline["entries"]):
            at = places[number]
            arrows += [("edge", at[before], at[after]) for before in entry[7]]
    for race in (*told["races"], *(told["possible"] if report.shows_possible else ())):
        process = race["processes"][0]
        began, at = told["timelines"][process]["first"], places[process]
        first, second = (entry - began for entry in race["entries"])
        if 0 <= first < len(at) and 0 <= second < len(at):
            arrows.append((race["kind"], at[first], at[second]))
    for number, (kind, start, end) in enumerate(arrows):
        arrow = {"name": kind, "cat": "edge" if kind == "edge" else "race", "id": number}
        yield {"ph": "s", **arrow, **start}
        yield {"ph": "f", "bp": "e", **arrow, **end}


def _operations(process: int, timeline: dict[str, Any]) -> Iterator[dict[str, Any]]:
    offset = timeline["process"]["offset"]
    for name, row, thread, stack, began, lasted, *_ in timeline["entries"]:
        shown, *frames = timeline["stacks"][stack]
        where = timeline["frames"][frames[shown]] if shown >= 0 else None
        yield {
            "ph": "X",
            "name": timeline["names"][name],
            "dur": max(lasted, 1) / 1000,
            "pid": process + 1,
            "tid": thread if row < 0 else row,
            "ts": (offset + began) / 1000,
            "args": {} if where is None else {"line": f"{where[0]}:{where[1]} in {where[2]}"},
        }


WRITERS: dict[str, Callable[[Report], str]] = {
    ".html": _html,
    ".trace.json": _trace,
    ".json": _json,
    ".sarif": _sarif,
    ".txt": _text,
}


# -- The page: one self-contained file -------------------------------------------------------------

_PIECES = Path(__file__).parent / "pieces"
_SCRIPTS = ("model.js", "view.js", "paint.js", "panel.js", "main.js")


def page(document: dict[str, Any]) -> str:
    """Return the page of a document; see `Report.document_of_page`."""
    style, script = _read("page.css"), "".join(map(_read, _SCRIPTS))
    pieces = {
        "policy": (
            f"default-src 'none'; base-uri 'none'; form-action 'none'; "
            f"style-src {_hash(style)}; script-src {_hash(script)}"
        ),
        "style": style,
        "data": _embedded(document),
        "script": script,
    }
    # At once: what is put in may look like a place itself.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: pieces[place[1]], _read("page.html"))


def _read(name: str) -> str:
    return (_PIECES / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """Return the source expression of a content security policy that allows one text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _embedded(document: dict[str, Any]) -> str:
    """Return JSON for a script element, without a character that could end the element."""
    return json.dumps(document, separators=(",", ":")).replace("<", "\\u003c")
