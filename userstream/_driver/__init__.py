"""The CUDA driver: the one room that calls `cuda.bindings.driver`.

Every function here raises `DriverError` (or a more telling error) instead of returning a status.
Nothing here changes the caller's current context or capture mode beyond its own call.
"""

from userstream._driver.contexts import (
    current_context,
    current_device,
    default_context,
    device_of_primary,
    entered,
    primary_context,
    primary_context_if_active,
    priority_range,
    synchronize_context,
    within,
)
from userstream._driver.copies import (
    Copy,
    allocation_range,
    copy,
    copy_peer,
    copy_shaped,
    copy_shaped_peer,
)
from userstream._driver.events import (
    create_event,
    destroy_event,
    event_is_done,
    record_context,
    record_event,
)
from userstream._driver.library import (
    check_device,
    device_count,
    device_report,
    ensure,
    version,
    version_text,
)
from userstream._driver.memory import allocate_pinned, free_pinned
from userstream._driver.pointers import (
    Memory,
    device_of_pointer,
    is_host_pointer,
    is_managed_pointer,
    primary_device_of_pointer,
)
from userstream._driver.status import core_errors
from userstream._driver.streams import (
    LEGACY,
    PER_THREAD,
    refuse_capturing,
    refuse_implicit,
    relax_capture_of_this_thread,
    relaxed,
    stream_context,
    stream_flags,
    stream_id,
    stream_is_idle,
    wait_event,
)

__all__ = [
    "LEGACY",
    "PER_THREAD",
    "Copy",
    "Memory",
    "allocate_pinned",
    "allocation_range",
    "check_device",
    "copy",
    "copy_peer",
    "copy_shaped",
    "copy_shaped_peer",
    "core_errors",
    "create_event",
    "current_context",
    "current_device",
    "default_context",
    "destroy_event",
    "device_count",
    "device_of_pointer",
    "device_of_primary",
    "device_report",
    "ensure",
    "entered",
    "event_is_done",
    "free_pinned",
    "is_host_pointer",
    "is_managed_pointer",
    "primary_context",
    "primary_context_if_active",
    "primary_device_of_pointer",
    "priority_range",
    "record_context",
    "record_event",
    "refuse_capturing",
    "refuse_implicit",
    "relax_capture_of_this_thread",
    "relaxed",
    "stream_context",
    "stream_flags",
    "stream_id",
    "stream_is_idle",
    "synchronize_context",
    "version",
    "version_text",
    "wait_event",
    "within",
]
