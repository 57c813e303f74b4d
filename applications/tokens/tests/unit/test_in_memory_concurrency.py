"""Concurrent selections from the same wallets: a ledger records their spends, and checks that no token is spent twice."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence

import pytest

from genie_tokens.errors import InsufficientFunds
from genie_tokens.in_memory import InMemorySelector
from genie_tokens.stores.memory import MemoryTokenStore
from genie_tokens.token import Token
from scripted_tokens import make_tokens, virtual_time
from support.runs.searches import SOAK

GBP = {"token_type": "Fiat", "identifier": "GBP"}
INSERTERS = 2
SPENDERS = 6


class Ledger(MemoryTokenStore):
    """A store that records all issued tokens, the balance of each owner, and each spend before it executes it."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: Counter[str] = Counter()
        self.issued: Counter[str] = Counter()
        self.worth: Counter[str] = Counter()

    async def add(self, tokens: Sequence[Token]) -> None:
        self._note(tokens)
        await super().add(tokens)

    async def spend(self, tokens: Sequence[Token], *, transaction: str, outputs: Sequence[Token] = ()) -> None:
        await asyncio.sleep(0)  # lets other tasks run in between
        self.inputs.update(token.id for token in tokens)
        self._note(outputs)
        for token in tokens:
            self.worth[token.owner] -= token.amount
        await super().spend(tokens, transaction=transaction, outputs=outputs)

    def _note(self, tokens: Sequence[Token]) -> None:
        for token in tokens:
            self.issued[token.id] += token.amount
            self.worth[token.owner] += token.amount


@pytest.mark.soak
@pytest.mark.parametrize(("spends", "max_tokens"), [(10_000 if SOAK else 1_000, None), (1_000 if SOAK else 200, 30)])
@virtual_time
async def test_concurrent_selectors_spend_no_token_twice(spends: int, max_tokens: int | None) -> None:
    chance = random.Random(1)  # noqa: S311
    keys = [{"owner": f"key-{number}", "account": f"acc-{number % 2}"} for number in range(3)]
    ledger = Ledger()
    await ledger.add([token for key in keys for token in make_tokens([10] * 20, key["owner"], **key)])
    spent = Counter[int]()
    missed = 0

    async def insert(name: int) -> None:
        turn = 0
        while sum(spent.values()) < SPENDERS * spends:
            key = chance.choice(keys)
            if ledger.worth[key["owner"]] < chance.randrange(600):
                turn += 1
                await ledger.add(make_tokens([chance.randrange(1, 20)], f"in-{name}-{turn}-", **key))
            await asyncio.sleep(chance.choice([0, 0, 0.01]))

    async def spend(name: int) -> None:
        nonlocal missed
        key = keys[name % 3]
        mine = {"account": key["account"]} if name < 3 else {"owner": key["owner"]}
        while spent[name] < spends:
            amount = chance.randrange(1, 20)
            transaction = f"{name}-{spent[name]}"
            try:
                selection = await selector.select(amount, transaction=transaction, **mine, **GBP)
            except InsufficientFunds:
                missed += 1
                await asyncio.sleep(0.01)
                continue
            async with selection:
                change = make_tokens([selection.change] if selection.change else [], f"change-{transaction}-", **key)
                await selection.spend(change)
            spent[name] += 1

    async with InMemorySelector(ledger, max_tokens=max_tokens) as selector:
        await asyncio.gather(*map(insert, range(INSERTERS)), *map(spend, range(SPENDERS)))
    assert sum(spent.values()) == SPENDERS * spends
    assert missed > 0
    assert set(ledger.inputs.values()) == {1}
    left = {token.id: token.amount async for page in ledger.unspent() for token in page}
    assert left == {id: amount for id, amount in ledger.issued.items() if not ledger.inputs[id]}
