"""Base class `View` of the facts about one buffer during one call, and the types of these facts."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Generic,
    Literal,
    NamedTuple,
    TypeAlias,
    TypeVar,
    overload,
)

from userstream import _driver
from userstream._buffers.framework import type_name
from userstream.errors import HostBufferError, UnsupportedBufferError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Self

    import numpy as np

    from userstream._buffers.framework import Framework
    from userstream._driver.pointers import Memory, Place

T = TypeVar("T")
Certainty: TypeAlias = Literal["exact", "current", "dlpack", "none", "device"]


class cached(Generic[T]):  # noqa: N801 -- used like `property`
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


class ProducerStream(NamedTuple):
    """The stream of a buffer's producer, and how it is known, as in `BufferInfo.ordering`."""

    ordering: Certainty
    handle: int = 0  # of the producer's stream, or 0 if none is known
    owner: object = None  # object that keeps that stream alive


# The producer is unknown: everything queued on the device so far comes before, and everything
# queued later comes after.
UNKNOWN = ProducerStream("device")
# The same for a buffer that names a default stream: many name one whichever stream wrote the data.
# Messages distinguish `DOUBTED` from `UNKNOWN` by `is`.
DOUBTED = ProducerStream("device")


class Layout(NamedTuple):
    """Address, shape, strides and type of a buffer's elements. An unknown fact is `None`."""

    address: int | None  # of the first element; None for a buffer of several parts
    shape: tuple[int, ...] | None = None
    strides: tuple[int, ...] | None = None  # in bytes
    dtype: np.dtype | str | None = None  # the name of a type that NumPy lacks
    nbytes: int | None = None  # of the elements, without gaps between them

    @property
    def is_empty(self) -> bool:
        """True if the buffer is known to have no elements."""
        return self.nbytes == 0 or (self.shape is not None and 0 in self.shape)


class Form:
    """Layout of an array's elements relative to the first one.

    Arrays with the same layout share one object, which serves as the key of caches.
    """

    __slots__ = ("dtype", "shape", "strides")

    def __init__(
        self,
        shape: tuple[int, ...],
        strides: tuple[int, ...],  # in bytes
        dtype: np.dtype | str,  # the name of a type that NumPy lacks
    ) -> None:
        self.shape = shape
        self.strides = strides
        self.dtype = dtype


form: Callable[[tuple[int, ...], tuple[int, ...], np.dtype], Form]
form = functools.lru_cache(maxsize=256)(Form)


def total(parts: Iterable[View]) -> Layout:
    """Return the layout of several arrays, of which only the total size is known."""
    return Layout(None, nbytes=sum(part.layout.nbytes or 0 for part in parts))


@functools.lru_cache(maxsize=256)
def contiguous_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Return the strides in bytes of an array in C order."""
    if 0 in shape:
        return (0,) * len(shape)  # the same as NumPy and CuPy
    sizes = accumulate(shape[:0:-1], int.__mul__, initial=itemsize)
    return tuple(sizes)[::-1] if shape else ()


def used_strides(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Return the strides of the axes with more than one element: no other stride has an effect."""
    return [step for count, step in zip(shape, strides, strict=True) if count > 1]


# -- errors and the memory at an address ----------------------------------------------------------


def host_error(obj: object, where: str = "host memory") -> HostBufferError:
    """Return the error for a buffer that has no device."""
    return HostBufferError(
        f"this {type_name(obj)} is in {where}, which belongs to no device; pass a GPU buffer "
        "(get_stream and the waits also take the device itself)"
    )


def place_of(address: int, obj: object) -> Place:
    """Query the driver for the memory at an address of `obj`; raise for unsupported memory.

    Unsupported are address 0, unknown memory, and memory of a context that is not a primary one.
    """
    return checked_place(_driver.pointers.place_of(address) if address else None, address, obj)


def checked_place(place: Place | None, address: int, obj: object) -> Place:
    """Return a place that the driver reported; raise for the same errors as `place_of`."""
    if address == 0:
        raise UnsupportedBufferError(
            f"this {type_name(obj)} has address 0 (it is empty, or was freed), which does not "
            "determine its device (get_stream and the waits also take the device itself)"
        )
    if place is None:
        raise UnsupportedBufferError(
            f"address {address:#x} of this {type_name(obj)} is not in memory that the CUDA driver "
            "knows"
        )
    if place.kind != "pinned" and not place.is_in_primary_context():
        raise UnsupportedBufferError(
            f"address {address:#x} of this {type_name(obj)} was allocated in a CUDA context that "
            "is not the primary one of its device, where the user streams are"
        )
    return place


def device_at(place: Place, obj: object) -> int:
    """Return the device of the memory of `obj`; raise `HostBufferError` for pinned host memory."""
    if place.kind == "pinned":
        raise host_error(obj, "pinned host memory")
    return place.device


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferInfo:
    """The description of a buffer, as returned by `describe`. Unknown facts are `None`.

    Attributes
    ----------
    device_id : int or None
        Ordinal of the device that owns the memory; `None` for parts on several devices.
    device_uuid : str or None
        UUID of that device, as shown by ``nvidia-smi -L``; the same in every process.
    address : int or None
        Address of the first element; 0 for most empty arrays.
    nbytes : int or None
        Size of the elements in bytes, without the gaps between them.
    shape : tuple of int, or None
        Shape in elements.
    strides : tuple of int, or None
        Strides in bytes, as in NumPy.
    dtype : numpy.dtype, str or None
        The name, such as "bfloat16", if NumPy has no such type.
    memory : {"device", "managed", "pinned"} or None
        Kind of memory, as reported by the driver.
    producer : int or None
        Handle of the stream on which work for the buffer may be pending, as in
        ``__cuda_stream__``: 1 and 2 are the legacy and the per-thread default stream.
    ordering : {"exact", "current", "dlpack", "none", "device"}
        How the producer is known. *exact*: the object names its stream. *current*: the current
        stream of its framework stands in, which is not necessarily the one that wrote the buffer.
        *dlpack*: the object names no stream, but its type is known to order a consumer's stream
        itself, in ``__dlpack__(stream=)``. *none*: nothing is pending. *device*: the producer is
        not known, so the buffer is ordered with everything on the device.
    source : str
        The kind of buffer, such as ``"torch.Tensor"`` or ``"__cuda_array_interface__"``.
    parts : tuple of BufferInfo
        The parts of a buffer that consists of several, such as a sharded array.

    Examples
    --------
    >>> import userstream as us
    >>> from cuda.core import Device
    >>> Device(0).set_current()
    >>> info = us.describe(Device(0).allocate(1024, stream=us.get_stream(0)))
    >>> info.device_id, info.nbytes, info.memory
    (0, 1024, 'device')
    """

    __module__ = "userstream"

    device_id: int | None
    source: str
    ordering: Certainty
    address: int | None = None
    nbytes: int | None = None
    shape: tuple[int, ...] | None = None
    strides: tuple[int, ...] | None = None
    dtype: np.dtype | str | None = None
    memory: Memory | None = None
    producer: int | None = None
    parts: tuple[BufferInfo, ...] = ()
    device_uuid: str | None = None

    def __repr__(self) -> str:
        values = ((each, getattr(self, each.name)) for each in fields(self))
        # By identity: a dtype of float64 is equal to None.
        known = [(each.name, it) for each, it in values if it is not each.default]
        return f"BufferInfo({', '.join(f'{name}={_shown(name, it)}' for name, it in known)})"


def _shown(name: str, it: object) -> str:
    # Hexadecimal, like the repr of streams and the reports of races.
    return hex(it) if isinstance(it, int) and name in ("address", "producer") else repr(it)


class View:
    """Facts about one buffer, each computed on first use and then cached.

    Each kind of buffer has a subclass, in one module per framework or protocol. A public function
    creates one view of each of its buffers (`_buffers.view_of`) and passes the view on. So within
    one call `__cuda_array_interface__` is read once, the driver is queried for the pointer once,
    and all parts of the call use the same facts. A view belongs to one call in one thread: do not
    keep a view, because buffers change.

    A subclass must define `source`, `layout`, and `locate` or `device`; everything else has a
    default. An attribute that is `cached` here must be `cached` in a subclass.
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
    producer_framework: ClassVar[Framework | None] = None

    #: True if `producer_of` may return a result. Not inherited: a subclass may be more precise.
    names_producer: ClassVar[bool] = False

    #: True if no buffer of this kind names a producer.
    is_anonymous: ClassVar[bool] = False

    #: True if `quick_layout` may return a result. Not inherited either.
    has_quick_layout: ClassVar[bool] = False

    #: True if every buffer of this kind is one array in one piece.
    is_single: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        cls.is_single = cls.parts is View.parts and cls.pieces is View.pieces
        is_usual = cls.is_single and cls.producer is View.producer and cls.units is View.units
        cls.producer_framework = cls.framework if is_usual else None
        cls.is_anonymous = is_usual and cls.framework is None
        cls.names_producer = cls.is_single and "producer_of" in vars(cls)
        cls.has_quick_layout = cls.producer_framework is not None and "quick_layout" in vars(cls)

    def __init__(self, buffer: Any) -> None:  # any framework's buffer
        self.buffer = buffer

    # -- the location -----------------------------------------------------------------------------

    @classmethod
    def locate(cls, buffer: Any) -> int:
        """Return the ordinal of a buffer's device; subclasses avoid the view where they can.

        Raises
        ------
        HostBufferError
            The buffer is in host memory, page-locked memory included.
        DeviceMismatchError
            The buffer has parts on several devices.
        UnsupportedBufferError
            The device of the buffer cannot be determined.
        """
        return cls(buffer).device

    @staticmethod
    def producer_of(buffer: Any) -> tuple[int, int, object] | None:  # noqa: ARG004
        """Return a buffer's device, its producer's stream, and what keeps that stream alive.

        Called only for kinds with `names_producer`. `None` outside the common case: the general
        path then makes a view.
        """
        return None

    @staticmethod
    def quick_layout(buffer: Any) -> tuple[int, int, Form] | None:  # noqa: ARG004
        """Return device, address and form of an array, without making a view.

        Called only for kinds with `has_quick_layout`. `None` if the array has no memory, or its
        memory differs from its elements: the general path then makes a view.
        """
        return None

    @cached
    def device(self) -> int:
        """The ordinal of the buffer's device. Raises the errors of `locate`."""
        return self.locate(self.buffer)

    @cached
    def layout(self) -> Layout:
        """Address, shape, strides, type and size, where known."""
        raise NotImplementedError

    @cached
    def unchecked_place(self) -> Place | None:
        """The driver's information about the address: extent, kind and device, in any context.

        This is the only driver query for the pointer. `None` for address 0 and for memory that the
        driver does not know.
        """
        address = self.layout.address
        return _driver.pointers.place_of(address) if address else None

    @cached
    def place(self) -> Place:
        """The result of `unchecked_place`, checked for use on a user stream.

        Raises `UnsupportedBufferError` for address 0, for memory that the driver does not know, and
        for memory of a context that is not a primary one.
        """
        return checked_place(self.unchecked_place, self.layout.address or 0, self.buffer)

    @cached
    def device_and_memory(self) -> tuple[int | None, Memory]:
        """Device and kind of memory for `describe`, including pinned memory.

        The driver is not queried for an empty array, which may begin at the end of its allocation.
        """
        if not self.layout.address or self.layout.is_empty:
            return self.device, "device"
        return self.place.device, self.place.kind

    # -- the producer -----------------------------------------------------------------------------

    @cached
    def producer(self) -> ProducerStream:
        """The producer's stream: the framework's current stream, or unknown without a framework."""
        if self.framework is None:
            return UNKNOWN
        try:
            device = self.device
        except HostBufferError:  # `describe` also covers pinned memory
            device = self.place.device
        return ProducerStream("current", *self.framework.current_stream(device))

    def check_context(self) -> None:
        """Raise `UnsupportedBufferError` if the memory is not in a primary context.

        Edges with a device do not cover the work of other contexts. Needed for kinds whose `device`
        does not query the driver. Never makes an export only for this check.
        """

    def export(self, handle: int) -> object:
        """Order a stream after the producer; return an object that keeps the memory alive.

        Called for buffers with the ordering "dlpack", which name no stream. Everything queued on
        the device later is then ordered after the consumer.
        """
        raise NotImplementedError

    @property
    def memory_owner(self) -> object:
        """The object that keeps the memory of `layout` alive."""
        return self.buffer

    # -- parts and pieces --------------------------------------------------------------------------

    @property  # not `cached`: a view that refers to itself is freed only by the garbage collector
    def units(self) -> Sequence[View]:
        """The views to order and hold separately: the view itself, or the views of its parts."""
        return (self,)

    @cached
    def parts(self) -> Sequence[View] | None:
        """The views of the buffer's parts; `None` for one array in one piece."""
        return None

    @cached
    def pieces(self) -> Sequence[tuple[View, Any]] | None:
        """The views of the pieces of one array, each with its index in the whole.

        `None` for an array in one piece, and for a list of arrays.
        """
        return None

    # -- properties for copies ---------------------------------------------------------------------

    def check_copyable(self) -> None:
        """Raise `UnsupportedBufferError` if copying the memory would not copy the elements."""

    def check_target(self) -> None:
        """Raise `UnsupportedBufferError` if data written to `layout` would be lost."""

    @cached
    def is_read_only(self) -> bool:
        """True if the buffer declares itself read-only."""
        return False

    @cached
    def is_disguised(self) -> bool:
        """True if the memory differs from the elements: the framework must `pack` the buffer."""
        return False

    def pack(self) -> Any:  # another buffer of that framework
        """Make a contiguous copy on the framework's current stream; its device is current."""
        raise NotImplementedError

    @cached
    def host(self) -> tuple[Any, str | None]:
        """A NumPy-readable form of a host buffer, and the name of its dtype if that differs."""
        return self.buffer, None

    # -- description-------------------------------------------------------------------------------

    def info(self) -> BufferInfo:
        """Return the result of `describe`, without the UUID."""
        where, memory = self.device_and_memory
        layout, producer = self.layout, self.producer
        return BufferInfo(
            source=self.source,
            device_id=where,
            memory=memory,
            address=layout.address,
            nbytes=layout.nbytes,
            shape=layout.shape,
            strides=layout.strides,
            dtype=layout.dtype,
            producer=producer.handle or None,
            ordering=producer.ordering,
            parts=tuple(part.info() for part in self.parts or ()),
        )


class SeveralView(View):
    """Base class of the views of several arrays, each of which names its stream, such as a batch.

    A subclass must define `source`, `locate` and `parts`.
    """

    @cached
    def layout(self) -> Layout:
        """The total size of the parts."""
        return total(self.parts or ())

    @property
    def units(self) -> Sequence[View]:
        """The views of the parts."""
        return self.parts or (self,)

    @cached
    def producer(self) -> ProducerStream:
        """The stream of the parts, if all name the same stream."""
        producers = {part.producer for part in self.parts or ()}
        return producers.pop() if len(producers) == 1 else UNKNOWN
