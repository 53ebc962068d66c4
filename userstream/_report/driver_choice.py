"""The choice between the real driver and the simulated one."""

from __future__ import annotations

import ctypes
from pathlib import Path

DEVICE_NODES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")  # the last one: WSL
LIBRARY = "libcuda.so.1"

NO_GPU = "this machine has no NVIDIA device node and no driver"


def is_gpu_machine() -> bool:
    """Return whether there is an NVIDIA device node, or a driver that can be loaded."""
    return any(Path(node).exists() for node in DEVICE_NODES) or _driver_loads()


def _driver_loads() -> bool:
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True
