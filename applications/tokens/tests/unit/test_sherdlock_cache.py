"""`WalletCache`: loads, and changes during a load."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Sequence

from genie_tokens.sherdlock.cache import Load, WalletCache
from genie_tokens.token import MAX_AMOUNT, Token, Wallet
from sherdlock_world import settle, token, tokens, virtual_time


def new_cache() -> WalletCache:
    return WalletCache(Wallet("Fiat", "GBP", "alice", None), set(), set(), lambda _id: True)


def read(cache: WalletCache, *pages: Sequence[Token]) -> list[Token]:
    cache.begin_load(Load(cache.load_count + 1, 0), now=0.0)
    for page in pages:
        cache.add_page(page)
    return cache.finish_load()


def ids(cache: WalletCache) -> set[str]:
    return {each.id for each in cache}


def test_a_load_adds_new_tokens_and_removes_missing_ones():
    cache = new_cache()
    assert read(cache, tokens(3)) == []
    assert read(cache, tokens(2), [token("new", 1)]) == [token("t2", 1)]
    assert ids(cache) == {"t0", "t1", "new"}
    assert {each.id for each in cache.tokens.draw("small")} == ids(cache)


def test_a_token_spent_during_a_load_is_not_added_by_a_page():
    cache = new_cache()
    cache.begin_load(Load(1, 0), now=0.0)
    cache.remove("t0")
    assert cache.add_page(tokens(2)) == [token("t1", 1)]
    cache.finish_load()
    assert ids(cache) == {"t1"}


def test_a_token_added_during_a_load_stays_although_no_page_contains_it():
    cache = new_cache()
    cache.begin_load(Load(1, 0), now=0.0)
    cache.add_page(tokens(1))
    cache.add(token("new", 1))
    assert cache.finish_load() == []
    assert ids(cache) == {"t0", "new"}


def test_a_token_added_before_a_load_is_removed_if_no_page_contains_it():
    cache = new_cache()
    cache.add(token("old", 1))
    assert read(cache, tokens(1)) == [token("old", 1)]


def test_a_failed_load_removes_nothing():
    cache = new_cache()
    read(cache, tokens(3))
    cache.begin_load(Load(2, 0), now=0.0)
    cache.add_page([token("new", 1)])
    assert cache.finish_load(OSError()) == []
    assert ids(cache) == {"t0", "t1", "t2", "new"}
    assert cache.last_load is not None
    assert cache.last_load.number == 1


def test_a_load_of_one_page_is_consistent():
    cache = new_cache()
    read(cache, tokens(3))
    assert cache.is_consistent


def test_a_load_of_several_pages_is_consistent_if_nothing_changed_since_the_previous_one():
    cache = new_cache()
    first, second = tokens(2, name="a"), tokens(2, name="b")
    for pages, steady in (([first, second], False), ([first, second], True), ([first, second[:1]], False)):
        read(cache, *pages)
        assert cache.is_consistent == steady
    for move in (lambda: cache.add(token("z", 1)), lambda: cache.remove("a0")):
        read(cache, first, second)
        cache.begin_load(Load(cache.load_count + 1, 0), now=0.0)
        cache.add_page(first)
        move()
        cache.add_page(second)
        cache.finish_load()
        assert not cache.is_consistent


@virtual_time
async def test_a_waiting_selection_does_not_record_the_whole_wallet():
    """Hundreds of selections may wait for the load of a wallet with a hundred thousand tokens."""
    cache, loaded = new_cache(), tokens(20_000)
    waiting = [asyncio.create_task(cache.wait(MAX_AMOUNT, 0, None, deadline=None)) for _ in range(20)]
    await settle()
    tracemalloc.start()
    for each in loaded:
        cache.on_free(each)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size < 5_000_000
    cache.retry()
    await settle()
    assert [task.result() for task in waiting] == [True] * 20


@virtual_time
async def test_more_tokens_than_a_waiting_selection_records_wake_it():
    cache = new_cache()
    waiting = asyncio.create_task(cache.wait(3_000, 0, None, deadline=None))
    await settle()
    for each in tokens(3_000):
        assert not waiting.done()
        cache.add(each)
        cache.on_free(each)
    await settle()
    assert waiting.result()
