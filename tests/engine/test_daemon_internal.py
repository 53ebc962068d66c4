"""The library's own threads: begun once, and let end when Python ends."""

from __future__ import annotations

import ast
import itertools
import logging
import re
import sys
import threading
import time
from pathlib import Path

import pytest

import interrupts
import userstream as us
from helpers import UNTRACED, eventually, run_python
from userstream import _process
from userstream._process import Daemon


def test_it_is_begun_once_and_again_when_it_has_ended() -> None:
    runs: list[int] = []
    release = threading.Event()

    def run() -> None:
        runs.append(1)
        release.wait(10)

    daemon = Daemon(run, "mine")
    daemon.join()  # nothing was begun
    for _ in range(3):
        daemon.start()
    release.set()
    daemon.join()
    assert runs == [1]
    daemon.start()
    daemon.join()
    assert runs == [1, 1]


def test_a_thread_that_could_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_an_interrupt_when_it_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_signal_anywhere_in_a_start_begins_no_second_thread(
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


def test_a_thread_that_begins_after_it_was_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal came before the thread had said that it is there."""
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


def test_nobody_waits_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_process, "_JOIN_SECONDS", 0.05)
    release = threading.Event()
    daemon = Daemon(release.wait, "mine")
    daemon.start()
    daemon.join()
    assert not release.is_set()
    release.set()


def test_it_does_not_wait_for_itself() -> None:
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
def test_what_runs_at_exit_has_a_moment(call: str, seconds: float, said: str) -> None:
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


def test_what_is_survived_is_said(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise SystemExit("mine")
    except SystemExit:
        _process.survive("%s goes on", "it")
    (record,) = caplog.records
    assert (record.name, record.getMessage()) == ("userstream", "it goes on")
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == "mine"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_logging_handler_that_raises_is_survived_as_well(
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
        _process.survive("it goes on")
    assert reported == ["the disk is full"]


_MUTABLE = {
    *("dict", "list", "set", "deque", "defaultdict", "OrderedDict", "count", "local"),
    *("Lock", "RLock", "Event", "Condition", "WeakSet", "WeakValueDictionary", "WeakKeyDictionary"),
}


def state_of(module: Path) -> set[str]:
    """Return the names of a module that functions assign to, or that something can be put into."""
    tree = ast.parse(module.read_text())
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
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


def test_the_table_of_what_a_process_has_once_is_whole() -> None:
    """Whoever adds state says there what a fork does to it."""
    package = Path(us.__file__).parent
    there = {
        (str(module.relative_to(package).with_suffix("")), name)
        for module in package.rglob("*.py")
        for name in state_of(module)
    }
    listed, module = set(), ""
    for line in (_process.__doc__ or "").splitlines():
        if line.startswith(" " * 8):
            names = re.findall(r"((?:\w+ )*\w+): ", line)
            listed |= {(module, name) for each in names for name in each.split()}
        elif line.startswith(" " * 4):
            module = line.strip()
    assert there == listed
