"""Finds requests that waited for a lock of their own program.

LiveRequests never wait for locks of their own transaction, but the server knows two requests to be of one transaction by their
`transaction` only. A program that forgets it waits for itself until the queue timeout. The server can't tell; the client
can: it knows the ids of the locks that this process holds.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from weakref import WeakSet

from genie.client.commands import Request, State
from genie.client.pending import LiveRequests
from genie.errors import Blocker

_clients: WeakSet[LiveRequests] = WeakSet()
"""The requests of all clients of this process."""
_guard = threading.Lock()
"""Guards `_clients`, which every thread that makes a client adds to."""


def register(requests: LiveRequests) -> None:
    """Add a new client, for as long as it exists."""
    with _guard:
        _clients.add(requests)


def hint(request: Request, own: LiveRequests, blockers: Sequence[Blocker]) -> str:
    """Return what to say of a request that was not granted: empty if this process holds none of its blockers.

    `own` are the requests of its own client. Ids are those of one server, and other clients of this process may be
    connected to another one, so the resource must be the same, too.
    """
    for blocker in blockers:
        if blocker.state != "held" or (blocker.transaction is not None and request.transaction is not None):
            continue
        if _holds(own, blocker):
            return _text(blocker, "this client")
        with _guard:
            clients = list(_clients)
        if any(_holds(requests, blocker) for requests in clients):
            return _text(blocker, "another client of this process")
    return ""


def _holds(requests: LiveRequests, blocker: Blocker) -> bool:
    lock = requests.by_id.get(blocker.id)
    if lock is None or lock.state is not State.HELD:
        return False
    return any(resource.partition(":")[2] == blocker.resource for resource in lock.resources)


def _text(blocker: Blocker, holder: str) -> str:
    return (
        f"{holder} itself holds {blocker.id}: if both requests belong to one transaction, "
        "give both the same transaction=NAME"
    )
