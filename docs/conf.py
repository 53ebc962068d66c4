"""Sphinx configuration: ``python -m sphinx -n -W -b html docs docs/_build/html``."""

from __future__ import annotations

import doctest
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS), str(DOCS.parent)]
sys.path.append(str(DOCS / "examples"))  # as for whoever types the examples there

import inventories  # noqa: E402
import numpydoc.xref  # noqa: E402
import run_examples  # noqa: E402
from sphinx.util import logging  # noqa: E402

import userstream  # noqa: E402
import userstream.testing  # noqa: E402
import userstream.typing  # noqa: E402

logger = logging.getLogger(__name__)

SIMULATED = run_examples.is_simulated()

project = "userstream"
author = "The userstream developers"
copyright = author
version = release = userstream.__version__

extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.doctest",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "examples"]
templates_path = ["_templates"]
default_role = "py:obj"
nitpicky = True

html_theme = "furo"
html_title = f"userstream {release}"
html_static_path = ["_static"]
html_css_files = ["userstream.css"]
html_copy_source = False
html_show_sphinx = False

autoclass_content = "class"
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings say it, in words
autosummary_generate = True
numpydoc_show_class_members = False
numpydoc_xref_param_type = True  # link our own classes, and leave the words around them alone
numpydoc_xref_ignore = "all"
numpydoc_xref_aliases = {
    name: f"userstream.{name}"
    for name in userstream.__all__
    if isinstance(getattr(userstream, name), type)
}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# Without a network, docs/inventory.txt lists the pages of others that are linked to: a link to
# another one is an error that names it.
intersphinx_mapping = inventories.mapping(
    DOCS / "_build" / "inventories",
    published=os.environ.get("USERSTREAM_DOCS_INTERSPHINX") == "1",
)
numpydoc.xref.DEFAULT_LINKS.clear()  # to types of Python and NumPy

# Doctests run on the simulated driver; on a machine with a GPU, on that.
doctest_default_flags = doctest.ELLIPSIS
doctest_global_setup = (
    "import userstream.testing as _testing; _testing.simulate(devices=2)" if SIMULATED else ""
)
_NO_CONTEXT = """\
.. testcode::
   :hide:

   from cuda.bindings import driver as _driver
   _ = _driver.cuInit(0), _driver.cuCtxSetCurrent(0)

"""
doctest_global_cleanup = """
import userstream as _us
import userstream.testing as _testing
from cuda.bindings import driver as _driver
_testing.reset()
_us.close(timeout=20)
_driver.cuCtxSetCurrent(0)
"""


def _skip_without_simulation(*event: Any) -> None:
    """Let the doctests of what needs the simulated driver be skipped on a real one."""
    *_, name, _obj, _options, lines = event
    if not SIMULATED and name.startswith("userstream.testing.") and "latch" not in name:
        lines[:] = [
            f"{line}  # doctest: +SKIP" if line.lstrip().startswith((">>> ", "... ")) else line
            for line in lines
        ]


def _start_without_context(*event: Any) -> None:
    """Let no example of a docstring rest on the current context of the one before."""
    lines = event[-1]
    for number, line in enumerate(lines):
        if line.lstrip().startswith(">>> "):
            indent = line[: -len(line.lstrip())]
            lines[number:number] = [indent + each for each in _NO_CONTEXT.split("\n")]
            break


# What the pages of functions begin with: programs with a framework, as their docstrings have none.
_PROGRAMS = {
    "asnumpy": "inspect_pipeline",
    "borrow": "with_pytorch",
    "copyto": "several_gpus",
    "get_stream": "your_stream",
    "hand_over": "hand_over",
    "hold": "raw_pointer",
    "wait": "your_stream",
    "wait_async": "asyncio_service",
}


def _begin_with_a_framework(*event: Any) -> None:
    """Show a program behind the first line of a docstring."""
    *_, name, _obj, _options, lines = event
    program = _PROGRAMS.get(name.removeprefix("userstream."))
    if program is not None:
        summary = next(number for number, line in enumerate(lines) if line)
        behind = lines.index("", summary)
        lines[behind:behind] = [
            "",
            f".. literalinclude:: /examples/needs_gpu/{program}.py",
            "   :language: python",
            "   :caption: Needs a GPU and PyTorch",
            "",
        ]


def _no_sections_of_modules(*event: Any) -> None:
    """Make the heading of a module's examples no section of the page."""
    *_, what, _name, _obj, _options, lines = event
    if what == "module" and "Examples" in lines:
        heading = lines.index("Examples")
        lines[heading : heading + 2] = [".. rubric:: Examples", ""]


def _show_public_bases(*event: Any) -> None:
    """Show cuda.core's stream in the place of the private layers between it and ours."""
    *_, obj, _options, bases = event
    if obj is userstream.Stream:
        bases[:] = [":py:class:`cuda.core.Stream`"]


def _show_no_constructor(*event: Any) -> tuple[str, None] | None:
    """Leave out the signature of a class that refuses to be called."""
    _app, _what, name, *_ = event
    return ("", None) if name == "userstream.Stream" else None


def _reveal_comments(_app: Sphinx, _page: str, source: list[str]) -> None:
    """Turn the comment on top of a page into front matter, and take navigation out of its comment.

    A repository viewer hides comments, but shows front matter as a table, and a toctree as code.
    """
    source[0] = re.sub(
        r"\A<!-- (keywords: .*) -->\n", r"---\nmyst:\n  html_meta:\n    \1\n---\n", source[0]
    )
    source[0] = re.sub(r"(?s)<!-- navigation\n(.*?)-->\n", r"\1", source[0])


def _check_names(_app: Sphinx) -> None:
    """Warn of public names that the reference lacks; an error with ``-W``."""
    page = (DOCS / "reference" / "api.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^   ([A-Za-z]\w+)$", page, re.MULTILINE))
    for module in (userstream, userstream.testing, userstream.typing):
        for name in sorted(set(module.__all__) - listed - {"errors"}):
            logger.warning("reference/api.md lacks %s.%s", module.__name__, name)


def setup(app: Sphinx) -> None:
    """Connect what this file adds."""
    app.connect("builder-inited", _check_names)
    app.connect("source-read", _reveal_comments)
    app.connect("autodoc-process-docstring", _skip_without_simulation)
    app.connect("autodoc-process-docstring", _start_without_context, priority=900)
    app.connect("autodoc-process-docstring", _begin_with_a_framework, priority=900)
    app.connect("autodoc-process-docstring", _no_sections_of_modules, priority=900)
    app.connect("autodoc-process-signature", _show_no_constructor)
    app.connect("autodoc-process-bases", _show_public_bases)
