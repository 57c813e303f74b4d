"""Every error that Genie raises or sends, in one place.

GenieError
├── LockError                 about one request for locks
│   ├── QueueTimeout          it waited too long; says who was in the way; also a TimeoutError
│   ├── Deadlock              it would have closed a cycle of held locks; says which
│   ├── Insufficient          too little of what it could take is free; says how much
│   └── LockLost              a lock that was held is not held any more
│       ├── TransactionTimeout
│       ├── Disconnected
│       └── StaleFence        a store has seen the fence of a later holder
├── RequestRejected           the server's `error`: a code, and a message that names the field
├── Unavailable               no server could be reached, or it can't reach its store
└── ConnectionLost            the connection ended while an answer was due
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Code(StrEnum):
    """The codes of the wire's `error`."""

    BAD_JSON = "bad-json"
    BAD_MESSAGE = "bad-message"
    BAD_REQUEST = "bad-request"
    UNKNOWN_COMMAND = "unknown-command"
    UNKNOWN_ID = "unknown-id"
    UNKNOWN_NAMESPACE = "unknown-namespace"
    UNSUPPORTED_PROTOCOL = "unsupported-protocol"
    REF_CONFLICT = "ref-conflict"
    LINE_TOO_LONG = "line-too-long"
    TOO_MANY = "too-many"
    UNAUTHORIZED = "unauthorized"
    UNAVAILABLE = "unavailable"


class GenieError(Exception):
    """Anything that goes wrong with Genie."""


class RequestRejected(GenieError):
    """A command that was refused and changed nothing.

    `code` is one of `Code` (or one that a newer server knows), `message` says what was wrong and what would be
    right; `ref` and `id` say of which request, where known.
    """

    def __init__(self, code: str, message: str, *, ref: str | None = None, id: int | None = None) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.ref = ref
        self.id = id


class Unavailable(GenieError):
    """No server answers, or none leads, or it can't reach its store. Ask again later.

    What was asked for has not happened, or is given back as soon as a server can be told.
    """


class ConnectionLost(GenieError):
    """The connection ended before the answer came."""


@dataclass(frozen=True, slots=True)
class Blocker:
    """A request that stood in the way: it held `resource`, or waited for it further ahead.

    `since` is the unix time in seconds at which it was granted (`state` is `held`) or arrived (`queued`). `note` is what
    its client wrote for people.
    """

    id: int
    resource: str
    mode: str
    state: str
    since: float
    transaction: str | None = None
    note: str | None = None

    def __str__(self) -> str:
        owner = "" if self.transaction is None else f" of {self.transaction!r}"
        owner += "" if self.note is None else f" ({self.note})"
        verb = "holds" if self.state == "held" else "waits for"
        return f"{self.id}{owner} {verb} {self.mode}:{self.resource}"


@dataclass(frozen=True, slots=True)
class CycleStep:
    """One step of a deadlock: the request `waiter` asks for `resource`, which the request `holder` holds.

    `note` is that of the waiter.
    """

    resource: str
    waiter: int
    holder: int
    note: str | None = None


class LockError(GenieError):
    """A request for locks did not end as it was meant to. `id` is the request's."""

    def __init__(self, message: str, *, id: int | None = None) -> None:
        super().__init__(message)
        self.id = id


class QueueTimeout(LockError, TimeoutError):
    """The request waited `waited` seconds and was not granted.

    `blockers` are the first ten that stood in its way at the end, `blockers_total` how many there were (beyond
    1,000: at least). `hint` is what may be wrong in the program itself, where one of them is a lock of the same process
    and the two requests have no common `transaction`; else it is empty.
    """

    def __init__(
        self,
        *,
        id: int | None,
        waited: float,
        blockers: Sequence[Blocker] = (),
        blockers_total: int | None = None,
        hint: str = "",
    ) -> None:
        self.hint = hint
        self.waited = waited
        self.blockers = tuple(blockers)
        self.blockers_total = len(self.blockers) if blockers_total is None else blockers_total
        more = self.blockers_total - len(self.blockers)
        names = ", ".join(map(str, self.blockers)) + (f" and {more} more" if more > 0 else "")
        message = f"request {id} was not granted within {waited:.3f} s" + (f": {names}" if names else "")
        super().__init__(message + (f" ({hint})" if hint else ""), id=id)


class Deadlock(LockError):
    """The request would have closed a cycle of held locks, so it was not queued. Release what you hold and retry.

    `cycle` are the names of the transactions, each waiting for the next and the last for the first, which is this
    request's own; `waits` says on which resource.
    """

    def __init__(self, *, id: int | None, cycle: Sequence[str], waits: Sequence[CycleStep] = ()) -> None:
        self.cycle = tuple(cycle)
        self.waits = tuple(waits)
        super().__init__(f"request {id} would deadlock: {' → '.join([*self.cycle, *self.cycle[:1]])}", id=id)


class Insufficient(LockError):
    """What is free of what a request could take does not reach its target, so it took nothing.

    `free` and `locked` are the two sums of weights; what others wait for counts as locked.
    """

    def __init__(self, *, id: int | None, free: int, locked: int) -> None:
        self.free, self.locked = free, locked
        super().__init__(f"request {id} took nothing: {free} is free, {locked} is locked by others", id=id)


class LockLost(LockError):
    """A lock that was held is not held any more. Undo what was done under it."""


class TransactionTimeout(LockLost):
    """The lock was held for longer than its `transaction_timeout`."""


class Disconnected(LockLost):
    """The connection that the lock was bound to has ended."""


class StaleFence(LockLost):
    """A store refused a read or a write because a lock with a greater fence was used there: this holder is too late.

    `fence` is that of the refused lock, `seen` the greatest one that the store has seen. Nothing was read or written.
    """

    def __init__(self, message: str, *, fence: int, seen: int) -> None:
        super().__init__(message)
        self.fence = fence
        self.seen = seen
