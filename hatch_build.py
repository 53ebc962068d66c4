"""Compiles the core of the package, where there is a C compiler and Python's headers.

Without them the wheel is pure Python, and userstream does the same with a few more instructions.
`USERSTREAM_CORE=require` makes that an error, and `USERSTREAM_CORE=no` leaves the core out.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sysconfig
import zlib
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path("userstream/_driver/_native.c")
FLAGS = ("-std=c11", "-O2", "-g0", "-fPIC", "-shared", "-fvisibility=hidden")


class CompiledCore(BuildHookInterface):
    """Adds the compiled core to a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile it, beside its source, and tell the wheel of it."""
        if self.target_name != "wheel":
            return
        source = Path(self.root) / SOURCE
        # Free-threaded Python has no stable ABI before 3.15: its core is for this version alone.
        free_threaded = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
        ending = sysconfig.get_config_var("EXT_SUFFIX") if free_threaded else ".abi3.so"
        library = source.with_suffix(ending)
        why_not = self._compile(source, library)
        if why_not is None:
            build_data["pure_python"] = False
            if free_threaded:
                build_data["infer_tag"] = True
            else:
                platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
                build_data["tag"] = f"cp311-abi3-{platform}"
            build_data["artifacts"].append(str(library.relative_to(self.root)))
            return
        library.unlink(missing_ok=True)  # of an earlier build, perhaps for another machine
        if os.environ.get("USERSTREAM_CORE") == "require":
            raise RuntimeError(f"the compiled core could not be built: {why_not}")
        self.app.display_warning(f"userstream without its compiled core: {why_not}")

    def _compile(self, source: Path, library: Path) -> str | None:
        """Return why it could not be compiled; `None` if it could."""
        if os.environ.get("USERSTREAM_CORE") == "no":
            return "USERSTREAM_CORE is no"
        headers = Path(sysconfig.get_path("include"))
        if not (headers / "Python.h").exists():
            return "the headers of Python are not installed (Debian and Ubuntu: python3-dev)"
        compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
        if not shutil.which(compiler[0]):
            return f"the C compiler {compiler[0]!r} was not found"
        checksum = f"{zlib.crc32(source.read_bytes()):08x}"
        command = (*compiler, *FLAGS, f'-DSOURCE="{checksum}"', f"-I{headers}")
        # Whole at once: a program that runs in this checkout may be loading the one that is here.
        new = library.with_name(f"{library.name}.{os.getpid()}")
        done = subprocess.run(
            (*command, str(source), "-o", str(new)), capture_output=True, text=True, check=False
        )
        if done.returncode:
            return f"{shlex.join(command)}: {done.stderr}"
        new.replace(library)
        return None
