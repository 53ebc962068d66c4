"""The state of a registry: its user streams, and the uses of buffers that waits cover."""

from __future__ import annotations

import contextlib
import functools
import weakref
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from cuda.bindings import driver

from userstream import _arguments, _buffers, _driver, _engine, _hooks, _process, _targets
from userstream._engine import held_objects, lanes
from userstream._stream.stream import Stream
from userstream.errors import (
    ClosedError,
    DeviceMismatchError,
    NoUserStreamError,
    UserStreamError,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from userstream._engine.lane import Lane
    from userstream._engine.lanes import Wanted
    from userstream.typing import Target

_tables: weakref.WeakSet[Table] = weakref.WeakSet()
_MOST_ACQUIRED = 256

Unknown: TypeAlias = Literal["device", "raise"]

_NO_STREAMS: Mapping[int, Stream] = MappingProxyType({})


class BufferUse:
    """A use of buffers on a stream, held with the buffers until the stream has passed the use."""

    __slots__ = ("__weakref__", "buffers", "lane")

    def __init__(self, buffers: Iterable[object], lane: Lane) -> None:
        self.buffers = frozenset(map(_key, buffers))
        self.lane = weakref.ref(lane)  # a stream without references is destroyed all the same


class BufferUses:
    """Pending uses of buffers on named and caller-supplied streams, for waits on the buffers."""

    __slots__ = ("_acquired", "pending")

    def __init__(self) -> None:
        # A use ends with its last reference. `set.discard` is the callback of the weak reference
        # because no signal handler runs in it: an exception in such a callback would be lost.
        self.pending: set[weakref.ref[BufferUse]] = set()
        self._acquired: dict[int, BufferUse] = {}  # by identity, the oldest first

    def begin(self, buffers: Iterable[object], lane: Lane) -> BufferUse:
        """Return a use of buffers by a stream; the use is pending while the object exists."""
        use = BufferUse(buffers, lane)
        self.pending.add(weakref.ref(use, self.pending.discard))
        return use

    def keep_acquired(self, use: BufferUse) -> None:
        """Keep a use by `acquire` until a release ends the use."""
        self._acquired[id(use)] = use
        while len(self._acquired) > _MOST_ACQUIRED:
            # Some uses are never released. Each is kept for at least the work queued until now.
            oldest = self._acquired.pop(next(iter(self._acquired)))
            lane = oldest.lane()
            if lane is not None:
                with contextlib.suppress(UserStreamError):
                    held_objects.keep(lane, oldest)

    def end_acquired(self, use: BufferUse) -> None:
        """Forget the acquired uses of the stream and the buffers of a release."""
        for key, other in self._acquired.copy().items():
            if other.lane() is use.lane() and other.buffers <= use.buffers:
                self._acquired.pop(key, None)

    def forget_acquired(self) -> None:
        """Forget all uses that were acquired and not released."""
        self._acquired.clear()

    def lanes_of(self, target: Any) -> list[Lane]:
        """Return the lanes of the streams that have not passed their use of a buffer."""
        if not self.pending:
            return []
        wanted = set(map(_key, _targets.buffers_in(target)))
        if not wanted:
            return []
        held_objects.sweep()  # ends the uses that the streams have passed
        for key, acquired in self._acquired.copy().items():
            lane = acquired.lane()
            if lane is None or lane.handle is None:  # the use can no longer be released
                self._acquired.pop(key, None)
        found: dict[int, Lane] = {}
        for reference in list(self.pending):
            use = reference()
            lane = None if use is None or wanted.isdisjoint(use.buffers) else use.lane()
            # Captured work is not pending, and the work of a closed stream is unknown.
            if lane is None or lane.handle is None:
                continue
            if lane.capture_status() == _driver.streams.NOT_CAPTURING:
                found[id(lane)] = lane
        return list(found.values())


def _key(buffer: object) -> int:
    """Return the identity key of a buffer: its device address, or `id()` of the object."""
    return int(buffer) if isinstance(buffer, driver.CUdeviceptr) else id(buffer)


class Table:
    """State of a `UserStream`: its user streams, one per device and name, and its settings."""

    __slots__ = (
        "__weakref__",
        "_creation_locks",
        "_lock",
        "dropped",
        "is_closed",
        "is_process_wide",
        "named",
        "unknown",
        "unnamed",
        "uses",
    )

    def __init__(self, unknown: Unknown) -> None:
        self.uses = BufferUses()  # never replaced: callers keep a reference
        self.unknown = unknown  # policy for a buffer whose producer is unknown
        # Protects changes; readers need no lock. Re-entrant, because the garbage collector may run
        # any destructor during a change.
        self._lock = _process.RLock()
        self._creation_locks: dict[tuple[int, str | None], _process.RLock] = {}
        self.is_closed = False
        self.is_process_wide = False  # True: single streams cannot be closed
        self.unnamed: dict[int, Stream] = {}  # by device; never replaced: callers keep a reference
        self.named: dict[str | None, dict[int, Stream]] = {None: self.unnamed}
        # Streams that `close` dropped while references to them existed. `get_stream` returns such a
        # stream again unless the priority or the part differs: a second stream of that device and
        # name would not be ordered with the work on the first.
        self.dropped: weakref.WeakValueDictionary[tuple[int, str | None], Stream] = (
            weakref.WeakValueDictionary()
        )
        _tables.add(self)

    def __str__(self) -> str:
        count = sum(map(len, self.named.values()))
        return "closed" if self.is_closed else f"{count} stream{'' if count == 1 else 's'}"

    def streams_named(self, name: str) -> Mapping[int, Stream]:
        """Return the streams with a given name, by device."""
        if not isinstance(name, str):
            raise TypeError(f"name must be a string, not {name!r}")
        if not name:
            raise ValueError("name must not be empty; leave it out for the stream without a name")
        return self.named.get(name, _NO_STREAMS)

    def user_stream(self, device: int, name: str | None) -> Stream:
        """Return the stream of a device and name, creating it on first use."""
        streams = self.unnamed if name is None else self.streams_named(name)
        return streams.get(device) or self.find_or_create(device, name)

    def check_name(self, name: str | None, stream: object) -> None:
        """Raise for an invalid name, and for a name together with a stream."""
        if name is None:
            return
        if stream is not None:
            raise ValueError(f"name={name!r} selects a user stream: pass no stream= as well")
        self.streams_named(name)

    def find_or_create(
        self,
        target: Target,
        name: str | None,
        priority: int | None = None,
        sms: Wanted | None = None,
    ) -> Stream:
        """Return the stream of a device and name, creating it on first use."""
        wanted = None if priority is None else _arguments.integer(priority, "priority")
        sms = None if sms is None else _engine.lanes.check_sms(sms)
        self.check_open()
        given = _targets.stream_of(target)
        if given is not None:
            if name is not None or wanted is not None or sms is not None:
                raise ValueError(
                    f"{given!r} is a stream already: pass no name, no priority and no sms"
                )
            return given
        devices = _targets.devices_of(target)
        if len(devices) > 1:
            raise DeviceMismatchError(
                f"the buffers live on devices {devices}, and each device has its own stream; pass "
                "the buffers of one device at a time",
                devices=devices,
            )
        (device,) = devices
        given_priority = wanted
        if wanted is not None:
            wanted = lanes.clamp_priority(device, wanted)
        stream = self.named.get(name, {}).get(device)
        if stream is None:
            stream = self._create(device, name, wanted, sms)
        if wanted is not None and stream.priority != wanted:
            clamped = "" if given_priority == wanted else f" (which {given_priority} is clamped to)"
            raise ValueError(
                f"{stream!r} has priority {stream.priority}, not {wanted}{clamped}: pass another "
                "name for a stream of another priority"
            )
        if sms is not None:
            _check_part(stream, device, sms)
        return stream

    def _create(
        self, device: int, name: str | None, priority: int | None, sms: Wanted | None
    ) -> Stream:
        # The driver may block here until another stream is done. With one lock per device and name,
        # callers that want another stream or close this registry do not wait.
        with self._creation_locks.setdefault((device, name), _process.RLock()):
            there = self.named.get(name, _NO_STREAMS).get(device)
            if there is not None:
                return there
            part = None if sms is None else _engine.lanes.part_of(device, sms)
            stream = self.dropped.get((device, name))
            if (
                stream is None
                or priority not in (None, stream.priority)
                or (sms is not None and stream._resolve().part is not part)
            ):
                lane = lanes.create(
                    device, name=name, nonblocking=True, priority=priority or 0, part=part
                )
                lane.on_close = functools.partial(_forget, weakref.ref(self))
                stream = Stream._of(lane)
            with self._lock:
                self.check_open()
                # A signal handler or a destructor may have created the stream meanwhile.
                stream = self.named.setdefault(name, {}).setdefault(device, stream)
            for listener in _hooks.user_stream_created:
                listener(stream)
            return stream

    def lanes_to_wait_for(self, targets: Sequence[Target], name: str | None) -> list[Lane]:
        """Return the distinct lanes of the streams that a wait for targets covers."""
        try:
            if len(targets) == 1 and (name is not None or not self.uses.pending):
                streams = self.unnamed if name is None else self.streams_named(name)
                stream = known_stream(targets[0], streams)
                if stream is not None:
                    return [stream._resolve()]
            self.check_open()
            found: dict[int, Lane] = {}
            for target in targets or (None,):
                for lane in self._lanes_for_wait(target, name):
                    found.setdefault(id(lane), lane)
        except UserStreamError as error:
            _targets.suggest_timeout(targets, error)
            raise
        return list(found.values())

    def _lanes_for_wait(self, target: Target, name: str | None) -> list[Lane]:
        """Return the lanes of a target's user streams, and of other streams that use the target."""
        users = self.uses.lanes_of(target) if name is None else []
        try:
            return self._lanes_of(target, name) + users
        except NoUserStreamError:
            if not users:
                raise
            return users

    def _lanes_of(self, target: Target, name: str | None) -> list[Lane]:
        """Return the lanes of the existing streams that a target names."""
        given = _targets.streams_in(target)
        if given:
            if name is not None:
                raise ValueError(f"{given[0]!r} is a stream already: pass no name")
            return [stream._resolve() for stream in given]
        streams = self.unnamed if name is None else self.streams_named(name)
        found = []
        for device in _targets.devices_of(target):
            stream = streams.get(device)
            if stream is None:
                raise self._missing_stream(device, name, target)
            found.append(stream._resolve())
        return found

    def _missing_stream(self, device: int, name: str | None, target: Target) -> NoUserStreamError:
        """Return the error for a missing stream, with a list of the existing streams."""
        there = [
            "the unnamed one" if other is None else repr(other)
            for of, other in self.streams()
            if of == device
        ]
        if name is None:
            wanted, making = "unnamed user stream" if there else "user stream", f"{device}"
        else:
            wanted, making = f"user stream named {name!r}", f"{device}, name={name!r}"
        # For a buffer, also name the call that waits for its producer: a new stream has no work.
        theirs = "; wait(acquire(buffer)) waits for the work of a buffer's producer"
        only = f", only {' and '.join(there)}" if there else ""
        return NoUserStreamError(
            f"device {device} has no {wanted}{only}: can only wait on user streams; "
            f"get_stream({making}) makes one{theirs if _targets.buffers_in(target) else ''}",
            device=device,
        )

    def streams(self) -> Mapping[tuple[int, str | None], Stream]:
        """Return the existing streams, by device and name."""
        _process.check_fork()
        # Iterate over copies: a signal handler, a destructor or another thread may change the table
        # meanwhile. list(items()) is no copy at once: it allocates, which may collect garbage.
        found = {
            (device, name): stream
            for name, streams in self.named.copy().items()
            for device, stream in streams.copy().items()
        }
        return MappingProxyType(found)

    def lanes(self) -> dict[tuple[int, str | None], Lane]:
        """Return the lanes of the existing streams, by device and name."""
        return {key: stream._resolve() for key, stream in self.streams().items()}

    def empty(self, found: Mapping[tuple[int, str | None], Lane], *, lost: bool = False) -> None:
        """Drop the streams that are still in the table; if `lost`, never return them again."""
        with self._lock:
            for (device, name), lane in found.items():
                stream = self.named.get(name, {}).get(device)
                if stream is not None and stream._lane is lane:
                    if not lost:
                        self.dropped[device, name] = stream
                    del self.named[name][device]

    def forget(self, closed: Lane) -> None:
        """Remove the stream of a lane that is being closed; raise if the process shares it."""
        if self.is_process_wide:
            raise RuntimeError(
                f"{closed!r} is a user stream of the whole process and cannot be closed, because "
                "other code may be using it: us.close() empties the registry; a stream that you "
                "may close comes from Stream.create(), or from a registry of your own, UserStream()"
            )
        key = (closed.device, closed.name)
        with self._lock:
            self.empty({key: closed})
            stream = self.dropped.get(key)
            if stream is not None and stream._lane is closed:
                del self.dropped[key]

    def check_open(self) -> None:
        """Raise `ClosedError` if the registry was closed permanently."""
        if _process.halted:
            _process.check_fork()
        if self.is_closed:
            raise ClosedError(
                "this UserStream was closed at the end of its with block; create another one"
            )

    def close(self) -> None:
        """Close the table permanently and drop its streams."""
        with self._lock:  # waits for a thread that is storing a new stream
            self.is_closed = True
        self.empty(self.lanes())  # including streams created meanwhile or being captured


def known_stream(target: Target, streams: Mapping[int, Stream]) -> Stream | None:
    """Return the existing stream for an ordinal or a buffer; `None` if the table has to decide."""
    if type(target) is int:
        return streams.get(target)
    kind = _buffers.view_classes.get(type(target)) or _buffers.kind_of(target)
    return None if kind is None else streams.get(kind.locate(target))


def _check_part(stream: Stream, device: int, sms: Wanted) -> None:
    """Raise if a stream is not in the wanted part of the device."""
    part = stream._resolve().part
    # Check `part is None` first: part_of() may split the device, which is not needed then.
    if part is None or part is not _engine.lanes.part_of(device, sms):
        has = "all the SMs of its device" if part is None else f"sms={part.sms}"
        raise ValueError(
            f"{stream!r} has {has}, not {sms!r}: pass another name for a stream of another part"
        )


def _forget(table: weakref.ref[Table], lane: Lane) -> None:
    """Remove the stream of a lane that is being closed from a table."""
    owner = table()
    if owner is not None:
        owner.forget(lane)


def _empty_all() -> None:
    # In a forked child: the next call finds no stream and reaches the fork check.
    for table in list(_tables):
        table._lock = _process.RLock()  # a thread of the parent may have held the lock
        table._creation_locks = {}
        table.unnamed.clear()
        table.named = {None: table.unnamed}
        table.dropped = weakref.WeakValueDictionary()


# Otherwise a child would find the parent's streams and bypass the fork check.
_process.after_fork(_empty_all)
