"""Who may have become grantable when somebody left a queue or gave a lock back: a few, however long the queue is."""

from __future__ import annotations

from collections.abc import Iterator

from genie.core.lock_table import AffectedQueues, LockTable
from genie.core.model import Owner, QueueEntry, Request


def grant_candidates(table: LockTable, affected: AffectedQueues, newcomer: Request | None = None) -> list[Request]:
    """Those to be looked at, each once, in the order of the queue. `newcomer` is one of them in any case."""
    if len(affected) == 1 and newcomer is None:
        requests = _candidates_in_queue(table, *affected[0])
    else:
        found = {} if newcomer is None else {newcomer.id: newcomer}
        for name, run, low in _merge_by_resource(affected):
            for request in _candidates_in_queue(table, name, run, low):
                found[request.id] = request
        requests = list(found.values())
    if len(requests) > 1:
        requests.sort(key=_queue_order)
    return requests


def _candidates_in_queue(table: LockTable, name: str, run: bool, low: QueueEntry | None) -> list[Request]:
    """Those in a queue who may have become grantable, each once.

    They are the shared ones ahead of the first exclusive one (`run`: where an exclusive one left, and behind its
    place `low`; nobody else stood in their way), and that first one. Behind it only its own owner's.
    """
    resource = table.resources.get(name)
    queue = None if resource is None else resource.wait_queue
    if resource is None or queue is None:
        return []
    found: list[Request] = []
    first = queue.exclusive.first
    if resource.exclusives:
        owner = next(iter(resource.holders.values())).owner
    else:
        if run and queue.shared:
            found += [entry[2] for entry in queue.shared.between(low, first)]
        if first is None:
            return found
        found.append(first[2])
        owner = first[2].owner
    if isinstance(owner, str):
        found += [request for request in table.waiting_of(owner).values() if name in request.names()]
        return list(dict.fromkeys(found))
    return found


def _merge_by_resource(affected: AffectedQueues) -> AffectedQueues:
    """Many may have left one queue: it is looked at once, from the foremost place on."""
    merged: dict[str, tuple[bool, QueueEntry | None]] = {}
    for name, run, low in affected:
        if name in merged and run and merged[name][0]:
            other = merged[name][1]
            merged[name] = (True, None if low is None or other is None else min(low, other))
        elif name not in merged or run:
            merged[name] = (run, low)
    return [(name, run, low) for name, (run, low) in merged.items()]


def _queue_order(request: Request) -> tuple[float, int]:
    return (-request.priority, request.id)


# -- The queue rule: who may be granted, and whom everybody else waits for. Everything else follows from it --------


def is_grantable(table: LockTable, request: Request) -> bool:  # noqa: PLR0911 - one for each way to be in the way
    """Whether a waiting request can be granted.

    For every resource that it names: no other owner holds it in a conflicting mode, and no request of
    another owner that stands ahead in its queue asks for it in one.
    """
    owner = request.owner
    for name in request.exclusive:
        resource = table.resources[name]
        if resource.exclusives:
            if next(iter(resource.holders.values())).owner != owner:
                return False
        elif resource.holders and len(resource.holders) > table.grant_count(owner, name):
            return False
        queue, entry = resource.wait_queue, request.entry(name)
        assert queue is not None, "a waiting request stands in every queue that it names"  # noqa: S101
        ahead = queue.exclusive.first_not_owned_by(owner)
        if ahead is not None and ahead < entry:
            return False
        ahead = queue.shared.first_not_owned_by(owner)
        if ahead is not None and ahead < entry:
            return False
    for name in request.shared:
        resource = table.resources[name]
        if resource.exclusives and not table.grant_count(owner, name):
            return False
        queue = resource.wait_queue
        assert queue is not None, "a waiting request stands in every queue that it names"  # noqa: S101
        ahead = queue.exclusive.first_not_owned_by(owner)
        if ahead is not None and ahead < request.entry(name):
            return False
    return True


def is_immediately_grantable(table: LockTable, request: Request) -> bool:
    """Whether a newcomer is granted without ever standing in a queue.

    It is where nobody waits and nobody holds anything in a conflicting mode, or where its owner has it all already.
    """
    uncontended, resources = table.uncontended, table.resources
    for name in request.exclusive:
        if (name in uncontended or name in resources) and not _is_compatible(
            table, name, request.owner, exclusive=True
        ):
            return _already_owns(table, request)
    for name in request.shared:
        if (name in uncontended or name in resources) and not _is_compatible(
            table, name, request.owner, exclusive=False
        ):
            return _already_owns(table, request)
    return True


def is_available(table: LockTable, owner: Owner, name: str, exclusive: bool) -> bool:
    """Whether an owner can be given a resource at once without adding to anybody's wait.

    It can where it holds it already, in the same or a stronger mode; else where no other owner holds it or waits for it
    in a conflicting one.
    """
    holder = table.uncontended.get(name)
    if holder is not None:
        return holder.owner == owner
    resource = table.resources.get(name)
    if resource is None:
        return True
    own = table.grant_count(owner, name)
    if own and (resource.exclusives or not exclusive):
        return True
    if resource.exclusives or (exclusive and len(resource.holders) > own):
        return False
    queue = resource.wait_queue
    return queue is None or (
        queue.exclusive.first_not_owned_by(owner) is None
        and not (exclusive and queue.shared.first_not_owned_by(owner) is not None)
    )


def _is_compatible(table: LockTable, name: str, owner: Owner, exclusive: bool) -> bool:
    if name in table.uncontended:
        return table.uncontended[name].owner == owner
    resource = table.resources[name]
    if resource.wait_queue is not None:
        return False
    if exclusive:
        return len(resource.holders) == table.grant_count(owner, name)
    return not resource.exclusives or table.grant_count(owner, name) > 0


def _already_owns(table: LockTable, request: Request) -> bool:
    """Whether a newcomer's owner already holds all that it asks for, each in the same or a stronger mode."""
    if request.transaction is None or request.transaction not in table.transactions:
        return False
    grants, uncontended, resources = table.transactions[request.transaction].grants, table.uncontended, table.resources
    for name in request.exclusive:
        if name not in grants or not (name in uncontended or resources[name].exclusives):
            return False
    return all(name in grants for name in request.shared)


def conflicting_holders(table: LockTable, request: Request, name: str, exclusive: bool) -> Iterator[Request]:
    """The grants of other owners on `name`, in whose queue a request stands, that it has to wait for."""
    resource, owner = table.resources[name], request.owner
    if exclusive:
        for holder in resource.holders.values():
            if holder.owner != owner:
                yield holder
    elif resource.exclusives:
        for holder in resource.holders.values():
            if holder.owner != owner and holder.is_exclusive(name):
                yield holder
