"""Random histories of a ledger and its handlers, with the plain query as oracle.

Invariants: every delivered transfer is expired by the plain query at that moment; a transfer that was accepted is not delivered
again, unless it has been final or has got a later date; then it is. When a handler has caught up, it has delivered all that the
plain query lists. Rows and a segment of another implementation of the specification do not change this.
"""

from __future__ import annotations

import random
from contextlib import AsyncExitStack
from datetime import datetime
from typing import Any

import pytest

from genie_ledger import FINAL_STATES, PROCESSING_STATES, DatabaseFailed, TimeoutHandler
from ledgers import FUTURE, PAST, Books, Desk, Entries, Fault, catch_up, refuse
from support.runs.searches import SOAK

STEPS = 120
SEEDS = range(1, 21) if SOAK else (1,)
MAX_OPEN_TRANSACTIONS = 3
OPEN_FOR_S = 3_600.0


class History:
    """One ledger, a sequence of handlers, and the invariants."""

    def __init__(self, books: Books, seed: int) -> None:
        self.books, self.chance = books, random.Random(seed)  # noqa: S311
        self.desk = Desk()
        self.desk.meanwhile = self._check_delivery
        self.ids: list[str] = []
        self.dates: dict[str, datetime] = {}
        """The dates of the last deliveries."""
        self.accepted: set[str] = set()
        """Accepted, not final since, and not moved to a later date since."""
        self.accepted_dates: dict[str, datetime] = {}
        """The dates of transfers that were accepted and are not final since."""
        self.open: list[tuple[AsyncExitStack, Entries, set[str], set[str]]] = []
        """Open transactions, with the transfers that they have changed, and the transfers that they make final."""
        self.handler = self._new_handler()

    def _new_handler(self, **options: Any) -> TimeoutHandler:
        return self.books.handler(
            self.desk.take, **{"batch": self.chance.choice([3, 7, 50]), "longest_transaction": OPEN_FOR_S, **options}
        )

    async def _check_delivery(self, ids: list[str]) -> None:
        assert len(set(ids)) == len(ids)
        assert set(ids) <= await self.books.expired(), "by the plain query these are not expired"
        assert not set(ids) & self.accepted, "they were dealt with"
        self.dates |= {id: date for id, date in (await self._dates()).items() if id in ids}

    async def _dates(self) -> dict[str, datetime]:
        rows = await self.books.run("SELECT `transferId`, `expirationDate` FROM `transfer`")
        return {id: datetime.fromisoformat(str(date)) for id, date in rows}

    def _record_deliveries(self, given: int) -> None:
        """Record the transfers that were delivered since a number of lists, and accepted."""
        for id in self.desk.ids[given:]:
            if id not in self.desk.refused:
                self.accepted.add(id)
                self.accepted_dates[id] = self.dates[id]

    def _mark_final(self, *ids: str) -> None:
        for id in ids:
            self.accepted.discard(id)
            self.accepted_dates.pop(id, None)

    # -- steps --

    async def step(self) -> None:
        kinds = {
            self.add: 5,
            self.change: 5,
            self.move: 2,
            self.run: 5,
            self.fail: 1,
            self.fault: 1,
            self.restart: 1,
            self.set_back: 1,
            self.reopen: 2,
            self.leave: 3,
            self.move_segment: 1,
        }
        if self.books.kind != "sqlite":  # which allows no second writer during a transaction
            kinds |= {self.begin: 2, self.in_transaction: 4, self.end: 2}
        (kind,) = self.chance.choices(list(kinds), list(kinds.values()))
        await kind()

    def _random_transfer(self) -> str | None:
        """Return a transfer without changes in an open transaction, which the database might lock."""
        touched = {id for _, _, ids, _ in self.open for id in ids}
        free = [id for id in self.ids if id not in touched]
        return self.chance.choice(free) if free else None

    def _random_state(self) -> str:
        others = [self.chance.choice(FINAL_STATES), "SUSPENDED"]
        return self.chance.choice([*PROCESSING_STATES, *others])

    def _new_transfer(self) -> tuple[str, float]:
        return f"t{len(self.ids)}", self.chance.choice([PAST, 2 * PAST, FUTURE])

    async def add(self) -> None:
        id, expires = self._new_transfer()
        self.ids.append(id)
        await self.books.add_transfer(id, expires, *self.chance.choice([(), ("RECEIVED_PREPARE", "RESERVED")]))

    async def change(self) -> None:
        if id := self._random_transfer():
            state = self._random_state()
            await self.books.change(id, state)
            if state in FINAL_STATES:
                self._mark_final(id)

    async def reopen(self) -> None:
        """Final and in processing again between two runs."""
        if id := self._random_transfer():
            await self.books.change(id, self.chance.choice(FINAL_STATES))
            await self.books.change(id, self.chance.choice(PROCESSING_STATES))
            self._mark_final(id)

    async def leave(self) -> None:
        """A row of another implementation, of any transfer that has none."""
        kept = await self.books.kept()
        if (id := self._random_transfer()) and id not in kept:
            insert = (
                "INSERT INTO `transferTimeout` (`transferId`, `expirationDate`) "
                "SELECT `transferId`, `expirationDate` FROM `transfer` WHERE `transferId` = :id"
            )
            await self.books.run(insert, id=id)

    async def move_segment(self) -> None:
        """As far as another implementation would."""
        ((last,),) = await self.books.run("SELECT MAX(`transferStateChangeId`) FROM `transferStateChange`")
        if last is not None:
            await self.books.run("UPDATE `segment` SET `value` = :value", value=last)

    async def move(self) -> None:
        if id := self._random_transfer():
            await self.books.move(id, self.chance.choice([3 * PAST, PAST, FUTURE]))
            if id in self.accepted and (await self._dates())[id] > self.accepted_dates[id]:
                self.accepted.discard(id)

    async def begin(self) -> None:
        if len(self.open) < MAX_OPEN_TRANSACTIONS:
            stack = AsyncExitStack()
            entries = await stack.enter_async_context(self.books.transaction())
            self.open.append((stack, entries, set(), set()))
            await self.in_transaction()

    async def in_transaction(self) -> None:
        if self.open:
            _, entries, touched, final = self.chance.choice(self.open)
            id = self._random_transfer()
            if id is None or self.chance.random() < 0.5:
                id, expires = self._new_transfer()
                self.ids.append(id)
                await entries.add_transfer(id, expires)
            else:
                state = self._random_state()
                await entries.change(id, state)
                if state in FINAL_STATES:
                    final.add(id)
            touched.add(id)

    async def end(self) -> None:
        if self.open:
            stack, _, _, final = self.open.pop(self.chance.randrange(len(self.open)))
            await stack.aclose()
            self._mark_final(*final)

    async def run(self) -> None:
        self.desk.refused = {id for id in self.ids if self.chance.random() < 0.2}
        given = len(self.desk.ids)
        assert await self.handler.run_once() is not None
        self._record_deliveries(given)

    async def fail(self) -> None:
        before, given = await self.books.ours(), len(self.desk.given)
        self.desk.fails = RuntimeError("the switch is away")
        try:
            await self.handler.run_once()
        except RuntimeError:
            assert await self.books.ours() == before
        else:
            assert len(self.desk.given) == given, "it was not asked"
        self.desk.fails = None

    async def fault(self) -> None:
        before, given, self.desk.refused = await self.books.ours(), len(self.desk.ids), set()
        with Fault(self.handler, self.chance.randint(1, 20), refuse):
            try:
                assert await self.handler.run_once() is not None
            except DatabaseFailed:
                assert await self.books.ours() == before
                return
        self._record_deliveries(given)

    async def restart(self) -> None:
        await self.handler.close()
        self.handler = self._new_handler()

    async def set_back(self) -> None:
        if value := await self.books.segment():
            await self.books.set_back(self.chance.randint(0, value))

    # -- what must be true --

    async def check(self) -> None:
        """Let all transactions end, catch up, and compare."""
        while self.open:
            await self.end()
        await self._catch_up()
        states, kept = await self.books.last_states(), await self.books.kept()
        waiting = {id for id, state in states.items() if state in PROCESSING_STATES}
        assert waiting <= kept.keys(), "some were not taken in"
        assert not {id for id in kept if states[id] in FINAL_STATES}, "some are final"
        expired, dates = await self.books.expired(), await self._dates()
        for id in expired:
            assert id in self.accepted_dates, f"{id} was not dealt with since it was final"
            assert dates[id] <= self.accepted_dates[id], f"{id} was not dealt with since its date was moved"
        assert {id for id in expired if not kept[id]} == set()
        copies = (
            "SELECT k.`transferId`, k.`expirationDate`, t.`expirationDate` FROM `transferTimeout` k "
            "JOIN `transfer` t ON t.`transferId` = k.`transferId` WHERE k.`deliveredDate` IS NULL"
        )
        for id, ours, theirs in await self.books.run(copies):
            assert id not in waiting or str(ours)[:19] == str(theirs)[:19], f"{id} has another date"

    async def _catch_up(self) -> None:
        """By the handler that is there, if it counts all intervals; else by one for whom nothing is open any more."""
        self.desk.refused = set()
        given = len(self.desk.ids)
        await self.handler.close()
        if self.chance.random() < 0.5:
            self.handler = self._new_handler(batch=1_000)
            await catch_up(self.handler)
        else:
            self.handler = self._new_handler(longest_transaction=0)
            await catch_up(self.handler)
            while (await self.books.ours())["timeoutInterval"]:
                await catch_up(self.handler)
            await self.restart()
        self._record_deliveries(given)


@pytest.mark.soak
@pytest.mark.parametrize("seed", SEEDS)
async def test_a_history(books: Books, seed: int) -> None:
    history = History(books, seed)
    try:
        for number in range(1, STEPS + 1):
            await history.step()
            if not number % 30:
                await history.check()
    finally:
        while history.open:
            await history.end()
    assert len(history.desk.ids) > 10
