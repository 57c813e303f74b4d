"""The life of special resources in the lock table: counted resources, and subtrees with the locks below them.

The first request that names a special resource opens it. The end of the last one closes it.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator
from itertools import islice
from math import inf

from genie.core.lock_table import AffectedQueues, LockTable
from genie.core.model import Details, Owner, QueueEntry, Request, in_parts
from genie.core.special import (
    MAX_CLOSED_WAITERS,
    MAX_COMPARED_NAMES,
    MAX_EXAMPLES,
    MAX_QUEUES,
    MAX_SEPARATE_SUBTREES,
    MAX_WAITERS_BELOW,
    NAMES_PER_WAITER_BELOW,
    Counted,
    Subtree,
    possible_subtrees,
    range_below,
)
from genie.core.wait_queue import NO_REQUESTS, WaitQueue
from genie.lock_modes import IS, IX, SIX, WHOLE_NAMESPACE, QueueMode, S, X

# -- Opening --------------------------------------------------------------------------------


def open_specials(
    table: LockTable, request: Request, *, max_queue_entries: float = inf, is_bounded: bool = True
) -> bool:
    """Add the counted resources and the subtrees that a new request names to the table.

    A new subtree gets the intentions of the requests below it. Return False, before all are added, if the wait queues would
    have more than `max_queue_entries` entries, or with `is_bounded`, if this would take too long.
    """
    table.detailed += 1
    details = request.details
    assert details is not None  # noqa: S101 - what mypy needs to know
    for name in details.units:
        resource = table.get_or_create_resource(name)
        if resource.special is None:
            resource.special = Counted()
            table.specials += 1
    if not details.subtrees:
        return True
    new = [name for name in details.subtrees if table.is_new(name)]
    for name in details.subtrees:
        if name not in new:
            _add_request(table, name, request)
    if is_bounded and len(details.subtrees) > 1:  # a single subtree is compared with all names, however many
        locked = len(table.uncontended) + len(table.resources)
        if len(new) * locked + table.uncounted_names(request) > MAX_COMPARED_NAMES:
            return False
    max_cost = MAX_WAITERS_BELOW if is_bounded else inf
    for name in new:
        max_cost -= _open_subtree(table, name, max_queue_entries - table.queue_entries, max_cost)
        if max_cost < 0:
            return False
        _add_request(table, name, request)
    return True


def _add_request(table: LockTable, subtree: str, request: Request) -> None:
    """Add a request that names a subtree to the count of its transaction."""
    special = table.subtrees[subtree].special
    if request.transaction is not None and isinstance(special, Subtree):
        special.request_counts[request.transaction] = special.request_counts.get(request.transaction, 0) + 1


def open_subtrees(table: LockTable, subtrees: Collection[str]) -> Iterator[None]:
    """Add the new ones of these subtrees, before `restore` adds the requests that name them.

    If there are many of them, all requests are read once, in parts. Otherwise all names are read for each subtree. Yield after
    each part, or each subtree. The table must not change meanwhile.
    """
    new = [name for name in subtrees if name not in table.subtrees]
    if len(new) <= MAX_SEPARATE_SUBTREES:
        for name in new:
            _open_subtree(table, name, inf, inf)
            yield
        return
    opened: dict[str, Subtree] = {}
    for name in new:
        resource = table.subtrees[name] = table.get_or_create_resource(name)
        resource.special = opened[name] = Subtree()
        table.specials += 1
    for part in in_parts(table.held.values()):
        for request in part:
            for subtree, name, mode in _names_below(request, opened):
                opened[subtree].add(request, [name], mode, 1)
        yield
    yield from _open_above_waiters(table, opened)


def _open_above_waiters(table: LockTable, opened: Container[str]) -> Iterator[None]:
    """Make the waiting requests below new subtrees waiters of these, in parts: yield after each."""
    waiting: dict[str, dict[int, Request]] = {}
    for part in in_parts(table.waiting.values()):
        for request in part:
            for subtree, _, _ in _names_below(request, opened):
                waiting.setdefault(subtree, {})[request.id] = request
        yield
    for subtree, requests in waiting.items():
        _add_intentions_of_waiters(table, subtree, requests.values())
        yield


def _open_subtree(table: LockTable, subtree: str, max_waiters: float, max_cost: float) -> float:
    """Add a subtree to the table, with intentions for the locks and the waiting requests below it.

    Return the cost of the waiting requests, for which `MAX_WAITERS_BELOW` is the limit. If there are more than `max_waiters`,
    if they cost more than `max_cost`, or if one of them waits in too many queues, change nothing, and return infinity.
    """
    special, queues = _read_below(table, subtree)
    entries: list[QueueEntry] = []
    for queue in queues:
        queue.collect(entries, with_intentions=False)
    if len(entries) // NAMES_PER_WAITER_BELOW > max_cost:
        return inf
    waiting = {entry[2].id: entry[2] for entry in entries}
    cost = len(waiting) + sum([each.name_count() for each in waiting.values()]) // NAMES_PER_WAITER_BELOW
    if len(waiting) > max_waiters or cost > max_cost:
        return inf
    if max_cost < inf and any(each.queue_count() >= MAX_QUEUES for each in waiting.values()):
        return inf
    if subtree in table.closing:  # its numbers are exact, and some waiters below it have intentions
        left = table.subtrees[subtree].wait_queue
        if left is not None:
            _void_positions(table, subtree, left, {})  # `Continue`, which was to close it, reads the whole queue
        table.closing.remove(subtree)
    else:
        resource = table.subtrees[subtree] = table.get_or_create_resource(subtree)
        resource.special = special
        table.specials += 1
    _add_intentions_of_waiters(table, subtree, waiting.values())
    return cost


def _read_below(table: LockTable, subtree: str) -> tuple[Subtree, list[WaitQueue]]:
    """Return the numbers of locks below a subtree and examples of them, and the wait queues below it."""
    # There may be a million names, so the code for each of them is short.
    special, queues = Subtree(), list[WaitQueue]()
    is_all, (first, end) = subtree == WHOLE_NAMESPACE, range_below(subtree)
    names: Collection[str] = table.uncontended
    if not is_all:
        names = [name for name in names if first <= name < end]
    special.examples = {name: (X, table.uncontended[name]) for name in islice(names, MAX_EXAMPLES)}
    holder_count = exclusive_count = 0
    for name, resource in table.resources.items():
        if (is_all or first <= name < end) and name != subtree:
            holder_count += len(resource.holders)
            exclusive_count += resource.exclusive_count
            if resource.wait_queue is not None:
                queues.append(resource.wait_queue)
            if resource.special is not None and isinstance(resource.special, Counted):
                exclusive_count += resource.special.unit_holder_count
            if len(special.examples) < MAX_EXAMPLES and resource.holders:
                holder = next(iter(resource.holders.values()))
                special.examples[name] = resource.holder_mode(name, holder), holder
    special.shared_count = holder_count - exclusive_count
    special.exclusive_count = exclusive_count + len(names)
    return special, queues


def _add_intentions_of_waiters(table: LockTable, subtree: str, waiting: Iterable[Request]) -> None:
    """Make requests, which wait for names below a new subtree, waiters of the subtree."""
    shared: list[Request] = []
    exclusive: list[Request] = []
    for request in waiting:
        modes = _modifiable_modes(table, request)
        if subtree in modes:
            continue
        if _has_name_below(request.exclusive, subtree) or _has_name_below(request.units, subtree):
            modes[subtree] = IX
            exclusive.append(request)
        else:
            modes[subtree] = IS
            shared.append(request)
    table.queue_entries += len(exclusive) + len(shared)
    for requests, mode in ((shared, IS), (exclusive, IX)):
        if requests:
            table.wait_queue(subtree).restore_all(subtree, requests, mode)


def _modifiable_modes(table: LockTable, request: Request) -> dict[str, QueueMode]:
    """Return the modes of a waiting request by queue, to which the caller adds the queue of a subtree.

    The request is no longer `simple`.
    """
    if request.details is None:
        request.details = Details()
    modes = request.details.queue_modes
    if modes is None:
        modes = request.details.queue_modes = dict(request.modes())
    if request.simple:
        request.simple = False
        for name in modes:
            table.wait_queue(name).non_simple_count += 1
    return modes


def _names_below(request: Request, subtrees: Container[str]) -> Iterator[tuple[str, str, QueueMode]]:
    """Yield each subtree of `subtrees` above a name of a request, with the name and its mode."""
    for name, mode in request.modes():
        for subtree in possible_subtrees(name):
            if subtree in subtrees:
                yield subtree, name, mode


def _has_name_below(names: Iterable[str], subtree: str) -> bool:
    """Return whether one of these names is below a subtree. The subtree itself must not be among them."""
    first = subtree[:-2]
    for name in names:  # noqa: SIM110 - there are many calls, most with one name, and `any` takes four times as long
        if name.startswith(first):
            return True
    return False


# -- Closing --------------------------------------------------------------------------------


def close_specials(table: LockTable, request: Request, *, keep_moved: bool = False) -> AffectedQueues:
    """Remove the counted resources and the subtrees of a request that has ended, if no other request names them.

    Return the queues of the waiters below the subtrees, which may be grantable now, and the names of the subtrees below
    which more waiters are left for `close_slice`. The positions of these waiters in the queue of a subtree become void.

    `keep_moved` is for a state that is being loaded. Such a state may lack requests for the subtree, so the positions in its
    queue stay valid.
    """
    details = request.details
    if details is None or not (details.units or details.subtrees):
        return []
    table.detailed -= 1
    affected: dict[str, None] = {}
    for name in details.units:
        resource = table.resources.get(name)
        if resource is not None and not resource.holders and resource.wait_queue is None:
            table.remove_resource(name, resource)
    for subtree in details.subtrees:
        resource = table.subtrees.get(subtree)
        if resource is None or subtree in table.closing:
            continue
        if request.transaction is not None:
            assert isinstance(resource.special, Subtree)  # noqa: S101 - what mypy needs to know
            resource.special.end_request(request.transaction)
        queue = resource.wait_queue
        is_named = resource.holders or (queue is not None and any(mode not in (IS, IX) for mode in queue.modes()))
        if is_named or subtree in table.kept_open:
            continue
        table.closing.add(subtree)
        if queue is None or table.close_room > 0:
            _close_slice(table, subtree, affected, keep_moved=keep_moved)
        else:  # a later step closes it
            affected[subtree] = None
    return [(name, X, None) for name in affected]


def _void_positions(table: LockTable, subtree: str, queue: WaitQueue, affected: dict[str, None]) -> int:
    """Remove from the queue of a subtree the waiters that a rearrangement has moved in this queue. Return their number.

    Their position in this queue becomes the original one. That may be the position at which a search for pending grants was to
    continue, after a waiter that has moved and then left.
    """
    table.restart_pending_grants([subtree])
    moved = [*queue.moved.values()]
    for waiter in moved:
        queue.remove(waiter.entry(subtree), waiter.queue_mode(subtree))
        waiter.move(subtree, (-waiter.priority, waiter.id, waiter))  # its original position
        table.unmoved.append(waiter)
        _remove_intention(table, waiter, subtree, affected)
    queue.moved, queue.inverted = NO_REQUESTS, None
    return len(moved)


def _remove_intention(table: LockTable, waiter: Request, subtree: str, affected: dict[str, None]) -> None:
    """Remove the intention of a waiter that has left the queue of a subtree. Add one of its queues to `affected`.

    One queue is enough: if the waiter is grantable now, it is a candidate in each of its queues, which may be 1,024.
    """
    assert waiter.details is not None and waiter.details.queue_modes is not None  # noqa: S101, PT018
    del waiter.details.queue_modes[subtree]
    table.queue_entries -= 1
    affected[next(iter(waiter.queues()))] = None


def close_slice(table: LockTable, subtree: str, *, keep_moved: bool = False) -> AffectedQueues:
    """Remove the intentions of some waiters of a subtree that is in `closing`, and the subtree after the last one.

    Return the queues in which these waiters may be grantable now, and the subtree itself if there are more waiters. For
    `keep_moved` see `close_specials`.
    """
    table.close_room = MAX_CLOSED_WAITERS
    affected: dict[str, None] = {}
    _close_slice(table, subtree, affected, keep_moved=keep_moved)
    return [(name, X, None) for name in affected]


def _close_slice(table: LockTable, subtree: str, affected: dict[str, None], *, keep_moved: bool = False) -> None:
    """Remove some waiters as `close_slice` does, and add to `affected` what it returns. `close_specials` describes `keep_moved`."""
    resource = table.subtrees[subtree]
    queue = resource.wait_queue
    removed = 0
    if queue is not None and not keep_moved:  # all at once: two waiters must not have the same position
        removed = _void_positions(table, subtree, queue, affected)
    while queue is not None and not queue.is_empty and removed < MAX_CLOSED_WAITERS:
        for entry in queue.pop_chunk():
            removed += 1
            _remove_intention(table, entry[2], subtree, affected)
    table.close_room -= removed
    if queue is None or queue.is_empty:
        table.remove_resource(subtree, resource)
    else:
        affected[subtree] = None


# -- Locks below subtrees -------------------------------------------------------------------


def has_conflicting_below(table: LockTable, subtree: str, special: Subtree, mode: QueueMode, owner: Owner) -> bool:
    """Return whether another owner than `owner` holds a lock below a subtree that conflicts with `mode`."""
    count = special.exclusive_count + (special.shared_count if mode == X else 0)
    if not count or mode not in (S, X, SIX):
        return False  # most often: the locks of the owner need not be counted
    shared, exclusive = own_below(table, subtree, special, owner)
    return count > exclusive + (shared if mode == X else 0)


def own_below(table: LockTable, subtree: str, special: Subtree, owner: Owner) -> tuple[int, int]:
    """Return the numbers of shared and exclusive locks that an owner holds below a subtree that it names in a request.

    The first call reads all locks of the owner.
    """
    if not isinstance(owner, str):  # a request without a transaction never holds and waits
        return 0, 0
    own = special.counts_by_transaction.get(owner)
    if own is None:
        own = special.counts_by_transaction[owner] = locks_below(table, subtree, special, owner)
    return own


def locks_below(table: LockTable, subtree: str, special: Subtree, owner: Owner) -> tuple[int, int]:
    """Return the numbers of shared and exclusive locks that an owner holds below a subtree. Reads all locks of the owner.

    Units count as exclusive locks.
    """
    grants = table.grants_of(owner)
    is_all, (first, end) = subtree == WHOLE_NAMESPACE, range_below(subtree)
    names = [name for name in grants if (is_all or first <= name < end) and name != subtree]
    total = sum(grants.values()) if len(names) == len(grants) else sum([grants[name] for name in names])
    if not special.shared_count:
        return 0, total
    shared = 0
    for name in [name for name in names if name not in table.uncontended]:
        resource = table.resources[name]
        shared += grants[name] - resource.exclusive_count  # if it is not 0, all holders have the same owner
        if isinstance(resource.special, Counted):
            shared -= resource.special.request_counts.get(str(owner), 0)
    return shared, total - shared
