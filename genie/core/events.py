"""The events that a step of the lock manager returns.

The server turns each event into a stored record, a message, or both. The frequent events have an `__init__` that is
written out, because mypyc compiles it: the `__init__` that `dataclass` generates stays interpreted. Their subclasses need
one, too: mypyc would call the `__init__` of the base class with the arguments of the subclass.
"""

from __future__ import annotations

from dataclasses import dataclass

from genie.core.context import NO_CONTEXT, Context
from genie.core.model import Owner, Reason, Request, Weight
from genie.lock_modes import Mode, S, UnitCount, X, lock_text


@dataclass(slots=True, init=False)
class Queued:
    """A new request got its id and waits. The request may end in the same step."""

    request: Request

    def __init__(self, request: Request) -> None:
        self.request = request


@dataclass(slots=True, init=False)
class Granted:
    """A request arrived and was granted immediately, the usual case. Replaces `Queued` and `Locked`."""

    request: Request

    def __init__(self, request: Request) -> None:
        self.request = request


@dataclass(slots=True)
class Taken:
    """A `Take` was granted immediately. `request` names the acquired resources."""

    request: Request


@dataclass(slots=True, init=False)
class Locked:
    """A waiting request was granted after `waited_ms`, and now holds all its resources.

    `request.fence` is its fencing token.
    """

    request: Request
    waited_ms: float

    def __init__(self, request: Request, waited_ms: float) -> None:
        self.request = request
        self.waited_ms = waited_ms


@dataclass(slots=True, init=False)
class Released:
    """A request ended.

    A request with a fencing token was held since `request.since`; a request without a token (0)
    waited since then.
    """

    request: Request
    reason: Reason

    def __init__(self, request: Request, reason: Reason) -> None:
        self.request = request
        self.reason = reason


@dataclass(slots=True, init=False)
class TimedOut(Released):
    """A request ended with `queue-timeout`.

    `blockers` are its first blockers at that time, and `blockers_total` is the number of all.
    """

    blockers: tuple[Blocker, ...]
    blockers_total: int

    def __init__(self, request: Request, reason: Reason, blockers: tuple[Blocker, ...], blockers_total: int) -> None:
        self.request = request
        self.reason = reason
        self.blockers = blockers
        self.blockers_total = blockers_total


@dataclass(slots=True, init=False)
class Deadlocked(Released):
    """A request ended with `deadlock`, because it would have closed `cycle`."""

    cycle: Cycle

    def __init__(self, request: Request, reason: Reason, cycle: Cycle) -> None:
        self.request = request
        self.reason = reason
        self.cycle = cycle


@dataclass(slots=True, init=False)
class Insufficient(Released):
    """A `Take` ended with `insufficient`: its available resources weigh less than its target.

    `free` and `locked` are the total weights of the available and the unavailable resources.
    """

    free: Weight
    locked: Weight
    as_strings: bool

    def __init__(
        self, request: Request, reason: Reason, free: Weight, locked: Weight, as_strings: bool = False
    ) -> None:
        self.request = request
        self.reason = reason
        self.free = free
        self.locked = locked
        self.as_strings = as_strings


@dataclass(slots=True)
class QueueFull:
    """A request was rejected because it would have to wait although the wait queues are full, or because of subtrees.

    The client never learns the id that was assigned to the request.
    """

    request: Request
    is_opening: bool = False
    """True if the reason are subtrees: there are too many locks or waiting requests below new subtrees that the request names, too
    many subtrees above its names, or too many directories of its choices, which a search for subtrees would read."""


@dataclass(slots=True)
class GraphFull:
    """A request was rejected because the wait-for graph is too large to find out whether it would deadlock.

    The client never learns the id that was assigned to the request.
    """

    request: Request


@dataclass(slots=True)
class Extended:
    """A held lock got a new deadline."""

    request: Request
    transaction_timeout_ms: float


@dataclass(slots=True)
class Moved:
    """A waiting request changed its position in a queue, which must be stored. The client is not notified."""

    request: Request


@dataclass(slots=True)
class AlreadyEnded:
    """A command named a request that had already ended, with this `reason`."""

    id: int
    reason: Reason


@dataclass(slots=True)
class UnknownId:
    """A command named an id that was never assigned, or a request that ended too long ago to be remembered."""

    id: int


@dataclass(slots=True)
class NotHeld:
    """`Extend` named a request that still waits."""

    request: Request


@dataclass(slots=True, frozen=True)
class Blocker:
    """A request that blocks another request on one resource. `held` is true if it holds the resource, and false if it waits."""

    id: int
    transaction: str | None
    resource: str
    mode: Mode
    held: bool
    since_unix_ms: int
    context: Context = NO_CONTEXT
    units: UnitCount | None = None
    """The units that it holds or waits for, if the resource is counted."""

    @property
    def lock(self) -> str:
        """The lock that it holds or waits for, as clients write it."""
        return lock_text(self.resource, X if self.mode is Mode.EXCLUSIVE else S, self.units)


@dataclass(slots=True)
class Wait:
    """One edge of a cycle: the request `waiter`, which has the `context`, waits for `resource`, which `holder` holds."""

    resource: str
    waiter: int
    holder: int
    context: Context = NO_CONTEXT
    units: UnitCount | None = None
    """The units that `waiter` asks for, if it waits for units. Then it waits until enough units are free, not for this
    holder alone."""


@dataclass(slots=True, frozen=True)
class Cycle:
    """A cycle of owners: each waits for a lock of the next owner, and the last waits for the first.

    The first owner is the victim. `waits` are the edges, in the order of their waiting owners.
    """

    owners: tuple[Owner, ...]
    waits: tuple[Wait, ...]


Event = (
    Queued
    | Granted
    | QueueFull
    | GraphFull
    | Taken
    | Locked
    | Released
    | Extended
    | Moved
    | AlreadyEnded
    | UnknownId
    | NotHeld
)
