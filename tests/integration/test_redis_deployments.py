"""The Redis deployments of the tests, with sentinels and as a cluster, behave as the tests assume."""

from __future__ import annotations

import sys

import pytest
from redis import ResponseError

from redises.cluster import running_cluster, slot_of
from redises.sentinels import running_sentinels
from support.processes.servers import redis_version

KEYS = [f"{{genie}}:{number}" for number in range(6)]
DOWN_AFTER_MS = 1_500
"""When a killed process counts as down: long enough that no live one does."""
LONG_DOWN_AFTER_MS = 3_000
"""For tests in which no process may count as down."""


async def test_a_killed_master_is_replaced_and_restarts_as_a_replica() -> None:
    async with running_sentinels(down_after_ms=DOWN_AFTER_MS) as redis:
        old = await redis.master()
        old.call("SET", "k", "before")
        await redis.settled()
        old.kill()
        new = await redis.successor(old)
        assert new is not old
        assert new.call("GET", "k") == b"before"
        new.call("SET", "k", "after")
        old.restart()
        assert await redis.settled() is new
        assert old in await redis.replicas()
        assert old.call("GET", "k") == b"after"


async def test_a_requested_failover_and_the_failover_of_a_stopped_master() -> None:
    async with running_sentinels(down_after_ms=DOWN_AFTER_MS) as redis:
        old = await redis.master()
        new = await redis.failover()
        assert new is not old
        await redis.settled()
        new.stop()
        third = await redis.successor(new)
        new.resume()
        assert await redis.settled() is third
        assert (await new.ask("ROLE"))[0] == "slave"


async def test_a_master_without_replicas_can_be_configured_to_reject_writes() -> None:
    async with running_sentinels(min_replicas_to_write=1, down_after_ms=LONG_DOWN_AFTER_MS) as redis:
        master = await redis.master()
        master.call("SET", "k", "accepted")
        for replica in await redis.replicas():
            replica.kill()
        with pytest.raises(ResponseError, match="NOREPLICAS"):
            master.call("SET", "k", "rejected")


async def test_a_slot_is_migrated_with_its_keys() -> None:
    async with running_cluster(node_timeout_ms=LONG_DOWN_AFTER_MS) as redis:
        old = await redis.owner()
        to = next(node for node in await redis.masters() if node is not old)
        key_counts: list[tuple[int, int]] = []

        async def count_keys() -> None:
            counts = [await node.ask("CLUSTER", "COUNTKEYSINSLOT", slot_of("genie")) for node in (old, to)]
            key_counts.append((counts[0], counts[1]))
            assert await redis.owner() is old

        for key in KEYS:
            old.call("SET", key, key)
        await redis.move("genie", to, begun=count_keys, half=count_keys, moved=count_keys)
        assert key_counts == [(6, 0), (3, 3), (0, 6)]
        assert await redis.owner() is to
        assert [to.call("GET", key) for key in KEYS] == [key.encode() for key in KEYS]
        with pytest.raises(ResponseError, match=f"{slot_of('genie')} 127.0.0.1:{to.port}"):
            old.call("GET", KEYS[0])


async def test_a_killed_cluster_master_is_replaced_by_its_replica() -> None:
    async with running_cluster(node_timeout_ms=DOWN_AFTER_MS) as redis:
        old = await redis.owner()
        (replica,) = await redis.replicas(old)
        old.call("SET", KEYS[0], "kept")
        await redis.settled()
        old.kill()
        assert await redis.successor(old) is replica
        assert replica.call("GET", KEYS[0]) == b"kept"
        old.restart()
        await redis.settled()
        assert await redis.replicas(replica) == [old]
        assert await redis.failover() is old


@pytest.mark.skipif(sys.platform != "linux", reason="the loopback has only one address")
@pytest.mark.skipif(redis_version() < (7,), reason="Redis 6.2 has no bind-source-addr")
async def test_a_partitioned_master_accepts_writes_until_it_is_demoted() -> None:
    async with running_sentinels(fronts=True, down_after_ms=DOWN_AFTER_MS) as redis:
        old = await redis.master()
        old.isolate()
        new = await redis.successor(old)
        old.call("SET", "k", "of the old")
        new.call("SET", "k", "of the new")
        assert old.call("GET", "k") == b"of the old"
        old.rejoin()
        assert await redis.settled() is new
        assert old.call("GET", "k") == b"of the new"
