"""Tokens that nobody spends or releases are free again after a time, and what comes late changes nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from genie.tokens.errors import FundsLocked, InsufficientFunds, SelectionEnded, SpentAlready
from genie.tokens.in_memory import InMemorySelector
from scripted_tokens import ScriptedStore, coins, settle, virtual

ALICE = {"owner": "alice", "token_type": "Fiat", "identifier": "GBP"}


@virtual
async def test_a_selection_is_over_after_its_time_and_not_before() -> None:
    async with InMemorySelector(ScriptedStore(coins([100] * 3)), auto_unlock=10) as selector:
        first = await selector.select(200, transaction="a", **ALICE)
        await asyncio.sleep(9.9)
        assert first.held
        with pytest.raises(FundsLocked):
            await selector.select(200, transaction="b", **ALICE)
        await asyncio.sleep(0.1)
        assert not first.held
        second = await selector.select(300, transaction="b", **ALICE)
        for late in (first.spend(), first.spend()):
            with pytest.raises(SelectionEnded):
                await late
        with pytest.raises(SelectionEnded):
            first.checkpoint()
        assert second.held


@virtual
async def test_a_late_release_does_not_free_what_the_next_one_holds() -> None:
    async with InMemorySelector(ScriptedStore(coins([100] * 3)), auto_unlock=10) as selector:
        first = await selector.select(300, transaction="a", **ALICE)
        await asyncio.sleep(10)
        second = await selector.select(300, transaction="a", **ALICE)
        await first.release()
        assert second.held
        with pytest.raises(FundsLocked):
            await selector.select(1, transaction="b", **ALICE)
        await second.release()
        assert (await selector.select(300, transaction="b", **ALICE)).amount == 300


@virtual
async def test_each_selection_has_its_own_time_and_leaves_nothing_behind() -> None:
    async with InMemorySelector(ScriptedStore(coins([1] * 100)), auto_unlock=10) as selector:
        for second in range(100):
            selection = await selector.select(1, transaction=f"a{second % 7}", **ALICE)
            if second % 3 == 0:
                await selection.release()
            assert len(selector._claims) <= 10
            await asyncio.sleep(1)
        await asyncio.sleep(10)
        assert (await selector.select(100, transaction="b", **ALICE)).change == 0
        assert len(selector._claims) == 1
        assert list(selector._claims._by_transaction) == ["b"]


@virtual
async def test_a_spend_has_the_whole_time_again() -> None:
    store = ScriptedStore(coins([100] * 3))
    spend = store.spend

    async def slow(*args: Any, **named: Any) -> None:
        await asyncio.sleep(9)
        await spend(*args, **named)

    store.spend = slow  # type: ignore[method-assign]
    async with InMemorySelector(store, auto_unlock=10) as selector:
        selection = await selector.select(100, transaction="a", **ALICE)
        await asyncio.sleep(9)
        spending = asyncio.create_task(selection.spend())
        await asyncio.sleep(5)
        with pytest.raises(FundsLocked):
            await selector.select(300, transaction="b", **ALICE)
        await spending


@virtual
async def test_a_spend_that_outlasts_its_time_takes_its_tokens_from_whoever_has_them_then() -> None:
    store = ScriptedStore(coins([100]))

    async def slow(_tokens: object) -> None:
        await asyncio.sleep(11)

    async with InMemorySelector(store, auto_unlock=10) as selector:
        first = await selector.select(100, transaction="a", **ALICE)
        store.before["spend"] = slow
        store.tell = lambda _change: None  # type: ignore[method-assign] # the store's word is late
        spending = asyncio.create_task(first.spend())
        await asyncio.sleep(10.5)
        second = await selector.select(100, transaction="b", **ALICE)
        await spending
        assert second.lost == ("t0",)
        del store.before["spend"]
        with pytest.raises(SpentAlready):
            await second.spend()
        await second.release()
        with pytest.raises(InsufficientFunds) as short:
            await selector.select(1, transaction="c", **ALICE)
        assert (short.value.free, short.value.locked) == (0, 0)


@virtual
async def test_tokens_whose_spend_has_an_unknown_outcome_stay_held_and_it_can_be_said_again() -> None:
    store = ScriptedStore(coins([100]))

    async def lose_the_answer(_tokens: Any) -> None:
        if store.calls["spend"] == 1:
            raise ConnectionError("the answer was lost")

    store.before["spend"] = lose_the_answer
    async with (
        InMemorySelector(store, auto_unlock=10) as selector,
        await selector.select(100, transaction="a", **ALICE) as selection,
    ):
        with pytest.raises(ConnectionError):
            await selection.spend()
        await settle()
        assert selection.lost == ("t0",)
        await selection.spend()
        assert store.spenders == {"t0": "a"}


@virtual
async def test_tokens_whose_spend_failed_are_free_when_their_time_is_over() -> None:
    store = ScriptedStore(coins([100]))

    async def fail(*_args: object, **_named: object) -> None:
        raise ConnectionError("no database")

    store.spend = fail  # type: ignore[method-assign]
    async with InMemorySelector(store, auto_unlock=10) as selector:
        async with await selector.select(100, transaction="a", **ALICE) as selection:
            with pytest.raises(ConnectionError):
                await selection.spend()
        with pytest.raises(FundsLocked):
            await selector.select(100, transaction="b", **ALICE)
        await asyncio.sleep(10)
        assert (await selector.select(100, transaction="b", **ALICE)).held
