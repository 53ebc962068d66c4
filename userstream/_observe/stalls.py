"""`no_stalls`: a block in which the host may not wait for the GPU."""

from __future__ import annotations

import itertools
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Literal

from userstream import _process
from userstream._observe import session
from userstream._observe.observation import Observation
from userstream.errors import StallError

if TYPE_CHECKING:
    from collections.abc import Generator

_numbers = itertools.count(1)  # of blocks


@contextmanager
def no_stalls(*, threads: Literal["all", "this"] = "all") -> Generator[None, None, None]:
    """Raise `StallError` at the end of the block if the host waited for the GPU inside.

    A call counts if the host learns in it that work is over, such as a synchronization, a copy that
    returns when it is done, or freeing memory with work in flight: also if it took no time this
    time. A wait for what the host knows to be over does not count. Other calls that hold the host
    up, such as an allocation or loading a module, count if they take 10 ms. A program that
    polls, as with `Stream.is_done`, does not wait.

    The process is watched meanwhile, as by `observe`. In the block of an `observe` that has begun
    before, that observation decides. Below ``python -m userstream observe``, which judges in a
    process of its own, nothing is raised: the report has the waits, and ``--fail-on stalls`` makes
    the run fail.

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
        recording = session.active()
        if recording is None:
            recording = own.enter_context(Observation(timeline=0))._begun
        recording.forbid_stalls(number, in_all_threads=threads == "all")
        try:
            yield
        finally:
            recording.forbid_no_more(number)
        stalls = [str(each) for each in recording.forbidden(number)]
    if stalls:
        raise StallError(_message(stalls), stalls=stalls)


def _message(stalls: list[str]) -> str:
    lines = ["the host waited for the GPU in a block of no_stalls:"]
    lines += [f"  {each}" for each in stalls]
    return "\n".join([*lines, 'what has to wait belongs in `with us.stall_allowed("why"):`'])
