"""What a run is going to do, from what it has found. Nothing here asks a database or a clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import NamedTuple

from genie.timeouts.ledger import Ledger

EXACT = timedelta(seconds=1)
"""What our copy of a date may be off: that of the document has no fractions."""


@dataclass(frozen=True, slots=True)
class ExpiredTransfer:
    """A transfer that is still in processing after its time. `expiration_date` is in UTC."""

    transfer_id: str
    expiration_date: datetime
    state: str


class Found(NamedTuple):
    """A transfer: its date and its last state in the ledger, and our row for it, if there is one."""

    transfer_id: str
    expires: datetime | None
    state: str
    timeout_id: int | None
    kept: datetime | None
    handed_over: datetime | None


@dataclass(slots=True)
class Plan:
    """What is to be written. Numbers are those of the rows of `transferTimeout`."""

    insert: dict[str, datetime] = field(default_factory=dict)
    """Expiration dates by transfer: in processing, and not taken in yet."""
    delete: list[int] = field(default_factory=list)
    """What has become final."""
    refresh: list[int] = field(default_factory=list)
    """Whose date has changed in the ledger."""
    expired: dict[str, ExpiredTransfer] = field(default_factory=dict)
    """To be handed over, the longest expired first."""
    rows: dict[str, int] = field(default_factory=dict)
    """The rows of those that are handed over and were there already."""

    def __bool__(self) -> bool:
        return bool(self.insert or self.delete or self.refresh or self.expired)


def plan(found: Iterable[Found], now: datetime, ledger: Ledger, most: int) -> Plan:
    """What follows from what was found: `most` transfers are handed over. What was found twice counts as found last."""
    made, expired = Plan(), []
    for one in {each.transfer_id: each for each in found}.values():
        if one.state in ledger.final_states:
            if one.timeout_id is not None:
                made.delete.append(one.timeout_id)
        elif one.state in ledger.processing_states and one.expires is not None:
            if one.timeout_id is None:
                made.insert[one.transfer_id] = one.expires
            elif one.kept is None or abs(one.kept - one.expires) >= EXACT:
                made.refresh.append(one.timeout_id)
            if one.handed_over is None and one.expires < now:
                expired.append((one.expires, one))
    expired.sort(key=lambda each: (each[0], each[1].transfer_id))
    for expires, one in expired[:most]:
        made.expired[one.transfer_id] = ExpiredTransfer(one.transfer_id, expires, one.state)
        if one.timeout_id is not None:
            made.rows[one.transfer_id] = one.timeout_id
    return made
