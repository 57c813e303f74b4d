"""The events of one step of the lock manager, in order.

The server turns each into a stored record, a message, or both.
"""

from __future__ import annotations

from dataclasses import dataclass

from genie.core.model import Mode, Owner, Reason, Request, Weight


@dataclass(slots=True)
class Queued:
    """A request arrived, got its id, and waits. It may end in the same step."""

    request: Request


@dataclass(slots=True)
class Granted:
    """A request arrived and was granted immediately, as most are. Stands for `Queued` and `Locked`."""

    request: Request


@dataclass(slots=True)
class Taken:
    """A `Take` was granted immediately; `request` names the resources that it got."""

    request: Request


@dataclass(slots=True)
class Locked:
    """A waiting request was granted after `waited_ms`: it holds all its resources.

    `request.fence` is its fencing token.
    """

    request: Request
    waited_ms: float


@dataclass(slots=True)
class Released:
    """A request ended.

    It was held since `request.since` if it has a fencing token, else it waited since then.
    """

    request: Request
    reason: Reason


@dataclass(slots=True)
class TimedOut(Released):
    """Reason `queue-timeout`: the first blockers at the time of the timeout, and how many there were."""

    blockers: tuple[Blocker, ...]
    blockers_total: int


@dataclass(slots=True)
class Deadlocked(Released):
    """Reason `deadlock`: the cycle that the request would have closed."""

    cycle: Cycle


@dataclass(slots=True)
class Insufficient(Released):
    """Reason `insufficient`: the available resources of a `Take` weigh less than its target.

    `free` and `locked` are the summed weights of available and unavailable resources.
    """

    free: Weight
    locked: Weight
    as_strings: bool = False


@dataclass(slots=True)
class QueueFull:
    """A request was rejected because it would have to wait and the wait queues are full.

    Its id is not used.
    """

    request: Request


@dataclass(slots=True)
class Extended:
    """A held lock got a new deadline."""

    request: Request
    transaction_timeout_ms: float


@dataclass(slots=True)
class Moved:
    """A waiting request changed its position in a queue. It is stored; the client is not notified."""

    request: Request


@dataclass(slots=True)
class AlreadyEnded:
    """A command named a request that had already ended; `reason` is the reason of its first release."""

    id: int
    reason: Reason


@dataclass(slots=True)
class UnknownId:
    """A command named an id that was never assigned, or whose outcome is no longer remembered."""

    id: int


@dataclass(slots=True)
class NotHeld:
    """`Extend` named a request that still waits."""

    request: Request


@dataclass(slots=True, frozen=True)
class Blocker:
    """One request that blocks another on one resource."""

    id: int
    transaction: str | None
    resource: str
    mode: Mode
    held: bool
    since_unix_ms: int
    note: str | None = None


@dataclass(slots=True, frozen=True)
class Wait:
    """One edge of a cycle: request `waiter` asks for `resource`, which request `holder` holds.

    `note` is the note of the waiting request.
    """

    resource: str
    waiter: int
    holder: int
    note: str | None = None


@dataclass(slots=True, frozen=True)
class Cycle:
    """Owners of which each waits for a lock of the next, and the last for one of the first.

    The victim is the first owner.
    """

    owners: tuple[Owner, ...]
    waits: tuple[Wait, ...]


Event = Queued | Granted | QueueFull | Taken | Locked | Released | Extended | Moved | AlreadyEnded | UnknownId | NotHeld
