"""The session: records the process, and passes the log to the judge."""

from __future__ import annotations

import _thread
import atexit
import itertools
import os
import sys
import threading
import time
import weakref
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from userstream import _process
from userstream._driver import account
from userstream._observe.judge import log
from userstream._observe.notes import Allocators, Declaring, name_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from userstream._observe.judge.finding_types import Stall
    from userstream._observe.judge.findings import Findings
    from userstream._observe.judge.trials import Reported
    from userstream._observe.judging import Judging
    from userstream._observe.recording import Recorder

_PAUSE = 0.05  # seconds between two looks for threads and frameworks
_POLL = 0.05  # seconds between two looks at a flag whose wake-up another thread took
_CLOSING = 0.002  # seconds between two looks whether all was sent on

# The session that records: one at a time, because there is one log. Only threads of sessions take
# the lock, and signal handlers never run in these.
_turn = _process.Lock()
_active: Session | None = None


class _Flag:
    """An event that stays usable if a signal handler raises inside its methods.

    `threading.Event` would keep its lock, and the next thread that uses it would wait forever.
    """

    __slots__ = ("_wake", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        self._wake = _process.Lock()
        self._wake.acquire()

    def ring(self) -> None:
        """Wake one waiting thread."""
        with suppress(RuntimeError):  # it was rung before, and nobody has waited since
            self._wake.release()

    def sleep(self, seconds: float) -> None:
        """Wait until the flag is rung, or for some time."""
        # A schedule of `testing` must not take the wait for one of the program.
        account.on(account.HOUSEKEEPING, self._wake.acquire, True, seconds)

    def set(self) -> None:
        """Set the flag."""
        self.is_set = True
        self.ring()

    def wait(self) -> None:
        """Wait until the flag is set."""
        while not self.is_set:
            self.sleep(_POLL)


class _Question:
    """A question for the findings, which the judge answers when it gets there in the log."""

    __slots__ = ("answer", "answered", "is_asked", "number", "operations")

    def __init__(self, number: int, operations: int) -> None:
        self.number = number
        self.operations = operations  # of the timeline: the most that are wanted
        self.is_asked = False  # the log had no room for it yet
        self.answered = _Flag()
        self.answer: Findings | None = None


class Session:
    """Thread that starts the recorder, passes the log to the judge, and stops the recorder.

    Signal handlers run on the main thread only, so that their exceptions cannot leave a session
    half-started or half-ended. Another thread sets a flag and waits; if that wait is interrupted,
    the session ends all the same.

    Parameters
    ----------
    owner : object
        What holds the session: when nobody holds it any more, the session ends.
    recorder : Recorder
        The recorder.
    judging : Judging
        The judge.
    path : str or None
        The file of the log.
    memory : int
        How many bytes may wait to be written or judged.
    allocators : Allocators or None
        The allocators of frameworks whose blocks are told to the judge.
    holds : tuple of int
        How often a stream may be held to make a race happen, in all and for each pair of lines.
    reported : sequence of Reported
        Pairs of an earlier report, which are held from the first time on.
    """

    def __init__(
        self,
        owner: object,
        recorder: Recorder,
        judging: Judging,
        *,
        path: str | None,
        memory: int,
        allocators: Allocators | None,
        holds: tuple[int, int] = (0, 0),
        reported: Sequence[Reported] = (),
    ) -> None:
        self.judging = judging
        self.begun = _Flag()
        self.done = _Flag()
        self.failure: BaseException | None = None  # of the begin or the analysis
        self.log_failure: OSError | None = None  # of writing the log
        self.wanted = True  # until it is asked to end
        self.is_of_parent = False  # this process was forked since
        self._owner = weakref.ref(owner)
        self._recorder = recorder
        self._path = path
        self._memory = memory
        self._allocators = allocators
        self._holds = holds
        self._reported = reported
        self._declaring = Declaring(recorder)
        self._numbers = itertools.count(1)
        self._questions: dict[int, _Question] = {}
        self._threads = 0  # that were recorded when their names were told
        self._ident = 0  # of the thread

    # -- for other threads ------------------------------------------------------------------------

    def start(self) -> None:
        """Start recording; raise the error if that fails."""
        _process.check_ending("the thread of the observation")
        # Not a `threading.Thread`: a program that joins all threads of `threading.enumerate`, or
        # sleeps until `threading.active_count` is 1, would wait for this one forever.
        account.on(account.HOUSEKEEPING, _thread.start_new_thread, self._run, ())
        while not (self.begun.is_set or self.done.is_set):
            self.begun.sleep(_POLL)
        if not self.begun.is_set and self.failure is not None:
            raise self.failure

    def end(self) -> None:
        """Ask the thread to end. The thread ends even if the caller is interrupted."""
        self.wanted = False
        self._recorder.ring()

    def ask(self, operations: int = 0) -> Findings:
        """Return the findings of the log until now, with at most so many operations."""
        if self.judging.answers() and not (self.done.is_set or self._ident == _thread.get_ident()):
            question = self._put(operations)
            while not (question.answered.is_set or self.done.is_set or self.judging.is_gone):
                question.answered.sleep(_POLL)
                self._write(question)
            if question.answer is not None:
                return question.answer
        if self.failure is not None:
            raise self.failure
        return self.judging.findings(operations)

    def _put(self, operations: int) -> _Question:
        """Put a question into the log. If that has ended, the thread answers."""
        question = _Question(next(self._numbers), operations)
        self._questions[question.number] = question
        self._name_threads()
        self._write(question)
        return question

    def _write(self, question: _Question) -> None:
        """Record a question in the log, once."""
        if not question.is_asked:
            told = {"number": question.number, "operations": question.operations}
            question.is_asked = self._recorder.note_json(log.QUESTION, told)

    def answer(self, number: int, findings: Findings) -> None:
        """Pass the answer to a question to the thread that waits for the answer."""
        self._try()  # what the caller does next may be what is to be tried
        question = self._questions.pop(number, None)
        if question is not None:
            question.answer = findings
            question.answered.set()

    def forbid_stalls(self, number: int, *, in_all_threads: bool) -> None:
        """Begin a block in which no thread, or not the calling one, may wait for the GPU."""
        self._recorder.note(log.NO_STALLS, (number, 1, int(in_all_threads)))

    def forbid_no_more(self, number: int) -> None:
        """End a block of `forbid_stalls`."""
        self._recorder.note(log.NO_STALLS, (number, 0, 0))

    def forbidden(self, number: int) -> tuple[Stall, ...]:
        """Return the waits in a block of `forbid_stalls`; empty if the judge does not answer."""
        if self.is_of_parent or not self.judging.answers():
            return ()
        if self.done.is_set:
            raise RuntimeError(
                "the observation that a block of no_stalls was in has ended before the block, so "
                "that waits in the rest of it were not seen"
            )
        found = self.ask()
        if self.judging.is_gone:
            raise RuntimeError(
                "the judge of the observation that a block of no_stalls is in has ended before the "
                "block, so that waits in it were not seen"
            )
        return tuple(each for each in found.forbidden if each._block == number)

    def note_blocks(self, races: int | None = None) -> None:
        """Report the allocators' blocks to the judge if races were added."""
        if self._allocators is None or self.done.is_set:
            return
        blocks = self._allocators.blocks(_count(self.ask()) if races is None else races)
        if blocks is not None:
            self._recorder.note_in_parts(log.BLOCKS, blocks)

    def forked(self) -> None:
        """End in a forked child, in which the thread does not exist."""
        self.is_of_parent = True
        self.wanted = False
        self._declaring.end()
        self.judging.forked()
        self.begun.is_set = self.done.is_set = True

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        sys.settrace(threading.gettrace())  # as in a `threading.Thread`: for coverage, a debugger
        self._ident = _thread.get_ident()
        _process.exempt_from_parking()
        try:
            if self._claim():
                try:
                    self._watch()
                finally:
                    self._release()
        except BaseException as error:
            self.failure = error
        finally:
            self._ident = 0
            self.done.set()
            self.begun.ring()

    def _claim(self) -> bool:
        """Become the session that records; wait for the end of one that was asked to end."""
        global _active  # noqa: PLW0603 -- there is one
        while self._is_wanted():
            with _turn:
                other = _active
                if other is None:
                    _active = self
                    return True
            if other._is_wanted():
                raise RuntimeError(
                    "the streams of this process are already being observed: by another observe(), "
                    "by `python -m userstream observe`, or by `pytest --races`, which leaves out "
                    "tests that are marked no_races(False)"
                )
            other.done.sleep(_PAUSE)
        return False

    def _is_wanted(self) -> bool:
        """Return whether to record: until `end`, or until nobody holds the observation.

        A signal handler may raise between the begin of a ``with`` statement and its block, and
        then nothing leaves the block.
        """
        return self.wanted and self._owner() is not None

    def _release(self) -> None:
        global _active  # noqa: PLW0603 -- there is one
        if _active is self:
            _active = None

    def _watch(self) -> None:
        with ExitStack() as ends:  # all of them, also if one raises
            self._begin(ends)
            self.begun.set()
            while self._is_wanted():
                self._receive(_PAUSE)
                self._name_threads()
                if self._allocators is not None:
                    self._allocators.look()
            self._end_notes()
        for number, question in [*self._questions.items()]:
            self.answer(number, self.judging.findings(question.operations))

    def _begin(self, ends: ExitStack) -> None:
        with ExitStack() as files:
            file = -1
            if self._path is not None:
                file = _log_file(self._path)
                files.callback(os.close, file)
            judge, is_here = self.judging.open(), self.judging.is_here
            ends.callback(self.judging.close)
            self._recorder.begin(
                file=file,
                judge=judge,
                judges_here=is_here,
                memory=self._memory,
                holds=self._holds,
                reported=self._reported,
            )
            ends.callback(self._close)
            self.judging.began(self.answer)
        self._recorder.note_json(log.NAMES, {"streams": dict(_names_of_streams())})
        self._name_threads()
        ends.callback(self._declaring.end)
        self._declaring.begin()

    def _receive(self, seconds: float) -> bool:
        """Pass arriving records to the judge for some time; return whether any arrived."""
        data = self._recorder.receive(seconds)
        if data:
            self.judging.receive(data)
            self._try()
        return bool(data)

    def _try(self) -> None:
        """Pass the suspected pairs of the judge to the recorder for a trial."""
        if not self._holds[0]:
            return
        for order in self.judging.orders():
            if isinstance(order, int):
                self._recorder.disarm(order)
            else:
                self._recorder.arm(order)

    def _name_threads(self) -> None:
        """Record the names of Python's threads if a thread was added."""
        count = self._recorder.threads()
        if count == self._threads:
            return
        self._threads = count
        # A thread that is about to start has no number yet.
        names = {each.native_id: each.name for each in threading.enumerate() if each.native_id}
        self._recorder.note_json(log.NAMES, {"threads": names})

    def _end_notes(self) -> None:
        self._threads = 0
        self._name_threads()
        if self._allocators is None:
            return
        races = -1  # for a judge of another time
        if self.judging.answers() and self._path is None:
            question = self._put(0)
            while not (question.answered.is_set or self.judging.is_gone):
                self._receive(_PAUSE)
                self._write(question)
            races = _count(question.answer)
        self.note_blocks(races)
        self._allocators.finish()  # which forgets the blocks
        self._recorder.note_json(log.UNSEEN, self._allocators.unseen())

    def _close(self) -> None:
        """End the log, and give the judge the rest of it."""
        self._recorder.end("the end of the observation")
        is_closed = False
        try:
            while self._receive(_CLOSING) or not is_closed:
                is_closed = is_closed or self._recorder.close()
        finally:
            self._recorder.hang_up()  # should it have failed, the recorder does not wait for it
            while not self._recorder.close():
                time.sleep(_CLOSING)
            self.log_failure = self._recorder.log_error()


def active() -> Session | None:
    """Return the session that records, unless it is about to end."""
    session = _active
    return session if session is not None and session._is_wanted() else None


def _count(findings: Findings | None) -> int:
    """Return a number that grows with each race that is found."""
    return 0 if findings is None else sum(race.count for race in findings.races)


def _log_file(path: str) -> int:
    """Create the file of a log, which only its owner can read: it names files and commands."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)


def _names_of_streams() -> Iterator[tuple[int, str]]:
    """Return the handles and names of the user streams."""
    # No import: this is another thread, and the main one may be in the middle of an import.
    registry = sys.modules.get("userstream._registry")
    if registry is None:
        return
    for stream in registry.UserStream.get().streams().values():
        if not stream.is_closed:
            yield int(stream.handle), name_of(stream)


def _in_child() -> None:
    """Forget the parent's session in a forked child: its thread and locks stayed behind."""
    global _active, _turn  # noqa: PLW0603 -- there is one of each
    _turn = _process.Lock()
    session, _active = _active, None
    if session is not None:
        session.forked()


def _at_exit() -> None:
    session = _active
    if session is not None:
        session.end()
        session.done.wait()


# Also in children of processes in which only other libraries have used the driver.
os.register_at_fork(after_in_child=_in_child)
atexit.register(_at_exit)  # what is recorded is judged before Python ends
