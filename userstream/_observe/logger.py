"""The logger: a library in C that no thread of the program waits for."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING, Any

from userstream import _built, _process
from userstream._observe.judge.functions import ENTER, LEAVE, Function
from userstream._observe.layouts import Layout, layout, without_stacks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_NO_WORD = 255
_CHUNK = 1 << 18
_FRAMES = 48


class _Fetch(ctypes.Structure):
    _fields_ = [
        ("bytes", ctypes.c_uint32),
        ("word", ctypes.c_uint8),
        ("count_word", ctypes.c_uint8),
        ("sites", ctypes.c_uint8),
        ("unused", ctypes.c_uint8),
    ]


class _Address(ctypes.Structure):
    _fields_ = [("word", ctypes.c_uint8), ("within", ctypes.c_uint8), ("offset", ctypes.c_uint16)]


class _Rule(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_uint8)
            for name in (
                "sites",
                "words",
                "stream",
                "ends_stream",
                "frees",
                "freed",
                "allocates",
                "allocated",
                "source_size",
                "orders_host",
                "failures",
                "forgets",
                "kernel",
                "parameters",
                "extra",
                "configuration",
                "written",
                "written_bytes",
                "batch",
            )
        ),
        ("addresses", _Address * 2),
        ("fetches", _Fetch * 3),
    ]


# By their names in `Driver` of the logger. One that a driver lacks is left out.
DRIVER_FUNCTIONS = {
    "pointer_attributes": "cuPointerGetAttributes",
    "stream_flags": "cuStreamGetFlags",
    "stream_context": "cuStreamGetCtx",
    "stream_status": "cuStreamIsCapturing",
    "stream_query": "cuStreamQuery",
    "function_parameter": "cuFuncGetParamInfo",
    "kernel_parameter": "cuKernelGetParamInfo",
    "function_name": "cuFuncGetName",
    "kernel_name": "cuKernelGetName",
    "copy_out": "cuMemcpyDtoHAsync_v2",
    "write_value": "cuStreamWriteValue32_v2",
    "host_register": "cuMemHostRegister_v2",
    "capture_mode": "cuThreadExchangeStreamCaptureMode",
}


class Driver(ctypes.Structure):
    """The driver functions that the logger itself calls; none of them waits."""

    _fields_ = [(name, ctypes.c_void_p) for name in DRIVER_FUNCTIONS]


def address_of(function: Any) -> int | None:
    """Return where a function of C is."""
    return ctypes.cast(function, ctypes.c_void_p).value


class Logger:
    """The one of this process; see ``logger/logger.c``."""

    def __init__(self) -> None:
        self._library = library = _built.load(_built.RECORDER)
        library.logger_read.restype = ctypes.c_size_t
        library.logger_code.restype = ctypes.c_void_p
        library.logger_without_stack.restype = ctypes.c_uint64
        self._buffer = ctypes.create_string_buffer(_CHUNK)
        self._layout = self._checked_layout()

    @property
    def has_stacks(self) -> bool:
        """Whether the frames of this interpreter can be read."""
        return bool(self._layout.thread_state)

    @property
    def call(self) -> Any:
        """The function to be told of calls."""
        return self._library.logger_call

    @property
    def cupti_call(self) -> Any:
        """The function for CUPTI to call."""
        return self._library.logger_cupti

    def cupti_signature(self, number: int, sizes: str, per_thread: int | None) -> None:
        """Say what the arguments of one of CUPTI's functions are."""
        word = _NO_WORD if per_thread is None else per_thread
        self._library.logger_cupti_signature(number, sizes.encode(), word)

    def watch(self, functions: Mapping[int, Function]) -> None:
        """Say what is written down, by the number of each function, and nothing else is."""
        self._library.logger_no_rules()
        for number, function in functions.items():
            self._library.logger_rule(number, ctypes.byref(_rule(function)))

    def take_account(self, address: int) -> None:
        """Say which function of C returns where the account of the calling thread is."""
        self._library.logger_account(ctypes.c_void_p(address))

    def begin(self, driver: Driver) -> None:
        """Begin to write."""
        self._library.logger_begin(ctypes.byref(driver), ctypes.byref(self._layout))

    def end(self) -> None:
        """Write no more."""
        self._library.logger_end()

    def note(self, what: int, words: Sequence[int], data: bytes = b"") -> None:
        """Write down what is no driver call, if it is observed."""
        count = len(words)
        array = (ctypes.c_uint64 * count)(*words)
        self._library.logger_note(what, array, count, data, len(data))

    def read(self) -> tuple[bytes, int, int]:
        """Take what was written first; tell how much was lost until now, and what is left."""
        lost, left = ctypes.c_uint64(), ctypes.c_uint32()
        size = self._library.logger_read(
            self._buffer, _CHUNK, ctypes.byref(lost), ctypes.byref(left)
        )
        return ctypes.string_at(self._buffer, size), lost.value, left.value

    def own_stack(self) -> int:
        """Return the index of the stack of the calling thread."""
        index: int = self._library.logger_own_stack()
        return index

    def new_stacks(self) -> Iterator[tuple[int, list[tuple[int, int]]]]:
        """Take the stacks that are new in this observation, with their codes and places."""
        while (index := self._library.logger_new_stack()) >= 0:
            yield index, self.stack(index)

    def stack(self, index: int) -> list[tuple[int, int]]:
        """Return the codes of a stack and the places in them, the innermost first."""
        pairs = (ctypes.c_uint32 * (2 * _FRAMES))()
        count = self._library.logger_stack(index, pairs)
        return [(pairs[2 * i], pairs[2 * i + 1]) for i in range(count)]

    def code(self, index: int) -> tuple[str, str, bytes, int]:
        """Return the file, the name, the table of lines and the first line of a code."""
        size, width, first_line = ctypes.c_uint32(), ctypes.c_uint32(), ctypes.c_int32()
        found = []
        for which in range(3):
            text = self._library.logger_code(
                index, which, ctypes.byref(size), ctypes.byref(width), ctypes.byref(first_line)
            )
            data = ctypes.string_at(text, size.value) if text else b""
            found.append((data, width.value))
        encodings = {1: "latin-1", 2: "utf-16-le", 4: "utf-32-le"}
        file, name = (
            data.decode(encodings.get(width, "latin-1"), "replace") for data, width in found[:2]
        )
        return file, name, found[2][0], first_line.value

    def without_stack(self) -> int:
        """Return how many calls have no stack because there were too many different ones."""
        count: int = self._library.logger_without_stack()
        return count

    def _checked_layout(self) -> Layout:
        """Give the layout by which this very function finds itself, else none."""
        found = layout()
        if found is None:
            return without_stacks()
        self._library.logger_begin(ctypes.byref(Driver()), ctypes.byref(found))
        index = self._library.logger_own_stack()
        self._library.logger_end()
        frames = [self.code(code)[1] for code, _ in self.stack(index)]
        mine = Logger._checked_layout.__code__.co_qualname
        return found if frames and frames[0] == mine else without_stacks()


def _rule(function: Function) -> _Rule:
    def word(number: int | None) -> int:
        return _NO_WORD if number is None else number

    addresses = (_Address * 2)(_Address(_NO_WORD), _Address(_NO_WORD))
    for place, operand in enumerate(function.operands):
        if isinstance(operand, tuple):
            addresses[place] = _Address(operand[0], 1, operand[1])
        else:
            addresses[place] = _Address(operand)
    sites = LEAVE if function.allocates is not None else ENTER | LEAVE
    fetches = (_Fetch * 3)()
    for place, fetch in enumerate(function.fetches):
        fetches[place] = _Fetch(fetch.size, fetch.word, word(fetch.count), sites)
    copies = function.means == "copy"
    return _Rule(
        sites=function.sites,
        words=function.words,
        stream=word(function.stream),
        ends_stream=function.ends_stream,
        frees=word(function.frees),
        freed=word(function.size if function.frees is not None else None),
        allocates=word(function.allocates),
        allocated=word(function.size if function.allocates is not None else None),
        source_size=word(function.size if copies else None),
        orders_host=function.orders_host,
        failures=function.frees is not None or function.means == "end_capture",
        forgets=function.forgets,
        kernel=word(function.roles.get("kernel")),
        parameters=word(function.roles.get("parameters")),
        extra=word(function.roles.get("extra")),
        configuration=word(function.roles.get("configuration")),
        written=word(function.roles.get("written")),
        written_bytes=function.roles.get("bytes", 0),
        batch=word(3 if function.means == "copy_batch" else None),
        addresses=addresses,
        fetches=fetches,
    )


_lock = _process.Lock()
_logger: Logger | None = None


def _in_child() -> None:
    global _lock  # noqa: PLW0603 -- another thread of the parent may have held it
    _lock = _process.Lock()


os.register_at_fork(after_in_child=_in_child)


def the_logger() -> Logger:
    """Return the logger of this process, compiled and loaded unless that was done before."""
    global _logger  # noqa: PLW0603 -- there is one
    with _lock:
        if _logger is None:
            _logger = Logger()
        return _logger
