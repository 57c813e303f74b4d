"""The ground on which Genie is tested with sentinels and in a cluster does what its tests take for granted."""

from __future__ import annotations

import sys

import pytest
from redis import ResponseError

from redises.cluster import running_cluster, slot_of
from redises.sentinels import running_sentinels

KEYS = [f"{{genie}}:{number}" for number in range(6)]
DIES_MS = 1_500
"""After so long a server is missed which a test lets die: long enough that no other one is."""
LIVES_MS = 3_000
"""The same where none is to be missed."""


async def test_a_master_that_dies_is_replaced_and_comes_back_as_a_replica() -> None:
    async with running_sentinels(down_after_ms=DIES_MS) as redis:
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


async def test_a_planned_failover_and_a_master_that_was_stopped_meanwhile() -> None:
    async with running_sentinels(down_after_ms=DIES_MS) as redis:
        old = await redis.master()
        new = await redis.failover()
        assert new is not old
        await redis.settled()
        new.stop()
        third = await redis.successor(new)
        new.resume()
        assert await redis.settled() is third
        assert (await new.ask("ROLE"))[0] == "slave"


async def test_a_master_without_replicas_can_be_told_to_take_nothing() -> None:
    async with running_sentinels(min_replicas_to_write=1, down_after_ms=LIVES_MS) as redis:
        master = await redis.master()
        master.call("SET", "k", "taken")
        for replica in await redis.replicas():
            replica.kill()
        with pytest.raises(ResponseError, match="NOREPLICAS"):
            master.call("SET", "k", "refused")


async def test_a_slot_moves_with_its_keys() -> None:
    async with running_cluster(node_timeout_ms=LIVES_MS) as redis:
        old = await redis.owner()
        to = next(node for node in await redis.masters() if node is not old)
        seen: list[tuple[int, int]] = []

        async def look() -> None:
            counted = [await node.ask("CLUSTER", "COUNTKEYSINSLOT", slot_of("genie")) for node in (old, to)]
            seen.append((counted[0], counted[1]))
            assert await redis.owner() is old

        for key in KEYS:
            old.call("SET", key, key)
        await redis.move("genie", to, begun=look, half=look, moved=look)
        assert seen == [(6, 0), (3, 3), (0, 6)]
        assert await redis.owner() is to
        assert [to.call("GET", key) for key in KEYS] == [key.encode() for key in KEYS]
        with pytest.raises(ResponseError, match=f"{slot_of('genie')} 127.0.0.1:{to.port}"):
            old.call("GET", KEYS[0])


async def test_a_member_that_dies_is_replaced_by_its_replica() -> None:
    async with running_cluster(node_timeout_ms=DIES_MS) as redis:
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


@pytest.mark.skipif(sys.platform != "linux", reason="the loopback has one address")
async def test_a_master_that_is_cut_off_goes_on_until_it_hears_of_the_other() -> None:
    async with running_sentinels(fronts=True, down_after_ms=DIES_MS) as redis:
        old = await redis.master()
        old.isolate()
        new = await redis.successor(old)
        old.call("SET", "k", "of the old")
        new.call("SET", "k", "of the new")
        assert old.call("GET", "k") == b"of the old"
        old.rejoin()
        assert await redis.settled() is new
        assert old.call("GET", "k") == b"of the new"
