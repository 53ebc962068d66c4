"""The packages of userstream, in the order in which they may import each other."""

from __future__ import annotations

import ast
from pathlib import Path

import svg

ORDER = Path(__file__).parents[2] / "tests/project/test_architecture.py"
LABELS = 124
BOX = 28
GAP = 6
A_LINE = 4  # boxes side by side, at most

# The first package of each layer; those after it in LAYERS belong to it.
STARTS = {
    "__main__": "The command",
    "__init__": "Public names",
    "_registry": "User streams",
    "_copies": "Operations",
    "_stream": "Streams",
    "_engine": "The engine",
    "_arguments": "Buffers, devices",
    "_driver": "The driver",
    "_process": "Used by all",
}
NAMES = {"__main__": "python -m userstream", "__init__": "userstream"}
BELOW = {
    "cuda-python": ["cuda.core", "cuda.bindings"],
    "libcuda": ["NVIDIA's driver", "or the simulated one"],
}


def _layers() -> dict[str, list[str]]:
    """Return the packages of each layer, from the list that the tests check the imports with."""
    for node in ast.parse(ORDER.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LAYERS":
            packages = ast.literal_eval(node.value)
    layers: dict[str, list[str]] = {}
    for name in packages:
        if name in STARTS:
            layers[STARTS[name]] = []
        layers[list(layers)[-1]].append(NAMES.get(name, name))
    assert list(layers) == list(STARTS.values())
    return layers


def _row(name: str, packages: list[str], top: float, kind: str) -> tuple[list[str], float]:
    left = svg.MARGIN + LABELS
    lines = -(-len(packages) // A_LINE)
    a_line = -(-len(packages) // lines)
    middle = top + (lines * (BOX + GAP) - GAP) / 2
    shapes = [svg.text(svg.MARGIN, middle, name, "faint")]
    for start in range(0, len(packages), a_line):
        line = packages[start : start + a_line]
        width = (svg.WIDTH - svg.MARGIN - left - GAP * (len(line) - 1)) / len(line)
        for column, package in enumerate(line):
            x = left + column * (width + GAP)
            shapes.append(svg.box(x, top, width, BOX, kind))
            words = "mono text" if kind == "box" else "mono on"
            shapes.append(svg.text(x + width / 2, top + BOX / 2, package, words, "middle"))
        top += BOX + GAP
    return shapes, top + 5


def _draw() -> str:
    shapes: list[str] = []
    top = float(svg.MARGIN)
    for name, packages in _layers().items():
        more, top = _row(name, packages, top, "box")
        shapes += more
    for name, packages in BELOW.items():
        more, top = _row(name, packages, top, "host")
        shapes += more
    told = "; ".join(f"{name}: {', '.join(packages)}" for name, packages in _layers().items())
    return svg.document(
        shapes,
        top - GAP - 5 + svg.MARGIN,
        "The packages of userstream: each imports from below itself",
        told,
    )


LAYERS = _draw()
