"""`Stream`: capturing its work into a graph."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from pathlib import Path

import pytest
from cuda.bindings import driver
from cuda.core.graph import GraphDefinition

import userstream as us
from helpers import (
    checked,
    current_context,
    device_current,
    in_thread,
    instantiated,
    pinned_memory,
    run_python,
)
from internals import alive_in_driver, is_capture_begun
from userstream import testing

pytestmark = pytest.mark.usefixtures("no_garbage")

MODES = ["global", "thread_local", "relaxed"]
Mode = driver.CUstreamCaptureMode


def write(stream: us.Stream, address: int, value: int) -> None:
    checked(driver.cuStreamWriteValue32(stream._live(), address, value, 0))


def read(address: int) -> int:
    import ctypes

    return ctypes.c_uint32.from_address(address).value


@pytest.mark.parametrize("mode", MODES)
def test_a_capture_gives_a_graph_that_can_be_launched(mode: str) -> None:
    with us.Stream.create(0) as stream, pinned_memory() as word:
        assert not stream.is_capturing
        write(stream, word, 1)
        stream.begin_capture(mode)  # type: ignore[arg-type]
        assert stream.is_capturing
        write(stream, word, 7)
        graph = stream.end_capture()
        assert not stream.is_capturing
        assert isinstance(graph, GraphDefinition)
        assert len(graph.nodes()) == 1
        stream.sync(timeout=10)
        assert read(word) == 1, "what is captured does not run"
        executable = instantiated(graph)
        executable.upload(stream)
        for value in (0, 5):
            write(stream, word, value)
            executable.launch(stream)
            stream.sync(timeout=10)
            assert read(word) == 7


def test_the_context_manager(tmp_path: Path) -> None:
    with us.Stream.create(0) as stream, us.Stream.create(0) as branch, pinned_memory() as word:
        with stream.capture() as graph:
            assert stream.is_capturing
            branch.wait(stream)
            assert branch.is_capturing
            write(branch, word, 7)
            stream.wait(branch)
            write(stream, word + 4, 8)
        assert not stream.is_capturing
        assert not branch.is_capturing
        executable = instantiated(graph)
        executable.launch(branch)
        branch.sync(timeout=10)
        assert (read(word), read(word + 4)) == (7, 8)
        graph.debug_dot_print(str(tmp_path / "graph.dot"))
        assert "digraph" in (tmp_path / "graph.dot").read_text()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, us.CaptureError])
def test_a_body_that_raises_leaves_nothing_captured(error: type[BaseException]) -> None:
    def fail() -> None:
        with stream.capture():
            branch.wait(stream)
            raise error("mine")

    with us.Stream.create(0) as stream, us.Stream.create(0) as branch:
        with pytest.raises(error, match="mine"):
            fail()
        assert not stream.is_capturing
        assert not branch.is_capturing
        assert not is_capture_begun()
        stream.sync(timeout=10)
        with stream.capture():
            pass


def test_a_body_that_invalidates_the_capture() -> None:
    def invalidate() -> None:
        with stream.capture():
            driver.cuStreamQuery(stream._live())
            assert stream.is_capturing, "it has to be ended"
            assert stream.capture_info == us.CaptureInfo("invalidated", None, None, ())

    with us.Stream.create(0) as stream:
        with pytest.raises(us.CaptureError, match=r"invalidated it.*STREAM_CAPTURE_INVALIDATED"):
            invalidate()
        assert not stream.is_capturing
        assert not is_capture_begun()
        stream.sync(timeout=10)


def test_streams_that_were_not_joined_again() -> None:
    def fork() -> None:
        with stream.capture():
            branch.wait(stream)
            write(branch, word, 1)

    with us.Stream.create(0) as stream, us.Stream.create(0) as branch, pinned_memory() as word:
        with pytest.raises(us.CaptureError, match=r"wait\(\) for them before the end"):
            fork()
        assert not branch.is_capturing


def test_what_cannot_be_begun() -> None:
    with us.Stream.create(0) as stream, stream.capture() as graph:
        with pytest.raises(us.CaptureError, match="already being captured"):
            stream.begin_capture()
        with pytest.raises(us.CaptureError, match="already being captured"):
            with us.Stream.from_handle(int(stream.handle)).capture():
                raise AssertionError
        info = stream.capture_info
        assert info is not None
        assert int(info.graph) == int(graph.handle)
    with pytest.raises(us.CaptureError, match="legacy default stream"):
        us.Stream.legacy_default().begin_capture()
    for mode in ("", "GLOBAL", None, 0, ["global"]):
        with pytest.raises(ValueError, match='"thread_local"'):
            us.get_stream(0).begin_capture(mode)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match='"thread_local"'):
            with us.Stream.capture_mode(mode):  # type: ignore[arg-type]
                raise AssertionError
    assert not us.get_stream(0).is_capturing


@pytest.mark.simulated
def test_the_capture_of_a_stream_that_is_closed_is_forgotten() -> None:
    stream = us.Stream.create(0)
    stream.begin_capture("relaxed")
    stream.close()
    assert not is_capture_begun()


@pytest.mark.simulated
def test_the_capture_of_a_stream_that_is_dropped_is_forgotten() -> None:
    dropped = us.Stream.create(0)
    dropped.begin_capture()
    del dropped
    assert not is_capture_begun()
    # In most cases the next one has the handle.
    with (
        us.Stream.create(0) as stream,
        device_current(0),
    ):
        builder = stream.create_graph_builder().begin_building()
        with pytest.raises(us.CaptureError, match="was not begun on this stream"):
            stream.end_capture()
        builder.end_building().complete()


def test_what_cannot_be_ended() -> None:
    with us.Stream.create(0) as stream, us.Stream.create(0) as branch:
        with pytest.raises(us.CaptureError, match="is not being captured"):
            stream.end_capture()
        with stream.capture():
            branch.wait(stream)
            with pytest.raises(us.CaptureError, match="was not begun on this stream"):
                branch.end_capture()
            stream.wait(branch)
        checked(driver.cuStreamBeginCapture(stream._live(), Mode(0)))
        with pytest.raises(us.CaptureError, match="was not begun on this stream"):
            stream.end_capture()
        checked(driver.cuGraphDestroy(checked(driver.cuStreamEndCapture(stream._live()))))


def test_only_a_relaxed_capture_ends_on_another_thread() -> None:
    with us.Stream.create(0) as stream:
        stream.begin_capture("relaxed")
        assert isinstance(in_thread(stream.end_capture), GraphDefinition)
        stream.begin_capture()
        with pytest.raises(us.CaptureError, match='mode="relaxed"'):
            in_thread(stream.end_capture)
        assert stream.is_capturing
        stream.end_capture()
        assert not is_capture_begun()


@pytest.mark.parametrize("wait", [us.Stream.wait, us.Stream.wait_event])
def test_an_event_of_outside_breaks_a_capture(wait: Callable[..., None]) -> None:
    with us.Stream.create(0) as stream:
        outside = stream.record()
        stream.begin_capture()
        with pytest.raises(
            us.CaptureError, match=r"ISOLATION \(905\): .*wait_event.*flags=1"
        ) as err:
            wait(stream, outside)
        assert "another thread" not in str(err.value)
        with pytest.raises(us.CaptureError, match="INVALIDATED"):
            stream.end_capture()


@pytest.mark.parametrize("wait", [us.Stream.wait, us.Stream.wait_event])
def test_an_event_of_another_capture_breaks_both(wait: Callable[..., None]) -> None:
    with us.Stream.create(0) as stream, us.Stream.create(0) as other:
        stream.begin_capture()
        other.begin_capture()
        theirs = other.record()
        with pytest.raises(us.CaptureError, match=r"MERGE \(902\): .*merge two captures") as err:
            wait(stream, theirs)
        assert "another thread" not in str(err.value)
        for each in (stream, other):
            with pytest.raises(us.CaptureError, match="INVALIDATED"):
                each.end_capture()


@pytest.mark.parametrize("wait", [us.Stream.wait, us.Stream.wait_event])
def test_the_legacy_default_stream_cannot_wait_for_a_captured_event(
    wait: Callable[..., None],
) -> None:
    with (
        us.Stream.create(0) as stream,
        device_current(0),
    ):
        stream.begin_capture()
        with pytest.raises(us.CaptureError, match=r"IMPLICIT \(906\): the legacy .*create\(\)"):
            wait(us.Stream.legacy_default(), stream.record())
        with contextlib.suppress(us.CaptureError):
            stream.end_capture()


@pytest.mark.simulated
@pytest.mark.parametrize("code", range(900, 909))
def test_every_error_of_a_capture_says_what_it_means(code: int) -> None:
    event = us.get_stream(0).record()
    with (
        testing.inject("cuStreamWaitEvent", code, this_thread=True),
        pytest.raises(us.CaptureError, match=rf"\({code}\): \w+") as err,
    ):
        us.get_stream(0).wait_event(event)
    assert ("may have begun a capture" in str(err.value)) == (code in (900, 906, 907))


def test_capture_info() -> None:
    with us.Stream.create(0) as stream, us.Stream.create(0) as branch, pinned_memory() as word:
        assert stream.capture_info is None
        with stream.capture() as graph:
            write(stream, word, 1)
            branch.wait(stream)
            first, second = stream.capture_info, branch.capture_info
            assert first is not None
            assert second is not None
            assert first.state == "active"
            assert first.id == second.id
            assert int(first.graph) == int(graph.handle)
            assert len(first.dependencies) == 1
            assert int(first.dependencies[0]) == int(second.dependencies[0])
            stream.wait(branch)
        with stream.capture():
            assert stream.capture_info.id != first.id  # type: ignore[union-attr]
        assert us.Stream.legacy_default().capture_info is None


def test_the_per_thread_stream_is_another_one_in_each_thread() -> None:
    stream = us.Stream.per_thread_default()
    stream.begin_capture("relaxed")
    assert not in_thread(lambda: stream.is_capturing)
    assert isinstance(in_thread(lambda: _captured(stream)), GraphDefinition)
    assert stream.is_capturing
    assert not us.Stream.legacy_default().is_capturing, "it is not, though it cannot be used now"
    assert us.Stream.legacy_default().capture_info is None
    stream.end_capture()


def _captured(stream: us.Stream) -> GraphDefinition:
    with stream.capture("relaxed") as graph:
        pass
    return graph


@pytest.mark.multi_device
def test_with_another_device_current() -> None:
    with (
        us.Stream.create(1) as stream,
        device_current(0),
    ):
        before = current_context()
        with stream.capture() as graph:
            assert current_context() == before
        instantiated(graph).launch(stream)
        stream.sync(timeout=10)


def test_the_capture_mode_of_a_thread() -> None:
    exchange = driver.cuThreadExchangeStreamCaptureMode
    with us.Stream.create(0) as captured, us.Stream.create(0) as other:
        event = other.record()
        event.sync()
        with captured.capture():
            with us.Stream.capture_mode("relaxed"):
                checked(driver.cuEventQuery(event.handle))
                with us.Stream.capture_mode("thread_local"):
                    now = checked(exchange(Mode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))
                    assert now == Mode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
                now = checked(exchange(Mode.CU_STREAM_CAPTURE_MODE_RELAXED))
                assert now == Mode.CU_STREAM_CAPTURE_MODE_RELAXED
            with pytest.raises(ValueError, match="mine"), us.Stream.capture_mode("relaxed"):
                raise ValueError("mine")
            now = checked(exchange(Mode.CU_STREAM_CAPTURE_MODE_GLOBAL))
            assert now == Mode.CU_STREAM_CAPTURE_MODE_GLOBAL


def test_a_capture_that_goes_on_is_not_ended_by_another_one() -> None:
    with us.Stream.create(0) as stream, stream.capture():
        with pytest.raises(us.CaptureError, match="already"), stream.capture():
            pass
        assert stream.is_capturing


def test_a_closed_stream() -> None:
    stream = us.Stream.create(0)
    stream.close()
    for use in (
        stream.begin_capture,
        stream.end_capture,
        lambda: stream.is_capturing,
        lambda: stream.capture_info,
        lambda: stream.capture().__enter__(),
    ):
        with pytest.raises(us.ClosedError, match="is closed"):
            use()


@pytest.mark.simulated
@pytest.mark.parametrize(
    "function", ["cuGraphCreate", "cuStreamBeginCaptureToGraph", "cuStreamEndCapture"]
)
def test_a_driver_that_refuses(function: str) -> None:
    before = alive_in_driver()
    with us.Stream.create(0) as stream:
        with testing.inject(function, 2, this_thread=True), pytest.raises(us.DriverError) as error:
            with stream.capture():
                pass
        assert error.value.function == function
        assert not stream.is_capturing
        assert not is_capture_begun()
    gc.collect()
    assert alive_in_driver() == before


@pytest.mark.simulated
def test_an_older_driver() -> None:
    done = run_python(
        """
        from userstream import testing
        testing.simulate(1, driver_version=12020)
        import userstream as us
        try:
            us.Stream.create(0).begin_capture()
        except us.NotSupportedError as error:
            assert "CUDA 12.3" in str(error), error
            assert error.function == "cuStreamBeginCaptureToGraph"
        else:
            raise AssertionError
        """,
        simulate=None,
    )
    assert done.returncode == 0, done.stderr


def test_a_fork_and_an_exit_amid_a_capture() -> None:
    done = run_python(
        """
        import os, warnings
        import userstream as us

        warnings.simplefilter("ignore", DeprecationWarning)  # os.fork with threads
        stream = us.Stream.create(0)
        stream.begin_capture()
        child = os.fork()
        if child == 0:
            for use in (stream.end_capture, stream.begin_capture, lambda: stream.is_capturing,
                        lambda: stream.capture_info, us.Stream.capture_mode("relaxed").__enter__):
                try:
                    use()
                except us.ForkedError:
                    continue
                os._exit(1)
            raise SystemExit(0)
        assert os.waitpid(child, 0)[1] == 0
        """
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
