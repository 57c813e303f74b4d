"""Replicas that select from the same wallets by a real server. A ledger without locks records who has spent which token."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from genie import connect
from genie_tokens import FundsLocked, InsufficientFunds, MemoryTokenStore, Selection, SherdlockSelector, Token
from sherdlock_world import GBP
from support.processes.servers import WAIT_S, Genie

NUMBERS = itertools.count()


class Ledger(MemoryTokenStore):
    """A store that records each spend before it executes it, and checks that each token is spent once and no amount is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.issued: dict[str, Token] = {}
        self.spenders: dict[str, list[str]] = {}

    async def add(self, tokens: Sequence[Token]) -> None:
        self.issued |= {each.id: each for each in tokens}
        await super().add(tokens)

    async def spend(self, tokens: Sequence[Token], *, transaction: str, outputs: Sequence[Token] = ()) -> None:
        assert sum(each.amount for each in tokens) == sum(each.amount for each in outputs)
        for each in tokens:
            assert each == self.issued[each.id]
            self.spenders.setdefault(each.id, []).append(transaction)
        await asyncio.sleep(0.001)
        await super().spend(tokens, transaction=transaction, outputs=outputs)
        self.issued |= {each.id: each for each in outputs}

    def check(self, total: int) -> None:
        twice = {id: by for id, by in self.spenders.items() if len(set(by)) > 1}
        assert twice == {}
        assert sum(self.worth(owner) for owner in {each.owner for each in self.issued.values()}) == total

    def worth(self, owner: str) -> int:
        there = [each for id, each in self.issued.items() if id not in self.spenders]
        return sum(each.amount for each in there if each.owner == owner)


async def new_wallet(count: int, amount: int) -> tuple[str, Ledger]:
    """Return a new owner and account: all tests of this file share a server."""
    owner, ledger = f"owner-{next(NUMBERS)}", Ledger()
    await ledger.add([Token(f"{owner}-{number}", owner, "Fiat", "GBP", amount) for number in range(count)])
    return owner, ledger


@asynccontextmanager
async def replicas(genie: Genie, ledger: Ledger, count: int, **options: Any) -> AsyncIterator[list[SherdlockSelector]]:
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                SherdlockSelector(await stack.enter_async_context(connect(*genie.address)), ledger, **options)
            )
            for _ in range(count)
        ]


async def pay(selection: Selection, to: str) -> None:
    """Spend the requested amount, and return the change to the wallet."""
    owner = selection.tokens[0].owner
    outputs = [Token(f"{selection.transaction}-paid", to, "Fiat", "GBP", selection.target)]
    if selection.change:
        outputs.append(Token(f"{selection.transaction}-change", owner, "Fiat", "GBP", selection.change))
    await selection.spend(outputs)


async def select_and_pay(
    selector: SherdlockSelector, amount: int, owner: str, transaction: str
) -> bool | InsufficientFunds:
    try:
        async with await selector.select(amount, owner=owner, transaction=transaction, **GBP) as selection:
            await pay(selection, f"{owner}-shop")
    except InsufficientFunds as error:
        return error
    return True


async def select_and_pay_all(
    selectors: list[SherdlockSelector], each: int, amount: int, owner: str
) -> list[bool | InsufficientFunds]:
    amounts = [
        select_and_pay(selector, amount, owner, f"{owner}-{place}-{number}")
        for number in range(each)
        for place, selector in enumerate(selectors)
    ]
    async with asyncio.timeout(WAIT_S):
        return await asyncio.gather(*amounts)


async def test_two_replicas_that_need_the_same_two_tokens_both_succeed(genie: Genie) -> None:
    owner, ledger = await new_wallet(2, 3)

    async def release_later(selector: SherdlockSelector, transaction: str) -> None:
        async with await selector.select(4, owner=owner, transaction=transaction, **GBP) as selection:
            assert selection.amount == 6
            await asyncio.sleep(0.01)

    async with replicas(genie, ledger, 2, backoff=WAIT_S) as selectors, asyncio.timeout(WAIT_S):
        for number in range(10):
            await asyncio.gather(
                *(release_later(each, f"{owner}-{place}-{number}") for place, each in enumerate(selectors))
            )
        results = await select_and_pay_all(selectors, 1, 4, owner)
    assert sorted(type(each).__name__ for each in results) == ["InsufficientFunds", "bool"]
    ledger.check(6)


async def test_locked_funds_are_distinguished_from_missing_funds(genie: Genie) -> None:
    owner, ledger = await new_wallet(10, 1)
    async with replicas(genie, ledger, 2, retries=1, backoff=0.01) as (one, other):
        async with await one.select(8, owner=owner, transaction=f"{owner}-holds", **GBP):
            with pytest.raises(FundsLocked) as caught:
                await other.select(3, owner=owner, transaction=f"{owner}-asks", **GBP)
            assert (caught.value.free, caught.value.locked) == (2, 8)
        async with await other.select(10, owner=owner, transaction=f"{owner}-asks", **GBP) as selection:
            assert selection.amount == 10


async def test_tokens_of_a_stopped_replica_are_free_after_the_lease(genie: Genie) -> None:
    owner, ledger = await new_wallet(10, 1)
    async with replicas(genie, ledger, 1, lease=WAIT_S, backoff=WAIT_S) as [stays]:
        async with replicas(genie, ledger, 1, lease=0.5) as [goes]:
            await goes.select(10, owner=owner, transaction=f"{owner}-gone", **GBP)
        async with asyncio.timeout(WAIT_S):
            selection = await stays.select(10, owner=owner, transaction=f"{owner}-next", **GBP)
        assert selection.amount == 10
        await selection.release()


async def test_a_selection_is_restored_by_another_replica(genie: Genie) -> None:
    owner, ledger = await new_wallet(10, 1)
    async with replicas(genie, ledger, 2, retries=0) as (one, other):
        first = await one.select(6, owner=owner, transaction=f"{owner}-tx", **GBP)
        async with await other.restore(first.checkpoint()) as again:
            assert set(again.tokens) == set(first.tokens)
            await pay(again, "shop")
        result = await select_and_pay(one, 5, owner, f"{owner}-next")
        assert isinstance(result, InsufficientFunds)
    ledger.check(10)


async def test_released_tokens_are_selected_again_before_the_events_of_their_locks(genie: Genie) -> None:
    owner, ledger = await new_wallet(0, 1)
    await ledger.add([Token(f"{owner}-{amount:03}", owner, "Fiat", "GBP", amount) for amount in range(1, 101)])
    async with replicas(genie, ledger, 1) as [selector]:
        for number in range(20):
            held = await selector.select(1275, owner=owner, transaction=f"{owner}-{number}", prefer="small", **GBP)
            assert len(held.tokens) == 50
            await held.release()
            async with await selector.select(
                6, owner=owner, transaction=f"{owner}-{number}-next", prefer="small", **GBP
            ) as again:
                assert [each.amount for each in again.tokens] == [1, 2, 3]


async def test_amounts_beyond_2_to_the_53_are_exact(genie: Genie) -> None:
    """A floating-point number would round 2^60 + 1 to 2^60, and the selection would be one token short."""
    owner, ledger = await new_wallet(0, 1)
    great = 2**60
    await ledger.add([Token(f"{owner}-{number}", owner, "Fiat", "GBP", great + number) for number in range(4)])
    total = 4 * great + 6
    async with replicas(genie, ledger, 2, retries=0) as (one, other):
        async with await one.select(great + 4, owner=owner, transaction=f"{owner}-a", prefer="small", **GBP) as two:
            assert (len(two.tokens), two.amount, two.change) == (2, 2 * great + 1, great - 3)
            with pytest.raises(FundsLocked) as locked:
                await other.select(2 * great + 6, owner=owner, transaction=f"{owner}-b", **GBP)
            assert (locked.value.free, locked.value.locked) == (2 * great + 5, 2 * great + 1)
            assert {type(locked.value.free), type(locked.value.locked)} == {int}
            with pytest.raises(InsufficientFunds) as short:
                await other.select(total + 1, owner=owner, transaction=f"{owner}-c", **GBP)
            assert (short.value.free, short.value.locked) == (2 * great + 5, 2 * great + 1)
        async with await other.select(total, owner=owner, transaction=f"{owner}-d", **GBP) as everything:
            assert (everything.amount, everything.change) == (total, 0)
