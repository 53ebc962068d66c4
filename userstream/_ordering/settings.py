"""What the environment asks of every ordering; read when userstream is imported."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from userstream._table import Unknown


def check_unknown(value: object, named: str = "unknown") -> Unknown:
    """Return what is to be done about an unknown producer."""
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


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "") not in ("", "0")


# To find a race: every acquire and release waits on the host as well.
SYNC = _is_on("USERSTREAM_SYNC")

# To find a producer that was guessed wrongly: each of them orders with everything on the device.
BY_DEVICE = _by_device(os.environ.get("USERSTREAM_ORDER", ""))

# What a registry does about an unknown producer, unless it is set.
UNKNOWN = check_unknown(os.environ.get("USERSTREAM_UNKNOWN") or "device", "USERSTREAM_UNKNOWN")
