"""Who may have become grantable when somebody left a line or gave a lock back: a few, however long the line is."""

from __future__ import annotations

from genie.core.model import Entry, Request
from genie.core.table import Table, Touched


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
