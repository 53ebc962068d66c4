"""The session that watches the process, and the `Observation` that users hold."""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections import deque
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypeVar

from userstream import _process
from userstream._driver import account
from userstream._observe.allocators import Allocators
from userstream._observe.declaring import Declaring
from userstream._observe.judge import Judge, reports
from userstream._observe.judge import log as log_format
from userstream._observe.judge.found import read_suppressions
from userstream._observe.logger import the_logger
from userstream._observe.recording import Recording
from userstream.errors import RaceError
from userstream.testing import _simulated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from types import TracebackType
    from typing import BinaryIO

    from userstream._observe.judge.found import Race, Stall
    from userstream._observe.judge.functions import Function
    from userstream._observe.judge.log import Block
    from userstream._observe.logger import Driver, Logger

    T = TypeVar("T")

_PAUSE = 0.02  # seconds between two reads of the log
_POLL = 0.05  # seconds between two looks at a flag whose wake-up another thread took
_MOST_KEPT = 1_000_000  # operations of the timeline

# The session that watches: one at a time, because there is one hook and one log. Only threads of
# sessions take the lock, and signal handlers never run in these.
_turn = _process.Lock()
_active: _Session | None = None
_inherited: list[Callable[[], None]] = []  # in a forked child: ends of the hook of its parent


class Maker(Protocol):
    """Interface to the source of driver calls: the simulated driver or CUPTI."""

    def functions(self) -> dict[int, tuple[str, Function]]: ...
    def driver(self) -> Driver: ...
    def begin(self, logger: Logger) -> Callable[[], None]: ...


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
        self._wake.acquire(timeout=seconds)

    def set(self) -> None:
        """Set the flag."""
        self.is_set = True
        self.ring()

    def wait(self) -> None:
        """Wait until the flag is set."""
        while not self.is_set:
            self.sleep(_POLL)


class _Question:
    """A function of the judge that the thread of a session calls for another thread."""

    __slots__ = ("answer", "answered", "error", "function")

    def __init__(self, function: Callable[[Judge], Any]) -> None:
        self.function = function
        self.answered = _Flag()
        self.answer: Any = None
        self.error: BaseException | None = None


class _Session:
    """The thread that begins to watch, analyzes what is logged, and ends to watch.

    All of it happens on this thread, because signal handlers run on the main thread only: an
    exception of theirs cannot leave it half-begun or half-ended. Another thread sets a flag and
    waits; if its wait is interrupted, this thread ends all the same.
    """

    def __init__(
        self,
        owner: Observation,
        maker: Maker,
        functions: Mapping[int, tuple[str, Function]],
        *,
        judge: Judge | None,
        recording: Recording,
        path: str | None,
        logger: Logger,
        declaring: Declaring,
        allocators: Allocators | None,
    ) -> None:
        self.judge = judge
        self.begun = _Flag()
        self.done = _Flag()
        self.failure: BaseException | None = None  # of the begin or the analysis
        self.log_failure: OSError | None = None  # of writing the log
        self.began = self.seconds = 0.0
        self.wanted = True  # until it is asked to end
        self._owner = weakref.ref(owner)
        self._maker = maker
        self._functions = functions
        self._recording = recording
        self._path = path  # of the log
        self._writer: log_format.Writer | None = None
        self._logger = logger
        self._declaring = declaring
        self._allocators = allocators
        self._questions: deque[_Question] = deque()
        self._bell = _Flag()
        self._daemon = _process.Daemon(self._run, "userstream-observer")
        self.is_of_parent = False  # this process was forked since
        self._stop: Callable[[], None] | None = None

    # -- for other threads ------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to watch. Raise the error of the begin."""
        self._daemon.start()
        while not (self.begun.is_set or self.done.is_set):
            self.begun.sleep(_POLL)
        if not self.begun.is_set and self.failure is not None:
            raise self.failure

    def end(self) -> None:
        """Ask the thread to end. The thread ends even if the caller is interrupted."""
        self.wanted = False
        self._bell.ring()

    def ask(self, function: Callable[[Judge], T]) -> T:
        """Apply the log until now; return the result of `function` on the judge."""
        if not self.done.is_set and not self._daemon.is_current():
            question = _Question(function)
            self._questions.append(question)
            self._bell.ring()
            while not (question.answered.is_set or self.done.is_set):
                question.answered.sleep(_POLL)
            if question.answered.is_set:
                if question.error is not None:
                    raise question.error
                return question.answer  # type: ignore[no-any-return]  # of `function`
        if self.failure is not None:
            raise self.failure
        return function(self._judge_or_raise())

    def _judge_or_raise(self) -> Judge:
        if self.judge is None:
            raise RuntimeError(
                'this observation is only recorded, as judge="later" asks for: judge its log with '
                "`python -m userstream judge`"
            )
        return self.judge

    def forked(self) -> None:
        """End in a forked child, in which the thread does not exist."""
        self.is_of_parent = True
        self.wanted = False
        self._declaring.end()
        if self._stop is not None:
            _inherited.append(self._stop)
        self.begun.is_set = self.done.is_set = True

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if self._claim():
                try:
                    self._watch()
                finally:
                    self._release()
        except BaseException as error:
            self.failure = error
        finally:
            self.done.set()
            self.begun.ring()

    def _claim(self) -> bool:
        """Become the session that watches; wait for the end of one that was asked to end."""
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
        """Return whether to watch: until `end`, or until nobody holds the observation.

        A signal handler may raise between the begin of a ``with`` statement and its block, and
        then nothing leaves the block.
        """
        return self.wanted and self._owner() is not None

    def _release(self) -> None:
        global _active  # noqa: PLW0603 -- there is one
        if _active is self:
            _active = None

    def _watch(self) -> None:
        self._logger.watch({number: each for number, (_, each) in self._functions.items()})
        self.began = time.monotonic()
        while _inherited:
            _inherited.pop()()
        with ExitStack() as file:
            if self._path is not None:
                self._writer = log_format.Writer(file.enter_context(_log_file(self._path)))
            self._record()
            self._end_log()
        self._answer()

    def _record(self) -> None:
        """Watch until it is no longer wanted."""
        with ExitStack() as ends:  # all of them, also if one raises
            ends.callback(self._logger.end)
            self._logger.take_account(account.address())
            self._logger.begin(self._maker.driver())
            self._take([self._recording.header()])
            self._stop = self._maker.begin(self._logger)
            ends.callback(self._stop)
            ends.callback(self._logger.end)  # before calls go unseen by the recorder
            ends.callback(self._declaring.end)
            self._declaring.begin()
            self.begun.set()
            self._analyze()
            self.seconds = time.monotonic() - self.began

    def _end_log(self) -> None:
        """Take what is left of the log, and end it."""
        self._catch_up(everything=True)
        if self._allocators is not None:  # after which they forget the blocks
            self._read_blocks(everything=True)
            self._allocators.finish()
        self._take(self._recording.end("the end of the observation"))
        if self.judge is not None:
            self.judge.finish()

    def _analyze(self) -> None:
        while self._is_wanted():
            self._catch_up()
            if self._allocators is not None:
                self._allocators.look()
            self._answer()
            if not self._questions:
                self._bell.sleep(_PAUSE)

    def _answer(self) -> None:
        """Answer the questions of other threads."""
        for _ in range(len(self._questions)):
            question = self._questions.popleft()
            try:
                self._catch_up()
                if self._allocators is not None:
                    self._read_blocks()
                question.answer = question.function(self._judge_or_raise())
            except BaseException as error:
                question.error = error
            question.answered.set()

    def _read_blocks(self, *, everything: bool = False) -> None:
        """Read the blocks of the allocators anew if there are new races, or for the log."""
        if self._allocators is None:
            return
        blocks = None
        if self.judge is not None:
            blocks = self.judge.blocks = self._allocators.blocks(self.judge.count_races())
        if everything and self._writer is not None:
            if blocks is None:
                blocks = self._allocators.blocks(-1)
            self._write([blocks.as_block()])

    def _catch_up(self, *, everything: bool = False) -> None:
        """Take the log until now. Other threads may log without end."""
        left = None
        while left is None or left >= 0 or everything:
            blocks, behind = self._recording.read()
            left = (behind if left is None else left) - 1
            self._take(blocks)
            if not blocks:
                break

    def _take(self, blocks: Iterable[Block]) -> None:
        """Write blocks to the log, if there is one, and give them to the judge."""
        blocks = list(blocks)
        self._write(blocks)
        if self.judge is not None:
            for block in blocks:
                self.judge.take(block)

    def _write(self, blocks: Iterable[Block]) -> None:
        """Write blocks to the log; after a failure write no more, and raise the error at the end.

        The log has no `END` then, and whoever judges it is told that it is not whole.
        """
        if self._writer is None:
            return
        try:
            for block in blocks:
                self._writer.write(block)
        except OSError as error:
            self._writer = None
            self.log_failure = error


class Observation:
    """An observation of the streams and the memory of the process; see `observe`.

    Parameters
    ----------
    possible : bool
        Whether `races` includes possible races.
    suppress : path or iterable of str
        Which races are not reported.
    stall : float
        The shortest call, in seconds, that counts as a stall.
    threads : {"shared", "strict"}
        Whether every host thread knows what any of them has waited for.
    timeline : int
        The largest number of operations on the page of `save`.
    allocations : bool
        Whether races name the lines that allocated tensors and arrays.
    log : path or None
        The file to which the log is written.
    judge : {"thread", "later"}
        Whether a thread judges what is recorded, or only ``python -m userstream judge`` later.

    Examples
    --------
    >>> import userstream as us
    >>> with us.observe() as seen:
    ...     us.wait(us.get_stream(0))
    >>> seen.races
    ()
    """

    def __init__(
        self,
        *,
        possible: bool = False,
        suppress: str | os.PathLike[str] | Iterable[str] = (),
        stall: float = 1e-4,
        threads: Literal["shared", "strict"] = "shared",
        timeline: int = 20_000,
        allocations: bool = False,
        log: str | os.PathLike[str] | None = None,
        judge: Literal["thread", "later"] = "thread",
    ) -> None:
        _process.check_fork()  # before the locks, which stay as they were in a forked child
        if isinstance(stall, bool) or not isinstance(stall, (int, float)):
            raise TypeError(f"stall must be seconds, an int or a float, not {stall!r}")
        if not stall >= 0:
            raise ValueError(f"stall must be at least 0 seconds, not {stall!r}")
        if threads not in ("shared", "strict"):
            raise ValueError(f'threads must be "shared" or "strict", not {threads!r}')
        if isinstance(timeline, bool) or not isinstance(timeline, int):
            raise TypeError(f"timeline must be a number of operations, an int, not {timeline!r}")
        if not 0 <= timeline <= _MOST_KEPT:
            raise ValueError(f"timeline must be from 0 to {_MOST_KEPT:,}, not {timeline!r}")
        if judge not in ("thread", "later"):
            raise ValueError(f'judge must be "thread" or "later", not {judge!r}')
        if judge == "later" and log is None:
            raise ValueError('judge="later" needs log=, the file to judge later')
        self._log = None if log is None else os.path.abspath(os.fspath(log))
        self._judge: Judge | None = None
        if judge == "thread":
            self._judge = Judge(
                possible=bool(possible),
                suppressions=read_suppressions(suppress),
                stall=float(stall),
                strict=threads == "strict",
                timeline=timeline,
            )
        self._logger = the_logger()
        self._declaring = Declaring(self._logger)
        self._allocators = Allocators(self._logger) if allocations else None
        self._session: _Session | None = None

    # -- from when to when ------------------------------------------------------------------------

    def __enter__(self) -> Self:
        _process.check_fork()
        maker = _maker()
        if self._session is not None:
            raise RuntimeError("an observation is used once: call observe() again")
        functions = maker.functions()
        recording = Recording(self._logger, functions)
        if self._allocators is not None:
            recording.unseen = self._allocators.unseen
        session = _Session(
            self,
            maker,
            functions,
            judge=self._judge,
            recording=recording,
            path=self._log,
            logger=self._logger,
            declaring=self._declaring,
            allocators=self._allocators,
        )
        try:
            self._session = session
            session.start()
            if self._allocators is not None:  # here: a hook of CuPy is of the thread that enters it
                self._allocators.begin()
        except BaseException:
            session.end()
            self._leave_allocators()
            if session.begun.is_set:
                session.done.wait()
            if not session.begun.is_set:
                self._session = None  # refused: it may be entered later
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop watching; the findings are kept.

        Examples
        --------
        >>> import userstream as us
        >>> with us.observe() as seen:
        ...     seen.stop()
        """
        session = self._session
        if session is None:
            return
        is_first = session.wanted
        session.end()  # an exception of a signal handler from here on changes nothing
        try:
            session.done.wait()
        finally:
            self._leave_allocators()
        failure = session.failure or session.log_failure
        if is_first and failure is not None:
            raise failure

    def _leave_allocators(self) -> None:
        session = self._session
        if self._allocators is not None and not (session is not None and session.is_of_parent):
            self._allocators.end()

    def _ask(self, function: Callable[[Judge], T]) -> T:
        if _process.forked:
            _process.check_fork()
        if self._session is None:
            raise RuntimeError("nothing has been observed yet: enter the observation (`with`)")
        return self._session.ask(function)

    # -- what was found ---------------------------------------------------------------------------

    @property
    def races(self) -> tuple[Race, ...]:
        """The races found so far, one for each pair of lines.

        Examples
        --------
        >>> import userstream as us
        >>> with us.observe() as seen:
        ...     seen.races
        ()
        """
        return self._ask(Judge.races)

    @property
    def stalls(self) -> tuple[Stall, ...]:
        """The calls in which the host waited or was held up, longest first.

        Examples
        --------
        >>> import userstream as us
        >>> with us.observe() as seen:
        ...     seen.stalls
        ()
        """
        return self._ask(Judge.stalls)

    @property
    def not_seen(self) -> tuple[str, ...]:
        """Sentences that say what could not be observed.

        Examples
        --------
        >>> import userstream as us
        >>> with us.observe() as seen:
        ...     seen.not_seen
        ()
        """
        return self._ask(Judge.not_seen)

    def check(self) -> None:
        """Raise `RaceError`, with the report as its message, if there are races.

        Raises
        ------
        RaceError
            There are races.

        Examples
        --------
        >>> import userstream as us
        >>> with us.observe() as seen:
        ...     stream = us.get_stream(0)
        >>> seen.check()
        """
        races = self.races
        if races:
            raise RaceError(str(self), races=[race.key for race in races])

    def __str__(self) -> str:
        return self._ask(lambda judge: judge.report(self._watched()))

    def __repr__(self) -> str:
        session = self._session
        state = "new" if session is None else "watches" if session.wanted else "ended"
        return f"<userstream.Observation: {state}>"

    def as_dict(self) -> dict[str, Any]:
        """Return all findings as JSON-serializable data.

        Returns
        -------
        dict
            Made of numbers, strings, lists and dictionaries.

        Examples
        --------
        >>> import userstream as us
        >>> with us.observe() as seen:
        ...     stream = us.get_stream(0)
        >>> seen.as_dict()["races"]
        []
        """
        return self._ask(lambda judge: judge.document(self._watched()))

    def _watched(self) -> float:
        """Return for how many seconds the process was watched."""
        session = self._session
        return 0.0 if session is None else session.seconds or time.monotonic() - session.began

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the findings to a file, whose suffix chooses the kind of report.

        ``.html`` is a self-contained page that shows the newest operations, up to
        ``observe(timeline=)``, in one row per stream and thread; ``.json`` has what `as_dict`
        returns; ``.sarif`` is SARIF 2.1.0, for code scanning; ``.trace.json`` opens in Perfetto and
        shows the operations as the page does; ``.txt`` is the report as text.

        Parameters
        ----------
        path : str or path
            The file; an existing one is replaced. It is written whole or not at all.

        Raises
        ------
        ValueError
            The name has another suffix.

        Examples
        --------
        >>> import os, tempfile
        >>> import userstream as us
        >>> with us.observe() as seen:
        ...     stream = us.get_stream(0)
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     seen.save(os.path.join(directory, "seen.html"))
        """
        name = os.fspath(path)
        suffix = reports.suffix_of(name)
        reports.save(name, self._ask(lambda judge: reports.text_of(judge, suffix, self._watched())))


def _maker() -> Maker:
    if _simulated.is_simulated():
        from userstream._observe.simulated import Simulated

        return Simulated()
    from userstream._observe.cupti import Cupti

    return Cupti()


def _log_file(path: str) -> BinaryIO:
    """Create the file of a log, which only its owner can read: it names files and commands."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    return open(os.open(path, flags, 0o600), "wb", buffering=0)


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
atexit.register(_at_exit)  # no thread may read Python's frames when they are gone
