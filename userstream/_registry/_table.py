"""The table of user streams, one per device and name."""

from __future__ import annotations

import functools
import threading
import weakref
from types import MappingProxyType
from typing import TYPE_CHECKING

from userstream import _buffers, _numbers, _process, _targets
from userstream._stream import factory
from userstream._stream.stream import Stream
from userstream.errors import ClosedError, DeviceMismatchError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from userstream._engine.lane import Lane
    from userstream.typing import Target

_tables: weakref.WeakSet[StreamTable] = weakref.WeakSet()
_NONE: Mapping[int, Stream] = MappingProxyType({})


class StreamTable:
    """The streams of a `UserStream`: finding and making them."""

    __slots__ = ("__weakref__", "_closed", "_lock", "_makings", "_named", "_unnamed")

    def __init__(self) -> None:
        # For changes; readers need none. Reentrant, because the garbage collector may run anybody's
        # destructor in the middle of one.
        self._lock = threading.RLock()
        self._makings: dict[tuple[int, str | None], threading.RLock] = {}
        self._closed = False
        self._unnamed: dict[int, Stream] = {}
        self._named: dict[str | None, dict[int, Stream]] = {None: self._unnamed}
        _tables.add(self)

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
        streams = self._unnamed if name is None else self._called(name)
        if priority is None:
            stream = known(target, streams)
            if stream is not None:
                return stream
        return self._find_or_create(target, name, priority)

    def _called(self, name: str) -> Mapping[int, Stream]:
        """Return the streams of that name, by device."""
        if not isinstance(name, str):
            raise TypeError(f"name must be a string, not {name!r}")
        if not name:
            raise ValueError("name must not be empty; leave it out for the stream without a name")
        return self._named.get(name, _NONE)

    def _find_or_create(self, target: Target, name: str | None, priority: int | None) -> Stream:
        wanted = None if priority is None else _numbers.integer(priority, "priority")
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
            wanted = factory.clamp_priority(device, wanted)
        stream = self._named.get(name, {}).get(device) or self._create(device, name, wanted or 0)
        if wanted is not None and stream.priority != wanted:
            raise ValueError(
                f"{stream!r} has priority {stream.priority}, not {wanted}: pass another name for "
                "a stream of another priority"
            )
        return stream

    def _create(self, device: int, name: str | None, priority: int) -> Stream:
        # The driver may hold this up until another stream is done. So only those wait who want the
        # same one, and not whoever wants another or closes this registry.
        with self._makings.setdefault((device, name), threading.RLock()):
            there = self._named.get(name, _NONE).get(device)
            if there is not None:
                return there
            lane = factory.create(device, name=name, nonblocking=True, priority=priority)
            stream = Stream._of(lane)
            with self._lock:
                self._check_open()
                # A signal handler or a destructor may have made one in the middle of it.
                kept = self._named.setdefault(name, {}).setdefault(device, stream)
                if kept is stream:
                    lane.on_close = functools.partial(_forget, weakref.ref(self))
                return kept

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
        # Copies, as a signal handler or a destructor may change the table in the middle.
        found = {
            (device, name): stream
            for name, streams in list(self._named.items())
            for device, stream in list(streams.items())
        }
        return MappingProxyType(found)

    def _remove(self, lanes: Mapping[tuple[int, str | None], Lane]) -> None:
        with self._lock:
            for (device, name), lane in lanes.items():
                stream = self._named.get(name, {}).get(device)
                if stream is not None and stream._lane is lane:
                    del self._named[name][device]

    def _lanes(self) -> dict[tuple[int, str | None], Lane]:
        return {key: stream._resolve() for key, stream in self.streams().items()}

    def _check_open(self) -> None:
        _process.check_fork()
        if self._closed:
            raise ClosedError(
                "this UserStream was closed at the end of its with block; make another one"
            )


def known(target: Target, streams: Mapping[int, Stream]) -> Stream | None:
    """Return the stream that there is for an ordinal or a buffer."""
    kind = _buffers.learned.get(type(target))
    if kind is not None:
        return streams.get(kind.locate(target))
    return streams.get(target) if type(target) is int else None


def _forget(registry: weakref.ref[StreamTable], lane: Lane) -> None:
    """Take a stream that was closed out of its registry."""
    owner = registry()
    if owner is not None:
        owner._remove({(lane.device, lane.name): lane})


def _empty_all() -> None:
    # In a forked child: the next call misses its stream and meets the check.
    for table in list(_tables):
        table._lock = threading.RLock()  # a thread that is not here may have held it
        table._makings = {}
        table._unnamed = {}
        table._named = {None: table._unnamed}


_process.after_fork(_empty_all)
