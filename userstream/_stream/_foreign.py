"""Streams of frameworks, by their handles."""

from __future__ import annotations

from userstream import _driver, _process
from userstream._stream import Stream, _base, _making
from userstream._stream._default import DefaultStream

# By device and handle, so that the next edge finds its stream at once. Nothing is known of them
# but that they are in the primary context of the device: the driver uses handles again.
_known: dict[int, dict[int, Stream]] = {}
_MOST_KNOWN = 128


def stream_at(handle: int, device: int) -> Stream:
    """Return the stream that a framework means by a handle, on a device."""
    try:
        return _known[device][handle]
    except KeyError:
        pass
    ours = _base.ours_at(handle)
    if handle in (_driver.LEGACY, _driver.PER_THREAD):
        stream: Stream = DefaultStream.at(handle, device)
    elif isinstance(ours, Stream):
        stream = ours
    else:
        context = _driver.primary_context(device)
        stream = _making.wrap(Stream, handle, None, device, context)
    known = _known.setdefault(device, {})
    if len(known) >= _MOST_KNOWN:
        known.clear()
    return known.setdefault(handle, stream)


def forget(stream: _base.BaseStream, handle: int) -> None:
    """Let go of a stream that is being closed: to know it is to own it, says cuda.core."""
    _known.get(stream._device_id, {}).pop(handle, None)


_process.after_fork(_known.clear)
