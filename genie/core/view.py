"""Who stands in a waiting request's way, for its `queue-timeout` and for those who look."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from genie.core.events import Blocker
from genie.core.grant import conflicting_holders
from genie.core.lock_table import LockTable
from genie.core.model import HELD, Mode, QueueEntry, Request

MAX_LISTED_BLOCKERS = 10
"""Blockers told by name."""
MAX_INSPECTED = 32
"""Resources, and requests on each, that are looked at for the blocked_resources of one that begins to wait."""
MAX_COUNTED_BLOCKERS = 1000
"""Blockers counted exactly. Beyond it the total is a lower bound."""


def find_blockers(table: LockTable, request: Request) -> tuple[tuple[Blocker, ...], int]:
    """The first ten that a waiting request waits for, and how many there are (beyond 1,000: at least).

    One that stands in the way on two resources counts twice.
    """
    found = _blockers(table, request)
    named = tuple(_blocker(table, *one) for one in islice(found, MAX_LISTED_BLOCKERS))
    return named, len(named) + sum(1 for _ in islice(found, MAX_COUNTED_BLOCKERS - len(named)))


def sample_blockers(
    table: LockTable, request: Request, limit: int, *, count: bool
) -> tuple[tuple[Blocker, ...], int, int]:
    """The same in a bounded time, for those who look at many: at most so many `limit` at who might be in the way.

    Without `count` it ends with the tenth. Returns the named, how many were found, and how many were looked at.
    """
    named: list[Blocker] = []
    total = looked = 0
    for name, other, held in islice(_near(table, request), limit):
        looked += 1
        if other is None:
            continue
        total += 1
        if len(named) < MAX_LISTED_BLOCKERS:
            named.append(_blocker(table, name, other, held))
        if not count and total == MAX_LISTED_BLOCKERS:
            break
    return tuple(named), total, looked


def blocked_resources(table: LockTable, request: Request) -> Iterator[str]:
    """The resources that a waiting request can't have at present, out of the first that it names.

    At most `MAX_INSPECTED` of them, and on each no more than `MAX_INSPECTED` who might be in the way, for this is asked of every one that
    waits.
    """
    for name, exclusive in islice(request.modes(), MAX_INSPECTED):
        if any(other is not None for _, other, _ in islice(_near_on(table, request, name, exclusive), MAX_INSPECTED)):
            yield name


def _blocker(table: LockTable, name: str, other: Request, held: bool) -> Blocker:
    return Blocker(
        id=other.id,
        transaction=other.transaction,
        resource=name,
        mode=_mode(table, name, other) if held else other.mode(name),
        held=held,
        since_unix_ms=int(other.since_unix_ms),
        note=other.note,
    )


def _mode(table: LockTable, name: str, holder: Request) -> Mode:
    """In which mode it holds a resource. It may hold thousands, and is searched only where the resource can't tell."""
    resource = table.resources[name]
    if resource.exclusives in (0, len(resource.holders)):
        return Mode.EXCLUSIVE if resource.exclusives else Mode.SHARED
    return holder.mode(name)


def _blockers(table: LockTable, request: Request) -> Iterator[tuple[str, Request, bool]]:
    for name, exclusive in request.modes():
        yield from _on(table, request, name, exclusive)


def _on(table: LockTable, request: Request, name: str, exclusive: bool) -> Iterator[tuple[str, Request, bool]]:
    """Those in the way on one resource: who holds it, then who stands ahead in its line."""
    owner = request.owner
    for holder in conflicting_holders(table, request, name, exclusive):
        yield name, holder, True
    for place in _ahead(table, request, name, exclusive):
        if place[2].owner != owner:
            yield name, place[2], False


def _near(table: LockTable, request: Request) -> Iterator[tuple[str, Request | None, bool]]:
    """As `_blockers`, with a None for each resource and each request that it overtakes by: so that they can be counted."""
    for name, exclusive in request.modes():
        yield from _near_on(table, request, name, exclusive)


def _near_on(
    table: LockTable, request: Request, name: str, exclusive: bool
) -> Iterator[tuple[str, Request | None, bool]]:
    owner = request.owner
    yield name, None, False
    resource = table.resources[name]
    for holder in resource.holders.values() if exclusive or resource.exclusives else ():
        in_way = exclusive or _mode(table, name, holder) is Mode.EXCLUSIVE
        yield name, holder if in_way and holder.owner != owner else None, True
    for place in _ahead(table, request, name, exclusive):
        yield name, place[2] if place[2].owner != owner else None, False


def _ahead(table: LockTable, request: Request, name: str, exclusive: bool) -> Iterator[QueueEntry]:
    """The places ahead of a waiting request in a line, of those that ask for the resource in a conflicting mode."""
    queue, entry = table.wait_queue(name), request.entry(name)
    yield from queue.exclusive.between(None, entry)
    if exclusive:
        yield from queue.shared.between(None, entry)


# -- Who holds, who waits and for whom: for people, without changing anything --------


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
    table: LockTable,
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
    waiting = [Row(request, *find_blockers(table, request)) for request in islice(found.queue, left)]
    return Inspection(held, waiting, found.holders_total, found.queue_total)


@dataclass(slots=True)
class _Found:
    holders: Iterable[Request]
    holders_total: int
    queue: Iterable[Request]
    queue_total: int


def _look(table: LockTable, name: str | None, id: int | None, transaction: str | None) -> _Found:
    if id is not None or transaction is not None:
        return _pick(table, name, id, transaction)
    if name is None:
        return _Found(table.held.values(), len(table.held), table.waiting.values(), len(table.waiting))
    resource = table.lookup(name)
    if resource is None:
        return _Found((), 0, (), 0)
    wait_queue = resource.wait_queue
    queue = () if wait_queue is None else (entry[2] for entry in wait_queue)
    return _Found(resource.holders.values(), len(resource.holders), queue, 0 if wait_queue is None else len(wait_queue))


def _pick(table: LockTable, name: str | None, id: int | None, transaction: str | None) -> _Found:
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
