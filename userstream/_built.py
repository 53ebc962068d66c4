"""Native libraries that the installation compiles, and the check that they match their sources.

`hatch_build.py` loads this file by its path, so it imports only the standard library.
"""

from __future__ import annotations

import os
import zlib

_PACKAGE = os.path.dirname(os.path.abspath(__file__))
REINSTALL = "reinstall: pip install -e ."


def checksum(sources: str) -> str | None:
    """Return the checksum of the C files in a folder; `None` if a wheel has left them out."""
    try:
        files = sorted(name for name in os.listdir(sources) if name.endswith((".c", ".h")))
    except FileNotFoundError:
        return None
    value = 0
    for name in files:
        with open(os.path.join(sources, name), "rb") as file:
            value = zlib.crc32(file.read(), zlib.crc32(name.encode(), value))
    return f"{value:08x}"


def check(sources: str, compiled_from: str) -> None:
    """Raise `ImportError` if the C files of a checkout have changed since they were compiled.

    Parameters
    ----------
    sources
        The folder of the C files, relative to the package.
    compiled_from
        The checksum of the files that the library was compiled from.
    """
    if checksum(os.path.join(_PACKAGE, sources)) not in (None, compiled_from):
        raise ImportError(
            f"the C files in userstream/{sources} have changed since userstream was installed; "
            f"{REINSTALL}"
        )
