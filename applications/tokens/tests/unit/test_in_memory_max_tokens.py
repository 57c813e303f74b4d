"""`max_tokens`: tokens beyond it are known by id and amount only, and loaded when they are selected."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from genie_tokens.errors import FundsLocked, InsufficientFunds, TooManyTokens
from genie_tokens.in_memory import InMemorySelector
from genie_tokens.in_memory.selector import READ_BATCH
from genie_tokens.token import Token
from scripted_tokens import ScriptedStore, make_tokens, settle, virtual_time

ALICE = {"owner": "alice", "token_type": "Fiat", "identifier": "GBP"}


@virtual_time
async def test_at_most_max_tokens_are_in_memory() -> None:
    store = ScriptedStore(make_tokens([1] * 50))
    async with InMemorySelector(store, max_tokens=20) as selector:
        buckets = selector._reservations.buckets
        assert (
            sum(entry.token is not None for entry in buckets._entry_by_id.values()) == buckets.cached_token_count == 20
        )
        selection = await selector.select(50, transaction="a", **ALICE)
        assert sorted(token.id for token in selection.tokens) == sorted(store.tokens)
        assert store.calls["get"] == 1
        assert buckets.cached_token_count == 20
        await selection.spend(make_tokens([1] * 30, "new-"))
        await settle()
        assert (len(buckets), buckets.cached_token_count) == (30, 20)


@virtual_time
async def test_loaded_tokens_are_cached_while_there_is_room() -> None:
    store = ScriptedStore(make_tokens([1] * 4))
    async with InMemorySelector(store, max_tokens=2) as selector:
        await store.spend([store.tokens["t0"], store.tokens["t1"]], transaction="elsewhere")
        await settle()
        for _ in range(3):
            async with await selector.select(2, transaction="a", **ALICE) as selection:
                assert {token.id for token in selection.tokens} == {"t2", "t3"}
        assert store.calls["get"] == 1


@virtual_time
async def test_a_selected_token_that_turns_out_to_be_spent_is_replaced() -> None:
    store = ScriptedStore(make_tokens([100] * 4))
    async with InMemorySelector(store, max_tokens=0) as selector:
        store.publish = lambda _change: None  # type: ignore[method-assign]
        await store.spend([store.tokens["t3"], store.tokens["t2"]], transaction="elsewhere")
        selection = await selector.select(200, transaction="a", **ALICE)
        assert {token.id for token in selection.tokens} == {"t0", "t1"}
        assert (selection.held, selection.lost) == (True, ())
        await selection.release()
        with pytest.raises(InsufficientFunds) as short:
            await selector.select(201, transaction="a", **ALICE)
        assert (short.value.free, short.value.locked) == (200, 0)


@pytest.mark.parametrize("where", [None, lambda token: token.amount == 100])
@virtual_time
async def test_a_token_spent_during_its_load_is_replaced(where: Any) -> None:
    store = ScriptedStore(make_tokens([100] * 4))

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
@virtual_time
async def test_a_selection_cancelled_during_a_load_holds_nothing(where: Any) -> None:
    store = ScriptedStore(make_tokens([100] * 4))
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


@virtual_time
async def test_a_store_error_is_raised_and_leaves_all_tokens_free() -> None:
    store = ScriptedStore(make_tokens([100] * 4))

    async def fail(_found: object) -> None:
        raise OSError("no database")

    async with InMemorySelector(store, max_tokens=0) as selector:
        store.before["get"] = fail
        with pytest.raises(OSError, match="no database"):
            await selector.select(400, transaction="a", **ALICE)
        del store.before["get"]
        assert (await selector.select(400, transaction="b", **ALICE)).held


@virtual_time
async def test_auto_unlock_begins_after_a_slow_load() -> None:
    store = ScriptedStore(make_tokens([100] * 4))

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


@virtual_time
async def test_where_is_called_with_tokens_loaded_in_batches() -> None:
    count = READ_BATCH * 3
    store = ScriptedStore([*make_tokens([1] * count, issuer="bank"), *make_tokens([1] * 10, "mint-", issuer="mint")])

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
