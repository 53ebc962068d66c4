"""Record this process for ``userstream observe``, whose supervisor judges the log."""

from __future__ import annotations

import os

from userstream._observe.observation import Observation
from userstream.errors import DriverNotFoundError, NotSupportedError

_observation: Observation | None = None


def begin() -> None:
    """Begin to record, until the process ends; say in a file why that is not possible.

    Nothing is begun where the driver was initialized before, and has loaded the recorder.
    """
    global _observation  # noqa: PLW0603 -- there is one
    directory = os.environ["USERSTREAM_RECORD"]
    with open("/proc/self/stat", "rb") as file:
        start = file.read().rpartition(b")")[2].split()[19].decode()
    path = os.path.join(directory, f"{os.getpid()}-{start}")
    if os.path.exists(f"{path}.uslog"):
        return
    is_confirmed = "USERSTREAM_RECORD_CONFIRM" in os.environ  # then a judge here says what to try
    _observation = Observation(
        log=f"{path}.uslog",
        judge="thread" if is_confirmed else "later",
        confirm=is_confirmed,
        timeline=0,
        allocations="USERSTREAM_RECORD_ALLOCATIONS" in os.environ,
    )
    try:
        _observation.__enter__()
    except (NotSupportedError, DriverNotFoundError, OSError) as error:
        with open(f"{path}.why", "w", encoding="utf-8") as file:
            file.write(str(error))
