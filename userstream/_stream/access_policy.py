"""The access-policy window of a stream: a value, checked when it is created."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from userstream import _numbers

if TYPE_CHECKING:
    from userstream.typing import Buffer


@dataclass(frozen=True, slots=True)
class AccessPolicyWindow:
    """A range of memory with its own L2 cache policy, for `Stream.set_attribute`.

    Parameters
    ----------
    address : int, CUdeviceptr or GPU buffer
        The start of the range.
    nbytes : int
        The length of the range; 0 means no window.
    hit_ratio : float, default 1.0
        The fraction of the accesses, from 0 to 1, to which *hit* applies.
    hit : {"persisting", "streaming", "normal"}, default "persisting"
        The cache policy of these accesses.
    miss : {"streaming", "normal"}, default "streaming"
        The cache policy of the other accesses.

    Raises
    ------
    TypeError, ValueError
        *nbytes*, *hit_ratio*, *hit* or *miss* is not one of these. *address* is checked by
        `Stream.set_attribute`.

    Examples
    --------
    >>> import userstream as us
    >>> from cuda.core import Device
    >>> Device(0).set_current()
    >>> stream = us.Stream.create(0)
    >>> table = Device(0).allocate(1024, stream=stream)
    >>> window = us.AccessPolicyWindow(table, 1024, hit_ratio=0.5)
    >>> stream.set_attribute("access_policy_window", window)
    """

    __module__ = "userstream"

    address: int | Buffer
    nbytes: int
    hit_ratio: float = 1.0
    hit: Literal["persisting", "streaming", "normal"] = "persisting"
    miss: Literal["streaming", "normal"] = "streaming"

    def __post_init__(self) -> None:
        if _numbers.integer(self.nbytes, "nbytes") < 0:
            raise ValueError(f"nbytes must be at least 0, not {self.nbytes}")
        if not 0 <= _numbers.real(self.hit_ratio, "hit_ratio") <= 1:
            raise ValueError(f"hit_ratio must be from 0 to 1, not {self.hit_ratio!r}")
        if self.hit not in ("persisting", "streaming", "normal"):
            raise ValueError(f'hit must be "persisting", "streaming" or "normal", not {self.hit!r}')
        if self.miss not in ("streaming", "normal"):
            raise ValueError(f'miss must be "streaming" or "normal", not {self.miss!r}')
