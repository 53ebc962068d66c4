"""Python functions that a stream calls."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, ParamSpec

from userstream import _dispatcher, _driver, _waiting, _watcher
from userstream._stream._event_waits import EventWaitingStream
from userstream._stream._operations import WaitFlags
from userstream._stream._words import Word

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from cuda.bindings import driver

    from userstream.errors import DriverError

P = ParamSpec("P")


class CallingStream(EventWaitingStream):
    """Host functions and callbacks of a `Stream`."""

    __slots__ = ()

    def launch_host_func(
        self, fn: Callable[..., object], *args: Any, blocking: bool = True
    ) -> None:
        """Call a Python function when the stream gets there.

        Parameters
        ----------
        fn : callable
            Called as ``fn(*args)``; what it returns is dropped.
        *args
            Its arguments.
        blocking : bool, default True
            Whether later work of the stream waits until it has returned, as with the driver.

        Raises
        ------
        TypeError
            ``fn`` cannot be called, or is a coroutine function.
        CaptureError
            The stream is being captured, or is the legacy default stream beside a capture.
        RuntimeError
            Called from a host function or callback, which might have to wait for itself; or by a
            signal handler or a destructor, in the middle of another such call on this stream.
        ClosedError, ForkedError, DriverError
            The stream is closed, CUDA may not be used, or the driver refused.

        Notes
        -----
        All functions and callbacks run on one thread of userstream's, one after the other, those
        of a stream in its order. No thread of the driver is blocked and none runs Python: what
        holds the stream is a value that it waits for. So a function may take the GIL and locks,
        and may call CUDA; but it may not wait for the GPU. userstream's waits raise
        `RuntimeError` there; a framework's that waits for a held stream never returns. While a
        stream is held, what waits for the device (`wait_for_device`, loading a module) waits
        for the function too, and must not hold the GIL meanwhile. The thread has whatever current
        device an earlier function left it: set yours first.

        What the function raises is given to `sys.unraisablehook`, and the stream goes on. After
        an error of the GPU it is not called, as with the driver; a callback is told
        (`add_callback`). At interpreter exit, functions that did not run yet are dropped. The
        function and its arguments are kept alive until it ran.

        Does not block; thread-safe. Driver calls: ``cuEventRecord``, ``cuLaunchHostFunc`` of a
        native function, and ``cuStreamWaitValue32``. After baracuda's ``launch_host_func``.

        Examples
        --------
        >>> from userstream import Stream
        >>> stream = Stream.create()
        >>> called = []
        >>> stream.launch_host_func(called.append, "half way")
        >>> stream.sync(timeout=10)
        >>> called
        ['half way']
        """
        name = _name_of(fn)
        _waiting.refuse_in_host_function("launch_host_func()")
        self._here(self._launch, _named(name, fn, *args), bool(blocking))

    def add_callback(self, fn: Callable[[Self, DriverError | None], object]) -> None:
        """Call a Python function when the work queued until now is done, or has failed.

        Parameters
        ----------
        fn : callable
            Called as ``fn(stream, error)``: with this stream, and `None` or the `DriverError` of
            the GPU. What it returns is dropped.

        Raises
        ------
        TypeError
            ``fn`` cannot be called, or is a coroutine function.
        CaptureError
            The stream is being captured, or is the legacy default stream beside a capture.
        ClosedError, ForkedError, DriverError
            The stream is closed, CUDA may not be used, or the driver refused.

        Notes
        -----
        Unlike with the driver's ``cuStreamAddCallback``, which NVIDIA will remove, later work of
        the stream does not wait for the function. It runs on the same thread as the functions of
        `launch_host_func`, under the same rules, but may add callbacks. At interpreter exit,
        callbacks that did not run yet are dropped. The stream and the function are kept alive
        until then. Does not block; thread-safe. Driver calls: ``cuEventRecord``,
        ``cuEventQuery``.

        Examples
        --------
        >>> import threading
        >>> from userstream import Stream
        >>> done = threading.Event()
        >>> Stream.create().add_callback(lambda stream, error: done.set())
        >>> done.wait(10)
        True
        """
        self._here(self._add_callback, _name_of(fn), fn)

    def _launch(self, function: Callable[[], None], blocking: bool) -> None:
        handle = self._callable()
        dispatcher = _dispatcher.started()
        semaphore = dispatcher.semaphore
        with dispatcher.in_order(self._identity()) as calls:
            word = Word(self._device()) if blocking else None
            release = _nothing if word is None else word.release
            completion = None
            try:
                address = 0 if word is None else _driver.device_address(word.address)
                completion = self._completion()
                _driver.call_native(handle, semaphore.post_function, semaphore.address, self)
                if word is not None:
                    flags = WaitFlags.GEQ
                    _driver.wait_value(handle, address, word.value, flags, bits=32, stream=self)
                calls.append(_dispatcher.Call(completion, function, release))
            except BaseException:
                release()  # the stream may be held by now
                if completion is not None:
                    completion.abandon()
                raise

    def _add_callback(self, name: str, fn: Callable[[Self, DriverError | None], object]) -> None:
        self._callable()
        dispatcher = _dispatcher.started()
        completion = self._completion()

        def tell(_watch: object, error: Exception | None) -> None:
            # Nothing but DriverError comes of looking at an event.
            dispatcher.post(_named(name, fn, self, error))  # type: ignore[arg-type]

        watch = _watcher.Watch(completion, tell)
        try:
            _watcher.watch([watch])
        except BaseException:
            _watcher.unwatch([watch])  # if it came that far
            raise

    def _callable(self) -> driver.CUstream:
        """Return the handle, if it can call functions now."""
        handle = self._live()
        _driver.refuse_capturing(
            handle,
            self,
            ", and Python functions cannot be captured; cuda.core can: GraphBuilder.callback()",
        )
        return handle


def _name_of(fn: object) -> str:
    """Return the name by which reports show a function, if it is one that can be called here."""
    if not callable(fn):
        raise TypeError(f"a function is needed, not {type(fn).__name__}")
    if any(
        inspect.iscoroutinefunction(each) or inspect.isasyncgenfunction(each)
        for each in (fn, type(fn).__call__)
    ):
        raise TypeError(
            "a coroutine function cannot be called by a stream, which has no event loop: pass a "
            "plain function that calls asyncio.run_coroutine_threadsafe(coroutine, loop)"
        )
    name = getattr(fn, "__qualname__", None)  # anything at all, of a mock
    return name if isinstance(name, str) else type(fn).__qualname__


def _named(
    name: str, fn: Callable[P, object], *args: P.args, **kwargs: P.kwargs
) -> Callable[[], None]:
    """Return the call as a function that reports show by a name, without arguments."""

    def call() -> None:
        fn(*args, **kwargs)

    call.__qualname__ = name
    return call


def _nothing() -> None:
    pass
