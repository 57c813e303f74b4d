"""Joining what spending has split."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genie.tokens.errors import FundsLocked
from genie.tokens.in_memory import InMemorySelector
from genie.tokens.in_memory.selector import split
from genie.tokens.token import MAX_AMOUNT
from scripted_tokens import ScriptedStore, coins, settle, virtual

GBP = {"token_type": "Fiat", "identifier": "GBP"}
ALICE = {"owner": "alice", **GBP}


@virtual
async def test_the_smallest_are_joined_until_nothing_is_left_to_join() -> None:
    store = ScriptedStore(coins([5, 1, 4, 2, 3, 100]))
    async with InMemorySelector(store) as selector:
        turns = []
        while (joined := await selector.consolidate(transaction=f"join-{len(turns)}", at_most=3, **ALICE)) is not None:
            async with joined:
                turns.append(sorted(token.amount for token in joined.tokens))
                assert (joined.amounts, joined.change) == ((joined.amount,), 0)
                await joined.spend(coins(joined.amounts, f"joined-{len(turns)}-"))
            await settle()
        assert turns == [[1, 2, 3], [4, 5, 6], [15, 100]]
        assert [token.amount for token in store.tokens.values()] == [115]


@virtual
async def test_outputs_are_as_many_and_as_equal_as_can_be() -> None:
    async with InMemorySelector(ScriptedStore(coins([7, 7, 7, 7, 7]))) as selector:
        assert await selector.consolidate(transaction="a", into=5, **ALICE) is None
        assert await selector.consolidate(transaction="a", owner="bob", **GBP) is None
        joined = await selector.consolidate(transaction="a", into=3, **ALICE)
        assert joined is not None
        assert joined.amounts == (12, 12, 11)


@virtual
async def test_what_is_joined_is_held_and_what_is_held_is_not_joined() -> None:
    store = ScriptedStore([*coins([1] * 4, account="acc"), *coins([1] * 4, "b", owner="bob", account="acc")])
    for max_tokens in (None, 0):
        async with InMemorySelector(store, max_tokens=max_tokens) as selector:
            held = await selector.select(3, transaction="a", **ALICE)
            assert await selector.consolidate(transaction="b", **ALICE) is None
            joined = await selector.consolidate(transaction="b", account="acc", **GBP)
            assert joined is not None
            assert len(joined.tokens) == 5
            assert not {*joined.tokens} & {*held.tokens}
            with pytest.raises(FundsLocked):
                await selector.select(1, transaction="c", owner="bob", **GBP)
            await joined.release()
            assert (await selector.select(4, transaction="c", owner="bob", **GBP)).held


@virtual
async def test_only_tokens_that_can_be_joined_are() -> None:
    store = ScriptedStore([*coins([1] * 4, issuer="bank"), *coins([1] * 4, "m", issuer="mint")])
    for max_tokens in (None, 5, 0):
        async with InMemorySelector(store, max_tokens=max_tokens) as selector:
            joined = await selector.consolidate(transaction="a", where=lambda token: token.issuer == "mint", **ALICE)
            assert joined is not None
            assert {token.id for token in joined.tokens} == {"m0", "m1", "m2", "m3"}


@virtual
async def test_tokens_that_are_gone_are_not_joined() -> None:
    store = ScriptedStore(coins([1] * 4))
    async with InMemorySelector(store, max_tokens=0) as selector:
        store.tell = lambda _change: None  # type: ignore[method-assign]
        await store.spend([store.tokens["t0"]], transaction="elsewhere")
        joined = await selector.consolidate(transaction="a", **ALICE)
        assert joined is not None
        assert (joined.amounts, joined.held) == ((3,), True)
        await joined.release()
        await store.spend([store.tokens["t1"], store.tokens["t2"]], transaction="elsewhere")
        assert await selector.consolidate(transaction="a", **ALICE) is None


@virtual
async def test_an_output_is_not_made_larger_than_a_token_can_be() -> None:
    async with InMemorySelector(ScriptedStore(coins([MAX_AMOUNT] * 4))) as selector:
        assert await selector.consolidate(transaction="a", **ALICE) is None
        assert await selector.consolidate(transaction="a", into=2, **ALICE) is None
    async with InMemorySelector(ScriptedStore(coins([MAX_AMOUNT, MAX_AMOUNT - 1, 1]))) as selector:
        joined = await selector.consolidate(transaction="a", **ALICE)
        assert joined is not None
        assert joined.amounts == (MAX_AMOUNT,)


@virtual
async def test_as_many_outputs_as_inputs_join_nothing_and_are_refused() -> None:
    async with InMemorySelector(ScriptedStore()) as selector:
        for into, at_most in ((0, 5), (5, 5), (1, 1)):
            with pytest.raises(ValueError, match="into"):
                await selector.consolidate(transaction="a", into=into, at_most=at_most, **ALICE)


@given(st.integers(1, MAX_AMOUNT), st.integers(1, 100))
def test_a_split_is_whole_and_even(total: int, into: int) -> None:
    parts = split(total, into)
    assert (sum(parts), len(parts)) == (total, into)
    assert max(parts) - min(parts) <= 1
