"""Who holds, who waits and for whom: for people, without changing anything."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import islice

from genie.core.blame import blame
from genie.core.events import Blocker
from genie.core.model import Request
from genie.core.table import Table


@dataclass(slots=True)
class Row:
    """One request, held or waiting; `blockers` only for one that waits."""

    request: Request
    blockers: tuple[Blocker, ...] = ()
    blockers_total: int = 0


@dataclass(slots=True)
class Inspection:
    """What was asked about: the holders, the queue in order, and how many there are of each beyond the limit."""

    holders: list[Row]
    queue: list[Row]
    holders_total: int
    queue_total: int


def inspect(
    table: Table,
    *,
    resource: str | None = None,
    id: int | None = None,
    transaction: str | None = None,
    limit: int = 100,
) -> Inspection:
    """Look at what matches all that is given; without any, at everything.

    At most `limit` rows, holders first. The queue of one resource is in the order in which it stands; elsewhere
    requests come by arrival.
    """
    holders: Collection[Request]
    queue: Collection[Request]
    if resource is not None:
        found = table.resources.get(resource)
        holders = [] if found is None else found.holders.values()
        queue = [] if found is None or found.line is None else [entry[2] for entry in found.line.entries()]
    elif id is not None:
        request = table.find(id)
        holders = [request] if request is not None and id in table.held else []
        queue = [request] if request is not None and id in table.waiting else []
    elif transaction is not None:
        owner = table.transactions.get(transaction)
        holders = [] if owner is None else owner.held.values()
        queue = [] if owner is None else owner.waiting.values()
    else:
        holders, queue = table.held.values(), table.waiting.values()
    if id is not None or transaction is not None:
        holders = [request for request in holders if _matches(request, id, transaction)]
        queue = [request for request in queue if _matches(request, id, transaction)]
    held = [Row(request) for request in islice(holders, limit)]
    waiting = [Row(request, *blame(table, request)) for request in islice(queue, limit - len(held))]
    return Inspection(held, waiting, len(holders), len(queue))


def _matches(request: Request, id: int | None, transaction: str | None) -> bool:
    return id in (None, request.id) and transaction in (None, request.transaction)
