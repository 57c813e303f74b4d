"""Checkpoints: selections are restored after a restart, and their tokens stay held."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from genie_tokens.errors import FundsLocked, InsufficientFunds, SelectionEnded, SpentAlready
from genie_tokens.in_memory import InMemorySelector
from genie_tokens.in_memory.selector import Consolidation
from genie_tokens.store import Spent
from scripted_tokens import ScriptedStore, make_tokens, settle, virtual_time

GBP = {"token_type": "Fiat", "identifier": "GBP"}
ALICE = {"owner": "alice", **GBP}


async def checkpoint_of(store: ScriptedStore, amount: int, transaction: str = "flow") -> dict[str, Any]:
    """Return the checkpoint of a selection in a process that has ended."""
    async with InMemorySelector(store) as selector:
        selection = await selector.select(amount, transaction=transaction, **ALICE)
        return json.loads(json.dumps(selection.checkpoint()))


@virtual_time
async def test_restored_tokens_are_held_after_a_restart() -> None:
    store = ScriptedStore(make_tokens([100] * 10, account="acc", metadata={"grade": [1]}), page=3)
    data = await checkpoint_of(store, 400)
    selector = InMemorySelector(store)
    restored = await selector.restore(data)
    assert restored.held
    async with selector:
        assert (restored.transaction, restored.amount, restored.target) == ("flow", 400, 400)
        assert all(store.tokens[token.id] == token for token in restored.tokens)
        assert (restored.held, restored.lost) == (True, ())
        with pytest.raises(FundsLocked) as locked:
            await selector.select(700, account="acc", transaction="new", **GBP)
        assert (locked.value.free, locked.value.locked) == (600, 400)
        new = await selector.select(600, transaction="new", **ALICE)
        assert not {token.id for token in new.tokens} & {token.id for token in restored.tokens}
        await restored.spend(make_tokens([400], "out-"))
        await settle()
        assert (await selector.select(400, transaction="new", **ALICE)).tokens[0].id == "out-0"


@virtual_time
async def test_a_restored_selection_can_be_released_and_expires() -> None:
    store = ScriptedStore(make_tokens([100] * 10))
    data = await checkpoint_of(store, 400)
    for wait in (False, True):
        selector = InMemorySelector(store, auto_unlock=10)
        restored = await selector.restore(data)
        if wait:
            await asyncio.sleep(10)
            assert not restored.held
        else:
            await restored.release()
        async with selector:
            assert (await selector.select(1000, transaction="new", **ALICE)).change == 0
            await restored.release()
            with pytest.raises(FundsLocked):
                await selector.select(1, transaction="late", **ALICE)


@virtual_time
async def test_a_selection_can_be_restored_during_and_after_the_load() -> None:
    for pages_before in (0, 2, 4, 99):
        store = ScriptedStore(make_tokens([100] * 10), page=2)
        data = await checkpoint_of(store, 1000)
        there, go = asyncio.Event(), asyncio.Event()
        store.calls.clear()

        async def pause(
            _page: object,
            at: int = pages_before,
            store: ScriptedStore = store,
            there: asyncio.Event = there,
            go: asyncio.Event = go,
        ) -> None:
            if store.calls["page"] == at + 1:
                there.set()
                await go.wait()

        store.before["page"] = pause
        selector = InMemorySelector(store)
        starting = asyncio.create_task(selector.start())
        await (starting if pages_before == 99 else there.wait())
        restored = await selector.restore(data)
        go.set()
        await starting
        assert (restored.held, restored.lost) == (True, ())
        with pytest.raises(FundsLocked) as locked:
            await selector.select(1, transaction="new", **ALICE)
        assert locked.value.locked == 1000
        await restored.release()
        assert (await selector.select(1000, transaction="new", **ALICE)).held
        await selector.close()


@virtual_time
async def test_lost_lists_restored_tokens_that_were_spent_meanwhile() -> None:
    store = ScriptedStore(make_tokens([100] * 4))
    data = await checkpoint_of(store, 400)
    await store.spend([store.tokens["t2"]], transaction="elsewhere")
    selector = InMemorySelector(store)
    restored = await selector.restore(data)
    assert restored.held, "it can't be known yet"
    async with selector:
        assert (restored.held, restored.lost) == (False, ("t2",))
        with pytest.raises(SpentAlready):
            await restored.spend()
        with pytest.raises(InsufficientFunds):
            await selector.select(1, transaction="new", **ALICE)
        await restored.release()
        assert (await selector.select(300, transaction="new", **ALICE)).held
        later = await selector.restore(data | {"transaction": "new"})
        assert later.lost == ("t2",)


@virtual_time
async def test_a_restored_selection_can_retry_its_spend() -> None:
    store = ScriptedStore(make_tokens([100] * 4))
    data = await checkpoint_of(store, 400)
    await store.spend(list(store.tokens.values()), transaction="flow")
    selector = InMemorySelector(store)
    restored = await selector.restore(data)
    async with selector:
        assert len(restored.lost) == 4
        await restored.spend()
        assert len(selector._reservations) == 0
        assert not selector._reservations._reservation_by_unloaded_id


@virtual_time
async def test_restore_holds_nothing_if_another_transaction_holds_a_token() -> None:
    store = ScriptedStore(make_tokens([100] * 4))
    data = await checkpoint_of(store, 400)
    async with InMemorySelector(store) as selector:
        other = await selector.select(100, transaction="new", **ALICE)
        with pytest.raises(FundsLocked) as locked:
            await selector.restore(data)
        assert (locked.value.target, locked.value.free, locked.value.locked) == (400, 300, 100)
        assert other.held
        assert (await selector.select(300, transaction="third", **ALICE)).held
    selector = InMemorySelector(store)
    await selector.restore(data)
    with pytest.raises(FundsLocked):
        await selector.restore(data | {"transaction": "thief"})


@virtual_time
async def test_a_second_restore_takes_over_the_tokens_of_the_first() -> None:
    store = ScriptedStore(make_tokens([100] * 4))
    data = await checkpoint_of(store, 400)
    selector = InMemorySelector(store)
    first, second = await selector.restore(data), await selector.restore(data)
    async with selector:
        third = await selector.restore(data)
        assert [first.held, second.held, third.held] == [False, False, True]
        for old in (first, second):
            await old.release()
            with pytest.raises(SelectionEnded):
                await old.spend()
        with pytest.raises(FundsLocked):
            await selector.select(1, transaction="new", **ALICE)
        await third.spend()


@virtual_time
async def test_a_late_page_does_not_restore_tokens_spent_during_the_load() -> None:
    store = ScriptedStore(make_tokens([100] * 4))
    data = await checkpoint_of(store, 400)
    reading, go = asyncio.Event(), asyncio.Event()

    async def delay_page(_page: object) -> None:
        reading.set()
        await go.wait()

    store.before["page"] = delay_page
    tell, late = store.publish, list[Any]()
    selector = InMemorySelector(store)
    restored = await selector.restore(data)
    starting = asyncio.create_task(selector.start())
    await reading.wait()
    store.publish = late.append  # type: ignore[method-assign]
    await restored.spend()
    go.set()
    await starting
    with pytest.raises(InsufficientFunds):
        await selector.select(1, transaction="new", **ALICE)
    assert all(isinstance(change, Spent) for change in late)
    for change in late:
        tell(change)
    await settle()
    await selector.close()


@virtual_time
async def test_a_spent_selection_has_no_checkpoint_and_a_consolidation_is_restored_as_one() -> None:
    store = ScriptedStore(make_tokens([3, 4]))
    async with InMemorySelector(store) as selector:
        joined = await selector.consolidate(transaction="join", **ALICE)
        assert joined is not None
        data = json.loads(json.dumps(joined.checkpoint()))
        await joined.spend(make_tokens(joined.amounts, "joined-"))
        with pytest.raises(SelectionEnded):
            joined.checkpoint()
        again = await selector.restore(data)
        assert isinstance(again, Consolidation)
        assert again.amounts == (7,)


@virtual_time
async def test_an_invalid_checkpoint_holds_nothing() -> None:
    store = ScriptedStore(make_tokens([100]))
    data = await checkpoint_of(store, 100)
    del data["target"]
    async with InMemorySelector(store) as selector:
        with pytest.raises(ValueError, match="checkpoint"):
            await selector.restore(data)
        assert (await selector.select(100, transaction="new", **ALICE)).amount == 100
