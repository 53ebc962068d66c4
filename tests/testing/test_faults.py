"""inject(), async_error(), calls(), reset()."""

from __future__ import annotations

import ctypes
import threading

import pytest
from cuda.bindings import driver
from cuda.core import Device

from helpers import in_thread
from internals import alive_in_driver
from userstream.testing import (
    UnusedInjection,
    async_error,
    calls,
    inject,
    latch,
    reset,
)

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("no_garbage")]

Result = driver.CUresult
SUCCESS = Result.CUDA_SUCCESS
ILLEGAL = Result.CUDA_ERROR_ILLEGAL_ADDRESS


@pytest.fixture(autouse=True)
def clean():
    reset()
    yield
    reset()


@pytest.fixture
def stream():
    device = Device(0)
    before = driver.cuCtxGetCurrent()[1]
    device.set_current()
    stream = device.create_stream()
    yield stream
    reset()
    stream.sync()
    stream.close()
    driver.cuCtxSetCurrent(before)


def query(stream):
    return driver.cuStreamQuery(stream.handle)[0]


def queries(stream, count):
    return [int(query(stream)) for _ in range(count)]


# ---- inject -----------------------------------------------------------------


def test_one_call_fails(stream):
    inject("cuStreamQuery", ILLEGAL)
    assert queries(stream, 2) == [700, 0]


def test_several_calls_fail(stream):
    inject("cuStreamQuery", ILLEGAL, count=3)
    assert queries(stream, 5) == [700, 700, 700, 0, 0]


def test_the_first_calls_may_be_spared(stream):
    inject("cuStreamQuery", ILLEGAL, count=2, skip=1)
    assert queries(stream, 4) == [0, 700, 700, 0]


def test_the_function_is_not_executed(stream):
    before = alive_in_driver().streams
    inject("cuStreamCreateWithPriority", Result.CUDA_ERROR_OUT_OF_MEMORY)
    assert driver.cuStreamCreateWithPriority(1, 0)[0] == Result.CUDA_ERROR_OUT_OF_MEMORY
    assert alive_in_driver().streams == before


def test_other_functions_work(stream):
    inject("cuStreamQuery", ILLEGAL)
    assert driver.cuStreamSynchronize(stream.handle)[0] == SUCCESS
    assert driver.cuStreamGetFlags(stream.handle)[0] == SUCCESS


def test_an_integer_is_a_result(stream):
    inject("cuStreamQuery", 719)
    assert query(stream) == Result.CUDA_ERROR_LAUNCH_FAILED


def test_a_code_that_the_bindings_do_not_know(stream):
    inject("cuStreamQuery", 12345)
    with pytest.raises(ValueError, match="12345"):
        query(stream)
    assert query(stream) == SUCCESS


@pytest.mark.parametrize("name", ["cuMemAlloc", "cuMemAlloc_v2"])
def test_the_version_of_a_name_does_not_matter(stream, name):
    inject(name, Result.CUDA_ERROR_OUT_OF_MEMORY)
    assert driver.cuMemAlloc(64)[0] == Result.CUDA_ERROR_OUT_OF_MEMORY


def test_every_version_of_the_function_fails(stream):
    """The bindings of CUDA 13 call the second version of cuStreamGetCtx, those of 12 the first."""
    inject("cuStreamGetCtx", ILLEGAL)
    assert driver.cuStreamGetCtx(stream.handle)[0] == ILLEGAL


def test_a_block_ends_the_injection(stream):
    with inject("cuStreamQuery", ILLEGAL, count=100):
        assert queries(stream, 2) == [700, 700]
    assert query(stream) == SUCCESS


def test_a_block_ends_the_injection_after_an_error(stream):
    with pytest.raises(ZeroDivisionError), inject("cuStreamQuery", ILLEGAL, count=100):
        _ = 1 / 0
    assert query(stream) == SUCCESS


def test_a_block_ends_only_its_own_injection(stream):
    inject("cuStreamQuery", 1, skip=1)
    with inject("cuStreamQuery", ILLEGAL, skip=100, strict=False):
        pass
    assert queries(stream, 3) == [0, 1, 0]


def test_an_injection_for_this_thread_leaves_the_others_alone(stream):
    with inject("cuStreamQuery", ILLEGAL, skip=1, this_thread=True):
        assert in_thread(lambda: queries(stream, 3)) == [0, 0, 0]
        assert queries(stream, 3) == [0, 700, 0]


def test_a_used_up_injection_ends_quietly(stream):
    with inject("cuStreamQuery", ILLEGAL):
        assert queries(stream, 2) == [700, 0]


def test_two_injections_answer_one_after_the_other(stream):
    inject("cuStreamQuery", 1)
    inject("cuStreamQuery", 700)
    assert queries(stream, 3) == [1, 700, 0]


def test_an_injection_is_for_every_thread(stream):
    inject("cuStreamQuery", ILLEGAL, count=2)
    seen = []
    thread = threading.Thread(target=lambda: seen.append(query(stream)))
    thread.start()
    thread.join()
    assert [*seen, query(stream), query(stream)] == [ILLEGAL, ILLEGAL, SUCCESS]


def test_an_injection_may_precede_the_first_use():
    inject("cuDeviceGetCount", Result.CUDA_ERROR_NOT_INITIALIZED)
    assert driver.cuDeviceGetCount()[0] == Result.CUDA_ERROR_NOT_INITIALIZED


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (("cuStreamQuerry", 1), ValueError, "no function 'cuStreamQuerry'"),
        (("", 1), ValueError, "no function ''"),
        (("userstream_reset", 1), ValueError, "no function"),
        ((b"cuStreamQuery", 1), TypeError, "function must be a str, not bytes"),
        ((driver.cuStreamQuery, 1), TypeError, "function must be a str"),
        (("cuStreamQuery", "700"), TypeError, "CUresult or an int, not str"),
        (("cuStreamQuery", 700.0), TypeError, "CUresult or an int, not float"),
        (("cuStreamQuery", True), TypeError, "not bool"),
        (("cuStreamQuery", None), TypeError, "and the result that its calls return"),
        ((), TypeError, "a function and a result, or one of allocation=, copy=, "),
        ((None, 700), TypeError, "a function and the result"),
        (("cuStreamQuery", 0), ValueError, "error code"),
        (("cuStreamQuery", -1), ValueError, "error code"),
        (("cuStreamQuery", 1 << 31), ValueError, "error code"),
        (("cuStreamQuery", 1, 0), ValueError, "count must be at least 1"),
        (("cuStreamQuery", 1, -1), ValueError, "count must be at least 1"),
        (("cuStreamQuery", 1, 1, -1), ValueError, "skip at least 0"),
        (("cuStreamQuery", 1, 1.0), TypeError, "count must be an int"),
        (("cuStreamQuery", 1, 1, None), TypeError, "skip must be an int"),
    ],
)
def test_bad_injections(stream, arguments, error, text):
    with pytest.raises(error, match=text):
        inject(*arguments)
    assert query(stream) == SUCCESS


# ---- injections that test something ------------------------------------------


@pytest.mark.no_races(False)  # who watches adds to what is counted
def test_an_injection_that_never_fired_fails_its_block(stream):
    with pytest.raises(UnusedInjection) as raised, inject("cuMemAlloc", 2):
        _ = queries(stream, 2), driver.cuCtxGetCurrent()
    assert str(raised.value) == (
        "inject('cuMemAlloc', 2) never fired. Called in its block: "
        "cuCtxGetCurrent, cuStreamQuery (2 times).\n"
        "Pass strict=False if that may happen."
    )
    assert issubclass(UnusedInjection, AssertionError)


def test_it_says_what_the_library_calls_instead(stream):
    """A buffer of cuda.core comes from a pool, where there is one."""
    with pytest.raises(UnusedInjection, match=r"Called in its block: .*cuMemAllocFromPoolAsync"):
        with inject("cuMemAlloc", 2):
            Device(0).allocate(64, stream=stream)


def test_nothing_was_called():
    with pytest.raises(UnusedInjection, match="no driver function was called in its block"):
        with inject("cuMemAlloc", 2):
            pass


def test_too_few_calls(stream):
    text = r"inject\('cuStreamQuery', 1, skip=5\) never fired: .* \(cuStreamQuery \(3 times\)\)"
    with pytest.raises(UnusedInjection, match=text), inject("cuStreamQuery", 1, skip=5):
        queries(stream, 3)


def test_calls_of_other_threads_alone(stream):
    with pytest.raises(
        UnusedInjection, match=r"this_thread=True\) never fired: there were too few"
    ):
        with inject("cuStreamQuery", 1, this_thread=True):
            in_thread(lambda: query(stream))


def test_an_injection_that_may_stay_unused(stream):
    with inject("cuMemAlloc", 2, strict=False):
        pass


def test_one_call_of_many_is_enough(stream):
    with inject("cuStreamQuery", ILLEGAL, count=100):
        assert query(stream) == ILLEGAL


@pytest.mark.no_races(False)  # who watches adds to what is counted
def test_another_error_gets_a_note(stream):
    with pytest.raises(ZeroDivisionError) as raised, inject("cuMemAlloc", 2):
        _ = query(stream), 1 / 0
    assert raised.value.__notes__ == [
        "inject('cuMemAlloc', 2) never fired. Called in its block: cuStreamQuery."
    ]
    with pytest.raises(ZeroDivisionError) as raised, inject("cuStreamQuery", 1):
        _ = query(stream), 1 / 0
    assert not hasattr(raised.value, "__notes__")


def test_a_reset_takes_the_injection_along(stream):
    with inject("cuMemAlloc", 2):
        reset()
    queries(stream, 3)
    again = inject("cuMemAlloc", 2)
    reset()  # counts begin anew
    query(stream)
    assert (
        again._reason()
        == "inject('cuMemAlloc', 2) never fired. Called in its block: cuStreamQuery."
    )
    assert repr(again) == "<userstream.testing.inject('cuMemAlloc', 2)>"


# ---- by what programs do ----------------------------------------------------


def operations(stream):
    address = int(driver.cuMemAlloc(64)[1])
    host = ctypes.create_string_buffer(64)

    def shaped():
        copy = driver.CUDA_MEMCPY2D()
        device = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
        copy.srcMemoryType = copy.dstMemoryType = device
        copy.srcDevice, copy.dstDevice, copy.WidthInBytes, copy.Height = address, address + 32, 4, 4
        return driver.cuMemcpy2DAsync(copy, stream.handle)

    yield "allocation", lambda: driver.cuMemAlloc(64)
    yield "allocation", lambda: driver.cuMemAllocManaged(64, driver.CUmemAttach_flags(1))
    yield "allocation", lambda: driver.cuMemAllocAsync(64, stream.handle)
    yield "allocation", lambda: driver.cuMemHostAlloc(64, 0)
    yield "copy", lambda: driver.cuMemcpyHtoD(address, ctypes.addressof(host), 64)
    yield "copy", lambda: driver.cuMemcpyAsync(address, address + 32, 8, stream.handle)
    yield "copy", shaped
    yield "fill", lambda: driver.cuMemsetD32Async(address, 1, 4, stream.handle)
    yield "fill", lambda: driver.cuMemsetD2D8Async(address, 8, 1, 4, 4, stream.handle)
    yield "stream", lambda: driver.cuStreamCreate(1)
    yield "event", lambda: driver.cuEventCreate(2)
    yield "wait", lambda: driver.cuStreamSynchronize(stream.handle)
    yield "wait", lambda: driver.cuStreamQuery(stream.handle)
    yield "wait", driver.cuCtxSynchronize
    driver.cuMemFree(address)


def test_what_programs_do_fails_whichever_function_does_it(stream):
    for operation, call in operations(stream):
        with inject(**{operation: ILLEGAL}):
            assert call()[0] == ILLEGAL


def test_its_functions_share_one_count(stream):
    with inject(wait=ILLEGAL, count=2, skip=1):
        assert query(stream) == SUCCESS
        assert driver.cuStreamSynchronize(stream.handle)[0] == ILLEGAL
        assert driver.cuCtxSynchronize()[0] == ILLEGAL
        assert queries(stream, 3) == [0, 0, 0]
        assert driver.cuStreamSynchronize(stream.handle)[0] == SUCCESS


def test_what_was_not_done():
    with pytest.raises(UnusedInjection, match=r"^inject\(fill=2\) never fired"):
        with inject(fill=2):
            pass


@pytest.mark.parametrize(
    ("operation", "some"),
    [
        ("allocation", {"cuMemAlloc", "cuMemAllocFromPoolAsync", "cuMemHostAlloc"}),
        ("copy", {"cuMemcpyAsync", "cuMemcpy3DPeerAsync", "cuMemcpyDtoH"}),
        ("fill", {"cuMemsetD8Async", "cuMemsetD2D8Async"}),
        ("launch", {"cuLaunchKernel", "cuLaunchKernelEx", "cuLaunchCooperativeKernel"}),
        ("stream", {"cuStreamCreate", "cuStreamCreateWithPriority"}),
        ("event", {"cuEventCreate"}),
        ("wait", {"cuStreamQuery", "cuEventSynchronize", "cuCtxSynchronize"}),
    ],
)
def test_which_functions_do_it(operation, some):
    injection = inject(**{operation: 2})
    assert some <= {*injection._names}
    assert "cuLaunchHostFunc" not in injection._names


@pytest.mark.parametrize(
    "arguments",
    [{"copy": 2, "fill": 2}, {"function": "cuMemAlloc", "copy": 2}, {"result": 2, "copy": 2}],
)
def test_only_one_of_them(arguments):
    with pytest.raises(TypeError, match="pass a function and a result"):
        inject(**arguments)


# ---- calls ------------------------------------------------------------------


@pytest.mark.no_races(False)  # who watches adds to what is counted
def test_all_that_was_called(stream):
    reset()
    assert calls() == {}
    queries(stream, 3)
    driver.cuStreamGetCtx(stream.handle)
    assert calls() == {"cuStreamGetCtx": 1, "cuStreamQuery": 3}


def test_calls_are_counted(stream):
    reset()
    queries(stream, 3)
    assert calls("cuStreamQuery") == 3


def test_injected_calls_are_counted(stream):
    reset()
    inject("cuStreamQuery", ILLEGAL)
    queries(stream, 2)
    assert calls("cuStreamQuery") == 2


def test_calls_that_fail_are_counted():
    reset()
    driver.cuStreamQuery(driver.CUstream(64))
    assert calls("cuStreamQuery") == 1


def test_the_versions_of_a_function_are_counted_together(stream):
    reset()
    driver.cuStreamGetCtx(stream.handle)
    assert calls("cuStreamGetCtx") == calls("cuStreamGetCtx_v2") == 1


def test_calls_of_every_thread_are_counted(stream):
    reset()
    threads = [threading.Thread(target=queries, args=(stream, 100)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls("cuStreamQuery") == 400


@pytest.mark.parametrize(
    ("function", "error"), [("cuNothing", ValueError), (1, TypeError), (b"cuInit", TypeError)]
)
def test_bad_names_to_count(function, error):
    with pytest.raises(error):
        calls(function)


# ---- async_error ------------------------------------------------------------


def test_a_reset_forgets_an_error_that_is_still_queued(stream):
    with latch(stream) as held:
        async_error(stream, ILLEGAL)
        reset()
        held.release()
        assert driver.cuStreamSynchronize(stream.handle) == (SUCCESS,)


@pytest.mark.parametrize(
    "as_argument",
    [
        pytest.param(lambda stream: stream, id="cuda.core"),
        pytest.param(lambda stream: stream.handle, id="driver"),
    ],
)
def test_an_error_of_a_stream(stream, as_argument):
    async_error(as_argument(stream), ILLEGAL)
    assert driver.cuStreamSynchronize(stream.handle)[0] == ILLEGAL


def test_an_error_waits_for_its_turn(stream):
    with latch(stream) as held:
        async_error(stream, ILLEGAL)
        assert query(stream) == Result.CUDA_ERROR_NOT_READY
        held.release()
        assert driver.cuStreamSynchronize(stream.handle)[0] == ILLEGAL


def test_an_error_stays_until_the_reset(stream):
    async_error(stream, ILLEGAL)
    driver.cuStreamSynchronize(stream.handle)
    assert queries(stream, 3) == [700] * 3
    reset()
    assert queries(stream, 3) == [0] * 3


@pytest.mark.parametrize(
    ("stream_argument", "error"),
    [
        ("stream", TypeError),
        (None, TypeError),
        (1.5, TypeError),
        (True, TypeError),
        (64, TypeError),
        (driver.CUstream(64), RuntimeError),
    ],
)
def test_what_is_no_stream(stream_argument, error):
    with pytest.raises(error):
        async_error(stream_argument, ILLEGAL)


@pytest.mark.parametrize("result", [0, -1, "700", None, True])
def test_what_is_no_error(stream, result):
    with pytest.raises((ValueError, TypeError)):
        async_error(stream, result)
    assert query(stream) == SUCCESS


# ---- reset and stats --------------------------------------------------------


def test_reset_forgets_injections_and_counts(stream):
    inject("cuStreamQuery", ILLEGAL, count=5)
    query(stream)
    reset()
    assert calls("cuStreamQuery") == 0
    assert query(stream) == SUCCESS


def test_reset_leaves_streams_events_and_memory(stream):
    event = stream.record()
    before = alive_in_driver()
    reset()
    assert alive_in_driver() == before
    event.sync()


def test_what_is_alive_is_counted(stream):
    before = alive_in_driver()
    other, event = driver.cuStreamCreate(1)[1], driver.cuEventCreate(2)[1]
    address = driver.cuMemAlloc(64)[1]
    with latch(other):
        now = alive_in_driver()
        assert now.holds == before.holds + 1
    assert now.streams == before.streams + 1
    assert now.events == before.events + 1
    assert now.allocations >= before.allocations + 1
    driver.cuStreamSynchronize(other)
    driver.cuMemFree(address)
    driver.cuEventDestroy(event)
    driver.cuStreamDestroy(other)
    after = alive_in_driver()
    assert (after.streams, after.events, after.holds) == (
        before.streams,
        before.events,
        before.holds,
    )


def test_captures_are_counted(stream):
    before = alive_in_driver().captures
    driver.cuStreamBeginCapture(stream.handle, driver.CUstreamCaptureMode(2))
    assert alive_in_driver().captures == before + 1
    _, graph = driver.cuStreamEndCapture(stream.handle)
    driver.cuGraphDestroy(graph)
    assert alive_in_driver().captures == before


def test_driver_calls_in_host_functions_are_not_permitted(stream):
    """As the documentation of cuLaunchHostFunc has it."""
    seen = []
    callback = ctypes_host_function(lambda: seen.append(driver.cuCtxGetCurrent()[0]))
    driver.cuLaunchHostFunc(stream.handle, callback.handle, 0)
    assert driver.cuStreamSynchronize(stream.handle)[0] == SUCCESS
    assert seen == [Result.CUDA_ERROR_NOT_PERMITTED]


def ctypes_host_function(function):
    class Callback:
        kept = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: function())
        handle = driver.CUhostFn(ctypes.cast(kept, ctypes.c_void_p).value)

    return Callback


def test_a_name_with_a_nul_is_refused():
    with pytest.raises(ValueError, match="has no function"):
        inject("cuStreamQuery\0", 2)


@pytest.mark.parametrize("number", ["count", "skip"])
def test_a_number_beyond_a_c_long_is_refused(number):
    with pytest.raises(ValueError, match="at most"):
        inject("cuStreamQuery", 2, **{number: 1 << 70})
