"""The load and the recovery of a large state: in parts, between which the other namespaces of the server are served."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterable
from itertools import chain, pairwise
from pathlib import Path

import pytest

from genie.core import Event, LockManager, Request, State, model, tables
from genie.core.model import details_of
from genie.history import records
from genie.history.recorder import Recorder
from genie.history.redaction import Redaction
from genie.history.retention import Retention
from genie.history.segments import recorded_terms
from genie.history.writer import HistoryWriter
from genie.server import dispatcher, pipeline, turns
from genie.server.turns import IterationTurns
from genie.storage.redis import replica
from genie.storage.redis.follower import _apply_state
from genie.storage.redis.replica import LazyReplica, _sort_by_id
from genie.storage.store import Batch, Change, RetainedReply, StateMachine, StoredOrigin, snapshot_of
from simulator.invariants import check
from support.core.sliced_pipeline import SECRET, Client, World, tick
from work.core_scenarios import InstructionCounter

PART = 10
LOCKS = 300


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "MAX_PART_NAMES", PART)
    monkeypatch.setattr(dispatcher, "MAX_RECOVERED", PART)
    monkeypatch.setattr(pipeline, "MAX_RECOVERED_CHANGES", PART)
    monkeypatch.setattr(turns, "ITERATION_S", 0.0)  # one part in each iteration
    monkeypatch.setattr(replica, "MAX_SORTED_IDS", PART)
    monkeypatch.setattr(tables, "MAX_FREED_ITEMS", PART)


def loaded(
    id: int, *exclusive: str, state: State = State.HELD, origin: StoredOrigin | None = None, deadline: int = 10**9
) -> Request:
    request = Request((), exclusive, release_on_disconnect=origin is None, origin=origin)
    request.details = details_of((), exclusive)
    request.id = request.owner = id
    request.fence, request.since, request.since_unix_ms, request.deadline = id, 0, 0, deadline
    request.state = state
    if state is State.WAITING:
        request.queue_entry = (-request.priority, id, request)
    return request


async def test_a_follower_loads_a_large_state_in_parts() -> None:
    changes: dict[int, Change] = {id_: loaded(id_, f"name/{id_}") for id_ in range(1, LOCKS)}
    for id_ in range(LOCKS, LOCKS + 20):  # many subtrees: all requests are read once for them
        changes[id_] = loaded(id_, f"{id_}/**", "name/1", state=State.WAITING)
    load = asyncio.create_task(_apply_state(Batch(changes, LOCKS + 20, LOCKS + 20)))
    iterations = 0
    while not load.done():
        await asyncio.sleep(0)
        iterations += 1
    assert iterations >= 3 * LOCKS // PART
    manager = load.result().manager
    assert (len(manager.table.held), len(manager.table.waiting)) == (LOCKS - 1, 20)
    check(manager)


async def test_a_small_state_is_loaded_in_one_iteration() -> None:
    load = asyncio.create_task(_apply_state(Batch({1: loaded(1, "a")}, 2, 2)))
    await asyncio.sleep(0)
    assert load.done()


async def test_a_follower_sorts_many_ids_in_parts() -> None:
    ids = [(id_ * 7919) % 10_007 for id_ in range(1, LOCKS)]
    sort = asyncio.create_task(_sort_by_id(dict.fromkeys(ids)))
    iterations = 0
    while not sort.done():
        await asyncio.sleep(0)
        iterations += 1
    assert iterations >= 2 * LOCKS // PART - 2
    assert [*sort.result()] == sorted(ids)


async def most_removed_in_an_iteration(manager: LockManager, free: Callable[[], bool]) -> int:
    """Run the event loop until `free` returns True. Return the maximum number of items that one iteration has removed."""
    table, sizes = manager.table, list[int]()

    def add_size() -> None:
        items = table.held, table.waiting, table.transactions, table.resources, table.uncontended
        sizes.append(sum(map(len, (*items, manager.deadlines._ticks))))

    add_size()
    while not free():
        await asyncio.sleep(0)
        add_size()
    return max(before - after for before, after in pairwise(sizes))


def many_requests() -> dict[int, Change]:
    """Return held and waiting requests of transactions, with a deadline each."""
    changes: dict[int, Change] = {}
    for id_ in range(1, LOCKS):
        state = State.WAITING if id_ % 3 == 0 else State.HELD
        changes[id_] = request = loaded(id_, f"name/{id_ // 3}", f"other/{id_}", state=state, deadline=10**9 + id_)
        request.transaction = request.owner = f"T{id_}"
    return changes


async def test_a_follower_frees_a_large_state_in_parts() -> None:
    gc.collect()
    gc.disable()
    state, others = StateMachine(), count_requests()
    state.apply(Batch(many_requests(), LOCKS, LOCKS))
    assert count_requests() == others + LOCKS - 1
    lazy, manager = LazyReplica(state), state.manager
    del state
    free = asyncio.create_task(lazy.free())
    assert await most_removed_in_an_iteration(manager, free.done) <= 3 * PART, "the end of one table and of the next"
    assert count_requests() == others, "also without the garbage collector"
    gc.enable()
    assert not lazy.state_machine().manager.table.held


async def test_a_former_leader_frees_its_state_in_parts() -> None:
    """It may still lead other namespaces."""
    world = World()
    client = Client(world)
    client.send("hello", session=SECRET)
    for number in range(LOCKS):
        client.lock(f"held/{number}")
        client.lock(f"held/{number}")
    await world.settle()
    table = world.manager.table
    assert (len(table.held), len(table.waiting)) == (LOCKS, LOCKS)
    world.pipeline.stop()
    world.pipeline.dispose()
    assert len(table.held) == LOCKS
    assert await most_removed_in_an_iteration(world.manager, lambda: not table.held) <= 3 * PART


def test_a_snapshot_executes_no_instructions_for_each_held_lock() -> None:
    """It is made at once, when leadership is lost or Redis has lost commits."""
    counter = InstructionCounter()
    requests = [counter.request(f"{number}") for number in range(2_000)]
    counter.run(lambda: requests.extend(snapshot_of(counter.manager, {}, 1, 0.0).changes.values()))
    assert requests[:2_000] == requests[2_000:]
    assert counter.instructions < len(requests) // 2


def count_requests() -> int:
    return sum(isinstance(each, Request) for each in gc.get_objects())


async def iterate(worlds: list[World], recovery: asyncio.Task[None], other: Client) -> list[int]:
    """Run the event loop until a recovery is complete. Return the number of locks and of sessions after each iteration."""
    counts = []
    while not recovery.done():
        pongs = len(other.received)
        other.send("ping")
        for _ in range(3):  # a part, the rest of a long iteration, a batch
            await asyncio.sleep(0)
        assert len(other.received) > pongs, "the other namespace is served in between"
        assert not any(world.failures for world in worlds)
        counts.append(worlds[0].table.locks + worlds[0].pipeline.session_count)
    await recovery
    return counts


async def test_a_new_leader_disconnects_requests_without_a_session_in_parts() -> None:
    shared = IterationTurns()
    world, other_world = World(shared), World(shared)
    other = Client(other_world)
    for id_ in range(1, LOCKS + 1):
        world.manager.adopt(loaded(id_, f"name/{id_}"))
    counts = await iterate([world, other_world], asyncio.create_task(world.pipeline.recover([])), other)
    assert max(before - after for before, after in pairwise([*counts, 0])) <= 3 * PART
    await world.settle()
    assert world.table.locks == 0
    assert sum(world.store.changes) == LOCKS
    assert max(world.store.changes) <= 2 * PART
    world.pipeline.stop()
    other_world.pipeline.stop()


async def test_a_new_leader_restores_sessions_and_replies_in_parts_and_nothing_expires_before() -> None:
    shared = IterationTurns()
    world, other_world = World(shared), World(shared)
    other = Client(other_world)
    world.now = 1_000
    origins = [StoredOrigin(f"key {number}", 60_000) for number in range(LOCKS)]
    expired = 20
    for id_, origin in enumerate(origins, 1):
        state = State.WAITING if id_ > LOCKS // 2 else State.HELD
        name = f"name/{id_ % (LOCKS // 2)}"
        world.manager.adopt(loaded(id_, name, state=state, origin=origin, deadline=10 if id_ <= expired else 10**9))
    replies = [
        RetainedReply(LOCKS + number, "ref", origin, number, b"{}\n") for number, origin in enumerate(origins, 1)
    ]
    recovery = asyncio.create_task(world.pipeline.recover(replies))
    await asyncio.sleep(0)
    tick(world.pipeline)  # a heartbeat
    counts = await iterate([world, other_world], recovery, other)
    assert max(after - before for before, after in pairwise(counts)) <= 3 * PART
    assert world.pipeline.session_count == LOCKS
    assert len(world.table.waiting) == LOCKS // 2, "nothing has expired yet"
    await world.settle()
    for _ in range(10 * LOCKS):
        await asyncio.sleep(0)
    assert not world.failures
    assert len(world.table.waiting) == LOCKS // 2 - expired
    assert all(session.retained_replies for session in world.pipeline._dispatcher.sessions)
    world.pipeline.stop()
    other_world.pipeline.stop()


async def test_a_history_begins_with_the_waiting_requests_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    for id_ in range(1, 1_001):
        world.manager.adopt(loaded(id_, "a", state=State.HELD if id_ == 1 else State.WAITING))
    encoded = 0
    encode_lines = records.encode_lines

    def counting(lines: Iterable[records.Line]) -> bytes:
        nonlocal encoded
        listed = list(lines)
        encoded += sum(line.fence == 0 for line in listed if isinstance(line, records.Carried))
        return encode_lines(listed)

    monkeypatch.setattr(records, "encode_lines", counting)
    writer = HistoryWriter(tmp_path, "main", "127.0.0.1:0", Retention())
    world.pipeline._recorder = Recorder(writer, world.manager, Redaction((), b"key"))
    recovery = asyncio.create_task(world.pipeline.recover([]))
    counts = [0]
    while encoded < 999:
        await asyncio.sleep(0)
        counts.append(encoded)
    assert max(after - before for before, after in pairwise(counts)) <= 100
    await recovery
    await world.settle()
    world.pipeline.stop()
    writer.join(10)
    carried = [
        line for line in chain.from_iterable(recorded_terms(tmp_path, 0, 1e18)) if isinstance(line, records.Carried)
    ]
    assert len(carried) == 1_000


async def test_a_new_leader_searches_for_grantable_requests_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    world, sizes, step = World(), list[int](), LockManager._recover

    def recover(manager: LockManager, contended: list[str] | None, now: float, events: list[Event]) -> None:
        assert contended is not None
        sizes.append(len(contended))
        step(manager, contended, now, events)

    monkeypatch.setattr(LockManager, "_recover", recover)
    for id_ in range(1, LOCKS + 1):
        origin = StoredOrigin(f"key {id_}", 60_000)
        names = f"name/{id_}", f"name/{LOCKS - id_ + 1}"  # a grant removes both from the resources with waiters
        world.manager.adopt(loaded(id_, *{*names}, state=State.WAITING, origin=origin))
    await world.pipeline.recover([])
    await world.settle()
    assert max(sizes) <= PART
    assert len(sizes) > LOCKS // PART // 2
    assert len(world.table.held) == LOCKS // 2
    assert not world.failures
    check(world.manager)
    world.pipeline.stop()


async def test_a_recovery_ends_if_leadership_is_lost() -> None:
    world = World()
    for id_ in range(1, LOCKS + 1):
        world.manager.adopt(loaded(id_, f"name/{id_}"))
    recovery = asyncio.create_task(world.pipeline.recover([]))
    world.store.held_back = []
    for _ in range(10 * LOCKS):
        await asyncio.sleep(0)
    assert world.store.held_back, "a commit is in flight"
    world.pipeline.stop()
    await asyncio.wait_for(recovery, 10)
    await asyncio.wait_for(world.pipeline.drained(), 10)
    assert world.table.locks > 0


async def test_a_snapshot_during_a_recovery_has_the_replies_that_are_not_restored_yet() -> None:
    world = World()
    origin = StoredOrigin("key", 60_000)
    replies = [RetainedReply(id_, f"ref {id_}", origin, id_, b"{}\n") for id_ in range(1, LOCKS + 1)]
    recovery = asyncio.create_task(world.pipeline.recover(replies))
    restored = set()
    await asyncio.sleep(0)
    while not recovery.done():
        assert world.pipeline.snapshot().changes.keys() == {*range(1, LOCKS + 1)}
        restored.update(len(session.retained_replies or ()) for session in world.pipeline._dispatcher.sessions)
        await asyncio.sleep(0)
    assert len(restored) >= LOCKS // PART, "some snapshots were between two parts"
    assert world.pipeline.snapshot().changes.keys() == {*range(1, LOCKS + 1)}
    world.pipeline.stop()


async def test_a_recovery_waits_for_a_heartbeat_that_follows_its_commit_immediately() -> None:
    world = World()
    for id_ in range(1, LOCKS + 1):
        world.manager.adopt(loaded(id_, f"name/{id_}"))
    world.store.held_back = []
    recovery = asyncio.create_task(world.pipeline.recover([]))
    while not world.store.held_back:  # noqa: ASYNC110 - each iteration of the event loop
        await asyncio.sleep(0)
    world.pipeline._commits._sent_at -= 1  # a slow commit
    world.store.held_back.pop()(None)
    tick(world.pipeline)  # before the recovery continues: a timer may run first
    assert len(world.store.held_back) == 1
    for _ in range(LOCKS):
        await asyncio.sleep(0)
    assert len(world.store.held_back) == 1, "one batch is in flight"
    world.store.acknowledge()
    await recovery
    await world.settle()
    assert sum(world.store.changes) == LOCKS
    world.pipeline.stop()


async def test_sessions_of_a_long_recovery_can_be_resumed_for_their_whole_timeout() -> None:
    world = World()
    origin = StoredOrigin("key", 1_000)
    for id_ in range(1, LOCKS + 1):
        world.manager.adopt(loaded(id_, f"name/{id_}", origin=origin))
    recovery = asyncio.create_task(world.pipeline.recover([]))
    while not recovery.done():
        if not world.pipeline.session_count or world.now < 1_000:
            world.now += 100
        await asyncio.sleep(0)
    [session] = world.pipeline._dispatcher.sessions
    assert session.expires_at == world.now + 1_000
    world.pipeline.stop()
