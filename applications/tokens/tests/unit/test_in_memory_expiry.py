"""Expiry of selections (`auto_unlock`): their tokens become free, and late calls of an expired selection change nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from genie_tokens.errors import FundsLocked, InsufficientFunds, SelectionEnded, SpentAlready
from genie_tokens.in_memory import InMemorySelector
from scripted_tokens import ScriptedStore, make_tokens, settle, virtual_time

ALICE = {"owner": "alice", "token_type": "Fiat", "identifier": "GBP"}


@virtual_time
async def test_a_selection_expires_after_auto_unlock_and_not_before() -> None:
    async with InMemorySelector(ScriptedStore(make_tokens([100] * 3)), auto_unlock=10) as selector:
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


@virtual_time
async def test_a_late_release_does_not_free_tokens_of_the_next_holder() -> None:
    async with InMemorySelector(ScriptedStore(make_tokens([100] * 3)), auto_unlock=10) as selector:
        first = await selector.select(300, transaction="a", **ALICE)
        await asyncio.sleep(10)
        second = await selector.select(300, transaction="a", **ALICE)
        await first.release()
        assert second.held
        with pytest.raises(FundsLocked):
            await selector.select(1, transaction="b", **ALICE)
        await second.release()
        assert (await selector.select(300, transaction="b", **ALICE)).amount == 300


@virtual_time
async def test_each_selection_expires_separately_and_is_removed() -> None:
    async with InMemorySelector(ScriptedStore(make_tokens([1] * 100)), auto_unlock=10) as selector:
        for second in range(100):
            selection = await selector.select(1, transaction=f"a{second % 7}", **ALICE)
            if second % 3 == 0:
                await selection.release()
            assert len(selector._reservations) <= 10
            await asyncio.sleep(1)
        await asyncio.sleep(10)
        assert (await selector.select(100, transaction="b", **ALICE)).change == 0
        assert len(selector._reservations) == 1
        assert list(selector._reservations._by_transaction) == ["b"]


@virtual_time
async def test_a_spend_renews_the_reservation() -> None:
    store = ScriptedStore(make_tokens([100] * 3))
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


@virtual_time
async def test_a_spend_that_outlasts_its_reservation_takes_the_tokens_from_the_next_holder() -> None:
    store = ScriptedStore(make_tokens([100]))

    async def slow(_tokens: object) -> None:
        await asyncio.sleep(11)

    async with InMemorySelector(store, auto_unlock=10) as selector:
        first = await selector.select(100, transaction="a", **ALICE)
        store.before["spend"] = slow
        store.publish = lambda _change: None  # type: ignore[method-assign] # the store's word is late
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


@virtual_time
async def test_tokens_of_a_spend_with_unknown_outcome_stay_held_and_it_can_be_retried() -> None:
    store = ScriptedStore(make_tokens([100]))

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


@virtual_time
async def test_tokens_of_a_failed_spend_are_free_after_the_expiry() -> None:
    store = ScriptedStore(make_tokens([100]))

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


@virtual_time
async def test_each_selection_can_set_its_own_auto_unlock() -> None:
    async with InMemorySelector(ScriptedStore(make_tokens([1] * 100)), auto_unlock=10) as selector:
        times = [7, 25, None, 0.5, 3, 12.25, 10, 1.5]
        selections = [
            await selector.select(1, transaction=f"a{n}", auto_unlock=t, **ALICE) for n, t in enumerate(times)
        ]
        passed = 0.0
        for end in sorted({10 if each is None else each for each in times}):
            await asyncio.sleep(end - passed - 0.01)
            held = [10 if each is None else each for each, one in zip(times, selections, strict=True) if one.held]
            assert sorted(held) == sorted(each for each in (10 if t is None else t for t in times) if each >= end)
            passed = end - 0.01
            await asyncio.sleep(0.01)
            passed = end
            free = 100 - sum((10 if each is None else each) > end for each in times)
            async with await selector.select(free, transaction="b", auto_unlock=0.001, **ALICE):
                with pytest.raises(InsufficientFunds):
                    await selector.select(1, transaction="c", **ALICE)
        assert len(selector._reservations) == 0


@virtual_time
async def test_a_spend_renews_with_the_duration_of_its_selection() -> None:
    store = ScriptedStore(make_tokens([100] * 3))

    async def wait(_tokens: Any) -> None:
        await asyncio.sleep(18)
        raise ConnectionError("no database")

    store.before["spend"] = wait
    async with InMemorySelector(store, auto_unlock=10) as selector:
        selection = await selector.select(100, transaction="a", auto_unlock=20, **ALICE)
        await asyncio.sleep(19)
        with pytest.raises(ConnectionError):
            await selection.spend()
        await asyncio.sleep(1.9)
        assert selector._reservations.is_active(selection._reservation)
        await asyncio.sleep(0.1)
        assert not selector._reservations.is_active(selection._reservation)
        joined = await selector.consolidate(transaction="b", auto_unlock=30, **ALICE)
        assert joined is not None
        again = await selector.restore(joined.checkpoint(), auto_unlock=40)
        await asyncio.sleep(39)
        assert again.held
        await asyncio.sleep(1)
        assert not again.held


@virtual_time
async def test_expired_selections_of_many_durations_are_removed() -> None:
    async with InMemorySelector(ScriptedStore(make_tokens([1] * 10))) as selector:
        for number in range(1000):
            async with await selector.select(1, transaction="a", auto_unlock=1 + number / 7, **ALICE):
                pass
        assert len(selector._reservations._expiry_queues) <= 20
        assert len(selector._reservations) == 0


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), "10", True, None])
@virtual_time
async def test_an_invalid_auto_unlock_is_rejected(wrong: Any) -> None:
    with pytest.raises(ValueError, match="auto_unlock must be a number of seconds above 0, not"):
        InMemorySelector(ScriptedStore(), auto_unlock=wrong)
    if wrong is None:
        return  # of a selection it means the selector's
    async with InMemorySelector(ScriptedStore(make_tokens([1] * 10))) as selector:
        first = await selector.select(1, transaction="a", **ALICE)
        for call in (
            selector.select(1, transaction="a", auto_unlock=wrong, **ALICE),
            selector.consolidate(transaction="a", auto_unlock=wrong, **ALICE),
            selector.restore(first.checkpoint(), auto_unlock=wrong),
        ):
            with pytest.raises(ValueError, match="auto_unlock must be a number of seconds above 0, not"):
                await call
        assert first.held
        assert (await selector.select(9, transaction="b", **ALICE)).amount == 9
