"""Who may lead, by the stores alone: several of them on one real Redis, at awkward moments."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from msgspec.structs import replace

from genie.config import Settings
from genie.core import HELD, Request
from genie.server.app import Server
from genie.storage.redis import keyspace
from genie.storage.redis.election import Candidacy, Decision, decide
from genie.storage.redis.keyspace import Meta
from genie.storage.redis.log import LogReader, LogTruncated
from genie.storage.redis.store import RedisStore
from genie.storage.store import Batch, LeadershipLost, Node, StateMachine
from servers import WAIT_S, Redis
from stores import commit

LEASE_MS = 300
LONG_MS = 60_000
"""The lease of who must not lose it while a test goes on."""


@pytest.fixture
async def make(redis: Redis) -> AsyncIterator[Callable[[], RedisStore]]:
    redis.found()
    async with AsyncExitStack() as stack:

        def build() -> RedisStore:
            store = RedisStore(redis.url)
            stack.push_async_callback(store.close)
            return store

        yield build


async def lead(store: RedisStore, number: int, whole: Batch, *, lease_ms: int = LEASE_MS) -> StateMachine:
    async with asyncio.timeout(WAIT_S):
        return await store.open(Node(f"here:{number}", f"here:{number}", lease_ms), lambda: whole, lambda _: None)


def holding(*ids: int, released: tuple[int, ...] = ()) -> Batch:
    requests: dict[int, Any] = dict.fromkeys(released)
    for id_ in ids:
        request = requests[id_] = Request(exclusive=(f"r{id_}",))
        request.id = request.owner = request.fence = id_
        request.state, request.since, request.since_unix_ms, request.deadline = HELD, 0.0, 0.0, 10**9
    return Batch(requests, 100, 100, 5)


def stored(redis: Redis) -> set[int]:
    return set(map(int, redis.call("HKEYS", redis.call("HGET", "{genie}:meta", "records")))) - {0}


async def test_of_two_who_have_seen_it_one_writes_anew(
    redis: Redis, make: Callable[[], RedisStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other follows; both have waited as long."""

    def with_a_short_lease(meta: Meta | None, candidacy: Candidacy, replica: Any, node: Node, now: float) -> Decision:
        """Wait at an empty namespace for a short lease, and lead for a long one."""
        return decide(meta, candidacy, replica, replace(node, lease_ms=LEASE_MS), now)

    monkeypatch.setattr("genie.storage.redis.follower.decide", with_a_short_lease)
    leader, one, other = make(), make(), make()
    await lead(leader, 1, holding(1), lease_ms=LONG_MS)
    followers = [
        asyncio.create_task(lead(store, n, holding(), lease_ms=LONG_MS)) for n, store in ((2, one), (3, other))
    ]
    await commit(leader, holding(*range(1, 50)))
    redis.call("XLEN", "{genie}:log")
    async with asyncio.timeout(WAIT_S):
        while int(redis.call("INFO", "clients")["blocked_clients"]) < 2:  # noqa: ASYNC110 - Redis has no event for it
            await asyncio.sleep(0.005)
    redis.call("FLUSHALL")
    done, waiting = await asyncio.wait(followers, return_when=asyncio.FIRST_COMPLETED, timeout=WAIT_S)
    winner = one if followers[0] in done else other
    assert len(done) == 1
    for _ in range(8):  # for longer than both have waited: the other sees that it lives
        await commit(winner, Batch({}, 100, 100, 6))
        await asyncio.sleep(LEASE_MS / 4000)
    assert not any(task.done() for task in waiting)
    assert stored(redis) == set(range(1, 50))
    for task in waiting:
        task.cancel()


async def test_who_waits_sees_that_redis_has_lost_everything_meanwhile(
    redis: Redis, make: Callable[[], RedisStore]
) -> None:
    """Somebody may have led between two looks, and live: the wait for a sign of life begins anew."""
    store = make()
    redis.call("FLUSHALL")
    assert await store._keyspace.register_candidate()
    assert not await store._keyspace.register_candidate()
    redis.call("FLUSHALL")
    assert await store._keyspace.register_candidate()
    await lead(store, 1, holding())
    assert not redis.call("EXISTS", "{genie}:candidates")


async def test_who_was_superseded_unlinks_nothing(
    redis: Redis, make: Callable[[], RedisStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    stalled, next_ = make(), make()
    reached, goes_on = asyncio.Event(), asyncio.Event()
    unlink = stalled._keyspace.collect_garbage

    async def late() -> None:
        reached.set()
        await goes_on.wait()
        await unlink()

    monkeypatch.setattr(stalled._keyspace, "collect_garbage", late)
    leading = asyncio.create_task(lead(stalled, 1, holding()))
    await reached.wait()
    state = holding(1, 2, 3)
    await lead(next_, 2, state, lease_ms=LONG_MS)
    await commit(next_, state)
    redis.call("DEL", "{genie}:meta")
    await commit(next_, Batch({}, 100, 100, 6))  # which writes it anew
    goes_on.set()
    await leading
    assert stored(redis) == {1, 2, 3}


async def test_a_clock_that_was_ahead_gives_no_right(
    redis: Redis, make: Callable[[], RedisStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who led with a higher epoch, by a wrong clock, and was away for a lease, does not write over who leads now."""
    older, newer = make(), make()
    with monkeypatch.context() as wrong:
        wrong.setattr(keyspace.time, "time_ns", lambda: 4 * 10**18)
        await lead(older, 1, holding(1, 2))
        await commit(older, holding(1, 2))
    redis.call("FLUSHALL")
    await lead(newer, 2, holding(9))
    await commit(newer, holding(9))
    assert newer._keyspace.epoch.number < older._keyspace.epoch.number
    with pytest.raises(LeadershipLost):
        await commit(older, Batch({}, 100, 100, 7))
    assert stored(redis) == {9}


async def test_who_stops_before_it_leads_hands_over(
    redis: Redis, make: Callable[[], RedisStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has taken the namespace over already, and reads."""
    server = Server(Settings(port=0, lease=600.0), store := make())
    reached = asyncio.Event()

    async def never() -> None:
        reached.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(store._keyspace, "collect_garbage", never)
    starting = asyncio.create_task(server.start())
    await reached.wait()
    assert redis.call("HGET", "{genie}:meta", "node")
    starting.cancel()
    await asyncio.wait({starting})
    await server.stop()
    assert not redis.call("HGET", "{genie}:meta", "node")


async def test_who_resigns_is_not_held_up_by_a_connection_that_has_ended(
    redis: Redis, make: Callable[[], RedisStore]
) -> None:
    """A leader calls nothing for long, and Redis may have been started again meanwhile."""
    store = make()
    await lead(store, 1, holding())
    redis.call("CLIENT", "KILL", "TYPE", "normal")
    async with asyncio.timeout(WAIT_S):
        while store._primary._connection is not None and store._primary._connection._transport is not None:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.001)
    await store.resign()
    assert not redis.call("HGET", "{genie}:meta", "node")


async def test_reading_the_records_takes_time_and_is_no_silence(
    make: Callable[[], RedisStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A follower that must read them anew does not depose a leader that lives meanwhile."""
    leader, follower = make(), make()
    await lead(leader, 1, holding(), lease_ms=LONG_MS)
    begin, made = Candidacy.__init__, list[Candidacy]()

    def seen(self: Candidacy, *args: Any) -> None:
        begin(self, *args)
        made.append(self)

    monkeypatch.setattr(Candidacy, "__init__", seen)
    following = asyncio.create_task(lead(follower, 2, holding()))
    read, load, loaded, gaps = LogReader.read, follower._keyspace.scan_records, asyncio.Event(), [LogTruncated()]

    async def with_a_gap(journal: LogReader, wait_ms: int | None) -> Any:
        found = await read(journal, wait_ms)
        if found and gaps:
            raise gaps.pop()
        return found

    async def slowly() -> AsyncIterator[dict[bytes, bytes]]:
        async for records in load():
            yield records
        if not gaps:
            made[0].last_sign_of_life -= 2 * LONG_MS / 1000  # so much time goes by
            loaded.set()

    monkeypatch.setattr(LogReader, "read", with_a_gap)
    monkeypatch.setattr(follower._keyspace, "scan_records", slowly)
    beats = 0
    while beats < 12:
        await commit(leader, Batch({}, 100, 100, beats))
        await asyncio.sleep(LEASE_MS / 4000)
        beats += loaded.is_set()
    assert not following.done()
    following.cancel()
