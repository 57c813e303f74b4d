"""Read-only views of the lock table: the blockers of a waiting request, and `inspect`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from heapq import merge
from itertools import chain, compress, islice, repeat
from operator import attrgetter, itemgetter

from genie.core.context import shown_context
from genie.core.events import Blocker
from genie.core.grant import units_fit
from genie.core.lock_table import LockTable, Transaction
from genie.core.model import HELD, QueueEntry, Request
from genie.core.special import Subtree, contains, range_below
from genie.core.subtrees import has_conflicting_below, own_below
from genie.lock_modes import CONFLICTS, IS, IX, SIX, WHOLE_NAMESPACE, Mode, QueueMode, S, U, X, is_subtree

MAX_LISTED_BLOCKERS = 10
"""Maximum number of blockers that are listed."""
MAX_SCANNED = 32
"""Maximum number of resources of a request, and of requests on each resource, that `blocked_resources` reads."""
MAX_COUNTED_BLOCKERS = 1000
"""Maximum number of blockers that are counted. A total of this number is a lower bound."""
MAX_INSPECTED_REQUESTS = 20_000
"""Maximum number of requests that one `inspect` reads to count blockers. Beyond it, `blockers_total` counts only the listed
blockers. The same limit applies to the requests of a transaction, and to those of a resource, that are read to find the
requests that have both, and to the holders and waiters of the subtrees that contain a resource."""
MAX_LISTING_READS = 20_000
"""Maximum number of requests and resources that one `inspect` reads to list the blockers of the rows whose blockers are not
counted: a request may be blocked by the last of 1,024 names only."""
NAMES_PER_READ = 4
"""Names of a blocker that count as one read, if they are searched for its mode or for a name below a subtree."""
MAX_SEARCHED_NAMES = 50_000
"""Maximum number of names in the lock table that one `inspect` compares with a subtree. With a transaction, the same limit applies
to the names of its held requests, and to those of its waiting requests."""
MAX_READ_RESOURCES = 10_000
"""Maximum number of shared or contended names below a subtree whose holders and waiters one `inspect` reads."""
MAX_COUNTED_ON_ARRIVAL = 100
"""Maximum number of blockers that are counted when a request begins to wait: far fewer than when a request ends, because the
count runs for every request with a trace context that begins to wait."""


def find_blockers(
    table: LockTable, request: Request, max_counted: int = MAX_COUNTED_BLOCKERS
) -> tuple[tuple[Blocker, ...], int]:
    """Return the first blockers of a waiting request, and the number of all its blockers.

    A blocker on two resources counts twice. At most `MAX_LISTED_BLOCKERS` blockers are returned, and at
    most `max_counted` are counted. The number is a lower bound if very many requests of its own transaction are among them.
    """
    listed, total, _ = sample_blockers(table, request, read_limit(request, max_counted), count=True)
    return listed, min(total, max_counted)


def read_limit(request: Request, max_counted: int) -> int:
    """Return how many requests and resources `sample_blockers` may read to count `max_counted` blockers of a request."""
    return max_counted + MAX_SCANNED + request.name_count()


def sample_blockers(
    table: LockTable, request: Request, limit: int, *, count: bool
) -> tuple[tuple[Blocker, ...], int, int]:
    """Return the first blockers of a waiting request in bounded time, for lists of many requests.

    Reads at most `limit` requests and resources. Without `count` the search also ends once
    `MAX_LISTED_BLOCKERS` are found. Returns the listed blockers, the number of blockers found, and
    the number of requests and resources read.
    """
    listed: list[Blocker] = []
    total = scanned = 0
    for name, other, held in islice(_scan(table, request), limit):
        scanned += 1
        if other is None:
            continue
        total += 1
        if len(listed) < MAX_LISTED_BLOCKERS:
            if not held and name in table.subtrees:
                scanned += other.name_count() // NAMES_PER_READ
                name = _waited_name(name, other)  # noqa: PLW2901 - what is shown
            listed.append(_to_blocker(table, name, other, held))
        if not count and total == MAX_LISTED_BLOCKERS:
            break
    if count and table.subtrees:
        total += _count_unlisted(table, request)
    return tuple(listed), total, scanned


def blocked_resources(table: LockTable, request: Request) -> Iterator[str]:
    """Yield the resources on which a new waiting request is blocked.

    Reads at most `MAX_SCANNED` resources, and at most `MAX_SCANNED` requests on each resource, because
    the search runs for every request that starts to wait.
    """
    for name, exclusive in islice(request.queue_modes() if table.specials else request.modes(), MAX_SCANNED):
        if any(
            other is not None for _, other, _ in islice(_scan_resource(table, request, name, exclusive), MAX_SCANNED)
        ):
            yield name


def _to_blocker(table: LockTable, name: str, other: Request, held: bool) -> Blocker:
    """Describe the request `other` as a blocker on the resource `name`.

    `held` is true if it holds the resource, and false if it waits.
    """
    return Blocker(
        id=other.id,
        transaction=other.transaction,
        resource=name,
        mode=_held_mode(table, name, other) if held else other.mode(name),
        held=held,
        since_unix_ms=int(other.since_unix_ms),
        context=shown_context(other),
        units=None if other.details is None else other.details.units.get(name),
    )


def _held_mode(table: LockTable, name: str, holder: Request) -> Mode:
    """Return the mode in which `holder` holds `name`."""
    resource = table.resources.get(name)
    mode = X if resource is None else resource.holder_mode(name, holder)
    return Mode.UNITS if mode == U else Mode.EXCLUSIVE if mode == X else Mode.SHARED


def _scan(table: LockTable, request: Request) -> Iterator[tuple[str, Request | None, bool]]:
    """Yield the blockers of a waiting request as tuples: resource, blocker, whether the blocker holds the resource.

    For every resource or request that the search reads and that is not a blocker, an item with None is
    yielded. So a caller that limits the number of items also limits the work.
    """
    for name, mode in request.queue_modes() if table.specials else request.modes():
        yield from _scan_resource(table, request, name, mode)


def _scan_resource(
    table: LockTable, request: Request, name: str, mode: QueueMode
) -> Iterator[tuple[str, Request | None, bool]]:
    """Yield an item for each request on one resource that may block `request`: name, blocker or None, held."""
    owner = request.owner
    yield name, None, False
    resource = table.resources[name]
    if table.specials and resource.special is not None:
        yield from _scan_special_resource(table, request, name, mode)
        return
    if mode:
        for holder in resource.holders.values():
            yield name, holder if holder.owner != owner else None, True
    elif resource.exclusive_count:
        for holder in resource.holders.values():
            blocks = resource.holder_mode(name, holder) and holder.owner != owner
            yield name, holder if blocks else None, True
            if resource.has_mixed_holders:
                yield from repeat((name, None, True), holder.name_count() // NAMES_PER_READ)
    queue, own_entry = table.wait_queue(name), request.entry(name)
    for waiters in (queue.exclusive, queue.shared) if mode else (queue.exclusive,):
        for entry in waiters.between(None, own_entry):
            yield name, entry[2] if entry[2].owner != owner else None, False


def _scan_special_resource(
    table: LockTable, request: Request, name: str, mode: QueueMode
) -> Iterator[tuple[str, Request | None, bool]]:
    """Yield an item for each request on a counted resource or a subtree that may block `request`: name, blocker or None, held.

    The name of a lock below a subtree is its own name, not the subtree.
    """
    resource, queue, entry = table.resources[name], table.wait_queue(name), request.entry(name)
    blocking = list(CONFLICTS[mode])
    if mode == U and not units_fit(resource, request.units[name], name, queue, entry):
        blocking.append(U)
    for holder in resource.holders.values():
        blocks = holder.owner != request.owner and resource.holder_mode(name, holder) in blocking
        yield name, holder if blocks else None, True
        if resource.has_mixed_holders:
            yield from repeat((name, None, True), holder.name_count() // NAMES_PER_READ)
    if isinstance(resource.special, Subtree):
        for held, (below, holder) in resource.special.examples.items():
            intention = IS if below == S else IX
            yield held, holder if intention in blocking and holder.owner != request.owner else None, True
    for each in blocking:
        for waiter in queue.of_mode(each).between(None, entry):
            yield name, waiter[2] if waiter[2].owner != request.owner else None, False


def _waited_name(name: str, waiter: Request) -> str:
    """Return the first name below the subtree `name` for which a request waits that does not wait for the subtree itself."""
    if waiter.queue_mode(name) not in (IS, IX):
        return name
    names = waiter.names()  # up to 1,024, so there is no Python code for each of them
    return next(compress(names, map(str.startswith, names, repeat(name[:-2]))), name)


def _count_unlisted(table: LockTable, request: Request) -> int:
    """Return the number of locks that block a request, are below a subtree for which it waits, and are not among the
    examples of the subtree.

    Returns 0 if the request belongs to a transaction with very many locks, which are not counted yet.
    """
    count = 0
    if table.uncounted_names(request) > MAX_SEARCHED_NAMES:
        return count
    for name, mode in request.queue_modes():
        special = table.resources[name].special
        if isinstance(special, Subtree) and has_conflicting_below(table, name, special, mode, request.owner):
            shared, exclusive = own_below(table, name, special, request.owner)
            blocking = [IX] if mode in (S, SIX) else [IS, IX]
            total = special.exclusive_count - exclusive + (special.shared_count - shared if IS in blocking else 0)
            listed = [
                holder
                for below, holder in special.examples.values()
                if (IS if below == S else IX) in blocking and holder.owner != request.owner
            ]
            count += max(0, total - len(listed))
    return count


# -- Inspection -----------------------------------------------------------------------


@dataclass(slots=True)
class Row:
    """A held or waiting request. Only a waiting request has `blockers` and `blockers_total`."""

    request: Request
    blockers: tuple[Blocker, ...] = ()
    blockers_total: int = 0


@dataclass(slots=True)
class Inspection:
    """A part of the lock table: held and waiting requests, and the total numbers of both, without the limit.

    The rows are made as they are iterated, so that rows that do not fit into a message cost nothing.
    """

    holders: Iterable[Row]
    queue: Iterable[Row]
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
    """Return the requests that match all given filters; without filters, all requests.

    A `resource` matches itself and the subtrees that contain it. A subtree also matches all names below it, whether or not
    it is locked. At most `limit` rows are returned, holders first, and of these the holders of subtrees above the resource.
    `only` (`holders` or `queue`) restricts the rows to held or to waiting requests. With subtrees, or with `transaction` and
    `resource`, rows may be missing, and the totals are lower bounds, if there are very many requests to search. Waiters are
    in queue order if a `resource` that is not a subtree is the only filter, otherwise by arrival.
    """
    matches = _find(table, resource, id, transaction)
    held = 0 if only == "queue" else min(limit, matches.holders_total)
    waiting = 0 if only == "holders" else limit - held
    return Inspection(
        map(Row, islice(matches.holders, held)),
        _waiting_rows(table, islice(matches.queue, waiting)),
        matches.holders_total,
        matches.queue_total,
    )


def _waiting_rows(table: LockTable, requests: Iterable[Request]) -> Iterator[Row]:
    """Yield the rows of waiting requests, with their blockers.

    Reads at most `MAX_INSPECTED_REQUESTS` to count them, and `MAX_LISTING_READS` to list the first ones of the other rows. Then
    rows are omitted.
    """
    left = MAX_INSPECTED_REQUESTS
    limit = MAX_COUNTED_BLOCKERS + MAX_SCANNED  # the resources of a request count as read, too
    for request in requests:
        if left <= -MAX_LISTING_READS:
            break
        listed, total, read = sample_blockers(table, request, limit, count=left > 0)
        left -= read
        yield Row(request, listed, min(total, MAX_COUNTED_BLOCKERS))


@dataclass(slots=True)
class Matches:
    """The held and waiting requests that match the filters of `inspect`, and their total numbers."""

    holders: Iterable[Request]
    holders_total: int
    queue: Iterable[Request]
    queue_total: int


def _all_of(holders: Collection[Request], queue: Collection[Request]) -> Matches:
    return Matches(holders, len(holders), queue, len(queue))


def _find(table: LockTable, name: str | None, id: int | None, transaction: str | None) -> Matches:
    """Return the requests that match all given filters, through the most specific index of the lock table."""
    if id is not None or transaction is not None:
        return _find_by_owner(table, name, id, transaction)
    if name is None or name == WHOLE_NAMESPACE:
        return _all_of(table.held.values(), table.waiting.values())
    if is_subtree(name):
        return _add_subtrees_above(table, name, *_find_within(table, name))
    return find_by_name(table, name)


def find_by_name(table: LockTable, name: str) -> Matches:
    """Return the holders and the waiters of a resource that is not a subtree, and of the subtrees that contain it.

    The holders of the subtrees are first. The waiters are in queue order.
    """
    resource = table.lookup(name)
    holders = {} if resource is None else resource.holders
    queue = () if resource is None or resource.wait_queue is None else resource.wait_queue
    if not table.subtrees:
        return Matches(holders.values(), len(holders), (entry[2] for entry in queue), len(queue))
    held_above, entries = of_subtrees_above(table, name)
    held = [request for request in held_above if request.id not in holders] if holders else held_above
    if queue:
        entries = [entry for entry in entries if not _waits_in(name, entry[2])]
    merged = merge(queue, entries, key=_POSITION)
    return Matches(
        chain(held, holders.values()),
        len(held) + len(holders),
        (entry[2] for entry in merged),
        len(entries) + len(queue),
    )


_POSITION = itemgetter(0, 1)
"""The position of a queue entry. Entries of one request in several queues are equal."""


def _waits_in(name: str, request: Request) -> bool:
    """Return whether a request that waits for a subtree above `name` also waits for `name`. Then it knows its queues."""
    return request.details is not None and name in (request.details.queue_modes or ())


def of_subtrees_above(table: LockTable, name: str) -> tuple[list[Request], list[QueueEntry]]:
    """Return the holders of the subtrees that contain `name`, and the queue entries of their waiters, sorted.

    Reads at most `MAX_INSPECTED_REQUESTS` of each. If there are more waiters, the first ones of each queue are read.
    """
    resources = [resource for _, resource in table.subtrees_above(name)]
    holders = chain.from_iterable([resource.holders.values() for resource in resources])
    held = [*dict.fromkeys(islice(holders, MAX_INSPECTED_REQUESTS))]
    queues = [
        queue
        for resource in resources
        if resource.wait_queue is not None
        for mode in (S, X, SIX)
        if (queue := resource.wait_queue.of_mode(mode))
    ]
    if len(queues) <= 1:  # the entries are sorted, and of different requests
        return held, [*islice(chain(*queues), MAX_INSPECTED_REQUESTS)]
    limit = MAX_INSPECTED_REQUESTS // len(queues)
    # Sorting takes a third of the time of `merge`.
    entries = sorted(chain.from_iterable([islice(queue, limit) for queue in queues]), key=_POSITION)
    first = {entry[2]: entry for entry in reversed(entries)}  # of each request, the first of its entries
    return held, sorted(first.values(), key=_POSITION)


def _add_subtrees_above(
    table: LockTable, name: str, held: list[Request], waiting: list[Request], transaction: str | None = None
) -> Matches:
    """Return the requests `held` and `waiting`, and before them the requests for the subtrees that contain `name`.

    With `transaction`, add only requests of this transaction. Waiting requests are in order of arrival.
    """
    if not table.subtrees:
        return _all_of(held, sorted(waiting, key=attrgetter("id")))
    held_above, entries_above = of_subtrees_above(table, name)
    above = [request for request in held_above if transaction in {None, request.transaction}]
    waiting_above = [entry[2] for entry in entries_above if transaction in {None, entry[2].transaction}]
    return _all_of(
        dict.fromkeys([*above, *held]), sorted(dict.fromkeys([*waiting, *waiting_above]), key=attrgetter("id"))
    )


def _find_by_owner(table: LockTable, name: str | None, id: int | None, transaction: str | None) -> Matches:
    """Return the requests that match all given filters. An id or a transaction must be given."""
    if id is not None:
        request = table.find(id)
        matches = request is not None and transaction in {None, request.transaction}
        requests = [request] if matches and request is not None and (name is None or _names(request, name)) else []
        holders = [request for request in requests if request.state is HELD]
        queue = [request for request in requests if request.state is not HELD]
        return _all_of(holders, queue)
    owner = None if transaction is None else table.transactions.get(transaction)
    if owner is None:
        return _all_of((), ())
    if name is None or name == WHOLE_NAMESPACE:
        return _all_of(owner.held.values(), owner.waiting.values())
    if is_subtree(name):
        held, waiting = _within(name, owner.held.values()), _within(name, owner.waiting.values())
    else:
        held, waiting = _holders_of_owner(table, owner, name), _waiters_of_owner(table, owner, name)
    return _add_subtrees_above(table, name, held, waiting, transaction)


def _names(request: Request, name: str) -> bool:
    """Return whether a request names the resource `name`, a subtree that contains it, or if it is a subtree, a name below
    it.
    """
    names = request.names()
    subtrees = () if request.details is None else request.details.subtrees
    return (
        name in names
        or any(contains(subtree, name) for subtree in subtrees)
        or (is_subtree(name) and any(contains(name, below) for below in names))
    )


def _find_within(table: LockTable, subtree: str) -> tuple[list[Request], list[Request]]:
    """Return the held and the waiting requests that name a subtree, or a name below it.

    Compares `MAX_SEARCHED_NAMES` names with one holder, and as many others. Then it need not read the names of each request,
    which would take ten times as long. Of the other names, it reads at most `MAX_READ_RESOURCES` with at most
    `MAX_INSPECTED_REQUESTS` holders, and as many waiters.
    """
    first, end = range_below(subtree)
    uncontended = table.uncontended
    names = [name for name in islice(uncontended, MAX_SEARCHED_NAMES) if first <= name < end]
    others = islice(table.resources.items(), MAX_SEARCHED_NAMES)
    found = [*islice((resource for name, resource in others if first <= name < end), MAX_READ_RESOURCES)]
    holders = islice(chain.from_iterable([resource.holders.values() for resource in found]), MAX_INSPECTED_REQUESTS)
    held = dict.fromkeys(chain(map(uncontended.__getitem__, names), holders))
    entries: list[QueueEntry] = []
    for resource in found:
        if resource.wait_queue is not None:
            resource.wait_queue.collect(entries, limit=MAX_INSPECTED_REQUESTS)
    waiting = dict.fromkeys([entry[2] for entry in entries[:MAX_INSPECTED_REQUESTS]])
    return sorted(held, key=attrgetter("fence")), [*waiting]


def _within(subtree: str, requests: Iterable[Request]) -> list[Request]:
    """Return the requests that name a subtree, or a name below it.

    Reads at most `MAX_INSPECTED_REQUESTS` of them, until they name `MAX_SEARCHED_NAMES` resources.
    """
    prefix, found, left = subtree[:-2], list[Request](), MAX_SEARCHED_NAMES
    for request in islice(requests, MAX_INSPECTED_REQUESTS):
        names = request.names()
        left -= len(names)
        if left < 0:
            break
        if any(map(str.startswith, names, repeat(prefix))):
            found.append(request)
    return found


def _holders_of_owner(table: LockTable, owner: Transaction, name: str) -> list[Request]:
    """Return the holders of a resource that belong to a transaction, through the shorter of the two tables.

    At most `MAX_INSPECTED_REQUESTS` requests are read, so holders may be missing.
    """
    resource = table.lookup(name)
    if resource is None or name not in owner.grants:
        return []
    holders, held = resource.holders, owner.held
    read, other = (holders, held) if len(holders) <= len(held) else (held, holders)
    return [request for id_, request in islice(read.items(), MAX_INSPECTED_REQUESTS) if id_ in other]


def _waiters_of_owner(table: LockTable, owner: Transaction, name: str) -> list[Request]:
    """Return the waiters for a resource that belong to a transaction, by arrival.

    Reads the waiting requests of the transaction until they name `MAX_INSPECTED_REQUESTS` resources. If it has more, also
    reads as many requests of the queue. Waiters may be missing only if both are longer.
    """
    resource = table.lookup(name)
    queue = None if resource is None else resource.wait_queue
    if queue is None:
        return []
    found: dict[int, Request] = {}
    names = 0
    for request in owner.waiting.values():
        if names >= MAX_INSPECTED_REQUESTS:
            first = islice(queue, MAX_INSPECTED_REQUESTS)
            found |= {request.id: request for *_, request in first if request.id in owner.waiting}
            break
        names += request.name_count()
        if name in request.names():
            found[request.id] = request
    return [found[id_] for id_ in sorted(found)]
