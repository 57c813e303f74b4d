"""`InMemorySelector`: which tokens are selected, and which errors are raised."""

from __future__ import annotations

import asyncio

import pytest

from genie_tokens.errors import FundsLocked, InsufficientFunds, SelectionEnded, SpentAlready, TooManyTokens
from genie_tokens.in_memory import InMemorySelector
from genie_tokens.store import Added, Change, Spent
from genie_tokens.token import Token
from scripted_tokens import ScriptedStore, make_tokens, settle, virtual_time

GBP = {"token_type": "Fiat", "identifier": "GBP"}
ALICE = {"owner": "alice", **GBP}


def ids(tokens: tuple[Token, ...]) -> set[str]:
    return {token.id for token in tokens}


@virtual_time
async def test_a_selection_reaches_its_amount_and_reports_the_change() -> None:
    async with (
        InMemorySelector(ScriptedStore(make_tokens([100] * 5))) as selector,
        await selector.select(250, transaction="a", **ALICE) as selection,
    ):
        assert (len(selection.tokens), selection.amount, selection.change, selection.held) == (3, 300, 50, True)


@virtual_time
async def test_tokens_are_selected_by_owner_account_type_and_identifier() -> None:
    store = ScriptedStore(
        [
            *make_tokens([1], "k1-", owner="key-1", account="acc"),
            *make_tokens([1], "k2-", owner="key-2", account="acc"),
            *make_tokens([1], "k3-", owner="key-3"),
            *make_tokens([1], "usd-", owner="key-1", account="acc", identifier="USD"),
            *make_tokens([1], "gem-", owner="key-1", account="acc", token_type="Asset"),
        ]
    )
    async with InMemorySelector(store) as selector:
        wallets = [
            ({"account": "acc", **GBP}, {"k1-0", "k2-0"}),
            ({"owner": "key-1", **GBP}, {"k1-0"}),
            ({"owner": "key-3", **GBP}, {"k3-0"}),
            ({"account": "acc", "token_type": "Fiat", "identifier": "USD"}, {"usd-0"}),
            ({"account": "acc", "token_type": "Asset", "identifier": "GBP"}, {"gem-0"}),
        ]
        for wallet, expected in wallets:
            async with await selector.select(len(expected), transaction="a", **wallet) as selection:
                assert ids(selection.tokens) == expected
            with pytest.raises(InsufficientFunds):
                await selector.select(len(expected) + 1, transaction="a", **wallet)
        with pytest.raises(InsufficientFunds):
            await selector.select(1, owner="acc", transaction="a", **GBP)


@virtual_time
async def test_tokens_are_selected_by_issuer_and_notary() -> None:
    store = ScriptedStore(
        [
            *make_tokens([10] * 5, "one-", issuer="bank", notary="n1"),
            *make_tokens([10] * 5, "two-", issuer="bank", notary="n2"),
            *make_tokens([10] * 5, "three-", issuer="mint", notary="n1"),
        ]
    )
    async with InMemorySelector(store) as selector:
        selection = await selector.select(
            50, transaction="a", where=lambda token: (token.issuer, token.notary) == ("bank", "n2"), **ALICE
        )
        assert ids(selection.tokens) == {f"two-{number}" for number in range(5)}
        with pytest.raises(FundsLocked, match=r"40 free|50 free") as locked:
            await selector.select(60, transaction="b", where=lambda token: token.issuer == "bank", **ALICE)
        assert (locked.value.free, locked.value.locked) == (50, 50)
        with pytest.raises(InsufficientFunds) as short:
            await selector.select(60, transaction="a", where=lambda token: token.issuer == "bank", **ALICE)
        assert type(short.value) is InsufficientFunds
        assert (short.value.free, short.value.locked) == (50, 0)
        assert (await selector.select(100, transaction="c", **ALICE)).amount == 100


@virtual_time
async def test_held_tokens_are_not_selected_and_a_failed_selection_holds_nothing() -> None:
    async with InMemorySelector(ScriptedStore(make_tokens([100] * 5))) as selector:
        first = await selector.select(300, transaction="a", **ALICE)
        with pytest.raises(FundsLocked) as locked:
            await selector.select(300, transaction="b", **ALICE)
        assert (locked.value.target, locked.value.free, locked.value.locked) == (300, 200, 300)
        with pytest.raises(InsufficientFunds) as short:
            await selector.select(501, transaction="b", **ALICE)
        assert type(short.value) is InsufficientFunds
        second = await selector.select(200, transaction="b", **ALICE)
        assert not ids(first.tokens) & ids(second.tokens)
        await first.release()
        await first.release()
        assert (await selector.select(300, transaction="c", **ALICE)).amount == 300


@virtual_time
async def test_tokens_of_the_same_transaction_count_neither_as_free_nor_as_locked() -> None:
    async with InMemorySelector(ScriptedStore(make_tokens([100] * 5, account="acc"))) as selector:
        await selector.select(200, transaction="a", **ALICE)
        await selector.select(100, transaction="b", **ALICE)
        for wallet in (ALICE, {"account": "acc", **GBP}):
            with pytest.raises(InsufficientFunds) as short:
                await selector.select(400, transaction="a", **wallet)
            assert type(short.value) is InsufficientFunds
            assert (short.value.free, short.value.locked) == (200, 100)


@virtual_time
async def test_the_largest_tokens_are_selected_if_others_exceed_the_limit() -> None:
    async with InMemorySelector(ScriptedStore(make_tokens([50, 1, 40, 2, 30, 3]))) as selector:
        for where in (None, lambda _token: True):
            async with await selector.select(80, transaction="a", where=where, limit=2, **ALICE) as selection:
                assert sorted(token.amount for token in selection.tokens) == [40, 50]
            with pytest.raises(TooManyTokens) as many:
                await selector.select(91, transaction="a", where=where, limit=2, **ALICE)
            assert (many.value.target, many.value.limit, many.value.reached) == (91, 2, 90)
        assert (await selector.select(126, transaction="a", **ALICE)).change == 0


@virtual_time
async def test_rejected_tokens_keep_their_order_on_the_stack() -> None:
    async with InMemorySelector(ScriptedStore(make_tokens(range(1, 101)))) as selector:
        odd = await selector.select(2500, transaction="a", where=lambda token: token.amount % 2, **ALICE)
        even = await selector.select(2550, transaction="b", **ALICE)
        assert all(token.amount % 2 for token in odd.tokens)
        assert not any(token.amount % 2 for token in even.tokens)


@virtual_time
async def test_a_predicate_that_raises_leaves_all_tokens_free() -> None:
    def failing_predicate(token: Token) -> bool:
        if token.amount == 50:
            raise KeyError("fifty")
        return True

    async with InMemorySelector(ScriptedStore(make_tokens(range(1, 101)))) as selector:
        with pytest.raises(KeyError):
            await selector.select(5050, transaction="a", where=failing_predicate, **ALICE)
        assert (await selector.select(5050, transaction="b", **ALICE)).change == 0


@virtual_time
async def test_a_spend_removes_its_tokens_and_adds_its_outputs() -> None:
    store = ScriptedStore(make_tokens([100]))
    async with InMemorySelector(store) as selector:
        async with await selector.select(60, transaction="a", **ALICE) as selection:
            await selection.spend(make_tokens([40], "change-"))
            with pytest.raises(InsufficientFunds):
                await selector.select(100, transaction="a", **ALICE)
            assert not selection.held
            with pytest.raises(SelectionEnded):
                await selection.spend()
        await settle()
        assert ids((await selector.select(40, transaction="b", **ALICE)).tokens) == {"change-0"}


@virtual_time
async def test_tokens_spent_by_another_transaction_are_reported_and_not_selected_again() -> None:
    store = ScriptedStore(make_tokens([100, 10]))
    async with InMemorySelector(store) as selector:
        store.spenders["t0"] = "elsewhere"  # without a report by the change feed
        del store.tokens["t0"]
        async with await selector.select(110, transaction="a", **ALICE) as selection:
            with pytest.raises(SpentAlready):
                await selection.spend()
            assert selection.lost == ("t0",)
        with pytest.raises(InsufficientFunds) as short:
            await selector.select(11, transaction="b", **ALICE)
        assert (short.value.free, short.value.locked) == (10, 0)


@virtual_time
async def test_lost_lists_tokens_that_another_transaction_has_spent() -> None:
    store = ScriptedStore(make_tokens([100, 10]))
    async with InMemorySelector(store) as selector:
        selection = await selector.select(110, transaction="a", **ALICE)
        store.publish(Spent("t1"))
        await settle()
        assert (selection.held, selection.lost) == (False, ("t1",))
        await selection.release()
        assert ids((await selector.select(100, transaction="b", **ALICE)).tokens) == {"t0"}


@virtual_time
async def test_a_token_reported_twice_is_present_once() -> None:
    store = ScriptedStore(make_tokens([100]))
    async with InMemorySelector(store) as selector:
        store.publish(Added(store.tokens["t0"]))
        await settle()
        with pytest.raises(InsufficientFunds):
            await selector.select(101, transaction="a", **ALICE)


@virtual_time
async def test_a_selection_before_the_first_load_waits_for_it() -> None:
    store = ScriptedStore(make_tokens([1] * 300))
    reading, go = asyncio.Event(), asyncio.Event()

    async def delay_page(_page: object) -> None:
        reading.set()
        await go.wait()

    store.before["page"] = delay_page
    selector = InMemorySelector(store)
    with pytest.raises(RuntimeError):
        await selector.select(300, transaction="a", **ALICE)
    starting = asyncio.create_task(selector.start())
    await reading.wait()
    selecting = asyncio.create_task(selector.select(300, transaction="a", **ALICE))
    await settle()
    assert not selecting.done()
    go.set()
    assert (await selecting).amount == 300
    await starting
    await selector.close()
    with pytest.raises(RuntimeError):
        await selector.select(1, transaction="a", **ALICE)


@virtual_time
async def test_a_failed_first_load_fails_waiting_selections_and_can_be_retried() -> None:
    store = ScriptedStore(make_tokens([1] * 300))
    error = OSError("no database")

    async def fail(_page: object) -> None:
        if store.calls["page"] == 2:
            raise error

    store.before["page"] = fail
    selector = InMemorySelector(store)
    starting = asyncio.create_task(selector.start())
    await asyncio.sleep(0)
    selecting = asyncio.create_task(selector.select(300, transaction="a", **ALICE))
    for task in (starting, selecting):
        with pytest.raises(OSError, match="no database"):
            await task
    with pytest.raises(OSError, match="no database"):
        await selector.select(300, transaction="a", **ALICE)
    async with selector:
        assert (await selector.select(300, transaction="a", **ALICE)).amount == 300


@virtual_time
async def test_concurrent_selections_by_owner_and_by_account_never_overlap() -> None:
    store = ScriptedStore(
        [token for key in range(4) for token in make_tokens([1] * 250, f"{key}-", owner=f"key-{key}", account="acc")]
    )
    in_hand: set[str] = set()
    amounts: list[int] = []

    async def work(name: str, wallet: dict[str, str]) -> None:
        for turn in range(200):
            try:
                selection = await selector.select(turn % 90 + 1, transaction=name, **wallet)
            except FundsLocked:
                await asyncio.sleep(0)
                continue
            assert not ids(selection.tokens) & in_hand
            assert all(wallet.get("owner", token.owner) == token.owner for token in selection.tokens)
            in_hand.update(ids(selection.tokens))
            amounts.append(selection.amount)
            await asyncio.sleep(turn % 3)
            in_hand.difference_update(ids(selection.tokens))
            await selection.release()

    async with InMemorySelector(store) as selector:
        await asyncio.gather(
            *(work(f"key-{key}", {"owner": f"key-{key}", **GBP}) for key in range(4)),
            *(work(f"acc-{number}", {"account": "acc", **GBP}) for number in range(4)),
        )
        assert sum(amounts) > 10_000
        assert (await selector.select(1000, account="acc", transaction="all", **GBP)).amount == 1000


@virtual_time
async def test_invalid_arguments_are_rejected() -> None:
    store = ScriptedStore()
    for options in ({"auto_unlock": 0}, {"max_tokens": -1}):
        with pytest.raises(ValueError, match=next(iter(options))):
            InMemorySelector(store, **options)
    async with InMemorySelector(store) as selector:
        for wrong in ({"owner": None}, {"account": "acc"}, {"limit": 0}, {"amount": 0}):
            with pytest.raises(ValueError, match=r"owner|limit|amount"):
                await selector.select(**({"amount": 1, "transaction": "a", **ALICE} | wrong))


@virtual_time
async def test_outputs_can_be_selected_when_the_spend_returns_before_the_change_feed_reports_them() -> None:
    store = ScriptedStore(make_tokens([100]))
    change, second = make_tokens([90], "change"), make_tokens([40], "second")
    late: list[Change | Exception] = []
    async with InMemorySelector(store) as selector:
        tell, store.publish = store.publish, late.append  # type: ignore[method-assign]
        first = await selector.select(10, transaction="a", **ALICE)
        await first.spend(change)
        again = await selector.select(50, transaction="b", **ALICE)
        await again.spend(second)
        for change in late:
            tell(change)
        await settle()
        assert ids((await selector.select(40, transaction="c", **ALICE)).tokens) == ids(tuple(second))
        with pytest.raises(FundsLocked):
            await selector.select(40, transaction="d", **ALICE)
        with pytest.raises(InsufficientFunds, match="40 held by others"):
            await selector.select(41, transaction="d", **ALICE)


@virtual_time
async def test_an_output_spent_before_the_spend_returned_is_not_selectable() -> None:
    store = ScriptedStore(make_tokens([100]))
    change = make_tokens([90], "change")

    async def spent_before(_: object) -> None:
        del store.before["spend"]
        await store.spend(change, transaction="other")
        await settle()

    async with InMemorySelector(store) as selector:
        selection = await selector.select(10, transaction="a", **ALICE)
        data = selection.checkpoint()
        store.before["spend"] = spent_before
        await selection.spend(change)
        with pytest.raises(InsufficientFunds, match="0 free"):
            await selector.select(1, transaction="b", **ALICE)
        again = await selector.restore(data)
        await again.spend(change)
        with pytest.raises(InsufficientFunds, match="0 free"):
            await selector.select(1, transaction="b", **ALICE)


@virtual_time
async def test_a_limit_that_locked_tokens_would_satisfy_raises_funds_locked() -> None:
    large = make_tokens([100], "large-")
    async with InMemorySelector(ScriptedStore([*large, *make_tokens([1] * 100, "small-")])) as selector:
        other = await selector.select(
            100, transaction="other", **ALICE, limit=1, where=lambda token: token.amount == 100
        )
        for where in (None, lambda token: token.amount > 0):
            with pytest.raises(FundsLocked) as found:
                await selector.select(50, transaction="tx", **ALICE, limit=3, where=where)
            assert (found.value.free, found.value.locked) == (100, 100)
        await other.release()
        async with await selector.select(50, transaction="tx", **ALICE, limit=3) as selection:
            assert [token.amount for token in selection.tokens] == [100]
