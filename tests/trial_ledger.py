"""What the tests of ledgers ask their databases, past the code that they test."""

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
"""The document's plain query, without intermediate structures, for SQLite and some time from now."""


def ask(file: Path, query: str, *values: object) -> list[Any]:
    """The rows of a query; an only column without its row."""
    with closing(sqlite3.connect(file)) as connection, connection:
        rows = connection.execute(query, values).fetchall()
    return [row[0] if len(row) == 1 else row for row in rows]


def overdue(file: Path, later: str = "+0 seconds") -> list[tuple[str, str]]:
    """Which transfers are expired by then, and their states."""
    return ask(file, OVERDUE, later)
