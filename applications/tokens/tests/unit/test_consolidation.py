"""Consolidation: joining small tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genie_tokens.errors import FundsLocked
from genie_tokens.in_memory import InMemorySelector
from genie_tokens.in_memory.selector import split
from genie_tokens.token import MAX_AMOUNT
from scripted_tokens import ScriptedStore, make_tokens, settle, virtual_time

GBP = {"token_type": "Fiat", "identifier": "GBP"}
ALICE = {"owner": "alice", **GBP}


@virtual_time
async def test_consolidation_joins_the_smallest_tokens_until_none_is_left() -> None:
    store = ScriptedStore(make_tokens([5, 1, 4, 2, 3, 100]))
    async with InMemorySelector(store) as selector:
        turns = []
        while (joined := await selector.consolidate(transaction=f"join-{len(turns)}", at_most=3, **ALICE)) is not None:
            async with joined:
                turns.append(sorted(token.amount for token in joined.tokens))
                assert (joined.amounts, joined.change) == ((joined.amount,), 0)
                await joined.spend(make_tokens(joined.amounts, f"joined-{len(turns)}-"))
            await settle()
        assert turns == [[1, 2, 3], [4, 5, 6], [15, 100]]
        assert [token.amount for token in store.tokens.values()] == [115]


@virtual_time
async def test_output_amounts_are_as_equal_as_possible() -> None:
    async with InMemorySelector(ScriptedStore(make_tokens([7, 7, 7, 7, 7]))) as selector:
        assert await selector.consolidate(transaction="a", into=5, **ALICE) is None
        assert await selector.consolidate(transaction="a", owner="bob", **GBP) is None
        joined = await selector.consolidate(transaction="a", into=3, **ALICE)
        assert joined is not None
        assert joined.amounts == (12, 12, 11)


@virtual_time
async def test_consolidation_holds_its_tokens_and_skips_held_ones() -> None:
    store = ScriptedStore(
        [*make_tokens([1] * 4, account="acc"), *make_tokens([1] * 4, "b", owner="bob", account="acc")]
    )
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


@virtual_time
async def test_consolidation_selects_only_tokens_that_where_accepts() -> None:
    store = ScriptedStore([*make_tokens([1] * 4, issuer="bank"), *make_tokens([1] * 4, "m", issuer="mint")])
    for max_tokens in (None, 5, 0):
        async with InMemorySelector(store, max_tokens=max_tokens) as selector:
            joined = await selector.consolidate(transaction="a", where=lambda token: token.issuer == "mint", **ALICE)
            assert joined is not None
            assert {token.id for token in joined.tokens} == {"m0", "m1", "m2", "m3"}


@virtual_time
async def test_consolidation_skips_spent_tokens() -> None:
    store = ScriptedStore(make_tokens([1] * 4))
    async with InMemorySelector(store, max_tokens=0) as selector:
        store.publish = lambda _change: None  # type: ignore[method-assign]
        await store.spend([store.tokens["t0"]], transaction="elsewhere")
        joined = await selector.consolidate(transaction="a", **ALICE)
        assert joined is not None
        assert (joined.amounts, joined.held) == ((3,), True)
        await joined.release()
        await store.spend([store.tokens["t1"], store.tokens["t2"]], transaction="elsewhere")
        assert await selector.consolidate(transaction="a", **ALICE) is None


@virtual_time
async def test_an_output_does_not_exceed_the_largest_amount() -> None:
    async with InMemorySelector(ScriptedStore(make_tokens([MAX_AMOUNT] * 4))) as selector:
        assert await selector.consolidate(transaction="a", **ALICE) is None
        assert await selector.consolidate(transaction="a", into=2, **ALICE) is None
    async with InMemorySelector(ScriptedStore(make_tokens([MAX_AMOUNT, MAX_AMOUNT - 1, 1]))) as selector:
        joined = await selector.consolidate(transaction="a", **ALICE)
        assert joined is not None
        assert joined.amounts == (MAX_AMOUNT,)


@virtual_time
async def test_as_many_outputs_as_inputs_are_rejected() -> None:
    async with InMemorySelector(ScriptedStore()) as selector:
        for into, at_most in ((0, 5), (5, 5), (1, 1)):
            with pytest.raises(ValueError, match="into"):
                await selector.consolidate(transaction="a", into=into, at_most=at_most, **ALICE)


@given(st.integers(1, MAX_AMOUNT), st.integers(1, 100))
def test_split_parts_add_up_to_the_total_and_differ_by_at_most_one(total: int, into: int) -> None:
    parts = split(total, into)
    assert (sum(parts), len(parts)) == (total, into)
    assert max(parts) - min(parts) <= 1
