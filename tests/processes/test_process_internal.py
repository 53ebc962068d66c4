"""Threads, locks and the end of the process: module `_process`."""

from __future__ import annotations

import ast
import gc
import itertools
import logging
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import interrupts
import userstream as us
from helpers import UNTRACED, eventually, run_python
from userstream import _process
from userstream._engine import futures
from userstream._process import Daemon

# -- daemon threads -------------------------------------------------------------------------------


def test_a_daemon_starts_once_and_again_after_its_end() -> None:
    runs: list[int] = []
    release = threading.Event()

    def run() -> None:
        runs.append(1)
        release.wait(10)

    daemon = Daemon(run, "mine")
    daemon.join()  # nothing was started
    for _ in range(3):
        daemon.start()
    release.set()
    daemon.join()
    assert runs == [1]
    daemon.start()
    daemon.join()
    assert runs == [1, 1]


def test_a_thread_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    daemon = Daemon(lambda: runs.append(1), "mine")

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            daemon.start()
    daemon.start()
    daemon.join()
    assert runs == [1]


def test_an_interrupt_after_the_start_of_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    release = threading.Event()

    def run() -> None:
        runs.append(1)
        release.wait(10)

    daemon = Daemon(run, "mine")
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            daemon.start()
    daemon.start()
    release.set()
    daemon.join()
    assert runs == [1]


def test_a_signal_anywhere_in_a_start_starts_no_second_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two dispatchers would both take calls from a queue, and a stream would wait in vain."""
    runs: list[int] = []
    release = threading.Event()

    def run() -> None:
        runs.append(1)
        release.wait(10)

    monkeypatch.setattr(interrupts, "PLACES", (*interrupts.PLACES, threading.__file__))
    for at in itertools.count():
        runs.clear()
        release.clear()
        daemon = Daemon(run, "mine")
        daemon.start()
        assert eventually(lambda: runs == [1])
        cut = interrupts.cut_short(daemon.start, at)
        daemon.start()
        release.set()
        daemon.join()
        assert runs == [1], f"after a signal at {at}"
        if not cut:
            break


def test_signals_at_random_moments_of_a_start() -> None:
    """An exception inside `threading.Thread.start` ends the new thread before it has run."""
    done = run_python(
        """
        import random, signal, threading, time
        from userstream._process import Daemon

        class Cut(Exception):
            pass

        def handler(*_):
            if armed:
                raise Cut

        def run():
            runs.append(1)
            time.sleep(1e-4)

        armed, runs, cuts, chance = False, [], 0, random.Random(0)
        signal.signal(signal.SIGALRM, handler)
        end = time.monotonic() + 5
        while time.monotonic() < end:
            daemon = Daemon(run, "mine")
            runs.clear()
            try:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-6, 2e-4))
                daemon.start()
            except Cut:
                cuts += 1
            armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            daemon.start()  # unless it runs, or has run
            while not runs or daemon._thread is not None:
                assert time.monotonic() < end + 20, "the thread has not run"
                time.sleep(1e-4)
        assert cuts > 20, cuts
        """,
        **UNTRACED,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_thread_that_runs_after_its_start_was_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The signal comes before the thread has removed its entry."""
    runs: list[threading.Thread] = []
    late: list[threading.Thread] = []

    def interrupted(thread: threading.Thread) -> None:
        late.append(thread)
        raise KeyboardInterrupt

    daemon = Daemon(lambda: runs.append(threading.current_thread()), "mine")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            daemon.start()
    late[0].start()
    late[0].join()
    daemon.start()
    daemon.join()
    assert len(runs) == 1
    assert runs != late


def test_join_gives_up_after_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_process, "_JOIN_SECONDS", 0.05)
    release = threading.Event()
    daemon = Daemon(release.wait, "mine")
    daemon.start()
    daemon.join()
    assert not release.is_set()
    release.set()


def test_a_daemon_does_not_wait_for_itself() -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            daemon.join()
        except BaseException as error:
            errors.append(error)

    daemon = Daemon(run, "mine")
    daemon.start()
    daemon.join()
    assert not errors


@pytest.mark.parametrize("call", ["launch_host_func(slow)", "add_callback(slow)"])
@pytest.mark.parametrize(("seconds", "said"), [(0.3, "begun ended"), (60, "begun")])
def test_a_function_that_runs_at_exit_has_a_moment_to_end(
    call: str, seconds: float, said: str
) -> None:
    """Python up to 3.13 ends the thread wherever it is, inside cuda.core say, which aborts."""
    started = time.monotonic()
    done = run_python(
        f"""
        import threading, time
        import userstream as us

        begun = threading.Event()

        def slow(*_):
            print("begun", end=" ", flush=True)
            begun.set()
            time.sleep({seconds})
            print("ended", flush=True)

        us.get_stream(0).{call}
        assert begun.wait(20)
        """
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == said.split()
    assert time.monotonic() - started < 30


def test_a_failure_of_a_thread_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise SystemExit("mine")
    except SystemExit:
        _process.log_exception("%s continues", "the thread")
    (record,) = caplog.records
    assert (record.name, record.getMessage()) == ("userstream", "the thread continues")
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == "mine"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_logging_handler_that_raises_ends_no_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reported: list[str] = []

    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise SystemExit("the disk is full")

    monkeypatch.setattr(sys, "unraisablehook", lambda each: reported.append(str(each.exc_value)))
    monkeypatch.setattr(logging.getLogger("userstream"), "handlers", [Broken()])
    try:
        raise ValueError("mine")
    except ValueError:
        _process.log_exception("the thread continues")
    assert reported == ["the disk is full"]


# -- locks ----------------------------------------------------------------------------------------

KINDS = [_process.Lock, _process.RLock, futures._Condition]


def is_lock_free(lock: Any) -> bool:
    """Return whether a lock is free, by taking it in another thread: some locks are re-entrant."""
    found: list[bool] = []

    def ask() -> None:
        found.append(lock.acquire(blocking=False))
        if found[0]:
            lock.release()

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_signal_at_any_place_leaves_a_lock_free(kind: Callable[[], Any]) -> None:
    lock = kind()
    inside: list[int] = []

    def use() -> None:
        with lock:
            inside.append(at)

    for at in itertools.count():
        came = interrupts.cut_short(use, at, anywhere=True)
        assert is_lock_free(lock), f"signal {at}: the lock is taken"
        if not came:
            break
    assert at > 2
    assert at in inside


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_holds_its_lock_alone(kind: Callable[[], Any]) -> None:
    lock = kind()
    with lock:
        assert not is_lock_free(lock)
    assert is_lock_free(lock)
    with pytest.raises(ZeroDivisionError), lock:
        _ = 1 // 0
    assert is_lock_free(lock)
    assert lock.acquire()
    assert not is_lock_free(lock)
    lock.release()
    assert is_lock_free(lock)


@pytest.mark.parametrize("kind", [_process.RLock, futures._Condition])
def test_a_thread_may_take_a_reentrant_lock_again(kind: Callable[[], Any]) -> None:
    lock = kind()
    with lock:
        with lock:
            pass
        assert not is_lock_free(lock)
    assert is_lock_free(lock)


def test_a_fence_gives_a_lock_back_before_it_takes_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Either step alone lets a processor reorder the memory accesses before and after the step."""
    steps: list[str] = []

    class Lock:
        def __enter__(self) -> None:
            steps.append("taken")

        def __exit__(self, *_: object) -> None:
            steps.append("back")

    monkeypatch.setattr(_process, "Lock", Lock)
    _process.fence()
    assert "back taken" in " ".join(steps)


# -- fork and exit --------------------------------------------------------------------------------


def test_streams_are_leaked_where_destructors_must_not_run() -> None:
    stream = us.Stream.create(0)
    lane = stream._resolve()
    assert any(each is lane for each in _process.tracked())
    before = len(_process._tracked)
    del stream, lane
    gc.collect()
    assert len(_process._tracked) < before


def test_objects_made_after_the_exit_functions_are_leaked(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = us.Stream.create(0)
    event = stream.record()
    assert any(each is event for each in _process.tracked())
    before = sys.getrefcount(stream)
    monkeypatch.setattr(_process, "_ending", True)
    _process.leak_at_end(stream)
    assert sys.getrefcount(stream) == before + 1


STATE_AFTER_FORK = Path(__file__).parent / "state_after_fork.txt"
_MUTABLE = {
    *("dict", "list", "set", "deque", "defaultdict", "OrderedDict", "count", "local"),
    *("Lock", "RLock", "Event", "Condition", "WeakSet", "WeakValueDictionary", "WeakKeyDictionary"),
}


def is_immutable(kind: ast.ClassDef) -> bool:
    """Return whether a class is a named tuple or a frozen dataclass."""
    said = [ast.unparse(each) for each in (*kind.bases, *kind.decorator_list)]
    return any("NamedTuple" in each or "frozen=True" in each for each in said)


def state_of(module: Path) -> set[str]:
    """Return the names of a module that functions assign to, or that something can be put into."""
    tree = ast.parse(module.read_text())
    classes = {
        node.name for node in tree.body if isinstance(node, ast.ClassDef) and not is_immutable(node)
    }
    found = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    for node in tree.body:
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            continue
        match node.value:
            case ast.Dict(keys=[]) | ast.List(elts=[]):
                changes = True
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
                changes = name in _MUTABLE | classes
            case ast.Call(func=ast.Subscript(value=ast.Name(id=name))):
                changes = name in _MUTABLE | classes
            case _:
                changes = False
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        found |= {each.id for each in targets if changes and isinstance(each, ast.Name)}
    return found


def test_the_list_of_the_state_of_a_process_is_complete() -> None:
    """New state has to be listed in `state_after_fork.txt`, with its fate in a forked child."""
    package = Path(us.__file__).parent
    there = {
        (str(module.relative_to(package).with_suffix("")), name)
        for module in package.rglob("*.py")
        for name in state_of(module)
    }
    listed, module = set(), ""
    _, _, text = STATE_AFTER_FORK.read_text(encoding="utf-8").partition("\n\n")
    for line in text.splitlines():
        if line.startswith(" "):
            names = re.findall(r"((?:\w+ )*\w+): ", line)
            listed |= {(module, name) for each in names for name in each.split()}
        else:
            module = line
    assert there == listed
