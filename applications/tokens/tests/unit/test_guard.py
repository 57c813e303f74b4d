"""Selectors reject calls from other threads, which change nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from genie_tokens.in_memory import InMemorySelector
from genie_tokens.selection import Selection
from genie_tokens.sherdlock import SherdlockSelector
from scripted_tokens import ScriptedStore, make_tokens
from sherdlock_world import FakeGenie

ALICE = {"owner": "alice", "token_type": "Fiat", "identifier": "GBP"}
Selector = InMemorySelector | SherdlockSelector
Call = Callable[[Selector, Selection], Coroutine[Any, Any, object]]


@asynccontextmanager
async def in_memory() -> AsyncIterator[Selector]:
    async with InMemorySelector(ScriptedStore(make_tokens([10] * 10))) as selector:
        yield selector


@asynccontextmanager
async def sherdlock() -> AsyncIterator[Selector]:
    async with SherdlockSelector(FakeGenie(), ScriptedStoreOfWallets(make_tokens([10] * 10)), retries=0) as selector:
        yield selector


class ScriptedStoreOfWallets(ScriptedStore):
    async def unspent(self, **_wallet: str | None) -> AsyncIterator[list]:
        async for page in super().unspent():
            yield page


async def held(_selector: Selector, selection: Selection) -> object:
    return selection.held


async def lost(_selector: Selector, selection: Any) -> object:
    return selection.lost


async def checkpoint(_selector: Selector, selection: Selection) -> object:
    return selection.checkpoint()


CALLS: dict[str, Call] = {
    "select": lambda selector, _: selector.select(10, transaction="other", **ALICE),
    "restore": lambda selector, _: selector.restore({"transaction": "tx", "target": 1, "tokens": []}),
    "close": lambda selector, _: selector.close(),
    "spend": lambda _, selection: selection.spend(),
    "release": lambda _, selection: selection.release(),
}
IN_MEMORY: dict[str, Call] = {
    "consolidate": lambda selector, _: selector.consolidate(transaction="other", **ALICE),  # type: ignore[union-attr]
    "start": lambda selector, _: selector.start(),
    "held": held,
    "lost": lost,
    "checkpoint": checkpoint,
}


@pytest.mark.parametrize(
    ("made", "call"), [*((in_memory, call) for call in [*CALLS, *IN_MEMORY]), *((sherdlock, call) for call in CALLS)]
)
async def test_a_call_from_another_thread_is_rejected_and_changes_nothing(made: Any, call: str) -> None:
    async with made() as selector:
        selection = await selector.select(30, transaction="tx", **ALICE)

        def use_in_other_thread() -> None:
            asyncio.run((CALLS | IN_MEMORY)[call](selector, selection))

        with pytest.raises(RuntimeError, match="belong to the event loop of thread 'MainThread'") as caught:
            await asyncio.to_thread(use_in_other_thread)
        assert "can't be used from thread 'asyncio_0'" in str(caught.value)
        assert selection.held
        async with await selector.select(70, transaction="rest", **ALICE) as rest:
            assert rest.amount == 70
        await selection.release()
        async with await selector.select(100, transaction="all", **ALICE) as everything:
            assert everything.amount == 100


async def test_the_error_recommends_the_selector_for_threads() -> None:
    async with in_memory() as selector:
        with pytest.raises(RuntimeError, match=r"Threads use genie_tokens\.sync\.InMemorySelector\.$"):
            await asyncio.to_thread(lambda: asyncio.run(selector.close()))


async def test_a_selector_that_was_closed_can_be_started_in_another_thread() -> None:
    selector = InMemorySelector(ScriptedStore(make_tokens([10])))
    restored = await selector.restore({"transaction": "tx", "target": 1, "tokens": [make_tokens([10])[0].plain()]})
    await selector.start()
    assert restored.held
    await selector.close()

    async def use_in_other_thread() -> None:
        async with selector:
            assert restored.held
            await restored.release()
            assert (await selector.select(10, transaction="tx", **ALICE)).amount == 10

    await asyncio.to_thread(lambda: asyncio.run(use_in_other_thread()))
