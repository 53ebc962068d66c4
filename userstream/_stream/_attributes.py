"""The attributes of a stream, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from cuda.bindings import driver

from userstream import _driver, _numbers
from userstream._stream._access_policy import AccessPolicyWindow
from userstream._stream._addresses import address_and_size
from userstream._stream._base import BaseStream
from userstream._stream._making import address_of
from userstream._stream._memory import MemoryStream
from userstream.errors import DeviceMismatchError, NotSupportedError

if TYPE_CHECKING:
    from typing import TypeAlias

    from userstream.typing import StreamLike

    _SyncPolicy: TypeAlias = Literal["auto", "spin", "yield", "blocking"]
    _Domain: TypeAlias = Literal["default", "remote"]

_NOT_NOW = "; its attributes can be asked and set after the capture"


class ConfiguredStream(MemoryStream):
    """Attributes of a `Stream`."""

    __slots__ = ()

    @overload
    def get_attribute(self, name: Literal["access_policy_window"]) -> AccessPolicyWindow: ...
    @overload
    def get_attribute(self, name: Literal["mem_sync_domain"]) -> _Domain: ...
    @overload
    def get_attribute(self, name: Literal["mem_sync_domain_map"]) -> tuple[int, int]: ...
    @overload
    def get_attribute(self, name: Literal["priority"]) -> int: ...
    @overload
    def get_attribute(self, name: Literal["sync_policy"]) -> _SyncPolicy | None: ...

    def get_attribute(self, name: _driver.Attribute) -> Any:
        """Return an attribute of this stream.

        Parameters
        ----------
        name : str
            ``"access_policy_window"``, ``"mem_sync_domain"``, ``"mem_sync_domain_map"``,
            ``"priority"`` or ``"sync_policy"``; see `set_attribute`.

        Returns
        -------
        AccessPolicyWindow, str, tuple of int, int or None
            As `set_attribute` takes it. But the synchronization policy of a new stream has no name:
            `None`, which cannot be set.

        Raises
        ------
        ValueError
            There is no such attribute.
        CaptureError
            The stream is being captured, or is the legacy default stream beside a capture.
        ClosedError, ForkedError, DriverError
            The stream is closed, CUDA may not be used, or the driver refused.

        Notes
        -----
        Thread-safe; does not block. Driver call: ``cuStreamGetAttribute``. After baracuda's
        ``get_attribute``.

        Examples
        --------
        >>> from userstream import Stream
        >>> Stream.create(0).get_attribute("mem_sync_domain")
        'default'
        """
        _check_name(name)
        value = self._here(self._get_attribute, name)
        return AccessPolicyWindow(*value) if name == "access_policy_window" else value

    @overload
    def set_attribute(
        self, name: Literal["access_policy_window"], value: AccessPolicyWindow
    ) -> None: ...
    @overload
    def set_attribute(self, name: Literal["mem_sync_domain"], value: _Domain) -> None: ...
    @overload
    def set_attribute(
        self, name: Literal["mem_sync_domain_map"], value: tuple[int, int]
    ) -> None: ...
    @overload
    def set_attribute(self, name: Literal["priority"], value: int) -> None: ...
    @overload
    def set_attribute(self, name: Literal["sync_policy"], value: _SyncPolicy) -> None: ...

    def set_attribute(self, name: _driver.Attribute, value: Any) -> None:
        """Set an attribute of this stream, for the work that is queued from now on.

        Parameters
        ----------
        name : str
            Which attribute.
        value : AccessPolicyWindow, str, tuple of int or int
            Of ``"access_policy_window"`` an `AccessPolicyWindow`. Of ``"sync_policy"``, how the
            driver's own waits wait: ``"auto"``, ``"spin"``, ``"yield"`` or ``"blocking"``. Of
            ``"mem_sync_domain"``, ``"default"`` or ``"remote"``, and of
            ``"mem_sync_domain_map"`` the numbers of the device's domains that these two stand
            for. Of ``"priority"`` a number that `priority_range` allows; drivers may refuse to
            change it.

        Raises
        ------
        ValueError, TypeError
            There is no such attribute, or ``value`` is none for it; a window begins in no memory
            that CUDA knows, or is larger than its buffer.
        NotSupportedError
            The device has no access-policy windows.
        CaptureError
            The stream is being captured, or is the legacy default stream beside a capture.
        ClosedError, ForkedError, DriverError
            The stream is closed, CUDA may not be used, or the driver refused.

        Notes
        -----
        A user stream is shared: so are its attributes. `sync` and `wait` take no notice of the
        synchronization policy, as they never wait inside the driver. Thread-safe; does not block.
        Driver call: ``cuStreamSetAttribute``. After baracuda's ``set_attribute``.

        Examples
        --------
        >>> from userstream import Stream
        >>> stream = Stream.create(0)
        >>> stream.set_attribute("sync_policy", "blocking")
        >>> stream.get_attribute("sync_policy")
        'blocking'
        """
        _check_name(name)
        self._here(self._set_attribute, name, value)

    def copy_attributes_from(self, other: StreamLike) -> None:
        """Give this stream the attributes of another one.

        Parameters
        ----------
        other : stream
            Anything with ``__cuda_stream__``, of the same context as this stream.

        Raises
        ------
        DeviceMismatchError
            The other stream is of another device.
        ValueError
            The other stream is of another context of the device.
        TypeError
            ``other`` is no stream.
        CaptureError
            One of them is being captured, or is the legacy default stream beside a capture.
        ClosedError, ForkedError, DriverError
            One of them is closed, CUDA may not be used, or the driver refused.

        Notes
        -----
        A default stream as ``other`` stands for the one of this stream's context. Thread-safe;
        does not block. Driver call: ``cuStreamCopyAttributes``. After baracuda's
        ``copy_attributes_from``.

        Examples
        --------
        >>> from userstream import Stream
        >>> first, second = Stream.create(0), Stream.create(0)
        >>> first.set_attribute("sync_policy", "spin")
        >>> second.copy_attributes_from(first)
        >>> second.get_attribute("sync_policy")
        'spin'
        """
        self._here(self._copy_attributes, other)

    def _get_attribute(self, name: _driver.Attribute) -> Any:
        return _driver.get_attribute(self._configurable(), name, self)

    def _set_attribute(self, name: _driver.Attribute, value: Any) -> None:
        handle = self._configurable()
        _driver.set_attribute(handle, name, self._checked(name, value), self)

    def _copy_attributes(self, other: StreamLike) -> None:
        handle = self._configurable()
        if not (hasattr(other, "__cuda_stream__") or isinstance(other, driver.CUstream)):
            raise TypeError(
                f"attributes are copied from a stream (an object with __cuda_stream__), not from "
                f"{type(other).__name__}"
            )
        # The address of one of ours counts as given away.
        if isinstance(other, BaseStream):
            source = other._live()
        else:
            source = driver.CUstream(address_of(other))
        _driver.refuse_capturing(source, other, _NOT_NOW)
        here, there = self._where(), _driver.stream_context(source)
        if int(here) != int(there):
            own, device = self._device(), _driver.within(there, _driver.current_device)
            if own == device:
                raise ValueError(f"{other!r} is of another context than {self!r}")
            raise DeviceMismatchError(
                f"{other!r} is on device {device} and {self!r} on device {own}; attributes are "
                "copied within one device",
                devices=(own, device),
                stream=repr(self),
            )
        _driver.copy_attributes(handle, source, self)

    def _configurable(self) -> driver.CUstream:
        """Return the handle, if asking for attributes or setting them breaks no capture."""
        handle = self._live()
        _driver.refuse_capturing(handle, self, _NOT_NOW)
        return handle

    def _checked(self, name: _driver.Attribute, value: Any) -> Any:
        """Return the value as the driver is to have it, or refuse it."""
        device = self._device()
        if name == "access_policy_window":
            return _window(value, device)
        if name == "priority":
            return _priority(value, self._where())
        if name == "mem_sync_domain_map":
            return _domain_map(value, device)
        names = _driver.DOMAINS if name == "mem_sync_domain" else _driver.SYNC_POLICIES
        if not isinstance(value, str) or value not in names:
            raise ValueError(f"{name} is one of {', '.join(map(repr, names))}, not {value!r}")
        return value


def _check_name(name: object) -> None:
    if not isinstance(name, str) or name not in _driver.ATTRIBUTES:
        raise ValueError(
            f"a stream has the attributes {', '.join(map(repr, _driver.ATTRIBUTES))}, not {name!r}"
        )


def _window(value: object, device: int) -> _driver.Window:
    if not isinstance(value, AccessPolicyWindow):
        raise TypeError(
            f"access_policy_window is an AccessPolicyWindow, not {type(value).__name__}"
        )
    largest = _driver.largest_window(device)
    if value.nbytes > largest:
        if largest == 0:
            raise NotSupportedError(f"device {device} has no access-policy windows", device=device)
        raise ValueError(
            f"device {device} has access-policy windows of up to {largest} bytes, not "
            f"{value.nbytes}"
        )
    address, size = address_and_size(value.address)
    if size is not None and value.nbytes > size:
        raise ValueError(f"a window of {value.nbytes} bytes is larger than its buffer of {size}")
    if value.nbytes and _driver.place_of(address) is None:
        raise ValueError(f"a window at {address:#x} is in no memory that CUDA knows")
    return _driver.Window(address, value.nbytes, value.hit_ratio, value.hit, value.miss)


def _priority(value: Any, context: driver.CUcontext) -> int:
    wanted = _numbers.integer(value, "priority")
    least, greatest = _driver.priority_range(context)
    if not greatest <= wanted <= least:
        raise ValueError(f"a priority is a number from {greatest} to {least}, not {value!r}")
    return wanted


def _domain_map(value: Any, device: int) -> tuple[int, int]:
    count = max(_driver.domain_count(device), 1)
    if not isinstance(value, tuple) or len(value) != 2:
        raise TypeError(f"mem_sync_domain_map is a tuple of two numbers, not {value!r}")
    default, remote = (_numbers.integer(each, "a number of mem_sync_domain_map") for each in value)
    if not (0 <= default < count and 0 <= remote < count):
        raise ValueError(
            f"device {device} has {count} memory-synchronization domains, numbered from 0: "
            f"mem_sync_domain_map cannot be {value!r}"
        )
    return default, remote
