"""How streams come into being: created here, or wrapped if somebody else made them.

`cuda.core.Stream` has no public constructor for a subclass. Its private ``_init`` is called here
and nowhere else.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, TypeVar

import cuda.core
import numpy as np
from cuda.bindings import driver
from cuda.core import Context, Device, StreamOptions

from userstream import _driver, _events, _process
from userstream._buffers import type_name
from userstream._stream import _base
from userstream._stream._base import BaseStream
from userstream.errors import ClosedError

if TYPE_CHECKING:
    from userstream.typing import StreamLike

S = TypeVar("S", bound=BaseStream)

_core_contexts: dict[int, Context] = {}


class _Foreign:
    """What `cuda.core.Stream._init` takes for a stream that somebody else made."""

    __slots__ = ("handle", "owner")

    def __init__(self, handle: int, owner: object) -> None:
        self.handle = handle
        self.owner = owner

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.handle)


def create(
    kind: type[S], device: int, *, name: str | None = None, nonblocking: bool, priority: int
) -> S:
    """Create a stream in the primary context of a device; what is current stays so."""
    context = _driver.primary_context(device)
    # cuda.core makes a stream in the current context, whichever device it is told.
    options = StreamOptions(nonblocking=nonblocking, priority=clamp_priority(device, priority))
    stream: S = _driver.within(context, _create_here, kind, device, options)
    complete(stream, device, context, name=name, owned=True)
    stream._id = _driver.stream_id(stream._live(), stream)
    return stream


def _create_here(kind: type[S], device: int, options: StreamOptions) -> S:
    with _driver.core_errors("cuStreamCreateWithPriority"):
        stream: S = kind._init(options=options, device_id=device, ctx=_core_context(device))
    return stream


def _core_context(device: int) -> Context:
    """Return cuda.core's view of a primary context, which has to be current the first time."""
    try:
        return _core_contexts[device]
    except KeyError:
        core_device = Device(device)
        core_device.set_current()
        context = _core_contexts.setdefault(device, core_device.context)
    # With some versions of cuda-bindings, releasing the last one crashes during exit.
    _process.keep_for_ever(context)
    return context


def adopt(kind: type[S], address: int, owner: object) -> S:
    """Wrap a stream that somebody else made, and keep its owner alive."""
    context = _driver.stream_context(driver.CUstream(address))
    device = _driver.device_of_primary(int(context))
    if device is None:
        device = _driver.within(context, _driver.current_device)
        _driver.primary_context_if_active(device)  # so that this one is known, if it is that
    return wrap(kind, address, owner, device, context)


def wrap(kind: type[S], address: int, owner: object, device: int, context: driver.CUcontext) -> S:
    """Wrap a stream of which it is known where it is; calls no driver."""
    stream: S = kind._init(_Foreign(address, owner))
    complete(stream, device, context, owned=False)
    return stream


def complete(
    stream: BaseStream,
    device: int,
    context: driver.CUcontext | None,
    *,
    name: str | None = None,
    owned: bool,
) -> None:
    """Do what ``__init__`` would: cuda.core's ``_init`` runs none."""
    stream._handle = cuda.core.Stream.handle.__get__(stream)
    stream._context = context
    stream._device_id = device
    stream._id = None
    stream._name = name
    stream._on_close = None
    stream._owned = owned
    stream._anywhere = int(stream._handle) not in (_driver.LEGACY, _driver.PER_THREAD)
    stream._closes_in_with = False
    stream._held = None
    if context is not None:
        stream._pool = _events.pool_of(context)
    _process.leak_at_end(stream)
    if owned:
        _base.note_ours(stream)


def clamp_priority(device: int, priority: int) -> int:
    """Return the priority nearest to the wanted one that the device has."""
    least, greatest = _driver.priority_range(_driver.primary_context(device))
    return max(greatest, min(priority, least))


def address_of(handle: int | driver.CUstream | StreamLike) -> int:
    """Return the address of a stream; 1 and 2 are the default streams."""
    if isinstance(handle, (bool, np.bool_)):
        raise TypeError(f"a stream handle is an address, not {handle!r}")
    if isinstance(handle, (int, np.integer, driver.CUstream)):
        address = int(handle)
    elif hasattr(handle, "__cuda_stream__"):
        if isinstance(handle, cuda.core.Stream) and handle.is_closed:
            raise ClosedError(f"this {type_name(handle)} is closed; pass an open stream")
        try:
            version, address = map(operator.index, handle.__cuda_stream__())
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"__cuda_stream__ of this {type_name(handle)} gives no version and address: {error}"
            ) from error
        if version != 0:
            raise TypeError(f"{handle!r} speaks version {version} of __cuda_stream__, not 0")
        if address == 0:  # legal there, and CUDA's NULL stream
            address = _driver.LEGACY
    else:
        raise TypeError(
            "a stream is an address, a CUstream or an object with __cuda_stream__, not "
            f"{type(handle).__name__}"
        )
    if not 0 < address < 1 << 64:
        raise ValueError(
            f"{handle!r} is no handle of a stream; for the default streams pass "
            "Stream.legacy_default() or Stream.per_thread_default()"
        )
    return address
