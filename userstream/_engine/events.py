"""Pools of events, and the points of streams that hosts wait for.

Calls reuse the events of earlier calls instead of creating their own: see `native/events.c`. An
event is an int, the handle of the driver.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from userstream import _driver, _process
from userstream._driver import core

if TYPE_CHECKING:
    from typing import Any, Protocol

    from cuda.bindings import driver

    from userstream._driver.core import Bell, EventPool

    class Pending(Protocol):
        """Recorded point of a wait target: a `core.Point`, or an object with the same methods.

        The event of a point returns to its pool with the last reference to the point.
        """

        @property
        def target(self) -> Any: ...
        @property
        def in_order(self) -> bool: ...  # whether later points of the target complete no sooner
        def is_done(self) -> bool: ...
        def notify(self, bell: Bell, /) -> bool: ...  # whether the bell will ring


# Seconds until a sleeping thread polls without its bell: it then also notices a fork, the end of
# Python, and a signal that came just before the sleep.
LONGEST_SLEEP = 0.04

_DEFAULT_CONNECTIONS = 8  # the hardware queues of a context

pools: dict[int, EventPool] = {}  # by the address of a primary context


def pool_of(context: driver.CUcontext) -> EventPool:
    """Return the event pool of a context."""
    address = int(context)
    pool = pools.get(address)
    if pool is not None:
        return pool
    # A foreign context may be destroyed at any time, and its events with it: do not keep them.
    if address not in _driver.contexts.devices_of_primaries:
        return core.make_pool(address, False, False)
    return pools.setdefault(address, core.make_pool(address, True, _has_spare_queue()))


def _has_spare_queue() -> bool:
    """Return whether a pending blocking event leaves hardware queues to other streams."""
    connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    return not connections.isdecimal() or int(connections) >= _DEFAULT_CONNECTIONS


def _in_child() -> None:
    core.halt()
    pools.clear()


_process.after_fork(_in_child)
_process.call_at_exit(core.halt)
