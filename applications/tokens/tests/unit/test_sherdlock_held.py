"""Wallets with many held tokens: they are set aside, so that a selection does not look at them again."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from genie_tokens import FundsLocked, InsufficientFunds, SherdlockSelector
from genie_tokens.sherdlock.cache import WalletCache, WalletCaches
from genie_tokens.sherdlock.holds import LockTracker, Reservation
from genie_tokens.sherdlock.search import Balance, SelectionRequest, pick_candidates
from genie_tokens.token import Token, Wallet
from sherdlock_world import ALICE, FakeGenie, open_subscription, settle, store_of, token, tokens, virtual_time

LEASE_S = 60.0


class Clock:
    """A guard of a selector whose time the test sets."""

    now = 0.0

    def time(self) -> float:
        return self.now


class Holds:
    """Random reservations and locks on tokens, which are in an owner's and in an account's wallet."""

    def __init__(self, seed: int) -> None:
        self.chance = Random(seed)  # noqa: S311
        self.clock = Clock()
        self.tracker = LockTracker(LEASE_S)
        self.caches = WalletCaches(store_of(()), 1.0, self.tracker, self.clock)  # type: ignore[arg-type]
        wallets = Wallet("Fiat", "GBP", "alice", None), Wallet("Fiat", "GBP", None, "shared")
        self.both: list[WalletCache] = [self.caches.get(wallet, 0.0) for wallet in wallets]
        self.reservations: list[Reservation] = []
        self.locks: list[tuple[str, int, str]] = []
        self.count = 0
        self.may_lock_twice = bool(seed % 2)  # else locks end because they are no longer trusted
        for each in tokens(30):
            self.add(each.id)

    def add(self, id: str) -> None:
        self.caches._on_added(token(id, self.chance.randint(1, 9), account="shared"))

    def some_ids(self) -> list[str]:
        ids = sorted(each.id for each in self.both[0])
        return self.chance.sample(ids, min(len(ids), self.chance.randint(1, 5)))

    def reserve(self) -> None:
        now = self.clock.now
        free = [id for id in self.some_ids() if self.tracker.local_reservation(id, now) is None]
        reservation = Reservation(self.chance.choice("abc"), free)
        self.tracker.reserve(reservation)
        self.reservations.append(reservation)

    def decide(self) -> None:
        pending = [reservation for reservation in self.reservations if reservation.pending]
        if pending:
            reservation = self.chance.choice(pending)
            granted = [id for id in reservation.token_ids if self.chance.random() < 0.7]
            self.tracker.narrow(reservation, granted, self.clock.now + LEASE_S)
            for id in granted:
                self.caches.put_back(id)
            if not granted:
                self.reservations.remove(reservation)

    def extend(self) -> None:
        granted = [each for each in self.reservations if self.clock.now < each.expires_at < float("inf")]
        if granted:
            self.tracker.renew(self.chance.choice(granted), self.clock.now + LEASE_S)

    def drop(self) -> None:
        if self.reservations:
            self.tracker.drop(self.reservations.pop(self.chance.randrange(len(self.reservations))))

    def lock(self) -> None:
        self.count += 1
        transaction = self.chance.choice("abcde")
        for id in self.some_ids():
            if self.may_lock_twice or id not in self.tracker.observed_locks:
                self.locks.append((id, self.count, transaction))
                self.tracker.on_locked(id, self.count, transaction, self.clock.now)

    def unlock(self) -> None:
        if self.locks:
            id, lock_id, _ = self.locks.pop(self.chance.randrange(len(self.locks)))
            end = self.tracker.on_unlocked if self.chance.random() < 0.5 else self._release
            end(id, lock_id)

    def _release(self, id: str, lock_id: int) -> None:
        self.tracker.on_released(lock_id, [id])

    def clear(self) -> None:
        if self.chance.random() < 0.1:
            self.locks.clear()
            self.tracker.clear_observed()

    def change_tokens(self) -> None:
        self.count += 1
        self.caches.on_spent(self.some_ids()[0])
        self.add(f"n{self.count}")

    def wait(self) -> None:
        self.clock.now += 1.0 if self.may_lock_twice else self.chance.randint(1, 20)

    def pick(self) -> None:
        request = self.request()
        cache = self.chance.choice(self.both)
        pick_candidates(request, cache, self.tracker, self.clock.now, include_own=False, spare_factor=1)

    def request(self) -> SelectionRequest:
        chance = self.chance
        return SelectionRequest(
            amount=chance.randint(1, 40),
            transaction=chance.choice("abc"),
            where=chance.choice([None, lambda each: each.amount > 3]),
            prefer=chance.choice([None, "small", "large"]),
            limit=chance.choice([None, None, 3]),
        )

    def step(self) -> None:
        acts: list[Callable[[], None]] = [self.reserve, self.decide, self.extend, self.drop, self.lock, self.unlock]
        self.chance.choice([*acts, self.clear, self.change_tokens, self.wait, self.pick, self.pick])()
        self.tracker.expire(self.clock.now)


@pytest.mark.parametrize("seed", range(12))
def test_a_wallet_knows_its_free_tokens_and_amounts_after_random_changes(seed: int) -> None:
    """Compared with the plain definition, which looks at the holds of each token."""
    holds, aside_count = Holds(seed), 0
    for _ in range(3_000):
        holds.step()
        cache = holds.chance.choice(holds.both)
        aside_count += len(list(cache.tokens.held()))
        check(holds, cache)
    assert aside_count > 10_000
    for each in list(holds.both[0]):
        holds.caches.on_spent(each.id)
    assert not holds.caches._held_ids


def check(holds: Holds, cache: WalletCache) -> None:
    """Check the invariants, and compare the wallet with the plain definition."""
    tracker, now = holds.tracker, holds.clock.now
    aside = list(cache.tokens.held())
    assert all(tracker.is_held(each.id, now) for each in aside)
    assert all(tracker.observed_locks[id].transaction == each.transaction for id, each in cache.tokens.locked.items())
    assert holds.caches._held_ids >= {each.id for each in aside}
    assert len(cache) == len({each.id for each in cache}) == len(holds.both[0])
    request = holds.request()
    assert Balance.of_wallet(request, cache, tracker, now) == Balance.of(request, cache, tracker, now)
    assert cache.tokens.locked_amount == sum(each.token.amount for each in cache.tokens.locked.values())
    usable = {
        each.id
        for each in cache
        if tracker.local_reservation(each.id, now) is None
        and not tracker.held_by_other(each.id, request.transaction, now)
    }
    all_tokens = replace(request, amount=1, where=None)
    candidates = pick_candidates(all_tokens, cache, tracker, now, include_own=True, spare_factor=sys.maxsize)
    assert ({each.id for each in candidates.tokens} if candidates else set()) == usable


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of all tokens for which a selector has checked whether they are held."""
    ids: list[str] = []
    for name in ("local_reservation", "observed_lock"):
        original: Callable[..., Any] = getattr(LockTracker, name)

        def check(self: LockTracker, id: str, now: float, original: Callable[..., Any] = original) -> Any:
            ids.append(id)
            return original(self, id, now)

        monkeypatch.setattr(LockTracker, name, check)
    return ids


async def mostly_locked(genie: FakeGenie, selector: SherdlockSelector, held: list[Token]) -> None:
    """Let a selector load its wallet, and observe that another client locks most of its tokens."""
    await open_subscription(selector)
    await (await selector.select(1, transaction="first", **ALICE)).release()
    genie.lock_as_other(*(each.id for each in held))
    await settle()


@pytest.mark.parametrize("how", [{}, {"prefer": "small"}, {"prefer": "large"}, {"limit": 2}])
def test_selections_check_held_tokens_only_once(checked: list[str], how: dict[str, Any]) -> None:
    @virtual_time
    async def run() -> None:
        genie, held = FakeGenie(), tokens(5_000, name="h")
        async with SherdlockSelector(genie, store_of([*held, *tokens(5)])) as selector:
            await mostly_locked(genie, selector, held)
            checked.clear()
            for number in range(10):
                selection = await selector.select(2, transaction=f"t{number}", **how, **ALICE)
                assert {each.id[0] for each in selection.tokens} == {"t"}
                await selection.release()
            assert len(checked) < 15_000  # two checks of each held token, once

    run()


@pytest.mark.parametrize("how", [{}, {"where": lambda _token: True}, {"limit": 3}])
def test_a_waiting_selection_does_not_check_held_tokens_again(checked: list[str], how: dict[str, Any]) -> None:
    @virtual_time
    async def run() -> None:
        genie, held = FakeGenie(), tokens(5_000, name="h")
        async with SherdlockSelector(genie, store_of(held), backoff=1e6) as selector:
            await mostly_locked(genie, selector, held[1:])
            first = await selector.select(1, transaction="t1", **ALICE)
            waiting = asyncio.create_task(selector.select(1, transaction="t2", **how, **ALICE))
            await settle()
            checked.clear()
            await first.release()
            assert [each.id for each in (await waiting).tokens] == ["h0"]
            assert len(checked) < 200

    run()


@virtual_time
async def test_the_first_selection_after_many_locks_divides_its_work() -> None:
    genie, held = FakeGenie(), tokens(5_000, name="h")
    async with SherdlockSelector(genie, store_of([*held, *tokens(5)])) as selector:
        await mostly_locked(genie, selector, held)
        cache = next(iter(selector._context.caches._caches.values()))
        aside = [len(cache.tokens.locked)]
        selecting = asyncio.create_task(selector.select(5, transaction="t", **ALICE))
        while not selecting.done():
            await asyncio.sleep(0)
            aside.append(len(cache.tokens.locked))
        assert aside[-1] == 5_000
        assert max(after - before for before, after in pairwise(aside)) <= 1_000
        await (await selecting).release()


@virtual_time
async def test_held_tokens_that_are_set_aside_still_count_as_contention() -> None:
    """Otherwise the selector would unsubscribe, and request tokens that others hold."""
    genie, held = FakeGenie(), tokens(90, name="h")
    async with SherdlockSelector(genie, store_of([*held, *tokens(10)])) as selector:
        await mostly_locked(genie, selector, held)
        selector._context.subscription._contended_share = 0.0
        for number in range(30):
            await (await selector.select(5, transaction=f"t{number}", **ALICE)).release()
        assert selector._context.subscription._contended_share > 0.5


@virtual_time
async def test_the_tokens_of_a_selection_that_was_never_released_can_be_selected_after_its_lease() -> None:
    genie = FakeGenie()
    async with SherdlockSelector(genie, store_of(tokens(5)), lease=10.0, retries=0) as selector:
        await selector.select(5, transaction="forgotten", **ALICE)
        with pytest.raises(FundsLocked):
            await selector.select(1, transaction="t1", **ALICE)
        await asyncio.sleep(10.0)
        await selector.select(5, transaction="t2", **ALICE)
        assert len(selector._context.tracker._by_expiry) == 1


@virtual_time
async def test_a_transaction_that_holds_many_tokens_can_request_more() -> None:
    genie = FakeGenie()
    async with SherdlockSelector(genie, store_of(tokens(3_000)), retries=0) as selector:
        await open_subscription(selector)
        await selector.select(2_500, transaction="t", **ALICE)
        await settle()
        requesting = asyncio.create_task(selector.select(501, transaction="t", **ALICE))
        await settle()
        with pytest.raises(InsufficientFunds):
            await asyncio.wait_for(requesting, 1.0)


@virtual_time
async def test_a_granted_token_no_longer_counts_as_locked_by_another_client() -> None:
    """The end of the other client's lock was not reported, so only the last attempt requests the token."""
    genie = FakeGenie()
    async with SherdlockSelector(genie, store_of(tokens(3)), retries=0) as selector:
        await open_subscription(selector)
        other = genie.lock_as_other("t0", "t1", "t2")
        await settle()
        genie.muted = True
        genie.end(other)
        async with await selector.select(3, transaction="t", **ALICE):
            tokens_of_alice = next(iter(selector._context.caches._caches.values())).tokens
            assert (tokens_of_alice.locked, tokens_of_alice.locked_amount) == ({}, 0)
            with pytest.raises(InsufficientFunds):  # not FundsLocked
                await selector.select(1, transaction="t", **ALICE)


@virtual_time
async def test_a_restored_token_no_longer_counts_as_locked_by_another_client() -> None:
    """The end of the other client's lock was not reported."""
    genie = FakeGenie()
    async with SherdlockSelector(genie, store_of(tokens(3)), retries=0) as selector:
        await open_subscription(selector)
        selection = await selector.select(3, transaction="t", **ALICE)
        checkpoint = selection.checkpoint()
        await selection.release()
        other = genie.lock_as_other("t0", "t1", "t2")
        await settle()
        with pytest.raises(FundsLocked):  # sets the tokens aside
            await selector.select(1, transaction="u", **ALICE)
        genie.muted = True
        genie.end(other)
        await selector.restore(checkpoint)
        with pytest.raises(InsufficientFunds, match=r"0 free$"):  # not FundsLocked
            await selector.select(1, transaction="t", **ALICE)


def test_a_reservation_that_expired_while_its_locks_were_extended_holds_its_tokens_again() -> None:
    tracker, reservation = LockTracker(10.0), Reservation("t", ["a"])
    tracker.reserve(reservation)
    tracker.renew(reservation, 10.0)
    tracker.expire(10.0)
    assert not tracker.is_held("a", 10.0)
    tracker.renew(reservation, 19.0)  # the server has extended the lock in time, and its reply is late
    assert tracker.is_held("a", 18.0)
    tracker.expire(19.0)
    assert not tracker.is_held("a", 18.0)


def test_a_lock_whose_end_was_not_reported_is_removed_although_another_token_is_always_locked() -> None:
    tracker = LockTracker(10.0)
    tracker.on_locked("always", 0, "t", 0.0)
    tracker.on_locked("a", 100, "other", 0.0)
    for number in range(1, 10):
        now = number * 5.0
        tracker.on_locked("always", number, "t", now)
        tracker.on_unlocked("always", number - 1)
        tracker.expire(now)
    assert list(tracker.observed_locks) == ["always"]
