"""Random ledgers for tests and demonstrations: generate transfers, shift their dates, finalize
them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice
from typing import NamedTuple
from uuid import UUID

from sqlalchemy import func, insert, literal, select, update
from sqlalchemy import inspect as inspector
from sqlalchemy.ext.asyncio import AsyncConnection

from genie.sql.schema_check import WrongSchema
from genie.timeouts.databases.base import Database
from genie.timeouts.databases.opening import translate_errors
from genie.timeouts.ledger import Ledger
from genie.timeouts.queries import Queries, tracked_transfers

MAX_HOURS = 24 * 365 * 100

WAITING, USUAL = 0.11, 0.61
"""Of those that don't expire: how many wait in the last processing state, and how many end as most do.

With the states of the document that makes 3.5 state changes a transfer: 2 for those that wait, 4 for the usual end, 3
for any other.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """What to generate: `transfers`, of which exactly `expired` are in processing with their date
    in the past.

    Their dates lie between the two numbers of `hours` back. The dates of all others lie as far
    ahead and an hour more, so that nothing else expires within an hour: they wait in the last
    processing state, or are final. `amount`: whole numbers from the first to the second. The same
    `seed` generates the same transfers, relative to now. ValueError for contradictory values.
    """

    transfers: int
    expired: int
    seed: int
    amount: tuple[int, int] = (1, 100)
    currencies: tuple[str, ...] = ("USD", "EUR", "ZAR")
    hours: tuple[float, float] = (0, 168)

    def __post_init__(self) -> None:
        if not 0 <= self.expired <= self.transfers:
            raise ValueError(
                f"expired must be from 0 to the number of transfers ({self.transfers}), not {self.expired}"
            )
        if not 0 <= self.amount[0] <= self.amount[1]:
            raise ValueError(f"amount must be a range of numbers of at least 0, not {self.amount}")
        if not 0 <= self.hours[0] <= self.hours[1] <= MAX_HOURS:
            raise ValueError(f"hours must be a range of numbers within a century, not {self.hours}")
        if not self.currencies or not all(self.currencies):
            raise ValueError("at least one currency is needed")


class Transfer(NamedTuple):
    """A transfer, with its states in order."""

    transfer_id: str
    amount: int
    currency: str
    expires: datetime
    states: tuple[str, ...]


def transfers(data_set: DataSet, ledger: Ledger, now: datetime) -> Iterator[Transfer]:
    """Generate the transfers, in random order. The ids depend on the seed alone."""
    ids, chance = random.Random(f"{data_set.seed} ids"), random.Random(data_set.seed)  # noqa: S311 - no secret
    paths = _state_paths(ledger)
    weights = [WAITING, USUAL, *[(1 - WAITING - USUAL) / max(1, len(paths) - 2)] * (len(paths) - 2)]
    processing = ledger.processing_states
    least, most = data_set.hours
    expired = set(chance.sample(range(data_set.transfers), data_set.expired))
    drawn = chance.choices(paths, weights, k=data_set.transfers)
    for number in range(data_set.transfers):
        hours = least + (1 - chance.random()) * (most - least)
        if number in expired:
            states = processing[: chance.randint(1, len(processing))]
            expires = now - timedelta(hours=hours)
        else:
            states = drawn[number]
            expires = now + timedelta(hours=1 + hours)
        yield Transfer(
            str(UUID(int=ids.getrandbits(128), version=4)),
            chance.randint(*data_set.amount),
            chance.choice(data_set.currencies),
            expires,
            states,
        )


def _state_paths(ledger: Ledger) -> list[tuple[str, ...]]:
    """Return the paths of states: to wait; to the usual end, which is the second final state after
    the first; and to each of the others.
    """
    processing, final = ledger.processing_states, ledger.final_states
    usual = (*processing, *final[:2])
    others = [(*processing, state) for state in (final[:1] + final[2:] if len(final) > 1 else ())]
    return [processing, usual, *others]


# -- generating a ledger -------------------------------------------------------------------------------------

CHUNK = 5_000
"""Default number of transfers in one transaction."""


async def generate(
    database: Database,
    ledger: Ledger,
    data_set: DataSet,
    on_progress: Callable[[int, int], object] = lambda _, __: None,
    *,
    chunk: int = CHUNK,
) -> int:
    """Write a data set to a ledger, and return its number of state changes.

    Each `chunk` of transfers is one transaction. `on_progress` gets the number of transfers
    written, and of all. ValueError if the ledger has some of these transfers; WrongSchema or
    DatabaseFailed if they can't be written.
    """
    written = changes = 0
    with translate_errors(database):
        async with database.reading() as connection:
            await _check(connection, ledger)
            now = (await connection.execute(Queries(ledger, database).now())).scalar_one()
        made = transfers(data_set, ledger, now)
        while some := list(islice(made, chunk)):
            changes += await _write(database, ledger, some, data_set.seed)
            written += len(some)
            on_progress(written, data_set.transfers)
    return changes


async def _check(connection: AsyncConnection, ledger: Ledger) -> None:
    transfer = ledger.tables.transfer
    found = await connection.run_sync(lambda inner: inspector(inner).get_columns(transfer.name))
    names = {column["name"] for column in found}
    for key in ("amount", "currencyId"):
        if transfer.c[key].name not in names:
            raise WrongSchema(f"table {transfer.name} has no column {transfer.c[key].name}, which is to be written")


async def _write(database: Database, ledger: Ledger, chunk: list[Transfer], seed: int) -> int:
    tables = ledger.tables
    ids = select(func.count()).where(tables.transfer.c.transferId.in_([one.transfer_id for one in chunk[:100]]))
    async with database.writing() as connection:
        if (await connection.execute(ids)).scalar_one():
            raise ValueError(f"the ledger has transfers of seed {seed} already: use another seed")
        await database.insert_rows(
            connection,
            tables.transfer,
            [
                {
                    "transferId": one.transfer_id,
                    "amount": one.amount,
                    "currencyId": one.currency,
                    "expirationDate": one.expires,
                }
                for one in chunk
            ],
        )
        changes = [{"transferId": one.transfer_id, "transferStateId": state} for one in chunk for state in one.states]
        await database.insert_rows(connection, tables.state_change, changes)
    return len(changes)


# -- shifting dates ------------------------------------------------------------------------------------------

SHIFT_CHUNK = 20_000
"""Transfers in one statement."""


async def shift(
    database: Database, ledger: Ledger, by: timedelta, on_progress: Callable[[int, int], object] = lambda _, __: None
) -> int:
    """Shift the expiration dates of all transfers in one transaction, and return their number.

    `on_progress` gets the number of dates moved, and of all. DatabaseFailed if it fails.
    """
    transfer = ledger.tables.transfer
    id = transfer.c.transferId
    statement = update(transfer).values(expirationDate=database.shifted_date(transfer.c.expirationDate, by))
    moved = 0
    with translate_errors(database):
        async with database.writing() as connection:
            total = (await connection.execute(select(func.count()).select_from(transfer))).scalar_one()
            first: str | None = None
            while True:
                after = [] if first is None else [id > first]
                end = select(id).where(*after).order_by(id).limit(1).offset(SHIFT_CHUNK - 1)
                last = (await connection.execute(end)).scalar()
                some = after if last is None else [*after, id <= last]
                moved += (await connection.execute(statement.where(*some))).rowcount
                on_progress(moved, max(moved, total))
                if last is None:
                    return moved
                first = last


# -- finalizing ----------------------------------------------------------------------------------------------


async def finalize(
    database: Database, ledger: Ledger, state: str = "ABORTED", *, limit: int | None = None, overdue: bool = False
) -> int:
    """Write a final state change for tracked transfers that are not final, and return their number.

    `limit`: at most this many, those that expire first. `overdue`: only those whose date has
    passed. ValueError for a state that is not final; DatabaseFailed if it fails.
    """
    if state not in ledger.final_states:
        raise ValueError(f"{state!r} is not a final state; those are {', '.join(ledger.final_states)}")
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, not {limit}")
    found, changes, timeout = tracked_transfers(ledger, database), ledger.tables.state_change, ledger.tables.timeout
    these = select(timeout.c.transferId, literal(state)).select_from(found.rows)
    these = these.where(found.state.not_in(ledger.final_states))
    these = these.order_by(timeout.c.expirationDate, timeout.c.transferTimeoutId).limit(limit)
    with translate_errors(database):
        async with database.writing() as connection:
            if overdue:
                now = (await connection.execute(Queries(ledger, database).now())).scalar_one()
                these = these.where(found.expires < now)
            columns = [changes.c.transferId, changes.c.transferStateId]
            done = await connection.execute(insert(changes).from_select(columns, these, include_defaults=False))
            return done.rowcount
