"""Transfers by chance, each with the states it has had. Nothing here asks a database or a clock."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple
from uuid import UUID

from genie.timeouts.ledger import Ledger

MOST_HOURS = 24 * 365 * 100

WAITING, USUAL = 0.11, 0.61
"""Of those that don't expire: how many wait in the last processing state, and how many end as most do.

With the states of the document that makes 3.5 state changes a transfer: 2 for those that wait, 4 for the usual end, 3
for any other.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """What to generate: `transfers`, of which exactly `expired` are in processing with their date in the past.

    Their dates lie `hours` back, from the first number to the second. All others have one that lies as far ahead and an
    hour more, so nothing else expires within an hour: they wait in the last of the processing states, or are final.
    `amount`: whole numbers from the first to the second. The same `seed` makes the same transfers, relative to now.
    ValueError for what can't be.
    """

    transfers: int
    expired: int
    seed: int
    amount: tuple[int, int] = (1, 100)
    currencies: tuple[str, ...] = ("USD", "EUR", "ZAR")
    hours: tuple[float, float] = (0, 168)

    def __post_init__(self) -> None:
        if not 0 <= self.expired <= self.transfers:
            raise ValueError(f"of {self.transfers} transfers from 0 to all can be expired, not {self.expired}")
        if not 0 <= self.amount[0] <= self.amount[1]:
            raise ValueError(f"amounts must be from a number to one that is as great, not {self.amount}")
        if not 0 <= self.hours[0] <= self.hours[1] <= MOST_HOURS:
            raise ValueError(f"hours must be from a number to one that is as great, of a century, not {self.hours}")
        if not self.currencies or not all(self.currencies):
            raise ValueError("one or more currencies are needed")


class Transfer(NamedTuple):
    """One, with its states in their order."""

    transfer_id: str
    amount: int
    currency: str
    expires: datetime
    states: tuple[str, ...]


def transfers(data_set: DataSet, ledger: Ledger, now: datetime) -> Iterator[Transfer]:
    """All of them, in no order. The ids depend on nothing but the seed."""
    ids, chance = random.Random(f"{data_set.seed} ids"), random.Random(data_set.seed)  # noqa: S311 - no secret
    ways = _ways(ledger)
    weights = [WAITING, USUAL, *[(1 - WAITING - USUAL) / max(1, len(ways) - 2)] * (len(ways) - 2)]
    processing = ledger.processing_states
    least, most = data_set.hours
    expired = set(chance.sample(range(data_set.transfers), data_set.expired))
    drawn = chance.choices(ways, weights, k=data_set.transfers)
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


def _ways(ledger: Ledger) -> list[tuple[str, ...]]:
    """What states a transfer goes through: to wait; to the usual end, which is the second final state, behind the
    first; and to each of the others.
    """
    processing, final = ledger.processing_states, ledger.final_states
    usual = (*processing, *final[:2])
    others = [(*processing, state) for state in (final[:1] + final[2:] if len(final) > 1 else ())]
    return [processing, usual, *others]
