"""`StoreFollower` keeps its sink current in any order of pages, changes and failures."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from genie_tokens.errors import InsufficientFunds
from genie_tokens.in_memory import InMemorySelector
from genie_tokens.in_memory.follower import StoreFollower
from genie_tokens.store import Added, Change, Resync, Spent
from genie_tokens.token import Token
from scripted_tokens import ScriptedStore, make_tokens, settle, virtual_time

ALICE = {"owner": "alice", "token_type": "Fiat", "identifier": "GBP"}


class Ids:
    """A sink that stores ids."""

    def __init__(self) -> None:
        self.there: dict[str, Token] = {}

    def add(self, token: Token) -> None:
        self.there[token.id] = token

    def remove(self, id: str) -> bool:
        return self.there.pop(id, None) is not None

    def ids(self) -> list[str]:
        return list(self.there)


@pytest.mark.parametrize("seed", range(10))
@virtual_time
async def test_tokens_load_in_pages_while_others_are_issued_and_spent(seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311
    store = ScriptedStore(make_tokens([1] * 1300))
    issued = 0

    async def meanwhile(_page: object) -> None:
        nonlocal issued
        for _ in range(chance.randrange(20)):
            if chance.random() < 0.5:
                issued += 1
                await store.add(make_tokens([1], f"new-{issued}-"))
            else:
                token = chance.choice(list(store.tokens.values()))
                await store.spend([token], transaction="elsewhere")
            await asyncio.sleep(chance.choice([0, 0, 0.1]))

    store.before["page"] = meanwhile
    async with InMemorySelector(store) as selector:
        await settle()
        assert store.calls["page"] == 13
        assert issued > 20
        selection = await selector.select(len(store.tokens), transaction="a", **ALICE)
        assert {token.id for token in selection.tokens} == set(store.tokens)
        with pytest.raises(InsufficientFunds) as short:
            await selector.select(1, transaction="a", **ALICE)
        assert (short.value.free, short.value.locked) == (0, 0)


@virtual_time
async def test_a_resync_applies_missed_changes() -> None:
    store, sink = ScriptedStore(make_tokens([1] * 250)), Ids()
    follower = StoreFollower(store, sink)
    await follower.start()
    for id in ("t0", "t120", "t249"):
        del store.tokens[id]
    store.tokens["missed"] = make_tokens([1], "missed")[0]
    assert len(sink.there) == 250

    async def meanwhile(_page: object) -> None:
        if store.calls["page"] == 4:
            await store.add(make_tokens([1], "new"))
            await store.spend([store.tokens["t1"]], transaction="elsewhere")

    store.before["page"] = meanwhile
    store.publish(Resync())
    await settle()
    assert {*sink.there} == {"missed0" if id == "missed" else id for id in store.tokens}
    await follower.close()


@virtual_time
async def test_a_second_resync_during_a_load_restarts_the_load() -> None:
    store, sink = ScriptedStore(make_tokens([1] * 250)), Ids()
    first = asyncio.Event()

    async def delay_page(page: list[Token]) -> None:
        if store.calls["page"] == 2:
            del store.tokens["t3"], store.tokens["t201"]
            store.tokens["t9999"] = make_tokens([1] * 10000)[9999]
            store.publish(Resync())
            first.set()
            await asyncio.sleep(5)
            raise AssertionError(f"{len(page)} tokens are of a load that is over")

    store.before["page"] = delay_page
    follower = StoreFollower(store, sink)
    await follower.start()
    assert first.is_set()
    await asyncio.sleep(10)
    assert store.calls["page"] == 2 + 3
    assert {*sink.there} == {*store.tokens}
    await follower.close()


@virtual_time
async def test_a_failed_change_feed_is_reported_and_reconnected() -> None:
    store, sink = ScriptedStore(make_tokens([1] * 250)), Ids()
    follower = StoreFollower(store, sink)
    await follower.start()
    assert follower.store_error is None
    down = True

    async def still_down(_none: object) -> None:
        if down:
            raise OSError(f"down {store.calls['changes']}")

    store.before["changes"] = still_down
    store.publish(OSError("down"))
    await asyncio.sleep(60)
    attempts = store.calls["changes"]
    assert 20 < attempts < 100, "it waits longer and longer, up to some seconds"
    assert str(follower.store_error) == f"down {attempts}"
    await store.spend([store.tokens["t0"]], transaction="elsewhere")
    await store.add(make_tokens([1], "new"))
    assert "t0" in sink.there
    down = False
    await asyncio.sleep(3)
    assert follower.store_error is None
    assert {*sink.there} == {*store.tokens}
    await store.add(make_tokens([1], "newer"))
    await settle()
    assert "newer0" in sink.there
    assert follower.is_ready
    await follower.close()
    assert not follower.is_ready
    assert not store.feeds


@virtual_time
async def test_an_ended_change_feed_is_reconnected() -> None:
    store, sink = ScriptedStore(make_tokens([1] * 5)), Ids()
    ended = 0

    async def short() -> Any:
        nonlocal ended
        yield Resync()
        await asyncio.sleep(1)
        ended += 1

    store.changes = short  # type: ignore[method-assign]
    follower = StoreFollower(store, sink)
    await follower.start()
    await asyncio.sleep(1)
    assert isinstance(follower.store_error, ConnectionError)
    await asyncio.sleep(10)
    assert ended >= 5
    await follower.close()


@virtual_time
async def test_a_failed_reload_is_retried_while_changes_are_applied() -> None:
    store, sink = ScriptedStore(make_tokens([1] * 250)), Ids()
    follower = StoreFollower(store, sink)
    await follower.start()
    store.calls.clear()

    async def fail(_page: object) -> None:
        if store.calls["page"] % 3 == 2 and store.calls["page"] < 20:
            raise OSError("down")

    store.before["page"] = fail
    del store.tokens["t7"]
    store.publish(Resync())
    await settle()
    assert str(follower.store_error) == "down"
    assert "t7" in sink.there
    await store.spend([store.tokens["t0"]], transaction="elsewhere")
    await settle()
    assert "t0" not in sink.there
    await asyncio.sleep(60)
    assert follower.store_error is None
    assert {*sink.there} == {*store.tokens}
    await follower.close()


@virtual_time
async def test_late_pages_and_changes_do_not_restore_a_token_spent_by_this_process() -> None:
    store, sink = ScriptedStore(make_tokens([1] * 250)), Ids()
    follower = StoreFollower(store, sink)
    await follower.start()
    token = store.tokens.pop("t0")
    follower.on_spent("t0")
    assert "t0" not in sink.there
    store.publish(Added(token))
    await settle()
    assert "t0" not in sink.there
    store.publish(Spent("t0"))
    await settle()
    assert not follower._unconfirmed_ids

    async def spend_after_page(page: list[Token]) -> None:
        if any(token.id == "t1" for token in page):
            follower.on_spent("t1")

    store.before["page"] = spend_after_page
    store.publish(Resync())
    await settle()
    assert "t1" not in sink.there
    store.publish(Resync())
    await settle()
    assert not follower._unconfirmed_ids, "changes published before the feed was connected are not expected"
    await follower.close()


@virtual_time
async def test_a_follower_can_be_started_again_after_close() -> None:
    store, sink = ScriptedStore(make_tokens([1] * 5)), Ids()
    follower = StoreFollower(store, sink)
    with pytest.raises(RuntimeError):
        await follower.wait_loaded()
    await follower.close()
    await follower.start()
    with pytest.raises(RuntimeError):
        await follower.start()
    await follower.close()
    with pytest.raises(RuntimeError):
        await follower.wait_loaded()
    del store.tokens["t0"]
    await follower.start()
    assert {*sink.there} == {*store.tokens}
    await follower.close()


@virtual_time
async def test_close_fails_those_who_wait_for_the_first_load() -> None:
    store = ScriptedStore(make_tokens([1] * 5))
    store.before["page"] = lambda _page: asyncio.sleep(3600)
    follower = StoreFollower(store, Ids())
    starting = asyncio.create_task(follower.start())
    await settle()
    waiting = asyncio.create_task(follower.wait_loaded())
    await settle()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    with pytest.raises(RuntimeError, match="closed"):
        await waiting


@virtual_time
async def test_a_change_feed_without_aclose_is_followed() -> None:
    class Changes:
        def __aiter__(self) -> Changes:
            return self

        async def __anext__(self) -> Change:
            changes = (Resync(), Added(make_tokens([1])[0]))
            if (turn := next(self.turns)) < len(changes):
                return changes[turn]
            await asyncio.sleep(3600)
            raise StopAsyncIteration

        turns = iter(range(100))

    store, sink = ScriptedStore(), Ids()
    store.changes = Changes  # type: ignore[method-assign, assignment]
    follower = StoreFollower(store, sink)
    await follower.start()
    assert {*sink.there} == {"t0"}
    await follower.close()
