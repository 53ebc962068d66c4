"""Links into the documentation of other projects, with or without a network."""

from __future__ import annotations

import zlib
from pathlib import Path

LIST = Path(__file__).parent / "inventory.txt"
PUBLISHED = {
    "python": "https://docs.python.org/3",
    "numpy": "https://numpy.org/doc/stable",
    "cupy": "https://docs.cupy.dev/en/stable",
    "torch": "https://docs.pytorch.org/docs/stable",
    "cuda.core": "https://nvidia.github.io/cuda-python/cuda-core/latest",
}


def mapping(directory: Path, *, published: bool) -> dict[str, tuple[str, str | None]]:
    """Return what intersphinx reads: the published inventories, or our list of what we link to.

    The list is written to the directory in the format of Sphinx.
    """
    if published:
        return {project: (address, None) for project, address in PUBLISHED.items()}
    lines = [line.split() for line in LIST.read_text(encoding="utf-8").splitlines()]
    listed: dict[str, list[str]] = {project: [] for project in PUBLISHED}
    for project, role, name, page in (line for line in lines if line[0] != "#"):
        anchor = f"module-{name}" if role == "py:module" else name
        listed[project].append(f"{name} {role} 1 {page}#{anchor} -\n")
    directory.mkdir(parents=True, exist_ok=True)
    for project, entries in listed.items():
        head = f"# Sphinx inventory version 2\n# Project: {project}\n# Version: \n"
        head += "# The remainder of this file is compressed using zlib.\n"
        compressed = zlib.compress("".join(entries).encode())
        (directory / f"{project}.inv").write_bytes(head.encode() + compressed)
    return {
        project: (address, str(directory / f"{project}.inv"))
        for project, address in PUBLISHED.items()
    }
