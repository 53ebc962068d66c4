"""Modules of a package that are loaded when they are used first, which makes the import quicker."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


def modules(package: str, *names: str) -> Callable[[str], ModuleType]:
    """Return the ``__getattr__`` of a package that loads these of its modules late."""

    def __getattr__(name: str) -> ModuleType:  # noqa: N807
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        # It becomes an attribute, so this is not called again; if a signal handler raises in the
        # middle, it does not, and the next use begins anew.
        return importlib.import_module(f"{package}.{name}")

    return __getattr__
