"""Attributes of streams, with the driver's union turned into values of Python."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias

from cuda.bindings import driver

from userstream._driver.library import device_attribute
from userstream._driver.status import call

Attribute: TypeAlias = Literal[
    "access_policy_window", "mem_sync_domain", "mem_sync_domain_map", "priority", "sync_policy"
]

_ID = driver.CUstreamAttrID
_IDS: dict[Attribute, driver.CUstreamAttrID] = {
    "access_policy_window": _ID.CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW,
    "mem_sync_domain": _ID.CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN,
    "mem_sync_domain_map": _ID.CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP,
    "priority": _ID.CU_LAUNCH_ATTRIBUTE_PRIORITY,
    "sync_policy": _ID.CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY,
}
ATTRIBUTES = tuple(_IDS)

_POLICY = driver.CUsynchronizationPolicy
SYNC_POLICIES = {
    "auto": _POLICY.CU_SYNC_POLICY_AUTO,
    "spin": _POLICY.CU_SYNC_POLICY_SPIN,
    "yield": _POLICY.CU_SYNC_POLICY_YIELD,
    "blocking": _POLICY.CU_SYNC_POLICY_BLOCKING_SYNC,
}
_DOMAIN = driver.CUlaunchMemSyncDomain
DOMAINS = {
    "default": _DOMAIN.CU_LAUNCH_MEM_SYNC_DOMAIN_DEFAULT,
    "remote": _DOMAIN.CU_LAUNCH_MEM_SYNC_DOMAIN_REMOTE,
}
_PROPERTY = driver.CUaccessProperty
PROPERTIES = {
    "normal": _PROPERTY.CU_ACCESS_PROPERTY_NORMAL,
    "streaming": _PROPERTY.CU_ACCESS_PROPERTY_STREAMING,
    "persisting": _PROPERTY.CU_ACCESS_PROPERTY_PERSISTING,
}


class Window(NamedTuple):
    """An access-policy window, as the driver keeps it."""

    address: int
    nbytes: int
    hit_ratio: float
    hit: str
    miss: str


def largest_window(device: int) -> int:
    """Return the largest number of bytes of an access-policy window; 0 if there is none."""
    which = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_ACCESS_POLICY_WINDOW_SIZE
    return device_attribute(device, which)


def domain_count(device: int) -> int:
    """Return how many memory-synchronization domains a device has."""
    which = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MEM_SYNC_DOMAIN_COUNT
    return device_attribute(device, which)


def get_attribute(handle: driver.CUstream, attribute: Attribute, stream: object) -> Any:
    """Return an attribute of a stream; `None` for a value that has no name."""
    value = call(driver.cuStreamGetAttribute, handle, _IDS[attribute], stream=stream)
    if attribute == "access_policy_window":
        return _window(value.accessPolicyWindow)
    if attribute == "mem_sync_domain_map":
        return int(value.memSyncDomainMap.default_), int(value.memSyncDomainMap.remote)
    # The others are a C int. Read as one: the bindings fail at a number that has no name, and a
    # new stream's synchronization policy is -1.
    number = int.from_bytes(bytes(value.pad[:4]), "little", signed=True)
    if attribute == "priority":
        return number
    return _name_of(number, DOMAINS if attribute == "mem_sync_domain" else SYNC_POLICIES)


def set_attribute(
    handle: driver.CUstream, attribute: Attribute, wanted: Any, stream: object
) -> None:
    """Set an attribute of a stream to a value as `get_attribute` returns it."""
    value = driver.CUstreamAttrValue()
    if attribute == "access_policy_window":
        _fill(value.accessPolicyWindow, wanted)
    elif attribute == "mem_sync_domain_map":
        value.memSyncDomainMap.default_, value.memSyncDomainMap.remote = wanted
    elif attribute == "mem_sync_domain":
        value.memSyncDomain = DOMAINS[wanted]
    elif attribute == "sync_policy":
        value.syncPolicy = SYNC_POLICIES[wanted]
    else:
        value.priority = wanted
    call(driver.cuStreamSetAttribute, handle, _IDS[attribute], value, stream=stream)


def copy_attributes(destination: driver.CUstream, source: driver.CUstream, stream: object) -> None:
    """Give a stream the attributes of another one of its context."""
    call(driver.cuStreamCopyAttributes, destination, source, stream=stream)


def _window(window: driver.CUaccessPolicyWindow) -> Window:
    return Window(
        int(window.base_ptr),
        int(window.num_bytes),
        float(window.hitRatio),
        _name_of(int(window.hitProp), PROPERTIES) or "normal",
        _name_of(int(window.missProp), PROPERTIES) or "normal",
    )


def _fill(window: driver.CUaccessPolicyWindow, wanted: Window) -> None:
    window.base_ptr = wanted.address
    window.num_bytes = wanted.nbytes
    window.hitRatio = wanted.hit_ratio
    window.hitProp = PROPERTIES[wanted.hit]
    window.missProp = PROPERTIES[wanted.miss]


def _name_of(number: int, names: dict[str, Any]) -> str | None:
    return next((name for name, known in names.items() if int(known) == number), None)
