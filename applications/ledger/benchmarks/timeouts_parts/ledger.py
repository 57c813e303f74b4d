"""The ledger to measure: written once, read several times."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from scale_parts.report import progress
from sqlalchemy import text

from genie_ledger import Ledger, TimeoutHandler
from genie_ledger.databases.opening import open_database
from genie_ledger.sample_data import DataSet, generate
from genie_ledger.schema import open_ledger

TRANSFERS = 1_000_000
EXPIRED = 1_000
BATCH = 100_000
IDLE_RUNS = 50

PLAIN = """
SELECT t."transferId" FROM transfer t
JOIN (SELECT "transferId", MAX("transferStateChangeId") newest FROM "transferStateChange" GROUP BY "transferId") ts
ON ts."transferId" = t."transferId"
JOIN "transferStateChange" tsc ON tsc."transferStateChangeId" = ts.newest
WHERE tsc."transferStateId" IN ('RECEIVED_PREPARE', 'RESERVED') AND t."expirationDate" < CURRENT_TIMESTAMP
"""
"""The reference design's query without intermediate structures."""


@dataclass
class Way:
    """The measured times of reading a whole ledger: seconds of each full batch, in order, and of
    each run after the last.
    """

    batches: list[float] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)
    expired: int = 0


async def write(url: str) -> tuple[float, int]:
    """Generate the ledger; return the duration in seconds, and its number of state changes."""
    data_set = DataSet(transfers=TRANSFERS, expired=EXPIRED, seed=1)
    async with open_ledger(url, Ledger(), create=True) as database:
        began = time.perf_counter()
        changes = await generate(
            database, Ledger(), data_set, lambda done, _: progress(f"{done:,} transfers are written")
        )
        return time.perf_counter() - began, changes


async def clear(url: str) -> None:
    """Reset the handler by creating new tables: deleted rows would slow it down until the database
    has removed them.
    """
    tables = Ledger().tables
    database = open_database(url)
    try:
        async with database.writing() as connection:
            for table in (tables.timeout, tables.segment, tables.interval):
                await connection.run_sync(table.drop, checkfirst=True)
    finally:
        await database.close()


async def go_through(url: str) -> Way:
    """Read the ledger from the first state change to the last, and measure some runs that find
    nothing new after that.
    """
    way = Way()

    def expired(transfers: list[object]) -> None:
        way.expired += len(transfers)

    async with TimeoutHandler(url, on_expired=expired, batch=BATCH) as handler:
        behind = True
        while behind:
            began = time.perf_counter()
            run = await handler.run_once()
            if run is None:
                raise RuntimeError("somebody else is at it")
            behind = run.lagging
            if behind:
                way.batches.append(time.perf_counter() - began)
            progress(f"up to {run.interval[1]:,}")
        for _ in range(IDLE_RUNS):
            began = time.perf_counter()
            await handler.run_once()
            way.idle.append(time.perf_counter() - began)
    return way


async def plain_query(url: str) -> tuple[float, int]:
    """Execute the reference design's query without intermediate structures; return its duration in
    seconds, and the number of transfers that it finds.
    """
    progress("the plain query")
    database = open_database(url)
    try:
        async with database.reading() as connection:
            quoted = PLAIN.replace('"', "`") if connection.dialect.name in ("mysql", "mariadb") else PLAIN
            began = time.perf_counter()
            found = (await connection.execute(text(quoted))).all()
            return time.perf_counter() - began, len(found)
    finally:
        await database.close()
