"""Run the examples of the pages: ``pytest docs``.

A block of Python under a paragraph that begins with a link to a program of ``docs/examples`` has to
be that program, or a part of the program if the paragraph begins with "From": ``run_examples.py``
runs the programs. Every other block of Python is run here, in one namespace for each page.
"""

from __future__ import annotations

import doctest
import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cuda.bindings import driver
from run_examples import is_simulated
from sybil import Sybil
from sybil.parsers.myst import PythonCodeBlockParser

import userstream as us
from userstream import testing

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest
    from sybil import Document, Example, Region

# One of its tests fails, as the page shows: test_commands.py runs it.
collect_ignore = ["examples/story/test_any_order.py"]

LINK = re.compile(r"(?P<part>From )?\[(?P<name>[\w.]+)\]\((?P<path>\S*examples/\S+\.py)\)")
_python = PythonCodeBlockParser(doctest_optionflags=doctest.ELLIPSIS)


def pytest_configure(config: pytest.Config) -> None:
    """Keep the examples of a page in their order, also with pytest-randomly."""
    config.option.randomly_reorganize = False


def _blocks(document: Document) -> Iterator[Region]:
    for region in _python(document):
        if _link(document, region.start):
            region.evaluator = _compare
        yield region


def _link(document: Document, start: int) -> re.Match[str] | None:
    """Return the link to a program with which the paragraph above a block begins."""
    return LINK.match(document.text[:start].rstrip().rpartition("\n\n")[2])


def _compare(example: Example) -> str | None:
    """Return an error if a block is not the program that is linked to above the block."""
    link = _link(example.document, example.start)
    assert link is not None
    path = Path(example.path).parent / link["path"]
    if path.name != link["name"]:
        return f"the text of the link is {link['name']}, and its file {path.name}"
    program, block = path.read_text(encoding="utf-8"), str(example.parsed)
    if link["part"]:
        indented = (textwrap.indent(block, " " * width) for width in (0, 4, 8))
        is_shown = any(f"\n{each}" in f"\n{program}" for each in indented)
    else:
        is_shown = block == program
    if is_shown:
        return None
    return f"the block is not {'a part of ' if link['part'] else ''}{link['path']}"


def _begin(_names: dict[str, Any]) -> None:
    if is_simulated():
        testing.simulate(devices=2)


def _end(_names: dict[str, Any]) -> None:
    testing.reset()
    us.close(timeout=20)
    driver.cuCtxSetCurrent(0)


pytest_collect_file = Sybil(
    parsers=[_blocks], patterns=["*.md"], setup=_begin, teardown=_end
).pytest()
