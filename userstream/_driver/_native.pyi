from typing import Any

from userstream._driver.pure import Lease

SOURCE: str

def load(*functions: int) -> None: ...
def are_free(first: Any, second: Any, /) -> bool: ...
def is_in(stream: Any, context: Any, /) -> bool: ...
def query(stream: Any, /) -> int: ...
def edge(source: Any, destination: Any, event: Any, context: Any, /) -> int: ...
def fetch(
    left: dict[int, Any],
    used: object,
    to: int,
    source: int,
    size: int,
    stream: Any,
    context: Any,
    nanoseconds: int,
    producer: Any,
    out: int,
    /,
    *events: Any,
) -> int: ...
def lend(blocks: dict[int, object], size: int, /) -> Lease | None: ...
def pointer(address: int, /) -> tuple[int, ...]: ...
