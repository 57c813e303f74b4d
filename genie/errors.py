"""Every error that Genie raises or sends, in one place.

GenieError
├── LockError                 one lock request failed
│   ├── QueueTimeout          it waited too long; has the blockers; also a TimeoutError
│   ├── Deadlock              it would have closed a cycle in the wait-for graph; has the cycle
│   ├── Insufficient          the free resources of an anyOf request do not reach its target; has the sums
│   └── LockLost              a granted lock is not held any more
│       ├── TransactionTimeout
│       ├── Disconnected
│       └── StaleFence        a store rejected an outdated fencing token
├── RequestRejected           an `error` reply of the server: a code, and a message that names the field
├── Unavailable               no leader could be reached, or it can't reach its store
└── ConnectionLost            the connection ended before the reply
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Code(StrEnum):
    """The codes of an `error` reply in the wire protocol."""

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
    """The base class of all errors of Genie."""


class RequestRejected(GenieError):
    """A command was rejected and has changed nothing.

    `code` is one of `Code`, or an unknown one from a newer server. `message` says what is wrong and what would be
    right. `ref` and `id` identify the request if they are known.
    """

    def __init__(self, code: str, message: str, *, ref: str | None = None, id: int | None = None) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.ref = ref
        self.id = id


class Unavailable(GenieError):
    """No server responds, or none is the leader, or the leader can't reach its store. Retry later.

    The request was not executed, or is released as soon as a server can be reached.
    """


class ConnectionLost(GenieError):
    """The connection ended before the reply arrived, or the client was closed."""


@dataclass(frozen=True, slots=True)
class Blocker:
    """A request that blocked another one: it held `resource`, or was ahead in its wait queue.

    `since` is the Unix time in seconds at which it was granted (`state` is `held`) or arrived (`queued`). `note` is the
    text that its client has set for operators.
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
    """One edge of a deadlock's cycle: the request `waiter` waits for `resource`, which the request `holder` holds.

    `note` is that of the waiter.
    """

    resource: str
    waiter: int
    holder: int
    note: str | None = None


class LockError(GenieError):
    """A lock request failed. `id` is its id."""

    def __init__(self, message: str, *, id: int | None = None) -> None:
        super().__init__(message)
        self.id = id


class QueueTimeout(LockError, TimeoutError):
    """The request waited `waited` seconds and was not granted.

    `blockers` are the first ten of its last blockers, `blockers_total` is their number (a lower bound above 1,000).
    `hint` is set if one of them is a lock of the same process and the two requests have no common `transaction`, which
    may be a defect of the program; else it is empty.
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
        omitted = self.blockers_total - len(self.blockers)
        listed = ", ".join(map(str, self.blockers)) + (f" and {omitted} more" if omitted > 0 else "")
        message = f"request {id} was not granted within {waited:.3f} s" + (f": {listed}" if listed else "")
        super().__init__(message + (f" ({hint})" if hint else ""), id=id)


class Deadlock(LockError):
    """The request would have closed a cycle in the wait-for graph, so it was rejected. Release your locks and retry.

    `cycle` has the names of the transactions: each waits for the next, and the last for the first, which is that of
    this request. `waits` has the resource of each wait.
    """

    def __init__(self, *, id: int | None, cycle: Sequence[str], waits: Sequence[CycleStep] = ()) -> None:
        self.cycle = tuple(cycle)
        self.waits = tuple(waits)
        super().__init__(f"request {id} would deadlock: {' → '.join([*self.cycle, *self.cycle[:1]])}", id=id)


class Insufficient(LockError):
    """The free resources of an anyOf request do not reach its target, so it has locked nothing.

    `free` and `locked` are the two sums of weights; a resource that others wait for counts as locked.
    """

    def __init__(self, *, id: int | None, free: int, locked: int) -> None:
        self.free, self.locked = free, locked
        super().__init__(f"request {id} locked nothing: {free} is free, {locked} is locked by others", id=id)


class LockLost(LockError):
    """A granted lock is not held any more, so another client may hold it: roll back the work that it protected."""


class TransactionTimeout(LockLost):
    """The lock was held for longer than its `transaction_timeout`."""


class Disconnected(LockLost):
    """The connection or the session that the lock was bound to has ended."""


class StaleFence(LockLost):
    """A store rejected a read or a write, because it has seen a greater fencing token: the lock was granted again since.

    `fence` is the fencing token of the rejected lock, `seen` the greatest one that the store has seen. Nothing was read
    or written.
    """

    def __init__(self, message: str, *, fence: int, seen: int) -> None:
        super().__init__(message)
        self.fence = fence
        self.seen = seen
