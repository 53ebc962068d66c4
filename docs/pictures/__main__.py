"""Draw the pictures of the documentation: ``python docs/pictures``, or ``--check`` them."""

from __future__ import annotations

import sys
from pathlib import Path

import layers
import timelines

STATIC = Path(__file__).parents[1] / "_static"
PICTURES = {
    "borrow.svg": timelines.BORROW,
    "wait.svg": timelines.WAIT,
    "memory.svg": timelines.MEMORY,
    "layers.svg": layers.LAYERS,
}


def main() -> int:
    """Write the pictures, or tell which are not what is drawn here."""
    check = sys.argv[1:] == ["--check"]
    stale = {path.name for path in STATIC.glob("*.svg")} - PICTURES.keys()
    for name, picture in PICTURES.items():
        path = STATIC / name
        if not check:
            path.write_text(picture, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != picture:
            stale.add(name)
    for name in sorted(stale):
        print(f"docs/_static/{name} is not what is drawn: python docs/pictures")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
