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

from sqlalchemy import func, insert, inspect, literal, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from genie.sql.schema_check import WrongSchema
from genie_ledger.databases.base import Database
from genie_ledger.databases.opening import translate_errors
from genie_ledger.ledger import Ledger
from genie_ledger.queries import Queries, tracked_transfers

MAX_HOURS = 24 * 365 * 100

PROCESSING_SHARE, USUAL_SHARE = 0.11, 0.61
"""Shares of the transfers that are not to expire: those in the last processing state, and those
with the usual final state.

With the states of the reference design this makes 3.5 state changes for each transfer, as in the
reference design: 2 for those in processing, 4 for the usual final state, 3 for any other.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """The parameters of a random ledger.

    Args:
        transfers: The number of transfers.
        expired: How many of them are in processing with their date in the past.
        seed: The same seed generates the same transfers, with dates relative to now.
        amount: The smallest and the largest amount; whole numbers.
        currencies: The codes to choose from.
        hours: The dates of expired transfers are between these two numbers of hours in the past.
            Those of all others are as far in the future, and an hour more: they are in the last
            processing state, or final, and none of them expires within an hour.

    Raises:
        ValueError: The values contradict each other.
    """

    transfers: int
    expired: int
    seed: int
    amount: tuple[int, int] = (1, 100)
    currencies: tuple[str, ...] = ("USD", "EUR", "ZAR")
    hours: tuple[float, float] = (0, 168)

    def __post_init__(self) -> None:
        """Raise ValueError if the values contradict each other."""
        if not 0 <= self.expired <= self.transfers:
            raise ValueError(
                f"expired must be from 0 to the number of transfers ({self.transfers}), not {self.expired}"
            )
        min_amount, max_amount = self.amount
        min_hours, max_hours = self.hours
        if not 0 <= min_amount <= max_amount:
            raise ValueError(f"amount must be a range of numbers of at least 0, not {self.amount}")
        if not 0 <= min_hours <= max_hours <= MAX_HOURS:
            raise ValueError(f"hours must be a range of numbers within a century, not {self.hours}")
        if not self.currencies or not all(self.currencies):
            raise ValueError(f"currencies must be one or more codes, not {self.currencies}")


class Transfer(NamedTuple):
    """A transfer, with its states in order."""

    transfer_id: str
    amount: int
    currency: str
    expires: datetime
    states: tuple[str, ...]


def transfers(data_set: DataSet, ledger: Ledger, now: datetime) -> Iterator[Transfer]:
    """Generate the transfers of a data set, with random states and dates.

    The ids have a random number generator of their own. So they depend only on the seed, not on the
    other parameters of the data set.
    """
    id_random, value_random = random.Random(f"{data_set.seed} ids"), random.Random(data_set.seed)  # noqa: S311 - no secret
    paths = _state_paths(ledger)
    other_share = (1 - PROCESSING_SHARE - USUAL_SHARE) / max(1, len(paths) - 2)
    weights = [PROCESSING_SHARE, USUAL_SHARE, *[other_share] * (len(paths) - 2)]
    processing = ledger.processing_states
    min_hours, max_hours = data_set.hours
    expired_indexes = set(value_random.sample(range(data_set.transfers), data_set.expired))
    drawn_paths = value_random.choices(paths, weights, k=data_set.transfers)
    for index in range(data_set.transfers):
        hours = min_hours + (1 - value_random.random()) * (max_hours - min_hours)  # always more than min_hours
        if index in expired_indexes:
            states = processing[: value_random.randint(1, len(processing))]
            expires = now - timedelta(hours=hours)
        else:
            states = drawn_paths[index]
            expires = now + timedelta(hours=1 + hours)
        yield Transfer(
            transfer_id=str(UUID(int=id_random.getrandbits(128), version=4)),
            amount=value_random.randint(*data_set.amount),
            currency=value_random.choice(data_set.currencies),
            expires=expires,
            states=states,
        )


def _state_paths(ledger: Ledger) -> list[tuple[str, ...]]:
    """Return the possible sequences of states of a transfer that is not to expire.

    The first sequence ends in processing. The second is the usual sequence: it ends with the first
    two final states (RECEIVED_FULFIL, COMMITTED). Each further sequence ends with one of the other
    final states.
    """
    processing, final = ledger.processing_states, ledger.final_states
    usual = (*processing, *final[:2])
    other_final_states = final[:1] + final[2:] if len(final) > 1 else ()
    others = [(*processing, state) for state in other_final_states]
    return [processing, usual, *others]


# -- generating a ledger -------------------------------------------------------------------------------------

CHUNK_SIZE = 5_000
"""Default number of transfers in one transaction."""


async def generate(
    database: Database,
    ledger: Ledger,
    data_set: DataSet,
    on_progress: Callable[[int, int], object] = lambda _, __: None,
    *,
    chunk_size: int = CHUNK_SIZE,
) -> int:
    """Write a data set to a ledger, and return the number of state changes written.

    A transaction writes `chunk_size` transfers. After each transaction, `on_progress` is called
    with the number of transfers written so far, and the total number. Raises ValueError if the
    ledger already has some of these transfers. Raises WrongSchema or DatabaseFailed if the
    transfers can't be written.
    """
    written = change_count = 0
    with translate_errors(database):
        async with database.reading() as connection:
            await _check_columns(connection, ledger)
            now = (await connection.execute(Queries(ledger, database).now())).scalar_one()
        generated = transfers(data_set, ledger, now)
        while chunk := list(islice(generated, chunk_size)):
            change_count += await _insert(database, ledger, chunk, data_set.seed)
            written += len(chunk)
            on_progress(written, data_set.transfers)
    return change_count


async def _check_columns(connection: AsyncConnection, ledger: Ledger) -> None:
    """Raise WrongSchema if the table `transfer` lacks a column that `generate` writes. The timeout
    handler does not need these columns.
    """
    transfer = ledger.tables.transfer
    columns = await connection.run_sync(lambda sync_connection: inspect(sync_connection).get_columns(transfer.name))
    existing = {column["name"] for column in columns}
    for key in ("amount", "currencyId"):
        if transfer.c[key].name not in existing:
            raise WrongSchema(f"table {transfer.name} has no column {transfer.c[key].name}, which is to be written")


async def _insert(database: Database, ledger: Ledger, chunk: list[Transfer], seed: int) -> int:
    """Insert transfers with their state changes in one transaction, and return the number of state
    changes. Raises ValueError if any of the first 100 transfers exists already.
    """
    tables = ledger.tables
    first_ids = [transfer.transfer_id for transfer in chunk[:100]]
    existing = select(func.count()).where(tables.transfer.c.transferId.in_(first_ids))
    async with database.writing() as connection:
        if (await connection.execute(existing)).scalar_one():
            raise ValueError(f"the ledger has transfers of seed {seed} already: use another seed")
        rows = [
            {
                "transferId": transfer.transfer_id,
                "amount": transfer.amount,
                "currencyId": transfer.currency,
                "expirationDate": transfer.expires,
            }
            for transfer in chunk
        ]
        changes = [
            {"transferId": transfer.transfer_id, "transferStateId": state}
            for transfer in chunk
            for state in transfer.states
        ]
        await database.insert_rows(connection, tables.transfer, rows)
        await database.insert_rows(connection, tables.state_change, changes)
    return len(changes)


# -- shifting dates ------------------------------------------------------------------------------------------

SHIFT_CHUNK_SIZE = 20_000
"""Transfers in one UPDATE statement."""


async def shift(
    database: Database, ledger: Ledger, by: timedelta, on_progress: Callable[[int, int], object] = lambda _, __: None
) -> int:
    """Shift the expiration dates of all transfers in one transaction, and return the number of
    transfers.

    `on_progress` is called with the number of dates shifted, and the total number. Raises
    DatabaseFailed if the transaction fails; then no date is shifted.
    """
    transfer = ledger.tables.transfer
    id = transfer.c.transferId
    statement = update(transfer).values(expirationDate=database.shifted_date(transfer.c.expirationDate, by))
    shifted = 0
    with translate_errors(database):
        async with database.writing() as connection:
            total = (await connection.execute(select(func.count()).select_from(transfer))).scalar_one()
            previous: str | None = None
            while True:
                after_previous = [] if previous is None else [id > previous]
                chunk_end = select(id).where(*after_previous).order_by(id).limit(1).offset(SHIFT_CHUNK_SIZE - 1)
                last = (await connection.execute(chunk_end)).scalar()
                in_chunk = after_previous if last is None else [*after_previous, id <= last]
                shifted += (await connection.execute(statement.where(*in_chunk))).rowcount
                on_progress(shifted, max(shifted, total))
                if last is None:
                    return shifted
                previous = last


# -- finalizing ----------------------------------------------------------------------------------------------


async def finalize(
    database: Database, ledger: Ledger, state: str = "ABORTED", *, limit: int | None = None, overdue: bool = False
) -> int:
    """Write a final state change for tracked transfers in processing, and return the number of
    transfers. Transfers in unlisted states are not changed, because their meaning is unknown.

    `limit` is the maximum number of transfers: the first to expire. With `overdue`, only
    transfers whose date has passed are finalized. Raises ValueError for a state that is not final,
    and DatabaseFailed if the transaction fails.
    """
    if state not in ledger.final_states:
        raise ValueError(f"{state!r} is not a final state; those are {', '.join(ledger.final_states)}")
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, not {limit}")
    changes, timeout = ledger.tables.state_change, ledger.tables.timeout
    tracked = tracked_transfers(ledger, database)
    unfinished = select(timeout.c.transferId, literal(state)).select_from(tracked.rows)
    unfinished = unfinished.where(tracked.state.in_(ledger.processing_states))
    unfinished = unfinished.order_by(timeout.c.expirationDate, timeout.c.transferTimeoutId).limit(limit)
    with translate_errors(database):
        async with database.writing() as connection:
            if overdue:
                now = (await connection.execute(Queries(ledger, database).now())).scalar_one()
                unfinished = unfinished.where(tracked.expires < now)
            columns = [changes.c.transferId, changes.c.transferStateId]
            statement = insert(changes).from_select(columns, unfinished, include_defaults=False)
            return (await connection.execute(statement)).rowcount
