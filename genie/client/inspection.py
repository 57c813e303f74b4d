"""The reply to `inspect`, converted to Python objects with times in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from genie.errors import Blocker, GenieError
from genie.protocol.messages import InspectedRow, InspectedRows


@dataclass(frozen=True, slots=True)
class Holder:
    """A lock that is held.

    `resources` are the first ten resources of the lock as `shared:NAME`, `exclusive:NAME` or `2/10:NAME`, the exclusive ones
    first. `resources_total` is the number of all its resources. `since` is the Unix time of the grant in seconds, like
    `time.time()`. `expires_in` is the number of seconds until `transaction_timeout`, counted from the server's reply.
    """

    id: int
    resources: tuple[str, ...]
    resources_total: int
    priority: float
    since: float
    expires_in: float
    fence: int
    transaction: str | None = None
    note: str | None = None
    traceparent: str | None = None


@dataclass(frozen=True, slots=True)
class Waiter:
    """A request that waits.

    `since` is the Unix time in seconds at which the request arrived. `expires_in` is the number of seconds until its
    `queue_timeout`, counted from the server's reply, or None if the request waits without a limit. `blockers` are the first
    ten requests that block it, and `blockers_total` is the number of all blockers. Above 1,000 that number is a lower bound.
    The other fields have the same meaning as in `Holder`.
    """

    id: int
    resources: tuple[str, ...]
    resources_total: int
    priority: float
    since: float
    expires_in: float | None
    blockers: tuple[Blocker, ...]
    blockers_total: int
    transaction: str | None = None
    note: str | None = None
    traceparent: str | None = None


@dataclass(frozen=True, slots=True)
class Inspection:
    """The matching locks and waiting requests of a server at one moment.

    `holders` and `queue` have at most `limit` rows; the totals count all matches.
    """

    holders: tuple[Holder, ...]
    holders_total: int
    queue: tuple[Waiter, ...]
    queue_total: int


def parse_inspected(payload: dict[str, Any]) -> Inspection:
    """Convert the payload of an `inspected` message to Python objects, with times in seconds instead of milliseconds.

    Raises GenieError if a field is missing or has another type, for example because the server has another version.
    """
    try:
        rows = msgspec.convert(payload, InspectedRows)
    except msgspec.ValidationError as error:
        raise GenieError(f"the server's reply to inspect has an unknown format: {error}") from None
    return Inspection(
        holders=tuple([_to_holder(row) for row in rows.holders]),
        holders_total=rows.holdersTotal,
        queue=tuple([_to_waiter(row) for row in rows.queue]),
        queue_total=rows.queueTotal,
    )


def _to_holder(row: InspectedRow) -> Holder:
    """Convert a row about a held lock, with times in milliseconds, to a `Holder` with times in seconds."""
    return Holder(
        id=row.id,
        resources=tuple(row.resources),
        resources_total=row.resourcesTotal,
        priority=row.priority,
        since=row.since / 1000,
        expires_in=(row.expiresIn or 0) / 1000,
        fence=row.fence,
        transaction=row.transactionName,
        note=row.note,
        traceparent=row.traceparent,
    )


def _to_waiter(row: InspectedRow) -> Waiter:
    """Convert a row about a waiting request, with times in milliseconds, to a `Waiter` with times in seconds."""
    return Waiter(
        id=row.id,
        resources=tuple(row.resources),
        resources_total=row.resourcesTotal,
        priority=row.priority,
        since=row.since / 1000,
        expires_in=None if row.expiresIn is None else row.expiresIn / 1000,
        blockers=tuple([blocker_row.to_blocker() for blocker_row in row.blockers]),
        blockers_total=row.blockersTotal,
        transaction=row.transactionName,
        note=row.note,
        traceparent=row.traceparent,
    )
