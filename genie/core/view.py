"""Who holds, who waits and for whom: for people, without changing anything."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from genie.core.blame import blame
from genie.core.events import Blocker
from genie.core.model import HELD, Request
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
    only: str | None = None,
) -> Inspection:
    """Look at what matches all that is given; without any, at everything.

    At most `limit` rows, holders first; of those that `only` names (`holders` or `queue`), if it does. The queue of one resource is in the order in which it stands; elsewhere
    requests come by arrival.
    """
    found = _look(table, resource, id, transaction)
    held = [Row(request) for request in islice(found.holders, 0 if only == "queue" else limit)]
    left = 0 if only == "holders" else limit - len(held)
    waiting = [Row(request, *blame(table, request)) for request in islice(found.queue, left)]
    return Inspection(held, waiting, found.holders_total, found.queue_total)


@dataclass(slots=True)
class _Found:
    holders: Iterable[Request]
    holders_total: int
    queue: Iterable[Request]
    queue_total: int


def _look(table: Table, name: str | None, id: int | None, transaction: str | None) -> _Found:
    if id is not None or transaction is not None:
        return _pick(table, name, id, transaction)
    if name is None:
        return _Found(table.held.values(), len(table.held), table.waiting.values(), len(table.waiting))
    resource = table.look(name)
    if resource is None:
        return _Found((), 0, (), 0)
    line = resource.line
    queue = () if line is None else (entry[2] for entry in line)
    return _Found(resource.holders.values(), len(resource.holders), queue, 0 if line is None else len(line))


def _pick(table: Table, name: str | None, id: int | None, transaction: str | None) -> _Found:
    if id is not None:
        request = table.find(id)
        requests = [] if request is None else [request]
    else:
        owner = None if transaction is None else table.transactions.get(transaction)
        requests = [] if owner is None else [*owner.held.values(), *owner.waiting.values()]
    requests = [
        request
        for request in requests
        if transaction in (None, request.transaction) and (name is None or name in request.names())
    ]
    holders = [request for request in requests if request.state is HELD]
    queue = [request for request in requests if request.state is not HELD]
    return _Found(holders, len(holders), queue, len(queue))
