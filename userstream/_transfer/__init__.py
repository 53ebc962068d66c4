"""Copies of buffers: to the host, from it, and between devices.

All but the order with those who write and read the buffers: their streams are for the caller to
order before and after, and the buffers for the caller to keep alive.
"""

from userstream._transfer._arrays import DeviceArray, check_out, device_array
from userstream._transfer._chunks import trim
from userstream._transfer._devices import between
from userstream._transfer._dtypes import numpy_dtype
from userstream._transfer._host import from_host, into_host, is_scattered, to_host
from userstream._transfer._pinned import limit, set_limit

__all__ = [
    "DeviceArray",
    "between",
    "check_out",
    "device_array",
    "from_host",
    "into_host",
    "is_scattered",
    "limit",
    "numpy_dtype",
    "set_limit",
    "to_host",
    "trim",
]
