"""The access-policy window of a stream, as a value that is checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from userstream import _numbers

if TYPE_CHECKING:
    from userstream.typing import Buffer


@dataclass(frozen=True, slots=True)
class AccessPolicyWindow:
    """A range of memory that the L2 cache treats in a way of its own: a stream's attribute.

    Parameters
    ----------
    address : int, CUdeviceptr or GPU buffer
        Where it begins.
    nbytes : int
        Its length; 0 for no window.
    hit_ratio : float, default 1.0
        The share of the accesses, 0 to 1, that are treated as ``hit`` says.
    hit : {"persisting", "streaming", "normal"}, default "persisting"
        How long these stay in the cache.
    miss : {"streaming", "normal"}, default "streaming"
        How long the others stay.

    Raises
    ------
    TypeError, ValueError
        ``nbytes``, ``hit_ratio``, ``hit`` or ``miss`` is none of these. The address is looked at by
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

    address: int | Buffer
    nbytes: int
    hit_ratio: float = 1.0
    hit: Literal["persisting", "streaming", "normal"] = "persisting"
    miss: Literal["streaming", "normal"] = "streaming"

    def __post_init__(self) -> None:
        if _numbers.integer(self.nbytes, "nbytes") < 0:
            raise ValueError(f"a window has at least 0 bytes, not {self.nbytes}")
        if not 0 <= _numbers.real(self.hit_ratio, "hit_ratio") <= 1:
            raise ValueError(f"hit_ratio is a share from 0 to 1, not {self.hit_ratio!r}")
        if self.hit not in ("persisting", "streaming", "normal"):
            raise ValueError(f'hit is "persisting", "streaming" or "normal", not {self.hit!r}')
        if self.miss not in ("streaming", "normal"):
            raise ValueError(f'miss is "streaming" or "normal", not {self.miss!r}')
