"""Checkpoints with a real Redis: what they write, what is trimmed, and that the leader may die at any moment."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from genie.core import Release, Request
from genie.storage.redis.checkpoint import Checkpointer
from genie.storage.redis.connection import RedisFailure
from genie.storage.redis.keyspace import Checkpoint, Keyspace
from genie.storage.store import Batch, decode_node, encode_node
from redises.group import until
from support.processes.servers import WAIT_S, Redis, running_redis
from support.storage.relay import Relay, Rule, relay
from support.storage.stores import (
    LEASE_MS,
    NAME,
    Locks,
    checkpoint_position,
    commit,
    last_position,
    locks,
    soon,
    stored,
)

RECORD = b'{"since":0,"since_unix_ms":0,"deadline":99999999,"exclusive":["x"],"fence":3}'
META, LOG = f"{{{NAME}}}:meta", f"{{{NAME}}}:log"


@pytest.fixture(scope="module")
def plain() -> Iterator[Redis]:
    with running_redis("--stream-node-max-entries", "1") as server:  # Redis trims whole nodes
        yield server


@pytest.fixture(autouse=True)
def _checkpoints_only_on_demand(plain: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    plain.call("FLUSHALL")
    monkeypatch.setattr("genie.storage.redis.checkpoint.CHECK_INTERVAL_S", 10 * WAIT_S)
    monkeypatch.setattr("genie.storage.redis.checkpoint.PART_SIZE", 2)


def checkpointer(client: Locks) -> Checkpointer:
    return client.store._checkpointer


async def release(client: Locks, *ids: int) -> None:
    """Store the releases of locks as one batch."""
    requests = {id_: client.manager.table.held[id_] for id_ in ids}
    for id_ in ids:
        client.manager.step(Release(id_), 1)
    await commit(client.store, Batch(dict(requests), client.manager.next_id, client.manager.next_fence, 1))


async def lock_many(client: Locks, count: int) -> None:
    """Store locks as one batch."""
    requests = [Request(exclusive=(f"{client.manager.next_id}/{number}",)) for number in range(count)]
    for request in requests:
        client.manager.step(request, 0)
    changes = {request.id: request for request in requests}
    await commit(client.store, Batch(dict(changes), client.manager.next_id, client.manager.next_fence, 0))


async def lock_and_lose(redis: Redis, client: Locks, *, kept: int, lost: int) -> None:
    """Store locks as two batches, the second of which Redis loses."""
    await lock_many(client, kept)
    redis.call("COPY", LOG, "early")
    await lock_many(client, lost)
    redis.call("RENAME", "early", LOG)


def state_ids(redis: Redis) -> set[int]:
    """Return the ids in the checkpointed state."""
    return {int(id_) for id_ in redis.call("HKEYS", redis.call("HGET", META, "state").decode())} - {0}


async def next_leader(redis: Redis) -> Locks:
    """Let another node take over, with the locks that it loads.

    A leader that has restored a lost `meta` has stored its long lease, for which another node would wait.
    """
    node = decode_node(redis.call("HGET", META, "node"))
    if node is not None:
        redis.call("HSET", META, "node", encode_node(replace(node, lease_ms=LEASE_MS)))
    following = Locks(redis.url)
    following.manager = (await following.open()).manager
    return following


async def held_by_the_next_leader(redis: Redis) -> set[int]:
    """Return the locks that another node loads when it takes over; the state then has exactly those after a checkpoint."""
    following = await next_leader(redis)
    held = set(following.manager.table.held)
    assert await checkpointer(following).write()
    assert state_ids(redis) == held
    assert len(redis.call("KEYS", "*:state:*")) == 1, "no part of an abandoned state is left"
    await following.store.close()
    return held


# -- what is written ------------------------------------------------------------------------------------------


async def test_locks_that_came_and_went_are_not_in_the_state(plain: Redis) -> None:
    async with relay(plain.port) as between, locks(between.url) as client:
        await lock_many(client, 5)
        await release(client, 2, 4)
        assert await checkpointer(client).write()
        assert state_ids(plain) == {1, 3, 5}
        await lock_many(client, 4)
        await release(client, 6, 7, 8, 9)
        await release(client, 1)
        before = len(between.seen)
        assert await checkpointer(client).write()
        assert state_ids(plain) == {3, 5}
        (script,) = [command for _, command in between.seen[before:] if command[0] == b"EVAL" and b"HDEL" in command[1]]
        assert script[14:] == (b"1", b"1"), "one deletion: the others were never in the state"
        assert stored(plain) == {3, 5}


async def test_after_an_interrupted_checkpoint_all_deletions_are_written(plain: Redis) -> None:
    """Its parts may have written locks that have been released since."""
    async with relay(plain.port) as between, locks(between.url) as client:
        await lock_many(client, 1)
        assert await checkpointer(client).write()
        await lock_many(client, 5)
        between.rule(Rule("EVAL", times=1))  # the first part
        between.rule(Rule("EVAL", cut="before"))
        with pytest.raises(RedisFailure):
            await checkpointer(client).write()
        assert len(state_ids(plain)) == 3
        await release(client, 2, 3, 4, 5, 6)
        assert await checkpointer(client).write()
        assert state_ids(plain) == {1}


async def test_the_log_is_trimmed_but_never_beyond_the_checkpoint(
    plain: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("genie.storage.redis.log.MAX_LOG_ENTRIES", 10)
    monkeypatch.setattr("genie.storage.redis.commit.TRIM_INTERVAL", 4)
    async with locks(plain.url) as client:
        for number in range(60):
            await soon(client.lock(f"{number}"))
        assert plain.call("XLEN", LOG) == 61, "without a checkpoint nothing may be trimmed"
        assert await checkpointer(client).write()
        for number in range(60, 100):
            await soon(client.lock(f"{number}"))
            assert stored(plain) == set(client.manager.table.held)
        ((first, _),) = plain.call("XRANGE", LOG, "-", "+", "COUNT", "1")
        assert int(first.split(b"-")[1]) == checkpoint_position(plain)[1] == 60
        assert await checkpointer(client).write()
        for number in range(100, 120):
            await soon(client.lock(f"{number}"))
        assert plain.call("XLEN", LOG) <= 21
        await soon(client.lock("the last"))
        assert stored(plain) == set(client.manager.table.held)
    assert len(await held_by_the_next_leader(plain)) == 121


async def test_the_first_checkpoint_has_the_log_of_former_leaders(plain: Redis) -> None:
    async with locks(plain.url) as former:
        await lock_many(former, 4)
        assert await checkpointer(former).write()
        await release(former, 2)
        await lock_many(former, 1)
    client = await next_leader(plain)
    await lock_many(client, 1)
    await release(client, 3)
    assert await checkpointer(client).write()
    assert state_ids(plain) == {1, 4, 5, 6}
    assert stored(plain) == {1, 4, 5, 6}
    await client.store.close()


async def test_a_leader_restores_what_the_log_of_a_former_leader_lacks(plain: Redis) -> None:
    """The leader has read that log when it took over. Without the missing entry, no other node could load the state."""
    async with locks(plain.url) as former:
        await lock_many(former, 1)
        (lost,) = plain.call("XREVRANGE", LOG, "+", "-", "COUNT", "1")
        await lock_many(former, 1)
    client = await next_leader(plain)
    await lock_many(client, 1)
    plain.call("XDEL", LOG, lost[0].decode())
    assert not await checkpointer(client).write()
    await lock_many(client, 1)
    held = set(client.manager.table.held)
    assert len(held) == 4
    await client.store.close()
    assert await held_by_the_next_leader(plain) == held


class Parts:
    """Writes single parts of a checkpoint, as a checkpointer does."""

    def __init__(self, redis: Redis, keyspace: Keyspace) -> None:
        self._redis = redis
        self._keyspace = keyspace
        self.last = checkpoint_position(redis)
        self.new = Checkpoint(last_position(redis), Batch())
        self.state = redis.call("HGET", META, "state").decode()

    async def write(
        self, attempt: int, part: int, deleted: list[bytes], written: dict[bytes, bytes], *, is_last: bool = False
    ) -> bytes:
        return await self._keyspace.write_checkpoint(
            self.last, self.new, attempt, part, deleted, written, is_last_part=is_last
        )

    def records(self) -> dict[bytes, bytes]:
        records = dict(self._redis.call("HGETALL", self.state))
        del records[b"0"]
        return records


async def test_the_parts_of_a_checkpoint_are_accepted_in_order_only(plain: Redis) -> None:
    """A late part of an earlier attempt has older records. Without the part before it, the state would lack changes."""
    async with locks(plain.url) as client:
        await soon(client.lock("a"))
        parts = Parts(plain, client.store._keyspace)
        assert await parts.write(2, 2, [], {b"2": b"without the first part"}) == b"late"
        assert await parts.write(2, 1, [], {b"1": b"new"}) == b"ok"
        assert await parts.write(1, 1, [], {b"1": b"old", b"2": b"old"}) == b"late"
        assert await parts.write(1, 2, [b"1"], {}, is_last=True) == b"late"
        assert await parts.write(2, 1, [b"1"], {}) == b"late"
        assert await parts.write(2, 3, [b"1"], {}) == b"late"
        assert parts.records() == {b"1": b"new"}
        assert await parts.write(2, 2, [b"1"], {b"2": b"x"}) == b"ok"
        assert await parts.write(3, 1, [b"2"], {}) == b"ok"
        assert await parts.write(2, 3, [], {b"2": b"x"}, is_last=True) == b"late"
        assert parts.records() == {}
        assert await parts.write(3, 2, [], {b"3": RECORD}, is_last=True) == b"ok"
        assert Checkpoint.decode(plain.call("HGET", META, "checkpoint")) == parts.new
        assert await parts.write(4, 1, [], {}) == b"moved", "it continues a checkpoint that is not the last one"
    following = await next_leader(plain)
    parts = Parts(plain, following.store._keyspace)
    assert await parts.write(1, 1, [], {b"4": b"x"}) == b"ok", "each leader counts its own attempts"
    await following.store.close()


async def test_a_part_is_rejected_by_a_redis_that_was_rolled_back_or_has_another_leader(plain: Redis) -> None:
    async with locks(plain.url) as client:
        await soon(client.lock("a"))
        plain.call("COPY", LOG, "early")
        await soon(client.lock("b"))
        parts = Parts(plain, client.store._keyspace)
        plain.call("RENAME", LOG, "late")

        async def rejected(reason: bytes) -> None:
            before = plain.call("HGETALL", META), plain.call("HGETALL", parts.state)
            for is_last in (False, True):
                assert await parts.write(1, 1, [b"1"], {b"1": b"x"}, is_last=is_last) == reason
            assert (plain.call("HGETALL", META), plain.call("HGETALL", parts.state)) == before

        await rejected(b"lost")  # without a log
        plain.call("RENAME", "early", LOG)
        await rejected(b"lost")
        plain.call("RENAME", "late", LOG)
        plain.call("HDEL", parts.state, "0")
        await rejected(b"no state")
        plain.call("HSET", parts.state, "0", "")
        nonce = plain.call("HGET", META, "nonce")
        plain.call("HSET", META, "nonce", "other")
        await rejected(b"other")
        plain.call("HSET", META, "nonce", nonce.decode())
        assert await parts.write(1, 1, [], {b"1": b"x"}) == b"ok"


async def test_a_checkpoint_that_redis_has_lost_is_read_from_the_log_again(plain: Redis) -> None:
    """Redis may lose the end of its file, with a checkpoint but without any commit."""
    async with locks(plain.url) as client:
        await lock_many(client, 3)
        assert await checkpointer(client).write()
        state, checkpoint = (plain.call("HGET", META, field).decode() for field in ("state", "checkpoint"))
        plain.call("COPY", state, "early")
        await release(client, 2)
        await lock_many(client, 1)
        assert await checkpointer(client).write()
        plain.call("RENAME", "early", state)
        plain.call("HSET", META, "checkpoint", checkpoint)
        await lock_many(client, 1)
        assert not await checkpointer(client).write()
        assert stored(plain) == {1, 3, 4, 5}
        assert await checkpointer(client).write()
        assert stored(plain) == state_ids(plain) == {1, 3, 4, 5}


async def test_a_lost_state_is_restored_by_the_leader_and_never_taken_for_an_empty_one(plain: Redis) -> None:
    async with locks(plain.url) as client:
        await soon(client.lock("a"))
        await soon(client.lock("b"))
        assert await checkpointer(client).write()
        state = plain.call("HGET", META, "state").decode()
        plain.call("DEL", state)
        with pytest.raises(RedisFailure, match=r"has lost .*, the state of the last checkpoint"):
            async for _ in client.store._keyspace.scan_records():
                pass
        assert not await checkpointer(client).write()
        assert not plain.call("EXISTS", state), "a state of the later changes alone would lack the earlier locks"
        await soon(client.lock("c"))
        assert plain.call("HGET", META, "state").decode() != state
        held = set(client.manager.table.held)
        assert len(held) == 3
    assert await held_by_the_next_leader(plain) == held


async def test_a_lost_meta_is_restored_although_no_transaction_has_noticed(plain: Redis) -> None:
    """The key `meta` may be lost between EXEC and WATCH."""
    async with locks(plain.url) as client:
        await soon(client.lock("a"))
        plain.call("DEL", META)
        client.store._writer._watching = True
        assert not await checkpointer(client).write()
        await soon(client.lock("b"))
        assert plain.call("HGET", META, "node")
        held = set(client.manager.table.held)
    assert await held_by_the_next_leader(plain) == held


async def test_a_node_that_finds_a_gap_in_the_log_waits_for_the_next_checkpoint(
    plain: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("genie.storage.redis.follower.INCOMPLETE_LOG_PAUSE_S", 0.01)
    async with locks(plain.url) as client, relay(plain.port) as between:
        for name in "abc":
            await soon(client.lock(name))
            if name == "a":
                assert await checkpointer(client).write()
        epoch, _ = last_position(plain)
        plain.call("XDEL", LOG, f"{epoch}-2")
        await soon(client.lock("d"))
        following = Locks(between.url)
        with capture_logs() as lines:

            def errors() -> list[str]:
                return [line["reason"] for line in lines if line["event"] == "loading from Redis failed, retrying"]

            async def is_repeated() -> bool:
                return sum(b"HSCAN" in command for _, command in between.seen) >= 3

            opening = asyncio.create_task(following.open())
            await until("loading is repeated", is_repeated)
            assert [error.partition(",")[0] for error in errors()] == [f"{LOG} lacks the entry after {epoch}-1"]
            assert await checkpointer(client).write()
            assert set((await opening).manager.table.held) == {1, 2, 3, 4}
        await following.store.close()


# -- the leader dies at any moment ----------------------------------------------------------------------------


def kill_at(between: Relay, number: int, position: str) -> Rule:
    """Cut the leader off from Redis at the command with this number from now on, as if it died."""
    if number:
        between.rule(Rule("*", times=number))
    return between.rule(Rule("*", cut=position, kills=True))


@pytest.mark.parametrize("position", ["before", "after"])
async def test_the_leader_may_die_at_any_command_of_a_checkpoint(plain: Redis, position: str) -> None:
    number, completed, checkpoints = 0, False, set()
    while not completed:
        plain.call("FLUSHALL")
        async with relay(plain.port) as between, locks(between.url) as client:
            await lock_many(client, 5)
            assert await checkpointer(client).write()
            first = checkpoint_position(plain)
            await lock_many(client, 5)
            await release(client, 1, 2, 3, 6, 7)
            held = set(client.manager.table.held)
            cut = kill_at(between, number, position)
            try:
                await checkpointer(client).write()
            except RedisFailure:
                assert cut.met.is_set()
            completed = not cut.met.is_set()
            assert stored(plain) == held
            checkpoints.add(checkpoint_position(plain) > first)
        assert await held_by_the_next_leader(plain) == held
        number += 1
    assert number > 3, "there were several parts"
    assert checkpoints == {False, True}


@pytest.mark.parametrize("position", ["before", "after"])
async def test_the_leader_may_die_at_any_command_of_a_restore(
    plain: Redis, position: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis has either the state to which it was rolled back, or the restored one."""
    monkeypatch.setattr("genie.storage.redis.keyspace.CHUNK", 2)
    number, completed, results = 0, False, []
    while not completed:
        plain.call("FLUSHALL")
        async with relay(plain.port) as between, locks(between.url) as client:
            await lock_and_lose(plain, client, kept=3, lost=4)
            cut = kill_at(between, number, position)
            acknowledged = client.lock("last")
            lost = {1, 2, 3}
            killed = asyncio.create_task(cut.met.wait())
            await asyncio.wait({killed, acknowledged}, return_when=asyncio.FIRST_COMPLETED)
            killed.cancel()
            completed = acknowledged.done()
        plain.call("HSET", META, "node", "")  # do not wait for the lease
        held = await held_by_the_next_leader(plain)
        assert held in (lost, set(range(1, 9)))
        results.append(held != lost)
        number += 1
    assert results == sorted(results), "once restored, it stays so"
    assert results.count(False) > 4
    assert results.count(True) > 2


async def test_a_node_that_leads_again_restores_its_commits_although_a_reply_is_lost(plain: Redis) -> None:
    """Also the reply to the acquisition: the node must not take its own epoch for that of another leader."""
    number, completed = 0, False
    while not completed:
        plain.call("FLUSHALL")
        async with relay(plain.port) as between, locks(between.url) as client:
            await lock_and_lose(plain, client, kept=1, lost=1)
            if number:
                between.rule(Rule("*", times=number))
            cut = between.rule(Rule("*", cut="after"))
            state = await client.open()
            completed = not cut.met.is_set()
            assert set(state.manager.table.held) == {1, 2}
        number += 1
    assert number > 8, "there were several commands"
