"""What a block declares to do with the buffers: to read them only, or maybe to write them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from userstream._ordering.borrow import Borrow
from userstream._targets import shown

if TYPE_CHECKING:
    from userstream.typing import AccessMode

WRITE: Final = "write"
READ: Final = "read"


class ReadBorrow(Borrow):
    """A borrow that only reads the buffers."""

    __slots__ = ()

    mode = READ


def reads(mode: AccessMode) -> bool:
    """Tell whether a mode means that buffers are only read.

    Raises
    ------
    ValueError
        It is no mode.
    """
    if isinstance(mode, str) and mode in (READ, WRITE):
        return mode == READ
    raise ValueError(
        f'mode must be "read", for work that only reads the buffers, or "write", not {shown(mode)}'
    )


def kind_of_borrow(mode: AccessMode) -> type[Borrow]:
    """Return the class for a mode; see `reads`."""
    return ReadBorrow if reads(mode) else Borrow
