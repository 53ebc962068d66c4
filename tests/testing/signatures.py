"""The signatures of the driver's functions, as the declarations of cuda.bindings have them."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import cuda.bindings

_BASES = {
    "char": ctypes.c_char,
    "signed char": ctypes.c_byte,
    "unsigned char": ctypes.c_ubyte,
    "short": ctypes.c_short,
    "unsigned short": ctypes.c_ushort,
    "int": ctypes.c_int,
    "unsigned": ctypes.c_uint,
    "unsigned int": ctypes.c_uint,
    "long long": ctypes.c_longlong,
    "unsigned long long": ctypes.c_ulonglong,
    "uint32_t": ctypes.c_uint32,
    "uint64_t": ctypes.c_uint64,
    "size_t": ctypes.c_size_t,
    "bint": ctypes.c_bool,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}
# Handles that are numbers, and addresses.
NUMBERS = {
    "CUdeviceptr",
    "CUgraphConditionalHandle",
    "CUmemGenericAllocationHandle",
    "CUsurfObject",
    "CUtexObject",
}


class Type(NamedTuple):
    """A type by its name, and how many pointers lead to it."""

    name: str
    stars: int = 0


class Variable(NamedTuple):
    """A parameter or a member; an array has a length."""

    name: str
    type: Type
    length: int = 0


@dataclass
class Declarations:
    """What a header declares."""

    enums: set[str] = field(default_factory=set)
    functions: dict[str, list[Variable]] = field(default_factory=dict)
    callbacks: set[str] = field(default_factory=set)  # pointers to functions
    aliases: dict[str, Type] = field(default_factory=dict)
    members: dict[str, list[Variable]] = field(default_factory=dict)
    unions: set[str] = field(default_factory=set)
    _resolved: dict[Type, Type] = field(default_factory=dict)
    _classes: dict[Type, type] = field(default_factory=dict)

    def resolved(self, given: Type) -> Type:
        """The type without names that stand for others, save for those of handles."""
        found = self._resolved.get(given)
        if found is None:
            found = given
            while found.name in self.aliases and not self.is_handle(found.name):
                alias = self.aliases[found.name]
                found = Type(alias.name, alias.stars + found.stars)
            self._resolved[given] = found
        return found

    def is_handle(self, name: str) -> bool:
        alias = self.aliases.get(name)
        is_pointer = alias is not None and alias.stars == 1 and not self.members.get(alias.name)
        return is_pointer or name in NUMBERS

    def class_of(self, given: Type) -> type:
        """The class of ctypes that holds a value of the type."""
        found = self.resolved(given)
        if found not in self._classes:
            self._classes[found] = self._new_class(found)
        return self._classes[found]

    def _new_class(self, found: Type) -> type:
        if found.stars or found.name in self.callbacks or self.is_handle(found.name):
            return ctypes.c_void_p
        if found.name in _BASES:
            return _BASES[found.name]
        if found.name in self.enums:
            return ctypes.c_int
        base = ctypes.Union if found.name in self.unions else ctypes.Structure
        fields = [(each.name, self._field(each)) for each in self.members[found.name]]
        return type(found.name, (base,), {"_fields_": fields})

    def _field(self, member: Variable) -> type:
        element = self.class_of(member.type)
        return element * member.length if member.length else element


def _variable(text: str) -> Variable:
    """One parameter or member: ``const CUgraphNode* nodes``, ``unsigned char bytes[16]``."""
    words, stars, name, length = re.fullmatch(
        r"([\w ]+?)((?: ?\*)*) ?\b(\w+)(?:\[(\d+)\])?", text.replace("const ", "").strip()
    ).groups()
    return Variable(name, Type(words.strip(), stars.count("*")), int(length or 0))


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """Each with its indentation, on one line, without comments and names in C."""
    text = re.sub(r"#.*", "", text)
    text = re.sub(r""" (['"])[\w ]+\1""", "", text)
    text = re.sub(r"\(\s*\n[^)]*\)", "()", text)  # the parameters of callbacks
    for line in text.splitlines():
        if line.strip():
            yield len(line) - len(line.lstrip()), line.strip()


def read(name: str) -> Declarations:
    """Read one of the files ``cuda/bindings/cy*.pxd``."""
    (folder,) = cuda.bindings.__path__
    found = Declarations()
    members: list[Variable] | None = None  # of the structure that is being read
    depth, subject = 0, ""
    for indent, line in _statements(Path(folder, name).read_text(encoding="utf-8")):
        if members is not None and indent > depth:
            if subject not in found.enums and line != "pass":
                members.append(_variable(line))
            continue
        members = None
        if match := re.fullmatch(r"c\w+ (struct|union|enum) (\w+):", line):
            kind, subject = match.groups()
            members, depth = [], indent
            if kind == "enum":
                found.enums.add(subject)
            else:
                found.members[subject] = members
            if kind == "union":
                found.unions.add(subject)
        elif match := re.fullmatch(r"ctypedef .*\(\*(\w+)\)\(.*\)", line):
            found.callbacks.add(match[1])
        elif line.startswith("ctypedef "):
            alias = _variable(line.removeprefix("ctypedef "))
            found.aliases[alias.name] = alias.type
        elif match := re.fullmatch(r"cdef (?:CUresult|cudaError_t) (\w+)\((.*)\) except.*", line):
            parameters = [_variable(each) for each in match[2].split(", ") if each]
            found.functions[match[1]] = parameters
    return found


def fold(found: Declarations, subject: str, first: int, end: int) -> None:
    """Put members into a union that the declarations leave out, as it has no name in C."""
    members = found.members[subject]
    union = f"{subject}_union"
    found.members[union] = members[first:end]
    found.unions.add(union)
    members[first:end] = [Variable("union", Type(union))]
