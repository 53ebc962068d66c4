"""`View`: one look at one buffer."""

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
    """An attribute of a view that is computed when it is first read, and then kept.

    `functools.cached_property` would not do: up to Python 3.11 it holds a lock per class while it
    computes, so another thread would wait until a framework or the driver has answered.
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
    """Which stream may be working on a buffer, and how certain that is: `BufferInfo.ordering`."""

    ordering: Ordering
    handle: int = 0  # of the producer's stream, or 0 if none is known
    owner: object = None  # what keeps that stream alive


# The producer is unknown: everything queued on the device so far comes before, and everything
# queued later comes after.
UNKNOWN = Order("device")
# The same, of a buffer that says a default stream, as many do whichever stream wrote it. Messages
# tell it from `UNKNOWN`, by `is`.
DOUBTED = Order("device")


class View:
    """One look at one buffer: each answer is computed on first use, and then kept.

    There is a subclass for each kind of buffer, in one file per framework or protocol. A public
    function makes one view of each buffer that it is passed (`_buffers.view_of`) and passes that
    on. So within one call `__cuda_array_interface__` is read once, the driver is asked about the
    pointer once, and all parts of the call act on the same answers. A view belongs to one call in
    one thread: do not keep it, because buffers change.

    A subclass must define `source`, `locate` and `layout`; everything else has a default. An
    attribute that is `once` here must be `once` in a subclass.
    """

    #: The name of this kind of buffer, as `describe` and messages say it.
    source: ClassVar[str]

    #: The framework that it belongs to, if that has a current stream.
    framework: ClassVar[Framework | None] = None

    #: Whether the framework can `pack` it.
    packs: ClassVar[bool] = False

    #: Whether nothing writes it again as long as a reference to it exists.
    is_immutable: ClassVar[bool] = False

    #: The framework whose current stream is its order, if that needs no view.
    usual: ClassVar[Framework | None] = None

    #: Whether `named` may tell the order. Not inherited: a subclass may know better.
    is_named: ClassVar[bool] = False

    #: Whether `glance` may answer. Not inherited either.
    is_glanced: ClassVar[bool] = False

    #: Whether every buffer of this kind is one array in one piece.
    is_single: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        cls.is_single = cls.parts is View.parts and cls.pieces is View.pieces
        cls.is_named = cls.is_single and "named" in vars(cls)
        is_usual = cls.is_single and cls.order is View.order and cls.units is View.units
        cls.usual = cls.framework if is_usual else None
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
            It is in host memory, page-locked memory included.
        DeviceMismatchError
            It has parts on several devices.
        UnsupportedBufferError
            Its device cannot be determined.
        """
        raise NotImplementedError

    @staticmethod
    def named(buffer: Any) -> tuple[int, int] | None:  # noqa: ARG004
        """Return device and handle of the stream that a buffer names, without making a view.

        `None` if that is not the common case: a view then decides, or refuses the buffer.
        """
        return None

    @staticmethod
    def glance(buffer: Any) -> tuple[int, int, Form] | None:  # noqa: ARG004
        """Return device, address and form of an array, without making a view.

        It is called for kinds that are `is_glanced`. `None` unless its memory has what it shows,
        and it has memory: a view then decides, or refuses the buffer.
        """
        return None

    @once
    def device(self) -> int:
        """The ordinal of its device. Raises as `locate`."""
        return self.locate(self.buffer)

    @once
    def layout(self) -> Layout:
        """Address, shape, strides, type and size, as far as they are told."""
        raise NotImplementedError

    @once
    def found(self) -> Place | None:
        """What the driver knows about the address, in any context: extent, kind and device.

        This is the only question to the driver about the pointer. `None` for address 0 and for
        memory that the driver does not know.
        """
        address = self.layout.address
        return _driver.pointers.place_of(address) if address else None

    @once
    def place(self) -> Place:
        """As `found`, for memory that may be used on a user stream.

        Raises `UnsupportedBufferError` for address 0, for memory that the driver does not know, and
        for memory of a context that is not a primary one.
        """
        return checked_place(self.found, self.layout.address or 0, self.buffer)

    @once
    def where(self) -> tuple[int | None, Memory]:
        """Device and kind of memory as `describe` reports them, for pinned memory as well.

        The driver is not asked about an array without elements, which may begin where its
        allocation ends.
        """
        if not self.layout.address or self.layout.is_empty:
            return self.device, "device"
        return self.place.device, self.place.kind

    # -- in which order ---------------------------------------------------------------------------

    @once
    def order(self) -> Order:
        """Its producer: by default the framework's current stream, if there is a framework."""
        if self.framework is None:
            return UNKNOWN
        try:
            device = self.device
        except HostBufferError:  # pinned memory is described as well
            device = self.place.device
        return Order("current", *self.framework.current_stream(device))

    def check_context(self) -> None:
        """Raise `UnsupportedBufferError` if its memory is of a context that is not a primary one.

        Edges with a device reach no work there. It is for kinds whose `device` does not ask the
        driver, and does not ask what an export alone would tell.
        """

    def export(self, handle: int) -> object:
        """Order the stream with that handle after the producer; return what keeps the memory.

        For buffers whose `order` is "dlpack", which name no stream. Everything queued on the device
        later is then ordered after the consumer.
        """
        raise NotImplementedError

    @property
    def held(self) -> object:
        """What keeps the memory that `layout` describes alive."""
        return self.buffer

    # -- what it is made of -----------------------------------------------------------------------

    @property  # not `once`: a view in its own dictionary would be freed by the collector only
    def units(self) -> Sequence[View]:
        """What is ordered and held separately: the view itself, or the views of its parts."""
        return (self,)

    @once
    def parts(self) -> Sequence[View] | None:
        """The views of its parts; `None` for one array in one piece."""
        return None

    @once
    def pieces(self) -> Sequence[tuple[View, Any]] | None:
        """The views of the pieces of one array, each with its index in the whole.

        `None` for an array in one piece, and for a list of arrays.
        """
        return None

    # -- what a copy needs to know ----------------------------------------------------------------

    def check_copyable(self) -> None:
        """Raise `UnsupportedBufferError` if a copy would not have the elements it shows."""

    def check_target(self) -> None:
        """Raise `UnsupportedBufferError` if nothing would see what is written to `layout`."""

    @once
    def is_read_only(self) -> bool:
        """Whether it declares itself read-only."""
        return False

    @once
    def is_disguised(self) -> bool:
        """Whether its memory differs from what it shows, so that its framework must `pack` it."""
        return False

    def pack(self) -> Any:  # another buffer of that framework
        """Make a contiguous copy on the framework's current stream; its device is current."""
        raise NotImplementedError

    @once
    def host(self) -> tuple[Any, str | None]:
        """For a host buffer: what NumPy can read, and the name of its dtype if that differs."""
        return self.buffer, None

    # -- all of it --------------------------------------------------------------------------------

    def info(self) -> BufferInfo:
        """Return what `describe` reports, except for the UUID."""
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
