"""Where CPython keeps what a thread needs to read its own frames without the GIL.

The structures of a minor version do not change. A build that is not known here, or that answers
otherwise than expected, has no stacks: reports say so, and are the same but for the lines.
"""

from __future__ import annotations

import ctypes
import sys
import sysconfig
import types


class Layout(ctypes.Structure):
    """`Layout` of the logger."""

    _fields_ = [
        ("thread_state", ctypes.c_void_p),
        ("code_type", ctypes.c_void_p),
        *(
            (name, ctypes.c_int32)
            for name in (
                "state_frame",
                "indirect_frame",
                "frame_code",
                "frame_previous",
                "frame_instruction",
                "frame_owner",
                "owner_c_stack",
                "code_tag",
                "code_filename",
                "code_name",
                "code_first_line",
                "code_lines",
                "code_instructions",
                "code_version",
                "text_length",
                "text_state",
                "text_ascii",
                "text_compact",
                "text_shift",
                "bytes_length",
                "bytes_data",
            )
        ),
    ]


# What `offsetof` says with the headers of each, for 64 bits and a build with the GIL.
_COMMON = {
    "code_version": -1,
    "code_filename": 112,
    "code_name": 128,
    "code_lines": 136,
    "frame_instruction": 56,
    "text_length": 16,
    "text_state": 32,
    "bytes_length": 16,
    "bytes_data": 32,
}
_OFFSETS = {
    (3, 11): {
        "code_tag": 0,
        "state_frame": 56,
        "indirect_frame": 8,
        "frame_code": 32,
        "frame_previous": 48,
        "frame_owner": 69,
        "owner_c_stack": 255,
        "code_first_line": 72,
        "code_instructions": 184,
        "text_ascii": 48,
        "text_compact": 72,
    },
    (3, 12): {
        "code_tag": 0,
        "state_frame": 56,
        "indirect_frame": 0,
        "frame_code": 0,
        "frame_previous": 8,
        "frame_owner": 70,
        "owner_c_stack": 3,
        "code_first_line": 68,
        "code_version": 92,
        "code_instructions": 192,
        "text_ascii": 40,
        "text_compact": 56,
    },
    (3, 13): {
        "code_tag": 0,
        "state_frame": 72,
        "indirect_frame": -1,
        "frame_code": 0,
        "frame_previous": 8,
        "frame_owner": 70,
        "owner_c_stack": 3,
        "code_first_line": 68,
        "code_version": 92,
        "code_instructions": 200,
        "text_ascii": 40,
        "text_compact": 56,
    },
}


# Where CPython 3.14 itself has them: `_Py_DebugOffsets`, at the start of `_PyRuntime`.
_TOLD = {
    "state_frame": (176, 208),  # the size of the structure, and the offset of its member
    "frame_previous": (248, 256),
    "frame_code": (248, 264),
    "frame_instruction": (248, 272),
    "frame_owner": (248, 288),
    "code_filename": (312, 320),
    "code_name": (312, 336),
    "code_lines": (312, 344),
    "code_first_line": (312, 352),
    "code_instructions": (312, 384),
}
_TEXT_SHIFTS = (2, 8, 16)  # bits of `state` before the width of a character


def layout() -> Layout | None:
    """Return the layout of this interpreter, None if it is not known."""
    usual = (
        sys.implementation.name == "cpython"
        and sys.maxsize > 1 << 32
        and not sysconfig.get_config_var("Py_GIL_DISABLED")
        and not sysconfig.get_config_var("Py_DEBUG")
        and not sysconfig.get_config_var("Py_TRACE_REFS")
    )
    if not usual or sys.version_info.releaselevel != "final":
        return None
    offsets = _OFFSETS.get(sys.version_info[:2]) or _told()
    if offsets is None:
        return None
    state = ctypes.cast(ctypes.pythonapi.PyGILState_GetThisThreadState, ctypes.c_void_p)
    for shift in _TEXT_SHIFTS:
        known = {**_COMMON, **offsets, "text_shift": shift}
        found = Layout(state.value, id(types.CodeType), **known)
        if _reads(found):
            if not _counts(found.code_version):
                found.code_version = -1
            return found
    return None


def _told() -> dict[str, int] | None:
    """Return what the interpreter publishes about itself."""
    version = tuple(sys.version_info[:2])
    if version != (3, 14):
        return None
    runtime = ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, "_PyRuntime"))

    def word(offset: int) -> int:
        return ctypes.c_uint64.from_address(runtime + offset).value

    if ctypes.string_at(runtime, 8) != b"xdebugpy" or word(8) >> 16 != 0x030E or word(16):
        return None
    found = {name: word(offset) for name, (_, offset) in _TOLD.items()}
    if any(found[name] + 4 > word(size) for name, (size, _) in _TOLD.items()):
        return None
    return {
        **found,
        "indirect_frame": -1,
        "owner_c_stack": 3,  # and the interpreter's own
        "code_tag": 7,
        "text_ascii": 40,
        "text_compact": 56,
    }


def without_stacks() -> Layout:
    """Return a layout for which no frame is read."""
    return Layout()


def _counts(offset: int) -> bool:
    """Return whether code objects that are made one after the other have growing numbers there."""
    if offset < 0:
        return False
    codes = [compile("pass", "<numbered>", "exec") for _ in range(3)]
    numbers = [ctypes.c_uint32.from_address(id(code) + offset).value for code in codes]
    return 0 < numbers[0] < numbers[1] < numbers[2] < numbers[0] + (1 << 16)


def _reads(found: Layout) -> bool:
    """Tell whether the layout is right for a code object and a few texts."""

    def word(obj: object, offset: int) -> int:
        return ctypes.c_uint64.from_address(id(obj) + offset).value

    code = _reads.__code__
    if word(code, found.code_filename) != id(code.co_filename):
        return False
    if word(code, found.code_name) != id(code.co_qualname):
        return False
    if word(code, found.code_lines) != id(code.co_linetable):
        return False
    first_line = ctypes.c_int32.from_address(id(code) + found.code_first_line).value
    if first_line != code.co_firstlineno:
        return False
    lines = code.co_linetable
    if word(lines, found.bytes_length) != len(lines):
        return False
    if ctypes.string_at(id(lines) + found.bytes_data, len(lines)) != lines:
        return False
    for text, width, ascii_ in (("ab", 1, 1), ("\xe9b", 1, 0), ("€b", 2, 0), ("😀b", 4, 0)):
        state = ctypes.c_uint32.from_address(id(text) + found.text_state).value
        state >>= found.text_shift
        if (state & 7, state >> 3 & 1, state >> 4 & 1) != (width, 1, ascii_):
            return False
        if word(text, found.text_length) != 2:
            return False
        data = found.text_ascii if ascii_ else found.text_compact
        encoded = text.encode({1: "latin-1", 2: "utf-16-le", 4: "utf-32-le"}[width])
        if ctypes.string_at(id(text) + data, 2 * width) != encoded:
            return False
    return True
