"""Selecting again what this selector has just released, while the watch still sends the events of those locks."""

from __future__ import annotations

import asyncio

import pytest

from genie.tokens.sherdlock import SherdlockSelector, holds
from genie.tokens.sherdlock.holds import LockTracker
from sherdlock_world import ALICE, FakeGenie, listen, settle, store_of, token, tokens, virtual


def ascending(count: int) -> list:
    return [token(f"t{number:03}", number) for number in range(1, count + 1)]


@pytest.mark.parametrize("told", [0, 1], ids=["no event came", "locked came"])
@virtual
async def test_what_was_just_released_is_selected_again_before_its_events_have_come(told: int):
    genie, store = FakeGenie(), store_of(ascending(100))
    async with SherdlockSelector(genie, store) as selector:
        await listen(selector)
        genie.late = True
        first = await selector.select(1275, transaction="tx1", prefer="small", **ALICE)
        assert len(first.tokens) == 50
        if told:
            genie.deliver()
            await settle()
        await first.release()
        second = await selector.select(6, transaction="tx2", prefer="small", **ALICE)
        assert [each.id for each in second.tokens] == ["t001", "t002", "t003"]
        genie.late = False
        genie.deliver()
        await settle()
        assert set(selector._context.tracker.observed) == {each.id for each in second.tokens}
        assert selector._context.tracker._released == {}
        assert (await selector.select(9, transaction="tx3", prefer="small", **ALICE)).amount == 9


@virtual
async def test_what_another_transaction_locks_after_the_release_is_not_tried():
    genie, store = FakeGenie(), store_of(ascending(20))
    async with SherdlockSelector(genie, store) as selector:
        await listen(selector)
        first = await selector.select(6, transaction="tx1", prefer="small", **ALICE)
        await settle()
        genie.late = True
        await first.release()
        genie.take("t001")
        genie.deliver()
        await settle()
        genie.asks.clear()
        second = await selector.select(5, transaction="tx2", prefer="small", **ALICE)
        assert [each.id for each in second.tokens] == ["t002", "t003"]
        assert len(genie.asks) == 1


@virtual
async def test_a_release_that_did_not_reach_genie_leaves_its_tokens_passed_over():
    genie, store = FakeGenie(), store_of(ascending(20))
    async with SherdlockSelector(genie, store) as selector:
        await listen(selector)
        first = await selector.select(6, transaction="tx1", prefer="small", **ALICE)
        await settle()
        genie.down = genie.late = True
        await first.release()
        genie.down = False
        second = await selector.select(4, transaction="tx2", prefer="small", **ALICE)
        assert [each.id for each in second.tokens] == ["t004"]


@virtual
async def test_a_restored_selection_gives_back_its_earlier_locks_as_well():
    genie, store = FakeGenie(), store_of(ascending(20))
    async with SherdlockSelector(genie, store) as one, SherdlockSelector(genie, store) as other:
        await listen(other)
        first = await one.select(6, transaction="tx1", prefer="small", **ALICE)
        restored = await other.restore(first.checkpoint())
        await settle()
        genie.late = True
        await restored.release()
        second = await other.select(6, transaction="tx2", prefer="small", **ALICE)
        assert [each.id for each in second.tokens] == ["t001", "t002", "t003"]


@virtual
async def test_what_was_given_back_to_keep_a_limit_is_asked_for_again_at_once():
    genie = FakeGenie()
    store = store_of([*tokens(2, 5, "five"), *tokens(3, 10, "ten")])
    genie.hushed = True
    genie.take("ten0")  # the selector does not know it, and may be given one ten and two fives in its place
    async with SherdlockSelector(genie, store, retries=0, immediate_retries=1) as selector:
        await listen(selector)
        selector._context.tracker.clear_observed()
        genie.hushed, genie.delay_s = False, 1.0
        for number in range(100):
            genie.late = False
            genie.asks.clear()
            asking = asyncio.create_task(selector.select(20, transaction=f"tx{number}", limit=2, **ALICE))
            await asyncio.sleep(1.5)  # the grant is on its way, and its events have come
            genie.late = True
            async with await asking as selection:
                assert {each.id for each in selection.tokens} == {"ten1", "ten2"}
                assert len(genie.asks) <= 2
            genie.deliver()
            await settle()


def test_the_locks_whose_events_are_still_to_come_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(holds, "MAX_RELEASED_LOCKS", 3)
    freed: list[str] = []
    known = LockTracker(60)
    known.on_free = freed.append
    for lock in range(5):
        known.on_released(lock, ["a"])
    for lock in range(5):
        known.on_locked("a", lock, "tx", 0.0)
    assert known.observed["a"].id == 0  # 0 and 1 were forgotten, and count until their `unlocked` comes
    for lock in range(5):
        known.on_unlocked("a", lock)
    assert (known.observed, known._duplicates, known._released) == ({}, {}, {})
    assert freed[-1] == "a"
