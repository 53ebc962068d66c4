"""What a kernel's function gets for the condition of a graph."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, SupportsIndex

import numpy as np

if TYPE_CHECKING:
    from userstream.testing._pointer import Launch

_NOT_FOUND = 500


class Condition:
    """A graph condition that was passed to a kernel, on the simulated driver.

    Annotates a parameter that the kernel takes as a ``cudaGraphConditionalHandle``: cuda.core
    passes its `GraphCondition <cuda.core.graph.GraphCondition>`. Not created by users.

    Attributes
    ----------
    handle : int
        The handle, as the kernel was launched with it.

    Examples
    --------
    >>> import numpy as np
    >>> from userstream import testing
    >>> @testing.kernel("count_down")
    ... def count_down(grid, block, again: testing.Condition, left: testing.Pointer):
    ...     values = left.array(1, np.int32)
    ...     values[0] -= 1
    ...     again.set(values[0] > 0)
    """

    __slots__ = ("_launch", "_name", "handle")

    def __init__(self, handle: int, name: str, launch: Launch) -> None:
        self.handle: int = handle
        self._name = name
        self._launch = launch

    def __repr__(self) -> str:
        return f"<userstream.testing.Condition {self._name}: {self.handle:#x}>"

    def set(self, value: SupportsIndex | np.bool_) -> None:
        """Set the value, as ``cudaGraphSetConditional`` does in a kernel.

        From now on it decides for the nodes of the running graph that have this condition.

        Parameters
        ----------
        value : int or bool
            For "if" and "while", true unless it is 0; for "switch", the number of the case.

        Raises
        ------
        ValueError, TypeError
            *value* is not an unsigned 32-bit integer.
        RuntimeError
            The kernel is not part of a graph that has the condition, or its function has returned.

        Examples
        --------
        >>> import numpy as np
        >>> from userstream import testing
        >>> @testing.kernel("choose")
        ... def choose(grid, block, which: testing.Condition, case: np.uint32):
        ...     which.set(case)
        """
        number = _checked(value)
        launch = self._launch
        result = launch.library.userstream_set_condition(launch.id, self.handle, number)
        if result == _NOT_FOUND:
            raise RuntimeError(
                f"the launch to which {self!r} belongs is over: set a condition while the kernel's "
                "function runs"
            )
        if result:
            raise RuntimeError(
                f"{self!r} cannot be set here: the kernel must be a node of the graph for which "
                "the condition was created, in the same context"
            )


def _checked(value: SupportsIndex | np.bool_) -> int:
    try:
        number = operator.index(bool(value) if isinstance(value, np.bool_) else value)
    except TypeError:
        raise TypeError(f"a condition is an int or a bool, not {type(value).__name__}") from None
    if not 0 <= number < 1 << 32:
        raise ValueError(f"a condition has 32 bits without a sign: not {number}")
    return number
