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
blockers. The searches for matching requests have the same limit, each for itself: among the requests of a transaction, among
the requests on a resource, and among the holders and the waiters of the subtrees that contain a resource."""
MAX_LISTING_READS = 20_000
"""Maximum number of requests and resources that one `inspect` reads to list blockers after `MAX_INSPECTED_REQUESTS`. Few
blockers may take many reads: a request may be blocked only on the last of its 1,024 names."""
NAMES_PER_READ = 4
"""Number of names of a blocker that count as one read, when the mode of a name or a name below a subtree is searched for."""
MAX_INSPECTED_NAMES = 50_000
"""Maximum number of names that one `inspect` of a subtree compares with the subtree: of names in each of the two dicts of the
lock table, or with a transaction, of names of its held and of its waiting requests, each."""
MAX_READ_RESOURCES = 10_000
"""Maximum number of shared or contended names below a subtree whose holders and waiters one `inspect` reads."""
MAX_COUNTED_ON_ARRIVAL = 100
"""Maximum number of blockers that are counted when a request begins to wait. It is far smaller than `MAX_COUNTED_BLOCKERS`,
because the blockers of every waiting request with a trace context are counted."""


def find_blockers(
    table: LockTable, request: Request, max_counted: int = MAX_COUNTED_BLOCKERS
) -> tuple[tuple[Blocker, ...], int]:
    """Return the first blockers of a waiting request, at most `MAX_LISTED_BLOCKERS`, and the number of all its blockers.

    A blocker on two resources counts twice. The number is at most `max_counted`. It is a lower bound if the search reads very
    many requests of the request's own transaction, which block nothing.
    """
    listed, total, _ = sample_blockers(table, request, read_limit(request, max_counted), count=True)
    return listed, min(total, max_counted)


def read_limit(request: Request, max_counted: int) -> int:
    """Return how many requests and resources `sample_blockers` may read to count `max_counted` blockers of a request."""
    return max_counted + MAX_SCANNED + request.name_count()


def sample_blockers(
    table: LockTable, request: Request, limit: int, *, count: bool
) -> tuple[tuple[Blocker, ...], int, int]:
    """Return blockers of a waiting request: (listed blockers, number of blockers, number of reads).

    Lists the first `MAX_LISTED_BLOCKERS`. Reads at most about `limit` requests and resources; if there are more, the number
    of blockers is a lower bound. Without `count`, the search ends when the list is full.
    """
    listed: list[Blocker] = []
    total = reads = 0
    for name, blocker, held in islice(_scan(table, request), limit):
        reads += 1
        if blocker is None:
            continue
        total += 1
        if len(listed) < MAX_LISTED_BLOCKERS:
            if not held and name in table.subtrees:
                reads += blocker.name_count() // NAMES_PER_READ
                name = _waited_name(name, blocker)  # noqa: PLW2901 - what is shown
            listed.append(_to_blocker(table, name, blocker, held))
        if not count and total == MAX_LISTED_BLOCKERS:
            break
    if count and table.subtrees:
        total += _count_unlisted_below(table, request)
    return tuple(listed), total, reads


def blocked_resources(table: LockTable, request: Request) -> Iterator[str]:
    """Yield the names of the resources on which a new waiting request is blocked.

    Reads at most `MAX_SCANNED` resources, and at most `MAX_SCANNED` requests on each resource, because the search runs for
    every request that starts to wait.
    """
    for name, mode in islice(request.queue_modes() if table.specials else request.modes(), MAX_SCANNED):
        items = islice(_scan_resource(table, request, name, mode), MAX_SCANNED)
        if any(blocker is not None for _, blocker, _ in items):
            yield name


def _to_blocker(table: LockTable, name: str, request: Request, held: bool) -> Blocker:
    """Return the description of a request that blocks another request on the resource `name`.

    `held` is true if `request` holds the resource, and false if it waits.
    """
    return Blocker(
        id=request.id,
        transaction=request.transaction,
        resource=name,
        mode=_held_mode(table, name, request) if held else request.mode(name),
        held=held,
        since_unix_ms=int(request.since_unix_ms),
        context=shown_context(request),
        units=None if request.details is None else request.details.units.get(name),
    )


def _held_mode(table: LockTable, name: str, holder: Request) -> Mode:
    """Return the mode in which `holder` holds `name`."""
    resource = table.resources.get(name)
    mode = X if resource is None else resource.holder_mode(name, holder)
    return Mode.UNITS if mode == U else Mode.EXCLUSIVE if mode == X else Mode.SHARED


ScannedItem = tuple[str, Request | None, bool]
"""One read of a search for blockers: (name of the resource, blocker, whether the blocker holds the resource). The blocker is
None if the read found none. So a caller that limits the number of items also limits the work."""


def _scan(table: LockTable, request: Request) -> Iterator[ScannedItem]:
    """Yield an item for each resource and each request that may block a waiting request."""
    for name, mode in request.queue_modes() if table.specials else request.modes():
        yield from _scan_resource(table, request, name, mode)


def _scan_resource(table: LockTable, request: Request, name: str, mode: QueueMode) -> Iterator[ScannedItem]:
    """Yield an item for the resource `name`, which `request` waits for in `mode`, and for each request on it that may block."""
    owner = request.owner
    yield name, None, False  # one read without a blocker: see `ScannedItem`
    resource = table.resources[name]
    if table.specials and resource.special is not None:
        yield from _scan_special_resource(table, request, name, mode)
        return
    if mode == X:
        for holder in resource.holders.values():
            yield name, holder if holder.owner != owner else None, True
    elif resource.exclusive_count:
        for holder in resource.holders.values():
            blocks = resource.holder_mode(name, holder) == X and holder.owner != owner
            yield name, holder if blocks else None, True
            if resource.has_mixed_holders:
                yield from repeat((name, None, True), holder.name_count() // NAMES_PER_READ)
    queue, own_entry = table.wait_queue(name), request.entry(name)
    for waiters in (queue.exclusive, queue.shared) if mode == X else (queue.exclusive,):
        for entry in waiters.between(None, own_entry):
            yield name, entry[2] if entry[2].owner != owner else None, False


def _scan_special_resource(table: LockTable, request: Request, name: str, mode: QueueMode) -> Iterator[ScannedItem]:
    """Yield an item for each request on a counted resource or a subtree that may block `request`.

    An item for a held lock below a subtree has the name of this lock.
    """
    resource, queue, entry = table.resources[name], table.wait_queue(name), request.entry(name)
    blocking = list(CONFLICTS[mode])
    if mode == U and not units_fit(resource, request.units[name], queue, entry):
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
    """Return what a request in the queue of the subtree `name` waits for: its first name below the subtree, or the subtree."""
    if waiter.queue_mode(name) not in (IS, IX):
        return name
    names = waiter.names()  # up to 1,024, so no Python code runs for each of them
    is_below = map(str.startswith, names, repeat(name[:-2]))
    return next(compress(names, is_below), name)


def _count_unlisted_below(table: LockTable, request: Request) -> int:
    """Return how many locks below the subtrees of a waiting request block it and are not in `Subtree.examples`.

    Returns 0 if the transaction of the request has very many locks that are not counted yet.
    """
    count = 0
    if table.uncounted_names(request) > MAX_INSPECTED_NAMES:
        return count
    for name, mode in request.queue_modes():
        special = table.resources[name].special
        if isinstance(special, Subtree) and has_conflicting_below(table, name, special, mode, request.owner):
            own_shared, own_exclusive = own_below(table, name, special, request.owner)
            total = special.exclusive_count - own_exclusive
            if mode == X:  # shared locks below the subtree block the request, too
                total += special.shared_count - own_shared
            of_others = [below for below, holder in special.examples.values() if holder.owner != request.owner]
            listed = [below for below in of_others if mode == X or below != S]
            count += max(0, total - len(listed))
    return count


# -- Inspection -----------------------------------------------------------------------


@dataclass(slots=True)
class Row:
    """A held or waiting request. Only a waiting request has `blockers`, the first ones, and `blockers_total`."""

    request: Request
    blockers: tuple[Blocker, ...] = ()
    blockers_total: int = 0


@dataclass(slots=True)
class Inspection:
    """The result of `inspect`: rows of held and of waiting requests, and how many requests match, with or without a row.

    A row is made when it is iterated, so that rows that do not fit into a message cost nothing.
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
    """Return the requests that match all given filters, or all requests if no filter is given.

    - `resource` matches requests for this name and for subtrees that contain it. A subtree also matches requests for names below
      it, even if no request names the subtree itself.
    - At most `limit` rows are returned: first the holders, then the waiters. Holders of subtrees above `resource` are before
      its own holders.
    - `only` is `holders` or `queue`: the other requests get no rows.
    - Waiters are in queue order if the only filter is a `resource` that is not a subtree, otherwise in order of arrival.

    If there are very many requests to search, with subtrees or with both `transaction` and `resource`, rows may be missing, and
    the totals are lower bounds.
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

    After `MAX_INSPECTED_REQUESTS` reads, blockers are only listed and no longer counted. After `MAX_LISTING_READS` more reads,
    the iteration ends.
    """
    reads = 0
    limit = MAX_COUNTED_BLOCKERS + MAX_SCANNED  # the resources of a request count as read, too
    for request in requests:
        if reads >= MAX_INSPECTED_REQUESTS + MAX_LISTING_READS:
            break
        listed, total, row_reads = sample_blockers(table, request, limit, count=reads < MAX_INSPECTED_REQUESTS)
        reads += row_reads
        yield Row(request, listed, min(total, MAX_COUNTED_BLOCKERS))


@dataclass(slots=True)
class Matches:
    """The held and waiting requests that match the filters of `inspect`, and their total numbers."""

    holders: Iterable[Request]
    holders_total: int
    queue: Iterable[Request]
    queue_total: int


def _to_matches(holders: Collection[Request], queue: Collection[Request]) -> Matches:
    """Return matches with the totals of these collections."""
    return Matches(holders, len(holders), queue, len(queue))


def _find(table: LockTable, name: str | None, id: int | None, transaction: str | None) -> Matches:
    """Return the requests that match all given filters, through the most specific index of the lock table."""
    if id is not None or transaction is not None:
        return _find_by_owner(table, name, id, transaction)
    if name is None or name == WHOLE_NAMESPACE:
        return _to_matches(table.held.values(), table.waiting.values())
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
        return Matches(holders.values(), len(holders), map(_REQUEST, queue), len(queue))
    held_above, entries = of_subtrees_above(table, name)
    held = [request for request in held_above if request.id not in holders] if holders else held_above
    if queue:
        entries = [entry for entry in entries if not _waits_in(name, entry[2])]
    merged = merge(queue, entries)
    return Matches(
        chain(held, holders.values()), len(held) + len(holders), map(_REQUEST, merged), len(entries) + len(queue)
    )


_REQUEST = itemgetter(2)
"""The request of a queue entry."""


def _waits_in(name: str, request: Request) -> bool:
    """Return whether a request that waits for a subtree above `name` also waits for `name`.

    Such a request waits in more queues than it has names, so its `queue_modes` are set.
    """
    return request.details is not None and name in (request.details.queue_modes or ())


def of_subtrees_above(table: LockTable, name: str) -> tuple[list[Request], list[QueueEntry]]:
    """Return the holders of the subtrees that contain `name`, and the queue entries of their waiters, sorted.

    Reads at most `MAX_INSPECTED_REQUESTS` holders, and as many waiters: if there are more, the first ones of each queue.
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
    entries = sorted(chain.from_iterable([islice(queue, limit) for queue in queues]))
    # Reversed, so that the first entry of a request overwrites its others.
    first_by_request = {entry[2]: entry for entry in reversed(entries)}
    return held, sorted(first_by_request.values())


def _add_subtrees_above(
    table: LockTable, name: str, held: list[Request], waiting: list[Request], transaction: str | None = None
) -> Matches:
    """Return the requests `held` and `waiting`, together with the requests for the subtrees that contain `name`.

    With `transaction`, only requests of this transaction are added. Holders of the subtrees are first. Waiting requests are in
    order of arrival.
    """
    if not table.subtrees:
        return _to_matches(held, sorted(waiting, key=attrgetter("id")))
    held_above, entries_above = of_subtrees_above(table, name)
    held_above = [request for request in held_above if transaction in {None, request.transaction}]
    waiting_above = [entry[2] for entry in entries_above if transaction in {None, entry[2].transaction}]
    all_held = dict.fromkeys([*held_above, *held])  # without duplicates, in the same order
    all_waiting = {*waiting, *waiting_above}
    return _to_matches(all_held, sorted(all_waiting, key=attrgetter("id")))


def _find_by_owner(table: LockTable, name: str | None, id: int | None, transaction: str | None) -> Matches:
    """Return the requests that match all given filters. An id or a transaction must be given."""
    if id is not None:
        request = table.find(id)
        if request is None or transaction not in {None, request.transaction}:
            return _to_matches((), ())
        if name is not None and not _matches_name(request, name):
            return _to_matches((), ())
        return _to_matches([request], ()) if request.state is HELD else _to_matches((), [request])
    owner = None if transaction is None else table.transactions.get(transaction)
    if owner is None:
        return _to_matches((), ())
    if name is None or name == WHOLE_NAMESPACE:
        return _to_matches(owner.held.values(), owner.waiting.values())
    if is_subtree(name):
        held, waiting = _named_within(name, owner.held.values()), _named_within(name, owner.waiting.values())
    else:
        held, waiting = _holders_of_owner(table, owner, name), _waiters_of_owner(table, owner, name)
    return _add_subtrees_above(table, name, held, waiting, transaction)


def _matches_name(request: Request, name: str) -> bool:
    """Return whether a request names `name` or a subtree that contains it. If `name` is a subtree, names below it match, too."""
    names = request.names()
    subtrees = () if request.details is None else request.details.subtrees
    return (
        name in names
        or any(contains(subtree, name) for subtree in subtrees)
        or (is_subtree(name) and any(contains(name, below) for below in names))
    )


def _find_within(table: LockTable, subtree: str) -> tuple[list[Request], list[Request]]:
    """Return the held and the waiting requests that name a subtree, or a name below it, in bounded time.

    Searches the names of the lock table: searching the names of each request would take ten times as long. Compares at most
    `MAX_INSPECTED_NAMES` uncontended names, and as many others. Of the others that match, it reads at most
    `MAX_READ_RESOURCES` resources, with at most `MAX_INSPECTED_REQUESTS` holders and as many waiters.
    """
    first, end = range_below(subtree)
    uncontended = table.uncontended
    names = [name for name in islice(uncontended, MAX_INSPECTED_NAMES) if first <= name < end]
    others = islice(table.resources.items(), MAX_INSPECTED_NAMES)
    matching = (resource for name, resource in others if first <= name < end)
    found = [*islice(matching, MAX_READ_RESOURCES)]
    holders = islice(chain.from_iterable([resource.holders.values() for resource in found]), MAX_INSPECTED_REQUESTS)
    held = dict.fromkeys(chain(map(uncontended.__getitem__, names), holders))
    entries: list[QueueEntry] = []
    for resource in found:
        if resource.wait_queue is not None:
            resource.wait_queue.collect(entries, limit=MAX_INSPECTED_REQUESTS)
    waiting = dict.fromkeys([entry[2] for entry in entries[:MAX_INSPECTED_REQUESTS]])
    return sorted(held, key=attrgetter("fence")), [*waiting]


def _named_within(subtree: str, requests: Iterable[Request]) -> list[Request]:
    """Return those of the given requests that name a subtree, or a name below it.

    Reads at most `MAX_INSPECTED_REQUESTS` requests with at most `MAX_INSPECTED_NAMES` names.
    """
    prefix, found, name_count = subtree[:-2], list[Request](), 0
    for request in islice(requests, MAX_INSPECTED_REQUESTS):
        names = request.names()
        name_count += len(names)
        if name_count > MAX_INSPECTED_NAMES:
            break
        if any(map(str.startswith, names, repeat(prefix))):
            found.append(request)
    return found


def _holders_of_owner(table: LockTable, owner: Transaction, name: str) -> list[Request]:
    """Return the holders of a resource that belong to a transaction.

    Reads the holders of the resource or the requests of the transaction, whichever are fewer, and at most
    `MAX_INSPECTED_REQUESTS`. So holders may be missing.
    """
    resource = table.lookup(name)
    if resource is None or name not in owner.grants:
        return []
    holders, held = resource.holders, owner.held
    shorter, longer = (holders, held) if len(holders) <= len(held) else (held, holders)
    return [request for id_, request in islice(shorter.items(), MAX_INSPECTED_REQUESTS) if id_ in longer]


def _waiters_of_owner(table: LockTable, owner: Transaction, name: str) -> list[Request]:
    """Return the waiters for a resource that belong to a transaction, by arrival.

    Reads the waiting requests of the transaction until they name `MAX_INSPECTED_REQUESTS` resources, and then, if there are
    more, the first `MAX_INSPECTED_REQUESTS` requests of the queue. Waiters may be missing only if both are longer.
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
