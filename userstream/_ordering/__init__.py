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
    Ordering,
    usual_lanes,
    usual_ordering,
    usual_ordering_of_view,
)
from userstream._ordering.producers import given_lane, ordering_of
from userstream._ordering.uses import Uses

__all__ = [
    "Borrow",
    "Ordering",
    "Uses",
    "given_lane",
    "hand_over",
    "modes",
    "ordering_of",
    "settings",
    "usual_lanes",
    "usual_ordering",
    "usual_ordering_of_view",
]
