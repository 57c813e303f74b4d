"""`TokenPool` and `AmountIndex`: drawing tokens at random."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from genie_tokens.sherdlock.cache import AmountIndex, TokenPool
from sherdlock_world import token, tokens


def test_every_token_is_drawn_once_and_stays_in_the_pool():
    pool = TokenPool()
    for each in tokens(20):
        pool.add(each)
    for _ in range(3):
        assert sorted(each.id for each in pool.draw()) == sorted(each.id for each in tokens(20))
    assert len(pool) == 20


def test_every_order_is_equally_likely():
    pool = TokenPool()
    for each in tokens(3):
        pool.add(each)
    seen = Counter("".join(each.id[1] for each in pool.draw()) for _ in range(6000))
    assert len(seen) == 6
    assert min(seen.values()) > 800


def test_a_partial_draw_can_be_repeated():
    pool = TokenPool()
    for each in tokens(5):
        pool.add(each)
    first = [next(pool.draw()).id for _ in range(200)]
    assert set(first) == {each.id for each in tokens(5)}


@pytest.mark.parametrize("seed", range(5))
def test_random_additions_and_removals_between_draws(seed):
    chance = Random(seed)  # noqa: S311
    pool, there = TokenPool(), {}
    by_amount = AmountIndex([])
    for number in range(2000):
        if there and chance.random() < 0.45:
            id = chance.choice(list(there))
            assert pool.pop(id) == there[id]
            by_amount.remove(there.pop(id))
        else:
            there[f"t{number}"] = new = token(f"t{number}", chance.randint(1, 9))
            pool.add(new)
            by_amount.add(new)
        if number % 50 == 0:
            drawn = pool.draw()
            next(drawn, None)
            assert {each.id for each in pool.draw()} == set(there) == {each.id for each in pool}
            amounts = [each.amount for each in by_amount.draw("small")]
            assert amounts == sorted(each.amount for each in there.values())
            assert [each.amount for each in by_amount.draw("large")] == amounts[::-1]
            assert all((id in pool) == (id in there) for id in (f"t{n}" for n in range(number)))


def test_tokens_of_the_same_amount_are_drawn_in_random_order():
    by_amount = AmountIndex([*tokens(3, 5, "five"), *tokens(3, 7, "seven")])
    assert {next(by_amount.draw("small")).id for _ in range(200)} == {"five0", "five1", "five2"}
    assert {next(by_amount.draw("large")).id for _ in range(200)} == {"seven0", "seven1", "seven2"}
