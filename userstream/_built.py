"""Native libraries that the installation compiles, and the check that they match their sources.

`hatch_build.py` loads this file by its path, so it imports only the standard library.
"""

from __future__ import annotations

import os
import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ctypes

PACKAGE = os.path.dirname(os.path.abspath(__file__))
REINSTALL = "reinstall: pip install -e ."


class Library:
    """A native library; the folder of its C files and all files are relative to the package."""

    def __init__(
        self,
        name: str,
        sources: str,
        file: str,
        link_flags: tuple[str, ...] = (),
        tables: tuple[str, ...] = (),  # files of Python from which one of its C files is made
    ) -> None:
        self.name, self.sources, self.file = name, sources, file
        self.link_flags, self.tables = link_flags, tables
        # The name of a string in the library: the checksum of the files it is compiled from.
        self.symbol = f"userstream_{name}_source"


CORE = Library("core", "_driver/native", "_driver/_core")  # the ending depends on Python
RECORDER = Library(
    "recorder",
    "_observe/native",
    "_observe/recorder.so",
    tables=("_observe/native/rules.py", "_observe/judge/functions.py"),
)
# In a folder of its own, which LD_LIBRARY_PATH can name.
SIMULATED_DRIVER = Library(
    "simulated_driver",
    "testing/driver",
    "testing/libcuda/libcuda.so.1",
    ("-Wl,-soname,libcuda.so.1", "-ldl"),
)
SIMULATED_NVML = Library(
    "simulated_nvml",
    "testing/nvml",
    "testing/libcuda/libnvidia-ml.so.1",
    ("-Wl,-soname,libnvidia-ml.so.1", "-ldl"),
)


def load(library: Library, *, visible: bool = False) -> ctypes.CDLL:
    """Load a library by its path, with its symbols `visible` to other libraries or not.

    Raises `ImportError` if the library was not compiled, or if its C files have changed since.
    """
    import ctypes

    path = os.path.join(PACKAGE, library.file)
    try:
        loaded = ctypes.CDLL(path, ctypes.RTLD_GLOBAL if visible else ctypes.RTLD_LOCAL)
    except OSError as error:
        raise ImportError(f"{error}; {REINSTALL}") from error
    checksum_of_library = ctypes.c_char.in_dll(loaded, library.symbol)
    check(library, ctypes.string_at(ctypes.addressof(checksum_of_library)).decode())
    return loaded


def check(library: Library, compiled_from: str) -> None:
    """Raise `ImportError` if a checkout has changed since its C files had this checksum."""
    if checksum(library) not in (None, compiled_from):
        raise ImportError(
            f"the sources of userstream/{library.file} have changed since userstream was "
            f"installed; {REINSTALL}"
        )


def checksum(library: Library, package: str = PACKAGE) -> str | None:
    """Return the checksum of a library's files; `None` if a wheel has left the C files out."""
    try:
        names = os.listdir(os.path.join(package, library.sources))
    except FileNotFoundError:
        return None
    files = sorted(f"{library.sources}/{name}" for name in names if name.endswith((".c", ".h")))
    if not files:
        return None
    value = 0
    for name in (*files, *library.tables):
        with open(os.path.join(package, name), "rb", buffering=0) as file:
            value = zlib.crc32(file.read(), zlib.crc32(name.encode(), value))
    return f"{value:08x}"
