"""The data model of the lock manager: requests, their states and the reasons for which they end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, StrEnum
from itertools import chain, repeat
from typing import ClassVar, Final

from genie.core.context import NO_CONTEXT, Context, Origin
from genie.lock_modes import Mode, QueueMode, S, U, UnitCount, X, is_subtree, lock_text


class Reason(StrEnum):
    """Why a request ended. The values are those of the wire field `reason`."""

    SUCCESS = "success"
    QUEUE_TIMEOUT = "queue-timeout"
    TRANSACTION_TIMEOUT = "transaction-timeout"
    DEADLOCK = "deadlock"
    DISCONNECTED = "disconnected"
    INSUFFICIENT = "insufficient"


class State(Enum):
    """The state of a request. A state is only ever followed by a later state of this list."""

    WAITING = 1
    HELD = 2
    ENDED = 3


# Module-level names for enum members, for code that runs for every request: an attribute lookup on
# the enum takes three times as long as a lookup of a global (measured).
WAITING: Final = State.WAITING
HELD: Final = State.HELD
ENDED: Final = State.ENDED
SUCCESS: Final = Reason.SUCCESS


NO_TIMEOUT_MS: Final = 2_147_483_647
"""A `queue_timeout_ms` of this value, the largest on the wire, or more means that the wait has no time limit."""

MAX_LINEAR_SEARCH: Final = 16
"""Maximum number of names in which `queue_mode` searches linearly. For more names it builds a dict."""

Weight = int

Owner = str | int
"""The owner of locks: the name of a transaction, or the id of a request without a transaction."""

QueueEntry = tuple[float, int, "Request"]
"""An entry of a wait queue: (negated priority, ticket, request), sorted ascending.

The ticket is the id of the request, or after a rearrangement the id of another request in the same
queue. Priority and ticket are unique within a queue. A position that is compared with those of a queue may be that of a
request that has left it, so that another request has the same position now: see `Request.__lt__`.
"""


MAX_PART_NAMES = 2_000
"""Number of names of one part of very many requests. Loading and recovering a part takes a few ms."""


def in_parts(requests: Iterable[Request]) -> Iterator[list[Request]]:
    """Yield requests in parts of about `MAX_PART_NAMES` names. The last request of a part may exceed the limit."""
    part, name_count = list[Request](), 0
    for request in requests:
        part.append(request)
        name_count += request.name_count()
        if name_count >= MAX_PART_NAMES:
            yield part
            part, name_count = [], 0
    if part:
        yield part


def needs_session(request: Request) -> bool:
    """Return whether a recovered request must end, because it needs a session and has none."""
    return request.origin is None and (request.release_on_disconnect or request.state is WAITING)


class Details:
    """Fields that few requests need: units, subtrees, and modes that do not follow from `Request.shared` and
    `Request.exclusive`.
    """

    __slots__ = ("queue_modes", "subtrees", "units")

    def __init__(self, units: dict[str, UnitCount] | None = None, subtrees: tuple[str, ...] = ()) -> None:
        self.units: dict[str, UnitCount] = {} if units is None else units
        """The units that the request asks for, by counted resource."""
        self.subtrees = subtrees
        """The subtrees that the request names, in shared or exclusive mode."""
        self.queue_modes: dict[str, QueueMode] | None = None
        """The mode of a waiting request in each of its queues, with the queues of the subtrees above its names. None if these
        are the queues of its names only, and no search has needed the dict."""


def details_of(
    shared: tuple[str, ...], exclusive: tuple[str, ...], units: dict[str, UnitCount] | None = None
) -> Details | None:
    """Return the details of a request with these locks, or None if it names neither units nor subtrees."""
    subtrees = tuple([name for name in exclusive + shared if is_subtree(name)])
    return Details(units, subtrees) if units or subtrees else None


_NO_UNITS: Final[dict[str, UnitCount]] = {}


@dataclass(slots=True, init=False, eq=False, repr=False)
class Request:
    """One request for a set of locks, from its arrival to its release. It is also the command that asks for the locks.

    The client sets the first block of fields. A name occurs once: in `shared`, in `exclusive`, or in
    `units`. The lock manager sets the second block when the request arrives. Times are
    milliseconds of the lock manager's clock, except `since_unix_ms`.
    """

    # More than 16 fields: a server may have millions of requests, and each object takes memory.
    shared: tuple[str, ...]
    exclusive: tuple[str, ...]
    queue_timeout_ms: float
    transaction_timeout_ms: float
    transaction: str | None
    priority: float
    ref: str | None
    release_on_disconnect: bool
    origin: Origin | None
    context: Context
    """The lock manager reads neither `context` nor `ref`."""

    id: int
    owner: Owner
    state: State
    fence: int
    since: float
    """When the request entered its state: for a waiting request its arrival, for a held request its
    grant."""
    since_unix_ms: float
    """`since` in milliseconds since the Unix epoch, for display."""
    deadline: int
    """When the request expires, rounded up to a whole millisecond, so that it never expires early.
    `NEVER` for a wait without a time limit."""
    queue_entry: QueueEntry | None
    """The entry of a waiting request, by priority and arrival, in every queue that is not in `moved`.
    None unless the request waits."""
    moved: dict[str, QueueEntry] | None
    """The entries of the request in queues in which it was moved, by resource. None instead of an empty dict."""
    details: Details | None
    """None if the request needs no `Details`."""
    simple: bool
    """True if the waiting request is in one queue only, and has no transaction. Then all its wait-for edges are within this
    queue."""

    # A class with `__lt__` that is compiled by mypyc has no hash otherwise.
    __hash__: ClassVar[Callable[[Request], int]] = object.__hash__

    # Written out because mypyc compiles it: the `__init__` that `dataclass` generates stays interpreted.
    def __init__(
        self,
        shared: tuple[str, ...] = (),
        exclusive: tuple[str, ...] = (),
        queue_timeout_ms: float = 10_000,
        transaction_timeout_ms: float = 10_000,
        transaction: str | None = None,
        priority: float = 0,
        ref: str | None = None,
        release_on_disconnect: bool = False,
        origin: Origin | None = None,
        context: Context = NO_CONTEXT,
    ) -> None:
        self.shared = shared
        self.exclusive = exclusive
        self.queue_timeout_ms = queue_timeout_ms
        self.transaction_timeout_ms = transaction_timeout_ms
        self.transaction = transaction
        self.priority = priority
        self.ref = ref
        self.release_on_disconnect = release_on_disconnect
        self.origin = origin
        self.context = context
        self.fence = 0
        self.queue_entry = None
        self.moved = None
        self.details = None

    def __repr__(self) -> str:
        resources = [f"{self.mode(name)}:{name}" for name in self.names()]
        state = f"{self.id} {self.state.name}" if hasattr(self, "state") else "new"
        return f"<Request {state} {resources} of {self.transaction or 'no transaction'}>"

    def __lt__(self, other: Request) -> bool:
        """Return False. Two queue entries with the same priority and ticket are compared by their requests: none is earlier."""
        return False

    def __le__(self, other: Request) -> bool:
        """Return True: see `__lt__`."""
        return True

    def entry(self, name: str) -> QueueEntry:
        """Return the entry of this waiting request in the wait queue of `name`."""
        if self.moved is not None and name in self.moved:
            return self.moved[name]
        return self.queue_entry  # type: ignore[return-value] # it waits

    def move(self, name: str, entry: QueueEntry) -> None:
        """Move this request to the position of `entry` in the wait queue of `name`.

        A request that returns to its original position counts as not moved.
        """
        moved = self.moved or {}
        if self.queue_entry is not None and entry[:2] == self.queue_entry[:2]:  # negated priority and ticket
            moved.pop(name, None)
        else:
            moved[name] = (entry[0], entry[1], self)
        self.moved = moved or None

    @property
    def units(self) -> dict[str, UnitCount]:
        """The units that the request asks for, by counted resource."""
        return _NO_UNITS if self.details is None else self.details.units

    def queue_mode(self, name: str) -> QueueMode:
        """Return the mode of this waiting request in the queue of `name`: one of its names, or a subtree above one of them.

        For a request with many names, the first call builds a dict. So calls for all names take linear time in total.
        """
        if self.details is None:
            if len(self.exclusive) <= MAX_LINEAR_SEARCH:
                return X if name in self.exclusive else S
            self.details = Details()
        if self.details.queue_modes is None:
            self.details.queue_modes = dict(self.modes())
        return self.details.queue_modes[name]

    def mode(self, name: str) -> Mode:
        """Return the mode in which this request names `name`."""
        if self.details is not None and name in self.details.units:
            return Mode.UNITS
        return Mode.EXCLUSIVE if self.queue_mode(name) == X else Mode.SHARED

    def modes(self) -> Iterator[tuple[str, QueueMode]]:
        """Return each requested resource once, with its mode: `S`, `X` or `U`."""
        if self.details is None:  # nearly all requests name resources in one mode
            if not self.shared:
                return zip(self.exclusive, repeat(X))
            if not self.exclusive:
                return zip(self.shared, repeat(S))
        return chain(zip(self.exclusive, repeat(X)), zip(self.shared, repeat(S)), zip(self.units, repeat(U)))

    def queue_modes(self) -> Iterable[tuple[str, QueueMode]]:
        """Return each queue of this waiting request by the name of its resource, and the mode in this queue."""
        if self.details is None or self.details.queue_modes is None:
            return self.modes()
        return self.details.queue_modes.items()

    def queues(self) -> Iterable[str]:
        """Return the names of the resources in whose queues this request waits: its names, and the subtrees above them."""
        if self.details is None or self.details.queue_modes is None:
            return self.names()
        return self.details.queue_modes

    def lock_text(self, name: str, mode: QueueMode) -> str:
        """Return one lock of this request as clients write it. `name` and `mode` are a pair of `modes`."""
        return lock_text(name, mode, self.units[name] if mode == U else None)

    def names(self) -> tuple[str, ...]:
        """Return the names of all requested resources, each once."""
        if self.details is not None and self.details.units:
            return (*self.exclusive, *self.shared, *self.details.units)
        return self.exclusive + self.shared

    def name_count(self) -> int:
        """Return the number of requested resources."""
        count = len(self.exclusive) + len(self.shared)
        return count if self.details is None else count + len(self.details.units)

    def queue_count(self) -> int:
        """Return the number of queues in which this waiting request waits: see `queues`."""
        details = self.details
        return self.name_count() if details is None or details.queue_modes is None else len(details.queue_modes)
