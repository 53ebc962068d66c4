# What each function does is written above it in native/*.c.
from collections import deque
from collections.abc import Callable
from typing import Any, Final, TypeVar, final

_T = TypeVar("_T")

SOURCE: str  # the checksum of the C files
FUNCTIONS: tuple[str, ...]
CAPTURED: Final[int]
DUE: Final[int]
NOT_READY: Final[int]
MOST_PARTS: Final[int]
SWEEP_SECONDS: Final[float]
PROGRAM: Final[int]
FUTURE: Final[int]
HOUSEKEEPING: Final[int]

in_use: set[Ticket]
orphans: deque[Ticket]
queues: set[Any]

class LaneState:
    raw_handle: int
    raw_context: int
    is_context_independent: bool
    free: deque[Any]
    held: Any
    swept: float

@final
class Use:
    @property
    def ticket(self) -> Ticket: ...

@final
class Ticket:
    source: Any
    order: Callable[..., None] | None
    @property
    def lane(self) -> Any: ...
    @property
    def objects(self) -> object: ...
    @property
    def thread(self) -> int: ...
    def end(self) -> None: ...

@final
class Lease:
    @property
    def address(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

def account_address() -> int: ...
def set_account(account: int, /) -> None: ...
def on_account(account: int, function: Callable[..., _T], /, *args: object) -> _T: ...
def load(*functions: int) -> None: ...
def are_free(first: Any, second: Any, /) -> bool: ...
def is_in(stream: Any, context: Any, /) -> bool: ...
def query(stream: Any, /) -> int: ...
def order(source: LaneState, destination: LaneState, /) -> int: ...
def use(lane: LaneState, source: LaneState | None, objects: object, /) -> Use: ...
def finish(lane: LaneState, source: LaneState | None, objects: object, /) -> int: ...
def fetch(
    left: dict[int, Any],
    used: object,
    move: tuple[int, int, int, int, int],
    events: tuple[Any, ...],
    start: int,
    address: int,
    stream: Any,
    context: Any,
    nanoseconds: int,
    producer: Any,
    out: int,
    /,
) -> int: ...
def lend(blocks: dict[int, object], size: int, /) -> Lease | None: ...
def pointer(address: int, /) -> tuple[int, ...]: ...
