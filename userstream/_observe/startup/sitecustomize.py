"""Runs as Python starts in a process below ``userstream observe``, which puts this folder first.

The process is recorded once it has imported what calls the driver. Until then nothing is imported.
Where nothing of this is imported, the driver loads the recorder when it is initialized.
"""

from __future__ import annotations

import os
import sys
from typing import Any

# They import each other: only when the outermost is there can userstream be imported.
_CALLS_THE_DRIVER: tuple[str, ...] = (
    *("userstream", "cuda.core", "cuda.bindings.driver", "cuda.bindings.runtime"),
    *("cuda.bindings.nvrtc", "cuda.bindings.cufile"),
)
# What the driver's way cannot do needs userstream in the process.
_ASKED_FOR_MORE = ("USERSTREAM_RECORD_ALLOCATIONS", "USERSTREAM_RECORD_CONFIRM")
if any(each in os.environ for each in _ASKED_FOR_MORE):
    _CALLS_THE_DRIVER += ("torch", "cupy", "jax", "numba")

_environment = dict(os.environ)  # the program may clear its own before it imports them


class _Finder:
    """Finds what the other finders find, with a loader that begins to record afterwards."""

    depth = 0  # of imports of such modules within each other

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name in _CALLS_THE_DRIVER:
            for finder in sys.meta_path:
                found: Any = None if finder is self else finder.find_spec(name, path, target)
                if found is not None:
                    found.loader = _Loader(name, found.loader, self)
                    return found
        return None


class _Loader:
    """A loader of a module, and then of the recorder."""

    def __init__(self, name: str, loader: Any, finder: _Finder) -> None:
        self._name = name  # cuda.core renames itself
        self._loader = loader
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        module.__spec__.loader = module.__loader__ = self._loader
        self._finder.depth += 1
        try:
            self._loader.exec_module(module)
        finally:
            self._finder.depth -= 1
        if not self._finder.depth and self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
            package, _, name = self._name.rpartition(".")
            if package:
                vars(sys.modules[package])[name] = module  # as the import does in a moment
            # Likewise: until then the thread that records could import nothing from the module.
            module.__spec__._initializing = False
            try:
                from userstream._observe.observation import record_this_process
            except Exception:  # in another environment of Python, say: the driver's way is left
                return
            record_this_process(_environment)


def _is_recorded() -> bool:
    only = os.environ.get("USERSTREAM_RECORD_ONLY", "")
    return "USERSTREAM_RECORD" in os.environ and only in ("", str(os.getpid()))


def _go_on() -> None:
    """Import the `sitecustomize` that this one hides, and leave nothing behind."""
    here = os.path.dirname(__file__)
    sys.path[:] = [each for each in sys.path if each != here]
    mine = sys.modules.pop("sitecustomize")
    try:
        __import__("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", mine)  # the import that is going on looks for it


if __name__ == "sitecustomize":
    if _is_recorded():
        sys.meta_path.insert(0, _Finder())
    _go_on()
