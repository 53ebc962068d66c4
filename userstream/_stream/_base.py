"""What every stream has: a handle, a device, and an end."""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from cuda.core import Device

from userstream import _driver, _events, _process
from userstream._stream._core import CoreStream
from userstream.errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from cuda.bindings import driver
    from cuda.core import Context, DeviceResources

T = TypeVar("T")

NOT_NOW = "; ask before or after the capture"  # how a refusal goes on

# Ours by their handles, so that one that comes back by its handle is the same object.
_ours: weakref.WeakValueDictionary[int, BaseStream] = weakref.WeakValueDictionary()

# Streams whose handle was given away: a framework may keep it, so they live until exit.
_given_away: dict[int, BaseStream] = {}


class BaseStream(CoreStream):
    """The identity and the lifetime of a `Stream`."""

    __slots__ = (
        "_anywhere",
        "_closes_in_with",
        "_context",
        "_device_id",
        "_handle",
        "_held",
        "_id",
        "_name",
        "_on_close",
        "_owned",
        "_pool",
    )

    # Set by `_making.complete`, as cuda.core's factory runs no __init__.
    _handle: driver.CUstream | None  # None once closed
    _context: driver.CUcontext
    _device_id: int
    _id: int | None  # asked for once
    _name: str | None
    _on_close: Callable[[BaseStream], None] | None
    _anywhere: bool  # its handle means it whichever context is current
    _owned: bool  # made by userstream, so the driver's stream goes with it
    _closes_in_with: bool
    _pool: _events.EventPool
    _held: Any  # the queue of `_holding`

    def __init__(self, *args: object, **kwargs: object) -> None:  # noqa: ARG002
        raise TypeError(
            "Stream(...) makes no stream: use userstream.get_stream(target), "
            "Stream.create(device), Stream.from_handle(handle), Stream.legacy_default() or "
            "Stream.per_thread_default()"
        )

    @property
    def handle(self) -> driver.CUstream:
        """The ``CUstream``; ``int(stream.handle)`` is its address.

        Reading it keeps a stream that userstream created alive until exit, because whoever takes
        the handle may keep it. Raises `ClosedError` once the stream is closed.

        Examples
        --------
        >>> from userstream import Stream
        >>> stream = Stream.create(0)
        >>> int(stream.handle) == stream.__cuda_stream__()[1]
        True
        """
        handle = self._live()
        if self._owned:
            _given_away[id(self)] = self
        return handle

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return ``(0, address)``, the protocol by which libraries exchange streams."""
        return (0, int(self.handle))

    @property
    def device(self) -> Device:
        """The `cuda.core.Device` of this stream; of a default stream, the current one.

        Examples
        --------
        >>> import userstream as us
        >>> us.get_stream(0).device.device_id
        0
        """
        _process.check_fork()
        return Device(self._device())

    @property
    def context(self) -> Context:
        """The `cuda.core.Context` of this stream; of a default stream, the current one.

        Raises `ClosedError` once the stream is closed.

        Examples
        --------
        >>> from userstream import Stream
        >>> context = Stream.create().context
        """
        self._live()
        return super().context

    @property
    def resources(self) -> DeviceResources:
        """The hardware that the work of this stream may use, as `cuda.core.Stream.resources`.

        Raises `ClosedError` once the stream is closed.

        Examples
        --------
        >>> from userstream import Stream
        >>> resources = Stream.create().resources
        """
        self._live()
        return super().resources

    @property
    def name(self) -> str | None:
        """The name under which `get_stream` made it; `None` for any other stream.

        Examples
        --------
        >>> import userstream as us
        >>> us.get_stream(0, name="copies").name
        'copies'
        """
        return self._name

    @property
    def flags(self) -> int:
        """The flags it was created with: 1 (``CU_STREAM_NON_BLOCKING``) or 0.

        Driver call: ``cuStreamGetFlags``. Raises `CaptureError` while the stream is being
        captured, because the driver invalidates the capture of a stream that is asked.

        Examples
        --------
        >>> import userstream as us
        >>> us.get_stream(0).flags
        1
        """
        handle = self._live()
        _driver.refuse_capturing(handle, self, NOT_NOW)
        return _driver.stream_flags(handle, self)

    @property
    def is_nonblocking(self) -> bool:
        """Whether it runs beside the legacy default stream; as ``flags``.

        Examples
        --------
        >>> import userstream as us
        >>> us.get_stream(0).is_nonblocking
        True
        """
        return bool(self.flags & 1)

    @property
    def priority(self) -> int:
        """Its priority; lower numbers run first.

        Driver call: ``cuStreamGetPriority``. Raises `CaptureError` while the stream is being
        captured, as ``flags``.

        Examples
        --------
        >>> from userstream import Stream
        >>> Stream.create(0, priority=-1).priority
        -1
        """
        _driver.refuse_capturing(self._live(), self, NOT_NOW)
        return int(super().priority)

    @property
    def stream_id(self) -> int:
        """A number that no other stream of this process ever has, unlike the handle.

        Driver call: ``cuStreamGetId``, once. Raises `CaptureError` for a stream of somebody else
        that is being captured when it is asked first.

        Examples
        --------
        >>> from userstream import Stream
        >>> Stream.create(0).stream_id == Stream.create(0).stream_id
        False
        """
        handle = self._live()
        if self._id is None:
            _driver.refuse_capturing(handle, self, NOT_NOW)
            self._id = _driver.stream_id(handle, self)
        return self._id

    def close(self) -> None:
        """Close the stream: destroy it if userstream created it, let go of its owner if not.

        Raises
        ------
        RuntimeError
            It is a default stream, which all code of the process shares.

        Notes
        -----
        Work that is queued still completes. Closing again does nothing. A user stream leaves its
        registry, and `get_stream` makes a new one. Driver call: ``cuStreamDestroy``; does not
        block.

        Examples
        --------
        >>> from userstream import Stream
        >>> stream = Stream.create()
        >>> stream.close()
        >>> stream.is_closed
        True
        """
        if self._handle is None:
            return
        address = int(self._live())
        # First out of its registry: a Ctrl-C in between may not leave a closed stream there.
        if self._on_close is not None:
            self._on_close(self)
        from userstream._stream import _capture, _foreign  # which are built upon this

        _foreign.forget(self, address)
        if self._owned:
            with contextlib.suppress(ClosedError):  # another thread was faster
                _capture.forget(self)
        if _ours.get(address) is self:  # or it is a new one's by now
            _ours.pop(address, None)
        self._handle = None
        _given_away.pop(id(self), None)
        super().close()

    def __repr__(self) -> str:
        name = "" if self._name is None else f" name={self._name!r}"
        number = "" if self._id is None else f" id={self._id}"
        state = "closed" if self._handle is None else f"handle={int(self._handle):#x}"
        return f"<userstream.Stream device={self._device_id}{name}{number} {state}>"

    def __reduce__(self) -> NoReturn:
        _process.refuse_copy(
            self, "send the device or the name, and call userstream.get_stream() there"
        )

    def _live(self) -> driver.CUstream:
        """Return the handle of an open stream."""
        if _process.forked:
            _process.check_fork()
        handle = self._handle
        if handle is None:
            raise ClosedError(
                f"{self!r} is closed; get_stream() or Stream.create() makes a new one",
                device=self._device_id,
                stream=repr(self),
            )
        return handle

    def _device(self) -> int:
        return self._device_id

    def _where(self) -> driver.CUcontext:
        """Return the context in which the handle means this stream."""
        return self._context

    def _here(self, function: Callable[..., T], *args: object) -> T:
        """Call a function in that context, if the stream is open."""
        self._live()
        return _driver.within(self._where(), function, *args)

    def _identity(self) -> tuple[int, int, int]:
        """Return what tells the driver's streams apart; two objects may stand for one of them."""
        handle = int(self._live())
        thread = threading.get_ident() if handle == _driver.PER_THREAD else 0
        return (int(self._where()), handle, thread)

    def _is_in(self, context: driver.CUcontext) -> bool:
        """Tell whether it is open and belongs to a context; a default stream belongs to none."""
        if self._handle is None or self._context is None:
            return False
        return int(self._context) == int(context)


def note_ours(stream: BaseStream) -> None:
    """Let `ours_at` find a stream that userstream made."""
    _ours[int(stream._live())] = stream


def ours_at(address: int) -> BaseStream | None:
    """Return the open stream of that handle, if userstream made it."""
    return _ours.get(address)
