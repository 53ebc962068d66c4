"""Schedules: the order in which streams and threads go on, on the simulated driver."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Self

from userstream.testing import _simulated

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

_POLICIES = {"lazy": 1, "eager": 2}
_DRAWN, _EXPLORED = 3, 4
_MOST_BEGINS = 4  # of `schedules`: first runs make what later ones find
_MOST_CHANGES = 64  # `depth` at most: each change point is a bit of a word


class Deadlock(AssertionError):
    """No stream and no thread of a program could continue: each waited for another one.

    `schedule` raises it at the end of its block. The message says who waited for what. What the
    streams still had to do was dropped, and host waits ended with ``CUDA_ERROR_LAUNCH_TIMEOUT``. A
    loop of queries, or a wait of userstream with a timeout, counts as endless after three seconds
    in which nothing happens, and so does a loop of sleeps beside a stream that cannot continue. If
    that loop does not end then, its next sleep raises `OSError` (``EDEADLK``).

    Examples
    --------
    >>> from cuda.bindings import driver
    >>> from userstream import Stream, testing
    >>> stream = Stream.create(0)
    >>> try:
    ...     with testing.schedule(1), testing.latch(stream):  # released after the wait
    ...         _ = driver.cuStreamSynchronize(stream.handle)
    ... except testing.Deadlock as error:
    ...     print(error)
    deadlock: no stream and no thread can go on
    thread 1  waits for stream 1
    stream 1  waits for a value in memory
    """


class schedule:  # noqa: N801 - used like a function
    """Run what is queued in an order that a seed determines, on the simulated driver.

    Inside the block, one stream or thread runs at a time. Which one is next is drawn from the seed,
    among all that streams, events and the host allow: a program that lacks an edge or a wait goes
    wrong with some seeds, and again with each of those. Operations that something orders are never
    exchanged, so a right program is right with every seed.

    Each stream and each thread has a priority drawn from the seed, and the highest of those that
    can continue does. At ``depth - 1`` choices, drawn among the first *length*, the one that would
    continue falls below all others (PCT). A bug that needs *depth* pairs of operations in a certain
    order is found by one seed with a probability of at least ``1 / (n * length**(depth - 1))``,
    where *n* is the number of streams and threads and the program makes at most *length* choices.

    A thread takes its turns in driver calls: after it has queued something, when it queries whether
    something is done, and while it waits. What is still queued at the end of the block runs then.

    Parameters
    ----------
    seed : int, "lazy", "eager" or str of turns
        The order. ``"lazy"`` runs a stream only when a thread waits for it, and ``"eager"`` runs
        everything at once. Turns such as ``"t1 t1 s2"`` are the seed of an order that `schedules`
        has tried: of the threads and the streams with these numbers, then as ``"lazy"``.
    depth : int, default 3
        How many pairs of operations must be in a certain order for the bug, 1 to 64.
    length : int, default 100
        Among how many choices the change points are drawn.

    Attributes
    ----------
    seed, depth, length : object
        The arguments.
    trace : str
        The order that was taken, one step a line; the same for the same program and seed.
    choices : int
        How often more than one stream or thread could have continued, known after the block.

    Raises
    ------
    RuntimeError
        Without the simulated driver; on entering, if a schedule is active or was used before.
    ValueError, TypeError
        If an argument is out of range or of the wrong type.

    Examples
    --------
    >>> import userstream as us
    >>> from cuda.core import Device
    >>> from userstream import Stream, testing
    >>> one, other = Stream.create(0), Stream.create(0)
    >>> buffer = Device(0).allocate(4, stream=one)
    >>> one.sync()
    >>> with testing.schedule("lazy") as run:
    ...     buffer.fill(1, stream=one)
    ...     buffer.fill(2, stream=other)  # nothing orders it after the first
    ...     other.sync()
    >>> print(run.trace)
    thread 1  queues fill on stream 1
    thread 1  queues fill on stream 2
    thread 1  queries stream 2
    stream 2  runs fill
    stream 1  runs fill
    """

    def __init__(self, seed: int | str, *, depth: int = 3, length: int = 100) -> None:
        if isinstance(seed, str):
            if seed not in _POLICIES and not re.fullmatch(r"t1( [ts][1-9]\d{0,5})*", seed):
                raise ValueError(
                    f"seed must be an int, 'lazy', 'eager' or turns such as 't1 s2', not {seed!r}"
                )
        else:
            _simulated._check_int("seed", seed)
        _simulated._check_int("depth", depth)
        _simulated._check_int("length", length)
        if not 1 <= depth <= _MOST_CHANGES:
            raise ValueError(f"depth must be 1 to {_MOST_CHANGES}, not {depth}")
        if not 1 <= length < 1 << 63:
            raise ValueError(f"length must be at least 1 and below 2**63, not {length}")
        self.seed = seed
        self.depth = depth
        self.length = length
        self.trace: str = ""
        self.choices: int = 0
        # The change points that are in force, a bit each: pytest leaves out those that do not
        # matter.
        self._changes = (1 << depth) - 2
        self._library: ctypes.CDLL | None = None
        self._turns = seed.encode() if isinstance(seed, str) and seed not in _POLICIES else b""
        self._log: str | None = None  # of a seed of turns

    def __repr__(self) -> str:
        return f"<userstream.testing.schedule({self.seed!r}, depth={self.depth})>"

    def __enter__(self) -> Self:
        library = _simulated._side_door("schedule()")
        if self._library is not None:
            raise RuntimeError("this schedule was already used: create a new one for each block")
        policy, seed = _DRAWN, 0
        if isinstance(self.seed, str):
            policy = _POLICIES.get(self.seed, _EXPLORED)
        else:
            seed = self.seed % (1 << 64)
        if not library.userstream_schedule_begin(
            policy, seed, self.depth, self.length, self._changes, self._turns
        ):
            raise RuntimeError("another schedule is active in this process: end it first")
        self._library = library
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        __tracebackhide__ = True  # pytest shows the block that failed
        assert self._library is not None
        choices = ctypes.c_uint64()
        self._library.userstream_schedule_end(ctypes.byref(choices))
        self.choices = choices.value
        self.trace = self._library.userstream_schedule_trace().decode().rstrip("\n")
        if self._turns:
            self._log = self._library.userstream_schedule_log().decode()
            if exc is not None:
                exc.add_note(f"in the order of userstream.testing.schedule({self.seed!r})")
        deadlock = self._library.userstream_schedule_deadlock()
        if deadlock is not None:
            raise Deadlock(deadlock.decode()) from exc


class schedules:  # noqa: N801 - used like a function
    """Run a small program in every order that can make a difference, on the simulated driver.

    Two orders differ if they exchange two operations that touch the same memory, one of which
    writes to it. Of the orders that do not differ, one is tried. The program is the body of a loop,
    which sets up its memory and runs each schedule once; the first order that fails ends the loop.

    A kernel may write all of the memory to which it has an address, and uses that of its textures
    and surfaces; what its function shares with others in Python does not count. A thread may,
    between two driver calls, use all memory of the host, and all that other threads use. A
    query counts as a wait: it is answered when everything that can run before has run. The nodes of
    a graph run in one of the orders that its edges allow, which is the same in each run.

    Parameters
    ----------
    limit : int, default 10_000
        How many runs there are at most.

    Attributes
    ----------
    limit : int
        The argument.
    orders : int
        How many orders were tried that differ from each other.
    complete : bool
        Whether these are all orders.

    Raises
    ------
    RuntimeError
        In the loop, if the program took another way under the same choices, as it depends on time
        or on what an earlier run has left; or if a schedule was not run.
    ValueError, TypeError
        If *limit* is out of range or of the wrong type.

    Examples
    --------
    >>> from cuda.core import Device
    >>> from userstream import Stream, testing
    >>> one, other = Stream.create(0), Stream.create(0)
    >>> buffer = Device(0).allocate(4, stream=one)
    >>> one.sync()
    >>> runs = testing.schedules()
    >>> for run in runs:
    ...     with run:
    ...         buffer.fill(1, stream=one)
    ...         buffer.fill(2, stream=other)  # nothing orders it after the first
    >>> print(runs)
    all 2 orders tried
    """

    def __init__(self, *, limit: int = 10_000) -> None:
        _simulated._check_int("limit", limit)
        if limit < 1:
            raise ValueError(f"limit must be at least 1, not {limit}")
        self.limit = limit
        self.orders: int = 0
        self.complete: bool = False

    def __str__(self) -> str:
        if self.complete:
            return "the only order tried" if self.orders == 1 else f"all {self.orders} orders tried"
        return f"{self.orders} orders tried, not all"

    def __iter__(self) -> Iterator[schedule]:
        self.orders, self.complete = 0, False
        path: list[_Node] = []
        begins = 1
        for _ in range(self.limit):
            run = schedule(" ".join(["t1", *(node.chosen for node in path)]))
            yield run
            if run._log is None:
                raise RuntimeError("each schedule must be run: use it in a with statement")
            steps = _steps(run._log)
            if [node.chosen for node in path] != [step.actor for step in steps[: len(path)]]:
                if begins == _MOST_BEGINS:
                    raise RuntimeError(
                        "the program took another way under the same choices: it depends on time, "
                        "or on what an earlier run has left"
                    )
                path.clear()
                begins += 1
                self.orders = 0
                continue
            self.orders += _extend(path, steps)
            if not _advance(path):
                self.complete = True
                return


# -- every order: dynamic partial-order reduction with sleep sets ----------------------------------
#
# Flanagan and Godefroid, "Dynamic Partial-Order Reduction for Model Checking Software", POPL 2005.


@dataclass(slots=True)
class _Step:
    """One turn of a stream or a thread."""

    actor: str  # s1, s2... for streams, t1... for threads
    enabled: tuple[str, ...]  # those that could go on
    runs_on_host: bool
    touches_host: bool = False
    touches_anything: bool = False
    reads: list[tuple[int, int]] = field(default_factory=list)  # the first byte, and the one after
    writes: list[tuple[int, int]] = field(default_factory=list)
    before: int = 0  # the steps that come before this one in all equal orders, a bit each
    races: list[int] = field(default_factory=list)  # steps that nothing but this order puts before


def _overlap(some: list[tuple[int, int]], others: list[tuple[int, int]]) -> bool:
    return any(one[0] < other[1] and other[0] < one[1] for one in some for other in others)


def _conflict(one: _Step, other: _Step) -> bool:
    """Return whether the order of two steps makes a difference."""
    if one.touches_anything or other.touches_anything:
        return True
    if one.runs_on_host or other.runs_on_host:
        both = one.runs_on_host and other.runs_on_host
        return both or one.touches_host or other.touches_host
    return (
        _overlap(one.writes, other.writes)
        or _overlap(one.writes, other.reads)
        or _overlap(one.reads, other.writes)
    )


def _add_touches(step: _Step, words: list[str]) -> None:
    for word in words:
        kind, _, place = word.partition(":")
        step.touches_anything |= kind == "anything"
        step.runs_on_host |= kind == "host"
        if place:
            address, size = (int(number, 16) for number in place.split(":"))
            step.touches_host |= kind[0] == "h"
            touched = step.writes if kind[-1] == "w" else step.reads
            touched.append((address, address + size))


def _steps(log: str) -> list[_Step]:
    """Return the turns of a run from the log that `tell` in ``driver/schedule.c`` writes."""
    steps: list[_Step] = []
    clocks: dict[str, int] = {}  # of actors and points: the steps before, a bit each
    now: _Step | None = None  # not among the steps yet

    def end_step() -> None:
        nonlocal now
        if now is None:
            return
        now.before = clocks.get(now.actor, 0)
        for i in range(len(steps) - 1, -1, -1):
            if steps[i].actor != now.actor and _conflict(steps[i], now):
                if not now.before >> i & 1:
                    now.races.append(i)
                now.before |= steps[i].before | 1 << i
        clocks[now.actor] = now.before | 1 << len(steps)
        steps.append(now)
        now = None

    for line in log.splitlines():
        verb, actor, *words = line.split()
        if verb == "turn":
            end_step()
            is_thread = actor[0] == "t"
            now = _Step(actor, tuple(words) or (actor,), is_thread)
            now.touches_anything = not is_thread  # until the log says more
        elif verb == "touches" and now is not None:
            now.touches_anything = False
            _add_touches(now, words)
            end_step()
        elif verb == "leads":
            if now is not None and now.actor == actor:
                end_step()
            clocks[words[0]] = clocks.get(actor, 0)
        elif verb == "follows":
            clocks[actor] = clocks.get(actor, 0) | clocks.get(words[0], 0)
    end_step()
    return steps


@dataclass(slots=True)
class _Node:
    """A turn on the path that is being tried: the state before it."""

    enabled: tuple[str, ...]
    chosen: str
    sleep: set[str]  # whom to let go on first would lead to an order that was tried
    wanted: set[str] = field(default_factory=set)
    tried: set[str] = field(default_factory=set)


def _extend(path: list[_Node], steps: list[_Step]) -> bool:
    """Apply a run to the path of the run; return `False` if this order was tried before."""
    known = len(path)
    if path:
        path[-1].tried.add(path[-1].chosen)
    is_new = True
    for step in steps[known:]:
        sleep = _still_asleep(path[-1], steps, len(path) - 1) if path else set[str]()
        node = _Node(step.enabled, step.actor, sleep)
        path.append(node)
        if step.actor in sleep:
            node.wanted.update([actor for actor in node.enabled if actor not in sleep][:1])
            is_new = False
            break
        node.wanted.add(step.actor)
        node.tried.add(step.actor)
    for step in steps[max(known - 1, 0) : len(path) - (not is_new)]:
        for i in step.races:
            _want(path[i], i, step, steps)
    return is_new


def _still_asleep(node: _Node, steps: list[_Step], at: int) -> set[str]:
    """Return those who stay asleep after step `at`, which the node precedes.

    What they would do is taken from this run: in another one, memory has other addresses.
    """
    found = set[str]()
    for actor in (node.sleep | node.tried) - {node.chosen}:
        later = (each for each in islice(steps, at + 1, None) if each.actor == actor)
        its = next(later, None)
        if its is not None and not _conflict(its, steps[at]):
            found.add(actor)
    return found


def _want(node: _Node, i: int, step: _Step, steps: list[_Step]) -> None:
    """Request an order in which step `i`, which the node precedes, comes after another step."""
    if step.actor in node.enabled:
        node.wanted.add(step.actor)
        return
    later = range(i + 1, len(steps))
    others = {steps[k].actor for k in later if step.before >> k & 1} & set(node.enabled)
    if not others:
        node.wanted.update(node.enabled)
    elif not others & node.wanted:
        node.wanted.add(min(others))


def _advance(path: list[_Node]) -> bool:
    """Choose another turn at the last node with a turn left; return whether such a node exists."""
    while path:
        node = path[-1]
        for actor in node.enabled:
            if actor in node.wanted and actor not in node.tried and actor not in node.sleep:
                node.chosen = actor
                return True
        path.pop()
    return False
