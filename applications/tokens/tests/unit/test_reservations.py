"""`Buckets` against a simple model, a mapping from tokens to their reservations."""

from __future__ import annotations

import random
from typing import Any

import pytest

from genie_tokens.in_memory.reservations import (
    BY_ACCOUNT,
    BY_OWNER,
    MAX_STALE_ENTRIES,
    SPENT,
    Buckets,
    release_entries,
    reserve_entries,
)
from genie_tokens.token import Token, wallets_of
from scripted_tokens import make_tokens


def check(buckets: Buckets, tokens: dict[str, Token], reservations: dict[str, object], whole: int | None) -> None:
    """Check the totals, and that each free entry is exactly once on the stack of each of its buckets."""
    assert set(buckets.ids()) == set(tokens)
    wallets = {wallet for token in tokens.values() for wallet in wallets_of(token)}
    assert set(buckets._wallet_buckets) == wallets
    for wallet in wallets:
        bucket = buckets.find(wallet)
        assert bucket is not None
        mine = [token for token in tokens.values() if wallet.has(token)]
        free = {token.id for token in mine if reservations.get(token.id) is None}
        assert (bucket.token_count, bucket.total_amount) == (len(mine), sum(token.amount for token in mine))
        assert bucket.free_amount == sum(tokens[id].amount for id in free)
        assert sorted(entry.id for entry in bucket.free_entries()) == sorted(free)
        assert len(bucket.stack) == len(set(bucket.stack)) <= 2 * bucket.token_count + MAX_STALE_ENTRIES
        for entry in bucket.stack:
            assert entry.reservation is SPENT or entry.stack_flags & bucket.flag
    entries = [buckets.entry(id) for id in tokens]
    assert all(entry is not None and entry.reservation is reservations.get(entry.id) for entry in entries)
    assert buckets.cached_token_count == sum(entry is not None and entry.token is not None for entry in entries)
    assert whole is None or buckets.cached_token_count <= whole


@pytest.mark.parametrize("max_tokens", [None, 40])
@pytest.mark.parametrize("seed", range(5))
def test_random_operations_keep_totals_and_stacks_consistent(seed: int, max_tokens: int | None) -> None:
    chance = random.Random(seed)  # noqa: S311
    buckets = Buckets(max_tokens)
    tokens: dict[str, Token] = {}
    holders: dict[str, object] = {}
    reservations: list[tuple[object, list[Any]]] = []
    keys: list[dict[str, Any]] = [
        {"owner": f"k{number}", "account": [None, "a", "b"][number % 3]} for number in range(7)
    ]
    for turn in range(1500):
        what = chance.random()
        if what < 0.3 + 0.2 * (turn < 500):
            [token] = make_tokens([chance.randrange(1, 9)], f"{turn}-", **chance.choice(keys))
            assert buckets.add(token) is not None
            assert buckets.add(token) is None
            tokens[token.id] = token
        elif what < 0.5 and tokens:
            id = chance.choice(list(tokens))
            del tokens[id]
            holders.pop(id, None)
            assert buckets.remove(id)
            assert not buckets.remove(id)
        elif what < 0.75 and tokens:
            bucket = buckets.find(chance.choice(wallets_of(chance.choice(list(tokens.values())))))
            assert bucket is not None
            reservation, taken = object(), list[Any]()
            if bucket.free_amount and chance.random() < 0.5:
                taken = bucket.reserve(chance.randrange(1, bucket.free_amount + 1), reservation)
            elif chance.random() < 0.5:
                bucket.reserve_where(chance.randrange(1, 20), reservation, lambda token: token.amount % 2 == 0, taken)
            else:
                taken = [entry for entry in bucket.free_entries() if chance.random() < 0.2]
                reserve_entries(taken, reservation)
            holders.update({entry.id: reservation for entry in taken})
            reservations.append((reservation, taken))
        elif reservations:
            reservation, taken = reservations.pop(chance.randrange(len(reservations)))
            release_entries(taken, reservation)
            release_entries(taken, reservation)
            holders = {id: holder for id, holder in holders.items() if holder is not reservation}
        if turn % 10 == 0:
            check(buckets, tokens, holders, max_tokens)
    for id in list(tokens):
        buckets.remove(id)
    assert (len(buckets), buckets.cached_token_count, buckets._wallet_buckets) == (0, 0, {})


def test_entries_of_spent_tokens_do_not_accumulate_in_the_other_bucket() -> None:
    buckets = Buckets()
    keep = make_tokens([1], "keep", account="a")[0]
    buckets.add(keep)
    by_owner, by_account = wallets_of(keep)
    for token in make_tokens([1] * 1000, account="a"):
        buckets.add(token)
        bucket = buckets.find(by_owner)
        assert bucket is not None
        [entry] = bucket.reserve(1, object())
        assert entry.stack_flags == BY_ACCOUNT
        release_entries([entry], entry.reservation)
        assert entry.stack_flags == BY_OWNER | BY_ACCOUNT
        buckets.remove(token.id)
    other = buckets.find(by_account)
    assert other is not None
    assert len(other.stack) <= MAX_STALE_ENTRIES + 2
