"""What two lanes do in one step: by the compiled core, or by Python where there is none.

`pure` says what each of these does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from userstream import _driver
from userstream._engine.pure import CAPTURED, DUE, SWEEP_SECONDS

if TYPE_CHECKING or _driver.fused.native is None:
    from userstream._engine.pure import (
        LaneState,
        Ticket,
        finish,
        in_use,
        order,
        orphans,
        query,
        queues,
        use,
    )
else:
    _native = _driver.fused.native
    LaneState, Ticket = _native.LaneState, _native.Ticket
    query, order, use, finish = _native.query, _native.order, _native.use, _native.finish
    in_use, orphans, queues = _native.in_use, _native.orphans, _native.queues

__all__ = [
    "CAPTURED",
    "DUE",
    "SWEEP_SECONDS",
    "LaneState",
    "Ticket",
    "finish",
    "in_use",
    "order",
    "orphans",
    "query",
    "queues",
    "use",
]
