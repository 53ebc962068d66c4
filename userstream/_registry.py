"""`UserStream`: the table of user streams, one per device and name."""

from __future__ import annotations

import functools
import operator
import threading
import weakref
from types import MappingProxyType
from typing import TYPE_CHECKING

from userstream import _buffers, _device_wait, _driver, _process, _targets, _waiting
from userstream._stream import Stream, _base
from userstream.errors import ClosedError, DeviceMismatchError, NoUserStreamError, WaitErrors

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType
    from typing import Self

    from userstream._stream._base import BaseStream
    from userstream._waiting import Policy
    from userstream.typing import Target

_registries: weakref.WeakSet[UserStream] = weakref.WeakSet()


class UserStream:
    """The user streams of a process, a library or a test: one per device and name.

    The functions of the `userstream` module act on the registry of the process,
    ``UserStream.get()``; each of them is a method here. A library or a test that wants streams of
    its own makes a registry of its own, ``UserStream()``. As a context manager it waits for its
    streams at the end of the block, and is closed for good.

    Notes
    -----
    Thread-safe. Finding a stream that exists takes no lock. After DALI's C++
    ``dali::UserStream``, of which there is only the one of the process.

    Examples
    --------
    >>> from userstream import UserStream
    >>> UserStream.get() is UserStream.get()
    True
    >>> with UserStream() as mine:
    ...     stream = mine.get_stream(0)
    ...     stream is mine.get_stream(0), stream is UserStream.get().get_stream(0)
    (True, False)
    """

    __slots__ = ("__weakref__", "_closed", "_lock", "_named", "_unnamed")

    def __init__(self) -> None:
        self._lock = threading.Lock()  # for changes; readers need none
        self._closed = False
        self._unnamed: dict[int, Stream] = {}
        self._named: dict[str | None, dict[int, Stream]] = {None: self._unnamed}
        _registries.add(self)

    @staticmethod
    def get() -> UserStream:
        """Return the registry of the process.

        Returns
        -------
        UserStream
            The same object on every call, in every thread.

        Examples
        --------
        >>> from userstream import UserStream
        >>> UserStream.get().streams() == UserStream.get().streams()
        True
        """
        return _process_registry

    # -- streams --------------------------------------------------------------------------------

    def get_stream(
        self, target: Target = None, *, name: str | None = None, priority: int | None = None
    ) -> Stream:
        """Return the user stream of a device, and make it if there is none yet.

        Parameters
        ----------
        target : GPU buffer, sequence or mapping of them, device, int or stream, optional
            Whatever says which device: a buffer of any framework, several on the same device, a
            device or its ordinal; by default the calling thread's current device (device 0
            without a context, as ``cudaGetDevice``). A stream is returned itself.
        name : str, optional
            Which of the device's user streams; the one without a name by default.
        priority : int, optional
            Lower numbers run first. Clamped to what the device has. By default that of the
            existing stream, or 0.

        Returns
        -------
        Stream
            Non-blocking. The same object on every call, in every thread.

        Raises
        ------
        UnsupportedBufferError, HostBufferError
            The target, or something in it, is no GPU buffer.
        DeviceMismatchError
            The buffers live on several devices.
        InvalidDeviceError
            There is no such device, or the target names none.
        ValueError
            The stream exists with another priority; ``name`` is empty; ``name`` or ``priority``
            is given with a stream.
        TypeError
            ``name`` is no string, ``priority`` no integer.
        ClosedError
            The stream that was passed, or this registry, is closed.
        DriverNotFoundError, ForkedError, DriverError
            The driver is not there, may not be used, or refused.

        Notes
        -----
        Thread-safe, and takes no lock if the stream exists. Does not block, except for the first
        use of a device, which brings its primary context into being. It orders nothing: the
        stream may run ahead of the work that fills the buffer. The current device and context
        stay as they are. Driver call, once: ``cuStreamCreateWithPriority``. From DALI: one
        non-blocking stream of default priority per device, made on demand.

        Examples
        --------
        >>> import userstream as us
        >>> stream = us.get_stream(0)
        >>> stream is us.get_stream(0)
        True
        >>> us.get_stream(0, name="io", priority=-1).name
        'io'
        """
        # The path of every call but the first: one look at the type, one at the table.
        if name is None and priority is None:
            stream = self._known(target)
            if stream is not None:
                return stream
        return self._find_or_create(target, name, priority)

    def _known(self, target: Target) -> Stream | None:
        """Return the stream without a name that there is for an ordinal or a buffer."""
        kind = type(target)
        rule = _buffers.learned.get(kind)
        if rule is not None:
            return self._unnamed.get(rule.device_id(target))
        return self._unnamed.get(target) if kind is int else None  # type: ignore[arg-type]

    def _find_or_create(self, target: Target, name: str | None, priority: int | None) -> Stream:
        _check_name(name)
        wanted = None if priority is None else operator.index(priority)
        self._check_open()
        given = _targets.stream_of(target)
        if given is not None:
            if name is not None or wanted is not None:
                raise ValueError(f"{given!r} is a stream already: pass no name and no priority")
            return given
        devices = _targets.devices_of(target)
        if len(devices) > 1:
            raise DeviceMismatchError(
                f"the buffers live on devices {devices}, and each device has its own stream; pass "
                "the buffers of one device at a time",
                devices=devices,
            )
        (device,) = devices
        if wanted is not None:
            wanted = _base.clamp_priority(device, wanted)
        stream = self._named.get(name, {}).get(device) or self._create(device, name, wanted or 0)
        if wanted is not None and stream.priority != wanted:
            raise ValueError(
                f"{stream!r} has priority {stream.priority}, not {wanted}: pass another name for "
                "a stream of another priority"
            )
        return stream

    def _create(self, device: int, name: str | None, priority: int) -> Stream:
        _driver.primary_context(device)  # takes long the first time: not under the lock
        with self._lock:
            self._check_open()
            streams = self._named.setdefault(name, {})
            stream = streams.get(device)
            if stream is None:
                stream = _base.create(
                    Stream, device, name=name, nonblocking=True, priority=priority
                )
                stream._on_close = functools.partial(_forget, weakref.ref(self))
                streams[device] = stream
        return stream

    def streams(self) -> Mapping[tuple[int, str | None], Stream]:
        """Return the user streams there are now.

        Returns
        -------
        Mapping
            From (device ordinal, name) to `Stream`; read-only, and a snapshot.

        Raises
        ------
        ForkedError
            In a child of a process that had used the driver.

        Examples
        --------
        >>> import userstream as us
        >>> stream = us.get_stream(0)
        >>> us.streams()[0, None] is stream
        True
        """
        _process.check_fork()
        with self._lock:
            found = {
                (device, name): stream
                for name, streams in self._named.items()
                for device, stream in streams.items()
            }
        return MappingProxyType(found)

    # -- waits ----------------------------------------------------------------------------------

    def wait(
        self,
        target: Target = None,
        *,
        name: str | None = None,
        timeout: float | None = None,
        policy: Policy = "auto",
    ) -> None:
        """Wait on the host for the work that you queued on a device's user stream.

        Parameters
        ----------
        target : GPU buffer, sequence or mapping of them, device, int or stream, optional
            Whose user stream, as for `get_stream`, but of several devices it is all of them. A
            stream is waited for itself, registered or not.
        name : str, optional
            Which of the device's user streams; the one without a name by default.
        timeout : float, optional
            Seconds for all of it, at least 0; 0 asks once, `None` waits for ever.
        policy : {"auto", "spin"}, default "auto"
            ``"auto"`` polls for 100 µs and then sleeps between polls, for 5 % of the time waited
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
        streams = self._waited_for(target, name)
        if len(streams) == 1:
            streams[0].sync(timeout=timeout, policy=policy)
        else:
            _waiting.wait_for(streams, timeout=timeout, policy=policy, grouped=True)

    def _waited_for(self, target: Target, name: str | None) -> list[Stream]:
        if name is None:
            stream = self._known(target)
            if stream is not None:
                return [stream]
        _check_name(name)
        self._check_open()
        given = _targets.stream_of(target)
        if given is not None:
            if name is not None:
                raise ValueError(f"{given!r} is a stream already: pass no name")
            return [given]
        devices = _targets.devices_of(target)
        streams = self._named.get(name, {})
        missing = [device for device in devices if device not in streams]
        if missing:
            called = "" if name is None else f" named {name!r}"
            raise NoUserStreamError(
                f"device {missing[0]} has no user stream{called}: can only wait on user streams; "
                "get_stream() makes one",
                device=missing[0],
            )
        return [streams[device] for device in devices]

    def wait_for_device(self, target: Target = None, *, timeout: float | None = None) -> None:
        """Wait on the host for everything on a device, whoever queued it.

        **This invalidates a graph capture of that device's context, on any thread and in any
        mode**: CUDA gives no way around it. It is refused with `CaptureError` when the capture
        can be seen, which is when the legacy default stream, a user stream or the stream that was
        passed takes part in it. Prefer `wait`.

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
        not woken up. Driver calls: ``cuCtxRecordEvent`` on the primary context and
        ``cuEventQuery``; with a driver before CUDA 12.5 ``cuCtxSynchronize`` in a thread of its
        own, which a timeout leaves behind. Work in green contexts is not covered. From DALI, but
        with a timeout.

        Examples
        --------
        >>> import userstream as us
        >>> us.wait_for_device(0, timeout=10)
        """
        _waiting.check_arguments(timeout, "auto")
        self._check_open()
        given = _targets.stream_of(target)
        devices = [given._device()] if given is not None else _targets.devices_of(target)
        work = []
        for device in devices:
            context = _driver.primary_context_if_active(device)
            if context is not None:
                mine = [s for (where, _), s in self.streams().items() if where == device]
                _device_wait.refuse_captures(context, [*mine, given] if given else mine)
                work.append(_device_wait.DeviceWork(device, context))
        _waiting.wait_for(work, timeout=timeout, policy="auto", grouped=len(work) > 1)

    def wait_all(self, *, timeout: float | None = None, policy: Policy = "auto") -> None:
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
        streams = list(self.streams().values())
        _waiting.wait_for(streams, timeout=timeout, policy=policy, grouped=True)

    # -- the end --------------------------------------------------------------------------------

    def close(self, *, timeout: float | None = None) -> None:
        """Wait for the user streams and empty the registry, which can be used again.

        Parameters
        ----------
        timeout : float, optional
            Seconds for all of it, at least 0; `None` waits for ever.

        Raises
        ------
        WaitTimeout
            Some streams were not done in time. The registry keeps all its streams.
        WaitErrors
            The GPU failed. The registry is emptied nevertheless.
        CaptureError
            One of the streams is being captured into a graph; the registry keeps all its streams.

        Notes
        -----
        Streams that somebody still holds stay usable; the others are destroyed, unless their
        handle was given away (see `Stream`). Only applications close the registry of the process:
        others may be using it. Blocks, but never inside the driver; thread-safe.

        Examples
        --------
        >>> from userstream import UserStream
        >>> mine = UserStream()
        >>> stream = mine.get_stream(0)
        >>> mine.close()
        >>> len(mine.streams())
        0
        """
        _waiting.check_arguments(timeout, "auto")
        streams = self.streams()
        try:
            _waiting.wait_for(list(streams.values()), timeout=timeout, policy="auto", grouped=True)
        except WaitErrors:
            self._remove(streams)
            raise
        self._remove(streams)

    def _remove(self, streams: Mapping[tuple[int, str | None], Stream]) -> None:
        with self._lock:
            for (device, name), stream in streams.items():
                if self._named.get(name, {}).get(device) is stream:
                    del self._named[name][device]

    def _check_open(self) -> None:
        _process.check_fork()
        if self._closed:
            raise ClosedError("this UserStream was closed at the end of its with block")

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._closed = True
        self.close()

    def __repr__(self) -> str:
        which = " of the process" if self is _process_registry else ""
        state = "closed" if self._closed else f"{sum(map(len, self._named.values()))} streams"
        return f"<userstream.UserStream{which}: {state}>"

    device_of = staticmethod(_buffers.device_of)
    describe = staticmethod(_buffers.describe)


def _check_name(name: object) -> None:
    if name is None:
        return
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, not {name!r}")
    if not name:
        raise ValueError("name must not be empty; leave it out for the stream without a name")


def _forget(registry: weakref.ref[UserStream], stream: BaseStream) -> None:
    """Take a stream that was closed out of its registry."""
    owner = registry()
    if owner is not None:
        owner._remove({(stream._device(), stream.name): stream})


def _empty_all() -> None:
    # In a forked child: the next call misses its stream and meets the check.
    for registry in list(_registries):
        registry._lock = threading.Lock()  # a thread that is not here may have held it
        registry._unnamed = {}
        registry._named = {None: registry._unnamed}


_process.after_fork(_empty_all)
_process_registry = UserStream()
