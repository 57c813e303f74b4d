"""`SherdlockSelector` against fakes of Genie and of the store, in wallets that other selectors share."""

from __future__ import annotations

import asyncio

import pytest

from genie import Unavailable
from genie_tokens import MemoryTokenStore
from genie_tokens.errors import FundsLocked, InsufficientFunds, SelectionEnded, SpentAlready, TooManyTokens
from genie_tokens.sherdlock import SherdlockSelector, grants, search
from genie_tokens.store import Added, Spent
from genie_tokens.token import MAX_AMOUNT
from sherdlock_world import (
    ALICE,
    GBP,
    FakeGenie,
    FakeLock,
    cause_lock_events,
    open_subscription,
    settle,
    store_of,
    token,
    tokens,
    virtual_time,
)


@virtual_time
async def test_a_selection_holds_tokens_that_reach_the_amount_and_releases_them():
    genie, store = FakeGenie(), store_of(tokens(10, 3))
    async with SherdlockSelector(genie, store) as selector:
        async with await selector.select(8, transaction="tx", **ALICE) as selection:
            assert (len(selection.tokens), selection.amount, selection.change) == (3, 9, 1)
            assert genie.tokens_held == {each.id for each in selection.tokens}
            assert genie.holders(selection.tokens[0].id) == {"tx"}
            assert selection.held
        assert genie.tokens_held == set()
        assert not selection.held
        with pytest.raises(SelectionEnded):
            await selection.spend()
        async with await selector.select(30, transaction="tx2", **ALICE) as selection:
            assert selection.amount == 30


@virtual_time
async def test_an_error_in_the_block_releases():
    genie, store = FakeGenie(), store_of(tokens(10))
    async with SherdlockSelector(genie, store) as selector:
        with pytest.raises(ZeroDivisionError):
            async with await selector.select(5, transaction="tx", **ALICE):
                raise ZeroDivisionError
        assert genie.tokens_held == set()


@virtual_time
async def test_a_selection_takes_one_round_trip_and_one_load():
    genie, store = FakeGenie(), store_of(tokens(1000))
    async with SherdlockSelector(genie, store) as selector:
        await selector.select(1, transaction="first", **ALICE)
        genie.requests.clear()
        for number in range(20):
            await selector.select(5, transaction=f"tx{number}", **ALICE)
        assert len(genie.requests) == 20
        assert {len(ask) for ask in genie.requests} == {8}
        assert store.load_count == 1


@virtual_time
async def test_replicas_try_different_tokens():
    genie, store = FakeGenie(), store_of(tokens(1000))
    genie.muted = True
    async with SherdlockSelector(genie, store) as one, SherdlockSelector(genie, store) as other:
        for number in range(10):
            await one.select(1, transaction=f"one{number}", **ALICE)
            await other.select(1, transaction=f"other{number}", **ALICE)
    first = [ask[0] for ask in genie.requests]
    assert len(set(first)) > 15


@virtual_time
async def test_spent_tokens_stay_locked_until_the_lease_expires_and_are_skipped():
    genie, store = FakeGenie(), store_of(tokens(4, 5))
    store.muted = True
    async with SherdlockSelector(genie, store, lease=60) as one, SherdlockSelector(genie, store, lease=60) as other:
        assert (await other.select(1, transaction="warm", **ALICE)).amount == 5
        await open_subscription(other)
        async with await one.select(10, transaction="tx", **ALICE) as selection:
            await selection.spend()
            assert not selection.held
        spent = {each.id for each in selection.tokens}
        assert genie.tokens_held > spent
        await settle()
        genie.requests.clear()
        async with await other.select(5, transaction="tx2", **ALICE) as selection:
            assert selection.tokens[0].id not in spent
        assert not spent & {id for ask in genie.requests for id in ask}
        await asyncio.sleep(61)
        assert not genie.tokens_held & spent


@virtual_time
async def test_spent_tokens_are_not_selected_again_after_their_locks_expired():
    genie, store = FakeGenie(), store_of(tokens(4, 5))
    store.muted = True  # the store's change feed does not report it either
    async with SherdlockSelector(genie, store, lease=60) as selector:
        async with await selector.select(10, transaction="tx", **ALICE) as selection:
            await selection.spend(outputs=[token("change", 1)])
        await asyncio.sleep(61)
        async with await selector.select(10, transaction="tx2", **ALICE) as again:
            assert not {each.id for each in again.tokens} & {each.id for each in selection.tokens}


@virtual_time
async def test_change_can_be_selected_once_the_change_feed_reports_it():
    genie, store = FakeGenie(), store_of([token("note", 10)])
    async with SherdlockSelector(genie, store) as selector:
        for number in range(9):
            async with await selector.select(1, transaction=f"tx{number}", **ALICE) as selection:
                await selection.spend(outputs=[token(f"change{number}", selection.change)])
        assert store.load_count <= 2
        assert [each.amount for each in store.held.values()] == [1]


@virtual_time
async def test_change_spent_by_others_before_the_spend_returned_is_not_selected():
    genie, store = FakeGenie(), store_of([token("note", 10)])

    async def spend_change_first():
        del store.held["change"]
        store.spent["change"] = "thief"
        store.publish(Spent("change"))
        await settle()

    store.after_spend = spend_change_first
    async with SherdlockSelector(genie, store) as selector:
        await settle()
        async with await selector.select(1, transaction="tx", **ALICE) as selection:
            await selection.spend(outputs=[token("change", 9)])
        assert selector._context.caches._tokens == {}
        with pytest.raises(InsufficientFunds):
            await selector.select(1, transaction="tx2", **ALICE)


# -- others hold them ---------------------------------------------------------------------------------------


@virtual_time
async def test_tokens_held_by_others_are_skipped():
    genie, store = FakeGenie(), store_of(tokens(100))
    genie.lock_as_other(*(f"t{number}" for number in range(95)))
    async with SherdlockSelector(genie, store) as selector:
        await open_subscription(selector)
        selection = await selector.select(5, transaction="tx", **ALICE)
        assert {each.id for each in selection.tokens} == {f"t{number}" for number in range(95, 100)}
        assert {id for ask in genie.requests for id in ask} == {f"t{number}" for number in range(95, 100)}


@virtual_time
async def test_spares_avoid_a_second_round_trip_after_a_collision():
    genie, store = FakeGenie(), store_of(tokens(100))
    async with SherdlockSelector(genie, store) as selector:
        await selector.select(1, transaction="warm", **ALICE)
        genie.requests.clear()
        genie.muted, genie.delay_s = True, 0.001
        asking = asyncio.create_task(selector.select(5, transaction="tx", **ALICE))
        await settle()
        genie.lock_as_other(*genie.requests[0][:3])
        selection = await asking
        assert selection.amount == 5
        assert len(genie.requests) == 1


@virtual_time
async def test_collisions_are_retried_at_once_with_more_spares():
    genie, store = FakeGenie(), store_of(tokens(3000))
    async with SherdlockSelector(genie, store) as selector:
        await selector.select(1, transaction="warm", **ALICE)
        genie.requests.clear()
        genie.muted = True
        genie.lock_as_other(*(f"t{number}" for number in range(2990) if genie.holders(f"t{number}") == set()))
        begin = asyncio.get_running_loop().time()
        selection = await selector.select(5, transaction="tx", **ALICE)
        assert selection.amount == 5
        assert asyncio.get_running_loop().time() == begin
        sizes = [len(ask) for ask in genie.requests]
        assert sizes == sorted(sizes)
        assert selector.collisions == len(sizes) - 1
        assert sizes[0] == 8
        assert len(sizes) <= 6


@virtual_time
async def test_funds_locked_is_raised_after_all_waits():
    genie, store = FakeGenie(), store_of(tokens(10))
    genie.lock_as_other(*(f"t{number}" for number in range(7)))
    async with SherdlockSelector(genie, store, retries=3, backoff=5.0) as selector:
        begin = asyncio.get_running_loop().time()
        with pytest.raises(FundsLocked) as caught:
            await selector.select(5, transaction="tx", **ALICE)
        assert (caught.value.target, caught.value.free, caught.value.locked) == (5, 3, 7)
        assert 0 < asyncio.get_running_loop().time() - begin <= 15
        assert genie.holders("t9") == set()


@virtual_time
async def test_funds_locked_reports_the_amounts_of_genie():
    genie, store = FakeGenie(), store_of(tokens(10))
    lock = genie.lock_as_other(*(f"t{number}" for number in range(7)))
    async with SherdlockSelector(genie, store, retries=2, backoff=5.0) as selector:
        await open_subscription(selector)
        genie.muted = True  # no event reports the release
        genie.end(lock)
        assert (await selector.select(5, transaction="tx", **ALICE)).amount == 5


@virtual_time
async def test_a_release_by_another_client_wakes_a_waiting_selection():
    genie, store = FakeGenie(), store_of(tokens(10))
    lock = genie.lock_as_other(*(f"t{number}" for number in range(7)))
    async with SherdlockSelector(genie, store, backoff=1e6, lease=1e7) as selector:
        asking = asyncio.create_task(selector.select(5, transaction="tx", **ALICE))
        await settle()
        assert not asking.done()
        genie.end(lock)
        await settle()
        assert (await asking).amount == 5
        assert asyncio.get_running_loop().time() == 0


@virtual_time
async def test_a_release_by_this_selector_wakes_its_waiting_selections():
    genie, store = FakeGenie(), store_of(tokens(10))
    async with SherdlockSelector(genie, store, backoff=1e6) as selector:
        await settle()
        for order in (False, True):  # whichever is reported first
            genie.delay_s = 0.01 if order else 0.0
            first = await selector.select(8, transaction="first", **ALICE)
            asking = asyncio.create_task(selector.select(5, transaction="tx", **ALICE))
            await settle()
            assert not asking.done()
            begin = asyncio.get_running_loop().time()
            await first.release()
            async with asyncio.timeout(1), await asking:
                assert asyncio.get_running_loop().time() - begin < 1
        assert store.load_count == 1


@virtual_time
async def test_issued_change_wakes_a_waiting_selection():
    genie, store = FakeGenie(), store_of([token("note", 10)])
    async with SherdlockSelector(genie, store, backoff=1e6) as selector:
        first = await selector.select(4, transaction="first", **ALICE)
        asking = asyncio.create_task(selector.select(5, transaction="tx", **ALICE))
        await settle()
        await first.spend(outputs=[token("change", 6)])
        async with asyncio.timeout(1):
            assert [each.id for each in (await asking).tokens] == ["change"]


@virtual_time
async def test_a_waiting_selection_fails_at_once_if_the_tokens_are_spent():
    genie, store = FakeGenie(), store_of(tokens(10))
    async with (
        SherdlockSelector(genie, store) as one,
        SherdlockSelector(genie, store, backoff=1e6) as here,
        SherdlockSelector(genie, store, backoff=1e6) as there,
    ):
        selection = await one.select(8, transaction="first", **ALICE)
        asking = [
            asyncio.create_task(selector.select(amount, transaction=f"tx{amount}", **ALICE))
            for selector, amount in ((one, 3), (here, 4), (there, 5))
        ]
        await settle()
        assert not any(task.done() for task in asking)
        await selection.spend()
        await settle()
        assert [type(task.exception()) for task in asking] == [InsufficientFunds] * 3


@virtual_time
async def test_a_free_token_or_a_load_wakes_few_of_many_waiting_selections(monkeypatch: pytest.MonkeyPatch):
    """Each search and each balance looks at the whole wallet, so the event loop would stand still."""
    searches = []
    balance_of = search.Balance.of
    monkeypatch.setattr(search.Balance, "of", lambda *arguments: searches.append(1) or balance_of(*arguments))

    async def settle_long():  # the selections are woken one after the other
        for _ in range(10):
            await settle()

    genie, store = FakeGenie(), store_of(tokens(20))
    async with SherdlockSelector(genie, store, backoff=1e6) as selector:
        held = [await selector.select(10, transaction=f"holder{number}", **ALICE) for number in range(2)]
        waiting = [asyncio.create_task(selector.select(1, transaction=f"tx{number}", **ALICE)) for number in range(100)]
        await settle_long()
        searches.clear()
        await held[0].release()
        await settle_long()
        assert sum(task.done() for task in waiting) == 10
        assert len(searches) <= 5
        selector._context.caches.load(next(iter(selector._context.caches._caches.values())))
        await settle_long()
        assert len(searches) <= 5
        await waiting[0].result().release()
        await settle()
        assert sum(task.done() for task in waiting) == 11
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)


@virtual_time
async def test_a_wallet_is_loaded_after_each_wait_without_a_change_feed():
    genie, store = FakeGenie(), store_of(tokens(10), has_feed=False)
    genie.lock_as_other(*(f"t{number}" for number in range(10)))
    async with SherdlockSelector(genie, store, retries=3, backoff=5.0) as selector:
        asking = asyncio.create_task(selector.select(5, transaction="tx", **ALICE))
        await settle()
        assert store.load_count == 1
        store.put(token("new", 100))
        assert [each.id for each in (await asking).tokens] == ["new"]
        assert store.load_count == 2


@virtual_time
async def test_a_current_wallet_is_loaded_after_the_first_wait():
    genie, store = FakeGenie(), store_of(tokens(10))
    async with SherdlockSelector(genie, store, retries=3, backoff=5.0) as selector:
        await settle()
        await (await selector.select(1, transaction="warm", **ALICE)).release()
        genie.lock_as_other(*(f"t{number}" for number in range(10)))
        store.muted = True
        store.put(token("new", 100))
        assert [each.id for each in (await selector.select(5, transaction="tx", **ALICE)).tokens] == ["new"]
        assert asyncio.get_running_loop().time() <= 5
        assert store.load_count == 2


@virtual_time
async def test_a_futile_wake_up_uses_no_wait():
    genie, store = FakeGenie(), store_of(tokens(10))
    locks = [genie.lock_as_other(f"t{number}") for number in range(8)]
    async with SherdlockSelector(genie, store, retries=1, backoff=1e6, lease=1e7) as selector:
        asking = asyncio.create_task(selector.select(10, transaction="tx", **ALICE))
        for lock in locks:
            await settle()
            assert not asking.done()
            genie.end(lock)
        await settle()
        assert asking.done()


@virtual_time
async def test_two_selections_that_need_the_same_two_tokens_both_succeed():
    genie, store = FakeGenie(), store_of(tokens(2, 3))
    genie.delay_s = 0.001

    async def spend(selector, name):
        async with await selector.select(4, transaction=name, **ALICE) as selection:
            await asyncio.sleep(0.5)
            change = [token(f"{name}-change", selection.change)] if selection.change else []
            await selection.spend(outputs=[token(f"{name}-back", 4), *change])

    async with SherdlockSelector(genie, store) as one, SherdlockSelector(genie, store) as other:
        async with asyncio.timeout(30):
            await asyncio.gather(spend(one, "a"), spend(other, "b"))
    assert sum(each.amount for each in store.held.values()) == 6


@virtual_time
async def test_tokens_observed_as_locked_long_ago_are_requested_again():
    genie, store = FakeGenie(), store_of(tokens(10))
    lock = genie.lock_as_other(*(f"t{number}" for number in range(10)))
    async with SherdlockSelector(genie, store, lease=60) as selector:
        await open_subscription(selector)
        genie.muted = True
        genie.end(lock)
        await asyncio.sleep(121)
        assert len(selector._context.tracker.observed_locks) == 10
        await selector.select(5, transaction="tx", **ALICE)
        assert asyncio.get_running_loop().time() == 121


@virtual_time
async def test_a_token_locked_twice_by_a_transaction_is_free_after_both_locks_ended():
    genie, store = FakeGenie(), store_of(tokens(1))
    locks = [genie.lock_as_other("t0", transaction="twice") for _ in range(3)]
    async with SherdlockSelector(genie, store, backoff=1e6, lease=1e7) as selector:
        await open_subscription(selector)
        asking = asyncio.create_task(selector.select(1, transaction="tx", **ALICE))
        for lock in (locks[1], locks[0], locks[2]):
            await settle()
            assert not asking.done()
            assert genie.requests == []
            genie.end(lock)
        await settle()
        assert asking.done()


@virtual_time
async def test_a_cheap_subscription_is_kept():
    genie, store = FakeGenie(), store_of(tokens(100))
    held = {f"t{number}" for number in range(50)}
    genie.lock_as_other(*held)
    async with SherdlockSelector(genie, store) as selector:
        await settle()
        for number in range(100):
            await (await selector.select(5, transaction=f"tx{number}", **ALICE)).release()
            await asyncio.sleep(0.1)
        assert genie.watcher_count == 1
        assert not held & {name.removeprefix("exclusive:token/") for names in genie.requests for name in names}


@virtual_time
async def test_an_expensive_subscription_ends_while_spares_suffice():
    genie, store = FakeGenie(), store_of(tokens(1000))
    genie.lock_as_other(*(f"t{number}" for number in range(100)))
    async with SherdlockSelector(genie, store) as selector:
        await cause_lock_events(genie, 1.5)
        assert genie.watcher_count == 0
        for number in range(100):
            await (await selector.select(5, transaction=f"tx{number}", **ALICE)).release()
        assert genie.watcher_count == 0
        assert selector._context.tracker.observed_locks == {}
        await asyncio.sleep(60)
        assert genie.watcher_count == 1


@virtual_time
async def test_contention_keeps_the_subscription_open():
    genie, store = FakeGenie(), store_of(tokens(1000))
    lock = genie.lock_as_other(*(f"t{number}" for number in range(950)))
    async with SherdlockSelector(genie, store) as selector:

        async def select_some(count):
            for number in range(count):
                await (await selector.select(5, transaction=f"tx{number}", **ALICE)).release()
                await asyncio.sleep(0.1)

        await cause_lock_events(genie, 1.5)
        assert genie.watcher_count == 0
        await select_some(20)
        assert genie.watcher_count == 1
        await cause_lock_events(genie, 3)
        genie.requests.clear()
        await select_some(100)
        assert len(genie.requests) == 100  # and none of them fails
        assert genie.watcher_count == 1
        genie.end(lock)
        await select_some(200)
        await cause_lock_events(genie, 1.5)
        assert genie.watcher_count == 0
        assert selector._context.tracker.observed_locks == {}


@virtual_time
async def test_a_waiting_selection_keeps_the_subscription_open():
    genie, store = FakeGenie(), store_of(tokens(10))
    lock = genie.lock_as_other("t0")
    async with SherdlockSelector(genie, store, backoff=1e6) as selector:
        asking = asyncio.create_task(selector.select(10, transaction="tx", **ALICE))
        await cause_lock_events(genie, 20)
        assert genie.watcher_count == 1
        genie.end(lock)
        await settle()
        assert asking.done()
        await cause_lock_events(genie, 10)
        assert genie.watcher_count == 0


@virtual_time
async def test_a_release_before_the_subscription_is_not_missed():
    genie, store = FakeGenie(), store_of(tokens(10))
    lock = genie.lock_as_other("t0")
    async with SherdlockSelector(genie, store, backoff=1e6, lease=1e7) as selector:
        await (await selector.select(1, transaction="warm", **ALICE)).release()
        await cause_lock_events(genie, 1.5)
        assert genie.watcher_count == 0
        genie.before_watch = lambda: genie.end(lock)
        async with asyncio.timeout(1):
            assert (await selector.select(10, transaction="tx", **ALICE)).amount == 10


# -- there are not enough -----------------------------------------------------------------------------------


@virtual_time
async def test_insufficient_funds_are_reported_without_waiting():
    genie, store = FakeGenie(), store_of(tokens(10))
    genie.lock_as_other("t0", "t1")
    async with SherdlockSelector(genie, store) as selector:
        with pytest.raises(InsufficientFunds, match="Fiat GBP of owner 'alice'") as caught:
            await selector.select(11, transaction="tx", **ALICE)
        assert type(caught.value) is InsufficientFunds
        assert (caught.value.target, caught.value.free, caught.value.locked) == (11, 8, 2)
        assert asyncio.get_running_loop().time() == 0
        assert len(genie.requests) == 1  # how much others hold
        assert len(genie.locks) == 1
        genie.down = True
        with pytest.raises(InsufficientFunds):
            await selector.select(11, transaction="tx", **ALICE)


@virtual_time
async def test_insufficient_funds_need_a_load_that_began_after_the_request():
    store = store_of(tokens(10), has_feed=False)
    genie = FakeGenie()
    async with SherdlockSelector(genie, store, max_cache_age=1e6) as selector:
        await selector.select(1, transaction="warm", **ALICE)
        store.put(token("new", 100))  # without a report by the change feed
        assert (await selector.select(50, transaction="tx", **ALICE)).amount >= 100
        assert store.load_count == 2


@virtual_time
async def test_a_load_that_began_before_the_request_proves_nothing():
    genie, store = FakeGenie(), store_of(tokens(10), has_feed=False)
    gate = asyncio.Event()
    store.before_page = gate.wait
    async with SherdlockSelector(genie, store) as selector:
        early = asyncio.create_task(selector.select(50, transaction="early", **ALICE))
        await settle()
        late = asyncio.create_task(selector.select(50, transaction="late", **ALICE))
        await settle()
        assert store.load_count == 1
        gate.set()
        results = await asyncio.gather(early, late, return_exceptions=True)
        assert [type(each) for each in results] == [InsufficientFunds] * 2
        assert store.load_count == 2


@virtual_time
async def test_change_missed_by_a_load_of_several_pages_is_not_reported_as_insufficient_funds():
    # The large token moves from a page that is still to be read to one that was read.
    genie = FakeGenie()
    store = store_of([*tokens(4, name="m"), token("z", 100)], page=2, has_feed=False)
    pages = 0

    async def move_token():
        nonlocal pages
        pages += 1
        if pages == 2:
            del store.held["z"]
            store.held["a"] = token("a", 100)

    store.before_page = move_token
    async with SherdlockSelector(genie, store) as selector:
        assert (await selector.select(50, transaction="tx", **ALICE)).amount >= 100


@virtual_time
async def test_a_concurrent_spend_is_not_reported_as_insufficient_funds():
    # Spent tokens leave the cache at once, and their change is not reported yet.
    genie, store = FakeGenie(), store_of([token("note", 10)])
    async with SherdlockSelector(genie, store, retries=1, backoff=1.0) as selector:
        first = await selector.select(4, transaction="first", **ALICE)
        asking = asyncio.create_task(selector.select(5, transaction="tx", **ALICE))
        await settle()
        store.muted = True
        await first.spend(outputs=[token("change", 6)])
        assert [each.id for each in (await asking).tokens] == ["change"]


@virtual_time
async def test_tokens_held_by_the_same_transaction_do_not_count():
    genie, store = FakeGenie(), store_of(tokens(10))
    async with SherdlockSelector(genie, store) as selector:
        first = await selector.select(7, transaction="tx", **ALICE)
        with pytest.raises(InsufficientFunds) as caught:
            await selector.select(4, transaction="tx", **ALICE)
        assert type(caught.value) is InsufficientFunds
        assert caught.value.free == 3
        second = await selector.select(3, transaction="tx", **ALICE)
        assert not {each.id for each in first.tokens} & {each.id for each in second.tokens}


@virtual_time
async def test_concurrent_selections_of_one_transaction_get_different_tokens():
    genie, store = FakeGenie(), store_of(tokens(80))
    genie.delay_s, genie.muted = 0.01, True
    genie.lock_as_other(*(f"t{number}" for number in range(30)))  # so that spares are needed
    async with SherdlockSelector(genie, store) as selector:
        selections = await asyncio.gather(*(selector.select(5, transaction="tx", **ALICE) for _ in range(8)))
        ids = [each.id for selection in selections for each in selection.tokens]
        assert len(ids) == len(set(ids)) == 40


@virtual_time
async def test_tokens_locked_by_a_crashed_replica_are_available_to_the_same_transaction():
    genie, store = FakeGenie(), store_of(tokens(10))
    genie.lock_as_other(*(f"t{number}" for number in range(10)), transaction="tx")
    async with SherdlockSelector(genie, store) as selector:
        await open_subscription(selector)
        assert (await selector.select(10, transaction="tx", **ALICE)).amount == 10
        assert asyncio.get_running_loop().time() == 0
    async with SherdlockSelector(genie, store, retries=0) as selector:
        with pytest.raises(FundsLocked):
            await selector.select(1, transaction="other", **ALICE)


@virtual_time
async def test_tokens_spent_by_the_same_transaction_elsewhere_are_not_selected_from_a_stale_cache():
    genie, store = FakeGenie(), store_of(tokens(10, 5))
    store.muted = True
    async with SherdlockSelector(genie, store) as one, SherdlockSelector(genie, store) as other:
        await (await other.select(50, transaction="warm", **ALICE)).release()
        await open_subscription(other)
        async with await one.select(25, transaction="tx", **ALICE) as selection:
            await selection.spend()
        await settle()
        for _ in range(5):
            again = await other.select(5, transaction="tx", **ALICE)
            assert not {each.id for each in again.tokens} & set(store.spent)


# -- where, prefer, limit -----------------------------------------------------------------------------------


@virtual_time
async def test_where_restricts_the_selection():
    genie = FakeGenie()
    store = store_of([*tokens(5, name="a", issuer="bank"), *tokens(5, name="b", issuer="mint")])
    async with SherdlockSelector(genie, store) as selector:
        selection = await selector.select(5, transaction="tx", where=lambda each: each.issuer == "mint", **ALICE)
        assert {each.issuer for each in selection.tokens} == {"mint"}
        with pytest.raises(InsufficientFunds) as caught:
            await selector.select(6, transaction="tx2", where=lambda each: each.issuer == "bank", **ALICE)
        assert caught.value.free == 5
        with pytest.raises(ZeroDivisionError):
            await selector.select(6, transaction="tx2", where=lambda each: 1 / 0, **ALICE)  # noqa: ARG005
        assert len(genie.tokens_held) == 5


@virtual_time
async def test_prefer_selects_the_smallest_or_largest_tokens_first():
    genie = FakeGenie()
    store = store_of([token(f"t{amount}", amount) for amount in range(1, 21)])
    async with SherdlockSelector(genie, store) as selector:
        async with await selector.select(6, transaction="tx", prefer="small", **ALICE) as selection:
            assert [each.amount for each in selection.tokens] == [1, 2, 3]
        async with await selector.select(39, transaction="tx", prefer="large", **ALICE) as selection:
            assert [each.amount for each in selection.tokens] == [20, 19]
        with pytest.raises(ValueError, match="prefer"):
            await selector.select(39, transaction="tx", prefer="middle", **ALICE)


@virtual_time
async def test_a_limit_is_kept_by_selecting_the_largest_tokens():
    genie = FakeGenie()
    store = store_of([*tokens(100), *tokens(3, 50, "big")])
    async with SherdlockSelector(genie, store, retries=0) as selector:
        for prefer in (None, "small", "large"):
            async with await selector.select(120, transaction="tx", limit=3, prefer=prefer, **ALICE) as selection:
                assert len(selection.tokens) == 3
        with pytest.raises(TooManyTokens) as caught:
            await selector.select(151, transaction="tx", limit=3, **ALICE)
        assert (caught.value.target, caught.value.limit, caught.value.reached) == (151, 3, 150)
        lock = genie.lock_as_other("big0")
        await settle()
        with pytest.raises(FundsLocked):
            await selector.select(150, transaction="tx", limit=3, **ALICE)
        with pytest.raises(TooManyTokens) as caught:
            await selector.select(151, transaction="tx", limit=3, **ALICE)
        assert caught.value.reached == 101
        with pytest.raises(InsufficientFunds, match="251"):
            await selector.select(251, transaction="tx", limit=3, **ALICE)
        assert genie.tokens_held == {"big0"}
        genie.end(lock)
        with pytest.raises(ValueError, match="limit"):
            await selector.select(1, transaction="tx", limit=0, **ALICE)


@virtual_time
async def test_a_limit_exceeded_after_a_collision_is_kept_by_a_retry():
    genie = FakeGenie()
    store = store_of([*tokens(2, 5, "five"), *tokens(3, 10, "ten")])
    genie.lock_as_other("ten0")
    async with SherdlockSelector(genie, store) as selector:
        await selector._context.subscription.close()  # nobody tells
        for number in range(30):
            async with await selector.select(20, transaction=f"tx{number}", limit=2, **ALICE) as selection:
                assert {each.id for each in selection.tokens} == {"ten1", "ten2"}
        assert asyncio.get_running_loop().time() == 0


@virtual_time
async def test_an_account_selects_tokens_of_all_its_owners():
    genie = FakeGenie()
    store = store_of(
        [token("a", 5, owner="k1", account="acc"), token("b", 5, owner="k2", account="acc"), token("c", 5)]
    )
    async with SherdlockSelector(genie, store) as selector:
        selection = await selector.select(10, transaction="tx", account="acc", **GBP)
        assert {each.id for each in selection.tokens} == {"a", "b"}
        await selection.spend(outputs=[token("d", 10, owner="k3", account="acc")])
        await settle()
        assert (await selector.select(10, transaction="tx2", account="acc", **GBP)).tokens[0].id == "d"
        with pytest.raises(ValueError, match="one of owner= and account="):
            await selector.select(10, transaction="tx2", **GBP)


@virtual_time
async def test_more_names_than_fit_into_one_request_are_split():
    genie, store = FakeGenie(), store_of(tokens(11_000), page=11_000)
    async with SherdlockSelector(genie, store, retries=1) as selector:
        async with await selector.select(10_500, transaction="tx", **ALICE) as selection:
            assert selection.amount == 10_500
            assert len(genie.locks) == 2
        assert genie.tokens_held == set()
        genie.lock_as_other(*(f"t{number}" for number in range(1000)))
        with pytest.raises(FundsLocked):
            await selector.select(10_500, transaction="tx", **ALICE)
        assert len(genie.tokens_held) == 1000


@virtual_time
async def test_long_names_are_split_by_bytes():
    long = [token(f"{number:04}" + "é" * 396, 1) for number in range(3000)]
    genie, store = FakeGenie(), store_of(long)
    async with SherdlockSelector(genie, store) as selector:
        assert (await selector.select(3000, transaction="tx", **ALICE)).amount == 3000
        assert len(genie.locks) > 1


# -- caches -------------------------------------------------------------------------------------------------


@virtual_time
async def test_a_stale_cache_is_loaded_once_for_concurrent_selections_and_blocks_none():
    genie, store = FakeGenie(), store_of(tokens(1000), has_feed=False)
    async with SherdlockSelector(genie, store, max_cache_age=1.0) as selector:
        await selector.select(1, transaction="warm", **ALICE)
        await asyncio.sleep(2)
        gate = asyncio.Event()
        store.before_page = gate.wait
        for number in range(10):
            await selector.select(5, transaction=f"tx{number}", **ALICE)
        await settle()
        assert store.load_count == 2
        gate.set()


@virtual_time
async def test_a_cache_that_follows_the_change_feed_is_not_reloaded():
    genie, store = FakeGenie(), store_of(tokens(1000))
    async with SherdlockSelector(genie, store, max_cache_age=1.0) as selector:
        await settle()
        for number in range(10):
            await asyncio.sleep(100)
            await selector.select(5, transaction=f"tx{number}", **ALICE)
        assert store.load_count == 1


@virtual_time
async def test_a_cache_is_reloaded_after_the_change_feed_was_interrupted():
    genie, store = FakeGenie(), store_of(tokens(10))
    async with SherdlockSelector(genie, store, max_cache_age=1.0) as selector:
        await settle()
        await selector.select(1, transaction="warm", **ALICE)
        store.muted = True
        store.put(token("missed", 100))
        store.muted = False
        store.publish(None)  # the feed ends, and begins anew
        await asyncio.sleep(10)
        await selector.select(1, transaction="notices", **ALICE)
        await settle()
        assert store.load_count == 2
        assert (await selector.select(100, transaction="tx", **ALICE)).amount >= 100
        assert store.load_count == 2


@virtual_time
async def test_an_old_cache_is_reloaded_without_a_change_feed():
    genie, store = FakeGenie(), store_of(tokens(10))
    async with SherdlockSelector(genie, store, max_cache_age=1.0) as selector:
        await settle()
        await selector.select(1, transaction="warm", **ALICE)
        store.has_feed = False
        store.publish(None)
        gone = next(id for id in store.held if id not in genie.tokens_held)
        del store.held[gone]
        await asyncio.sleep(2)
        await selector.select(1, transaction="notices", **ALICE)
        await settle()
        assert store.load_count == 2
        assert gone not in selector._context.caches._tokens


@virtual_time
async def test_a_selection_continues_once_enough_tokens_are_loaded():
    genie, store = FakeGenie(), store_of(tokens(100), page=10)
    gate = asyncio.Semaphore(0)
    store.before_page = gate.acquire
    async with SherdlockSelector(genie, store) as selector:
        asking = asyncio.create_task(selector.select(15, transaction="tx", **ALICE))
        gate.release()
        await settle()
        assert not asking.done()
        gate.release()
        await settle()
        assert asking.done()
        assert store.pages == 2


@virtual_time
async def test_a_store_error_is_raised_by_selections_that_need_the_load():
    genie, store = FakeGenie(), store_of(tokens(10))
    async with SherdlockSelector(genie, store) as selector:
        await selector.select(2, transaction="warm", **ALICE)
        store.error = OSError("the store is down")
        assert (await selector.select(2, transaction="tx", **ALICE)).amount == 2
        with pytest.raises(OSError, match="the store is down"):
            await selector.select(7, transaction="tx2", **ALICE)
        assert len(genie.tokens_held) == 4
        store.error = None
        assert (await selector.select(6, transaction="tx2", **ALICE)).amount == 6


@virtual_time
async def test_idle_caches_are_evicted():
    genie = FakeGenie()
    store = store_of([token(f"t{number}", 1, owner=f"o{number}", account="acc") for number in range(20)])
    async with SherdlockSelector(genie, store) as selector:
        for number in range(20):
            await selector.select(1, transaction=f"tx{number}", owner=f"o{number}", **GBP)
            await asyncio.sleep(100)
        assert len(selector._context.caches._caches) <= 7
        assert len(selector._context.caches._tokens) <= 7


@virtual_time
async def test_a_cache_in_use_is_not_evicted():
    genie, store = FakeGenie(), store_of([*tokens(3), token("b", 1, owner="bob")])
    async with SherdlockSelector(genie, store, backoff=1e6) as selector:
        await open_subscription(selector)
        lock = genie.lock_as_other("t0", "t1", "t2")
        await settle()
        selecting = asyncio.create_task(selector.select(3, transaction="tx", **ALICE))
        await asyncio.sleep(700)
        genie.delay_s = 1.0
        genie.end(lock)
        genie.muted = True
        lock = genie.lock_as_other("t0")  # the first request of the selection fails
        genie.muted = False
        await asyncio.sleep(0.5)
        await selector.select(1, transaction="tx2", owner="bob", **GBP)
        genie.end(lock)
        assert len((await asyncio.wait_for(selecting, 10)).tokens) == 3


# -- ends ---------------------------------------------------------------------------------------------------


@virtual_time
async def test_cancellation_at_any_step_leaves_nothing_held():
    for moment in range(40):
        genie, store = FakeGenie(), store_of(tokens(30), page=10)
        genie.delay_s = 0.001
        amount = len(store.held)
        lock = genie.lock_as_other("t1") if moment % 2 else None
        async with SherdlockSelector(genie, store) as selector:
            asking = asyncio.create_task(selector.select(amount, transaction="tx", **ALICE))
            for _ in range(moment):
                await asyncio.sleep(0.0003)
            asking.cancel()
            (result,) = await asyncio.gather(asking, return_exceptions=True)
            if not isinstance(result, BaseException):
                await result.release()
            await asyncio.sleep(1)
            assert genie.tokens_held == ({"t1"} if lock else set())
            assert selector._context.tracker.reservations == {}


@virtual_time
async def test_cancellation_before_the_grant_arrives_leaves_nothing_held():
    genie, store = FakeGenie(), store_of(tokens(10))
    async with SherdlockSelector(genie, store) as selector:
        genie.answer = asyncio.Event()
        asking = asyncio.create_task(selector.select(10, transaction="tx", **ALICE))
        await settle()
        assert len(genie.tokens_held) == 10
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert genie.tokens_held == set()
        genie.answer = None
        assert (await selector.select(10, transaction="tx", **ALICE)).amount == 10


@virtual_time
async def test_cancellation_between_split_requests_leaves_nothing_held():
    for seconds in (2.5, 3.5):
        genie, store = FakeGenie(), store_of(tokens(10_200), page=11_000)
        genie.delay_s = 1.0
        async with SherdlockSelector(genie, store) as selector:
            asking = asyncio.create_task(selector.select(10_100, transaction="tx", **ALICE))
            await asyncio.sleep(seconds)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            await asyncio.sleep(2)
            assert genie.tokens_held == set()
    assert len(genie.requests) == 3


@virtual_time
async def test_cancellation_while_waiting_for_the_transaction_mutex():
    genie, store = FakeGenie(), store_of(tokens(10))
    async with SherdlockSelector(genie, store) as selector:
        await (await selector.select(1, transaction="warm", **ALICE)).release()
        genie.answer = asyncio.Event()
        asking = [asyncio.create_task(selector.select(2, transaction="tx", **ALICE)) for _ in range(4)]
        await settle()
        asking[1].cancel()
        await settle()
        genie.answer.set()
        await asyncio.wait(asking)
        assert [task.cancelled() for task in asking] == [False, True, False, False]
        assert len(genie.tokens_held) == 6


@virtual_time
async def test_a_spend_in_the_second_half_of_the_lease_extends_it():
    genie, store = FakeGenie(), store_of(tokens(10))
    async with SherdlockSelector(genie, store, lease=100) as selector:
        selection = await selector.select(3, transaction="tx", **ALICE)
        await asyncio.sleep(60)
        await selection.spend()
        assert len(genie.extended) == 1
        await asyncio.sleep(90)
        assert len(genie.tokens_held) == 3
        await asyncio.sleep(11)
        assert genie.tokens_held == set()
        quick = await selector.select(3, transaction="tx", **ALICE)
        await asyncio.sleep(40)
        await quick.spend()
        assert len(genie.extended) == 1


@virtual_time
async def test_tokens_that_are_no_longer_held_are_not_spent():
    genie, store = FakeGenie(), store_of(tokens(10))
    async with SherdlockSelector(genie, store, lease=100) as selector:
        late = await selector.select(3, transaction="late", **ALICE)
        lost = await selector.select(3, transaction="lost", **ALICE)
        expired = await selector.select(3, transaction="expired", **ALICE)
        genie.expire(genie.locks[lost._grants.locks[0].id])
        with pytest.raises(SelectionEnded):
            await lost.spend()
        await asyncio.sleep(60)
        genie.end(genie.locks[expired._grants.locks[0].id])
        with pytest.raises(SelectionEnded):
            await expired.spend()
        await asyncio.sleep(60)
        with pytest.raises(SelectionEnded):
            await late.spend()
        assert store.spent == {}
        assert (await selector.select(10, transaction="tx", **ALICE)).amount == 10


@virtual_time
async def test_tokens_spent_by_others_without_a_lock_are_not_selected_again():
    genie, store = FakeGenie(), store_of(tokens(3))
    store.muted = True
    async with SherdlockSelector(genie, store) as selector:
        with pytest.raises(SpentAlready):
            async with await selector.select(3, transaction="tx", **ALICE) as selection:
                store.spent["t0"] = "thief"
                del store.held["t0"]
                await selection.spend()
        assert genie.tokens_held == set()
        assert set(selector._context.caches._tokens) == {"t1", "t2"}
        async with await selector.select(2, transaction="tx2", **ALICE) as selection:
            assert {each.id for each in selection.tokens} == {"t1", "t2"}
            await selection.spend()


@virtual_time
async def test_tokens_of_a_spend_with_unknown_outcome_stay_held_until_the_lease_expires():
    genie, store = FakeGenie(), store_of(tokens(6))

    async def fail():
        raise OSError("the answer is lost")

    async with SherdlockSelector(genie, store, lease=100, retries=0) as selector:
        store.before_spend = fail
        with pytest.raises(OSError, match="the answer is lost"):
            async with await selector.select(4, transaction="tx", **ALICE) as selection:
                await selection.spend()
        assert len(genie.tokens_held) == 4
        with pytest.raises(FundsLocked):
            await selector.select(3, transaction="tx2", **ALICE)
        store.before_spend = None
        await selection.spend()  # it can be said again
        assert len(store.spent) == 4
        await asyncio.sleep(101)
        spent = set(store.spent)
        await (await selector.select(2, transaction="tx3", **ALICE)).spend()
        assert set(selector._context.tracker.reservations).isdisjoint(spent)


@virtual_time
async def test_a_spend_with_unknown_outcome_can_be_retried_also_by_a_restored_selection():
    genie, store = FakeGenie(), store_of(tokens(6))

    async def fail():
        raise OSError("the answer is lost")

    async with SherdlockSelector(genie, store, lease=100) as selector:
        first = await selector.select(2, transaction="first", **ALICE)
        second = await selector.select(2, transaction="second", **ALICE)
        data = second.checkpoint()
        await asyncio.sleep(60)
        store.before_spend = fail
        for selection in (first, second):
            with pytest.raises(OSError, match="the answer is lost"):
                await selection.spend()
        store.before_spend = None
        await asyncio.sleep(60)
        await first.spend()
        async with await selector.restore(data) as again:
            await again.spend()
        assert len(store.spent) == 4


@virtual_time
async def test_outputs_of_a_retried_spend_that_others_have_spent_are_not_added_again():
    genie, store = FakeGenie(), MemoryTokenStore()
    await store.add([token("coin", 10)])
    change, later = token("change", 10), token("later", 10)
    async with SherdlockSelector(genie, store) as one:
        selection = await one.select(10, transaction="tx", **ALICE)
        data = selection.checkpoint()
    await store.spend(selection.tokens, transaction="tx", outputs=[change])
    await store.spend([change], transaction="other", outputs=[later])
    async with SherdlockSelector(genie, store, retries=0) as other:
        async with await other.select(10, transaction="tx2", **ALICE):
            pass
        await (await other.restore(data)).spend([change])
        with pytest.raises(InsufficientFunds):
            await other.select(20, transaction="tx2", **ALICE)


@virtual_time
async def test_a_late_report_of_a_spent_token_does_not_make_it_selectable():
    genie, store = FakeGenie(), store_of(tokens(4))
    store.muted = True
    async with SherdlockSelector(genie, store, retries=0) as selector:
        await settle()
        selection = await selector.select(2, transaction="tx", **ALICE)
        await selection.spend()
        for feed in store.feeds:
            feed.put_nowait(Added(selection.tokens[0]))
        await settle()
        with pytest.raises(InsufficientFunds):
            await selector.select(3, transaction="tx", **ALICE)


@virtual_time
async def test_unspent_tokens_are_free_after_the_lease_of_an_unknown_spend():
    genie, store = FakeGenie(), store_of(tokens(4))

    async def fail():
        raise OSError("the answer is lost")

    store.before_spend = fail
    async with SherdlockSelector(genie, store, lease=100, backoff=1000) as selector:
        with pytest.raises(OSError, match="the answer is lost"):
            async with await selector.select(4, transaction="tx", **ALICE) as selection:
                await selection.spend()
        asking = asyncio.create_task(selector.select(4, transaction="tx2", **ALICE))
        await asyncio.sleep(99)
        assert not asking.done()
        await asyncio.sleep(2)
        assert asking.done()


@virtual_time
async def test_a_checkpoint_restores_the_selection_in_another_replica():
    genie, store = FakeGenie(), store_of(tokens(10, 3, issuer="bank", metadata={"a": [1]}))
    async with SherdlockSelector(genie, store) as one, SherdlockSelector(genie, store) as other:
        selection = await one.select(7, transaction="tx", **ALICE)
        data = selection.checkpoint()
        with pytest.raises(SelectionEnded, match="this selector holds the tokens of 'tx' already"):
            await one.restore(data)
        async with await other.restore(data) as again:
            assert set(again.tokens) == set(selection.tokens)
            assert (again.target, again.transaction, again.change) == (7, "tx", 2)
        assert genie.tokens_held == set()  # the locks from before are given back as well
        async with await other.restore(data) as again:
            await again.spend()
        lock = genie.lock_as_other(selection.tokens[0].id, transaction="thief") if not genie.tokens_held else None
        assert lock is None
        genie.end(next(iter(genie.locks.values())))
        genie.lock_as_other(selection.tokens[0].id, transaction="thief")
        with pytest.raises(SelectionEnded):
            await other.restore(data | {"transaction": "tx"})
        with pytest.raises(SelectionEnded):
            again.checkpoint()


@virtual_time
async def test_restore_locks_all_or_no_tokens_even_if_their_sum_exceeds_the_largest_target():
    genie, store = FakeGenie(), store_of(tokens(2, 2**62))
    async with SherdlockSelector(genie, store) as one, SherdlockSelector(genie, store) as other:
        selection = await one.select(MAX_AMOUNT, transaction="tx", **ALICE)
        data = selection.checkpoint()
        async with await other.restore(data) as again:
            assert (again.amount, len(again.tokens)) == (MAX_AMOUNT + 1, 2)
        genie.lock_as_other("t1", transaction="thief")
        with pytest.raises(SelectionEnded):
            await other.restore(data)
        assert genie.tokens_held == {"t1"}


@virtual_time
async def test_an_unavailable_genie_is_reported_and_nothing_stays_reserved():
    genie, store = FakeGenie(), store_of(tokens(10))
    async with SherdlockSelector(genie, store) as selector:
        selection = await selector.select(3, transaction="tx", **ALICE)
        genie.down = True
        with pytest.raises(Unavailable):
            await selector.select(3, transaction="tx2", **ALICE)
        await selection.release()
        assert selector._context.tracker.reservations == {}
        genie.down = False
        await open_subscription(selector)
        genie.disconnect_watchers()
        await asyncio.sleep(1)
        lock = genie.lock_as_other(*(f"t{number}" for number in range(9)))
        await settle()
        genie.requests.clear()
        await selector.select(1, transaction="tx3", **ALICE)
        assert genie.requests == [["t9"]]
        genie.end(lock)


@virtual_time
async def test_close_ends_the_subscription_and_the_tasks():
    genie, store = FakeGenie(), store_of(tokens(10))
    async with SherdlockSelector(genie, store) as selector:
        await selector.select(1, transaction="warm", **ALICE)
        await open_subscription(selector)
        assert genie.watcher_count == 1
        genie.answer = asyncio.Event()
        asking = asyncio.create_task(selector.select(2, transaction="tx", **ALICE))
        await settle()
    assert genie.watcher_count == 0
    selector._context.subscription._contended_share = 1.0
    genie.answer.set()
    await (await asking).release()
    selector._context.subscription.record_request(contended=True)
    await settle()
    assert genie.watcher_count == 0
    assert len(asyncio.all_tasks()) == 1


@virtual_time
async def test_close_fails_waiting_selections():
    genie, store = FakeGenie(), store_of(tokens(10))
    lock = genie.lock_as_other("t0")
    async with SherdlockSelector(genie, store, backoff=1e6) as selector:
        asking = asyncio.create_task(selector.select(10, transaction="tx", **ALICE))
        await settle()
        with pytest.raises(RuntimeError, match="open already"):
            await selector.start()
    with pytest.raises(RuntimeError, match="not open"):
        await asking
    with pytest.raises(RuntimeError, match="not open"):
        await selector.select(1, transaction="tx", **ALICE)
    assert lock.id in genie.locks
    assert genie.tokens_held == {"t0"}


def test_invalid_arguments_are_rejected():
    for wrong in ({"retries": -1}, {"immediate_retries": -1}, {"backoff": -1}, {"lease": 0}, {"max_cache_age": -1}):
        with pytest.raises(ValueError, match="must"):
            SherdlockSelector(FakeGenie(), store_of([]), **wrong)


@virtual_time
async def test_the_oldest_locks_of_spent_tokens_are_released_beyond_the_maximum(monkeypatch):
    monkeypatch.setattr(grants, "MAX_SPENT_LOCKS", 3)
    genie, store = FakeGenie(), store_of(tokens(8))
    spent = []
    async with SherdlockSelector(genie, store, lease=100) as selector:
        for number in range(5):
            selection = await selector.select(1, transaction=f"tx-{number}", **ALICE)
            await selection.spend()
            spent.append(selection.tokens[0].id)
        await settle()
        assert genie.tokens_held == set(spent[2:])
        await asyncio.sleep(101)
        await (await selector.select(1, transaction="late", **ALICE)).spend()
        await settle()
        assert len(genie.tokens_held) == 1


@virtual_time
async def test_a_selection_released_during_the_extension_of_its_locks_is_not_spent(monkeypatch):
    genie, store = FakeGenie(), store_of(tokens(2))
    extend = FakeLock.extend

    async def answered_late(lock, seconds):
        await extend(lock, seconds)
        await selection.release()

    monkeypatch.setattr(FakeLock, "extend", answered_late)
    async with SherdlockSelector(genie, store, lease=100) as selector:
        selection = await selector.select(2, transaction="tx", **ALICE)
        await asyncio.sleep(60)
        with pytest.raises(SelectionEnded, match="released"):
            await selection.spend()
        assert store.spent == {}
        assert not selection.held
