"""Environment variables that affect every ordering, read when userstream is imported."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from userstream._trace import is_on

if TYPE_CHECKING:
    from userstream._table import Unknown


def check_unknown(value: object, named: str = "unknown") -> Unknown:
    """Return a validated policy for buffers whose producer is unknown."""
    if value not in ("device", "raise"):
        raise ValueError(
            f'{named} must be "device" (order it with everything on its device) or "raise" '
            f"(UnknownProducerError), not {value!r}"
        )
    return value


def _by_device(value: str) -> bool:
    if value not in ("", "device"):
        raise ValueError(f'USERSTREAM_ORDER must be "device" or empty, not {value!r}')
    return value == "device"


# For finding a race: every acquire and release also waits on the host.
SYNC = is_on("USERSTREAM_SYNC")

# For finding a wrong producer: every acquire and release orders with everything on the device.
BY_DEVICE = _by_device(os.environ.get("USERSTREAM_ORDER", ""))

# The default policy of a registry for an unknown producer.
UNKNOWN = check_unknown(os.environ.get("USERSTREAM_UNKNOWN") or "device", "USERSTREAM_UNKNOWN")
