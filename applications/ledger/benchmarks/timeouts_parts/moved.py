"""Dates that are moved back among 1,000,000 tracked transfers: how soon the overdue ones are
delivered.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta
from statistics import median

from scale_parts.report import Missing, Row, progress
from sqlalchemy import func, select, update

from genie_ledger import ExpiredTransfer, Ledger, TimeoutHandler, TimeoutRun
from genie_ledger.databases.base import Database
from genie_ledger.sample_data import shift
from genie_ledger.schema import open_ledger
from timeouts_parts.servers import LargeMariadb, LargePostgres, database_of, sqlite_file

WAITING = 1_000_000
CHUNK = 20_000
SOME = 1_000
"""Number of transfers whose dates are moved one by one, distributed over the table."""

OVERDUE = 100_000
"""Number of transfers that are overdue after the dates of all were moved."""

IDLE_RUNS = 50
MAX_DELIVERY_S = 60.0
"""Seconds within which all must be delivered, with runs at the default interval."""

LEDGER = Ledger()


def moved_in_mariadb() -> Iterator[Row]:
    """Moved dates among 1,000,000 waiting transfers: MariaDB"""
    with database_of(LargeMariadb) as url:
        yield from _rows(url)


def moved_in_postgres() -> Iterator[Row]:
    """Moved dates among 1,000,000 waiting transfers: PostgreSQL"""
    with database_of(LargePostgres) as url:
        yield from _rows(url)


def moved_in_sqlite() -> Iterator[Row]:
    """Moved dates among 1,000,000 waiting transfers: SQLite"""
    with sqlite_file() as url:
        yield from _rows(url)


def _rows(url: str) -> Iterator[Row]:
    asyncio.run(_write(url))
    idle = asyncio.run(_read_all(url))
    yield Row("a run with nothing new", median(idle), "ms", goal=20, digits=1, note=f"the worst {max(idle):.1f} ms")
    one = asyncio.run(_until_found(url, _move_some(1), 1))
    yield Row("one date moved back: found after", one, "s", goal=MAX_DELIVERY_S, digits=1)
    some = asyncio.run(_until_found(url, _move_some(SOME), SOME))
    yield Row(f"{SOME:,} dates moved back, all over the table: found after", some, "s", goal=MAX_DELIVERY_S, digits=1)
    every = asyncio.run(_until_found(url, _move_all, OVERDUE))
    yield Row(
        f"all dates moved back, {OVERDUE:,} overdue: found after",
        every,
        "s",
        goal=MAX_DELIVERY_S,
        digits=1,
        note="its runs copy a million dates, too",
    )


def _id(number: int) -> str:
    """Return an id for a number; consecutive numbers have distant ids."""
    return f"{number * 7_368_787 % WAITING:07}-{number:07}-of-the-benchmark"


async def _write(url: str) -> None:
    """Write the ledger: each transfer is in processing, and expires in one to ten days."""
    tables, begin = LEDGER.tables, datetime.now(UTC) + timedelta(days=1)
    step = timedelta(days=9) / WAITING
    async with open_ledger(url, LEDGER, create=True) as database:
        for first in range(0, WAITING, CHUNK):
            numbers = range(first, first + CHUNK)
            transfers = [
                {"transferId": _id(n), "amount": 1, "currencyId": "USD", "expirationDate": begin + step * n}
                for n in numbers
            ]
            changes = [{"transferId": _id(n), "transferStateId": "RESERVED"} for n in numbers]
            async with database.writing() as connection:
                await database.insert_rows(connection, tables.transfer, transfers)
                await database.insert_rows(connection, tables.state_change, changes)
            progress(f"{first + CHUNK:,} transfers are written")


async def _read_all(url: str) -> list[float]:
    """Read the whole ledger; return the milliseconds of runs that find nothing new after that."""
    async with TimeoutHandler(url, on_expired=lambda _expired: None, longest_transaction=0) as handler:
        run = await handler.run_once()
        while run is not None and run.lagging:
            progress(f"up to {run.interval[1]:,}")
            run = await handler.run_once()
        idle = []
        for _ in range(IDLE_RUNS):
            began = time.perf_counter()
            await handler.run_once()
            idle.append((time.perf_counter() - began) * 1000)
        return idle


def _move_some(number: int) -> Callable[[Database], Awaitable[int]]:
    async def move(database: Database) -> int:
        transfer = LEDGER.tables.transfer
        step = WAITING // number
        ids = [_id(n) for n in range(step // 2, WAITING, step)]
        past = datetime.now(UTC) - timedelta(hours=1)
        async with database.writing() as connection:
            await connection.execute(update(transfer).where(transfer.c.transferId.in_(ids)).values(expirationDate=past))
        return len(ids)

    return move


async def _move_all(database: Database) -> int:
    """Move all dates, so that this number of further transfers becomes overdue."""
    timeout, transfer = LEDGER.tables.timeout, LEDGER.tables.transfer
    async with database.reading() as connection:
        handed = select(func.count(timeout.c.deliveredDate))
        before = (await connection.execute(handed)).scalar_one()
        wanted = select(transfer.c.expirationDate).order_by(transfer.c.expirationDate).offset(before + OVERDUE).limit(1)
        first = (await connection.execute(wanted)).scalar_one()
        now = datetime.now(UTC)
    progress("moving all dates")
    await shift(database, LEDGER, now - first)
    async with database.reading() as connection:
        overdue = select(func.count()).where(transfer.c.expirationDate < now)
        return (await connection.execute(overdue)).scalar_one() - before


async def _until_found(url: str, move: Callable[[Database], Awaitable[int]], wanted: int) -> float:
    """Run a handler while dates are moved; return the seconds until all overdue transfers are
    delivered.
    """
    found: set[str] = set()
    expected, began = float("inf"), 0.0
    done = asyncio.Event()

    def on_expired(expired: list[ExpiredTransfer]) -> None:
        found.update(one.transfer_id for one in expired)

    def on_result(result: TimeoutRun | Exception | None) -> None:
        progress(f"{len(found):,} of {expected:,} are found: {result}")
        if len(found) >= expected:
            done.set()

    async with TimeoutHandler(url, on_expired=on_expired) as handler, open_ledger(url, LEDGER) as database:
        await handler.run_once()
        expected = await move(database)
        if abs(expected - wanted) > 1 + wanted // 100:
            raise Missing(f"{expected} transfers are overdue by what was moved, and not {wanted}")
        began = time.perf_counter()
        running = asyncio.create_task(handler.run(on_result))
        try:
            async with asyncio.timeout(10 * MAX_DELIVERY_S):
                await done.wait()
        except TimeoutError:
            raise Missing(f"{len(found)} of {expected} were found within {10 * MAX_DELIVERY_S:.0f} s") from None
        finally:
            running.cancel()
            await asyncio.wait({running})
        return time.perf_counter() - began
