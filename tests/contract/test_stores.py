"""The contract of lock stores: in memory, fakeredis and a real Redis server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from msgspec import json

from genie import core
from genie.core import State
from genie.storage.memory import MemoryStore
from genie.storage.redis.commit import (
    SCRIPT,
    TRANSACTION,
    CommitEncoder,
    new_backoff,
    retry_until_done,
)
from genie.storage.redis.connection import RedisConnection, RedisFailure
from genie.storage.redis.records import encode
from genie.storage.redis.store import RedisStore
from genie.storage.store import Batch, Change, LeadershipLost, Store, UnknownFormat
from support.processes.servers import running_redis
from support.storage.stores import commit, opened


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with running_redis() as redis:
        yield redis.url


@pytest.fixture(scope="module")
def fake_url() -> Iterator[str]:
    import fakeredis
    from fakeredis import _commands
    from fakeredis.commands_mixins.server_mixin import ServerCommandsMixin

    # It closes the connection behind a command that it does not know.
    for name, says in {"role": [b"master", 0, []], "info": b"redis_version:6.2.0"}.items():
        _commands.command((), (bytes,), name=name)(lambda: None)
        _commands.SUPPORTED_COMMANDS[name].func_name = name
        setattr(ServerCommandsMixin, name, lambda *_, says=says: says)
    server = fakeredis.TcpFakeServer(("127.0.0.1", 0), server_type="redis")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"redis://127.0.0.1:{server.server_address[1]}/0"
    server.shutdown()
    server.server_close()


Make = Callable[[], Store]


@pytest.fixture(params=["memory", "fakeredis", "redis"])
async def make(request: pytest.FixtureRequest) -> AsyncIterator[Make]:
    made: list[Store] = []

    def build() -> Store:
        if request.param == "memory":
            made.append(MemoryStore())
        else:
            url = request.getfixturevalue("redis_url" if request.param == "redis" else "fake_url")
            made.append(RedisStore(url, request.node.name.replace("[", ".").replace("]", "")))
        return made[-1]

    yield build
    for store in made:
        await store.close()


def batch(manager: core.LockManager, now: float, *events: core.Event) -> Batch:
    changes = {event.request.id: event.request for event in events if not isinstance(event, core.UnknownId)}  # type: ignore[union-attr]
    return Batch(changes, manager.next_id, manager.next_fence, now)


async def test_an_unknown_namespace_is_empty(make: Make) -> None:
    replica = await opened(make())
    assert replica.snapshot() == Batch()


async def test_a_commit_is_durable_when_it_is_acknowledged(make: Make) -> None:
    store = make()
    await opened(store)
    manager = core.LockManager()
    for name in "ABC":
        await commit(store, batch(manager, 1, *manager.step(core.Request(exclusive=(name,)), 1)))


async def test_committed_records_are_loaded(make: Make) -> None:
    store = make()
    if not store.durable:
        assert (await opened(store)).snapshot() == Batch()
        return
    await opened(store)
    manager = core.LockManager(1_000, 2_000)
    held = core.Request(
        shared=("a", "ü/€"), exclusive=("b:c",), transaction="T1", ref="r", transaction_timeout_ms=77.5, priority=2.5
    )
    waiting = core.Request(exclusive=("a",), transaction="T2", queue_timeout_ms=500, release_on_disconnect=True)
    short = core.Request(exclusive=("z",))
    for request in (held, waiting, short):
        await commit(store, batch(manager, 3.5, *manager.step(request, 3.5)))
    await commit(store, batch(manager, 4.25, *manager.step(core.Release(short.id), 4.25)))

    loaded = await opened(make())

    assert (loaded.manager.next_id, loaded.manager.next_fence, loaded.clock_ms) == (1_003, 2_002, 4.25)
    one, other = loaded.manager.table.held[held.id], loaded.manager.table.waiting[waiting.id]
    assert len(loaded.manager.table.held) == len(loaded.manager.table.waiting) == 1
    for request, was in ((one, held), (other, waiting)):
        for field in [
            "id",
            "owner",
            "shared",
            "exclusive",
            "transaction",
            "priority",
            "ref",
            "release_on_disconnect",
            "transaction_timeout_ms",
            "state",
            "fence",
            "since",
            "deadline",
        ]:
            assert getattr(request, field) == getattr(was, field), field
        assert request.since_unix_ms == int(was.since_unix_ms)
    assert (one.state, other.state) == (State.HELD, State.WAITING)
    assert other.entry("a")[:2] == (0, other.id)


async def test_the_order_of_the_queues_is_loaded(make: Make) -> None:
    store = make()
    if not store.durable:
        return
    await opened(store)
    manager = core.LockManager()
    steps: list[core.Command] = [
        core.Request(exclusive=("A", "B"), transaction="T1"),
        core.Request(exclusive=("A", "C")),
        core.Request(exclusive=("D", "C")),
        core.Request(exclusive=("D",), transaction="T2"),
        core.Request(exclusive=("C",), transaction="T1", priority=-1),  # passes the waiters of T1
    ]
    for step in steps:
        await commit(store, batch(manager, 0, *manager.step(step, 0)))
    lines = {
        name: [entry[2].id for entry in resource.wait_queue.entries()]
        for name, resource in ((n, manager.table.lookup(n)) for n in manager.table.resource_names())
        if resource.wait_queue is not None
    }
    assert lines["C"] != sorted(lines["C"]) or manager.table.held
    again = (await opened(make())).manager
    assert {
        name: [entry[2].id for entry in resource.wait_queue.entries()]
        for name, resource in ((n, again.table.lookup(n)) for n in again.table.resource_names())
        if resource.wait_queue is not None
    } == lines


@pytest.fixture
def many(request: pytest.FixtureRequest) -> int:
    """A large number of records. Fakeredis takes long for each."""
    return 4_000 if request.node.callspec.params["make"] == "fakeredis" else 20_000


async def test_a_batch_of_very_many_records_is_atomic(make: Make, many: int) -> None:
    store = make()
    await opened(store)
    manager = core.LockManager()
    changes = {}
    for number in range(many):
        request = core.Request(exclusive=(f"{number}",))
        manager.step(request, 0)
        changes[request.id] = request
    await commit(store, Batch(changes, manager.next_id, manager.next_fence, 0))
    for id_ in range(1, many - 10):
        manager.step(core.Release(id_), 1)
    await commit(store, Batch(changes, manager.next_id, manager.next_fence, 1))
    if store.durable:
        loaded = await opened(make())
        assert list(loaded.manager.table.held) == list(range(many - 10, many + 1))


@pytest.mark.parametrize("count", [3_000, 20_000])
async def test_many_records_are_loaded_completely(make: Make, count: int, many: int) -> None:
    """More than are read in one call: where the next one goes on must be just where the last one stopped."""
    store, count = make(), min(count, many)
    await opened(store)
    manager = core.LockManager()
    changes: dict[int, Change] = {}
    for number in range(count):
        request = core.Request(exclusive=(f"{number}",))
        manager.step(request, 0)
        changes[request.id] = request
    await commit(store, Batch(changes, manager.next_id, manager.next_fence, 0))
    if store.durable:
        assert list((await opened(make())).manager.table.held) == list(range(1, count + 1))


async def test_the_later_leader_owns_the_namespace(make: Make) -> None:
    older, newer = make(), make()
    if not older.durable:
        return
    await opened(older)
    manager = core.LockManager()
    await commit(older, batch(manager, 0, *manager.step(core.Request(exclusive=("A",)), 0)))
    await opened(newer)
    with pytest.raises(LeadershipLost):
        await commit(older, batch(manager, 0, *manager.step(core.Request(exclusive=("B",)), 0)))
    loaded = await opened(make())
    assert [request.exclusive for request in loaded.manager.table.held.values()] == [("A",)]


async def replies(link: RedisConnection, command: bytes, count: int) -> Any:
    future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    link.send(command, future.set_result, count)
    return await future


async def test_a_batch_is_applied_once_and_never_after_a_later_one(make: Make) -> None:
    """A connection that was given up may still carry a batch; it may arrive long after, or twice."""
    store = make()
    if not isinstance(store, RedisStore):
        return
    await opened(store)
    log = store._keyspace.log
    given_up, other = await store._primary.connect(), await store._primary.connect()
    await given_up.call("WATCH", log)
    manager, request = core.LockManager(), core.Request(exclusive=("A",))
    encoder, late = CommitEncoder(store._keyspace), []
    for event in (request, core.Release):
        command = request if event is request else core.Release(request.id)
        await commit(store, batch(manager, 0, *manager.step(command, 0)))
        late.append(encoder.encode(store._writer.batch.index, store._writer.batch.encoded)[0])
    entries = await other.call("XRANGE", log, "-", "+")
    assert len(entries) == 3

    granted, released = late
    assert (await replies(given_up, granted, TRANSACTION.reply_count))[2] is None, (
        "the log was changed since it was watched"
    )
    for batch_ in (granted, released, released):
        (error,) = (await replies(other, batch_, TRANSACTION.reply_count))[2]
        assert "equal or smaller" in str(error)
    if other.version >= (7, 0):
        early, again = [encoder.encode_allowing_oom(index, b"0 1 1") for index in (1, 2)]
        assert (await replies(other, early, SCRIPT.reply_count))[0] is None
        assert (await replies(other, again, SCRIPT.reply_count))[0] == [entries[-1][0]], "the log has the batch already"
    assert await other.call("XRANGE", log, "-", "+") == entries
    given_up.close()
    other.close()


async def test_a_namespace_of_another_format_version_is_not_changed(make: Make) -> None:
    store = make()
    if not isinstance(store, RedisStore):
        return
    link = await store._primary.connect()
    before = [b"version", b"2", b"epoch", b"1", b"nonce", b"n", b"leader", b"7"]
    await link.call("HSET", store._keyspace.meta, *before)
    await link.call("XADD", store._keyspace.log, "1-0", "takeover", "x")
    entries = await link.call("XRANGE", store._keyspace.log, "-", "+")
    keys = sorted(await link.call("KEYS", f"{{{store._keyspace.name}}}:*"))
    with pytest.raises(UnknownFormat, match=r"has the format version 2, .* use the version of Genie that wrote it"):
        await opened(store)
    assert sorted(await link.call("HGETALL", store._keyspace.meta)) == sorted(before)
    assert await link.call("XRANGE", store._keyspace.log, "-", "+") == entries
    assert sorted(await link.call("KEYS", f"{{{store._keyspace.name}}}:*")) == keys
    link.close()


@pytest.mark.parametrize("place", ["log", "state"])
async def test_a_record_of_another_version_is_neither_led_nor_changed(make: Make, place: str) -> None:
    """A field of a later version is rejected where the state is loaded, wherever the record is stored."""
    older, newer = make(), make()
    if not isinstance(older, RedisStore) or not isinstance(newer, RedisStore):
        return
    await opened(newer)
    manager, keyspace = core.LockManager(), newer._keyspace
    await commit(newer, batch(manager, 0, *manager.step(core.Request(exclusive=("A",)), 0)))
    link = await newer._primary.connect()
    record = json.encode(json.decode(encode(manager.table.held[1])) | {"lease": 5})
    if place == "state":
        await link.call("HSET", keyspace.epoch.state, "1", record)
    else:
        await link.call("XADD", keyspace.log, f"{keyspace.epoch.number}-2", "batch", b"0 2 2\n1 " + record)
    await newer.close()
    meta, entries = await link.call("HGETALL", keyspace.meta), await link.call("XRANGE", keyspace.log, "-", "+")
    with pytest.raises(UnknownFormat, match=r"record of 1 was written by another version of Genie.*lease"):
        await opened(older)
    assert await link.call("HGETALL", keyspace.meta) == meta
    assert await link.call("XRANGE", keyspace.log, "-", "+") == entries
    link.close()


async def test_a_snapshot_lost_during_the_restore_is_restored_again(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make()
    if not isinstance(store, RedisStore):
        return
    await opened(store)
    manager, keyspace = core.LockManager(), store._keyspace
    request = core.Request(exclusive=("A",))
    everything = batch(manager, 0, *manager.step(request, 0))
    acquire, failures = keyspace._acquire, 1

    async def forgetful(*args: Any, **named: Any) -> Any:
        nonlocal failures
        if failures:
            failures -= 1
            await store._primary.call("DEL", args[0].epoch.state)
        return await acquire(*args, **named)

    monkeypatch.setattr(keyspace, "_acquire", forgetful)
    await retry_until_done(
        "restore snapshot",
        lambda: keyspace.restore_snapshot(store._node, everything, keyspace.history),
        new_backoff(),
        store._log,
    )
    assert not failures
    assert list((await opened(make())).manager.table.held) == [request.id]


async def test_a_node_that_stops_before_it_has_the_state_to_lead_from_does_not_resign(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node has acquired leadership, but does not know the clock and the counters that a resignation contains."""
    former, store = make(), make()
    if not isinstance(former, RedisStore) or not isinstance(store, RedisStore):
        return
    await opened(former)
    await commit(former, Batch({}, next_id=50, next_fence=60, clock_ms=70.0))
    await former.resign()
    failed = asyncio.Event()

    async def fail() -> None:
        failed.set()
        raise RedisFailure("unreachable")

    monkeypatch.setattr(store._writer, "open", fail)
    opening = asyncio.create_task(opened(store))
    await failed.wait()
    assert store._keyspace.epoch.number
    opening.cancel()
    with suppress(asyncio.CancelledError):
        await opening
    await store.resign()
    monkeypatch.undo()
    loaded = await opened(make())
    assert (loaded.manager.next_id, loaded.manager.next_fence, loaded.clock_ms) == (50, 60, 70.0)
