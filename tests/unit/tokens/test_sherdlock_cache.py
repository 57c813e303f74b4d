"""One wallet's cache: readings, and what happens meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

from genie.tokens.sherdlock.cache import Load, WalletCache
from genie.tokens.token import Token, Wallet
from sherdlock_world import token, tokens


def new_cache() -> WalletCache:
    return WalletCache(Wallet("Fiat", "GBP", "alice", None), set())


def read(cache: WalletCache, *pages: Sequence[Token]) -> list[Token]:
    cache.begin_load(Load(cache.load_count + 1, 0), now=0.0)
    for page in pages:
        cache.add_page(page)
    return cache.finish_load()


def ids(cache: WalletCache) -> set[str]:
    return {each.id for each in cache}


def test_a_reading_brings_what_is_new_and_takes_what_is_gone():
    cache = new_cache()
    assert read(cache, tokens(3)) == []
    assert read(cache, tokens(2), [token("new", 1)]) == [token("t2", 1)]
    assert ids(cache) == {"t0", "t1", "new"}
    assert {each.id for each in cache.draw("small")} == ids(cache)


def test_what_is_spent_while_it_is_read_does_not_come_back():
    cache = new_cache()
    cache.begin_load(Load(1, 0), now=0.0)
    cache.remove("t0")
    assert cache.add_page(tokens(2)) == [token("t1", 1)]
    cache.finish_load()
    assert ids(cache) == {"t1"}


def test_what_comes_while_it_is_read_stays_though_it_was_not_told():
    cache = new_cache()
    cache.begin_load(Load(1, 0), now=0.0)
    cache.add_page(tokens(1))
    cache.add(token("new", 1))
    assert cache.finish_load() == []
    assert ids(cache) == {"t0", "new"}


def test_what_came_before_it_was_read_and_is_not_told_is_gone():
    cache = new_cache()
    cache.add(token("old", 1))
    assert read(cache, tokens(1)) == [token("old", 1)]


def test_a_failed_reading_takes_nothing_away():
    cache = new_cache()
    read(cache, tokens(3))
    cache.begin_load(Load(2, 0), now=0.0)
    cache.add_page([token("new", 1)])
    assert cache.finish_load(OSError()) == []
    assert ids(cache) == {"t0", "t1", "t2", "new"}
    assert cache.last_load is not None
    assert cache.last_load.number == 1


def test_one_page_is_of_one_moment():
    cache = new_cache()
    read(cache, tokens(3))
    assert cache.consistent


def test_several_pages_are_of_one_moment_when_they_tell_the_same_twice_and_nothing_moves():
    cache = new_cache()
    first, second = tokens(2, name="a"), tokens(2, name="b")
    for pages, steady in (([first, second], False), ([first, second], True), ([first, second[:1]], False)):
        read(cache, *pages)
        assert cache.consistent == steady
    for move in (lambda: cache.add(token("z", 1)), lambda: cache.remove("a0")):
        read(cache, first, second)
        cache.begin_load(Load(cache.load_count + 1, 0), now=0.0)
        cache.add_page(first)
        move()
        cache.add_page(second)
        cache.finish_load()
        assert not cache.consistent
