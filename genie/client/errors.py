"""From what the server says to the errors that people catch."""

from __future__ import annotations

from collections.abc import Callable

from genie.errors import (
    Blocker,
    Code,
    Deadlock,
    Disconnected,
    GenieError,
    Insufficient,
    LockError,
    LockLost,
    QueueTimeout,
    RequestRejected,
    TransactionTimeout,
    Unavailable,
)
from genie.protocol.messages import Error, Released

SUCCESS = "success"


def not_granted(told: Released.Payload, hint: Callable[[list[Blocker]], str]) -> LockError:
    """Why a request that waited will not be granted. `hint` finds what a program may do wrong where it waited too long."""
    match told.reason:
        case "queue-timeout":
            blockers = [row.blocker() for row in told.blockers]
            return QueueTimeout(
                id=told.id,
                waited=told.waited / 1000,
                blockers=blockers,
                blockers_total=max(told.blockersTotal, len(told.blockers)),
                hint=hint(blockers),
            )
        case "deadlock":
            return Deadlock(id=told.id, cycle=told.cycle, waits=told.waits)
        case "insufficient" if told.free is not None and told.locked is not None:
            return Insufficient(id=told.id, free=int(told.free), locked=int(told.locked))
        case "success":
            return LockError(f"request {told.id} was cancelled by a release of its id", id=told.id)
        case "transaction-timeout":  # it was granted, and it ended, while there was no connection
            return lock_lost(told)
        case reason:
            return LockError(f"request {told.id} ended before it was granted: {reason}", id=told.id)


def lock_lost(told: Released.Payload) -> LockLost:
    """Why a lock is not held any more."""
    match told.reason:
        case "transaction-timeout":
            held = f"was held for {told.held / 1000:.3f} s, which is " if told.held else "was held for "
            return TransactionTimeout(f"lock {told.id} {held}longer than its transaction timeout", id=told.id)
        case "disconnected":
            return Disconnected(f"lock {told.id} ended with the connection that it was bound to", id=told.id)
        case "success":
            return LockLost(f"lock {told.id} was released by its id, not by its holder", id=told.id)
        case reason:
            return LockLost(f"lock {told.id} ended: {reason}", id=told.id)


def lock_ended(told: Released.Payload) -> LockLost:
    """Why a lock that may be another client's can't be extended."""
    if told.reason == SUCCESS:
        return already_released(told.id)
    return lock_lost(told)


def session_expired(id: int) -> Disconnected:
    """A lock that ends with its session, when there was no connection for the session's timeout."""
    return Disconnected(f"lock {id} ended with its session: there was no connection for its session_timeout", id=id)


def client_closed(id: int) -> Disconnected:
    """The same, when the client was closed."""
    return Disconnected(f"lock {id} ended with its session: the client was closed", id=id)


def already_released(id: int) -> LockLost:
    """A lock that this client has released."""
    return LockLost(f"lock {id} was released", id=id)


def expired_locally(id: int, hold: float) -> TransactionTimeout:
    """A lock whose time has passed on this client's clock."""
    return TransactionTimeout(f"lock {id} was held for longer than its transaction timeout of {hold:g} s", id=id)


def unknown_to_server(id: int) -> LockLost:
    """A lock that the server knows nothing of."""
    return LockLost(f"lock {id} is unknown to the server, which has unknown_to_server what was held", id=id)


def session_lost(id: int) -> LockLost:
    """A lock of a session that the server doesn't know any more."""
    return LockLost(
        f"lock {id} is lost: the session ended, or the server was started again and has unknown_to_server what was held",
        id=id,
    )


def from_error_reply(told: Error.Payload) -> GenieError:
    """What an `error` means."""
    if told.code == Code.UNAVAILABLE:
        leader = f" (the leader is {told.leader})" if told.leader else ""
        return Unavailable(f"{told.message}{leader}")
    return RequestRejected(told.code, told.message, ref=told.ref, id=told.id)


def copy_rejection(error: RequestRejected) -> RequestRejected:
    """The same error, to be raised by another call."""
    return RequestRejected(error.code, error.message, ref=error.ref, id=error.id)


def copy_lock_lost(error: LockLost) -> LockLost:
    """The same error, to be raised anew: an exception that is raised twice mixes up what it came of."""
    return type(error)(str(error), id=error.id)
