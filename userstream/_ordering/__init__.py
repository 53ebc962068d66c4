"""Ordering the streams that produce buffers and the stream that uses the buffers.

`resolver` determines the streams. `ordering` adds the edges between the streams, or between a
stream and everything on its device. `borrow` adds edges at both ends of a block, and for results
that were produced in a block. `settings` reads the environment.
"""

from userstream._ordering import settings
from userstream._ordering.borrow import Borrow, hand_over
from userstream._ordering.ordering import Ordering
from userstream._ordering.resolver import given_lane, resolve, resolve_copy, resolve_views

__all__ = [
    "Borrow",
    "Ordering",
    "given_lane",
    "hand_over",
    "resolve",
    "resolve_copy",
    "resolve_views",
    "settings",
]
