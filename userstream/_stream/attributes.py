"""Reading, setting and copying the attributes of a stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from cuda.bindings import driver

from userstream import _arguments, _driver
from userstream._stream import factory
from userstream._stream.memory_operations import address_and_size
from userstream.errors import DeviceMismatchError, NotSupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from userstream._engine.lane import Lane
    from userstream.typing import Buffer, StreamLike


@dataclass(frozen=True, slots=True)
class AccessPolicyWindow:
    """A range of memory with its own L2 cache policy, for `Stream.set_attribute`.

    Parameters
    ----------
    address : int, CUdeviceptr or GPU buffer
        The start of the range.
    nbytes : int
        The length of the range; 0 means no window.
    hit_ratio : float, default 1.0
        The fraction of the accesses, from 0 to 1, to which *hit* applies.
    hit : {"persisting", "streaming", "normal"}, default "persisting"
        The cache policy of these accesses.
    miss : {"streaming", "normal"}, default "streaming"
        The cache policy of the other accesses.

    Raises
    ------
    TypeError, ValueError
        *nbytes*, *hit_ratio*, *hit* or *miss* is not one of these. *address* is checked by
        `Stream.set_attribute`.

    Examples
    --------
    >>> import userstream as us
    >>> from cuda.core import Device
    >>> Device(0).set_current()
    >>> stream = us.Stream.create(0)
    >>> table = Device(0).allocate(1024, stream=stream)
    >>> window = us.AccessPolicyWindow(table, 1024, hit_ratio=0.5)
    >>> stream.set_attribute("access_policy_window", window)
    """

    __module__ = "userstream"

    address: int | Buffer
    nbytes: int
    hit_ratio: float = 1.0
    hit: Literal["persisting", "streaming", "normal"] = "persisting"
    miss: Literal["streaming", "normal"] = "streaming"

    def __post_init__(self) -> None:
        if _arguments.integer(self.nbytes, "nbytes") < 0:
            raise ValueError(f"nbytes must be at least 0, not {self.nbytes}")
        if not 0 <= _arguments.real(self.hit_ratio, "hit_ratio") <= 1:
            raise ValueError(f"hit_ratio must be from 0 to 1, not {self.hit_ratio!r}")
        if self.hit not in ("persisting", "streaming", "normal"):
            raise ValueError(f'hit must be "persisting", "streaming" or "normal", not {self.hit!r}')
        if self.miss not in ("streaming", "normal"):
            raise ValueError(f'miss must be "streaming" or "normal", not {self.miss!r}')


_NOT_NOW = "; its attributes can be read and set after the capture"


def get(lane: Lane, name: _driver.streams.Attribute) -> Any:
    """Return an attribute of a stream; the lane's context is current."""
    _check_name(name)
    value = _driver.streams.get_attribute(lane.usable(_NOT_NOW), name, lane)
    return AccessPolicyWindow(*value) if name == "access_policy_window" else value


def assign(lane: Lane, name: _driver.streams.Attribute, value: Any) -> None:
    """Set an attribute of a stream; the lane's context is current."""
    _check_name(name)
    handle = lane.usable(_NOT_NOW)
    _driver.streams.set_attribute(handle, name, _checked(lane, name, value), lane)


def copy(lane: Lane, other: StreamLike, address_of: Callable[[Any], int]) -> None:
    """Copy the attributes of another stream, whose address `address_of` returns.

    The lane's context is current.
    """
    handle = lane.usable(_NOT_NOW)
    if factory.protocol_of(other) is None and not isinstance(other, driver.CUstream):
        raise TypeError(
            f"attributes are copied from a stream (an object with __cuda_stream__), not from "
            f"{type(other).__name__}"
        )
    source = driver.CUstream(address_of(other))
    _driver.streams.refuse_capturing(source, other, _NOT_NOW)
    here = lane.within(_driver.streams.stream_context, handle)
    there = _driver.streams.stream_context(source)
    if int(here) != int(there):
        own, device = lane.device, _driver.contexts.within(there, _driver.contexts.current_device)
        if own == device:
            raise ValueError(f"{other!r} belongs to another context than {lane!r}")
        raise DeviceMismatchError(
            f"{other!r} is on device {device} and {lane!r} on device {own}; attributes are "
            "copied within one device",
            devices=(own, device),
            stream=repr(lane),
        )
    _driver.streams.copy_attributes(handle, source, lane)


def _checked(lane: Lane, name: _driver.streams.Attribute, value: Any) -> Any:
    """Return a value in the form that the driver expects; raise if the value is invalid."""
    device = lane.device
    if name == "access_policy_window":
        return _window(value, device)
    if name == "priority":
        return _priority(value, lane.context)
    if name == "mem_sync_domain_map":
        return _domain_map(value, device)
    attributes = _driver.streams
    names = attributes.DOMAINS if name == "mem_sync_domain" else attributes.SYNC_POLICIES
    if not isinstance(value, str) or value not in names:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, names))}, not {value!r}")
    return value


def _check_name(name: object) -> None:
    if not isinstance(name, str) or name not in _driver.streams.ATTRIBUTES:
        known = ", ".join(map(repr, _driver.streams.ATTRIBUTES))
        raise ValueError(f"a stream has the attributes {known}, not {name!r}")


def _window(value: object, device: int) -> _driver.streams.Window:
    if not isinstance(value, AccessPolicyWindow):
        raise TypeError(
            f"access_policy_window must be an AccessPolicyWindow, not {type(value).__name__}"
        )
    largest = _driver.streams.largest_window(device)
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
    if value.nbytes and _driver.pointers.place_of(address) is None:
        raise ValueError(f"a window at {address:#x} is not in memory that CUDA knows")
    return address, value.nbytes, value.hit_ratio, value.hit, value.miss


def _priority(value: Any, context: driver.CUcontext) -> int:
    wanted = _arguments.integer(value, "priority")
    least, greatest = _driver.contexts.priority_range(context)
    if not greatest <= wanted <= least:
        raise ValueError(f"a priority must be a number from {greatest} to {least}, not {value!r}")
    return wanted


def _domain_map(value: Any, device: int) -> tuple[int, int]:
    count = max(_driver.streams.domain_count(device), 1)
    if not isinstance(value, tuple) or len(value) != 2:
        raise TypeError(f"mem_sync_domain_map must be a tuple of two numbers, not {value!r}")
    default, remote = (
        _arguments.integer(each, "a number of mem_sync_domain_map") for each in value
    )
    if not (0 <= default < count and 0 <= remote < count):
        raise ValueError(
            f"device {device} has {count} memory-synchronization domains, numbered from 0: "
            f"mem_sync_domain_map cannot be {value!r}"
        )
    return default, remote
