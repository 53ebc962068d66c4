"""`observe`: watches every stream of the process from here on."""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

from userstream import _process
from userstream._observe import records, suppressions
from userstream._observe.allocators import Allocators
from userstream._observe.blocks import Blocks
from userstream._observe.declaring import Declaring
from userstream._observe.engine import Engine
from userstream._observe.found import Race
from userstream._observe.logger import the_logger
from userstream._observe.page import page
from userstream._observe.stacks import Stacks
from userstream._process import Daemon
from userstream.errors import RaceError
from userstream.testing import _simulated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import TracebackType

    from userstream._observe.found import Stall
    from userstream._observe.functions import Function
    from userstream._observe.logger import Driver, Logger

_PAUSE = 0.02  # seconds between two looks at what was written
_SHOWN = 20  # stalls in the summary
_MOST_KEPT = 1_000_000  # operations of the timeline
_VERSION = 1  # of the JSON document

# One observation at a time: there is one hook, and one log.
_turn = _process.Lock()
_active: Observation | None = None


class Maker(Protocol):
    """What reports calls to the logger."""

    def functions(self) -> dict[int, tuple[str, Function]]: ...
    def driver(self) -> Driver: ...
    def begin(self, logger: Logger) -> Callable[[], None]: ...


class Observation:
    """Watches what all libraries of the process do with streams and memory; see `observe`.

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
        self._possible = bool(possible)
        self._suppressions = suppressions.read(suppress)
        self._threshold = float(stall)
        self._strict = threads == "strict"
        self._room = timeline
        self._lock = _process.Lock()  # of the engine, which has one reader at a time
        self._engine: Engine | None = None
        self._logger = the_logger()
        self._stacks = Stacks(self._logger)
        self._declaring = Declaring(self._logger)
        self._allocators = Allocators(self._logger, self._stacks) if allocations else None
        self._stop: Callable[[], None] | None = None
        self._ended = threading.Event()
        self._daemon = Daemon(self._run, "userstream-observer")
        self._drained = False  # the log is another observation's now
        self._lost = 0
        self._cut = False  # whether what was read last was not applied whole
        self._cuts = 0
        self._seconds = 0.0
        self._began = 0.0
        self._failure: Exception | None = None

    # -- from when to when ------------------------------------------------------------------------

    def __enter__(self) -> Self:
        global _active  # noqa: PLW0603 -- there is one
        _process.check_fork()
        maker = _maker()
        with _turn:
            if self._engine is not None:
                raise RuntimeError("an observation is used once: call observe() again")
            if _active is not None:
                raise RuntimeError(
                    "the streams of this process are already being observed: by another observe(), "
                    "by `python -m userstream observe`, or by `pytest --races`, which leaves out "
                    "tests that are marked no_races(False)"
                )
            functions = maker.functions()
            self._engine = Engine(
                functions,
                self._stacks,
                stall=self._threshold,
                strict=self._strict,
                timeline=self._room,
            )
            self._engine.world.names = _name_of
            self._logger.watch({number: each for number, (_, each) in functions.items()})
            self._began = time.monotonic()
            try:
                _active = self
                self._logger.begin(maker.driver())
                self._stop = maker.begin(self._logger)
                self._declaring.begin()
                if self._allocators is not None:
                    self._allocators.begin()
                self._daemon.start()
            except BaseException:
                try:
                    self._end_in_any_case()
                finally:
                    self._leave_allocators()
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
        with _turn:
            if _active is not self:
                return
            try:
                try:
                    self._seconds = time.monotonic() - self._began
                finally:
                    self._end_in_any_case()
                engine = self._catch_up()  # in our turn: the next observation clears the log
                with self._lock:
                    engine.finish()
                self._blocks(engine)  # which the allocators forget
            finally:
                self._leave_allocators()

    def _leave_allocators(self) -> None:
        if self._allocators is not None and not _process.forked:
            try:
                self._allocators.end()
            except BaseException:
                self._allocators.end()  # else it keeps its history: see `_end_in_any_case`
                raise

    def _end_in_any_case(self) -> None:
        try:
            self._end()
        except BaseException:
            # A signal handler raised in the middle: nobody would ever switch off the rest.
            self._end()
            raise

    def _end(self) -> None:
        global _active  # noqa: PLW0603 -- there is one
        self._declaring.end()
        if not _process.forked and self._stop is not None:
            self._stop()
        self._logger.end()
        self._ended.set()
        _active = None

    # -- the analysis -----------------------------------------------------------------------------

    def _run(self) -> None:
        self._logger.ignore_this_thread()
        while not self._ended.is_set():
            try:
                self._catch_up()
                if self._allocators is not None:
                    self._allocators.look()
            except Exception as error:
                self._failure = error
                return
            time.sleep(_PAUSE)

    def _catch_up(self) -> Engine:
        """Apply all that was written until now."""
        if _process.forked:  # the holder of the lock stayed in the parent
            _process.check_fork()
        with self._lock:
            engine = self._engine
            if engine is None:
                raise RuntimeError("nothing has been observed yet: enter the observation (`with`)")
            if self._failure is not None:
                raise self._failure
            if self._cut:
                self._cuts += 1
                engine.forget_order()
            last = _active is not self  # before the log is read: what comes after is in it as well
            left = None  # of what was there at the first look: other threads may write without end
            while not self._drained and (left is None or left >= 0 or last):
                self._cut = True  # and stays so if a signal handler raises before all is applied
                chunk, lost, behind = self._logger.read()
                left = (behind if left is None else left) - 1
                if lost > self._lost:
                    self._lost = lost
                    engine.forget_order()
                engine.take(records.read(chunk))
                self._cut = False
                if not chunk:
                    break
            self._drained = last
            return engine

    # -- what was found ---------------------------------------------------------------------------

    def _blocks(self, engine: Engine) -> Blocks:
        if self._allocators is None:
            return Blocks()
        return self._allocators.blocks(engine.world.finds.count())

    def _found(self, engine: Engine) -> list[Race]:
        blocks = self._blocks(engine)
        return [
            blocks.name(race)
            for race in engine.world.finds.races()
            if not any(suppressions.covers(each, race) for each in self._suppressions)
        ]

    def _races(self, engine: Engine) -> tuple[Race, ...]:
        return tuple(race for race in self._found(engine) if self._possible or not race.possible)

    def _not_seen(self, engine: Engine) -> tuple[str, ...]:
        found = [f"{what} ({count})" for what, count in engine.world.unseen.copy().items()]
        if self._cuts:
            found.append(f"calls whose analysis was cut short by an exception ({self._cuts} times)")
        if self._lost:
            found.append(f"calls that came faster than they could be analyzed ({self._lost})")
        if self._allocators is not None:
            found += [
                f"which lines allocate for {framework}: {why}"
                for framework, why in self._allocators.failures.items()
            ]
        if not self._logger.has_stacks:
            found.append("lines: the frames of this interpreter cannot be read")
        return tuple(found)

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
        return self._races(self._catch_up())

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
        return tuple(self._catch_up().world.finds.stalls())

    @property
    def not_seen(self) -> tuple[str, ...]:
        """What could not be observed, as sentences.

        Examples
        --------
        >>> import userstream as us
        >>> with us.observe() as seen:
        ...     seen.not_seen
        ()
        """
        return self._not_seen(self._catch_up())

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
        engine = self._catch_up()  # once: the program may be faster than this
        races, stalls = self._races(engine), engine.world.finds.stalls()
        unseen = self._not_seen(engine)
        seconds = self._seconds or time.monotonic() - self._began
        calls = sum(engine.counts.values())
        streams = engine.world.clocks.count_streams()
        found = f"{_plural(len(races), 'race')}, {_plural(len(stalls), 'stall')}"
        on = f"{_plural(calls, 'driver call')} on {_plural(streams, 'stream')}"
        lines = [f"observed {seconds:.3f} s, {on}: {found}", *(f"\n{race}" for race in races)]
        if stalls:
            lines.append("\nstalls:")
            lines += [f"  {stall}" for stall in stalls[:_SHOWN]]
            if len(stalls) > _SHOWN:
                lines.append(f"  and {len(stalls) - _SHOWN} more")
        if unseen:
            lines.append("\nnot seen:")
            lines += [f"  {what}" for what in unseen]
        return "\n".join(lines)

    def __repr__(self) -> str:
        state = "watches" if _active is self else ("new" if self._engine is None else "ended")
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
        return self._document(self._catch_up(), Race.as_dict)

    def _document(self, engine: Engine, tell: Callable[[Race], dict[str, Any]]) -> dict[str, Any]:
        found = self._found(engine)
        return {
            "version": _VERSION,
            "seconds": self._seconds or time.monotonic() - self._began,
            "races": [tell(race) for race in found if not race.possible],
            "possible": [tell(race) for race in found if race.possible],
            "stalls": [stall.as_dict() for stall in engine.world.finds.stalls()],
            "calls": dict(sorted(engine.counts.items())),
            "not_seen": list(self._not_seen(engine)),
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the findings as a page (``.html``) or as data (``.json``: what `as_dict` returns).

        The page is one self-contained file. It shows the newest operations, up to
        ``observe(timeline=)``, in one row per stream and thread.

        Parameters
        ----------
        path : str or path
            The file; an existing one is replaced.

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
        if name.endswith(".html"):
            document = self._page()
        elif name.endswith(".json"):
            document = json.dumps(self.as_dict(), indent=1) + "\n"
        else:
            raise ValueError(f"a report is saved as .html or .json, not as {name!r}")
        with open(name, "w", encoding="utf-8") as file:
            file.write(document)

    def _page(self) -> str:
        engine = self._catch_up()
        document = self._document(engine, Race._for_page)
        world = engine.world
        with self._lock:  # of the thread that adds to it
            document["timeline"] = world.timeline.as_dict(
                world.stacks, lambda lane: world.describe(lane)[0], world.finds.thread_name
            )
        return page(document)


def _plural(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _maker() -> Maker:
    if _simulated.is_simulated():
        from userstream._observe.simulated import Simulated

        return Simulated()
    from userstream._observe.cupti import Cupti

    return Cupti()


def _name_of(handle: int) -> str | None:
    """Return what the registry calls a stream, None if it is not one of its streams."""
    from userstream._registry import UserStream

    for (_, name), stream in UserStream.get().streams().items():
        if not stream.is_closed and int(stream.handle) == handle:
            return f"user stream {name!r}" if name else "the user stream"
    return None


def _in_child() -> None:
    global _active, _turn  # noqa: PLW0603 -- the holder of the lock stayed in the parent
    _turn = _process.Lock()
    _active = None


def _at_exit() -> None:
    if _active is not None and not _process.forked:
        _active.stop()


_process.after_fork(_in_child)
atexit.register(_at_exit)  # no thread may look at Python's frames when they are gone
