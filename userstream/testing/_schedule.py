"""Schedules: the order in which streams and threads go on, on the simulated driver."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Self

from userstream.testing import _simulated

if TYPE_CHECKING:
    from types import TracebackType

_POLICIES = {"lazy": 1, "eager": 2}
_DRAWN = 3
_MOST_CHANGES = 64  # `depth` at most: each change point is a bit of a word


class Deadlock(AssertionError):
    """No stream and no thread of a program could go on: each waited for another one.

    `schedule` raises it at the end of its block. The message says who waited for what. What the
    streams still had to do was dropped, and host waits ended with ``CUDA_ERROR_LAUNCH_TIMEOUT``. A
    loop of queries, or a wait of userstream with a timeout, counts as endless after three seconds
    in which nothing happens.

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
    wrong with some seeds, and goes wrong again with the same seed. Operations that something
    orders are never exchanged, so a right program is right with every seed.

    Each stream and each thread has a priority drawn from the seed, and the highest of those that
    can go on does. At ``depth - 1`` choices, drawn among the first *length*, the one that would go
    on falls below all others (PCT). A bug that needs *depth* pairs of operations in a certain order
    is found by one seed with a probability of at least ``1 / (n * length**(depth - 1))``, where
    *n* is the number of streams and threads and the program makes at most *length* choices.

    A thread takes its turns in driver calls: after it has queued something, when it asks whether
    something is done, and while it waits. What is still queued at the end of the block runs then.

    Parameters
    ----------
    seed : int, "lazy" or "eager"
        The order. ``"lazy"`` runs a stream only when a thread waits for it, and ``"eager"`` runs
        everything at once.
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
        How often more than one stream or thread could have gone on, known after the block.

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
            if seed not in _POLICIES:
                raise ValueError(f"seed must be an int, 'lazy' or 'eager', not {seed!r}")
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

    def __repr__(self) -> str:
        return f"<userstream.testing.schedule({self.seed!r}, depth={self.depth})>"

    def __enter__(self) -> Self:
        library = _simulated._side_door("schedule()")
        if self._library is not None:
            raise RuntimeError("this schedule was already used: create a new one for each block")
        policy = _POLICIES[self.seed] if isinstance(self.seed, str) else _DRAWN
        seed = 0 if isinstance(self.seed, str) else self.seed % (1 << 64)
        if not library.userstream_schedule_begin(
            policy, seed, self.depth, self.length, self._changes
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
        assert self._library is not None
        choices = ctypes.c_uint64()
        self._library.userstream_schedule_end(ctypes.byref(choices))
        self.choices = choices.value
        self.trace = self._library.userstream_schedule_trace().decode().rstrip("\n")
        deadlock = self._library.userstream_schedule_deadlock()
        if deadlock is not None:
            raise Deadlock(deadlock.decode()) from exc
