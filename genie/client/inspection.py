"""The answer to `inspect`, in Python names and in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from genie.errors import Blocker, GenieError
from genie.protocol.messages import InspectedRow, InspectedRows


@dataclass(frozen=True, slots=True)
class Holder:
    """A lock that is held.

    `resources` are the first ten that it holds (`shared:NAME`, `exclusive:NAME`; the exclusive ones first),
    `resources_total` is how many there are. `since` is the unix time of the grant in seconds, as `time.time()` gives it.
    `expires_in` (seconds) is what was left until `transaction_timeout` when the server answered.
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


@dataclass(frozen=True, slots=True)
class Waiter:
    """A request that waits.

    `since` is the unix time of its arrival in seconds, `expires_in` (seconds) what was left until its `queue_timeout`
    (None: it waits without a limit).
    `blockers` are the first ten requests in its way, `blockers_total` is how many there are (beyond 1,000: at least).
    The other fields are those of `Holder`.
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


@dataclass(frozen=True, slots=True)
class Inspection:
    """Who holds and who waits, as the server saw it in one moment.

    `holders` and `queue` are rows, at most `limit` of them; the totals count all that match.
    """

    holders: tuple[Holder, ...]
    holders_total: int
    queue: tuple[Waiter, ...]
    queue_total: int


def read(payload: dict[str, Any]) -> Inspection:
    """The payload of `inspected`; GenieError if it is not as this version knows it."""
    try:
        rows = msgspec.convert(payload, InspectedRows)
    except msgspec.ValidationError as error:
        raise GenieError(f"the server's answer to inspect is not as this version knows it: {error}") from None
    return Inspection(
        holders=tuple([_holder(row) for row in rows.holders]),
        holders_total=rows.holdersTotal,
        queue=tuple([_waiter(row) for row in rows.queue]),
        queue_total=rows.queueTotal,
    )


def _holder(row: InspectedRow) -> Holder:
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
    )


def _waiter(row: InspectedRow) -> Waiter:
    return Waiter(
        id=row.id,
        resources=tuple(row.resources),
        resources_total=row.resourcesTotal,
        priority=row.priority,
        since=row.since / 1000,
        expires_in=None if row.expiresIn is None else row.expiresIn / 1000,
        blockers=tuple([blocker.blocker() for blocker in row.blockers]),
        blockers_total=row.blockersTotal,
        transaction=row.transactionName,
        note=row.note,
    )
