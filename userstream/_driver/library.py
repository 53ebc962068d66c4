"""The driver as a whole, and the devices that it sees."""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Any

from cuda.bindings import driver

from userstream import _process, errors
from userstream._driver import core
from userstream._driver.status import SUCCESS, call
from userstream.errors import DriverNotFoundError, ForkedError, InvalidDeviceError

if TYPE_CHECKING:
    from collections.abc import Callable

# Of a MIG instance the first version told the UUID of the whole GPU; CUDA 13 has the second alone.
_get_uuid = getattr(driver, "cuDeviceGetUuid_v2", driver.cuDeviceGetUuid)

# The end of an error message where an int is not a device.
AS_POINTER = "; an address is passed as a cuda.bindings.driver.CUdeviceptr"

_NOT_INITIALIZED = driver.CUresult.CUDA_ERROR_NOT_INITIALIZED

_ready = False
_version = 0
ordinals = range(0)  # of the devices that this process sees
_uuids: dict[int, str] = {}


def ensure() -> None:
    """Load the driver once; raise if it cannot be called from this process.

    Without a driver, cuda.core's own calls end in a hang; so every entry asks here first.
    """
    if _process.halted:
        _process.check_fork()
    if not _ready:
        _initialise()


def _initialise() -> None:
    global _ready, _version, ordinals  # noqa: PLW0603 -- the driver is one per process
    try:
        (status,) = driver.cuInit(0)
    except (RuntimeError, ValueError) as error:  # not there, or an answer newer than the bindings
        raise DriverNotFoundError(
            f"no NVIDIA driver could be loaded ({error}); install one, or call "
            "userstream.testing.simulate() first to work without a GPU (pytest: --simulated-gpus 2)"
        ) from error
    if status == _NOT_INITIALIZED:
        raise ForkedError(
            "the driver returned CUDA_ERROR_NOT_INITIALIZED: this process was forked after CUDA "
            'was used; start workers with the "spawn" or "forkserver" method of multiprocessing'
        )
    if status != SUCCESS:
        raise DriverNotFoundError(
            f"the NVIDIA driver cannot be used: cuInit failed with {status.name} ({int(status)})"
        )
    _process.note_driver_used()
    _version = call(driver.cuDriverGetVersion)
    ordinals = range(call(driver.cuDeviceGetCount))
    core.load_functions()
    _ready = True


def driver_function(name: str, since: int, *arguments: Any) -> Callable[..., int]:
    """Return a function of the driver, with the signature that it has since a CUDA version."""
    address, _found = call(driver.cuGetProcAddress, name.encode(), since, 0)
    return ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(int(address))


def version() -> int:
    """Return the CUDA version of the driver, such as 13000."""
    ensure()
    return _version


def version_text() -> str:
    """Return the CUDA version of the driver, such as ``"13.0"``."""
    return f"{_version // 1000}.{_version % 1000 // 10}"


def device_count() -> int:
    """Return the number of devices that this process sees."""
    ensure()
    return len(ordinals)


def check_device(device: int) -> None:
    """Raise `InvalidDeviceError` unless there is a device of that ordinal."""
    if not _ready or _process.halted:  # `ensure`, without the call that costs most here
        ensure()
    if not 0 <= device < len(ordinals):
        advice = AS_POINTER if device >= 1 << 16 else ""  # no ordinal is so large
        raise InvalidDeviceError(
            f"there is no CUDA device {device}: this process sees {len(ordinals)} "
            f"(ordinals 0 to {len(ordinals) - 1}){advice}",
            device=device,
        )


@functools.cache
def device_attribute(device: int, which: driver.CUdevice_attribute) -> int:
    """Return an attribute of a device, which never changes."""
    return int(call(driver.cuDeviceGetAttribute, which, call(driver.cuDeviceGet, device)))


def device_report(device: int) -> tuple[str, str, int, str]:
    """Return the name, the compute capability, the memory and the UUID of a device."""
    check_device(device)
    attribute = driver.CUdevice_attribute
    handle = call(driver.cuDeviceGet, device)
    name = _name(handle)
    major, minor = (
        call(driver.cuDeviceGetAttribute, which, handle)
        for which in (
            attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        )
    )
    memory = call(driver.cuDeviceTotalMem, handle)
    return name, f"{major}.{minor}", memory, _uuid(handle, name)


def device_uuid(device: int) -> str | None:
    """Return the UUID of a device; `None` if the driver cannot be asked, and never an exception.

    For errors, so the driver is not brought into being here.
    """
    uuid = _uuids.get(device)
    if uuid is None and _ready and not _process.forked and 0 <= device < len(ordinals):
        try:
            handle = call(driver.cuDeviceGet, device)
            uuid = _uuids[device] = _uuid(handle, _name(handle))
        except Exception:  # the error that is being made says more
            return None
    return uuid


def _name(handle: driver.CUdevice) -> str:
    name: bytes = call(driver.cuDeviceGetName, 128, handle)
    return name.split(b"\0")[0].decode()


def _uuid(handle: driver.CUdevice, name: str) -> str:
    """Return the UUID as nvidia-smi writes it. The name shows whether it is a MIG instance."""
    raw = bytes(call(_get_uuid, handle).bytes).hex()
    kind = "MIG" if " MIG " in name else "GPU"
    return f"{kind}-{raw[:8]}-{raw[8:12]}-{raw[12:16]}-{raw[16:20]}-{raw[20:]}"


errors._uuid_sources.append(device_uuid)
