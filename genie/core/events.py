"""What a step did, in order. The shell turns each into a stored record, a message, or both."""

from __future__ import annotations

from dataclasses import dataclass

from genie.core.model import Mode, Owner, Reason, Request, Weight


@dataclass(slots=True)
class Queued:
    """A request arrived, has its id, and waits; or it ends in the same step."""

    request: Request


@dataclass(slots=True)
class Granted:
    """A request arrived and is held at once, as nearly all are: `Queued` and `Locked` in one."""

    request: Request


@dataclass(slots=True)
class Taken:
    """The same for a `Take`: `request` names what it took."""

    request: Request


@dataclass(slots=True)
class Locked:
    """Everything that the request names is held now; `request.fence` is its fencing token. It waited so long (ms)."""

    request: Request
    waited_ms: float


@dataclass(slots=True)
class Released:
    """A request ended: after it was held, where it has a fence, else after it waited; since `request.since`."""

    request: Request
    reason: Reason


@dataclass(slots=True)
class TimedOut(Released):
    """`queue-timeout`: who stood in its way at the end, the first ten, and how many there were."""

    blockers: tuple[Blocker, ...]
    blockers_total: int


@dataclass(slots=True)
class Deadlocked(Released):
    """`deadlock`: the cycle that it would have closed."""

    cycle: Cycle


@dataclass(slots=True)
class Insufficient(Released):
    """`insufficient`: what a `Take` could have taken does not reach its target. The two sums of weights."""

    free: Weight
    locked: Weight
    as_strings: bool = False


@dataclass(slots=True)
class QueueFull:
    """A request would have to wait, and no line may grow. It was not taken up; its id is nobody's."""

    request: Request


@dataclass(slots=True)
class Extended:
    """A held lock has a new deadline."""

    request: Request
    transaction_timeout_ms: float


@dataclass(slots=True)
class Moved:
    """A waiting request has another place in one of its lines. Nobody is told; it is stored."""

    request: Request


@dataclass(slots=True)
class AlreadyEnded:
    """A command named a request that has ended before: its first reason again."""

    id: int
    reason: Reason


@dataclass(slots=True)
class UnknownId:
    """A command named an id that was never given out, or is long forgotten."""

    id: int


@dataclass(slots=True)
class NotHeld:
    """`Extend` named a request that still waits."""

    request: Request


@dataclass(slots=True, frozen=True)
class Blocker:
    """One request that stands in another's way on one resource."""

    id: int
    transaction: str | None
    resource: str
    mode: Mode
    held: bool
    since_unix_ms: int
    note: str | None = None


@dataclass(slots=True, frozen=True)
class Wait:
    """One step of a cycle: `waiter` asks for `resource`, which `holder` holds (both are request ids).

    `note` is that of the waiting request.
    """

    resource: str
    waiter: int
    holder: int
    note: str | None = None


@dataclass(slots=True, frozen=True)
class Cycle:
    """Owners each of whom waits for a lock that the next one holds, the last for the first. The victim is first."""

    owners: tuple[Owner, ...]
    waits: tuple[Wait, ...]


Event = Queued | Granted | QueueFull | Taken | Locked | Released | Extended | Moved | AlreadyEnded | UnknownId | NotHeld
