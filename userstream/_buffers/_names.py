"""Types by their names, for messages and for frameworks that are never imported here."""

from __future__ import annotations


def is_named(kind: type, packages: tuple[str, ...], names: tuple[str, ...]) -> bool:
    """Return whether a type or one of its bases has one of the names and is from the packages."""
    return any(
        base.__name__ in names and base.__module__.startswith(packages) for base in kind.__mro__
    )


def type_name(obj: object) -> str:
    """Return the full name of an object's type, for messages."""
    kind = type(obj)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return module + kind.__qualname__
