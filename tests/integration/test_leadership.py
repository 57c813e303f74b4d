"""Leader election among several stores on one real Redis."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
import structlog
from msgspec.structs import replace
from structlog.testing import capture_logs

from genie.config import Settings
from genie.core import HELD, Request
from genie.server.app import Server
from genie.storage.redis import keyspace
from genie.storage.redis.commit import new_backoff, retry_until_done
from genie.storage.redis.election import Candidacy, Decision, decide
from genie.storage.redis.follower import Follower
from genie.storage.redis.keyspace import Meta
from genie.storage.redis.log import EpochHistory, LogReader, LogTruncated
from genie.storage.redis.store import RedisStore
from genie.storage.store import Batch, LeadershipLost, Node, StateMachine
from support.processes.servers import WAIT_S, Redis
from support.processes.waiting import until
from support.storage.stores import commit, last_position, stored_records

LEASE_MS = 300
LONG_LEASE_MS = 60_000
"""A lease that does not expire during a test."""


@pytest.fixture
async def make_store(redis: Redis) -> AsyncIterator[Callable[[], RedisStore]]:
    redis.create_namespace()
    async with AsyncExitStack() as stack:

        def build() -> RedisStore:
            store = RedisStore(redis.url)
            stack.push_async_callback(store.close)
            return store

        yield build


async def lead(store: RedisStore, number: int, snapshot: Batch, *, lease_ms: int = LEASE_MS) -> StateMachine:
    async with asyncio.timeout(WAIT_S):
        return await store.open(Node(f"here:{number}", f"here:{number}", lease_ms), lambda: snapshot, lambda _: None)


def batch_holding(*ids: int, released: tuple[int, ...] = ()) -> Batch:
    requests: dict[int, Any] = dict.fromkeys(released)
    for id_ in ids:
        request = requests[id_] = Request(exclusive=(f"r{id_}",))
        request.id = request.owner = request.fence = id_
        request.state, request.since, request.since_unix_ms, request.deadline = HELD, 0.0, 0.0, 10**9
    return Batch(requests, 100, 100, 5)


def stored_ids(redis: Redis) -> set[int]:
    return set(stored_records(redis))


async def test_one_of_two_followers_restores_an_emptied_redis(
    redis: Redis, make_store: Callable[[], RedisStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one continues to follow, although both waited equally long."""

    def with_a_short_lease(meta: Meta | None, candidacy: Candidacy, replica: Any, node: Node, now: float) -> Decision:
        """Decide as with a short lease, so that an empty namespace is taken over soon. As leader the lease is long."""
        return decide(meta, candidacy, replica, replace(node, lease_ms=LEASE_MS), now)

    monkeypatch.setattr("genie.storage.redis.follower.decide", with_a_short_lease)
    leader, second, third = make_store(), make_store(), make_store()
    await lead(leader, 1, batch_holding(1), lease_ms=LONG_LEASE_MS)
    followers = [
        asyncio.create_task(lead(store, n, batch_holding(), lease_ms=LONG_LEASE_MS))
        for n, store in ((2, second), (3, third))
    ]
    await commit(leader, batch_holding(*range(1, 50)))
    redis.call("XLEN", "{genie}:log")
    await until(lambda: int(redis.call("INFO", "clients")["blocked_clients"]) == 2)
    redis.call("FLUSHALL")
    done, waiting = await asyncio.wait(followers, return_when=asyncio.FIRST_COMPLETED, timeout=WAIT_S)
    winner = second if followers[0] in done else third
    assert len(done) == 1
    for _ in range(8):  # for longer than both waited, so that the third store sees that the leader is alive
        await commit(winner, Batch({}, 100, 100, 6))
        await asyncio.sleep(LEASE_MS / 4000)
    assert not any(task.done() for task in waiting)
    assert stored_ids(redis) == set(range(1, 50))
    for task in waiting:
        task.cancel()


async def test_a_log_that_grows_without_metadata_is_not_replaced(
    redis: Redis, make_store: Callable[[], RedisStore]
) -> None:
    """Redis lost the metadata between the two commands by which the leader commits and watches: the leader is alive."""
    await lead(make_store(), 1, batch_holding())
    candidate = make_store()._keyspace
    redis.call("DEL", candidate.meta)
    assert await candidate.read() is None
    await candidate.register_candidate()
    epoch, index = last_position(redis)
    redis.call("XADD", candidate.log, f"{epoch}-{index + 1}", "batch", "0 1 1")
    assert not await candidate.acquire_leadership(Node(), None)
    with pytest.raises(LeadershipLost, match="log has changed"):
        await candidate.restore_snapshot(Node(), Batch(), EpochHistory(), f"{epoch}-{index}")
    assert not redis.call("EXISTS", candidate.meta)
    assert last_position(redis) == (epoch, index + 1)
    assert await candidate.read() is None
    assert await candidate.acquire_leadership(Node(), None)
    assert last_position(redis) == (candidate.epoch.number, 0)


async def test_a_candidate_detects_that_redis_was_emptied(redis: Redis, make_store: Callable[[], RedisStore]) -> None:
    """Another leader may have been active in between, so it must wait for a sign of life again."""
    store = make_store()
    redis.call("FLUSHALL")
    assert await store._keyspace.register_candidate()
    assert not await store._keyspace.register_candidate()
    redis.call("FLUSHALL")
    assert await store._keyspace.register_candidate()
    await lead(store, 1, batch_holding())
    assert not redis.call("EXISTS", "{genie}:candidates")


async def test_a_timeout_of_redis_is_logged_with_a_reason(
    make_store: Callable[[], RedisStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`asyncio.timeout` raises an error without a text."""
    store = make_store()
    await lead(store, 1, batch_holding())
    attempts = iter(["failing", "successful"])

    async def time_out(*_: object) -> None:
        if next(attempts, "failing") == "failing":
            raise TimeoutError

    with capture_logs() as lines:
        await retry_until_done("connect", time_out, new_backoff(), structlog.get_logger())
        monkeypatch.setattr(store._keyspace, "resign", time_out)
        await store.resign()
    assert [line["reason"] for line in lines if line["log_level"] == "warning"] == ["TimeoutError", "TimeoutError"]


async def test_values_that_no_server_writes_are_no_candidates(
    redis: Redis, make_store: Callable[[], RedisStore]
) -> None:
    """They end no server: a leader of another namespace would resign, and a candidate would stop."""
    keyspace = make_store()._keyspace
    redis.call("FLUSHALL")
    for value in ("junk", "", b"\xff 127.0.0.1:1"):
        redis.call("SET", "{genie}:transfer_request", value)
        redis.call("HSET", "{genie}:positions", "another", value)
        assert await keyspace.read_transfer_request() is None
        assert not await keyspace.publish_position_and_compare((1, 1))


async def test_an_empty_namespace_is_not_acquired_after_redis_was_emptied(
    redis: Redis, make_store: Callable[[], RedisStore]
) -> None:
    """Between the read and the script another node took over, and Redis lost that: the other node is alive."""
    candidate = make_store()._keyspace
    redis.call("FLUSHALL")
    assert await candidate.read() is None
    await candidate.register_candidate()
    redis.call("FLUSHALL")
    assert not await candidate.acquire_leadership(Node(), None)
    with pytest.raises(LeadershipLost):
        await candidate.restore_snapshot(Node(), Batch(), EpochHistory(((0, 0), (7, 3))), "")
    assert not redis.call("EXISTS", candidate.meta)
    await candidate.register_candidate()
    assert await candidate.acquire_leadership(Node(), None)


async def test_a_deposed_leader_does_not_delete_snapshots(
    redis: Redis, make_store: Callable[[], RedisStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    stalled, next_ = make_store(), make_store()
    reached, resume = asyncio.Event(), asyncio.Event()
    collect_garbage = stalled._keyspace.collect_garbage

    async def collect_garbage_later() -> None:
        reached.set()
        await resume.wait()
        await collect_garbage()

    monkeypatch.setattr(stalled._keyspace, "collect_garbage", collect_garbage_later)
    leading = asyncio.create_task(lead(stalled, 1, batch_holding()))
    await reached.wait()
    state = batch_holding(1, 2, 3)
    await lead(next_, 2, state, lease_ms=LONG_LEASE_MS)
    await commit(next_, state)
    redis.call("DEL", "{genie}:meta")
    await commit(next_, Batch({}, 100, 100, 6))  # restores the namespace
    resume.set()
    await leading
    assert stored_ids(redis) == {1, 2, 3}


async def test_a_higher_epoch_from_a_wrong_clock_does_not_depose_the_leader(
    redis: Redis, make_store: Callable[[], RedisStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The former leader with the wrong clock was absent for a lease. It must not overwrite the state of the leader."""
    older, newer = make_store(), make_store()
    with monkeypatch.context() as patch:
        patch.setattr(keyspace.time, "time_ns", lambda: 4 * 10**18)
        await lead(older, 1, batch_holding(1, 2))
        await commit(older, batch_holding(1, 2))
    redis.call("FLUSHALL")
    await lead(newer, 2, batch_holding(9))
    await commit(newer, batch_holding(9))
    assert newer._keyspace.epoch.number < older._keyspace.epoch.number
    with pytest.raises(LeadershipLost):
        await commit(older, Batch({}, 100, 100, 7))
    assert stored_ids(redis) == {9}


async def test_a_server_that_stops_while_it_acquires_leadership_resigns(
    redis: Redis, make_store: Callable[[], RedisStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has acquired leadership in Redis, and is still loading the state."""
    server = Server(Settings(port=0, lease=600.0), store := make_store())
    reached = asyncio.Event()

    async def never_return() -> None:
        reached.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(store._keyspace, "collect_garbage", never_return)
    starting = asyncio.create_task(server.start())
    await reached.wait()
    assert redis.call("HGET", "{genie}:meta", "node")
    starting.cancel()
    await asyncio.wait({starting})
    await server.stop()
    assert not redis.call("HGET", "{genie}:meta", "node")


@pytest.mark.parametrize("is_restored", [False, True])
async def test_a_leader_keeps_no_reference_to_the_state_with_which_it_began(
    redis: Redis, make_store: Callable[[], RedisStore], is_restored: bool
) -> None:
    store = make_store()
    snapshot = batch_holding(1, 2)
    await lead(store, 1, snapshot)
    await commit(store, snapshot)
    if is_restored:
        redis.call("FLUSHALL")
    state = await lead(store, 1, snapshot)
    assert len(state.manager.table.held) == 2
    followers = [each for each in gc.get_objects() if isinstance(each, Follower)]
    assert not any(each._keyspace is store._keyspace for each in followers), "other tests may have left some"
    reference = weakref.ref(state)
    del state
    gc.collect()
    assert reference() is None


async def test_a_leader_resigns_over_a_new_connection_if_its_own_is_closed(
    redis: Redis, make_store: Callable[[], RedisStore]
) -> None:
    """An idle leader sends no commands for a long time, in which Redis may have restarted."""
    store = make_store()
    await lead(store, 1, batch_holding())
    redis.call("CLIENT", "KILL", "TYPE", "normal")
    await until(lambda: store._primary._connection is None or store._primary._connection._transport is None)
    await store.resign()
    assert not redis.call("HGET", "{genie}:meta", "node")


async def test_the_time_to_load_a_snapshot_does_not_count_as_silence_of_the_leader(
    make_store: Callable[[], RedisStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A follower that loads a snapshot, because the log is truncated, does not depose a leader that is alive."""
    leader, follower = make_store(), make_store()
    await lead(leader, 1, batch_holding(), lease_ms=LONG_LEASE_MS)
    original_init, candidacies = Candidacy.__init__, list[Candidacy]()

    def record_candidacy(self: Candidacy, *args: Any, **options: Any) -> None:
        original_init(self, *args, **options)
        candidacies.append(self)

    monkeypatch.setattr(Candidacy, "__init__", record_candidacy)
    following = asyncio.create_task(lead(follower, 2, batch_holding()))
    read, scan_records = LogReader.read, follower._keyspace.scan_records
    loaded, errors_to_raise = asyncio.Event(), [LogTruncated()]

    async def read_with_one_error(log: LogReader, *args: Any, **options: Any) -> Any:
        entries = await read(log, *args, **options)
        if entries and errors_to_raise:
            raise errors_to_raise.pop()
        return entries

    async def scan_records_slowly() -> AsyncIterator[dict[bytes, bytes]]:
        async for records in scan_records():
            yield records
        if not errors_to_raise:
            candidacies[0].last_sign_of_life -= 2 * LONG_LEASE_MS / 1000  # as if so much time had passed
            loaded.set()

    monkeypatch.setattr(LogReader, "read", read_with_one_error)
    monkeypatch.setattr(follower._keyspace, "scan_records", scan_records_slowly)
    commits = 0
    while commits < 12:
        await commit(leader, Batch({}, 100, 100, commits))
        await asyncio.sleep(LEASE_MS / 4000)
        commits += loaded.is_set()
        assert not following.done()
    following.cancel()
