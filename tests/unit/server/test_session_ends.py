"""The end of a connection or a session with many requests: in slices, between which other clients are served."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from genie.core import grant
from genie.server import dispatcher
from support.core.sliced_pipeline import LOCKS, SECRET, SLICE, Client, World, exceed_store_timeout, expire, hold
from work.opcodes import OpcodeCounter

MAX_EXPIRY_INSTRUCTIONS = 650_000
"""Instructions of a batch that ends expired requests, about 10 ms."""


@pytest.fixture(name="world")
async def _world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(dispatcher, "MAX_ENDED_LOCKS", SLICE)
    monkeypatch.setattr(dispatcher, "MAX_ENDED_REPLIES", SLICE)
    return World()


async def test_a_lost_connection_ends_in_slices(world: World) -> None:
    leaving, other = Client(world), Client(world)
    await hold(world, leaving, onDisconnect="release")
    other.lock("name/0", "name/999", queueTimeout=60_000)
    await world.settle()
    began = len(world.store.changes)
    leaving.connection.connection_lost(None)
    ended = await world.slices(other)
    assert max(ended) <= 4 * SLICE
    assert max(world.store.changes[began:]) <= 2 * SLICE, "in its turn, and as a slow command"
    assert sum(ended) == LOCKS
    assert other.commands().count("locked") == 1
    assert (world.table.locks, len(world.table.held)) == (2, 1)
    assert not world.pipeline._scheduler


async def test_the_queues_of_subtrees_count_at_the_end_of_a_connection(world: World) -> None:
    """A request for one name may wait in the queues of 17 subtrees."""
    holder, leaving, other = Client(world), Client(world), Client(world)
    holder.send("request", resources=[f"shared:{'a/' * levels}**" for levels in range(9)], transactionTimeout=3_600_000)
    for number in range(LOCKS // 10):
        leaving.lock(f"{'a/' * 9}{number}", queueTimeout=3_600_000)
    await world.settle()
    assert world.table.queue_entries == LOCKS
    leaving.connection.connection_lost(None)
    ended = await world.slices(other)
    assert max(ended) <= 4 * SLICE
    assert sum(ended) == LOCKS


async def test_requests_that_are_granted_while_their_connection_ends_end_too(world: World) -> None:
    """The requests have `onDisconnect: keep`, but waited when the connection ended."""
    holder, leaving, other = Client(world), Client(world), Client(world)
    await hold(world, holder)
    for number in range(LOCKS):
        leaving.lock(f"name/{number}", queueTimeout=3_600_000)
    await world.settle()
    leaving.connection.connection_lost(None)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert world.table.queue_entries > LOCKS / 2, "it has begun, and is not complete"
    oldest = next(iter(world.table.held))
    holder.send("release", id=oldest)
    await asyncio.sleep(0)
    assert any(request.names() == ("name/0",) for request in world.table.held.values()), "granted to the lost client"
    await world.slices(other)
    assert (len(world.table.held), world.table.queue_entries) == (LOCKS - 1, 0)
    assert not any(request.names() == ("name/0",) for request in world.table.held.values())
    assert len(world.store.records) == LOCKS - 1


@pytest.mark.parametrize("secret", [None, SECRET])
async def test_bye_is_answered_after_the_last_slice(world: World, secret: str | None) -> None:
    leaving, other = Client(world), Client(world)
    if secret:
        leaving.send("hello", session=secret, sessionTimeout=60_000)
    await hold(world, leaving, onDisconnect="release")
    leaving.lock("kept", transactionTimeout=3_600_000)
    await world.settle()
    began = len(world.store.changes)
    leaving.send("bye")
    leaving.lock("after")
    assert "bye" not in leaving.commands()
    ended = await world.slices(other)
    assert max(ended) <= 4 * SLICE
    assert max(world.store.changes[began:]) <= 2 * SLICE, "in its turn, and as a slow command"
    assert leaving.commands()[-LOCKS - 1 :] == ["released"] * LOCKS + ["bye"]
    assert leaving.transport.is_ended
    (kept,) = world.table.held.values()
    assert kept.names() == ("kept",)
    assert secret is None or kept.origin is None
    assert (world.pipeline.session_count, list(world.store.records)) == (0, [kept.id])


async def test_a_drain_waits_for_the_last_slice(world: World) -> None:
    leaving = Client(world)
    await hold(world, leaving, onDisconnect="release")
    leaving.send("bye")
    await world.settle()
    assert leaving.commands()[-1] == "bye"
    assert not world.table.held


async def test_a_half_closed_connection_receives_every_end_and_is_closed(world: World) -> None:
    leaving, other = Client(world), Client(world)
    await hold(world, leaving, onDisconnect="release")
    leaving.connection.write_blocked = True
    began = len(world.store.changes)
    leaving.connection.eof_received()
    ended = await world.slices(other)
    assert max(ended) <= 4 * SLICE
    assert max(world.store.changes[began:]) <= 2 * SLICE, "in its turn, and as a slow command"
    assert leaving.commands()[-LOCKS:] == ["released"] * LOCKS
    assert leaving.transport.is_ended


async def test_a_session_expires_in_slices(world: World) -> None:
    leaving, other = Client(world), Client(world)
    leaving.send("hello", session=SECRET, sessionTimeout=1_000)
    await hold(world, leaving, LOCKS, onDisconnect="release", ref=None)
    for number in range(LOCKS):
        leaving.lock(f"kept/{number}", transactionTimeout=3_600_000)
        leaving.lock(f"name/{number}", queueTimeout=3_600_000)
    await world.settle()
    leaving.connection.connection_lost(None)
    await world.settle()
    world.now, began = 2_000.0, len(world.store.changes)
    asyncio.get_running_loop().call_soon(expire, world.pipeline)
    ended = await world.slices(other)
    assert max(ended) <= 4 * SLICE
    assert max(world.store.changes[began:]) <= 2 * SLICE, "in its turn, and as a slow command"
    assert sum(ended) == 2 * LOCKS
    assert world.pipeline.session_count == 0
    assert {request.origin for request in world.table.held.values()} == {None}
    assert set(world.store.records) == set(world.table.held)
    assert len(world.table.held) == LOCKS


async def test_the_retained_replies_of_expired_sessions_count(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "MAX_EXPIRED_SESSIONS", SLICE)
    for number in range(SLICE):
        client = Client(world)
        client.send("hello", session=f"{SECRET}{number}", sessionTimeout=1_000)
        for ref in map(str, range(SLICE // 2)):
            client.lock("a", ref=ref)
            client.send("release", ref=ref)
        await world.settle()
        client.connection.connection_lost(None)
    await world.settle()
    assert world.pipeline.session_count == SLICE
    world.now, counts = 2_000.0, [SLICE]
    asyncio.get_running_loop().call_soon(expire, world.pipeline)
    while counts[-1]:
        await asyncio.sleep(0)
        counts.append(world.pipeline.session_count)
    assert max(before - after for before, after in pairwise(counts)) <= 2


async def retain(world: World, client: Client, number: int = LOCKS) -> None:
    """Let the session of a client retain the replies to requests that were released by their `ref`."""
    client.send("hello", session=SECRET, sessionTimeout=1_000)
    for ref in map(str, range(number)):
        client.lock("a", ref=ref)
        client.send("release", ref=ref)
    await world.settle()
    assert len(world.store.records) == number


async def test_the_retained_replies_of_a_session_are_dropped_in_slices_after_bye(world: World) -> None:
    leaving, other, again = Client(world), Client(world), Client(world)
    await retain(world, leaving)
    began = len(world.store.changes)
    leaving.send("bye")
    again.send("hello", session=SECRET, sessionTimeout=1_000)
    assert "bye" not in leaving.commands()
    assert not again.commands(), "a part of the replies would not identify all retries"
    await world.slices(other)
    assert max(world.store.changes[began:]) <= 2 * SLICE, "in its turn, and as a slow command"
    assert leaving.commands()[-1] == "bye"
    assert [message["payload"]["resumed"] for message in again.received] == [False]
    assert not world.store.records


async def test_the_retained_replies_of_an_expired_session_are_dropped_in_slices(world: World) -> None:
    leaving, other, again = Client(world), Client(world), Client(world)
    await retain(world, leaving)
    leaving.connection.connection_lost(None)
    await world.settle()
    world.now, began = 2_000.0, len(world.store.changes)
    expire(world.pipeline)
    await asyncio.sleep(0)
    assert 0 < len(world.store.records) < LOCKS
    again.send("hello", session=SECRET, sessionTimeout=1_000)
    await world.slices(other)
    assert max(world.store.changes[began:]) <= 2 * SLICE, "in its turn, and as a slow command"
    assert [message["payload"]["resumed"] for message in again.received] == [False]
    assert (world.pipeline.session_count, len(world.store.records)) == (1, 0)


async def test_a_hello_waits_for_the_end_of_an_expired_session(world: World) -> None:
    leaving = Client(world)
    leaving.send("hello", session=SECRET, sessionTimeout=1_000)
    await hold(world, leaving, onDisconnect="release")
    leaving.connection.connection_lost(None)
    await world.settle()
    world.now = 2_000.0
    expire(world.pipeline)
    await asyncio.sleep(0)
    assert 0 < len(world.table.held) < LOCKS
    again = Client(world)
    again.send("hello", session=SECRET, sessionTimeout=1_000)
    await asyncio.sleep(0)
    assert (again.commands(), len(world.table.held) > 0) == ([], True)
    await world.settle()
    assert [message["payload"]["resumed"] for message in again.received] == [False]
    assert not world.table.held
    again.lock("another")
    again.send("bye")
    await world.settle()
    assert again.commands()[-1] == "bye"
    assert len(world.table.held) == 1, "`another`, which is kept"


async def test_a_hello_waits_for_the_end_of_the_session_by_bye(world: World) -> None:
    """Otherwise a session that has forgotten its kept locks would grant their repeated requests once more."""
    leaving = Client(world)
    leaving.send("hello", session=SECRET, sessionTimeout=1_000)
    await hold(world, leaving, onDisconnect="release")
    leaving.send("bye")
    assert 0 < len(world.table.held) < LOCKS
    again = Client(world)
    again.send("hello", session=SECRET, sessionTimeout=1_000)
    await world.settle()
    assert leaving.commands()[-1] == "bye"
    assert [message["payload"]["resumed"] for message in again.received] == [False]
    assert not world.table.held
    assert world.pipeline.session_count == 1


async def test_many_expired_requests_end_in_slices_of_locks(world: World) -> None:
    holder, other = Client(world), Client(world)
    for number in range(20):
        holder.lock(*(f"{number}/{each}" for each in range(200)), transactionTimeout=1_000)
    await world.settle()
    world.now, began = 2_000.0, len(world.store.changes)
    asyncio.get_running_loop().call_soon(expire, world.pipeline)
    ended = await world.slices(other)
    assert sum(ended) == 4_000
    assert max(world.store.changes[began:]) <= 5, "of 200 locks each"


@pytest.mark.parametrize("names", [("name/0",), ("1/1:pool",), tuple(f"name/{number}" for number in range(20))])
async def test_many_requests_that_time_out_together_end_in_slices(world: World, names: tuple[str, ...]) -> None:
    """Each of their replies describes what has blocked the request. Measured in bytecode instructions."""
    holder, waiting, other = Client(world), Client(world), Client(world)
    resources = [name if ":" in name else f"exclusive:{name}" for name in names]
    holder.send("request", resources=resources, transactionTimeout=3_600_000)
    for _ in range(2 * LOCKS):
        waiting.send("request", resources=resources, queueTimeout=1_000)
    await world.settle()
    world.now = 2_000.0
    most = 0
    while world.table.waiting:
        counter = OpcodeCounter()
        counter.start()
        expire(world.pipeline)
        counter.stop()
        most = max(most, counter.count)
        await world.slices(other)
    assert most < MAX_EXPIRY_INSTRUCTIONS
    assert waiting.commands().count("released") == 2 * LOCKS


async def test_a_release_that_grants_very_many_requests_grants_them_in_slices(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grant, "MAX_CANDIDATES", SLICE)
    holder, waiting, other = Client(world), Client(world), Client(world)
    await hold(world, holder, 1)
    for _ in range(LOCKS):
        waiting.send("request", resources=["shared:name/0"], queueTimeout=3_600_000, transactionTimeout=3_600_000)
    await world.settle()
    began = len(world.store.changes)
    holder.send("release", id=next(iter(world.table.held)))
    await world.slices(other)
    assert waiting.commands().count("locked") == LOCKS
    assert max(world.store.changes[began:]) <= SLICE + 1
    assert not world.manager.pending_grants


@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_bye_is_finished_after_an_outage_that_began_between_two_of_its_slices(
    world: World, is_lost: bool
) -> None:
    """Otherwise a `hello` would wait until the session expires, and each iteration of the event loop would run a batch for it."""
    leaving = Client(world)
    leaving.send("hello", session=SECRET, sessionTimeout=3_600_000)
    await hold(world, leaving, onDisconnect="release")
    world.store.held_back = []
    leaving.send("bye")
    leaving.lock("after")
    for _ in range(3):
        await asyncio.sleep(0)
    exceed_store_timeout(world.pipeline)
    for _ in range(3):
        leaving.lock("after the outage")
        await asyncio.sleep(0)
    assert 0 < len(world.table.held) < LOCKS
    assert len(world.pipeline._rejecter.postponed) == 1, "the commands after it are dropped"
    if is_lost:
        leaving.connection.connection_lost(None)
        await asyncio.sleep(0)
    leaving.lock("before the end of the outage")
    world.store.acknowledge()
    await world.settle()
    assert "error" not in leaving.commands()
    assert is_lost or leaving.commands()[-1] == "bye"
    assert not world.table.held
    assert not world.pipeline._scheduler
    again = Client(world)
    again.send("hello", session=SECRET, sessionTimeout=1_000)
    await world.settle()
    assert [message["payload"]["resumed"] for message in again.received] == [False]
