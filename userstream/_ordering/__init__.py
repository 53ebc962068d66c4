"""Who produces some buffers, who uses them, and the edges between the two."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

from userstream import _cleanup, _driver, _holding, _targets
from userstream._buffers import NOTHING_PENDING, UNKNOWN, type_name
from userstream._stream import Stream
from userstream._stream._default import DefaultStream
from userstream._stream._foreign import stream_at
from userstream.errors import CaptureError, DeviceMismatchError, UnknownProducerError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from userstream._buffers import Rule
    from userstream.typing import Producer, StreamLike

# To find a race: every acquire and release waits on the host as well.
_sync = os.environ.get("USERSTREAM_SYNC", "") not in ("", "0")


class Ordering:
    """The streams that produce some buffers, and the one that uses them."""

    __slots__ = ("_exports", "_may_join", "_owners", "_producers", "_thread", "consumer", "leaves")

    def __init__(
        self,
        buffers: Sequence[Any],
        stream: StreamLike | int | None,
        producer: Producer,
        user_stream: Callable[[int], Stream],
    ) -> None:
        self.leaves = [
            (buffer, rule, rule.device_id(buffer))
            for buffer, rule in _targets.buffers_in(buffers, named="buffers")
        ]
        devices = list(dict.fromkeys(device for _, _, device in self.leaves))
        if not devices:
            raise ValueError("no buffer was passed")
        self.consumer = _consumer(stream, devices, user_stream)
        self._producers: list[Stream] = []
        self._owners: list[object] = []  # of streams that their frameworks might destroy
        self._exports: list[tuple[Any, int, Callable[[Any, int], object]]] = []
        self._may_join = False
        if isinstance(producer, str) and producer == "auto":
            for buffer, rule, device in self.leaves:
                self._find_producer(buffer, rule, device)
        elif producer is not None:
            given = given_stream(producer, "producer")
            self._may_join = not given._is_shared()
            for device in devices:
                self._add_producer(_on(given, device), producer)
        # What is the per-thread stream of one thread is another one in the next.
        streams = (self.consumer, *self._producers)
        per_thread = any(int(each._live()) == _driver.PER_THREAD for each in streams)
        self._thread = threading.get_ident() if per_thread else None

    def _find_producer(self, buffer: Any, rule: Rule, device: int) -> None:
        if rule.export is not None:
            self._exports.append((buffer, device, rule.export))
            return
        handle, owner = rule.producer(buffer, device)
        if handle == UNKNOWN:
            raise UnknownProducerError(
                f"nothing tells which stream works on this {type_name(buffer)}: pass producer=, "
                "the stream that writes it, or None if nothing is pending",
                device=device,
            )
        if handle != NOTHING_PENDING:
            self._add_producer(stream_at(handle, device), owner)

    def _add_producer(self, producer: Stream, owner: object) -> None:
        if producer._is_same(self.consumer) or any(map(producer._is_same, self._producers)):
            return
        self._producers.append(producer)
        self._owners.append(owner)

    def acquire(self) -> list[object]:
        """Let the consumer wait for the producers; return what keeps the memory of some."""
        consumer = self.consumer
        may_join = not consumer._is_shared()
        for producer in self._producers:
            consumer._wait_for(producer, may_join=may_join)
        kept = [self._export(*each) for each in self._exports]
        self._wait_on_host()
        return kept

    def _export(self, buffer: Any, device: int, export: Callable[[Any, int], object]) -> object:
        consumer = self.consumer
        if isinstance(consumer, DefaultStream) and consumer._device_id != device:
            raise DeviceMismatchError(
                f"to {type_name(buffer)} the handle of {consumer!r} means a stream of device "
                f"{device}; pass another stream",
                devices=(consumer._device_id, device),
            )
        if consumer._capture_status() != _driver.NOT_CAPTURING:
            raise CaptureError(
                f"{consumer!r} is being captured into a graph, which cannot depend on the work "
                f"that produces this {type_name(buffer)}; acquire it before the capture begins",
                stream=repr(consumer),
            )
        try:
            return export(buffer, int(consumer.handle))
        except Exception as error:
            raise UnknownProducerError(
                f"this {type_name(buffer)} could not order {consumer!r} after its producer "
                f"({error}); pass producer=, the stream that writes it, or None if nothing is "
                "pending",
                device=device,
            ) from error

    def release(self, objects: object) -> None:
        """Let the producers go on after the consumer; hold the objects up to there, unless `None`.

        One producer that cannot wait does not stop the others.
        """
        if objects is None and not self._producers:
            return
        consumer = self.consumer
        failures = []
        event, capture = consumer._mark()
        try:
            for producer in self._producers:
                try:
                    producer._follow(event, consumer, capture, may_join=self._may_join)
                except Exception as failure:
                    failures.append(failure)
        finally:
            # What is captured never completes: the graph needs the buffers as long as it lives.
            if objects is None or capture != _driver.NOT_CAPTURING:
                consumer._pool.give_back(event)
            else:
                _holding.hold(consumer, event, objects)
        self._wait_on_host()
        _cleanup.report(failures, None)

    def check_thread(self) -> None:
        """Raise unless this is the thread whose per-thread default stream takes part, if any."""
        if self._thread is not None and self._thread != threading.get_ident():
            raise RuntimeError(
                "a borrow with the per-thread default stream must end in the thread where it "
                "began: in another thread that is another stream"
            )

    def _wait_on_host(self) -> None:
        if _sync and self.consumer._capture_status() == _driver.NOT_CAPTURING:
            self.consumer.sync()


def _consumer(
    stream: StreamLike | int | None, devices: list[int], user_stream: Callable[[int], Stream]
) -> Stream:
    if stream is not None:
        return _on(given_stream(stream, "stream"), devices[0])
    if len(devices) > 1:
        raise DeviceMismatchError(
            f"the buffers live on devices {devices}, each of which has its own user stream; pass "
            "stream=, the one that uses them all",
            devices=devices,
        )
    return user_stream(devices[0])


def given_stream(stream: StreamLike | int, argument: str) -> Stream:
    """Return the stream that was passed as an argument."""
    try:
        return Stream.from_handle(stream)
    except TypeError as error:
        raise TypeError(f"{argument}=: {error}") from None


def _on(stream: Stream, device: int) -> Stream:
    """Return the stream, of a default stream the one of a device."""
    return stream.on(device) if isinstance(stream, DefaultStream) else stream
