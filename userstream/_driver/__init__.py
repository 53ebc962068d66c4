"""The CUDA driver: the one room that calls `cuda.bindings.driver`.

Callers name the subject and the function: ``_driver.streams.stream_id(handle)``. Every function
raises `DriverError` (or a more telling error) instead of returning a status, and changes the
caller's current context and capture mode for its own call at most.
"""

from userstream._driver import (  # noqa: F401 -- the subjects
    attributes,
    capture,
    capture_mode,
    contexts,
    copies,
    core,
    event_waits,
    events,
    fused,
    green_contexts,
    host_functions,
    host_pools,
    library,
    memory,
    pointers,
    status,
    streams,
    values,
)
