"""Makes the exceptions of the client, from replies of the server or from observations of the client."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

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
"""The `reason` of a `released` message if a `release` ended the lock."""


def not_granted_error(released: Released.Payload, find_hint: Callable[[list[Blocker]], str]) -> LockError:
    """Return the error for a request that ended before it was granted, from the `released` message.

    `find_hint` is called only for a queue timeout, with the blockers of the request. It returns a text about a possible
    mistake of the program, or an empty string.
    """
    match released.reason:
        case "queue-timeout":
            blockers = [row.to_blocker() for row in released.blockers]
            return QueueTimeout(
                id=released.id,
                waited=released.waited / 1000,
                blockers=blockers,
                blockers_total=max(released.blockersTotal, len(released.blockers)),
                hint=find_hint(blockers),
            )
        case "deadlock":
            return Deadlock(id=released.id, cycle=released.cycle, waits=released.waits)
        case "insufficient" if released.free is not None and released.locked is not None:
            return Insufficient(id=released.id, free=int(released.free), locked=int(released.locked))
        case "success":
            return LockError(f"request {released.id} was cancelled by a release of its id", id=released.id)
        case "transaction-timeout":  # the lock expired before the client could use it
            return lock_lost(released)
        case reason:
            return LockError(f"request {released.id} ended before it was granted: {reason}", id=released.id)


def lock_lost(released: Released.Payload) -> LockLost:
    """Return the error for a granted lock that the server ended, from the `released` message."""
    match released.reason:
        case "transaction-timeout":
            duration = f"{released.held / 1000:.3f} s, which is longer" if released.held else "longer"
            message = f"lock {released.id} was held for {duration} than its transaction timeout"
            return TransactionTimeout(message, id=released.id)
        case "disconnected":
            return Disconnected(f"lock {released.id} ended with the session that it was bound to", id=released.id)
        case "success":
            return released_by_id(released.id)
        case reason:
            return LockLost(f"lock {released.id} ended: {reason}", id=released.id)


def released_by_id(id: int) -> LockLost:
    """Return the error for a lock that was released by its id, not by its holder."""
    return LockLost(f"lock {id} was released by its id, not by its holder", id=id)


def lock_ended(released: Released.Payload) -> LockLost:
    """Return the error for the extension of a lock that had ended before, for example because another client released it."""
    if released.reason == SUCCESS:
        return already_released(released.id)
    return lock_lost(released)


def session_expired(id: int) -> Disconnected:
    """Return the error for a lock that ended because its client was disconnected for the session timeout."""
    return Disconnected(f"lock {id} ended with its session: no server has answered within its session_timeout", id=id)


def session_taken_over(id: int) -> Disconnected:
    """Return the error for a lock of a session that another process uses."""
    return Disconnected(
        f"lock {id} is lost: another process with the same session=… took over the session; give each process its own",
        id=id,
    )


def client_closed(id: int) -> Disconnected:
    """Return the error for a lock that ended because its client was closed."""
    return Disconnected(f"lock {id} ended with its session: the client was closed", id=id)


def already_released(id: int) -> LockLost:
    """Return the error for a call on a lock that was released before."""
    return LockLost(f"lock {id} was released", id=id)


def expired_locally(id: int, transaction_timeout: float) -> TransactionTimeout:
    """Return the error for a lock whose transaction timeout (seconds) has passed on this client's clock."""
    return TransactionTimeout(
        f"lock {id} was held for longer than its transaction timeout of {transaction_timeout:g} s", id=id
    )


def unknown_to_server(id: int) -> LockLost:
    """Return the error for a lock whose id the server does not know."""
    return LockLost(f"lock {id} is unknown to the server, which has lost its state", id=id)


def session_lost(id: int) -> LockLost:
    """Return the error for a lock whose session the server no longer knows."""
    return LockLost(f"lock {id} is lost: the session ended, or the server was restarted and has lost its state", id=id)


def from_error_reply(reply: Error.Payload) -> GenieError:
    """Convert an `error` reply of the server to an exception."""
    if reply.code == Code.UNAVAILABLE:
        message = reply.message
        if reply.leader and not message.endswith(reply.leader):
            message = f"{message} (the leader is {reply.leader})"
        return Unavailable(message)
    return RequestRejected(reply.code, reply.message, ref=reply.ref, id=reply.id)


def copy_rejection(error: RequestRejected) -> RequestRejected:
    """Copy an error, to raise it in another call. An exception object that is raised twice has the traceback of both."""
    return RequestRejected(error.code, error.message, ref=error.ref, id=error.id)


def copy_lock_lost(error: LockLost) -> LockLost:
    """Copy an error, to raise it in another call. An exception object that is raised twice has the traceback of both."""
    return type(error)(str(error), id=error.id)


def reject_pickling(client: object) -> NoReturn:
    """Raise TypeError because a client is being pickled, for example to pass it to another process."""
    raise TypeError(f"a {type(client).__name__} of genie can't be pickled: make a new client in the other process")
