"""`View`: the facts about one buffer during one call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar, overload

from userstream import _driver
from userstream._buffers._places import checked_place
from userstream.errors import HostBufferError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Self

    from userstream._buffers._framework import Framework
    from userstream._buffers._info import BufferInfo, Ordering
    from userstream._buffers._layout import Form, Layout
    from userstream._driver.pointers import Memory, Place

T = TypeVar("T")


class once(Generic[T]):  # noqa: N801 -- used like `property`
    """Cached attribute of a view, computed on first access.

    Not `functools.cached_property`: up to Python 3.11 it holds a lock per class while it computes,
    so another thread would wait for a framework or the driver.
    """

    def __init__(self, answer: Callable[[Any], T]) -> None:
        self._answer = answer
        self._name = answer.__name__
        self.__doc__ = answer.__doc__

    @overload
    def __get__(self, view: None, owner: type) -> Self: ...
    @overload
    def __get__(self, view: View, owner: type) -> T: ...
    def __get__(self, view: View | None, owner: type) -> Self | T:
        if view is None:
            return self
        # From now on attribute lookup finds the instance's own entry before this descriptor.
        value = view.__dict__[self._name] = self._answer(view)
        return value


class Order(NamedTuple):
    """The producer's stream of a buffer and its certainty, as in `BufferInfo.ordering`."""

    ordering: Ordering
    handle: int = 0  # of the producer's stream, or 0 if none is known
    owner: object = None  # object that keeps that stream alive


# The producer is unknown: everything queued on the device so far comes before, and everything
# queued later comes after.
UNKNOWN = Order("device")
# The same for a buffer that names a default stream: many name one whichever stream wrote the data.
# Messages distinguish `DOUBTED` from `UNKNOWN` by `is`.
DOUBTED = Order("device")


class View:
    """Facts about one buffer, each computed on first use and then cached.

    Each kind of buffer has a subclass, in one module per framework or protocol. A public function
    creates one view of each of its buffers (`_buffers.view_of`) and passes the view on. So within
    one call `__cuda_array_interface__` is read once, the driver is queried for the pointer once,
    and all parts of the call use the same facts. A view belongs to one call in one thread: do not
    keep a view, because buffers change.

    A subclass must define `source`, `locate` and `layout`; everything else has a default. An
    attribute that is `once` here must be `once` in a subclass.
    """

    #: The name of this kind of buffer in `describe` and in messages.
    source: ClassVar[str]

    #: The framework of the buffer, if the framework has a current stream.
    framework: ClassVar[Framework | None] = None

    #: True if the framework can `pack` the buffer.
    packs: ClassVar[bool] = False

    #: True if the buffer is never written again while a reference to the buffer exists.
    is_immutable: ClassVar[bool] = False

    #: The framework whose current stream is the producer, if this is known without a view.
    usual: ClassVar[Framework | None] = None

    #: True if `producer_of` may return a result. Not inherited: a subclass may be more precise.
    names_producer: ClassVar[bool] = False

    #: True if `glance` may return a result. Not inherited either.
    is_glanced: ClassVar[bool] = False

    #: True if every buffer of this kind is one array in one piece.
    is_single: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        cls.is_single = cls.parts is View.parts and cls.pieces is View.pieces
        is_usual = cls.is_single and cls.order is View.order and cls.units is View.units
        cls.usual = cls.framework if is_usual else None
        cls.names_producer = cls.is_single and "producer_of" in vars(cls)
        cls.is_glanced = cls.usual is not None and "glance" in vars(cls)

    def __init__(self, buffer: Any) -> None:  # any framework's buffer
        self.buffer = buffer

    # -- where it is ------------------------------------------------------------------------------

    @staticmethod
    def locate(buffer: Any) -> int:
        """Return the ordinal of a buffer's device, without making a view.

        Raises
        ------
        HostBufferError
            The buffer is in host memory, page-locked memory included.
        DeviceMismatchError
            The buffer has parts on several devices.
        UnsupportedBufferError
            The device of the buffer cannot be determined.
        """
        raise NotImplementedError

    @staticmethod
    def producer_of(buffer: Any) -> tuple[int, int, object] | None:  # noqa: ARG004
        """Return a buffer's device, its producer's stream, and what keeps that stream alive.

        Called only for kinds with `names_producer`. `None` outside the common case: the general
        path then makes a view.
        """
        return None

    @staticmethod
    def glance(buffer: Any) -> tuple[int, int, Form] | None:  # noqa: ARG004
        """Return device, address and form of an array, without making a view.

        Called only for kinds with `is_glanced`. `None` if the array has no memory, or its memory
        differs from its elements: the general path then makes a view.
        """
        return None

    @once
    def device(self) -> int:
        """The ordinal of the buffer's device. Raises the errors of `locate`."""
        return self.locate(self.buffer)

    @once
    def layout(self) -> Layout:
        """Address, shape, strides, type and size, where known."""
        raise NotImplementedError

    @once
    def found(self) -> Place | None:
        """The driver's information about the address: extent, kind and device, in any context.

        This is the only driver query for the pointer. `None` for address 0 and for memory that the
        driver does not know.
        """
        address = self.layout.address
        return _driver.pointers.place_of(address) if address else None

    @once
    def place(self) -> Place:
        """The result of `found`, checked for use on a user stream.

        Raises `UnsupportedBufferError` for address 0, for memory that the driver does not know, and
        for memory of a context that is not a primary one.
        """
        return checked_place(self.found, self.layout.address or 0, self.buffer)

    @once
    def where(self) -> tuple[int | None, Memory]:
        """Device and kind of memory as `describe` reports them, including pinned memory.

        The driver is not queried for an empty array, which may begin at the end of its allocation.
        """
        if not self.layout.address or self.layout.is_empty:
            return self.device, "device"
        return self.place.device, self.place.kind

    # -- in which order ---------------------------------------------------------------------------

    @once
    def order(self) -> Order:
        """The producer: by default the framework's current stream, otherwise unknown."""
        if self.framework is None:
            return UNKNOWN
        try:
            device = self.device
        except HostBufferError:  # `describe` also covers pinned memory
            device = self.place.device
        return Order("current", *self.framework.current_stream(device))

    def check_context(self) -> None:
        """Raise `UnsupportedBufferError` if the memory is not in a primary context.

        Edges with a device do not cover the work of other contexts. Needed for kinds whose `device`
        does not query the driver. Never makes an export only for this check.
        """

    def export(self, handle: int) -> object:
        """Order the stream of a handle after the producer; return an object that keeps the memory.

        For buffers with `order` "dlpack", which name no stream. Everything queued on the device
        later is then ordered after the consumer.
        """
        raise NotImplementedError

    @property
    def held(self) -> object:
        """The object that keeps the memory of `layout` alive."""
        return self.buffer

    # -- what it is made of -----------------------------------------------------------------------

    @property  # not `once`: a view that refers to itself is freed only by the garbage collector
    def units(self) -> Sequence[View]:
        """The views to order and hold separately: the view itself, or the views of its parts."""
        return (self,)

    @once
    def parts(self) -> Sequence[View] | None:
        """The views of the buffer's parts; `None` for one array in one piece."""
        return None

    @once
    def pieces(self) -> Sequence[tuple[View, Any]] | None:
        """The views of the pieces of one array, each with its index in the whole.

        `None` for an array in one piece, and for a list of arrays.
        """
        return None

    # -- what a copy needs to know ----------------------------------------------------------------

    def check_copyable(self) -> None:
        """Raise `UnsupportedBufferError` if copying the memory would not copy the elements."""

    def check_target(self) -> None:
        """Raise `UnsupportedBufferError` if data written to `layout` would be lost."""

    @once
    def is_read_only(self) -> bool:
        """True if the buffer declares itself read-only."""
        return False

    @once
    def is_disguised(self) -> bool:
        """True if the memory differs from the elements: the framework must `pack` the buffer."""
        return False

    def pack(self) -> Any:  # another buffer of that framework
        """Make a contiguous copy on the framework's current stream; its device is current."""
        raise NotImplementedError

    @once
    def host(self) -> tuple[Any, str | None]:
        """A NumPy-readable form of a host buffer, and the name of its dtype if that differs."""
        return self.buffer, None

    # -- all of it --------------------------------------------------------------------------------

    def info(self) -> BufferInfo:
        """Return the result of `describe`, without the UUID."""
        from userstream._buffers._info import BufferInfo

        where, memory = self.where
        layout, order = self.layout, self.order
        return BufferInfo(
            source=self.source,
            device_id=where,
            memory=memory,
            address=layout.address,
            nbytes=layout.nbytes,
            shape=layout.shape,
            strides=layout.strides,
            dtype=layout.dtype,
            producer=order.handle or None,
            ordering=order.ordering,
            parts=tuple(part.info() for part in self.parts or ()),
        )
