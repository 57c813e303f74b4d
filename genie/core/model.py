"""The nouns of the core: a request, its mode on a resource, its state, and why it ended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Final, Protocol


class Mode(StrEnum):
    """How a resource is asked for. Shared goes with shared; exclusive goes with nothing."""

    SHARED = "shared"
    EXCLUSIVE = "exclusive"


class Reason(StrEnum):
    """Why a request ended, in the wire's words."""

    SUCCESS = "success"
    QUEUE_TIMEOUT = "queue-timeout"
    TRANSACTION_TIMEOUT = "transaction-timeout"
    DEADLOCK = "deadlock"
    DISCONNECTED = "disconnected"
    INSUFFICIENT = "insufficient"


class State(Enum):
    """Where a request is in its life. It only ever moves down this list."""

    WAITING = 1
    HELD = 2
    ENDED = 3


# Looking a member up on its class takes three times as long as a name of the module does, and these are looked up for
# every request. So the parts that run for every request use the names.
WAITING: Final = State.WAITING
HELD: Final = State.HELD
ENDED: Final = State.ENDED
SUCCESS: Final = Reason.SUCCESS


class Origin(Protocol):
    """Who made a request. The core carries it and never looks inside."""

    key: str | None
    """What the session is known by beyond its connection and this process; None where it ends with its connection."""
    timeout_ms: float
    """How long it lasts without a connection."""


NO_TIMEOUT_MS: Final = 2_147_483_647
"""A `queue_timeout_ms` of this many milliseconds or more (the largest on the wire) is no limit."""

MAX_LINEAR_SEARCH: Final = 16
"""Names that are searched for one among them as they are."""

Weight = int

Owner = str | int
"""The transaction's name; without one the request is its own owner and this is its id."""

QueueEntry = tuple[float, int, "Request"]
"""A place in a line: (minus the priority, ticket, request). Smaller stands further ahead.

The ticket is the id of the request itself, or after a reordering of another one that stood in the same line.
No two entries of a line share priority and ticket, so that comparing never reaches the request.
"""


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """One request for a list of locks, from its arrival to its end. Also the command that asks for it.

    The first block is what the client said; a name stands in one of the two tuples, once. The second block
    belongs to the lock manager, which sets it when the request arrives. Times are milliseconds of the manager's clock, but for `since_unix_ms`,
    which is for people.
    """

    shared: tuple[str, ...] = ()
    exclusive: tuple[str, ...] = ()
    queue_timeout_ms: float = 10_000
    transaction_timeout_ms: float = 10_000
    transaction: str | None = None
    priority: float = 0
    ref: str | None = None
    release_on_disconnect: bool = False
    origin: Origin | None = None
    choice_digest: str | None = None
    """Set where the names are those that a `Take` took: what it chose from, in short, to know it again."""
    principal: str | None = None
    """The name under which it was made, where clients must have one. The core carries it."""
    note: str | None = None
    """What the client says about the request, for people. The core carries it."""

    id: int = field(init=False)
    owner: Owner = field(init=False)
    state: State = field(init=False)
    fence: int = field(default=0, init=False)
    since: float = field(init=False)
    """Since when it has been in its state: the arrival while it waits, the grant while it is held."""
    since_unix_ms: float = field(init=False)
    """The same as milliseconds since 1970, for people."""
    deadline: int = field(init=False)
    """When it falls due: rounded up to a whole millisecond, so never early. `NEVER` for a wait without a limit."""
    queue_entry: QueueEntry | None = field(default=None, init=False)
    """Where it stands in every line, by priority and arrival. None unless it waits."""
    moved: dict[str, QueueEntry] | None = field(default=None, init=False)
    """Where a reordering put it instead, by resource."""
    exclusive_names: frozenset[str] | None = field(default=None, init=False)
    """What it modes exclusively, where that is much and was looked for; see `is_exclusive`."""
    simple: bool = field(init=False)
    """Set while it waits: whether it can lead a search for cycles nowhere but along the one line in which it stands."""

    def __repr__(self) -> str:
        asked = [f"{self.mode(name)}:{name}" for name in self.names()]
        state = f"{self.id} {self.state.name}" if hasattr(self, "state") else "new"
        return f"<Request {state} {asked} of {self.transaction or 'nobody'}>"

    def entry(self, name: str) -> QueueEntry:
        """Its place in the line of `name`. Only for a request that waits."""
        if self.moved is not None and name in self.moved:
            return self.moved[name]
        assert self.queue_entry is not None  # noqa: S101 - an invariant, and what mypy needs to know
        return self.queue_entry

    def move(self, name: str, place: QueueEntry) -> None:
        """Give it another's place in the line of `name`, or its own one back."""
        moved = self.moved or {}
        if self.queue_entry is not None and place[:2] == self.queue_entry[:2]:
            moved.pop(name, None)
        else:
            moved[name] = (place[0], place[1], self)
        self.moved = moved or None

    def is_exclusive(self, name: str) -> bool:
        """Whether it modes `name` exclusively. One of many is not searched for among all of them, time and again."""
        if len(self.exclusive) <= MAX_LINEAR_SEARCH:
            return name in self.exclusive
        if self.exclusive_names is None:
            self.exclusive_names = frozenset(self.exclusive)
        return name in self.exclusive_names

    def mode(self, name: str) -> Mode:
        """In which mode it asks for `name`."""
        return Mode.EXCLUSIVE if self.is_exclusive(name) else Mode.SHARED

    def modes(self) -> Iterator[tuple[str, bool]]:
        """Every resource that it names, each once, and whether it modes it exclusively."""
        for name in self.exclusive:
            yield name, True
        for name in self.shared:
            yield name, False

    def names(self) -> tuple[str, ...]:
        """Every resource that it names, each once."""
        return self.exclusive + self.shared
