"""The SQL of the reference design, in batches of the same number of state changes.

It is unchanged, except for IGNORE: without it, the SQL fails with a duplicate key as soon as the
state changes of a transfer in processing are in two batches.
"""

from __future__ import annotations

import logging
import time

from scale_parts.report import progress
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from genie_ledger import Ledger
from genie_ledger.databases.opening import open_database
from genie_ledger.schema import prepare
from timeouts_parts.ledger import BATCH, Way

CLEAN_UP = """
DELETE tt
FROM transferTimeout AS tt
JOIN (SELECT tsc.transferId, MAX(tsc.transferStateChangeId) maxTransferStateChangeId
      FROM transferTimeout tt1
      JOIN transferStateChange tsc
      ON tsc.transferId = tt1.transferId
      GROUP BY transferId) ts
ON ts.transferId = tt.transferId
JOIN transferStateChange tsc
ON tsc.transferStateChangeId = ts.maxTransferStateChangeId
WHERE tsc.transferStateId IN ('RECEIVED_FULFIL', 'COMMITTED', 'FAILED',
      'EXPIRED',  'EXPIRED_PREPARED', 'EXPIRED_RESERVED', 'REJECTED', 'ABORTED')
"""
INSERT = """
INSERT IGNORE INTO transferTimeout(transferId, expirationDate)
SELECT t.transferId, t.expirationDate
FROM transfer t
JOIN (SELECT transferId, MAX(transferStateChangeId) maxTransferStateChangeId
      FROM transferStateChange
      WHERE transferStateChangeId > :least
      AND transferStateChangeId <= :most
      GROUP BY transferId) ts
ON ts.transferId = t.transferId
JOIN transferStateChange tsc
ON tsc.transferStateChangeId = ts.maxTransferStateChangeId
WHERE tsc.transferStateId IN ('RECEIVED_PREPARE', 'RESERVED')
"""
logging.getLogger("asyncmy").setLevel(logging.ERROR)  # it tells of each row that is ignored

SEGMENT = "segmentType = 'timeout' AND enumeration = 0 AND tableName = 'transferStateChange'"


async def go_through(url: str) -> Way:
    """Read the whole ledger, as `ledger.go_through` does. Delivers and marks nothing, so it finds
    the expired transfers again each time.
    """
    way, least = Way(), 0
    database = open_database(url)
    try:
        await prepare(database, Ledger())
        async with database.reading() as connection:
            last = (
                await connection.execute(text("SELECT MAX(transferStateChangeId) FROM transferStateChange"))
            ).scalar_one()
        while least + BATCH <= last:
            began = time.perf_counter()
            async with database.reading() as connection:
                await connection.execute(text(f"SELECT value FROM segment WHERE {SEGMENT}"))  # noqa: S608 - a constant
                await connection.execute(text(CLEAN_UP))
            async with database.writing() as connection:
                way.expired = await _batch(connection, least, least + BATCH)
            way.batches.append(time.perf_counter() - began)
            least += BATCH
            progress(f"the document's SQL, up to {least:,}")
    finally:
        await database.close()
    return way


async def _batch(connection: AsyncConnection, least: int, most: int) -> int:
    await connection.execute(text(INSERT), {"least": least, "most": most})
    found = await connection.execute(text("SELECT tt.* FROM transferTimeout tt WHERE tt.expirationDate < now()"))
    expired = len(found.all())
    if least:
        await connection.execute(text(f"UPDATE segment SET value = :most WHERE {SEGMENT}"), {"most": most})  # noqa: S608
    else:
        insert = "INSERT INTO segment(segmentType, enumeration, tableName, value) VALUES ('timeout', 0, :name, :most)"
        await connection.execute(text(insert), {"name": "transferStateChange", "most": most})
    return expired
