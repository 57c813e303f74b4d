"""Who may have become grantable when somebody left a line or gave a lock back: a few, however long the line is."""

from __future__ import annotations

from collections.abc import Iterator

from genie.core.lock_table import Table, Touched
from genie.core.model import Entry, Owner, Request


def candidates(table: Table, touched: Touched, newcomer: Request | None = None) -> list[Request]:
    """Those to be looked at, each once, in the order of the queue. `newcomer` is one of them in any case."""
    if len(touched) == 1 and newcomer is None:
        requests = _of_line(table, *touched[0])
    else:
        found = {} if newcomer is None else {newcomer.id: newcomer}
        for name, run, low in _once_a_line(touched):
            for request in _of_line(table, name, run, low):
                found[request.id] = request
        requests = list(found.values())
    if len(requests) > 1:
        requests.sort(key=_queue_order)
    return requests


def _of_line(table: Table, name: str, run: bool, low: Entry | None) -> list[Request]:
    """Those in a line who may have become grantable, each once.

    They are the shared ones ahead of the first exclusive one (`run`: where an exclusive one left, and behind its
    place `low`; nobody else stood in their way), and that first one. Behind it only its own owner's.
    """
    resource = table.resources.get(name)
    line = None if resource is None else resource.line
    if resource is None or line is None:
        return []
    found: list[Request] = []
    first = line.exclusive.first
    if resource.exclusives:
        owner = next(iter(resource.holders.values())).owner
    else:
        if run and line.shared:
            found += [entry[2] for entry in line.shared.between(low, first)]
        if first is None:
            return found
        found.append(first[2])
        owner = first[2].owner
    if isinstance(owner, str):
        found += [request for request in table.waiting_of(owner).values() if name in request.names()]
        return list(dict.fromkeys(found))
    return found


def _once_a_line(touched: Touched) -> Touched:
    """Many may have left one line: it is looked at once, from the foremost place on."""
    lines: dict[str, tuple[bool, Entry | None]] = {}
    for name, run, low in touched:
        if name in lines and run and lines[name][0]:
            other = lines[name][1]
            lines[name] = (True, None if low is None or other is None else min(low, other))
        elif name not in lines or run:
            lines[name] = (run, low)
    return [(name, run, low) for name, (run, low) in lines.items()]


def _queue_order(request: Request) -> tuple[float, int]:
    return (-request.priority, request.id)


# -- The queue rule: who may be granted, and whom everybody else waits for. Everything else follows from it --------


def clear(table: Table, request: Request) -> bool:  # noqa: PLR0911 - one for each way to be in the way
    """Whether a waiting request can be granted.

    For every resource that it names: no other owner holds it in a conflicting mode, and no request of
    another owner that stands ahead in its line asks for it in one.
    """
    owner = request.owner
    for name in request.exclusive:
        resource = table.resources[name]
        if resource.exclusives:
            if next(iter(resource.holders.values())).owner != owner:
                return False
        elif resource.holders and len(resource.holders) > table.grants_of(owner, name):
            return False
        line, entry = resource.line, request.entry(name)
        assert line is not None, "a waiting request stands in every line that it names"  # noqa: S101
        ahead = line.exclusive.first_of_others(owner)
        if ahead is not None and ahead < entry:
            return False
        ahead = line.shared.first_of_others(owner)
        if ahead is not None and ahead < entry:
            return False
    for name in request.shared:
        resource = table.resources[name]
        if resource.exclusives and not table.grants_of(owner, name):
            return False
        line = resource.line
        assert line is not None, "a waiting request stands in every line that it names"  # noqa: S101
        ahead = line.exclusive.first_of_others(owner)
        if ahead is not None and ahead < request.entry(name):
            return False
    return True


def at_once(table: Table, request: Request) -> bool:
    """Whether a newcomer is granted without ever standing in a line.

    It is where nobody waits and nobody holds anything in a conflicting mode, or where its owner has it all already.
    """
    sole, resources = table.sole, table.resources
    for name in request.exclusive:
        if (name in sole or name in resources) and not _admits(table, name, request.owner, exclusive=True):
            return _owns(table, request)
    for name in request.shared:
        if (name in sole or name in resources) and not _admits(table, name, request.owner, exclusive=False):
            return _owns(table, request)
    return True


def free(table: Table, owner: Owner, name: str, exclusive: bool) -> bool:
    """Whether an owner can be given a resource at once without adding to anybody's wait.

    It can where it holds it already, in the same or a stronger mode; else where no other owner holds it or waits for it
    in a conflicting one.
    """
    holder = table.sole.get(name)
    if holder is not None:
        return holder.owner == owner
    resource = table.resources.get(name)
    if resource is None:
        return True
    own = table.grants_of(owner, name)
    if own and (resource.exclusives or not exclusive):
        return True
    if resource.exclusives or (exclusive and len(resource.holders) > own):
        return False
    line = resource.line
    return line is None or (
        line.exclusive.first_of_others(owner) is None
        and not (exclusive and line.shared.first_of_others(owner) is not None)
    )


def _admits(table: Table, name: str, owner: Owner, exclusive: bool) -> bool:
    if name in table.sole:
        return table.sole[name].owner == owner
    resource = table.resources[name]
    if resource.line is not None:
        return False
    if exclusive:
        return len(resource.holders) == table.grants_of(owner, name)
    return not resource.exclusives or table.grants_of(owner, name) > 0


def _owns(table: Table, request: Request) -> bool:
    """Whether a newcomer's owner already holds all that it asks for, each in the same or a stronger mode."""
    if request.transaction is None or request.transaction not in table.transactions:
        return False
    grants, sole, resources = table.transactions[request.transaction].grants, table.sole, table.resources
    for name in request.exclusive:
        if name not in grants or not (name in sole or resources[name].exclusives):
            return False
    return all(name in grants for name in request.shared)


def conflicts(table: Table, request: Request, name: str, exclusive: bool) -> Iterator[Request]:
    """The grants of other owners on `name`, in whose line a request stands, that it has to wait for."""
    resource, owner = table.resources[name], request.owner
    if exclusive:
        for holder in resource.holders.values():
            if holder.owner != owner:
                yield holder
    elif resource.exclusives:
        for holder in resource.holders.values():
            if holder.owner != owner and holder.excludes(name):
                yield holder
