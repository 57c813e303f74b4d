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

from genie.core.lock_table import AffectedQueues, LockTable, earlier
from genie.core.model import Owner, QueueEntry, Request
from genie.core.special import MAX_QUEUES, Counted, Subtree, with_intention
from genie.core.subtrees import has_conflicting_below
from genie.core.wait_queue import LockedResource, WaitQueue
from genie.lock_modes import CONFLICTS, IX, SIX, QueueMode, S, U, UnitCount, X

MAX_CANDIDATES = 1_000
"""Number of waiting requests, or of resources that they name, after which `grant_candidates` ends its search. It bounds the
duration of a step."""

REREADS_PER_NEW_CANDIDATE = 50
"""A search that has used up its limit still reads queues, at most `MAX_CANDIDATES`, whose candidates are known. A queue with a new
candidate counts as this many queues."""

SPECIAL_COST = 3
"""For how many resources that are read a counted resource or a subtree counts: its check takes as long."""

NAMES_PER_READ = 256
"""Number of locks of a transaction that are compared with a subtree in the time in which a resource is read."""

MAX_FILTERED_WAITERS = 16
"""Maximum number of waiting requests of an owner that are all read to find the requests in one queue. If the owner has more
requests, the queue is read instead."""

MAX_FILTERED_COST = 1_000
"""Maximum number of resources that these requests may name. If they name more, the queue is read, too: it can be read in parts."""


def grant_candidates(
    table: LockTable, affected: AffectedQueues, new_request: Request | None = None
) -> tuple[list[Request], AffectedQueues, int]:
    """Return the waiters that may have become grantable, the queues that are left, and how much was read.

    The waiters are in queue order, each once, with `new_request` if it is given. `affected` are the queues that changed. If
    there are many requests to read, some queues are left: the caller continues with them later, first with the unread
    requests. The third value is the approximate number of requests and resources that were read.
    """
    left: AffectedQueues = []
    if len(affected) == 1 and new_request is None:
        requests, limit = _candidates_in_queue(table, *affected[0], MAX_CANDIDATES, left)
    else:
        found = {} if new_request is None else {new_request.id: new_request}
        limit = rereads = MAX_CANDIDATES
        unread: AffectedQueues = []
        for name, mode, after in _merge_changes(affected):
            if limit > 0:
                candidates, limit = _candidates_in_queue(table, name, mode, after, limit - 1, left)
                for request in candidates:
                    found[request.id] = request
                continue
            if (
                rereads > 0
            ):  # the next candidate is often one that was found in another queue, which is checked only once
                rest: AffectedQueues = []
                candidates, _ = _candidates_in_queue(table, name, mode, after, 1, rest)
                if all(request.id in found for request in candidates):
                    rereads -= 1
                    left += rest
                    continue
                rereads -= REREADS_PER_NEW_CANDIDATE
            unread.append((name, mode, after))
        requests = list(found.values())
        left = unread + left
    if len(requests) > 1:
        requests.sort(key=_queue_order)
    return requests, left, MAX_CANDIDATES - limit


def only_grantable(table: LockTable, name: str) -> Request | None:
    """Return the first waiter of a free resource if only exclusive requests wait for it, and the first one is `simple`.

    This request is grantable, and no other waiter is grantable beside it: the usual case of a contended resource. Without
    this shortcut, lock and release on such a resource execute 5 % more instructions. None in any other case.
    """
    resource = table.resources.get(name)
    if resource is None or resource.holders or resource.wait_queue is None or resource.wait_queue.shared:
        return None
    if resource.special is not None:
        return None
    first = resource.wait_queue.exclusive.first
    return first[2] if first is not None and first[2].simple else None


def first_waiter_for_units(table: LockTable, name: str) -> Request | None:
    """Return the first waiter of a counted resource that only has holders of units and waiters for units, if it is `simple`."""
    resource = table.resources.get(name)
    if resource is None or not isinstance(resource.special, Counted) or resource.wait_queue is None:
        return None
    queue = resource.wait_queue
    if len(resource.holders) > resource.special.unit_holder_count:
        return None
    first = queue.of_mode(U).first
    if first is None or not first[2].simple or queue.exclusive or queue.shared:
        return None
    return first[2]


def units_in_use(resource: LockedResource, limit: int) -> int:
    """Return the units in use of a resource, or `limit` if it has holders of another mode."""
    special = resource.special
    if not isinstance(special, Counted) or len(resource.holders) > special.unit_holder_count:
        return limit
    return special.in_use


def _candidates_in_queue(
    table: LockTable, name: str, mode: QueueMode, after: QueueEntry | None, limit: int, left: AffectedQueues
) -> tuple[list[Request], int]:
    """Return the waiters of one queue that may have become grantable, each once, and the rest of `limit`.

    `mode` and `after` are the mode and the queue position of the request that left; `after` is None if it was a holder. Once
    the requests that were read name `limit` resources, the unread part of the queue is added to `left`.
    """
    resource = table.resources.get(name)
    if resource is None or resource.wait_queue is None:
        return [], limit
    queue = resource.wait_queue
    if resource.special is not None:
        return _candidates_in_special_queue(table, name, mode, after, limit, left)
    if resource.exclusive_count:  # then all holders have the same owner, which blocks the waiters of all other owners
        owner = next(iter(resource.holders.values())).owner
        # A request without a transaction is its own owner, which has no other request.
        return (
            _waiters_of_owner(table, owner, (name, mode, after), limit, left) if isinstance(owner, str) else ([], limit)
        )
    found: list[Request] = []
    first = queue.exclusive.first
    if mode != S and queue.shared:  # a shared request blocked no shared waiters
        found, limit = _shared_candidates(queue, name, mode, after, limit, left)
        if found and limit <= 0:
            return found, limit
    if first is None:
        return found, limit
    owner = first[2].owner
    if after is None or after < first:  # otherwise the request that left was later than `first`, and did not block it
        found.append(first[2])
        limit -= _cost(first[2])
        after = first
    if isinstance(owner, str) and len(table.waiting_of(owner)) > 1:  # `first` does not block later waiters of its owner
        if limit <= 0 and found:
            left.append((name, mode, after))
        else:
            own, limit = _waiters_of_owner(table, owner, (name, mode, after), limit, left)
            found = list(dict.fromkeys(found + own))  # without duplicates, in the same order
    return found, limit


def _shared_candidates(
    queue: WaitQueue, name: str, mode: QueueMode, after: QueueEntry | None, limit: int, left: AffectedQueues
) -> tuple[list[Request], int]:
    """Return the shared waiters between `after` and the first exclusive waiter, and the rest of `limit`.

    Returns at least one waiter if there is one. If `limit` is used up, the rest of the queue is added to `left`.
    """
    found = [entry[2] for entry in islice(queue.shared.between(after, queue.exclusive.first), max(limit, 1))]
    count, names = _count_within(found, limit) if queue.non_simple_count else (len(found), len(found))
    limit -= names
    if found and limit <= 0:
        del found[count:]
        left.append((name, mode, found[-1].entry(name)))
    return found, limit


def _candidates_in_special_queue(
    table: LockTable, name: str, mode: QueueMode, after: QueueEntry | None, limit: int, left: AffectedQueues
) -> tuple[list[Request], int]:
    """Return the waiters in the queue of a counted resource or a subtree that may have become grantable, and the rest of `limit`.

    In each mode that conflicts with `mode`, these are the waiters up to the first one of a conflicting mode, and the other
    waiters of its owner. Waiters for units are returned until the units in use and the units of earlier waiters reach the
    smallest limit.
    """
    resource = table.resources[name]
    queue = resource.wait_queue
    assert queue is not None  # noqa: S101 - what mypy needs to know
    if name in table.closing:  # `close_slice` returns the queues of its waiters
        left.append((name, mode, None))
        return [], limit
    runs, blocking = _runs_of_special_queue(resource, queue, name, mode, after)
    found: dict[int, Request] = {}
    for entry in merge(*runs):
        request = entry[2]
        found[request.id] = request
        limit -= _cost(request)
        if request.transaction is not None:
            limit -= table.uncounted_names(request) // NAMES_PER_READ
        if limit <= 0:
            left.append((name, mode, entry))
            return list(found.values()), limit
    for owner, stop in blocking.items():
        if len(table.waiting_of(owner)) > 1 or resource.exclusive_count:
            start = stop if after is None or (stop is not None and stop > after) else after
            own, limit = _waiters_of_owner(table, owner, (name, mode, start), limit, left)
            found |= {request.id: request for request in own}
    return list(found.values()), limit


def _runs_of_special_queue(
    resource: LockedResource, queue: WaitQueue, name: str, mode: QueueMode, after: QueueEntry | None
) -> tuple[list[Iterable[QueueEntry]], dict[Owner, QueueEntry | None]]:
    """Return the waiters in each mode up to the first conflicting waiter, and the owners of these conflicting waiters, each
    with its entry.

    Later waiters of these owners may be grantable, too. If the resource has an exclusive holder, only its owner is returned.
    """
    runs: list[Iterable[QueueEntry]] = []
    blocking: dict[Owner, QueueEntry | None] = {}
    if resource.exclusive_count:  # then all holders have the same owner, and exclude all others
        blocking[next(iter(resource.holders.values())).owner] = None
        return runs, blocking
    for waiting in queue.modes():
        if mode not in CONFLICTS[waiting] and not mode == waiting == U:
            continue
        stop = min([each.first for each in queue.conflicting(waiting)], default=None)  # type: ignore[type-var]
        if waiting == U:
            runs.append(_units_that_may_fit(resource, queue, name, stop, after))
        else:
            runs.append(queue.of_mode(waiting).between(after, stop))
        if stop is not None:
            if queue.of_mode(waiting).first is stop and (after is None or after < stop):
                runs.append([stop])
            blocking[stop[2].owner] = min(stop, blocking.get(stop[2].owner) or stop)
    return runs, blocking


def _units_that_may_fit(
    resource: LockedResource, queue: WaitQueue, name: str, stop: QueueEntry | None, after: QueueEntry | None
) -> Iterator[QueueEntry]:
    """Yield the first waiters for units after `after` and before `stop`, until the units reach the smallest limit."""
    assert isinstance(resource.special, Counted)  # noqa: S101 - what mypy needs to know
    total, smallest = resource.special.in_use, maxsize
    if after is not None:
        total, smallest = queue.add_units_before(name, (total, smallest), after, included=True)
    for entry in () if total >= smallest else queue.of_mode(U).between(after, stop):
        units, limit = entry[2].units[name]
        total += units
        smallest = min(limit, smallest)
        yield entry
        if total >= smallest:
            break


def _waiters_of_owner(
    table: LockTable, owner: Owner, change: tuple[str, QueueMode, QueueEntry | None], limit: int, left: AffectedQueues
) -> tuple[list[Request], int]:
    """Return the waiters of `owner` that may have become grantable by a change of a queue, and the rest of `limit`."""
    waiting = table.waiting_of(owner)
    name = change[0]
    if len(waiting) > MAX_FILTERED_WAITERS or sum(map(_cost, waiting.values())) > MAX_FILTERED_COST:
        if table.resources[name].special is not None:
            return _read_special_queue(table, owner, change, limit, left)
        return _read_queue(table, owner, change, limit, left)
    found: list[Request] = []
    for request in waiting.values():
        if (
            name in request.exclusive
            or name in request.shared
            or (request.details is not None and name in request.queues())
        ):
            found.append(request)
            limit -= _cost(request)
        limit -= 1
    return found, limit


def _read_special_queue(
    table: LockTable, owner: Owner, change: tuple[str, QueueMode, QueueEntry | None], limit: int, left: AffectedQueues
) -> tuple[list[Request], int]:
    """Return the waiters of `owner` in the queue of a special resource that may have become grantable, and the rest of `limit`.

    For an owner with many waiting requests. Reads the queue in order, until waiters of other owners block the owner in every
    mode.
    """
    name, mode, after = change
    queue = table.wait_queue(name)
    open_modes = set(queue.modes())
    found: list[Request] = []
    # The mode is that of the merged queue: a request with many names would first make a dict of their modes.
    for entry, waiting in merge(
        *[zip(queue.of_mode(each).between(after, None), repeat(each)) for each in queue.modes()]
    ):
        request = entry[2]
        limit -= 1
        if request.owner != owner:
            open_modes.difference_update([each for each in open_modes if waiting in CONFLICTS[each]])
        elif waiting in open_modes:
            found.append(request)
            limit -= _cost(request)
        if not open_modes:
            break
        if limit <= 0:
            left.append((name, mode, entry))
            break
    return found, limit


def _read_queue(
    table: LockTable, owner: Owner, change: tuple[str, QueueMode, QueueEntry | None], limit: int, left: AffectedQueues
) -> tuple[list[Request], int]:
    """Return the waiters of `owner` in a queue that may have become grantable, and the rest of `limit`.

    For an owner with many waiting requests. Reads the queue in order, up to the first exclusive waiter of another owner, which
    blocks all later waiters of `owner`.
    Only exclusive requests block shared waiters, so these are skipped unless an exclusive request left. Exclusive waiters are
    skipped if other owners hold the resource, or if a shared waiter of another owner is before them.
    """
    name, mode, after = change
    include_shared = mode == X
    resource, queue = table.resources[name], table.wait_queue(name)
    include_exclusive = resource.exclusive_count > 0 or len(resource.holders) == table.grant_count(owner, name)
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
        limit -= 1
        if included:
            found.append(entry[2])
            limit -= _cost(entry[2])
        if limit <= 0:
            left.append((name, mode, entry))
            break
    return found, limit


def _count_within(requests: list[Request], limit: int) -> tuple[int, int]:
    """Return the number of first requests that together name about `limit` resources, at least one, and these resources."""
    names = 0
    for count, request in enumerate(requests, 1):
        names += _cost(request)
        if names >= limit:
            return count, names
    return len(requests), names


def _cost(request: Request) -> int:
    """Return how many resources the check of a waiter reads. A special one takes as long as `SPECIAL_COST` plain ones."""
    details = request.details
    if details is None:
        return len(request.exclusive) + len(request.shared)
    return SPECIAL_COST * request.queue_count()


def _merge_changes(affected: AffectedQueues) -> AffectedQueues:
    """Merge the changes of a queue that have the same mode: the search starts at the first changed position.

    Other changes are not merged. Otherwise the search that a step has left among the shared waiters would begin again with
    each shared lock that is released.
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


def _is_held_against(resource: LockedResource, own_count: int, exclusive: bool) -> bool:
    """Return whether another owner than the one with `own_count` of the grants holds a resource in a conflicting mode."""
    if exclusive:
        return len(resource.holders) > own_count
    return resource.exclusive_count > 0 and not own_count


def _excludes(table: LockTable, resource: LockedResource, name: str, owner: Owner, mode: QueueMode) -> bool:
    """Return whether another owner than `owner` holds a resource in a mode that conflicts with `mode`."""
    own_count, special = table.grant_count(owner, name), resource.special
    if mode == X:
        held = len(resource.holders) > own_count
    elif resource.exclusive_count:  # then all holders have the same owner
        held = not own_count
    elif isinstance(special, Counted):
        held = _counts_against(resource, special, own_count, owner, mode)
    else:
        held = mode in (U, IX, SIX) and len(resource.holders) > own_count
    return held or (isinstance(special, Subtree) and has_conflicting_below(table, name, special, mode, owner))


def _counts_against(resource: LockedResource, special: Counted, own_count: int, owner: Owner, mode: QueueMode) -> bool:
    """Return whether units of another owner exclude a shared lock of `owner`, or shared locks exclude its units."""
    if mode == S:
        return special.in_use > special.held_by_transaction.get(owner, 0)
    if special.in_use:  # then shared locks, if there are any, are of the owner of the units
        return not own_count and len(resource.holders) > special.unit_holder_count
    return len(resource.holders) > own_count


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
        elif resource.holders and len(resource.holders) > table.grant_count(owner, name):
            return False
        queue, entry = resource.wait_queue, request.entry(name)
        assert queue is not None, "a waiting request is in the queue of each of its resources"  # noqa: S101
        if queue.exclusive.has_other_before(entry, owner) or queue.shared.has_other_before(entry, owner):
            return False
    for name in request.shared:
        resource = table.resources[name]
        if resource.exclusive_count and not table.grant_count(owner, name):
            return False
        queue = resource.wait_queue
        assert queue is not None, "a waiting request is in the queue of each of its resources"  # noqa: S101
        if queue.exclusive.has_other_before(request.entry(name), owner):
            return False
    return True


def _is_unblocked(table: LockTable, request: Request, name: str, mode: QueueMode) -> bool:
    """Return whether neither a holder nor an earlier waiter of one resource blocks a waiting request."""
    resource, owner, entry = table.resources[name], request.owner, request.entry(name)
    queue = resource.wait_queue
    assert queue is not None, "a waiting request is in the queue of each of its resources"  # noqa: S101
    if _excludes(table, resource, name, owner, mode):
        return False
    if any(each.has_other_before(entry, owner) for each in queue.conflicting(mode)):
        return False
    return mode != U or units_fit(resource, request.units[name], name, queue, entry)


def units_fit(
    resource: LockedResource,
    asked: UnitCount,
    name: str,
    queue: WaitQueue | None = None,
    entry: QueueEntry | None = None,
) -> bool:
    """Return whether units fit beside the units in use and the units of the waiters of `queue` before `entry`, of any owner.

    The sum of these units must be within the limit of the request, and within the limit of each earlier waiter. Otherwise a
    later request with a greater limit would be granted before an earlier request, which would then wait longer. Without
    `entry` all waiters are earlier.
    """
    units, limit = asked
    special = resource.special
    in_use = 0
    if special is not None:
        assert isinstance(special, Counted)  # noqa: S101 - units of a subtree do not exist
        in_use = special.in_use
    if queue is not None:
        in_use, limit = queue.add_units_before(name, (in_use, limit), entry)
    return units + in_use <= limit


def waits_for_holder(table: LockTable, request: Request) -> bool:
    """Return whether another owner holds a conflicting lock on any resource of a waiting request, or too many units are in
    use.
    """
    if not table.specials:
        return any(
            _is_held_against(table.resources[name], table.grant_count(request.owner, name), mode == X)
            for name, mode in request.modes()
        )
    for name, mode in request.queue_modes():
        resource = table.resources[name]
        if _excludes(table, resource, name, request.owner, mode):
            return True
        if mode == U and not units_fit(resource, request.units[name], name):
            return True
    return False


def is_immediately_grantable(table: LockTable, request: Request) -> bool:
    """Return whether a new request can be granted without entering a wait queue.

    This is so if none of its resources has waiters or conflicting holders, or if its owner already
    holds all its resources.
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
    """Return whether a new request can be granted without entering a wait queue, in a table with counted resources or subtrees."""
    # A request for units adds to the units that its owner holds.
    may_own = request.transaction is not None and not request.units
    for name, mode in request.modes():
        resource = table.lookup(name)
        if resource is None:
            continue
        if resource.wait_queue is not None or _excludes(table, resource, name, request.owner, mode):
            return may_own and _already_owns(table, request, str(request.transaction))
        if mode == U and not units_fit(resource, request.units[name], name):
            return False
    if not table.subtrees or _has_room_below_subtrees(table, request.owner, request.modes()):
        return True
    return may_own and _already_owns(table, request, str(request.transaction))


def _has_room_below_subtrees(table: LockTable, owner: Owner, modes: Iterable[tuple[str, QueueMode]]) -> bool:
    """Return whether other owners neither hold subtrees above the names nor wait for them in conflicting modes."""
    intentions: dict[str, QueueMode] = {}
    for _, mode, above in table.group_below_subtrees(modes):
        for subtree, _ in above:
            intentions[subtree] = with_intention(intentions.get(subtree), mode)
        if len(intentions) > MAX_QUEUES:  # it may not wait either
            return False
    for subtree, mode in intentions.items():
        resource = table.subtrees[subtree]
        if _excludes(table, resource, subtree, owner, mode):
            return False
        queue = resource.wait_queue
        if queue is not None and any(each.first_not_owned_by(owner) is not None for each in queue.conflicting(mode)):
            return False
    return True


class RoomBelow:
    """A cache about the subtrees above the names that one owner asks for. Valid while nothing in the table changes."""

    __slots__ = ("has_room", "innermost")

    def __init__(self) -> None:
        self.innermost: dict[str, str | None] = {}
        """See `LockTable.innermost_subtree`."""
        self.has_room: dict[tuple[str, QueueMode], bool] = {}
        """True if a mode has room below a subtree and below all outer subtrees."""


def is_available(
    table: LockTable,
    owner: Owner,
    name: str,
    mode: QueueMode,
    units: UnitCount | None = None,
    room_below: RoomBelow | None = None,
) -> bool:
    """Return whether an owner can lock a resource now without extending the wait of any other owner.

    A resource is available if the owner already holds it in the same or a stronger mode, or if no
    other owner holds it or waits for it in a conflicting mode. Units must fit, also beside those of all waiters.
    `room_below`: what earlier calls with the same owner have found, if nothing has changed since.
    """
    holder = table.uncontended.get(name)
    if holder is not None:
        return holder.owner == owner
    resource = table.resources.get(name)
    if resource is not None:
        own_count = table.grant_count(owner, name)
        if own_count and (resource.exclusive_count or (mode == S and resource.special is None)):
            return units is None or units_fit(resource, units, name, resource.wait_queue)
        if _excludes(table, resource, name, owner, mode):
            return False
        queue = resource.wait_queue
        if queue is not None and any(each.first_not_owned_by(owner) is not None for each in queue.conflicting(mode)):
            return False
        if units is not None and not units_fit(resource, units, name, queue):
            return False
    known = RoomBelow() if room_below is None else room_below
    subtree = table.innermost_subtree(name, known.innermost) if table.subtrees else None
    if subtree is not None and (subtree, mode) not in known.has_room:
        known.has_room[subtree, mode] = _has_room_below_subtrees(table, owner, [(name, mode)])
    return subtree is None or known.has_room[subtree, mode]


def _is_compatible(table: LockTable, name: str, owner: Owner, exclusive: bool) -> bool:
    """Return whether a resource, which must be in the table, has no waiters and no other owner holds a conflicting lock."""
    if name in table.uncontended:
        return table.uncontended[name].owner == owner
    resource = table.resources[name]
    if resource.wait_queue is not None:
        return False
    if not exclusive and not resource.exclusive_count:  # the usual case of a shared lock
        return True
    return not _is_held_against(resource, table.grant_count(owner, name), exclusive)


def _already_owns(table: LockTable, request: Request, transaction: str) -> bool:
    """Return whether the transaction of a request without units holds all its resources, each in the same or a stronger
    mode.
    """
    if transaction not in table.transactions:
        return False
    grants, uncontended, resources = table.transactions[transaction].grants, table.uncontended, table.resources
    for name in request.exclusive:
        if name not in grants or not (name in uncontended or resources[name].exclusive_count):
            return False
    return all(name in grants and not _holds_units(table, name) for name in request.shared)


def _holds_units(table: LockTable, name: str) -> bool:
    special = table.resources[name].special if name in table.resources else None
    return isinstance(special, Counted) and special.in_use > 0
