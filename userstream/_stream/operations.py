"""Memory operations of a stream: values, checked when they are created."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from userstream import _driver, _numbers

if TYPE_CHECKING:
    from userstream.typing import Buffer


class WaitFlags(enum.IntEnum):
    """How `Stream.wait_value_32` compares the value in memory (*m*) with the given value (*v*).

    A comparison can be combined with ``FLUSH``, as in ``WaitFlags.EQ | WaitFlags.FLUSH``, but not
    with another comparison: ``EQ | AND`` is ``NOR``. The values are the driver's
    ``CUstreamWaitValue_flags``.

    Attributes
    ----------
    GEQ
        Until ``m - v >= 0``, as a signed number of that width, so that counters may wrap around.
    EQ
        Until ``m == v``.
    AND
        Until ``m & v != 0``.
    NOR
        Until ``~(m | v) != 0``. Not supported by every device.
    FLUSH
        Make other devices' writes that precede the value visible after the wait. Not supported by
        every device.

    Examples
    --------
    >>> import userstream as us
    >>> from cuda.core import Device
    >>> Device(0).set_current()
    >>> stream = us.get_stream(0)
    >>> word = Device(0).allocate(4, stream=stream)
    >>> stream.write_value_32(word, 3)
    >>> stream.wait_value_32(word, 3, us.WaitFlags.EQ)
    >>> stream.sync(timeout=10)
    """

    __module__ = "userstream"

    GEQ = 0
    EQ = 1
    AND = 2
    NOR = 3
    FLUSH = 1 << 30


class MemoryOperation:
    """An operation of a batch."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class WriteValue(MemoryOperation):
    """A write of `Stream.batch_mem_op`.

    Parameters
    ----------
    address : int, CUdeviceptr or GPU buffer
        The destination, as for `Stream.write_value_32`.
    value : int
        The value to write; an unsigned number of that many bits.
    bits : {32, 64}, default 32
        The width of the value.

    Raises
    ------
    TypeError, ValueError
        *value* is not an unsigned number of *bits* bits, or *bits* is neither 32 nor 64.

    Examples
    --------
    >>> import userstream as us
    >>> from cuda.core import Device
    >>> Device(0).set_current()
    >>> stream = us.get_stream(0)
    >>> word = Device(0).allocate(4, stream=stream)
    >>> stream.batch_mem_op([us.WriteValue(word, 1)])
    """

    __module__ = "userstream"

    address: int | Buffer
    value: int
    bits: _driver.values.Bits = 32

    def __post_init__(self) -> None:
        _check_value(self.value, self.bits)


@dataclass(frozen=True, slots=True)
class WaitValue(MemoryOperation):
    """A wait of `Stream.batch_mem_op`.

    Parameters
    ----------
    address : int, CUdeviceptr or GPU buffer
        The location to poll, as for `Stream.wait_value_32`.
    value : int
        The value to compare with; an unsigned number of that many bits.
    flags : WaitFlags or int, default WaitFlags.GEQ
        The comparison.
    bits : {32, 64}, default 32
        The width of the value.

    Raises
    ------
    TypeError, ValueError
        *value* is not an unsigned number of *bits* bits, *bits* is neither 32 nor 64, or *flags* is
        not a `WaitFlags`.

    Examples
    --------
    >>> import userstream as us
    >>> from cuda.core import Device
    >>> Device(0).set_current()
    >>> stream = us.get_stream(0)
    >>> word = Device(0).allocate(4, stream=stream)
    >>> stream.batch_mem_op([us.WriteValue(word, 7), us.WaitValue(word, 7, us.WaitFlags.EQ)])
    >>> stream.sync(timeout=10)
    """

    __module__ = "userstream"

    address: int | Buffer
    value: int
    flags: int = WaitFlags.GEQ
    bits: _driver.values.Bits = 32

    def __post_init__(self) -> None:
        _check_value(self.value, self.bits)
        flags = _numbers.integer(self.flags, "flags")
        if flags & ~(_driver.values.COMPARISONS | _driver.values.FLUSH_FLAG):
            raise ValueError(
                "flags of a wait must be one of WaitFlags.GEQ, EQ, AND and NOR, or that | FLUSH, "
                f"not {self.flags!r}"
            )


@dataclass(frozen=True, slots=True)
class FlushRemoteWrites(MemoryOperation):
    """A flush of `Stream.batch_mem_op`: makes other devices' earlier writes visible.

    Examples
    --------
    >>> import userstream as us
    >>> stream = us.get_stream(0)
    >>> try:
    ...     stream.batch_mem_op([us.FlushRemoteWrites()])
    ... except us.NotSupportedError:
    ...     pass  # not every device has it
    """

    __module__ = "userstream"


@dataclass(frozen=True, slots=True)
class MemoryBarrier(MemoryOperation):
    """A memory barrier of `Stream.batch_mem_op`.

    Parameters
    ----------
    scope : {"system", "gpu"}, default "system"
        Who sees earlier writes before later ones: the whole system, or this GPU.

    Raises
    ------
    ValueError
        *scope* is not one of these.

    Examples
    --------
    >>> import userstream as us
    >>> stream = us.get_stream(0)
    >>> try:
    ...     stream.batch_mem_op([us.MemoryBarrier("gpu")])
    ... except us.NotSupportedError:
    ...     pass  # not every device has it
    """

    __module__ = "userstream"

    scope: Literal["system", "gpu"] = "system"

    def __post_init__(self) -> None:
        if self.scope not in ("system", "gpu"):
            raise ValueError(
                f'the scope of a barrier must be "system" or "gpu", not {self.scope!r}'
            )


def _check_value(value: int, bits: int) -> None:
    width = _numbers.integer(bits, "bits")
    if width not in (32, 64):
        raise ValueError(f"bits must be 32 or 64, not {bits!r}")
    if not 0 <= _numbers.integer(value, "value") < 1 << width:
        wider = "; there are 64 bits as well" if width == 32 and 0 <= value < 1 << 64 else ""
        raise ValueError(f"{value!r} is not an unsigned number of {bits} bits{wider}")
