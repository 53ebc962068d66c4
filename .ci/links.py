"""Insert the address of the repository into the files of a release.

``python .ci/links.py ADDRESS TAG`` makes the links of README.md absolute, as a package index shows
it without the files beside it, and adds ``[project.urls]`` to pyproject.toml.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

RELATIVE = re.compile(r"(?P<picture>!?)(?P<text>\[[^\]]*\])\((?P<path>(?!\w+:|#)[^)]+)\)")


def absolute(readme: str, address: str, tag: str) -> str:
    """Return a README whose links and pictures are those of a tag."""

    def replace(link: re.Match[str]) -> str:
        kind = "raw" if link["picture"] else "blob"
        return f"{link['picture']}{link['text']}({address}/{kind}/{tag}/{link['path']})"

    return RELATIVE.sub(replace, readme)


def urls(address: str, tag: str) -> str:
    """Return the table of what an index links to."""
    return f"""
[project.urls]
Repository = "{address}"
Documentation = "{address}/blob/{tag}/docs/index.md"
Changelog = "{address}/blob/{tag}/CHANGELOG.md"
Issues = "{address}/issues"
"""


def main(address: str, tag: str) -> None:
    """Change both files of the current directory."""
    readme, project = Path("README.md"), Path("pyproject.toml")
    readme.write_text(absolute(readme.read_text(encoding="utf-8"), address, tag), encoding="utf-8")
    with project.open("a", encoding="utf-8") as file:
        file.write(urls(address, tag))


if __name__ == "__main__":
    main(*sys.argv[1:])
