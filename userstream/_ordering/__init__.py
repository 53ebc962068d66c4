"""Ordering the streams that produce some buffers and the one that uses them.

`_who` finds out which streams these are, `_plan` puts edges between them, or by `_device_edges`
between a stream and all of its device, and `_borrow` does so at both ends of a block. `_hand_over`
does so for what was made in a block. `settings` are the environment's.
"""

from userstream._ordering import settings
from userstream._ordering._borrow import Borrow
from userstream._ordering._hand_over import hand_over
from userstream._ordering._plan import Ordering, usual_ordering
from userstream._ordering._who import given_lane, ordering_of, usual_streams_of

__all__ = [
    "Borrow",
    "Ordering",
    "given_lane",
    "hand_over",
    "ordering_of",
    "settings",
    "usual_ordering",
    "usual_streams_of",
]
