"""Watching the streams of the whole process: races, stalls, and where they come from.

A hook (of the simulated driver, or CUPTI's) tells the logger, in C, of each driver call; the logger
writes it down with the stack of its thread. A thread of Python reads that, and works out with
vector clocks what was ordered behind what.

From the top: `observation` (what users hold), `engine` (which call is applied by whom); the
subjects `copies`, `allocations`, `pinned`, `order`, `words`, `captures`, `launches`, `contexts`;
`world` (the state that they share), `declarations`, `clocks`, `memory`, `graphs`, `races`, `own`;
`stacks`, `found`, `timeline`, `page`, `records`, `logger`, `functions`, `layouts`. `simulated` and
`cupti` make the records, and `declaring` those of what userstream is told.
"""

from __future__ import annotations

from types import FunctionType
from typing import TYPE_CHECKING, Literal

from userstream._observe.found import Operation, Race, Stall
from userstream._observe.observation import Observation

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

__all__ = ["Observation", "Operation", "Race", "Stall", "observe"]


def observe(
    *,
    possible: bool = False,
    suppress: str | os.PathLike[str] | Iterable[str] = (),
    stall: float = 1e-4,
    threads: Literal["shared", "strict"] = "shared",
    timeline: int = 20_000,
) -> Observation:
    """Watch every stream of the process, whichever library uses it: a context manager.

    Races are pairs of operations that touch the same memory, at least one of which writes, and that
    no event, wait or other order of CUDA puts one behind the other, whether or not it went wrong
    this time. Nothing in the program changes, and no call waits for the analysis, which is a thread
    of its own. One observation at a time watches a process.

    Parameters
    ----------
    possible : bool, default False
        Whether `Observation.races` has those too that something unseen may put in order: a host
        function, a future, or a kernel of which it is not known what it writes.
    suppress : path or iterable of str
        A file of suppressions, or its lines: ``race=... first=... second=...``, as reports print
        them; ``*`` and ``?`` stand for anything.
    stall : float, default 1e-4
        How many seconds a call takes at least to count as a stall.
    threads : {"shared", "strict"}, default "shared"
        Queues, locks and joins, by which threads of the host tell one another what has completed,
        cannot be seen. ``"shared"`` takes it that every thread knows what any of them has waited
        for. ``"strict"`` takes it that a thread knows only what it has waited for itself, or what
        was known when it made its first call: that finds the race of two threads of which one has
        waited and never told the other, and also reports those that are ordered by a queue.
    timeline : int, default 20_000
        How many operations the page of `Observation.save` shows at most: the newest.

    Returns
    -------
    Observation
        Entered, it watches until the end of its block.

    Raises
    ------
    NotSupportedError
        On a GPU without CUPTI, or while another tool uses it; without a C compiler, with which the
        logger is made at its first use.
    RuntimeError
        The process is observed already.

    Examples
    --------
    >>> import userstream as us
    >>> with us.observe() as seen:
    ...     us.wait(us.get_stream(0))
    >>> seen.check()
    """
    return Observation(
        possible=possible, suppress=suppress, stall=stall, threads=threads, timeline=timeline
    )


# Messages, tracebacks and documentation show the path that users import from.
for _name in __all__:
    _object = globals()[_name]
    _object.__module__ = "userstream"
    if isinstance(_object, type):
        for _member in vars(_object).values():
            if isinstance(_member, FunctionType):
                _member.__module__ = "userstream"
del _name, _object, _member
