"""Host waits as users call them: fast if nothing is pending."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from userstream._engine import holding, waiting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from userstream._engine.lane import Lane
    from userstream._engine.waiting import Waitable


def sync(lane: Lane, timeout: float | None, policy: str) -> None:
    """Block until the work queued on a lane now has completed."""
    if timeout is not None or policy != "auto":
        waiting.check_arguments(timeout, policy)
    # No thread has the identifier 0; so this one's is rarely looked up.
    if waiting.host_functions_thread and threading.get_ident() == waiting.host_functions_thread:
        waiting.refuse_in_host_function("a wait")
    if not lane.is_idle():
        waiting.wait_on_host((lane,), timeout=timeout, policy=policy, grouped=False)
    if holding.queues or holding.orphans or holding.left:
        holding.sweep()


def sync_all(
    targets: Sequence[Waitable],
    timeout: float | None,
    policy: str = "auto",
    *,
    grouped: bool | None = None,
    closed_is_done: bool = False,
) -> None:
    """Wait for all targets at once; by default failures are grouped if there are several."""
    grouped = len(targets) > 1 if grouped is None else grouped
    waiting.wait_on_host(
        targets, timeout=timeout, policy=policy, grouped=grouped, closed_is_done=closed_is_done
    )
    holding.sweep()
