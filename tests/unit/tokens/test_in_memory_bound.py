"""A bound on what is in memory: the rest is known by id and amount, and read when it is selected."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from genie.tokens.errors import FundsLocked, InsufficientFunds, TooManyTokens
from genie.tokens.in_memory import InMemorySelector
from genie.tokens.in_memory.selector import READ_BATCH
from genie.tokens.token import Token
from scripted_tokens import ScriptedStore, coins, settle, virtual

ALICE = {"owner": "alice", "token_type": "Fiat", "identifier": "GBP"}


@virtual
async def test_no_more_tokens_than_that_are_kept_whole() -> None:
    store = ScriptedStore(coins([1] * 50))
    async with InMemorySelector(store, max_tokens=20) as selector:
        buckets = selector._reservations.buckets
        assert sum(entry.token is not None for entry in buckets._entries.values()) == buckets.cached_count == 20
        selection = await selector.select(50, transaction="a", **ALICE)
        assert sorted(token.id for token in selection.tokens) == sorted(store.tokens)
        assert store.calls["get"] == 1
        assert buckets.cached_count == 20
        await selection.spend(coins([1] * 30, "new-"))
        await settle()
        assert (len(buckets), buckets.cached_count) == (30, 20)


@virtual
async def test_room_is_filled_by_what_is_read() -> None:
    store = ScriptedStore(coins([1] * 4))
    async with InMemorySelector(store, max_tokens=2) as selector:
        await store.spend([store.tokens["t0"], store.tokens["t1"]], transaction="elsewhere")
        await settle()
        for _ in range(3):
            async with await selector.select(2, transaction="a", **ALICE) as selection:
                assert {token.id for token in selection.tokens} == {"t2", "t3"}
        assert store.calls["get"] == 1


@virtual
async def test_a_token_that_is_gone_when_it_is_read_is_replaced() -> None:
    store = ScriptedStore(coins([100] * 4))
    async with InMemorySelector(store, max_tokens=0) as selector:
        store.tell = lambda _change: None  # type: ignore[method-assign]
        await store.spend([store.tokens["t3"], store.tokens["t2"]], transaction="elsewhere")
        selection = await selector.select(200, transaction="a", **ALICE)
        assert {token.id for token in selection.tokens} == {"t0", "t1"}
        assert (selection.held, selection.lost) == (True, ())
        await selection.release()
        with pytest.raises(InsufficientFunds) as short:
            await selector.select(201, transaction="a", **ALICE)
        assert (short.value.free, short.value.locked) == (200, 0)


@pytest.mark.parametrize("where", [None, lambda token: token.amount == 100])
@virtual
async def test_a_token_that_is_spent_while_it_is_read_is_replaced(where: Any) -> None:
    store = ScriptedStore(coins([100] * 4))

    async def spent_under_way(found: Any) -> None:
        if store.calls["get"] == 1:
            await store.spend([store.tokens["t3"]], transaction="elsewhere")
            await settle()
            assert "t3" in found

    store.before["get"] = spent_under_way
    async with InMemorySelector(store, max_tokens=0) as selector:
        selection = await selector.select(300, transaction="a", where=where, **ALICE)
        assert {token.id for token in selection.tokens} == {"t0", "t1", "t2"}


@pytest.mark.parametrize("where", [None, lambda token: token.amount == 100])
@virtual
async def test_who_is_cancelled_while_reading_holds_nothing(where: Any) -> None:
    store = ScriptedStore(coins([100] * 4))
    reading = asyncio.Event()

    async def for_ever(_found: object) -> None:
        reading.set()
        await asyncio.sleep(3600)

    async with InMemorySelector(store, max_tokens=2) as selector:
        store.before["get"] = for_ever
        selecting = asyncio.create_task(selector.select(400, transaction="a", where=where, **ALICE))
        await reading.wait()
        with pytest.raises(FundsLocked):
            await selector.select(400, transaction="b", **ALICE)
        selecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await selecting
        store.before["get"] = lambda _found: asyncio.sleep(0)
        assert (await selector.select(400, transaction="b", **ALICE)).held
        assert len(selector._reservations) == 1


@virtual
async def test_a_store_that_fails_is_told_and_leaves_everything_free() -> None:
    store = ScriptedStore(coins([100] * 4))

    async def fail(_found: object) -> None:
        raise OSError("no database")

    async with InMemorySelector(store, max_tokens=0) as selector:
        store.before["get"] = fail
        with pytest.raises(OSError, match="no database"):
            await selector.select(400, transaction="a", **ALICE)
        del store.before["get"]
        assert (await selector.select(400, transaction="b", **ALICE)).held


@virtual
async def test_what_takes_longer_to_read_than_a_selection_lasts_is_held_for_the_whole_time() -> None:
    store = ScriptedStore(coins([100] * 4))

    async def slow(_found: object) -> None:
        await asyncio.sleep(15 if store.calls["get"] == 1 else 1)

    async with InMemorySelector(store, max_tokens=0, auto_unlock=10) as selector:
        store.before["get"] = slow
        selecting = asyncio.create_task(selector.select(400, transaction="a", **ALICE))
        await asyncio.sleep(12)
        async with await selector.select(100, transaction="b", **ALICE):
            pass
        selection = await selecting
        await asyncio.sleep(9)
        assert selection.held
        assert selection.amount == 400


@virtual
async def test_predicates_ask_about_tokens_that_are_read_in_parts() -> None:
    count = READ_BATCH * 3
    store = ScriptedStore([*coins([1] * count, issuer="bank"), *coins([1] * 10, "mint-", issuer="mint")])

    def of_the_mint(token: Token) -> bool:
        return token.issuer == "mint"

    async with InMemorySelector(store, max_tokens=100) as selector:
        selection = await selector.select(10, transaction="a", where=of_the_mint, **ALICE)
        assert {token.issuer for token in selection.tokens} == {"mint"}
        with pytest.raises(FundsLocked) as locked:
            await selector.select(5, transaction="b", where=of_the_mint, **ALICE)
        assert (locked.value.free, locked.value.locked) == (0, 10)
        await selection.release()
        with pytest.raises(TooManyTokens):
            await selector.select(10, transaction="b", where=of_the_mint, limit=9, **ALICE)
        assert (await selector.select(count + 10, transaction="b", **ALICE)).change == 0
