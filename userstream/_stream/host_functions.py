"""Python functions that run in stream order."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from userstream import _driver
from userstream._driver import core
from userstream._engine import dispatcher, host_wait, watcher
from userstream._stream.memory_operations import Gate, WaitFlags

if TYPE_CHECKING:
    from collections.abc import Callable

    from userstream._engine.lane import Lane
    from userstream.errors import DriverError

P = ParamSpec("P")
S = TypeVar("S")

_NOT_CAPTURED = ", and Python functions cannot be captured; cuda.core can: GraphBuilder.callback()"


def launch(lane: Lane, fn: Callable[..., object], args: tuple[Any, ...], blocking: bool) -> None:
    """Enqueue a call of a Python function; the lane's context is current."""
    function = _without_arguments(_name_of(fn), fn, *args)
    host_wait.refuse_in_host_function("launch_host_func()")
    handle = lane.usable(_NOT_CAPTURED)
    running = dispatcher.started()
    bell = running.bell

    def enqueue(call: dispatcher.Call) -> None:
        gate, address = None, 0
        if blocking:
            gate = Gate(lane.device)
            call.finished = gate.release
            gate.take()
            address = _driver.copies.device_address(gate.address)
        call.completion = lane.completion(may_block=False)  # the host function rings
        _driver.streams.call_native(handle, core.RING, bell.address, lane)
        if gate is not None:
            flags = WaitFlags.GEQ
            _driver.values.wait_value(handle, address, gate.value, flags, bits=32, stream=lane)

    running.launch(lane.identity(), dispatcher.Call(function), enqueue)


def add_callback(lane: Lane, stream: S, fn: Callable[[S, DriverError | None], object]) -> None:
    """Call a Python function when the work queued now has completed or failed."""
    name = _name_of(fn)
    lane.usable(_NOT_CAPTURED)
    running = dispatcher.started()

    class Callback:
        def _report(self, _over: list[watcher.Watch], error: Exception | None) -> None:
            # Querying an event raises only DriverError.
            running.post(_without_arguments(name, fn, stream, error))  # type: ignore[arg-type]

    # Its queries are a future's.
    point = _driver.account.on(_driver.account.FUTURE, lane.completion)
    watch = watcher.Watch(point, Callback())
    try:
        watcher.watch([watch])
    except BaseException:
        watcher.unwatch([watch])  # a no-op if the watch was not added
        raise


def _name_of(fn: object) -> str:
    """Return the name of a function for reports; raise if a stream cannot call the object."""
    if not callable(fn):
        raise TypeError(f"fn must be callable, not {type(fn).__name__}")
    if any(
        inspect.iscoroutinefunction(each) or inspect.isasyncgenfunction(each)
        for each in (fn, type(fn).__call__)
    ):
        raise TypeError(
            "a coroutine function cannot be called by a stream, which has no event loop: pass a "
            "plain function that calls asyncio.run_coroutine_threadsafe(coroutine, loop)"
        )
    name = getattr(fn, "__qualname__", None)  # a mock may return any object
    return name if isinstance(name, str) else type(fn).__qualname__


def _without_arguments(
    name: str, fn: Callable[P, object], *args: P.args, **kwargs: P.kwargs
) -> Callable[[], None]:
    """Return a function without arguments that makes the call; `name` appears in reports."""

    def call() -> None:
        fn(*args, **kwargs)

    call.__qualname__ = name
    return call
