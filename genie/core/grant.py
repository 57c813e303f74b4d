"""Grant checks: which requests can be granted, and which waiters to check after a change.

A request is granted when, for each of its resources, no other owner holds it in a conflicting mode,
and no request of another owner asks for it in a conflicting mode earlier in the queue. After a
release or a cancellation only a few waiters can have become grantable, however long the queue is:
`grant_candidates` returns these waiters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import merge
from itertools import islice, repeat
from sys import maxsize

from genie.core.lock_table import AffectedQueues, LockTable, QueueChange, earlier
from genie.core.model import Owner, QueueEntry, Request
from genie.core.special import MAX_QUEUES, Counted, Subtree, with_intention
from genie.core.subtrees import has_conflicting_below
from genie.core.wait_queue import LockedResource, WaitQueue
from genie.lock_modes import CONFLICTS, IX, SIX, QueueMode, S, U, UnitCount, X

MAX_CANDIDATES = 1_000
"""Maximum number of reads of one `grant_candidates`, which bounds the duration of a step. A read is that of one waiting request,
or of one resource that it names."""

REREADS_PER_NEW_CANDIDATE = 50
"""After `MAX_CANDIDATES` reads, at most `MAX_CANDIDATES` more queues are reread: those whose first candidates another queue had.
A queue with a new candidate counts as this number of queues."""

SPECIAL_COST = 3
"""Number of reads for which a counted resource or a subtree counts, because its check takes as long."""

NAMES_PER_READ = 256
"""Number of locks of a transaction that count as one read, when they are compared with a subtree."""

MAX_FILTERED_WAITERS = 16
"""Maximum number of waiting requests of an owner that are read to find its requests in one queue. If it has more, the queue is
read instead."""

MAX_FILTERED_COST = 1_000
"""Maximum number of resources that these waiting requests may name. If they name more, the queue is read instead, because it
can be read in parts."""


def grant_candidates(
    table: LockTable, affected: AffectedQueues, new_request: Request | None = None
) -> tuple[list[Request], AffectedQueues, int]:
    """Return the waiters to check after the changes `affected`: (waiters, unread changes, number of reads).

    The waiters may have become grantable. They are in queue order, each once, and include `new_request` if it is given.
    After about `MAX_CANDIDATES` reads, the other changes are returned as unread: the caller passes them to a later call.
    """
    unread: AffectedQueues = []
    if len(affected) == 1 and new_request is None:
        requests, reads_left = _candidates_in_queue(table, *affected[0], MAX_CANDIDATES, unread)
    else:
        found = {} if new_request is None else {new_request.id: new_request}
        reads_left = rereads_left = MAX_CANDIDATES
        skipped: AffectedQueues = []
        for name, mode, after in _merge_changes(affected):
            if reads_left > 0:
                candidates, reads_left = _candidates_in_queue(table, name, mode, after, reads_left - 1, unread)
                for request in candidates:
                    found[request.id] = request
                continue
            # No reads are left. The first candidates of many queues were found in another queue, and each waiter is checked
            # once. Of such a queue, only the rest is left for a later call.
            if rereads_left > 0:
                rest: AffectedQueues = []
                candidates, _ = _candidates_in_queue(table, name, mode, after, 1, rest)
                if all(request.id in found for request in candidates):
                    rereads_left -= 1
                    unread += rest
                    continue
                rereads_left -= REREADS_PER_NEW_CANDIDATE
            skipped.append((name, mode, after))
        requests = list(found.values())
        unread = skipped + unread
    if len(requests) > 1:
        requests.sort(key=_queue_order)
    return requests, unread, MAX_CANDIDATES - reads_left


def only_grantable(table: LockTable, name: str) -> Request | None:
    """Return the only grantable waiter of a plain resource in the usual case, or None: then `grant_candidates` must search.

    In the usual case, the resource has no holder and only exclusive waiters, and the first waiter is `simple`. Without this
    shortcut, lock and release on a contended resource execute 5 % more instructions.
    """
    resource = table.resources.get(name)
    if resource is None or resource.holders or resource.wait_queue is None or resource.wait_queue.shared:
        return None
    first = resource.wait_queue.exclusive.first
    if resource.special is not None or first is None:
        return None
    request = first[2]
    return request if request.simple else None


def first_waiter_for_units(table: LockTable, name: str) -> Request | None:
    """Return the first waiter of a counted resource, if it is `simple`, and all holders and waiters name units. Otherwise return
    None.
    """
    resource = table.resources.get(name)
    if resource is None or not isinstance(resource.special, Counted) or resource.wait_queue is None:
        return None
    queue = resource.wait_queue
    if len(resource.holders) > resource.special.unit_holder_count:
        return None
    first = queue.of_mode(U).first
    if first is None or queue.exclusive or queue.shared:
        return None
    request = first[2]
    return request if request.simple else None


def units_in_use(resource: LockedResource, limit: int) -> int:
    """Return the units in use of a resource, or `limit` if a shared or exclusive holder leaves no units free."""
    special = resource.special
    if not isinstance(special, Counted) or len(resource.holders) > special.unit_holder_count:
        return limit
    return special.in_use


def _candidates_in_queue(
    table: LockTable, name: str, mode: QueueMode, after: QueueEntry | None, reads_left: int, unread: AffectedQueues
) -> tuple[list[Request], int]:
    """Return the waiters of one queue that may have become grantable, each once, and the remaining `reads_left`.

    `name`, `mode` and `after` are the parts of a `QueueChange`. `reads_left` bounds the work, see `MAX_CANDIDATES`: when no
    reads are left, the rest of the queue is added to `unread`.
    """
    resource = table.resources.get(name)
    if resource is None or resource.wait_queue is None:
        return [], reads_left
    queue = resource.wait_queue
    if resource.special is not None:
        return _candidates_in_special_queue(table, name, mode, after, reads_left, unread)
    if resource.exclusive_count:  # then all holders have the same owner, which blocks the waiters of all other owners
        owner = next(iter(resource.holders.values())).owner
        # A request without a transaction is its own owner, which has no other request.
        return (
            _waiters_of_owner(table, owner, (name, mode, after), reads_left, unread)
            if isinstance(owner, str)
            else ([], reads_left)
        )
    found: list[Request] = []
    first = queue.exclusive.first
    if mode != S and queue.shared:  # a shared request blocked no shared waiters
        found, reads_left = _shared_candidates(queue, name, mode, after, reads_left, unread)
        if found and reads_left <= 0:
            return found, reads_left
    if first is None:
        return found, reads_left
    request = first[2]
    owner = request.owner
    if after is None or after < first:  # otherwise the request that left was later than `first`, and did not block it
        found.append(request)
        reads_left -= _cost(request)
        after = first
    if isinstance(owner, str) and len(table.waiting_of(owner)) > 1:  # `first` does not block later waiters of its owner
        if reads_left <= 0 and found:
            unread.append((name, mode, after))
        else:
            own, reads_left = _waiters_of_owner(table, owner, (name, mode, after), reads_left, unread)
            found = list(dict.fromkeys(found + own))  # without duplicates, in the same order
    return found, reads_left


def _shared_candidates(
    queue: WaitQueue, name: str, mode: QueueMode, after: QueueEntry | None, reads_left: int, unread: AffectedQueues
) -> tuple[list[Request], int]:
    """Return the shared waiters between `after` and the first exclusive waiter, and the remaining `reads_left`.

    Returns at least one waiter if there is one. When no reads are left, the rest of the queue is added to `unread`.
    """
    found = [entry[2] for entry in islice(queue.shared.between(after, queue.exclusive.first), max(reads_left, 1))]
    count = reads = len(found)  # of `simple` waiters
    if queue.non_simple_count:
        count, reads = _count_within(found, reads_left)
    reads_left -= reads
    if found and reads_left <= 0:
        del found[count:]
        unread.append((name, mode, found[-1].entry(name)))
    return found, reads_left


def _candidates_in_special_queue(
    table: LockTable, name: str, mode: QueueMode, after: QueueEntry | None, reads_left: int, unread: AffectedQueues
) -> tuple[list[Request], int]:
    """Return the result of `_candidates_in_queue` for a counted resource or a subtree.

    The waiters are of the modes that conflict with `mode`. In each of these modes, they are the waiters before the first waiter
    in a conflicting mode, and the other waiters of its owner. Waiters for units are returned until the units in use and the
    units of earlier waiters reach the smallest limit.
    """
    resource = table.resources[name]
    queue = resource.wait_queue
    assert queue is not None  # noqa: S101 - what mypy needs to know
    if name in table.closing:  # `close_slice` returns the queues of its waiters
        unread.append((name, mode, None))
        return [], reads_left
    runs, blocking = _runs_of_special_queue(resource, queue, name, mode, after)
    found: dict[int, Request] = {}
    for entry in merge(*runs):
        request = entry[2]
        found[request.id] = request
        reads_left -= _cost(request)
        if request.transaction is not None:
            reads_left -= table.uncounted_names(request) // NAMES_PER_READ
        if reads_left <= 0:
            unread.append((name, mode, entry))
            return list(found.values()), reads_left
    for owner, stop in blocking.items():
        if len(table.waiting_of(owner)) > 1 or resource.exclusive_count:
            start = stop if after is None or (stop is not None and stop > after) else after
            own, reads_left = _waiters_of_owner(table, owner, (name, mode, start), reads_left, unread)
            found |= {request.id: request for request in own}
    return list(found.values()), reads_left


def _runs_of_special_queue(
    resource: LockedResource, queue: WaitQueue, name: str, mode: QueueMode, after: QueueEntry | None
) -> tuple[list[Iterable[QueueEntry]], dict[Owner, QueueEntry | None]]:
    """Return the runs of waiters that may have become grantable, and the first entry of each owner that blocks later waiters.

    A run has the waiters in one mode before the first waiter in a conflicting mode, which blocks all later ones, except those of
    its own owner. If this first waiter has the same mode, it is a run alone. If a holder is exclusive, there are no runs, and
    its owner is returned with the entry None.
    """
    runs: list[Iterable[QueueEntry]] = []
    blocking: dict[Owner, QueueEntry | None] = {}
    if resource.exclusive_count:  # then all holders have the same owner, and exclude all others
        blocking[next(iter(resource.holders.values())).owner] = None
        return runs, blocking
    for waiting_mode in queue.modes():
        if mode not in CONFLICTS[waiting_mode] and not mode == waiting_mode == U:
            continue  # the request that left blocked no waiter in this mode
        stop = min([each.first for each in queue.conflicting(waiting_mode)], default=None)  # type: ignore[type-var]
        if waiting_mode == U:
            runs.append(_units_that_may_fit(resource, queue, name, stop, after))
        else:
            runs.append(queue.of_mode(waiting_mode).between(after, stop))
        if stop is not None:
            # Not `is`: code compiled by mypyc makes another tuple of the same entry.
            if queue.of_mode(waiting_mode).first == stop and (after is None or after < stop):
                runs.append([stop])
            owner = stop[2].owner
            blocking[owner] = min(stop, blocking.get(owner) or stop)
    return runs, blocking


def _units_that_may_fit(
    resource: LockedResource, queue: WaitQueue, name: str, stop: QueueEntry | None, after: QueueEntry | None
) -> Iterator[QueueEntry]:
    """Yield the waiters for units between `after` and `stop`, until the units in use and those of earlier waiters reach the
    smallest limit. None stands for the end of the queue.
    """
    assert isinstance(resource.special, Counted)  # noqa: S101 - what mypy needs to know
    total, smallest = resource.special.in_use, maxsize
    if after is not None:
        total, smallest = queue.add_units_before((total, smallest), after, included=True)
    if total >= smallest:
        return
    for entry in queue.of_mode(U).between(after, stop):
        units, limit = entry[2].units[name]
        total += units
        smallest = min(limit, smallest)
        yield entry
        if total >= smallest:
            break


def _waiters_of_owner(
    table: LockTable, owner: Owner, change: QueueChange, reads_left: int, unread: AffectedQueues
) -> tuple[list[Request], int]:
    """Return the waiters of `owner` in a queue that may have become grantable by `change`, and the remaining `reads_left`."""
    waiting = table.waiting_of(owner)
    name = change[0]
    # If the owner has very many waiting requests or names, the queue is read instead.
    if len(waiting) > MAX_FILTERED_WAITERS or sum(map(_cost, waiting.values())) > MAX_FILTERED_COST:
        if table.resources[name].special is not None:
            return _read_special_queue(table, owner, change, reads_left, unread)
        return _read_queue(table, owner, change, reads_left, unread)
    found: list[Request] = []
    for request in waiting.values():
        names_it = name in request.exclusive or name in request.shared
        if names_it or (request.details is not None and name in request.queues()):
            found.append(request)
            reads_left -= _cost(request)
        reads_left -= 1
    return found, reads_left


def _read_special_queue(
    table: LockTable, owner: Owner, change: QueueChange, reads_left: int, unread: AffectedQueues
) -> tuple[list[Request], int]:
    """Return the result of `_waiters_of_owner` for the queue of a special resource and an owner with many waiting requests.

    Reads the queue in order, until waiters of other owners block the owner in every mode.
    """
    name, mode, after = change
    queue = table.wait_queue(name)
    open_modes = set(queue.modes())  # those in which no waiter that was read blocks `owner`
    found: list[Request] = []
    # The mode is that of the merged queue: a request with many names would first make a dict of their modes.
    for entry, waiting_mode in merge(
        *[zip(queue.of_mode(each).between(after, None), repeat(each)) for each in queue.modes()]
    ):
        request = entry[2]
        reads_left -= 1
        if request.owner != owner:
            open_modes.difference_update([each for each in open_modes if waiting_mode in CONFLICTS[each]])
        elif waiting_mode in open_modes:
            found.append(request)
            reads_left -= _cost(request)
        if not open_modes:
            break
        if reads_left <= 0:
            unread.append((name, mode, entry))
            break
    return found, reads_left


def _read_queue(
    table: LockTable, owner: Owner, change: QueueChange, reads_left: int, unread: AffectedQueues
) -> tuple[list[Request], int]:
    """Return the result of `_waiters_of_owner` for the queue of a plain resource and an owner with many waiting requests.

    Reads the queue in order, up to the first exclusive waiter of another owner, which blocks all later waiters of `owner`.
    Shared waiters are skipped if a shared request left, because it did not block them. Exclusive waiters are skipped if
    another owner holds the resource, or has a shared waiter before them.
    """
    name, mode, after = change
    include_shared = mode == X
    resource, queue = table.resources[name], table.wait_queue(name)
    include_exclusive = len(resource.holders) == table.grants_of(owner).get(name, 0)
    found: list[Request] = []
    exclusive, shared = queue.exclusive.between(after, None), queue.shared.between(after, None)
    next_exclusive, next_shared = next(exclusive, None), next(shared, None)
    while include_exclusive or include_shared:
        if next_exclusive is not None and (next_shared is None or next_exclusive < next_shared):
            entry, included = next_exclusive, include_exclusive
            if entry[2].owner != owner:
                break
            next_exclusive = next(exclusive, None)
        elif next_shared is not None:
            entry, included = next_shared, include_shared
            if entry[2].owner != owner:
                included = include_exclusive = False
            next_shared = next(shared, None)
        else:
            break
        reads_left -= 1
        if included:
            found.append(entry[2])
            reads_left -= _cost(entry[2])
        if reads_left <= 0:
            unread.append((name, mode, entry))
            break
    return found, reads_left


def _count_within(requests: list[Request], max_reads: int) -> tuple[int, int]:
    """Return how many of the first requests can be checked with about `max_reads` reads, at least one, and their reads."""
    reads = 0
    for count, request in enumerate(requests, 1):
        reads += _cost(request)
        if reads >= max_reads:
            return count, reads
    return len(requests), reads


def _cost(request: Request) -> int:
    """Return the number of reads of a check of a waiter: one for each of its queues, or `SPECIAL_COST` if it has `details`."""
    details = request.details
    if details is None:
        return len(request.exclusive) + len(request.shared)
    return SPECIAL_COST * request.queue_count()


def _merge_changes(affected: AffectedQueues) -> AffectedQueues:
    """Return one change for each queue and mode: the one with the earliest position.

    Changes of different modes stay separate. Otherwise each release of a shared lock would restart a search that an earlier
    step has left among the shared waiters.
    """
    merged: dict[tuple[str, QueueMode], QueueEntry | None] = {}
    for name, mode, after in affected:
        merged[name, mode] = earlier(after, merged.get((name, mode), after))
    return [(name, mode, after) for (name, mode), after in merged.items()]


def _queue_order(request: Request) -> tuple[float, int]:
    """Return a sort key: higher priorities first, then by arrival."""
    return (-request.priority, request.id)


# -- The conflict check ---------------------------------------------------------------
#
# Two requests for a plain name conflict if their owners differ and one of them is exclusive. So if a resource has an exclusive
# holder, all its holders have the same owner. For the other modes, see `CONFLICTS`.


def _is_held_by_others(resource: LockedResource, own_grants: int, exclusive: bool) -> bool:
    """Return whether another owner holds a plain resource in a mode that conflicts with `exclusive`.

    `own_grants` is the number of holders of the resource that belong to the requesting owner.
    """
    if exclusive:
        return len(resource.holders) > own_grants
    return resource.exclusive_count > 0 and not own_grants


def _is_held_in_conflict(table: LockTable, resource: LockedResource, name: str, owner: Owner, mode: QueueMode) -> bool:
    """Return whether another owner than `owner` holds a resource in a mode that conflicts with `mode`."""
    own_grants, special = table.grants_of(owner).get(name, 0), resource.special
    if mode == X:
        held = len(resource.holders) > own_grants
    elif resource.exclusive_count:  # then all holders have the same owner
        held = not own_grants
    elif isinstance(special, Counted):
        held = _is_counted_held_in_conflict(resource, special, own_grants, owner, mode)
    else:  # all holders are shared
        held = mode in (U, IX, SIX) and len(resource.holders) > own_grants
    return held or (isinstance(special, Subtree) and has_conflicting_below(table, name, special, mode, owner))


def _is_counted_held_in_conflict(
    resource: LockedResource, special: Counted, own_grants: int, owner: Owner, mode: QueueMode
) -> bool:
    """Return whether another owner holds a counted resource without exclusive holders in a mode that conflicts with `mode`.

    `mode` is `S`, which conflicts with units of others, or `U`, which conflicts with shared locks of others. Whether the units
    fit into the limit is not checked here.
    """
    if mode == S:
        return special.in_use > special.held_by_transaction.get(owner, 0)
    if special.in_use:  # then the owner of the units holds all shared locks
        has_shared_holders = len(resource.holders) > special.unit_holder_count
        return has_shared_holders and not own_grants
    return len(resource.holders) > own_grants


def is_grantable(table: LockTable, request: Request) -> bool:  # noqa: PLR0911 - a function for each mode would cost more
    """Return whether a waiting request can be granted.

    A request is grantable if, on each of its resources, no other owner holds a conflicting lock or
    waits for a conflicting lock earlier in the queue.
    """
    if table.specials:
        return all(_is_unblocked(table, request, name, mode) for name, mode in request.queue_modes())
    owner = request.owner
    for name in request.exclusive:
        resource = table.resources[name]
        if resource.exclusive_count:  # then all holders have the same owner
            if next(iter(resource.holders.values())).owner != owner:
                return False
        elif resource.holders and len(resource.holders) > table.grants_of(owner).get(name, 0):
            return False
        queue, entry = resource.wait_queue, request.entry(name)
        assert queue is not None, "a waiting request is in the queue of each of its resources"  # noqa: S101
        if queue.exclusive.has_other_before(entry, owner) or queue.shared.has_other_before(entry, owner):
            return False
    for name in request.shared:
        resource = table.resources[name]
        if resource.exclusive_count and not table.grants_of(owner).get(name, 0):
            return False
        queue = resource.wait_queue
        assert queue is not None, "a waiting request is in the queue of each of its resources"  # noqa: S101
        if queue.exclusive.has_other_before(request.entry(name), owner):
            return False
    return True


def _is_unblocked(table: LockTable, request: Request, name: str, mode: QueueMode) -> bool:
    """Return whether no holder and no earlier waiter of the resource `name` blocks a waiting request."""
    resource, owner, entry = table.resources[name], request.owner, request.entry(name)
    queue = resource.wait_queue
    assert queue is not None, "a waiting request is in the queue of each of its resources"  # noqa: S101
    if _is_held_in_conflict(table, resource, name, owner, mode):
        return False
    if any(each.has_other_before(entry, owner) for each in queue.conflicting(mode)):
        return False
    return mode != U or units_fit(resource, request.units[name], queue, entry)


def units_fit(
    resource: LockedResource, asked: UnitCount, queue: WaitQueue | None = None, entry: QueueEntry | None = None
) -> bool:
    """Return whether the units `asked` fit beside the units in use and the units of the waiters of `queue` before `entry`.

    Units of the same owner count as well. Without `entry`, all waiters of `queue` are earlier; without `queue`, waiters do not
    count. The sum must be within the limit of the request and within the limit of each earlier waiter. Otherwise a request with
    a greater limit could overtake an earlier request, which would then wait longer.
    """
    units, limit = asked
    special = resource.special
    in_use = 0
    if special is not None:
        assert isinstance(special, Counted)  # noqa: S101 - units of a subtree do not exist
        in_use = special.in_use
    if queue is not None:
        in_use, limit = queue.add_units_before((in_use, limit), entry)
    return units + in_use <= limit


def waits_for_holder(table: LockTable, request: Request) -> bool:
    """Return whether holders alone block a waiting request: another owner holds a conflicting lock, or its units do not fit."""
    if not table.specials:
        return any(
            _is_held_by_others(table.resources[name], table.grants_of(request.owner).get(name, 0), mode == X)
            for name, mode in request.modes()
        )
    for name, mode in request.queue_modes():
        resource = table.resources[name]
        if _is_held_in_conflict(table, resource, name, request.owner, mode):
            return True
        if mode == U and not units_fit(resource, request.units[name]):
            return True
    return False


def is_immediately_grantable(table: LockTable, request: Request) -> bool:
    """Return whether a new request can be granted without entering a wait queue.

    It can if none of its resources has waiters or conflicting holders, or if its owner already holds all its resources.
    """
    if table.specials:
        return _is_immediately_grantable_beside_specials(table, request)
    uncontended, resources = table.uncontended, table.resources
    for name in request.exclusive:
        if (name in uncontended or name in resources) and not _is_compatible(
            table, name, request.owner, exclusive=True
        ):
            return request.transaction is not None and _already_owns(table, request, request.transaction)
    for name in request.shared:
        if (name in resources or name in uncontended) and not _is_compatible(
            table, name, request.owner, exclusive=False
        ):
            return request.transaction is not None and _already_owns(table, request, request.transaction)
    return True


def _is_immediately_grantable_beside_specials(table: LockTable, request: Request) -> bool:
    """Return the result of `is_immediately_grantable` in a table with counted resources or subtrees."""
    # A request for units asks for more than its owner already holds.
    may_own = request.transaction is not None and not request.units
    for name, mode in request.modes():
        resource = table.lookup(name)
        if resource is None:
            continue
        if resource.wait_queue is not None or _is_held_in_conflict(table, resource, name, request.owner, mode):
            return may_own and _already_owns(table, request, str(request.transaction))
        if mode == U and not units_fit(resource, request.units[name]):
            return False
    if not table.subtrees or _has_room_below_subtrees(table, request.owner, request.modes()):
        return True
    return may_own and _already_owns(table, request, str(request.transaction))


def _has_room_below_subtrees(table: LockTable, owner: Owner, modes: Iterable[tuple[str, QueueMode]]) -> bool:
    """Return whether an owner can lock names (name, mode) without a wait for the subtrees above them.

    True if no other owner holds one of these subtrees, or waits for it, in a conflicting mode.
    """
    intentions: dict[str, QueueMode] = {}
    for _, mode, above in table.group_below_subtrees(modes):
        for subtree, _ in above:
            intentions[subtree] = with_intention(intentions.get(subtree), mode)
        if len(intentions) > MAX_QUEUES:  # more than a request may wait in
            return False
    for subtree, mode in intentions.items():
        resource = table.subtrees[subtree]
        if _is_held_in_conflict(table, resource, subtree, owner, mode):
            return False
        queue = resource.wait_queue
        if queue is not None and any(each.first_not_owned_by(owner) is not None for each in queue.conflicting(mode)):
            return False
    return True


class RoomBelow:
    """The results of earlier calls of `is_available` for one owner. Valid while nothing in the table changes."""

    __slots__ = ("has_room", "innermost")

    def __init__(self) -> None:
        self.innermost: dict[str, str | None] = {}
        """The argument `known` of `LockTable.innermost_subtree`."""
        self.has_room: dict[tuple[str, QueueMode], bool] = {}
        """By subtree and mode: True if the owner can lock a name below the subtree in this mode. Includes all outer subtrees."""


def is_available(
    table: LockTable,
    owner: Owner,
    name: str,
    mode: QueueMode,
    units: UnitCount | None = None,
    room_below: RoomBelow | None = None,
) -> bool:
    """Return whether an owner can lock a resource now without extending the wait of any other owner.

    It can if it already holds the resource in the same or a stronger mode, or if no other owner holds it or waits for it in a
    conflicting mode. `units` must fit beside the units of all holders and waiters. Calls for several names of one owner may
    share a `room_below` if the table does not change between them.
    """
    holder = table.uncontended.get(name)
    if holder is not None:
        return holder.owner == owner
    resource = table.resources.get(name)
    if resource is not None:
        own_grants = table.grants_of(owner).get(name, 0)
        holds_as_much = resource.exclusive_count or (mode == S and resource.special is None)
        if own_grants and holds_as_much:
            return units is None or units_fit(resource, units, resource.wait_queue)
        if _is_held_in_conflict(table, resource, name, owner, mode):
            return False
        queue = resource.wait_queue
        if queue is not None and any(each.first_not_owned_by(owner) is not None for each in queue.conflicting(mode)):
            return False
        if units is not None and not units_fit(resource, units, queue):
            return False
    known = RoomBelow() if room_below is None else room_below
    subtree = table.innermost_subtree(name, known.innermost) if table.subtrees else None
    if subtree is not None and (subtree, mode) not in known.has_room:
        known.has_room[subtree, mode] = _has_room_below_subtrees(table, owner, [(name, mode)])
    return subtree is None or known.has_room[subtree, mode]


def _is_compatible(table: LockTable, name: str, owner: Owner, exclusive: bool) -> bool:
    """Return whether a resource of the table has neither waiters nor conflicting holders of other owners."""
    if name in table.uncontended:
        return table.uncontended[name].owner == owner
    resource = table.resources[name]
    if resource.wait_queue is not None:
        return False
    if not exclusive and not resource.exclusive_count:  # the usual case of a shared lock
        return True
    return not _is_held_by_others(resource, table.grants_of(owner).get(name, 0), exclusive)


def _already_owns(table: LockTable, request: Request, transaction: str) -> bool:
    """Return whether a transaction already holds all resources of a request, each in the same or a stronger mode.

    The request names no units.
    """
    if transaction not in table.transactions:
        return False
    grants, uncontended, resources = table.transactions[transaction].grants, table.uncontended, table.resources
    for name in request.exclusive:
        if name not in grants or not (name in uncontended or resources[name].exclusive_count):
            return False
    return all(name in grants and not _holds_units(table, name) for name in request.shared)


def _holds_units(table: LockTable, name: str) -> bool:
    """Return whether the holders of a resource hold units, which are weaker than a shared lock."""
    special = table.resources[name].special if name in table.resources else None
    return isinstance(special, Counted) and special.in_use > 0
