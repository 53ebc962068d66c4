"""Green contexts: parts of a device that belong to its primary context."""

from __future__ import annotations

import pytest
from cuda.bindings import driver

from conformance.support import (
    BLOCKING,
    INVALID_CONTEXT,
    INVALID_HANDLE,
    INVALID_VALUE,
    LEGACY,
    NON_BLOCKING,
    NOT_READY,
    RELAXED,
    SUCCESS,
    Background,
    Capture,
    completes,
    current,
    finishes,
    ok,
    stays,
)
from userstream.testing import latch

SM = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
IGNORE_COSCHEDULING = 1  # CU_DEV_SM_RESOURCE_SPLIT_IGNORE_SM_COSCHEDULING
DEFAULT_STREAM = int(driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM)
INVALID_TYPE = driver.CUresult.CUDA_ERROR_INVALID_RESOURCE_TYPE
INVALID_CONFIGURATION = driver.CUresult.CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION


@pytest.fixture
def whole():
    """All multiprocessors of device 0. The numbers of these tests are those of Hopper."""
    resource = ok(driver.cuDeviceGetDevResource(0, SM))
    major = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    if ok(driver.cuDeviceGetAttribute(major, 0)) != 9:
        pytest.skip("needs Hopper")
    return resource


def split(resource, count, groups=1, flags=0):
    parts, made, rest = ok(driver.cuDevSmResourceSplitByCount(groups, resource, flags, count))
    return parts[: int(made)], rest


class Green:
    def __init__(self, resource):
        description = ok(driver.cuDevResourceGenerateDesc([resource], 1))
        self.handle = ok(driver.cuGreenCtxCreate(description, 0, DEFAULT_STREAM))
        self.context = ok(driver.cuCtxFromGreenCtx(self.handle))
        self.streams = []

    def stream(self):
        self.streams.append(ok(driver.cuGreenCtxStreamCreate(self.handle, NON_BLOCKING, 0)))
        return self.streams[-1]

    def end(self):
        for stream in self.streams:
            ok(driver.cuStreamDestroy(stream))
        ok(driver.cuGreenCtxDestroy(self.handle))


@pytest.fixture
def make_green(context):
    made = []

    def make(resource):
        made.append(Green(resource))
        return made[-1]

    yield make
    for green in made:
        green.end()


@pytest.fixture
def green(make_green, whole):
    """A green context of 16 multiprocessors."""
    return make_green(split(whole, 16)[0][0])


# ---- resources --------------------------------------------------------------


def test_the_multiprocessors_of_a_device_and_of_its_context(whole, context):
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
    count = ok(driver.cuDeviceGetAttribute(attribute, 0))
    assert whole.sm.smCount == count
    assert ok(driver.cuCtxGetDevResource(context, SM)).sm.smCount == count


def test_an_unknown_type_of_resource(context):
    invalid = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_INVALID
    assert driver.cuDeviceGetDevResource(0, invalid)[0] == INVALID_TYPE


@pytest.mark.parametrize(
    ("count", "expected"),
    [(0, 8), (1, 8), (8, 8), (10, 16), (16, 16), (20, 24), (33, 40), (64, 64), (124, 128)],
)
def test_parts_are_of_eights(whole, count, expected):
    (part,), rest = split(whole, count)
    assert part.sm.smCount == expected
    assert rest.sm.smCount == whole.sm.smCount - expected


def test_equal_parts(whole):
    parts, rest = split(whole, 16, groups=3)
    assert [part.sm.smCount for part in parts] == [16, 16, 16]
    assert rest.sm.smCount == whole.sm.smCount - 48


def test_no_more_parts_than_there_are(whole):
    parts, rest = split(whole, 64, groups=5)
    assert [part.sm.smCount for part in parts] == [64, 64]
    assert rest.sm.smCount == whole.sm.smCount - 128


def test_parts_without_coscheduling_are_smaller(whole):
    (part,), _ = split(whole, 3, flags=IGNORE_COSCHEDULING)
    assert part.sm.smCount == 4


def test_a_part_of_more_than_there_is(whole):
    answer = driver.cuDevSmResourceSplitByCount(1, whole, 0, whole.sm.smCount + 1)
    assert answer[0] in (INVALID_VALUE, INVALID_CONFIGURATION)


def test_a_part_is_not_split_again(whole):
    (part,), _ = split(whole, 64)
    assert driver.cuDevSmResourceSplitByCount(1, part, 0, 8)[0] == INVALID_CONFIGURATION


def test_a_description_may_be_of_several_splits(whole):
    parts, rest = split(whole, 16, groups=2)
    assert driver.cuDevResourceGenerateDesc([*parts, rest], 3)[0] == SUCCESS
    (other,), _ = split(whole, 16)
    assert driver.cuDevResourceGenerateDesc([parts[0], other], 2)[0] == SUCCESS


# ---- contexts and streams ---------------------------------------------------


def test_a_green_context_is_another_context(green, context):
    assert int(green.context) != int(context)
    assert ok(driver.cuCtxGetDevResource(green.context, SM)).sm.smCount == 16
    assert ok(driver.cuGreenCtxGetDevResource(green.handle, SM)).sm.smCount == 16


def test_to_make_one_waits_for_the_work_of_the_primary_context(make_green, make_stream, whole):
    (part,), _ = split(whole, 16)
    with latch(make_stream()) as held:
        making = Background(lambda: make_green(part))
        assert making.is_blocked
        held.release()
        assert making.answer


def test_the_rest_of_the_device(make_green, whole):
    (part,), rest = split(whole, 16)
    make_green(part)
    assert ok(driver.cuCtxGetDevResource(make_green(rest).context, SM)).sm.smCount == 116


def test_a_stream_tells_its_green_context(green, stream):
    inside = green.stream()
    # cuda-bindings 13 may return the green context as well.
    assert int(ok(driver.cuStreamGetCtx(inside)[:2])) == int(green.context)
    assert int(ok(driver.cuStreamGetGreenCtx(inside))) == int(green.handle)
    assert int(ok(driver.cuStreamGetGreenCtx(stream))) == 0


def test_green_streams_do_not_block(green):
    assert driver.cuGreenCtxStreamCreate(green.handle, BLOCKING, 0)[0] == INVALID_VALUE


def test_the_current_context(green, context):
    with current(green.context):
        assert int(ok(driver.cuCtxGetCurrent())) == int(green.context)
        assert int(ok(driver.cuCtxGetDevice())) == 0
        made = ok(driver.cuStreamCreate(NON_BLOCKING))
        assert int(ok(driver.cuStreamGetGreenCtx(made))) == int(green.handle)
        ok(driver.cuStreamDestroy(made))
    assert int(ok(driver.cuCtxGetCurrent())) == int(context)


def test_a_stream_that_is_created_while_it_is_current_has_a_priority(green, context):
    with current(green.context):
        made = ok(driver.cuStreamCreateWithPriority(NON_BLOCKING, -1))
    assert int(ok(driver.cuStreamGetGreenCtx(made))) == int(green.handle)
    assert ok(driver.cuStreamGetPriority(made)) == -1
    ok(driver.cuStreamDestroy(made))


def test_two_green_contexts_of_the_same_multiprocessors(make_green, whole):
    (part,), _ = split(whole, 16)
    one, other = make_green(part), make_green(part)
    assert int(one.context) != int(other.context)
    assert finishes(one.stream())
    assert finishes(other.stream())


def test_the_default_stream_of_a_green_context(green, memory):
    with current(green.context):
        ok(driver.cuMemsetD8Async(memory, 1, 64, LEGACY))
        assert finishes(LEGACY)
        assert driver.cuStreamDestroy(LEGACY) == (INVALID_HANDLE,)


def test_memory_and_modules_are_those_of_the_primary_context(green, memory, stream):
    inside = green.stream()
    ok(driver.cuMemsetD8Async(memory, 1, 64, inside))
    assert finishes(inside)
    with current(green.context):
        address = ok(driver.cuMemAlloc(64))
    ok(driver.cuMemsetD8Async(address, 1, 64, stream))
    assert finishes(stream)
    ok(driver.cuMemFree(address))


def test_work_in_a_green_context_runs_beside_that_of_the_primary(green, stream, word):
    inside = green.stream()
    with latch(stream):
        word.write(inside, 1)
        assert finishes(inside)
    assert word.value == 1


def test_a_green_context_that_is_none(context):
    none = driver.CUgreenCtx(0)
    assert driver.cuGreenCtxDestroy(none) == (INVALID_CONTEXT,)
    assert driver.cuGreenCtxStreamCreate(none, NON_BLOCKING, 0)[0] == INVALID_CONTEXT


# ---- order ------------------------------------------------------------------


@pytest.mark.parametrize("green_first", [True, False], ids=["green first", "primary first"])
def test_events_cross(green, stream, event, word, green_first):
    first, second = (green.stream(), stream) if green_first else (stream, green.stream())
    with latch(first) as held:
        ok(driver.cuEventRecord(event, first))
        ok(driver.cuStreamWaitEvent(second, event, 0))
        word.write(second, 1)
        assert stays(0, lambda: word.value)
        held.release()
        assert finishes(second)
    assert word.value == 1


def test_an_event_of_the_primary_context_covers_green_streams(context, green, event):
    inside = green.stream()
    with latch(inside) as held:
        ok(driver.cuCtxRecordEvent(context, event))
        assert stays((NOT_READY,), lambda: driver.cuEventQuery(event))
        held.release()
        assert completes(event)


def test_synchronizing_the_primary_context_covers_green_streams(context, green):
    inside = green.stream()
    with latch(inside) as held:
        waiting = Background(driver.cuCtxSynchronize, context)
        assert waiting.is_blocked
        held.release()
        assert waiting.answer == (SUCCESS,)


def test_green_streams_wait_for_what_the_primary_context_waits_for(
    context, green, stream, event, word
):
    inside = green.stream()
    with latch(stream) as held:
        ok(driver.cuEventRecord(event, stream))
        ok(driver.cuCtxWaitEvent(context, event))
        word.write(inside, 1)
        assert stays(0, lambda: word.value)
        held.release()
        assert finishes(inside)
    assert word.value == 1


def test_an_event_of_a_green_context_covers_it_alone(green, stream, event):
    inside = green.stream()
    with latch(stream), latch(inside) as held:
        ok(driver.cuCtxRecordEvent(green.context, event))
        assert stays((NOT_READY,), lambda: driver.cuEventQuery(event))
        held.release()
        assert completes(event)


def test_only_its_own_streams_wait_for_what_a_green_context_waits_for(
    green, make_stream, event, word
):
    busy, other, inside = make_stream(), make_stream(), green.stream()
    with latch(busy) as held:
        ok(driver.cuEventRecord(event, busy))
        ok(driver.cuCtxWaitEvent(green.context, event))
        word.write(inside, 1)
        ok(driver.cuEventRecord(event, other))
        assert finishes(other)
        assert stays(0, lambda: word.value)
        held.release()
        assert finishes(inside)
    assert word.value == 1


def test_a_green_stream_can_capture(green, memory):
    inside = green.stream()
    with Capture(inside, RELAXED) as capture:
        ok(driver.cuMemsetD8Async(memory, 1, 64, inside))
        graph = ok(capture.end())
    executable = ok(driver.cuGraphInstantiate(graph, 0))
    ok(driver.cuGraphLaunch(executable, inside))
    assert finishes(inside)
    ok(driver.cuGraphExecDestroy(executable))
    ok(driver.cuGraphDestroy(graph))


@pytest.mark.parametrize("by", ["record", "wait"])
def test_an_event_of_the_primary_context_harms_no_capture(context, green, event, stream, by):
    ok(driver.cuEventRecord(event, stream))
    assert finishes(stream)
    inside = green.stream()
    with Capture(inside, RELAXED) as capture:
        function = driver.cuCtxRecordEvent if by == "record" else driver.cuCtxWaitEvent
        assert function(context, event) == (SUCCESS,)
        ok(driver.cuGraphDestroy(ok(capture.end())))


# ---- the end ----------------------------------------------------------------


def test_streams_of_a_destroyed_green_context_are_of_no_use(context, whole):
    destroyed = driver.CUresult.CUDA_ERROR_CONTEXT_IS_DESTROYED
    green = Green(split(whole, 16)[0][0])
    inside = green.stream()
    ok(driver.cuGreenCtxDestroy(green.handle))
    assert driver.cuStreamQuery(inside) == (destroyed,)
    assert driver.cuStreamSynchronize(inside) == (destroyed,)
    assert driver.cuStreamDestroy(inside) == (destroyed,)


def test_a_green_context_keeps_the_primary_context(whole, make_green):
    """It holds a reference of its own; the last one to go ends the context."""
    green = make_green(split(whole, 16)[0][0])
    ok(driver.cuDevicePrimaryCtxRetain(0))
    ok(driver.cuDevicePrimaryCtxRelease(0))
    inside = green.stream()
    assert finishes(inside)
