"""What was taken in, with what the ledger says of it now: its date, and the last state change over all."""

from __future__ import annotations

from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, FromClause, ScalarSelect, func, select

from genie.timeouts.databases.database import Database
from genie.timeouts.ledger import Ledger


def newest_change(changes: FromClause, whose: FromClause) -> ScalarSelect[Any]:
    """The number of the last state change of a transfer."""
    older = changes.alias("older")
    newest = select(func.max(older.c.transferStateChangeId)).where(older.c.transferId == whose.c.transferId)
    return newest.correlate_except(older).scalar_subquery()


class Waiting(NamedTuple):
    """The rows of `transferTimeout`, each joined to its transfer and to the last state change of that."""

    rows: FromClause
    expires: ColumnElement[Any]
    state: ColumnElement[Any]


def waiting(ledger: Ledger, database: Database) -> Waiting:
    """Where to select from, and where the expiration date and the state stand."""
    tables = ledger.tables
    timeout, transfer = tables.timeout, tables.transfer
    last = tables.state_change.alias("last")
    rows = timeout.join(transfer, transfer.c.transferId == timeout.c.transferId)
    rows = rows.join(last, last.c.transferStateChangeId == newest_change(tables.state_change, timeout))
    return Waiting(rows, database.date(transfer.c.expirationDate), last.c.transferStateId)
