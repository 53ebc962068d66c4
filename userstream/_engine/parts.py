"""Parts of a device: some of its multiprocessors, which alone run the work of some streams.

A process splits a device once: into a part of the size that is asked for first, and the rest. So
whatever streams there are, their parts are the same one or have nothing in common.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from userstream import _driver, _numbers

if TYPE_CHECKING:
    from cuda.bindings import driver

REST: Literal["rest"] = "rest"

Wanted: TypeAlias = int | Literal["rest"]


class Part:
    """Some of the multiprocessors of a device."""

    __slots__ = ("_resource", "device", "sms")

    def __init__(self, device: int, resource: driver.CUdevResource) -> None:
        self.device = device
        self.sms = _driver.green_contexts.count(resource)
        self._resource = resource

    def context(self) -> driver.CUcontext:
        """Return the green context, which is created once and kept for the process."""
        known = _contexts.get(self)
        if known is not None:
            return known
        # Under no lock, as it takes a ms. One too many is destroyed: of another thread, or of a
        # signal handler that came in between.
        made: list[tuple[Any, ...]] = []
        context = None
        try:
            context = _driver.green_contexts.create(made, self._resource, self.device)
            return _contexts.setdefault(self, context)
        finally:  # `made` has it also if Ctrl-C came before the name `context` was bound
            if context is None or _contexts.get(self) is not context:
                _driver.green_contexts.destroy(made)


class _Split(NamedTuple):
    """The two parts of a device."""

    part: Part
    rest: Part


_splits: dict[int, _Split] = {}
_contexts: dict[Part, driver.CUcontext] = {}


def check(sms: object) -> Wanted:
    """Return what `sms=` asks for, or refuse it before the driver is asked."""
    if isinstance(sms, str):
        if sms != REST:
            raise ValueError(f"sms must be a number of multiprocessors or 'rest', not {sms!r}")
        return REST
    wanted = _numbers.integer(sms, "sms")
    if wanted < 1:
        raise ValueError(
            f"sms must be at least 1, not {wanted}; leave it out for all multiprocessors of the "
            "device"
        )
    return wanted


def part_of(device: int, wanted: Wanted) -> Part:
    """Return a part of a device, which is split if it was not yet."""
    split = _splits.get(device)
    if split is None:
        _driver.library.check_device(device)
        _driver.green_contexts.check_supported()
        if wanted == REST:
            raise ValueError(
                f"device {device} has not been split, so there is no rest yet: create a stream "
                "with a number as sms= first"
            )
        split = _splits.setdefault(device, _split(device, wanted))
    if wanted == REST:
        if not split.rest.sms:
            raise ValueError(f"the part of {split.part.sms} SMs leaves nothing of device {device}")
        return split.rest
    # It is what nearly every call asks for; any other number may be rounded up to it.
    if wanted != split.part.sms and _split(device, wanted).part.sms != split.part.sms:
        raise ValueError(
            f"device {device} is split into {split.part.sms} and {split.rest.sms} SMs, once for "
            f"the process, so there is no part of {wanted}: pass sms={split.part.sms}, or "
            "sms='rest'"
        )
    return split.part


def _split(device: int, wanted: int) -> _Split:
    """Split a device, which changes nothing there and is repeatable."""
    whole = _driver.green_contexts.whole(device)
    # The driver takes an unsigned int, and cuda-bindings refuses a larger one by an OverflowError.
    available = _driver.green_contexts.count(whole)
    found = _driver.green_contexts.split(whole, wanted) if wanted <= available else None
    if found is None:
        raise ValueError(
            f"device {device} has {available} SMs, from which no part of {wanted} can be split: "
            "pass a smaller sms=, or none for the whole device"
        )
    part, rest = found
    return _Split(Part(device, part), Part(device, rest))
