"""Who stands in a waiting request's way, for its `queue-timeout` and for those who look."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from genie.core.events import Blocker
from genie.core.model import Request
from genie.core.rule import conflicts
from genie.core.table import Table

NAMED = 10
"""Blockers told by name."""
COUNTED = 1000
"""Blockers counted exactly. Beyond it the total is a lower bound."""


def blame(table: Table, request: Request) -> tuple[tuple[Blocker, ...], int]:
    """The first ten that a waiting request waits for, and how many there are (beyond 1,000: at least).

    One that stands in the way on two resources counts twice.
    """
    found = _blockers(table, request)
    named = tuple(
        Blocker(
            id=other.id,
            transaction=other.transaction,
            resource=name,
            mode=other.mode(name),
            held=held,
            since_unix_ms=int(other.since_unix_ms),
        )
        for name, other, held in islice(found, NAMED)
    )
    return named, len(named) + sum(1 for _ in islice(found, COUNTED - len(named)))


def obstacles(table: Table, request: Request) -> Iterator[str]:
    """The resources that a waiting request can't have at present, out of those that it names."""
    for name, exclusive in request.wants():
        if next(_on(table, request, name, exclusive), None) is not None:
            yield name


def _blockers(table: Table, request: Request) -> Iterator[tuple[str, Request, bool]]:
    for name, exclusive in request.wants():
        yield from _on(table, request, name, exclusive)


def _on(table: Table, request: Request, name: str, exclusive: bool) -> Iterator[tuple[str, Request, bool]]:
    """Those in the way on one resource: who holds it, then who stands ahead in its line."""
    owner = request.owner
    for holder in conflicts(table, request, name, exclusive):
        yield name, holder, True
    line, entry = table.line(name), request.entry(name)
    ahead = [line.exclusive, line.shared] if exclusive else [line.exclusive]
    for queue in ahead:
        for place in queue.between(None, entry):
            if place[2].owner != owner:
                yield name, place[2], False
