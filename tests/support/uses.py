"""Uses of buffers, and what the waits cover of them."""

from __future__ import annotations

import asyncio
from typing import Any

import userstream as us


def is_waited_for(target: Any, *, by: us.UserStream | None = None) -> bool:
    """Return whether waits cover the held work on a target; all waits must agree."""
    registry = by or us.UserStream.get()
    future = registry.completion(target)
    answers = {not future.done()}
    for wait in (
        lambda: registry.wait(target, timeout=0),
        lambda: asyncio.run(registry.wait_async(target, timeout=0)),
    ):
        try:
            wait()
            answers.add(False)
        except us.WaitTimeout:
            answers.add(True)
    (answer,) = answers
    return answer


def borrow(buffer: Any, **how: Any) -> us.Stream:
    with us.borrow(buffer, **how) as stream:
        return stream
