"""What was taken in, with what the ledger says of it now."""

from __future__ import annotations

from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, FromClause, func, select

from genie.timeouts.databases.database import Database
from genie.timeouts.ledger import Ledger


class Waiting(NamedTuple):
    """The rows of `transferTimeout`, each joined to its transfer and to the last state change of that."""

    rows: FromClause
    expires: ColumnElement[Any]
    state: ColumnElement[Any]


def waiting(ledger: Ledger, database: Database) -> Waiting:
    """Where to select from, and where the expiration date and the state stand."""
    tables = ledger.tables
    timeout, transfer = tables.timeout, tables.transfer
    last, older = tables.state_change.alias("last"), tables.state_change.alias("older")
    newest = select(func.max(older.c.transferStateChangeId)).where(older.c.transferId == timeout.c.transferId)
    rows = timeout.join(transfer, transfer.c.transferId == timeout.c.transferId)
    rows = rows.join(last, last.c.transferStateChangeId == newest.correlate_except(older).scalar_subquery())
    return Waiting(rows, database.date(transfer.c.expirationDate), last.c.transferStateId)
