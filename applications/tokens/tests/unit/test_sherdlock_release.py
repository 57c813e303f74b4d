"""Selecting again what this selector has just released, while the watch still sends the events of those locks."""

from __future__ import annotations

import asyncio

import pytest

from genie_tokens.sherdlock import SherdlockSelector, holds
from genie_tokens.sherdlock.holds import LockTracker
from sherdlock_world import ALICE, FakeGenie, open_subscription, settle, store_of, token, tokens, virtual_time


def ascending(count: int) -> list:
    return [token(f"t{number:03}", number) for number in range(1, count + 1)]


@pytest.mark.parametrize("delivered", [0, 1], ids=["no event", "locked event"])
@virtual_time
async def test_released_tokens_are_selected_again_before_their_events_arrive(delivered: int):
    genie, store = FakeGenie(), store_of(ascending(100))
    async with SherdlockSelector(genie, store) as selector:
        await open_subscription(selector)
        genie.delayed = True
        first = await selector.select(1275, transaction="tx1", prefer="small", **ALICE)
        assert len(first.tokens) == 50
        if delivered:
            genie.deliver()
            await settle()
        await first.release()
        second = await selector.select(6, transaction="tx2", prefer="small", **ALICE)
        assert [each.id for each in second.tokens] == ["t001", "t002", "t003"]
        genie.delayed = False
        genie.deliver()
        await settle()
        assert set(selector._context.tracker.observed_locks) == {each.id for each in second.tokens}
        assert selector._context.tracker._released_ids == {}
        assert (await selector.select(9, transaction="tx3", prefer="small", **ALICE)).amount == 9


@virtual_time
async def test_tokens_locked_by_another_transaction_after_the_release_are_skipped():
    genie, store = FakeGenie(), store_of(ascending(20))
    async with SherdlockSelector(genie, store) as selector:
        await open_subscription(selector)
        first = await selector.select(6, transaction="tx1", prefer="small", **ALICE)
        await settle()
        genie.delayed = True
        await first.release()
        genie.lock_as_other("t001")
        genie.deliver()
        await settle()
        genie.requests.clear()
        second = await selector.select(5, transaction="tx2", prefer="small", **ALICE)
        assert [each.id for each in second.tokens] == ["t002", "t003"]
        assert len(genie.requests) == 1


@virtual_time
async def test_tokens_of_a_failed_release_are_skipped():
    genie, store = FakeGenie(), store_of(ascending(20))
    async with SherdlockSelector(genie, store) as selector:
        await open_subscription(selector)
        first = await selector.select(6, transaction="tx1", prefer="small", **ALICE)
        await settle()
        genie.down = genie.delayed = True
        await first.release()
        genie.down = False
        second = await selector.select(4, transaction="tx2", prefer="small", **ALICE)
        assert [each.id for each in second.tokens] == ["t004"]


@virtual_time
async def test_a_restored_selection_also_releases_the_original_locks():
    genie, store = FakeGenie(), store_of(ascending(20))
    async with SherdlockSelector(genie, store) as one, SherdlockSelector(genie, store) as other:
        await open_subscription(other)
        first = await one.select(6, transaction="tx1", prefer="small", **ALICE)
        restored = await other.restore(first.checkpoint())
        await settle()
        genie.delayed = True
        await restored.release()
        second = await other.select(6, transaction="tx2", prefer="small", **ALICE)
        assert [each.id for each in second.tokens] == ["t001", "t002", "t003"]


@virtual_time
async def test_tokens_released_to_keep_a_limit_are_requested_again_at_once():
    genie = FakeGenie()
    store = store_of([*tokens(2, 5, "five"), *tokens(3, 10, "ten")])
    genie.muted = True
    genie.lock_as_other("ten0")  # the selector does not know it, and may be given one ten and two fives in its place
    async with SherdlockSelector(genie, store, retries=0, immediate_retries=1) as selector:
        await open_subscription(selector)
        selector._context.tracker.clear_observed()
        genie.muted, genie.delay_s = False, 1.0
        for number in range(100):
            genie.delayed = False
            genie.requests.clear()
            asking = asyncio.create_task(selector.select(20, transaction=f"tx{number}", limit=2, **ALICE))
            await asyncio.sleep(1.5)  # the grant is on its way, and its events have come
            genie.delayed = True
            async with await asking as selection:
                assert {each.id for each in selection.tokens} == {"ten1", "ten2"}
                assert len(genie.requests) <= 2
            genie.deliver()
            await settle()


def test_the_number_of_released_locks_with_expected_events_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(holds, "MAX_RELEASED_LOCKS", 3)
    freed: list[str] = []
    known = LockTracker(60)
    known.on_hold_ended = lambda token_id, is_free: freed.append(token_id) if is_free else None
    for lock in range(5):
        known.on_released(lock, ["a"])
    for lock in range(5):
        known.on_locked("a", lock, "tx", 0.0)
    assert known.observed_locks["a"].id == 0  # 0 and 1 were forgotten, and count until their `unlocked` comes
    for lock in range(5):
        known.on_unlocked("a", lock)
    assert (known.observed_locks, known._duplicates, known._released_ids) == ({}, {}, {})
    assert freed[-1] == "a"
