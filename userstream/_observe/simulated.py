"""The maker of records on the simulated driver: the driver itself."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from userstream._observe.judge.verdicts import watched
from userstream._observe.logger import DRIVER_FUNCTIONS, Driver, Logger, address_of
from userstream.testing import _simulated

if TYPE_CHECKING:
    from collections.abc import Callable

    from userstream._observe.judge.functions import Function


class Simulated:
    """Lets the simulated driver tell the logger of each call."""

    def __init__(self) -> None:
        self._library = _simulated._side_door("observe()")
        self._library.userstream_symbol.restype = ctypes.c_char_p
        self._library.userstream_observe.restype = ctypes.c_bool
        self._library.userstream_observe.argtypes = [ctypes.c_void_p]

    def functions(self) -> dict[int, tuple[str, Function]]:
        """Return what is watched, by the number that the driver gives each function."""
        found = {}
        number = 0
        while (symbol := self._library.userstream_symbol(number)) is not None:
            named = watched(symbol.decode())
            if named is not None:
                found[number] = named
            number += 1
        return found

    def driver(self) -> Driver:
        """Return the functions that the logger calls."""
        return Driver(
            *(address_of(getattr(self._library, name)) for name in DRIVER_FUNCTIONS.values())
        )

    def begin(self, logger: Logger) -> Callable[[], None]:
        """Tell the logger from now on; return what ends that."""
        if not self._library.userstream_observe(address_of(logger.call)):
            raise RuntimeError("something else is already observing the simulated driver")

        def end() -> None:
            self._library.userstream_observe(None)

        return end
