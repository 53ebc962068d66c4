"""What the driver knows of an address."""

from __future__ import annotations

from typing import NamedTuple

from cuda.bindings import driver

from userstream._driver.status import call

_ATTRIBUTES = (
    driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
    driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
    driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_CONTEXT,
    driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_MANAGED,
)


class PointerAttributes(NamedTuple):
    """What the driver knows of an address."""

    known: bool  # False: plain host memory, or no memory at all
    on_host: bool
    device: int
    context: int  # 0 for memory of a pool
    managed: bool


def pointer_attributes(address: int) -> PointerAttributes:
    """Ask the driver about an address, whoever allocated it."""
    memory_type, device, context, managed = call(
        driver.cuPointerGetAttributes, len(_ATTRIBUTES), _ATTRIBUTES, address
    )
    kind = int(memory_type)
    host = int(driver.CUmemorytype.CU_MEMORYTYPE_HOST)
    return PointerAttributes(kind != 0, kind == host, int(device), int(context), bool(managed))
