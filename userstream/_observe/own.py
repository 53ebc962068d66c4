"""Which questions to the driver are the program's, and which userstream's own housekeeping.

A program that asks an event and hears that it is over knows so, and may continue without an edge.
That userstream heard it, to use an event or staging memory again, orders nothing in the program:
taken for the program's knowledge it would hide races.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from userstream._observe.stacks import is_own

if TYPE_CHECKING:
    from userstream._observe.found import Stack

PROGRAM = "program"  # the program has waited, or has asked
FUTURE = "future"  # that was told: the program may have looked at it, which cannot be seen
HOUSEKEEPING = "housekeeping"

# What users call in order to know. All else that userstream offers orders streams.
_ASKING = frozenset(
    {
        "asnumpy",
        "close",
        "copyto",
        "is_done",
        "sync",
        "wait",
        "wait_all",
        "wait_for_device",
    }
)
_PROMISING = frozenset({"asnumpy_async", "completion", "wait_all_async", "wait_async"})
_KEEPERS = frozenset({"holding.py"})
_THREADS = frozenset({"watcher.py", "dispatcher.py"})
_KEEPING = frozenset({"_reclaim"})


def who_asks(stack: Stack) -> str:
    """Tell on whose account a query was made, by the frames of its thread."""
    mine = []
    for frame in reversed(stack):
        if not is_own(frame.filename):
            break
        mine.append((os.path.basename(frame.filename), frame.name.rpartition(".")[2]))
    if not mine:
        return PROGRAM
    if any(file in _KEEPERS or name in _KEEPING for file, name in mine):
        return HOUSEKEEPING
    if any(file in _THREADS for file, _ in mine):
        return FUTURE
    entry = mine[-1][1]  # what the program called
    if entry in _PROMISING:
        return FUTURE
    return PROGRAM if entry in _ASKING else HOUSEKEEPING
