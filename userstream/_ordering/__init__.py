"""Ordering the streams that produce some buffers and the one that uses them.

`producers` finds out which streams these are. `ordering` puts edges between them, or by
`device_edges` between a stream and everything on its device. `borrow` does so at both ends of a
block, and `handing_over` for what was made in a block. `modes` are what a block declares to do with
the buffers. `settings` are those of the environment.
"""

from userstream._ordering import modes, settings
from userstream._ordering.borrow import Borrow
from userstream._ordering.handing_over import hand_over
from userstream._ordering.ordering import (
    Lanes,
    Ordering,
    ordering_of_lanes,
    usual_lanes,
    usual_lanes_of_view,
)
from userstream._ordering.producers import given_lane, ordering_of
from userstream._ordering.uses import Uses

__all__ = [
    "Borrow",
    "Lanes",
    "Ordering",
    "Uses",
    "given_lane",
    "hand_over",
    "modes",
    "ordering_of",
    "ordering_of_lanes",
    "settings",
    "usual_lanes",
    "usual_lanes_of_view",
]
