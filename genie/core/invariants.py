"""Check the invariants of a recovered set of requests, in linear time, before a lock manager leads with them.

`genie.testing` has slower checks of a lock manager in operation. A recovered state lacks waiting requests without a session,
which end with the process of the server. So a recovered request may wait without a blocker, which is no violation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from genie.core.deadlock import successors
from genie.core.manager import LockManager
from genie.core.model import HELD, Owner, Request


def find_violations(requests: Iterable[Request]) -> Iterator[str]:
    """Yield a sentence for each violated invariant. The requests are in their stored states, held or waiting.

    No two holders of a resource conflict, each fence is unique, and no two requests of a queue have the same position.
    If all this holds, the wait-for graph is checked for cycles.
    """
    requests = list(requests)
    held: list[Request] = []
    waiting: list[Request] = []
    for request in requests:
        (held if request.state is HELD else waiting).append(request)
    sound = True
    for check in (
        _repeated_names(requests),
        _conflicting_holders(held),
        _shared_fences(held),
        _shared_positions(waiting),
    ):
        for violation in check:
            sound = False
            yield violation
    if sound:
        yield from _cycle(waiting, requests)


def _repeated_names(requests: Iterable[Request]) -> Iterator[str]:
    """Yield the requests that name a resource twice, or none."""
    for request in requests:
        names = request.names()
        if not names:
            yield f"request {request.id} names no resource"
        elif len(set(names)) != len(names):
            yield f"request {request.id} names a resource twice"


def _conflicting_holders(held: Sequence[Request]) -> Iterator[str]:
    """Yield the locks that conflict with an exclusive lock of another owner."""
    exclusive: dict[str, Request] = {}
    for request in held:
        for name in request.exclusive:
            exclusive.setdefault(name, request)
    for request in held:
        for name in request.names():
            other = exclusive.get(name, request)
            if other.owner != request.owner:
                yield f"requests {other.id} and {request.id} both hold {name!r}, and {other.id} is exclusive"


def _shared_fences(held: Iterable[Request]) -> Iterator[str]:
    """Yield the locks that have the same fencing token as an earlier one."""
    by_fence: dict[int, Request] = {}
    for request in held:
        other = by_fence.setdefault(request.fence, request)
        if other is not request:
            yield f"requests {other.id} and {request.id} both have the fencing token {request.fence}"


def _shared_positions(waiting: Iterable[Request]) -> Iterator[str]:
    """Yield the waiting requests that have the same position in a queue as another one."""
    by_position: dict[tuple[str, float, int], Request] = {}
    for request in waiting:
        for name in request.names():
            other = by_position.setdefault((name, *request.entry(name)[:2]), request)
            if other is not request:
                yield f"requests {other.id} and {request.id} have the same position in the queue of {name!r}"


def _cycle(waiting: Iterable[Request], requests: Iterable[Request]) -> Iterator[str]:
    """Yield a sentence if owners wait for each other in a cycle: then none of their requests can ever be granted.

    Removes owners that wait for no other owner, until each remaining owner waits for a remaining one.
    """
    manager = LockManager()
    for request in requests:
        manager.adopt(request)
    remaining: dict[Owner, int] = {}
    blocked_by: dict[Owner, list[Owner]] = {}
    owners = dict.fromkeys(request.owner for request in waiting)
    for owner in owners:
        others = {other for other in successors(manager.table, owner) if other in owners and other != owner}
        remaining[owner] = len(others)
        for other in others:
            blocked_by.setdefault(other, []).append(owner)
    free = [owner for owner, count in remaining.items() if not count]
    while free:
        owner = free.pop()
        del remaining[owner]
        for other in blocked_by.get(owner, ()):
            remaining[other] -= 1
            if not remaining[other]:
                free.append(other)
    if remaining:
        some = ", ".join(repr(owner) for owner in list(remaining)[:5])
        yield f"{len(remaining)} owners wait for each other in a cycle, or for such a cycle, among them {some}"
