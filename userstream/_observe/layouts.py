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
    "code_tag": 0,
    "code_filename": 112,
    "code_name": 128,
    "code_lines": 136,
    "frame_instruction": 56,
    "text_length": 16,
    "text_state": 32,
    "text_shift": 2,
    "bytes_length": 16,
    "bytes_data": 32,
}
_OFFSETS = {
    (3, 11): {
        "state_frame": 56,
        "indirect_frame": 8,
        "frame_code": 32,
        "frame_previous": 48,
        "frame_owner": 69,
        "owner_c_stack": -1,
        "code_first_line": 72,
        "code_instructions": 184,
        "text_ascii": 48,
        "text_compact": 72,
    },
    (3, 12): {
        "state_frame": 56,
        "indirect_frame": 0,
        "frame_code": 0,
        "frame_previous": 8,
        "frame_owner": 70,
        "owner_c_stack": 3,
        "code_first_line": 68,
        "code_instructions": 192,
        "text_ascii": 40,
        "text_compact": 56,
    },
    (3, 13): {
        "state_frame": 72,
        "indirect_frame": -1,
        "frame_code": 0,
        "frame_previous": 8,
        "frame_owner": 70,
        "owner_c_stack": 3,
        "code_first_line": 68,
        "code_instructions": 200,
        "text_ascii": 40,
        "text_compact": 56,
    },
}


def layout() -> Layout | None:
    """Return the layout of this interpreter, None if it is not known."""
    offsets = _OFFSETS.get(sys.version_info[:2])
    usual = (
        sys.implementation.name == "cpython"
        and sys.maxsize > 1 << 32
        and not sysconfig.get_config_var("Py_GIL_DISABLED")
        and not sysconfig.get_config_var("Py_DEBUG")
        and not sysconfig.get_config_var("Py_TRACE_REFS")
    )
    if offsets is None or not usual or sys.version_info.releaselevel != "final":
        return None
    state = ctypes.cast(ctypes.pythonapi.PyGILState_GetThisThreadState, ctypes.c_void_p)
    found = Layout(state.value, id(types.CodeType), **_COMMON, **offsets)
    return found if _reads(found) else None


def without_stacks() -> Layout:
    """Return a layout for which no frame is read."""
    return Layout()


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
    for text, width, ascii_ in (("ab", 1, 1), ("\xe9b", 1, 0), ("€b", 2, 0), ("😀b", 4, 0)):
        state = ctypes.c_uint32.from_address(id(text) + found.text_state).value
        state >>= found.text_shift
        if (state & 7, state >> 3 & 1, state >> 4 & 1) != (width, 1, ascii_):
            return False
        if word(text, found.text_length) != 2:
            return False
    return True
