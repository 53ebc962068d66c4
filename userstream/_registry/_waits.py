"""Waiting for user streams and for devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from userstream import _device_wait, _holding, _targets, _waiting
from userstream._engine import host_wait
from userstream._registry._table import StreamTable, known
from userstream.errors import NoUserStreamError

if TYPE_CHECKING:
    from concurrent.futures import Future

    from userstream._engine.lane import Lane
    from userstream.typing import Target, WaitPolicy


class Waits(StreamTable):
    """The waits of a `UserStream`."""

    __slots__ = ()

    def wait(
        self,
        target: Target = None,
        *,
        name: str | None = None,
        timeout: float | None = None,
        policy: WaitPolicy = "auto",
    ) -> None:
        """Wait on the host for the work that you queued on a device's user stream.

        Parameters
        ----------
        target : GPU buffer, device, int, stream, or sequence or mapping, optional
            Whose user stream, as for `get_stream`, but of several devices it is all of them. A
            stream is waited for itself, registered or not. Sequences and mappings hold buffers
            alone, or streams alone.
        name : str, optional
            Which of the device's user streams; the one without a name by default.
        timeout : float, optional
            Seconds for all of it, at least 0; 0 asks once, `None` waits for ever.
        policy : {"auto", "spin"}, default "auto"
            ``"auto"`` polls for 250 µs and then sleeps between polls, for 5 % of the time waited
            so far and 5 ms at most. ``"spin"`` never sleeps.

        Raises
        ------
        NoUserStreamError
            A device has no user stream (of that name).
        WaitTimeout
            The work was not done in time. Nothing was cancelled; waiting again works.
        CaptureError
            The stream is being captured into a graph; the capture goes on.
        DriverError, WaitErrors
            The GPU failed; `WaitErrors` if there are several streams.
        UnsupportedBufferError, HostBufferError, InvalidDeviceError, ValueError, TypeError
            As `get_stream`.

        Notes
        -----
        Covers what was queued when it was called, by you: not the work of the buffer's producer,
        nor what other threads queue afterwards. Blocks, but never inside the driver, so Ctrl-C
        stops it; thread-safe; leaves everybody's graph captures alone. Driver calls:
        ``cuStreamQuery``, and if the stream is busy ``cuEventRecord`` and ``cuEventQuery``. From
        DALI: it refuses a device without a user stream.

        Examples
        --------
        >>> import userstream as us
        >>> stream = us.get_stream(0)
        >>> us.wait(0, timeout=10)
        """
        if timeout is not None or policy != "auto":
            _waiting.check_arguments(timeout, policy)
        lanes = self._waited_for(target, name)
        if len(lanes) == 1:
            host_wait.sync(lanes[0], timeout, policy)
        else:
            host_wait.sync_all(lanes, timeout, policy, grouped=True)

    def _waited_for(self, target: Target, name: str | None) -> list[Lane]:
        streams = self._unnamed if name is None else self._called(name)
        stream = known(target, streams)
        if stream is not None:
            return [stream._resolve()]
        self._check_open()
        given = _targets.streams_in(target)
        if given:
            if name is not None:
                raise ValueError(f"{given[0]!r} is a stream already: pass no name")
            return [each._resolve() for each in given]
        devices = _targets.devices_of(target)
        found = []
        for device in devices:
            stream = streams.get(device)
            if stream is None:
                called = "" if name is None else f" named {name!r}"
                raise NoUserStreamError(
                    f"device {device} has no user stream{called}: can only wait on user streams; "
                    "get_stream() makes one",
                    device=device,
                )
            found.append(stream._resolve())
        return found

    def wait_for_device(self, target: Target = None, *, timeout: float | None = None) -> None:
        """Wait on the host for everything on a device, whoever queued it.

        **This invalidates a graph capture of that device's context, on any thread and in any
        mode**: CUDA gives no way around it. It is refused with `CaptureError` when the capture
        can be seen, which is when the legacy default stream, the stream that is passed or one that
        userstream made takes part in it. Prefer `wait`.

        Parameters
        ----------
        target : GPU buffer, sequence or mapping of them, device, int or stream, optional
            Which device, or devices; the calling thread's current one by default.
        timeout : float, optional
            Seconds for all of it, at least 0; 0 asks once, `None` waits for ever.

        Raises
        ------
        WaitTimeout
            The work was not done in time. Nothing was cancelled; waiting again works.
        CaptureError
            A graph capture was seen; it goes on.
        DriverError, WaitErrors
            The GPU failed; `WaitErrors` if there are several devices.
        UnsupportedBufferError, HostBufferError, InvalidDeviceError, ValueError, TypeError
            As `get_stream`.

        Notes
        -----
        Covers what was queued when it was called. Blocks, but never inside the driver, so Ctrl-C
        stops it; thread-safe. A device that nobody has used yet has nothing to wait for, and is
        not woken up. Covers the primary context, and that of the stream that was passed or the
        current one if it is another; not green contexts. Driver calls: ``cuCtxRecordEvent`` and
        ``cuEventQuery``; with a driver before CUDA 12.5 ``cuCtxSynchronize`` in a thread of its
        own, which a timeout leaves behind. From DALI, but with a timeout.

        Examples
        --------
        >>> import userstream as us
        >>> us.wait_for_device(0, timeout=10)
        """
        _waiting.check_arguments(timeout, "auto")
        self._check_open()
        given = _targets.stream_of(target)
        lane = None if given is None else given._resolve()
        devices = _targets.devices_of(target) if lane is None else [lane.device]
        work = _device_wait.work_on(devices, lane, and_current=target is None)
        host_wait.sync_all(work, timeout, grouped=len(work) > 1)

    def wait_all(self, *, timeout: float | None = None, policy: WaitPolicy = "auto") -> None:
        """Wait on the host for the work on every user stream of every device, on all at once.

        Parameters
        ----------
        timeout : float, optional
            Seconds for all of it, at least 0; 0 asks once, `None` waits for ever.
        policy : {"auto", "spin"}, default "auto"
            As for `wait`.

        Raises
        ------
        WaitTimeout
            Some streams were not done in time; one error lists them all.
        WaitErrors
            The GPU failed. Every stream was waited for nevertheless; those that were late are
            one `WaitTimeout` in the group.
        CaptureError
            One of the streams is being captured into a graph; the capture goes on.
        ValueError, TypeError
            ``timeout`` or ``policy`` is none.

        Notes
        -----
        Takes as long as the slowest of them. Returns at once if there is no user stream. Blocks,
        but never inside the driver, so Ctrl-C stops it; thread-safe. From DALI.

        Examples
        --------
        >>> import userstream as us
        >>> us.wait_all(timeout=10)
        """
        _waiting.check_arguments(timeout, policy)
        self._check_open()
        lanes = list(self._lanes().values())
        host_wait.sync_all(lanes, timeout, policy, grouped=True, closed_is_done=True)

    # -- without a waiting thread ---------------------------------------------------------------

    def completion(self, target: Target = None, *, name: str | None = None) -> Future[None]:
        """Return a future of the work that is queued on a device's user stream now.

        Parameters
        ----------
        target : GPU buffer, device, int, stream, or sequence or mapping, optional
            As for `wait`.
        name : str, optional
            Which of the device's user streams; the one without a name by default.

        Returns
        -------
        concurrent.futures.Future
            Its result is `None`. It has the exceptions of `wait`: `DriverError`, or `WaitErrors`
            if there are several streams. Its own ``result(timeout=)`` raises a plain
            `TimeoutError`, and waiting again works. Cancelling it cancels no work.

        Raises
        ------
        NoUserStreamError, CaptureError, ClosedError
            As `wait`.
        UnsupportedBufferError, HostBufferError, InvalidDeviceError, ValueError, TypeError
            As `get_stream`.

        Notes
        -----
        Does not block; thread-safe. One thread of the library watches all futures and calls their
        callbacks: keep those short. They may not wait for a future there (`RuntimeError`), and what
        they raise is logged. It tells within 5 % of the time waited and 1 ms. Driver calls:
        ``cuStreamQuery``, ``cuEventRecord``; ``cuEventQuery`` in that thread, in the relaxed
        capture mode.

        Examples
        --------
        >>> import userstream as us
        >>> stream = us.get_stream(0)
        >>> us.completion(0).result(timeout=10)
        """
        lanes = self._waited_for(target, name)
        # Takes longer to load than the rest of the waits. After the check for a forked child, where
        # a thread that is not there may have been loading it, and would be waited for.
        from userstream import _futures

        return _futures.Completion(lanes, grouped=len(lanes) > 1)

    async def wait_async(
        self, target: Target = None, *, name: str | None = None, timeout: float | None = None
    ) -> None:
        """Wait as `wait` does, without blocking the event loop.

        Parameters
        ----------
        target : GPU buffer, device, int, stream, or sequence or mapping, optional
            As for `wait`.
        name : str, optional
            As for `wait`.
        timeout : float, optional
            Seconds for all of it, at least 0; `None` waits for ever. ``asyncio.timeout`` works
            as well.

        Raises
        ------
        RuntimeError
            No asyncio event loop runs here; or it runs in a host function or a callback, which may
            not wait.
        WaitTimeout, NoUserStreamError, CaptureError, ClosedError, DriverError, WaitErrors
            As `wait`.

        Notes
        -----
        Covers what is queued when it is first awaited. Cancelling the task ends this wait alone.
        Any number of tasks, in event loops of any number of threads, share one thread of the
        library (see `completion`).

        Examples
        --------
        >>> import asyncio
        >>> import userstream as us
        >>> stream = us.get_stream(0)
        >>> asyncio.run(us.wait_async(0, timeout=10))
        """
        _waiting.check_arguments(timeout, "auto")
        lanes = self._waited_for(target, name)
        from userstream import _futures  # as in `completion`

        await _futures.wait(lanes, timeout=timeout, grouped=len(lanes) > 1)
        _holding.sweep()

    async def wait_all_async(self, *, timeout: float | None = None) -> None:
        """Wait as `wait_all` does, without blocking the event loop.

        Parameters
        ----------
        timeout : float, optional
            Seconds for all of it, at least 0; `None` waits for ever.

        Raises
        ------
        RuntimeError
            As `wait_async`.
        WaitTimeout, WaitErrors, CaptureError, ValueError, TypeError
            As `wait_all`.

        Notes
        -----
        As `wait_async`.

        Examples
        --------
        >>> import asyncio
        >>> import userstream as us
        >>> asyncio.run(us.wait_all_async(timeout=10))
        """
        _waiting.check_arguments(timeout, "auto")
        self._check_open()
        lanes = list(self._lanes().values())
        from userstream import _futures  # as in `completion`

        await _futures.wait(lanes, timeout=timeout, grouped=True, closed_is_done=True)
        _holding.sweep()
