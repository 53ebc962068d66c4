"""The `Observation` that users hold, and the blocks of `no_stalls`, which need one."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal, Self

from userstream import _process
from userstream._observe.judge import reports
from userstream._observe.judge.finding_types import read_suppressions
from userstream._observe.judge.findings import Report, plural
from userstream._observe.judge.lines import render
from userstream._observe.judge.trials import reported_pairs
from userstream._observe.judging import InProcess, InThread, Later
from userstream._observe.notes import Allocators
from userstream._observe.recording import MEMORY, the_recorder
from userstream._observe.session import Session, active
from userstream._stream.factory import address_of
from userstream.errors import RaceError, StallError

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from userstream._observe.judge.finding_types import Race, Stall, WrongStream
    from userstream._observe.judging import Judging
    from userstream.typing import StreamLike

_MOST_KEPT = 1_000_000  # operations of the timeline
_LEAST_MEMORY = 1 << 20
_TRIALS = 100  # of observe(confirm=True)
_TRIALS_OF_PAIR = 5
_MOST_TRIALS = 1_000_000

_numbers = itertools.count(1)  # of blocks of `no_stalls`


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
        Whether the allocators of PyTorch and CuPy are queried: races name the lines that allocated
        tensors and arrays, and those that are freed while another stream uses them are reported.
    log : path or None
        The file to which the log is written.
    judge : {"thread", "process", "later"}
        What judges the log: a thread, a process, or only ``python -m userstream judge`` later.
    memory : int
        How many bytes of records may wait for the judge.
    confirm : bool, int or tuple of int
        Whether suspected races are made to happen, or how often at most, in all and for each pair
        of lines.
    confirm_from : path or None
        A report as JSON, whose races are tried from the first time on.
    expect_streams : bool or iterable of streams
        Whether operations on the legacy default stream are reported; or on which other streams
        as well.

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
        judge: Literal["thread", "process", "later"] = "thread",
        memory: int = MEMORY,
        confirm: bool | int | tuple[int, int] = False,
        confirm_from: str | os.PathLike[str] | None = None,
        expect_streams: bool | Iterable[int | StreamLike] = False,
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
        if judge not in ("thread", "process", "later"):
            raise ValueError(f'judge must be "thread", "process" or "later", not {judge!r}')
        if judge == "later" and log is None:
            raise ValueError('judge="later" needs log=, the file to judge later')
        if isinstance(memory, bool) or not isinstance(memory, int):
            raise TypeError(f"memory must be a number of bytes, an int, not {memory!r}")
        if memory < _LEAST_MEMORY:
            raise ValueError(f"memory must be at least {_LEAST_MEMORY:,} bytes, not {memory!r}")
        if confirm_from is not None:
            confirm = confirm or True
        self._holds = _trials(confirm, judge)
        self._reported = [] if confirm_from is None else reported_pairs(os.fspath(confirm_from))
        self._possible = bool(possible)
        self._log = None if log is None else os.path.abspath(os.fspath(log))
        options = {
            "possible": self._possible,
            "suppressions": read_suppressions(suppress),
            "stall": float(stall),
            "strict": threads == "strict",
            "timeline": timeline,
            "forbidden": _forbidden(expect_streams),
            "trials": self._holds[1],
        }
        self._judging: Judging = Later()
        if judge != "later":
            self._judging = InThread(options) if judge == "thread" else InProcess(options)
        self._memory = memory
        self._recorder = the_recorder()
        self._allocators = Allocators(self._recorder) if allocations else None
        self._session: Session | None = None

    # -- from when to when ------------------------------------------------------------------------

    def __enter__(self) -> Self:
        _process.check_fork()
        if self._session is not None:
            raise RuntimeError("an observation is used once: call observe() again")
        session = Session(
            self,
            self._recorder,
            self._judging,
            path=self._log,
            memory=self._memory,
            allocators=self._allocators,
            holds=self._holds,
            reported=self._reported,
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

    def __exit__(self, *exception: object) -> None:
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

    def _report(self, operations: int = 0) -> Report:
        """Return the findings until now, with at most so many operations."""
        if _process.forked:
            _process.check_fork()
        session = self._begun
        session.note_blocks()
        return Report([session.ask(operations)], possible=self._possible)

    @property
    def _begun(self) -> Session:
        if self._session is None:
            raise RuntimeError("nothing has been observed yet: enter the observation (`with`)")
        return self._session

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
        return tuple(found.what for found in self._report().reported)

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
        return tuple(found.what for found in self._report().stalls)

    @property
    def wrong_streams(self) -> tuple[WrongStream, ...]:
        """The operations on streams to be avoided, with ``observe(expect_streams=)``.

        Examples
        --------
        >>> import userstream as us
        >>> with us.observe(expect_streams=True) as seen:
        ...     seen.wrong_streams
        ()
        """
        return tuple(found.what for found in self._report().wrong_streams)

    @property
    def hangs(self) -> tuple[str, ...]:
        """Reports of the streams that were not known to be done when a wait timed out.

        For each stream: the operation at its head, what that waits for, and the line that queued
        what has to run before. Streams that wait for each other are named as a cycle.

        Examples
        --------
        >>> import userstream as us
        >>> with us.observe() as seen:
        ...     us.wait(us.get_stream(0), timeout=60)
        >>> seen.hangs
        ()
        """
        return tuple(self._report().hangs())

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
        return self._report().findings[0].not_seen

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
        return render(self._report().lines())

    def __repr__(self) -> str:
        session = self._session
        if session is None:
            state = "new"
        elif session.is_of_parent:
            state = "of the parent process"
        elif not session.done.is_set:
            state = "watches"
        elif session.failure is not None:
            state = "failed"
        elif not session.judging.answers():
            state = "recorded"
        else:
            report = self._report()
            counts = (
                plural(len(report.reported), "race"),
                plural(len(report.stalls), "stall"),
                plural(sum(report.calls.values()), "driver call"),
            )
            state = ", ".join(counts)
        return f"<userstream.Observation: {state}>"

    def _repr_html_(self) -> str | None:
        """Return the report and the timeline for a notebook; `None` if there is no report."""
        session = self._session
        if session is None or session.is_of_parent or session.failure is not None:
            return None
        if not session.judging.answers():
            return None
        return reports.notebook(self._report(_MOST_KEPT))

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
        return self._report().document()

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
        operations = _MOST_KEPT if reports.needs_timeline(suffix) else 0
        reports.save(name, reports.text_of(self._report(operations), suffix))


def _forbidden(expect_streams: bool | Iterable[int | StreamLike]) -> tuple[int, ...] | None:
    """Return the handles of the streams to be avoided; `None` if there are none."""
    if isinstance(expect_streams, bool):
        return () if expect_streams else None
    if not isinstance(expect_streams, Iterable) or isinstance(expect_streams, (str, bytes)):
        raise TypeError(
            f"expect_streams must be a bool, or the streams to be avoided, not {expect_streams!r}"
        )
    return tuple(address_of(each) for each in expect_streams)


def _trials(confirm: bool | int | tuple[int, int], judge: str) -> tuple[int, int]:
    """Return how often a stream may be held, in all and for each pair of lines."""
    limits: Any = confirm if isinstance(confirm, tuple) else (confirm, _TRIALS_OF_PAIR)
    if len(limits) != 2 or not all(isinstance(each, int) for each in limits):
        raise TypeError(
            "confirm must be a bool, a number of trials, or two numbers: of all trials, and of "
            f"those of each pair of lines, not {confirm!r}"
        )
    if min(limits) < 0:
        raise ValueError(f"confirm must be at least 0 trials, not {confirm!r}")
    most, most_of_pair = (min(each, _MOST_TRIALS) for each in limits)
    if most and judge != "thread":
        raise ValueError('confirm needs judge="thread", which says what to try')
    return _TRIALS if confirm is True else most, most_of_pair


def _is_open(path: str) -> bool:
    """Return whether a descriptor of this process refers to a file."""
    for each in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile
            if os.path.samestat(os.stat(path), os.stat(int(each))):
                return True
    return False


_observation: Observation | None = None


def record_this_process(environment: Mapping[str, str]) -> None:
    """Record until the process ends, for ``userstream observe``, whose supervisor judges the log.

    A file says why that is not possible.

    Nothing is begun where the driver was initialized before, and has loaded the recorder, nor in a
    process that has outlived the command, as a daemon does: the directory is gone.
    """
    global _observation  # noqa: PLW0603 -- there is one
    directory = environment["USERSTREAM_RECORD"]
    if not os.path.isdir(directory):
        return
    with open("/proc/self/stat", "rb") as file:
        start = file.read().rpartition(b")")[2].split()[19].decode()
    path = os.path.join(directory, f"{os.getpid()}-{start}")
    log, number = f"{path}.uslog", 1
    while os.path.exists(log):
        if _is_open(log):
            return
        number += 1  # the log of the program that this one has replaced by `exec`
        log = f"{path}-{number}.uslog"
    report = environment.get("USERSTREAM_RECORD_CONFIRM")  # then a judge here says what to try
    is_confirmed = report is not None
    try:
        _observation = Observation(
            log=log,
            judge="thread" if is_confirmed else "later",
            confirm=is_confirmed,
            confirm_from=report or None,
            timeline=0,
            allocations="USERSTREAM_RECORD_ALLOCATIONS" in environment,
        )
        _observation.__enter__()
    except Exception as error:  # the program runs as without
        why = str(error).encode(errors="backslashreplace")
        with suppress(OSError), open(f"{path}.why", "wb") as file:
            file.write(why)


@contextmanager
def no_stalls(*, threads: Literal["all", "this"] = "all") -> Generator[None, None, None]:
    """Raise `StallError` at the end of the block if the host waited for the GPU inside.

    A call counts if it shows the host that work is done, such as a synchronization, a copy that
    returns when it is done, or freeing memory with work in flight, even if it took no time in this
    run. A wait for work that the host already knows to be done does not count. Other calls that
    hold the host up, such as an allocation or loading a module, count if they take 10 ms. A program
    that polls, as with `Stream.is_done`, does not wait.

    The process is watched meanwhile, as by `observe`. Inside the block of an `observe`, that
    observation is used. Under ``python -m userstream observe``, which judges in a process of its
    own, nothing is raised: the report has the waits, and ``--fail-on stalls`` makes the run fail.

    Parameters
    ----------
    threads : {"all", "this"}, default "all"
        Whether the waits of all threads count, or those of the calling thread.

    Returns
    -------
    context manager
        It is a decorator of functions as well.

    Raises
    ------
    StallError
        At the end of the block, unless the block itself raises.
    NotSupportedError
        On a GPU, CUPTI is missing or in use by another tool.
    UserStreamError
        Other causes: see :doc:`/reference/common-errors`.

    See Also
    --------
    stall_allowed : A block within it that may wait.

    Examples
    --------
    >>> import userstream as us
    >>> with us.no_stalls():
    ...     stream = us.get_stream(0)
    """
    if threads not in ("all", "this"):
        raise ValueError(f'threads must be "all" or "this", not {threads!r}')
    _process.check_fork()
    number = next(_numbers)
    with ExitStack() as own:
        recording = active()
        if recording is None:
            recording = own.enter_context(Observation(timeline=0))._begun
        recording.forbid_stalls(number, in_all_threads=threads == "all")
        try:
            yield
        finally:
            recording.forbid_no_more(number)
        stalls = [str(each) for each in recording.forbidden(number)]
    if stalls:
        raise StallError(_message_of(stalls), stalls=stalls)


def _message_of(stalls: list[str]) -> str:
    lines = ["the host waited for the GPU in a block of no_stalls:"]
    lines += [f"  {each}" for each in stalls]
    return "\n".join([*lines, 'wrap waits that are intended in `with us.stall_allowed("why"):`'])
