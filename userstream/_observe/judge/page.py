"""The page of an observation: one self-contained file."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

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
