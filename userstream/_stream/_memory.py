"""Copies between raw device memory, and who may access managed memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from userstream import _driver, _numbers
from userstream._stream._addresses import address_and_size
from userstream._stream._values import ValueStream
from userstream.errors import DeviceMismatchError

if TYPE_CHECKING:
    from userstream.typing import Buffer


class MemoryStream(ValueStream):
    """Copies and attachments of a `Stream`."""

    __slots__ = ()

    def memcpy_dtod(self, dst: int | Buffer, src: int | Buffer, nbytes: int | None = None) -> None:
        """Copy bytes between two places in the memory of this stream's device.

        Parameters
        ----------
        dst, src : int, CUdeviceptr or GPU buffer
            To and from where; device memory or managed memory. Buffers must be contiguous.
        nbytes : int, optional
            How many. By default the size of the buffers, which must then agree.

        Raises
        ------
        ValueError
            The sizes do not agree, or none is given; a place is in no memory that CUDA knows, in
            host memory, or ends behind its allocation; the places overlap; a buffer is not
            contiguous.
        DeviceMismatchError
            A place is in the memory of another device.
        TypeError, UnsupportedBufferError, HostBufferError
            An argument is no address and no buffer, or ``nbytes`` is no number.
        CaptureError
            The legacy default stream would break a capture.
        ClosedError, ForkedError, DriverError
            The stream is closed, CUDA may not be used, or the driver refused.

        Notes
        -----
        Raw as the driver's: it is ordered after nothing but the earlier work of this stream, and
        keeps neither buffer alive. Under capture it becomes a node. Thread-safe; does not block.
        Driver call: ``cuMemcpyDtoDAsync``. After baracuda's ``memcpy_dtod``.

        Examples
        --------
        >>> from cuda.core import Device
        >>> from userstream import Stream
        >>> Device(0).set_current()
        >>> stream = Stream.create()
        >>> first, second = (Device(0).allocate(64, stream=stream) for _ in range(2))
        >>> stream.memcpy_dtod(first, second)
        >>> stream.memcpy_dtod(first.handle, second.handle, 16)
        >>> stream.sync(timeout=10)
        """
        self._here(self._copy, dst, src, nbytes)

    def attach_mem_async(
        self, memory: int | Buffer, to: Literal["global", "host", "single"] = "single"
    ) -> None:
        """Attach managed memory, from when the stream gets there.

        Parameters
        ----------
        memory : int, CUdeviceptr or buffer
            The start of an allocation of managed memory; the whole of it is attached.
        to : {"global", "host", "single"}, default "single"
            Who may access it: every stream of every device, only the host, or only this stream.

        Raises
        ------
        ValueError
            ``to`` is none; or it is not the start of an allocation of managed memory; or ``to``
            is ``"single"`` and this is the legacy default stream, which CUDA does not allow.
        TypeError, UnsupportedBufferError
            ``memory`` is no address and no buffer.
        CaptureError
            The stream is being captured, which CUDA does not allow here.
        ClosedError, ForkedError, DriverError
            The stream is closed, CUDA may not be used, or the driver refused.

        Notes
        -----
        Only devices without concurrent managed access take notice. Orders nothing else.
        Thread-safe; does not block. Driver call: ``cuStreamAttachMemAsync``. After baracuda's
        ``attach_mem_async``.

        Examples
        --------
        >>> from cuda.bindings import driver
        >>> from cuda.core import Device
        >>> from userstream import Stream
        >>> Device(0).set_current()
        >>> status, pointer = driver.cuMemAllocManaged(64, 1)
        >>> stream = Stream.create()
        >>> stream.attach_mem_async(pointer)
        >>> stream.sync(timeout=10)
        """
        if to not in ("global", "host", "single"):
            raise ValueError(f'memory is attached to "global", "host" or "single", not {to!r}')
        self._here(self._attach, memory, to)

    def _copy(self, dst: int | Buffer, src: int | Buffer, nbytes: int | None) -> None:
        handle = self._workable()
        (to, to_size), (from_, from_size) = address_and_size(dst), address_and_size(src)
        size = _size_of_copy(to_size, from_size, nbytes)
        if size == 0:
            return
        for role, address in (("dst", to), ("src", from_)):
            self._check_place(role, address, size)
        if abs(to - from_) < size:
            raise ValueError(
                f"dst ({to:#x}) and src ({from_:#x}) overlap in a copy of {size} bytes"
            )
        _driver.copy_on_device(to, from_, size, handle, self)

    def _check_place(self, role: str, address: int, size: int) -> None:
        place = _driver.place_of(address)
        if place is None:
            raise ValueError(f"{role} ({address:#x}) is in no memory that CUDA knows")
        if place.kind == "pinned":
            raise ValueError(
                f"{role} ({address:#x}) is in pinned host memory; memcpy_dtod copies between "
                "device memory"
            )
        if not place.covers(address, size):
            raise ValueError(
                f"{size} bytes at {role} ({address:#x}) end behind the allocation there, of "
                f"{place.size} bytes at {place.start:#x}"
            )
        own = self._device()
        if place.device != own and not place.is_managed:
            raise DeviceMismatchError(
                f"{role} ({address:#x}) is in the memory of device {place.device}, and {self!r} is "
                f"on device {own}; memcpy_dtod copies within one device",
                devices=[own, place.device],
                stream=repr(self),
            )

    def _attach(self, memory: int | Buffer, to: str) -> None:
        handle = self._live()
        _driver.refuse_capturing(handle, self, ", and an attachment cannot be captured")
        if to == "single" and int(handle) == _driver.LEGACY:
            raise ValueError(
                f"memory cannot be attached to {self!r} alone: CUDA does not allow it; pass "
                'to="global", or use another stream'
            )
        address, _size = address_and_size(memory)
        place = _driver.place_of(address)
        if place is None or not place.is_managed:
            raise ValueError(
                f"address {address:#x} is in no managed memory, and cannot be attached"
            )
        if place.start != address:
            raise ValueError(
                f"address {address:#x} is not the start of its allocation, which is at "
                f"{place.start:#x}; managed memory is attached as a whole"
            )
        _driver.attach_memory(address, to, handle, self)


def _size_of_copy(dst: int | None, src: int | None, nbytes: int | None) -> int:
    if nbytes is None:
        if dst is None and src is None:
            raise ValueError("the size of a copy between two addresses is not known: pass nbytes")
        if dst is not None and src is not None and dst != src:
            raise ValueError(
                f"dst has {dst} bytes and src {src}: pass buffers of one size, or nbytes"
            )
        return src if dst is None else dst  # type: ignore[return-value] # one of them is known
    size = _numbers.integer(nbytes, "nbytes")
    for role, there in (("dst", dst), ("src", src)):
        if size < 0 or (there is not None and size > there):
            raise ValueError(f"nbytes={nbytes!r} is negative or more than {role} has ({there})")
    return size
