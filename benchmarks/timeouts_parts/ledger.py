"""A ledger to be measured: written once, gone through several times."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from scale_parts.report import progress
from sqlalchemy import text

from genie.timeouts import Ledger, TimeoutHandler
from genie.timeouts.databases.opening import open_database
from genie.timeouts.sample_data import DataSet, generate
from genie.timeouts.schema import open_ledger

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
"""The document's query without any structures between."""


@dataclass
class Way:
    """One way through the ledger: seconds of each full batch, in order, and of each run behind the last."""

    batches: list[float] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)
    expired: int = 0


async def write(url: str) -> tuple[float, int]:
    """Write the ledger: the seconds, and how many state changes it has."""
    data_set = DataSet(transfers=TRANSFERS, expired=EXPIRED, seed=1)
    async with open_ledger(url, Ledger(), create=True) as database:
        began = time.perf_counter()
        changes = await generate(
            database, Ledger(), data_set, lambda done, _: progress(f"{done:,} transfers are written")
        )
        return time.perf_counter() - began, changes


async def clear(url: str) -> None:
    """Let the handler begin anew, with new tables: rows that are only deleted are in its way until somebody cleans up."""
    tables = Ledger().tables
    database = open_database(url)
    try:
        async with database.writing() as connection:
            for table in (tables.timeout, tables.segment, tables.interval):
                await connection.run_sync(table.drop, checkfirst=True)
    finally:
        await database.close()


async def go_through(url: str) -> Way:
    """From the first state change to the last, and then some runs that find nothing new."""
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
    """What the document began with: the seconds of the query over everything, and how many it finds."""
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
