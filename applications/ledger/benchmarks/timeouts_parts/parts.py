"""The measurements in each kind of database."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterator, Sequence
from statistics import median

from scale_parts.report import Missing, Row

from timeouts_parts import document
from timeouts_parts.ledger import BATCH, EXPIRED, Way, clear, go_through, plain_query, write
from timeouts_parts.servers import LargeMariadb, LargePostgres, database_of, sqlite_file

ROUNDS = 3
SOME = 5
"""Batches at the beginning and at the end of the ledger that are compared. The first one is for the
warm-up.
"""


def mariadb() -> Iterator[Row]:
    """MariaDB, and the SQL of the reference design on the same server"""
    with database_of(LargeMariadb) as url:
        ours = yield from _rows(url)
        theirs = []
        for _ in range(2):
            asyncio.run(clear(url))
            theirs.append(asyncio.run(document.go_through(url)))
        yield Row("the document's own SQL: a batch", median(_all(theirs)), "s")
        yield Row(
            "the same, at the end of the ledger", median(_ends(theirs)), "s", note="it goes through all that it keeps"
        )
        yield Row("ours to the document's, over the whole ledger", _whole(ours) / _whole(theirs), digits=2)


def postgres() -> Iterator[Row]:
    """PostgreSQL"""
    with database_of(LargePostgres) as url:
        yield from _rows(url)


def sqlite() -> Iterator[Row]:
    """SQLite"""
    with sqlite_file() as url:
        yield from _rows(url)


def _rows(url: str) -> Generator[Row, None, list[Way]]:
    seconds, changes = asyncio.run(write(url))
    yield Row("writing 1,000,000 transfers", seconds, "s", digits=0, note=f"{changes:,} state changes")
    ways = _ways(url, ROUNDS)
    batches = _all(ways)
    yield Row(
        f"a batch of {BATCH:,} state changes", median(batches), "s", goal=1, note=f"the worst {max(batches):.2f} s"
    )
    yield Row("the end of the ledger to its beginning", median(_ends(ways)) / median(_beginnings(ways)), goal=1.2)
    idle = [seconds * 1000 for way in ways for seconds in way.idle]
    yield Row("a run with nothing new", median(idle), "ms", goal=20, digits=1, note=f"the worst {max(idle):.1f} ms")
    seconds, found = asyncio.run(plain_query(url))
    yield Row(
        "the plain query over everything",
        seconds,
        "s",
        note=f"it finds {found:,}; only these have their date in the past",
    )
    return ways


def _ways(url: str, rounds: int) -> list[Way]:
    ways = []
    for _ in range(rounds):
        asyncio.run(clear(url))
        way = asyncio.run(go_through(url))
        if way.expired != EXPIRED:
            raise Missing(f"{way.expired} expired transfers were found, and there are {EXPIRED}")
        ways.append(way)
    return ways


def _all(ways: Sequence[Way]) -> list[float]:
    return [seconds for way in ways for seconds in way.batches]


def _beginnings(ways: Sequence[Way]) -> list[float]:
    return [seconds for way in ways for seconds in way.batches[1 : 1 + SOME]]


def _ends(ways: Sequence[Way]) -> list[float]:
    return [seconds for way in ways for seconds in way.batches[-SOME:]]


def _whole(ways: Sequence[Way]) -> float:
    return median(sum(way.batches) for way in ways)
