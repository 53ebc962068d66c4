"""Fork, exit, and no driver at all: each in a process of its own."""

from __future__ import annotations

import os
import sys

import pytest

from helpers import run_python

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")


@needs_fork
def test_a_forked_child_is_refused_everywhere() -> None:
    done = run_python(
        """
        import gc, os, sys, warnings
        warnings.simplefilter("ignore", DeprecationWarning)  # os.fork with threads
        import userstream as us

        class Foreign:
            def __dlpack_device__(self): return (2, 0)

        stream, mine = us.get_stream(Foreign()), us.Stream.create(0)
        default = us.Stream.legacy_default()
        default.sync()
        pid = os.fork()
        if pid == 0:
            calls = {
                "get_stream": us.get_stream, "tensor": lambda: us.get_stream(Foreign()),
                "ordinal": lambda: us.get_stream(0), "stream": lambda: us.get_stream(stream),
                "wait": us.wait, "wait tensor": lambda: us.wait(Foreign()),
                "wait_all": us.wait_all, "wait_for_device": us.wait_for_device,
                "streams": us.streams, "close": us.close,
                "device_of": lambda: us.device_of(Foreign()),
                "describe": lambda: us.describe(Foreign()),
                "acquire": lambda: us.acquire(Foreign()), "borrow": lambda: us.borrow(Foreign()),
                "asnumpy": lambda: us.asnumpy(Foreign()), "completion": us.completion,
                "registry": us.UserStream().get_stream,
                "create": us.Stream.create, "part": lambda: us.Stream.create(0, sms=16),
                "from_handle": lambda: us.Stream.from_handle(4096),
                "range": us.Stream.priority_range,
                "sync": stream.sync, "is_done": lambda: stream.is_done,
                "handle": lambda: stream.handle, "flags": lambda: stream.flags,
                "priority": lambda: stream.priority, "stream_id": lambda: stream.stream_id,
                "nonblocking": lambda: stream.is_nonblocking, "protocol": stream.__cuda_stream__,
                "device": lambda: stream.device, "context": lambda: stream.context,
                "resources": lambda: stream.resources, "builder": stream.create_graph_builder,
                "wait stream": lambda: stream.wait(mine), "record": stream.record,
                "close stream": mine.close, "with": mine.__enter__,
                "default": default.sync, "default done": lambda: default.is_done,
            }
            for name, call in calls.items():
                try:
                    call()
                except us.ForkedError as error:
                    assert "spawn" in str(error)
                except BaseException as error:
                    print(name, repr(error), flush=True)
                    os._exit(1)
                else:
                    print(name, "was not refused", flush=True)
                    os._exit(1)
            repr(stream)
            del stream, mine, calls, call  # no destructor calls the driver
            gc.collect()
            sys.exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        stream.sync(timeout=10)
        us.wait(Foreign(), timeout=10)
        assert us.get_stream(0) is stream
        sys.exit(code)
        """
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""


@needs_fork
def test_a_child_of_a_process_that_did_not_use_cuda_may() -> None:
    done = run_python(
        """
        import os, sys
        import userstream as us
        us.Stream.legacy_default()
        pid = os.fork()
        if pid == 0:
            us.get_stream(0).sync(timeout=10)
            sys.exit(7)
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        """
    )
    assert done.returncode == 7, done.stderr


@needs_fork
def test_a_child_of_a_process_that_used_cuda_without_us() -> None:
    done = run_python(
        """
        import os, sys
        from cuda.bindings import driver
        import userstream as us
        assert driver.cuInit(0)[0] == 0
        pid = os.fork()
        if pid == 0:
            try:
                us.get_stream(0)
            except us.ForkedError:
                os._exit(7)
            os._exit(1)
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        """
    )
    assert done.returncode == 7, done.stderr


EXITS = {
    "work queued": "",
    "a stream of its own": "mine = us.Stream.create(0); mine.wait(stream)",
    "a thread that waits": """
        import threading
        threading.Thread(target=stream.sync, daemon=True).start()
        threading.Thread(target=us.wait_for_device, daemon=True).start()
        time.sleep(0.3)  # they have made their events: see "Exit" of docs/explanation
    """,
    "given away": "handle = int(stream.handle)",
    "a cycle": "cycle = [stream]; cycle.append(cycle)",
    "an exception": "raise SystemExit(0)",
    "an abandoned wait": """
        try:
            us.wait(0, timeout=0)
        except us.WaitTimeout:
            pass
    """,
}


@pytest.mark.parametrize("code", EXITS.values(), ids=EXITS.keys())
def test_exit_with_work_in_flight(code: str) -> None:
    """The stream is held to the end: an exit that waits for it, or destroys it, hangs here."""
    import textwrap

    done = run_python(
        "import time\n"
        "import userstream as us\n"
        "from userstream import testing\n"
        "stream = us.get_stream(0)\n"
        "latch = testing.latch(stream)\n"
        "latch.__enter__()\n"
        "assert not stream.is_done\n" + textwrap.dedent(code)
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_exit_with_daemon_threads_at_work() -> None:
    """Python up to 3.13 ends them by force, and inside the C++ of cuda.core that is an abort."""
    for _ in range(3):
        done = run_python(
            """
            import threading
            import userstream as us
            from helpers import array, device_memory

            stream, other = us.get_stream(0), us.Stream.create(0)
            memory = device_memory(0)
            buffer = array(memory.__enter__(), other, shape=(16,), typestr="|u1")

            def borrow():
                with us.borrow(buffer):
                    pass

            begun = []

            def repeat(function):
                function()
                begun.append(function)
                while True:
                    function()

            functions = [
                borrow, stream.record, us.Stream.create, lambda: us.asnumpy(buffer),
                lambda: us.hold(object(), stream=stream), lambda: us.completion(0).result(),
                lambda: us.Stream.create(0).launch_host_func(int), lambda: us.wait(0),
            ]
            threads = [
                threading.Thread(target=repeat, args=(each,), daemon=True) for each in functions
            ]
            for thread in threads:
                thread.start()
            while len(begun) < len(functions):
                stream.sync(timeout=60)
            """,
            PYTHONPATH=os.pathsep.join(sys.path),
        )
        assert (done.returncode, done.stderr) == (0, "")


def test_at_exit_other_threads_come_no_more() -> None:
    """They stay in their next call. The main thread goes on."""
    done = run_python(
        """
        import atexit, threading, time

        go_on, came, went = threading.Event(), [], []

        def last():  # registered before the import, so called when all of userstream has ended
            go_on.set()
            while len(came) < len(calls):
                time.sleep(0.001)
            time.sleep(0.2)
            us.wait(stream, timeout=10)
            us.get_stream(0).wait(us.Stream.create(0))
            print(went, flush=True)

        atexit.register(last)
        import userstream as us
        from userstream import testing
        from conftest import SIMULATED
        if SIMULATED:
            testing.simulate(1)
        stream = us.get_stream(0)

        def come(call):
            go_on.wait()
            came.append(call)
            call()
            went.append(call)

        calls = [
            us.get_stream, us.wait, us.completion, us.Stream.create, stream.sync, stream.record,
            lambda: us.hold(1, stream=stream), lambda: stream.add_callback(print), us.streams,
        ]
        for call in calls:
            threading.Thread(target=come, args=(call,), daemon=True).start()
        """,
        simulate=None,
        PYTHONPATH=os.pathsep.join(sys.path),
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


NO_DRIVER = """
    import time
    import userstream as us

    class Foreign:
        def __dlpack_device__(self): return (2, 0)

    def refused(call):
        started = time.perf_counter()
        try:
            call()
        except us.DriverNotFoundError as error:
            assert "driver" in str(error)
            return time.perf_counter() - started < 5
        return False

    stream = us.Stream.legacy_default()
    for _ in range(2):
        assert refused(us.get_stream)
        assert refused(lambda: us.get_stream(Foreign()))
        assert refused(lambda: us.get_stream(0))
        assert refused(lambda: us.wait(Foreign()))
        assert refused(us.wait_for_device)
        assert refused(us.Stream.create)
        assert refused(lambda: us.get_stream(0, sms=16))
        assert refused(us.Stream.priority_range)
        assert refused(lambda: us.device_of(Foreign()))
        assert refused(lambda: us.describe(Foreign()))
        assert refused(lambda: us.Stream.from_handle(4096))
        assert refused(stream.sync)
        assert refused(lambda: stream.wait(stream))
        assert refused(stream.record)
        us.wait_all()
        us.close()
    assert us.streams() == {}
    repr(stream), repr(us.UserStream.get())
"""


@pytest.mark.simulated
def test_no_driver() -> None:
    """On a machine without one: nothing is loaded beforehand."""
    done = run_python(NO_DRIVER, simulate=None)
    assert done.returncode == 0, done.stderr


@pytest.mark.simulated
def test_no_device() -> None:
    done = run_python(NO_DRIVER, simulate=0)
    assert done.returncode == 0, done.stderr


CTRL_C = {
    "wait": "us.wait()",
    "wait, spin": "us.wait(policy='spin')",
    "wait with a timeout": "us.wait(timeout=60)",
    "wait of several": "us.wait([buffer(0), buffer(1)])",
    "wait_all": "us.wait_all()",
    "wait_all, spin": "us.wait_all(policy='spin')",
    "wait_for_device": "us.wait_for_device()",
    "sync": "stream.sync()",
    "sync, spin": "stream.sync(policy='spin')",
    "sync of a default stream": "per_thread.sync()",
    "close": "us.close()",
    "a future": "us.completion().result()",
    "wait_async": "asyncio.run(us.wait_async())",
    "wait_all_async": "asyncio.run(us.wait_all_async())",
}


def test_ctrl_c_stops_every_wait() -> None:
    """A real SIGINT, and all is usable afterwards."""
    waits = ", ".join(f"{name!r}: lambda: {code}" for name, code in CTRL_C.items())
    done = run_python(
        f"""
        import asyncio, os, signal, sys, threading, time
        from cuda.bindings import driver
        import userstream as us
        from userstream import _driver, testing

        sys.settrace(None)  # to measure coverage takes a lock of its own: see `untraced`

        class buffer:
            def __init__(self, device): self.device = device
            def __dlpack_device__(self): return (2, self.device % _driver.library.device_count())

        stream, other = us.get_stream(0), us.get_stream(buffer(1))
        per_thread = us.Stream.per_thread_default()
        driver.cuCtxSetCurrent(_driver.contexts.primary_context(0))
        lateness = []
        for name, wait in {{{waits}}}.items():
            held = per_thread if "default" in name else us.get_stream(0)
            us.get_stream(buffer(1))
            with testing.latch(held):
                sent = []

                def interrupt():
                    time.sleep(0.05)
                    sent.append(time.perf_counter())
                    os.kill(os.getpid(), signal.SIGINT)

                thread = threading.Thread(target=interrupt)
                thread.start()
                try:
                    wait()
                except KeyboardInterrupt:
                    lateness.append(time.perf_counter() - sent[0])
                else:
                    raise AssertionError(name + " was not interrupted")
                thread.join()
                assert lateness[-1] < 5, name
            us.wait_all(timeout=10)
            us.wait_for_device(0, timeout=10)
            stream = us.get_stream(0)
            stream.sync(timeout=10)
        lateness.sort()  # one or the other may have had to wait for a core
        assert lateness[len(lateness) // 2] < 0.05, lateness
        """
    )
    assert done.returncode == 0, done.stderr


def test_a_stream_lacks_an_attribute_also_when_nothing_can_be_imported() -> None:
    """Destructors run like this while Python exits; `hasattr` does not expect an ImportError."""
    done = run_python(
        """
        import sys
        import userstream as us
        stream = us.get_stream(0)
        sys.meta_path = None
        print(hasattr(stream, "synchronize"))
        """
    )
    assert done.stdout.split() == ["False"], done.stderr
