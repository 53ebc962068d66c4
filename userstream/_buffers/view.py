"""`View`: one look at one buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar, overload

from userstream import _driver
from userstream._buffers._info import BufferInfo
from userstream._buffers._places import checked_place
from userstream.errors import HostBufferError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Self

    from userstream._buffers._framework import Framework
    from userstream._buffers._info import Ordering
    from userstream._buffers._layout import Layout
    from userstream._driver import Memory, Place

T = TypeVar("T")


class once(Generic[T]):  # noqa: N801 -- used like `property`
    """An attribute of a view that is found out when it is first read, and kept.

    `functools.cached_property` is not used, because it holds a lock of the class up to Python 3.11:
    another thread, or a destructor in the middle, would wait for what the framework or the driver
    takes to answer.
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
        # The instance's own dictionary comes before this descriptor from now on.
        value = view.__dict__[self._name] = self._answer(view)
        return value


class Order(NamedTuple):
    """Who may be at work on a buffer, and how far that is known (see `BufferInfo.ordering`)."""

    ordering: Ordering
    handle: int = 0  # of the producer's stream, if there is one that is named
    owner: object = None  # what keeps that stream alive


# Nothing tells: whoever it is, what is queued on the device now comes before, and what is queued
# later comes after.
UNKNOWN = Order("device")


class View:
    """One look at one buffer. What it tells is asked for when first wanted, and then kept.

    There is a subclass for each kind of buffer: one file for each framework or protocol. A public
    function makes one view of each buffer that it is passed, by `_buffers.view_of`, and hands that
    on. So within one call `__cuda_array_interface__` is read once, DLPack exported once and the
    driver asked once about the pointer, and all parts of the call act on the same answers. A view
    is of one call and one thread: do not keep one, as buffers change.

    A subclass has to say `source`, `locate` and `layout`. The others have defaults. What is
    `once` here is `once` in a subclass.
    """

    #: The name of this kind of buffer, as `describe` and messages say it.
    source: ClassVar[str]

    #: The framework that it belongs to, if that has a current stream.
    framework: ClassVar[Framework | None] = None

    #: Whether the framework can `pack` it.
    packs: ClassVar[bool] = False

    #: Whether nothing ever writes it once it is made, as long as somebody holds it.
    is_immutable: ClassVar[bool] = False

    #: Whether the framework's current stream is all there is to know of its order: the short way.
    is_usual: ClassVar[bool] = False

    #: Whether it is one array in one piece, whatever the buffer.
    is_single: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        cls.is_single = cls.parts is View.parts and cls.pieces is View.pieces
        cls.is_usual = (
            cls.framework is not None and cls.order is View.order and cls.units is View.units
        )

    def __init__(self, buffer: Any) -> None:  # any framework's buffer
        self.buffer = buffer

    # -- where it is ------------------------------------------------------------------------------

    @staticmethod
    def locate(buffer: Any) -> int:
        """Return the ordinal of a buffer's device without making a view: the short way.

        Raises
        ------
        HostBufferError
            It is in host memory, page-locked memory included.
        DeviceMismatchError
            It has parts on several devices.
        UnsupportedBufferError
            It does not tell.
        """
        raise NotImplementedError

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
        """What the driver knows of the address, in whichever context: extent, kind, device.

        The one question to the driver about the pointer. `None` for address 0, and for what is no
        memory of CUDA's.
        """
        address = self.layout.address
        return _driver.place_of(address) if address else None

    @once
    def place(self) -> Place:
        """The same, of what may be used on a user stream.

        Raises `UnsupportedBufferError` for address 0, and for what is no memory of CUDA's or of
        another than a primary context.
        """
        return checked_place(self.found, self.layout.address or 0, self.buffer)

    @once
    def where(self) -> tuple[int | None, Memory]:
        """Device and kind of memory to describe it by: as `device`, but of pinned memory as well.

        An array without elements may begin where its allocation ends: the driver is not asked.
        """
        if not self.layout.address or self.layout.is_empty:
            return self.device, "device"
        return self.place.device, self.place.kind

    # -- in which order ---------------------------------------------------------------------------

    @once
    def order(self) -> Order:
        """Who may be at work on it: by default its framework's current stream, if it has one."""
        if self.framework is None:
            return UNKNOWN
        try:
            device = self.device
        except HostBufferError:  # pinned memory is described as well
            device = self.place.device
        return Order("current", *self.framework.current_stream(device))

    def export(self, handle: int) -> object:
        """Order the stream of that handle after the producer, and return what keeps the memory.

        For buffers whose `order` is "dlpack": they name no stream. What comes after the consumer is
        then everything on the device.
        """
        raise NotImplementedError

    @property
    def held(self) -> object:
        """What keeps the memory of which `layout` tells; not the view, which keeps more."""
        return self.buffer

    # -- what it is made of -----------------------------------------------------------------------

    @property  # kept, it would be a cycle, and the buffer would wait for the garbage collector
    def units(self) -> Sequence[View]:
        """What is ordered and held by itself: the view, or those of its parts."""
        return (self,)

    @once
    def parts(self) -> Sequence[View] | None:
        """The views of what it is made of; `None` for one array in one piece."""
        return None

    @once
    def pieces(self) -> Sequence[tuple[View, Any]] | None:
        """Of an array in several pieces: the views of these, each with its index in the whole.

        `None` for an array in one piece, and for a list of arrays.
        """
        return None

    # -- what a copy wants to know ----------------------------------------------------------------

    def check_copyable(self) -> None:
        """Raise `UnsupportedBufferError` where a copy would not be what it shows."""

    def check_target(self) -> None:
        """Raise `UnsupportedBufferError` where what is written to `layout` would not be seen."""

    @once
    def is_read_only(self) -> bool:
        """Whether it says that it must not be written; by default nothing does."""
        return False

    @once
    def is_disguised(self) -> bool:
        """Whether its memory is not what it shows, so that its framework has to `pack` it."""
        return False

    def pack(self) -> Any:  # another buffer of that framework
        """Make a contiguous copy on the framework's current stream; its device is current."""
        raise NotImplementedError

    @once
    def host(self) -> tuple[Any, str | None]:
        """Of one on the host: what NumPy reads, and the name of the type if that is another one."""
        return self.buffer, None

    # -- all of it --------------------------------------------------------------------------------

    def info(self) -> BufferInfo:
        """Return what `describe` tells of it, but for the UUID."""
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
