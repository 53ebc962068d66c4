"""The names of kernels as their programmers wrote them."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any


def readable(name: str) -> str:
    """Return the name of a C++ function without what the compiler made of it, else as it is.

    Its template arguments stay, which tell kernels of one name apart; its parameters do not.
    """
    if not name.startswith("_Z"):
        return name
    text = _demangled(name)
    if text is None:
        return name
    text = text.removeprefix("void ").replace("(anonymous namespace)::", "")
    depth = 0
    for at, letter in enumerate(text):
        if letter in "<>":
            depth += 1 if letter == "<" else -1
        elif letter == "(" and not depth:
            return text[:at]
    return text


def parameter_types(name: str) -> list[str]:
    """Return the types of the parameters of a C++ function, by its mangled name; empty if unknown.

    A kernel with `extern "C"` has no such name.
    """
    text = _demangled(name) if name.startswith("_Z") else None
    if text is None or not text.endswith(")"):
        return []
    types, depth, end = [], 0, len(text) - 1
    for at in range(len(text) - 1, -1, -1):
        letter = text[at]
        if letter in ")>]}":
            depth += 1
        elif letter in "(<[{":
            depth -= 1
        if (depth == 1 and letter == ",") or depth == 0:
            types.append(text[at + 1 : end].strip())
            end = at
        if not depth:
            break
    return [] if types == [""] else types[::-1]


def _demangled(name: str) -> str | None:
    library = _library()
    if library is None:
        return None
    status = ctypes.c_int()
    found = library.__cxa_demangle(name.encode(), None, None, ctypes.byref(status))
    if not found:
        return None
    try:
        return ctypes.string_at(found).decode(errors="replace")
    finally:
        ctypes.CDLL(None).free(ctypes.c_void_p(found))


@cache
def _library() -> Any:
    """Return the runtime of C++, which every framework loads; None where it is not installed."""
    try:
        library = ctypes.CDLL("libstdc++.so.6")
        library.__cxa_demangle.restype = ctypes.c_void_p
    except (OSError, AttributeError):
        return None
    return library
