"""What other libraries call the methods of a stream, and what they are called here."""

from __future__ import annotations

from typing import NoReturn

NAMES = {
    "synchronize": "sync(timeout=...)",
    "query": "is_done",
    "done": "is_done",
    "wait_stream": "wait(stream)",
    "record_event": "record()",
    "ptr": "int(stream.handle)",
    "cuda_stream": "int(stream.handle)",
    "device_id": "device.device_id",
    "device_index": "device.device_id",
    "use": "activate(...), in a with statement",
}


def refuse(stream: object, name: str) -> NoReturn:
    """Raise the `AttributeError` of a name that a stream does not have."""
    message = f"{type(stream).__name__!r} object has no attribute {name!r}"
    here = NAMES.get(name)
    if here is not None:
        shown = here if here.startswith("int") else f"stream.{here}"
        message += f"; in userstream that is {shown}"
    raise AttributeError(message, name=name, obj=stream)
