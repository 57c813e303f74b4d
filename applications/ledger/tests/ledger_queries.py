"""Queries of an SQLite ledger for tests, independent of the code under test."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

OVERDUE = """
SELECT t.transferId, tsc.transferStateId
FROM transfer t
JOIN (SELECT transferId, MAX(transferStateChangeId) AS last FROM transferStateChange GROUP BY transferId) ts
ON ts.transferId = t.transferId
JOIN transferStateChange tsc ON tsc.transferStateChangeId = ts.last
WHERE tsc.transferStateId IN ('RECEIVED_PREPARE', 'RESERVED')
AND t.expirationDate < strftime('%Y-%m-%d %H:%M:%f', 'now', ?)
ORDER BY t.transferId
"""
"""The reference design's query "without intermediate structures", for SQLite, at a time relative to now."""


def query(file: Path, statement: str, *values: object) -> list[Any]:
    """Execute a statement, and return its rows; single values instead of rows with one column."""
    with closing(sqlite3.connect(file)) as connection, connection:
        rows = connection.execute(statement, values).fetchall()
    return [row[0] if len(row) == 1 else row for row in rows]


def overdue(file: Path, later: str = "+0 seconds") -> list[tuple[str, str]]:
    """Return the ids and states of the transfers that are expired now, or `later`."""
    return query(file, OVERDUE, later)
