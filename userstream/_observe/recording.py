"""The recorder: a library in C that no thread of the program waits for."""

from __future__ import annotations

import ctypes
import json
import os
import re
from typing import TYPE_CHECKING, Any

from userstream import _built, _driver, _process
from userstream._driver import account
from userstream.errors import NotSupportedError
from userstream.testing import _simulated

if TYPE_CHECKING:
    from collections.abc import Sequence

    from userstream._observe.judge.trials import Pair, Reported

MEMORY = 256 << 20  # bytes of records that wait for the judge: then a file takes them
_PART = 32 << 10  # bytes of a note that is written in parts
_MAILBOX = 256 << 10  # bytes that are received at once
_INSTALL = (
    "install it with `pip install nvidia-cuda-cupti` (CUDA 13) or `pip install "
    "nvidia-cuda-cupti-cu12` (CUDA 12)"
)


class _Options(ctypes.Structure):
    """`Options` of ``native/session.c``."""

    _fields_ = [
        ("cupti", ctypes.c_char_p),
        ("file", ctypes.c_int32),
        ("judge", ctypes.c_int32),
        ("judges_here", ctypes.c_uint32),
        ("memory", ctypes.c_uint64),
        ("account", ctypes.c_void_p),
        ("holds", ctypes.c_uint32),
        ("holds_of_pair", ctypes.c_uint32),
        ("reported_count", ctypes.c_uint32),
        ("reported", ctypes.c_void_p),
    ]


class _Reported(ctypes.Structure):
    """`Reported` of ``native/parts.h``."""

    _fields_ = [("files", ctypes.c_char_p * 2), ("lines", ctypes.c_uint32 * 2)]


class Recorder:
    """The recorder of this process; see ``native/session.c``."""

    def __init__(self) -> None:
        self._library = library = _built.load(_built.RECORDER)
        library.recorder_begin.restype = ctypes.c_char_p
        library.recorder_note.restype = ctypes.c_bool
        library.recorder_note.argtypes = [
            ctypes.c_uint,
            ctypes.c_void_p,
            ctypes.c_uint,
            ctypes.c_char_p,
            ctypes.c_uint32,
        ]
        library.recorder_arm.restype = ctypes.c_bool
        library.recorder_arm.argtypes = [
            ctypes.c_uint32,
            ctypes.c_int32,
            ctypes.c_int32,
            ctypes.c_uint64,
            ctypes.c_uint64,
            ctypes.c_uint64,
            ctypes.c_bool,
        ]
        library.recorder_close.restype = ctypes.c_bool
        library.recorder_has_stacks.restype = ctypes.c_bool
        library.recorder_receive.restype = ctypes.c_size_t
        library.recorder_receive.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint]
        self._buffer = ctypes.create_string_buffer(_MAILBOX)
        self._reported: ctypes.Array[_Reported]  # which the recorder reads as long as it records

    @property
    def has_stacks(self) -> bool:
        """Whether the frames of this interpreter can be read."""
        answer: bool = self._library.recorder_has_stacks()
        return answer

    def begin(
        self,
        *,
        file: int = -1,
        judge: int = -1,
        judges_here: bool = False,
        memory: int = MEMORY,
        holds: tuple[int, int] = (0, 0),
        reported: Sequence[Reported] = (),
    ) -> None:
        """Start recording, to a file and to a judge.

        Parameters
        ----------
        file, judge : int
            Descriptors of a file and of the socket of a judge in another process, of which
            duplicates are used; -1 for none.
        judges_here : bool
            Whether the judge gets the log by `receive`.
        memory : int
            How many bytes may wait to be written or judged: when half of that is full, a file takes
            what the judge has not taken.
        holds : tuple of int
            How often a stream may be held to make a race happen, in all and for the same pair of
            lines: see `arm`.
        reported : sequence of Reported
            Pairs that are tried from the first time on.

        Raises
        ------
        NotSupportedError
            CUPTI is missing, or another tool uses it.
        RuntimeError
            The process is recorded already.
        """
        cupti = None
        if not _simulated.is_simulated():
            _driver.library.ensure()
            cupti = path_of_cupti()
        pairs = (_Reported * len(reported))(*map(_as_structure, reported))
        options = _Options(
            None if cupti is None else os.fsencode(cupti),
            file,
            judge,
            judges_here,
            memory,
            account.address(),
            holds=holds[0],
            holds_of_pair=holds[1],
            reported_count=len(reported),
            reported=ctypes.addressof(pairs),
        )
        error: bytes | None = self._library.recorder_begin(ctypes.byref(options))
        if error is None:
            self._reported = pairs
            return
        text = error.decode(errors="replace")
        if cupti is None:
            raise RuntimeError(text)
        raise NotSupportedError(f"{text} ({_INSTALL})" if "not found" in text else text)

    def end(self, reason: str) -> None:
        """Stop recording. The judge gets the last records until `close` returns."""
        self._library.recorder_end(reason.encode())

    def close(self) -> bool:
        """Return whether everything is written, and the judge has taken it."""
        is_closed: bool = self._library.recorder_close()
        return is_closed

    def receive(self, seconds: float) -> bytes:
        """Return the next piece of the log, or what a judge in another process answers.

        There is none after some time, or after `ring`.
        """
        size = self._library.recorder_receive(self._buffer, _MAILBOX, int(seconds * 1000))
        return ctypes.string_at(self._buffer, size)

    def ring(self) -> None:
        """Wake up a blocked `receive`, which then returns."""
        self._library.recorder_ring()

    def hang_up(self) -> None:
        """Close the mailbox of `receive`, which is not called again: later data is dropped."""
        self._library.recorder_hang_up()

    def note(self, type_: int, words: Sequence[int] = (), data: bytes = b"") -> bool:
        """Record a note, which is no driver call; return whether the note is recorded."""
        count = len(words)
        array = (ctypes.c_uint64 * count)(*words)
        written: bool = self._library.recorder_note(type_, array, count, data, len(data))
        return written

    def note_json(self, type_: int, told: Any) -> bool:
        """Record facts of Python as JSON; return whether they are recorded."""
        return self.note(type_, (), json.dumps(told, separators=(",", ":")).encode())

    def note_in_parts(self, type_: int, told: Any) -> None:
        """Record facts of Python as JSON, in several records if necessary."""
        data = json.dumps(told, separators=(",", ":")).encode()
        for at in range(0, len(data), _PART):
            self.note(type_, (int(at + _PART < len(data)),), data[at : at + _PART])

    def arm(self, pair: Pair) -> None:
        """Try to make a race happen from now on, or to order its operations, if that is possible.

        Another pair of the same number takes the place of that one.
        """
        self._library.recorder_arm(*pair)

    def disarm(self, number: int) -> None:
        """End the trials of the pair with a number."""
        self._library.recorder_disarm(number)

    def threads(self) -> int:
        """Return a number that changes when another thread is recorded for the first time."""
        count: int = self._library.recorder_threads()
        return count

    def log_error(self) -> OSError | None:
        """Return the error that ended the writing of the log, or `None`."""
        number = self._library.recorder_log_error()
        return OSError(number, os.strerror(number)) if number else None


def _as_structure(pair: Reported) -> _Reported:
    places = [place or ("", 0) for place in pair]
    files = [file.encode("utf-8", "surrogatepass") for file, _ in places]
    return _Reported((ctypes.c_char_p * 2)(*files), (ctypes.c_uint32 * 2)(*(n for _, n in places)))


_lock = _process.Lock()
_recorder: Recorder | None = None


def _in_child() -> None:
    global _lock  # noqa: PLW0603 -- another thread of the parent may have held it
    _lock = _process.Lock()


os.register_at_fork(after_in_child=_in_child)


def the_recorder() -> Recorder:
    """Return the recorder of this process, loaded unless that was done before."""
    global _recorder  # noqa: PLW0603 -- there is one
    with _lock:
        if _recorder is None:
            _recorder = Recorder()
        return _recorder


# -- CUPTI ----------------------------------------------------------------------------------------


def path_of_cupti() -> str:
    """Return the path of CUPTI: of the loaded copy, as two do not work, else of any copy."""
    return _loaded() or _installed() or "libcupti.so"


def _loaded() -> str | None:
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            path = line.rstrip("\n").split(maxsplit=5)[-1]
            if re.match(r"libcupti\.so(\.|$)", os.path.basename(path)):
                return path
    return None


def _installed() -> str | None:
    from cuda import pathfinder

    try:
        path: str | None = pathfinder.load_nvidia_dynamic_lib("cupti").abs_path
    except Exception:  # older versions do not know it, and each says so in its own way
        path = _of_wheel()
    return path


def _of_wheel() -> str | None:
    import importlib.metadata

    for name in ("nvidia-cuda-cupti", "nvidia-cuda-cupti-cu13", "nvidia-cuda-cupti-cu12"):
        try:
            files = importlib.metadata.files(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            if re.match(r"libcupti\.so", file.name):
                return os.fspath(file.locate())
    return None
