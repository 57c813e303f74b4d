"""Detects requests that timed out waiting for a lock of the same process.

A request does not wait for locks of its own transaction, but the server knows a transaction only by its name. So a program
that forgets the argument `transaction` blocks itself until the queue timeout. The server can't detect this. The client can,
since it knows the ids of the locks that this process holds.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from weakref import WeakSet

from genie.client.commands import Request, RequestState
from genie.client.config import logger
from genie.client.live_requests import LiveRequests
from genie.errors import Blocker, ConnectionLost, GenieError

_clients: WeakSet[LiveRequests] = WeakSet()
"""The requests of all clients of this process."""
_clients_mutex = threading.Lock()
"""Protects `_clients`, since any thread may create a client."""


def register(requests: LiveRequests) -> None:
    """Add the requests of a new client. They disappear when the client is garbage collected."""
    with _clients_mutex:
        _clients.add(requests)


def self_blocking_hint(request: Request, own_requests: LiveRequests, blockers: Sequence[Blocker]) -> str:
    """Return a hint for the error of a timed-out request if this process itself holds a blocker, else an empty string.

    `own_requests` are the requests of the client that made `request`. If both the blocker and the request name a
    transaction, or the blocker holds units, the wait was intended, so there is no hint.
    """
    for blocker in blockers:
        both_have_transactions = blocker.transaction is not None and request.transaction is not None
        has_units = blocker.units is not None
        if blocker.state != "held" or both_have_transactions or has_units:
            continue
        holder = _find_holder(blocker, own_requests)
        if holder is not None:
            return (
                f"{holder} itself holds {blocker.id}: to lock several times in one transaction, use `tx.lock` in "
                "client.run_transaction"
            )
    return ""


def _find_holder(blocker: Blocker, own_requests: LiveRequests) -> str | None:
    """Return "this client" or "another client of this process" if it holds the blocker, else None."""
    if _is_held_by(own_requests, blocker):
        return "this client"
    with _clients_mutex:
        clients = list(_clients)
    if any(_is_held_by(requests, blocker) for requests in clients):
        return "another client of this process"
    return None


def warn_unconfirmed(requests: Sequence[Request], problem: GenieError) -> None:
    """Log that the server has not confirmed the release of locks, after the work under these locks has succeeded."""
    names = ", ".join(resource for request in requests for resource in request.resources)
    if isinstance(problem, ConnectionLost):  # the client was closed
        logger.warning(
            "the release of %s was not confirmed, and is not retried: %s. The locks may stay held until the transaction timeout",
            names,
            problem,
        )
    else:
        logger.warning("the release of %s was not confirmed, and continues in the background: %s", names, problem)


def _is_held_by(client_requests: LiveRequests, blocker: Blocker) -> bool:
    """Return whether a blocker is a lock of the client with these requests.

    Ids are unique only within one server, and clients of one process may use several servers. So the name of the
    resource is compared, too.
    """
    lock = client_requests.by_id.get(blocker.id)
    if lock is None or lock.state is not RequestState.HELD:
        return False
    names = [resource.partition(":")[2] for resource in lock.resources]  # without the mode
    return blocker.resource in names
