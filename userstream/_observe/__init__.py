"""Watch the streams of the whole process for races and stalls.

A hook of the simulated driver, or CUPTI, tells the recorder, in C, of each driver call; the
recorder logs the call with the stack and the account of its thread. The judge, in Python, reads the
log and works out with vector clocks which operations are ordered: in a thread, in a process, or
later, on any machine.

The recorder's side: `native` (the library in C, which makes the log) and `recording` (its
functions), `notes` (what is no driver call), `session` (begin and end), `judging` (where the judge
is), `observation`, `command`. The other side is the package `judge`, which imports nothing of
userstream.
"""

from __future__ import annotations

from types import FunctionType
from typing import TYPE_CHECKING, Literal

from userstream._observe.judge.finding_types import Edit, Operation, Race, Stall, WrongStream
from userstream._observe.observation import Observation, no_stalls

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    from userstream.typing import StreamLike

__all__ = [
    "Edit",
    "Observation",
    "Operation",
    "Race",
    "Stall",
    "WrongStream",
    "no_stalls",
    "observe",
]


def observe(
    *,
    possible: bool = False,
    suppress: str | os.PathLike[str] | Iterable[str] = (),
    stall: float = 1e-4,
    threads: Literal["shared", "strict"] = "shared",
    timeline: int = 20_000,
    allocations: bool = False,
    log: str | os.PathLike[str] | None = None,
    judge: Literal["thread", "process", "later"] = "thread",
    memory: int = 256 << 20,
    confirm: bool | int | tuple[int, int] = False,
    confirm_from: str | os.PathLike[str] | None = None,
    expect_streams: bool | Iterable[int | StreamLike] = False,
) -> Observation:
    """Watch every stream of the process, whichever library uses it: a context manager.

    A race is a pair of operations on the same memory, at least one of which writes, that no event,
    wait or other mechanism of CUDA orders, whether or not anything went wrong this time. Without
    ``confirm`` the program's behavior does not change. No call waits for the analysis, which runs
    on a thread of its own. A process has at most one observation at a time.

    Parameters
    ----------
    possible : bool, default False
        Whether `Observation.races` includes operations that something unobserved may order (a host
        function, a future), and kernels whose writes are unknown.
    suppress : path or iterable of str
        A file of suppressions, or its lines: ``race=... memory=... line=... line=...``, as
        reports print them; ``*`` and ``?`` stand for anything.
    stall : float, default 1e-4
        The shortest call, in seconds, that counts as a stall.
    threads : {"shared", "strict"}, default "shared"
        Queues, locks and joins, through which host threads learn from each other what has
        completed, cannot be observed. ``"shared"`` assumes that every thread knows what any of them
        has waited for. ``"strict"`` assumes that a thread knows only what it has waited for itself,
        and what was known when it made its first call: this finds the race between a thread that
        has waited and another that was never notified, but also reports threads that a queue does
        order.
    timeline : int, default 20_000
        The largest number of operations on the page of `Observation.save`: the newest.
    allocations : bool, default False
        Whether ``Race.allocated`` is the line that allocated the tensor or the array, rather than
        the one for which its framework obtained memory from the driver. PyTorch keeps its memory
        history meanwhile (``torch.cuda.memory._record_memory_history``, unless it does so already);
        CuPy has a memory hook in the thread that begins the observation. Also whether races
        include tensors and arrays that are freed while another stream uses them.
    log : path, optional
        A file to which everything recorded is written, for ``python -m userstream judge``. It is
        replaced if it exists, and only its owner can read it: it has the command line and paths of
        source files.
    judge : {"thread", "process", "later"}, default "thread"
        What judges the log meanwhile. A ``"thread"`` competes with the program for the GIL. A
        ``"process"`` does not, and takes about 50 ms to start and end: for programs that launch
        many small kernels, or run for long. ``"later"`` only writes the log, which slows the
        program least: it has no races, stalls or report until it is judged.
    memory : int, default 2**28
        How many bytes of records may wait to be judged or written. When half of that is full, what
        waits for the judge goes to a temporary file. When all of it is full, calls are not
        recorded, and `Observation.not_seen` says how many.
    confirm : bool, int or tuple of int, default False
        Whether to make suspected races happen, or how often at most (``True``: 100 times, and each
        pair of lines 5 times; ``(200, 3)`` has both limits): when the lines of a race run again,
        the stream of the first operation is held until the second has run, for 20 ms at most.
        ``Race.confirmed`` has the outcome; three trials of a pair are needed to show that its
        race cannot happen. This changes the timing of the program, and a race that is made to
        happen has its consequences. It needs ``judge="thread"``.
    confirm_from : path, optional
        A report of an earlier run as JSON (see `Observation.save`). Its races, up to 32, are tried
        from the first time that their lines run, for programs whose lines run only once. It implies
        ``confirm=True``.
    expect_streams : bool or iterable of streams, default False
        Whether `Observation.wrong_streams` has what lines of the program queue on the legacy
        default stream, if the program works on other streams as well. Streams that are given are
        to be avoided too.

    Returns
    -------
    Observation
        A context manager, which watches until the end of its block.

    Raises
    ------
    NotSupportedError
        On a GPU, CUPTI is missing or in use by another tool.
    RuntimeError
        The process is already being observed.
    UserStreamError
        Other causes: see :doc:`/reference/common-errors`.

    Examples
    --------
    >>> import userstream as us
    >>> with us.observe() as seen:
    ...     us.wait(us.get_stream(0))
    >>> seen.check()
    """
    return Observation(
        possible=possible,
        suppress=suppress,
        stall=stall,
        threads=threads,
        timeline=timeline,
        allocations=allocations,
        log=log,
        judge=judge,
        memory=memory,
        confirm=confirm,
        confirm_from=confirm_from,
        expect_streams=expect_streams,
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
