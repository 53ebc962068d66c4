"""`UserStream`: a registry of user streams.

Built up in layers, a subject each: `_table` (which stream, and when it is made), `_waits`,
`_orders`, `_transfers` (copies), and here the registry of the process and the end of one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from userstream import _buffers, _process, _transfer, _waiting
from userstream._registry._transfers import Transfers
from userstream.errors import WaitErrors

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self


class UserStream(Transfers):
    """The user streams of a process, a library or a test: one per device and name.

    The functions of the `userstream` module act on the registry of the process,
    ``UserStream.get()``; each of them is a method here. A library or a test that wants streams of
    its own makes a registry of its own, ``UserStream()``. As a context manager it waits for its
    streams at the end of the block, and is closed for good.

    Notes
    -----
    Thread-safe. Finding a stream that exists takes no lock. After DALI's C++
    ``dali::UserStream``, of which there is only the one of the process.

    Examples
    --------
    >>> from userstream import UserStream
    >>> UserStream.get() is UserStream.get()
    True
    >>> with UserStream() as mine:
    ...     stream = mine.get_stream(0)
    ...     stream is mine.get_stream(0), stream is UserStream.get().get_stream(0)
    (True, False)
    """

    __slots__ = ()

    @staticmethod
    def get() -> UserStream:
        """Return the registry of the process.

        Returns
        -------
        UserStream
            The same object on every call, in every thread. Pickled, it becomes that of the process
            where it is unpickled; and so do the functions of the `userstream` module.

        Examples
        --------
        >>> from userstream import UserStream
        >>> UserStream.get().streams() == UserStream.get().streams()
        True
        """
        return _process_registry

    def close(self, *, timeout: float | None = None) -> None:
        """Wait for the user streams and empty the registry, which can be used again.

        Parameters
        ----------
        timeout : float, optional
            Seconds for all of it, at least 0; `None` waits for ever.

        Raises
        ------
        WaitTimeout
            Some streams were not done in time. The registry keeps all its streams.
        WaitErrors
            The GPU failed. The registry is emptied nevertheless.
        CaptureError
            One of the streams is being captured into a graph; the registry keeps all its streams.

        Notes
        -----
        The registry of the process gives the page-locked memory of `asnumpy` back as well, as far
        as no array is on it. Streams that somebody still holds stay usable; the others are
        destroyed, unless their handle was given away (see `Stream`). Only applications close the
        registry of the process: others may be using it. Blocks, but never inside the driver;
        thread-safe.

        Examples
        --------
        >>> from userstream import UserStream
        >>> mine = UserStream()
        >>> stream = mine.get_stream(0)
        >>> mine.close()
        >>> len(mine.streams())
        0
        """
        _waiting.check_arguments(timeout, "auto")
        lanes = self._lanes()
        try:
            _waiting.wait_for(
                list(lanes.values()),
                timeout=timeout,
                policy="auto",
                grouped=True,
                closed_is_done=True,
            )
        except WaitErrors:
            self._remove(lanes)
            raise
        self._remove(lanes)
        if self is _process_registry:
            _transfer.trim()

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        finally:
            with self._lock:  # which a thread that is just making a stream has
                self._closed = True
            # Made meanwhile, or still being captured.
            self._remove(self._lanes())

    def __reduce__(self) -> tuple[Callable[[], UserStream], tuple[()]]:
        if self is not _process_registry:
            _process.refuse_copy(
                self, "send a function that calls userstream there: each process has a registry"
            )
        return UserStream.get, ()  # the functions of the package are bound to it

    def __repr__(self) -> str:
        which = " of the process" if self is _process_registry else ""
        count = sum(map(len, self._named.values()))
        state = "closed" if self._closed else f"{count} stream{'' if count == 1 else 's'}"
        return f"<userstream.UserStream{which}: {state}>"

    device_of: Final = staticmethod(_buffers.device_of)
    describe: Final = staticmethod(_buffers.describe)


_process_registry = UserStream()
