"""CUPTI as the maker of records: what it gives, and a stand-in of it over the simulated driver."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable
from typing import Any

import pytest

import observed
import userstream as us
from userstream._observe import cupti, observation
from userstream._observe.judge import functions
from userstream._observe.judge.functions import LEAVE, Function
from userstream._observe.logger import DRIVER_FUNCTIONS, Driver, address_of, the_logger
from userstream.testing._simulated import _side_door

pytestmark = [
    pytest.mark.simulated,  # test_observe.py runs on a GPU, where CUPTI is itself
    pytest.mark.no_races(False),
]


class CallbackData(ctypes.Structure):
    """As cupti_callbacks.h declares it."""

    _fields_ = [
        ("callbackSite", ctypes.c_int),
        ("functionName", ctypes.c_char_p),
        ("functionParams", ctypes.c_void_p),
        ("functionReturnValue", ctypes.c_void_p),
        ("symbolName", ctypes.c_char_p),
        ("context", ctypes.c_void_p),
        ("contextUid", ctypes.c_uint32),
        ("correlationData", ctypes.c_void_p),
        ("correlationId", ctypes.c_uint32),
    ]


P, U, B, H = ctypes.c_void_p, ctypes.c_uint, ctypes.c_ubyte, ctypes.c_ushort

# As the driver declares them: the compiler of C and ctypes lay them out the same way.
DECLARED: dict[str, list[Any]] = {
    "cuLaunchKernel": [P, U, U, U, U, U, U, U, P, P, P],
    "cuLaunchCooperativeKernel": [P, U, U, U, U, U, U, U, P, P],
    "cuMemsetD8Async": [P, B, P, P],
    "cuMemsetD2D16Async": [P, P, H, P, P, P],
    "cuMemsetD32_v2": [P, U, P],
    "cuMemcpyPeerAsync": [P, P, P, P, P, P],
    "cuStreamWaitValue32_v2": [P, P, U, U],
    "cuStreamWaitValue64_v2": [P, P, P, U],
    "cuStreamBatchMemOp_v2": [P, U, P, U],
    "cuStreamBeginCaptureToGraph": [P, P, P, P, P, U],
    "cuCtxCreate_v3": [P, P, U, U, U],
    "cuMemHostAlloc": [P, P, U],
}


def test_every_function_has_a_signature() -> None:
    for symbol in (*functions.FUNCTIONS, "cuMemcpyBatchAsync_v2"):
        named = cupti.watched(symbol)
        assert named is not None
        name, function = named
        if name == "cuGraphExecUpdate_v2":
            continue
        assert len(cupti.signature(name)) >= function.words, name


@pytest.mark.parametrize("name", DECLARED)
def test_arguments_are_read_as_c_lays_them_out(name: str) -> None:
    kinds = DECLARED[name]
    assert len(kinds) == len(cupti.signature(name))
    fields = [(f"a{i}", kind) for i, kind in enumerate(kinds)]
    arguments = type("Arguments", (ctypes.Structure,), {"_fields_": fields})
    values = [
        (0x1122334455667788 + i) & (1 << 8 * ctypes.sizeof(k)) - 1 for i, k in enumerate(kinds)
    ]
    logger = the_logger()
    logger.watch({1: Function("", len(kinds), sites=LEAVE)})
    logger.cupti_signature(1, cupti.signature(name), None)
    result = ctypes.c_int(0)
    given = arguments(*values)
    begin, data = (
        CallbackData(site, b"", ctypes.addressof(given), ctypes.addressof(result), b"", 77)
        for site in (0, 1)
    )
    logger.begin(Driver())
    try:
        logger.cupti_call(None, 1, 1, ctypes.byref(begin))
        logger.cupti_call(None, 1, 1, ctypes.byref(data))
        logger.cupti_call(None, 2, 1, ctypes.byref(data))  # of another domain
        (record,) = functions.read_log(logger.read()[0])
    finally:
        logger.end()
        logger.watch({1: Function("", 0, sites=0)})
    assert [*record.words] == values
    assert record.context == 77


OBSERVER = ctypes.CFUNCTYPE(
    None,
    ctypes.c_int,
    ctypes.c_uint,
    ctypes.POINTER(ctypes.c_uint64),
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_void_p,
)


class StandIn:
    """What `Cupti` uses of libcupti, over the simulated driver; its numbers are others."""

    FIRST = 100

    def __init__(self) -> None:
        self.driver = _side_door("a test")
        self.driver.userstream_symbol.restype = ctypes.c_char_p
        self.driver.userstream_observe.argtypes = [ctypes.c_void_p]
        self.enabled: set[int] = set()
        self.inside = threading.local()  # CUPTI's callback is C; this one takes the GIL
        self.observer: Any = None
        self.answer = 0

    def cuptiGetCallbackName(self, domain: int, number: int, out: Any) -> int:
        name = self.driver.userstream_symbol(number - self.FIRST) if number >= self.FIRST else None
        out._obj.value = name
        return 0 if name else 1

    def cuptiGetResultString(self, status: int, out: Any) -> int:
        out._obj.value = b"CUPTI_ERROR_OF_THE_TEST"
        return 0

    def cuptiEnableCallback(self, enable: int, subscriber: Any, domain: int, number: int) -> int:
        assert (enable, domain) == (1, 1)
        self.enabled.add(number)
        return 0

    def cuptiSubscribe(self, out: Any, call: Any, user: Any) -> int:
        if self.answer:
            return self.answer
        out._obj.value = 5

        def tell(
            site: int, number: int, words: Any, count: int, result: int, context: int | None
        ) -> None:
            if number + self.FIRST not in self.enabled:
                return
            name = self.driver.userstream_symbol(number).decode()
            sizes = cupti.signature(name)
            letters = {"1": "B", "2": "H", "4": "I", "8": "Q"}
            values = [words[i] & (1 << 8 * int(size)) - 1 for i, size in enumerate(sizes[:count])]
            packed = struct.pack("@" + "".join(letters[size] for size in sizes[:count]), *values)
            status = ctypes.c_int(result)
            where = ctypes.cast(ctypes.c_char_p(packed), ctypes.c_void_p).value
            data = CallbackData(site, b"", where, ctypes.addressof(status), b"", context)
            call(None, 1, number + self.FIRST, ctypes.byref(data))

        self.observer = OBSERVER(tell)
        assert self.driver.userstream_observe(address_of(self.observer))
        return 0

    def cuptiUnsubscribe(self, subscriber: Any) -> int:
        assert subscriber.value == 5
        self.driver.userstream_observe(None)
        return 0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    monkeypatch.setattr(cupti, "_library", lambda: stand_in)
    the_logger()  # is loaded by it too, at its first use
    monkeypatch.setattr(ctypes, "CDLL", lambda name: stand_in.driver)
    monkeypatch.setattr(observation, "_maker", cupti.Cupti)
    # Its batch has the arguments of CUDA 13.
    signatures = {**cupti._SIGNATURES, "cuMemcpyBatchAsync": "88888888"}
    monkeypatch.setattr(cupti, "_SIGNATURES", signatures)
    return stand_in


# Its callback is Python's: the innermost frame is no longer the one that made the call.
NEED_FRAMES = (
    observed.housekeeping_is_no_order,
    observed.housekeeping_inside_of_a_wait_for_something_else,
    observed.future_was_told,
)
CASES = [case for case in (*observed.REPORTED, *observed.SILENT) if case not in NEED_FRAMES]


@pytest.mark.parametrize("case", CASES)
def test_it_finds_the_same(library: StandIn, case: Callable[[Any], str | None]) -> None:
    seen, kind = observed.watched(case)
    assert library.enabled
    assert {race.kind for race in seen.races} == ({kind} if kind else set()), seen


def test_another_subscriber_is_named(library: StandIn) -> None:
    for status, said in ((39, "another tool uses CUPTI"), (12, "another"), (3, "OF_THE_TEST")):
        library.answer = status
        with pytest.raises(us.NotSupportedError, match=said), us.observe():
            pass
    library.answer = 0
    with us.observe():
        pass


def test_without_cupti_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupti, "_installed", lambda: None)

    def refuse(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    with pytest.raises(us.NotSupportedError, match="pip install nvidia-cuda-cupti"):
        cupti._library()


def test_the_functions_that_the_logger_calls_exist() -> None:
    for name in DRIVER_FUNCTIONS.values():
        assert hasattr(_side_door("a test"), name), name
