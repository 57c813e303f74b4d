"""Every error that Genie raises or sends, in one place.

GenieError
├── LockError                 one lock request failed
│   ├── QueueTimeout          the request waited too long; lists the blockers; also a TimeoutError
│   ├── Deadlock              the request would have closed a cycle in the wait-for graph; lists the cycle
│   ├── Insufficient          the free resources of an anyOf request do not reach its target; has the sums
│   └── LockLost              a granted lock is no longer held
│       ├── TransactionTimeout
│       ├── Disconnected
│       └── StaleFence        a store rejected an outdated fencing token
├── RequestRejected           an `error` reply of the server: a code, and a message that names the field
├── Unavailable               no leader could be reached, or the leader can't reach its store
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
    SESSION_TAKEN_OVER = "session-taken-over"


class GenieError(Exception):
    """The base class of all errors of Genie."""


class RequestRejected(GenieError):
    """The server rejected a command, which has changed nothing.

    `code` is one of `Code`, or a code that only a newer server knows. `message` says what is wrong and what is allowed.
    `ref` (the client's reference) and `id` (the server's id) identify the request; None if the reply has none.
    """

    def __init__(self, code: str, message: str, *, ref: str | None = None, id: int | None = None) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.ref = ref
        self.id = id


class Unavailable(GenieError):
    """No server responds, or no server is the leader, or the leader can't reach its store. Retry later.

    Either the request was not executed, or the client releases it as soon as a server can be reached.
    """


class ConnectionLost(GenieError):
    """The connection ended before the reply arrived, or the client was closed."""


@dataclass(frozen=True, slots=True)
class Blocker:
    """A request that blocked another request: the blocker held `resource`, or was ahead in its wait queue.

    `mode` is `shared`, `exclusive` or `units`. With `units`, the blocker holds or waits for `units` units of the resource, of
    which it allows at most `of` in use; otherwise both are None. The resource may be a subtree, such as `accounts/**`.
    `state` is `held` or `queued`. `since` is the Unix time in seconds at which the blocker was granted (`held`) or
    arrived (`queued`). `note` is the text that the blocker's client has set for operators.
    `traceparent` is the trace context of the blocker's request (W3C Trace Context).
    """

    id: int
    resource: str
    mode: str
    state: str
    since: float
    transaction: str | None = None
    note: str | None = None
    traceparent: str | None = None
    units: int | None = None
    of: int | None = None

    def __str__(self) -> str:
        owner = "" if self.transaction is None else f" of {self.transaction!r}"
        owner += "" if self.note is None else f" ({self.note})"
        verb = "holds" if self.state == "held" else "waits for"
        mode = self.mode if self.units is None else f"{self.units}/{self.of}"
        return f"{self.id}{owner} {verb} {mode}:{self.resource}"


@dataclass(frozen=True, slots=True)
class CycleStep:
    """One edge of a deadlock's cycle: the request `waiter` waits for `resource`, which the request `holder` holds.

    `waiter` and `holder` are ids. `note` and `traceparent` belong to the waiting request. If it waits for units of a counted
    resource, `units` is their number and `of` the limit; otherwise both are None. Then the request waits until enough units
    are free, and `holder` is one of the requests that use them.
    """

    resource: str
    waiter: int
    holder: int
    note: str | None = None
    traceparent: str | None = None
    units: int | None = None
    of: int | None = None

    def __str__(self) -> str:
        return self.resource if self.units is None else f"{self.units}/{self.of}:{self.resource}"


class LockError(GenieError):
    """A lock request failed. `id` is the id of the request, or None if the server did not assign one."""

    def __init__(self, message: str, *, id: int | None = None) -> None:
        super().__init__(message)
        self.id = id


class QueueTimeout(LockError, TimeoutError):
    """The request waited `waited` seconds and was not granted.

    `blockers` are the first ten requests that blocked this request when it timed out. `blockers_total` is the number of
    all blockers (above 1,000 a lower bound). `hint` is not empty if the same process holds a blocker, and one of the two
    requests has no `transaction`: the program may have forgotten to pass the same name to both.
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
        """A possible mistake of the program; empty: none was found."""
        self.waited = waited
        """Seconds in the queue."""
        self.blockers = tuple(blockers)
        """The first ten blockers."""
        self.blockers_total = len(self.blockers) if blockers_total is None else blockers_total
        omitted_count = self.blockers_total - len(self.blockers)
        message = f"request {id} was not granted {f'within {waited:.3f} s' if waited else 'immediately'}"
        if self.blockers:
            message += f": {', '.join(map(str, self.blockers))}"
            if omitted_count > 0:
                message += f" and {omitted_count} more"
        if hint:
            message += f" ({hint})"
        super().__init__(message, id=id)


class Deadlock(LockError):
    """The request would have closed a cycle in the wait-for graph, so it was rejected. Release your locks and retry.

    `cycle` lists the names of the transactions, beginning with that of this request. Each transaction waits for the next
    one, and the last waits for the first. `waits` lists the edges of the cycle, with the resource of each wait.
    """

    def __init__(self, *, id: int | None, cycle: Sequence[str], waits: Sequence[CycleStep] = ()) -> None:
        self.cycle = tuple(cycle)
        """The names of the transactions of the cycle, beginning with that of this request."""
        self.waits = tuple(waits)
        closed_cycle = [*self.cycle, *self.cycle[:1]]  # ends with the first transaction
        text = " → ".join(closed_cycle)
        if len(self.waits) == len(self.cycle):
            steps = [f"{step} of {name}" for step, name in zip(self.waits, closed_cycle[1:], strict=True)]
            text = f"{closed_cycle[0]} would wait for {', which waits for '.join(steps)}"
        super().__init__(f"request {id} would deadlock: {text}", id=id)


class Insufficient(LockError):
    """The free resources of an anyOf request do not reach its target, so the request has locked nothing.

    `free` and `locked` are the sums of the weights of the free and of the locked resources. A resource that other
    requests wait for counts as locked.
    """

    def __init__(self, *, id: int | None, free: int, locked: int) -> None:
        self.free = free
        self.locked = locked
        super().__init__(f"request {id} locked nothing: {free} is free, {locked} is locked by others", id=id)


class LockLost(LockError):
    """A granted lock is no longer held. Another client may hold it now: roll back the work that the lock protected."""


class TransactionTimeout(LockLost):
    """The lock was held for longer than its `transaction_timeout`."""


class Disconnected(LockLost):
    """The connection or the session that the lock was bound to has ended."""


class StaleFence(LockLost):
    """A store rejected a read or a write, because the lock was granted again since, with a greater fencing token.

    `fence` is the fencing token of the rejected lock. `seen` is the greatest fencing token that the store has seen.
    Nothing was read or written.
    """

    def __init__(self, message: str, *, fence: int, seen: int) -> None:
        super().__init__(message)
        self.fence = fence
        self.seen = seen
