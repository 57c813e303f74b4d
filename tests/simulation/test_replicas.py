"""The simulated replication and sentinels: replicated writes, WAIT, elections and demotions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

from genie.storage.redis.connection import ErrorReply, RedisConnection
from genie.storage.redis.primary import Primary
from genie.storage.redis.store import RedisStore
from genie.storage.redis.url import Address, Login, RedisUrl
from genie.storage.store import Batch, Node
from genie.testing.simulation.network import Network
from simulator.replication import ReplicatedRedis, ReplicationLog
from simulator.sentinel import NAME, SENTINEL_PORT, SentinelQuorum

HOSTS = "r1", "r2", "r3"


class RedisGroup:
    """A master, two replicas and three sentinels, not yet started."""

    def __init__(self, network: Network) -> None:
        self.loop = loop = network.loop
        self.network = network
        log = ReplicationLog()
        self.redises = [ReplicatedRedis(loop, host, log, Random(host), 0.0) for host in HOSTS]
        for replica in self.redises[1:]:
            replica.master, replica.read_only = "r1", True
        self.actions: list[str] = []
        self.sentinels = SentinelQuorum(network, self.redises, Random(1), self.actions.append)

    async def start(self) -> None:
        for redis in self.redises:
            redis.start()
        for sentinel in self.sentinels.members:
            await self.loop.spawn(
                self.loop.create_node(f"sentinel {sentinel.host}", sentinel.host), self.sentinels.serve(sentinel)
            )
        self.loop.create_task(self.sentinels.monitor())
        await self.until(lambda: self.redises[0].replicas_with(0) == 2)

    async def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(1_000):
            if condition():
                return
            await asyncio.sleep(0.05)
        raise AssertionError("the condition was not met within 50 s")

    async def connect(self, host: str, port: int = 6379) -> RedisConnection:
        return await RedisConnection.open(Address(host, port), Login())

    async def master_according_to(self, host: str) -> str:
        """Return the master according to the sentinel on a host."""
        reply = await (await self.connect(host, SENTINEL_PORT)).call("SENTINEL", "MASTER", "genie")
        return dict(zip(reply[::2], reply[1::2], strict=True))[b"ip"].decode()  # type: ignore[no-any-return]


def run(network: Network, scenario: Callable[[RedisGroup], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        group = RedisGroup(network)
        await group.start()
        await scenario(group)

    network.loop.run_until_complete(main())


async def error_code(call: Coroutine[Any, Any, Any]) -> str:
    try:
        await call
    except ErrorReply as error:
        return error.code
    return ""


def test_writes_are_replicated_and_replicas_reject_writes(network: Network) -> None:
    async def scenario(group: RedisGroup) -> None:
        master, replica = await group.connect("r1"), await group.connect("r2")
        await master.call(
            "EVAL", "redis.call('HSET', KEYS[1], 'a', '1'); redis.call('SADD', KEYS[2], 'm')", 2, "h", "s"
        )
        assert await master.call("WAIT", 2, 0) == 2
        assert await replica.call("HGET", "h", "a") == b"1"
        assert await replica.call("SMEMBERS", "s") == [b"m"]
        assert await error_code(replica.call("HSET", "h", "a", "2")) == "READONLY"
        assert (
            await error_code(replica.call("EVAL", "return redis.call('HSET', KEYS[1], 'a', '2')", 1, "h")) == "READONLY"
        )
        assert await replica.call("HGET", "h", "a") == b"1"
        role, offset, replicas = await master.call("ROLE")
        assert (role, offset, len(replicas)) == (b"master", 1, 2)
        assert (await replica.call("ROLE"))[:2] == [b"slave", b"r1"]

    run(network, scenario)


def test_wait_returns_the_replicas_that_acknowledged_in_time(network: Network) -> None:
    async def scenario(group: RedisGroup) -> None:
        master = await group.connect("r1")
        group.redises[1].pause_replication()
        await master.call("HSET", "h", "a", "1")
        started_at = group.loop.time()
        assert await master.call("WAIT", 2, 300) == 1
        assert 0.3 <= group.loop.time() - started_at < 0.31
        assert await master.call("WAIT", 1, 300) == 1
        group.redises[1].resume_replication()
        assert await master.call("WAIT", 2, 300) == 2
        assert await error_code((await group.connect("r2")).call("WAIT", 1, 10)) == "ERR"

    run(network, scenario)


def test_the_replica_with_the_greatest_offset_succeeds_a_dead_master(network: Network) -> None:
    async def scenario(group: RedisGroup) -> None:
        master = await group.connect("r1")
        await master.call("HSET", "h", "a", "1")
        await master.call("WAIT", 2, 0)
        group.redises[1].pause_replication()
        await master.call("HSET", "h", "a", "2")
        await master.call("WAIT", 1, 0)
        group.loop.kill(group.redises[0].process)
        await group.until(lambda: group.redises[2].master is None)
        assert await group.master_according_to("r1") == "r3"
        connection = await group.connect("r3")
        assert await connection.call("HGET", "h", "a") == b"2"
        await connection.call("HSET", "h", "a", "3")
        group.redises[0].revive()
        await group.until(lambda: group.sentinels.is_settled and group.redises[2].replicas_with(3) == 2)
        assert await (await group.connect("r1")).call("HGET", "h", "a") == b"3"

    run(network, scenario)


def test_a_partitioned_master_loses_its_writes_when_it_is_demoted(network: Network) -> None:
    async def scenario(group: RedisGroup) -> None:
        old_master = await group.connect("r1")
        await old_master.call("HSET", "h", "a", "1")
        await old_master.call("WAIT", 2, 0)
        for other in ("r2", "r3"):
            network.partition("r1", other)
        await group.until(lambda: group.sentinels.master is not group.redises[0])
        assert await group.master_according_to("r1") == "r1"  # its sentinel is partitioned, too
        await old_master.call("HSET", "h", "a", "old")
        assert await old_master.call("WAIT", 1, 100) == 0
        new_master = await group.connect(group.sentinels.master.host)
        await new_master.call("HSET", "h", "a", "new")
        network.heal()
        await group.until(lambda: group.sentinels.is_settled and group.sentinels.master.replicas_with(2) == 2)
        assert await group.master_according_to("r1") == group.sentinels.master.host
        assert old_master._transport is None, "a demoted master closes its connections"
        assert await (await group.connect("r1")).call("HGET", "h", "a") == b"new"

    run(network, scenario)


def test_a_single_sentinel_elects_no_master(network: Network) -> None:
    async def scenario(group: RedisGroup) -> None:
        for one, other in (("r1", "r2"), ("r1", "r3"), ("r2", "r3")):
            network.partition(one, other)
        await asyncio.sleep(60)
        assert group.sentinels.master is group.redises[0]
        assert not group.actions

    run(network, scenario)


def test_after_a_requested_failover_there_are_two_masters_until_the_old_one_is_demoted(network: Network) -> None:
    async def scenario(group: RedisGroup) -> None:
        connection = await group.connect("r1")
        assert group.sentinels.fail_over()
        master = group.sentinels.master
        assert master is not group.redises[0]
        assert (await connection.call("ROLE"))[0] == b"master"
        await group.until(lambda: group.sentinels.is_settled)
        assert connection._transport is None, "a demoted master closes its connections"
        assert (await (await group.connect("r1")).call("ROLE"))[:2] == [b"slave", master.host.encode()]

    run(network, scenario)


def test_of_two_concurrent_elections_the_later_epoch_wins(network: Network) -> None:
    async def scenario(group: RedisGroup) -> None:
        assert group.sentinels.fail_over()
        for other in ("r2", "r3"):
            network.partition("r1", other)
        await group.until(lambda: bool(group.actions))
        network.heal()
        await group.until(lambda: group.sentinels.is_settled)
        assert group.actions[0].startswith(f"failover to {group.sentinels.master.host},")

    run(network, scenario)


def test_after_connecting_to_a_new_primary_no_command_goes_to_the_old_one(network: Network) -> None:
    """The old primary does not know yet that it was replaced, and would accept writes."""

    async def scenario(group: RedisGroup) -> None:
        master = Primary(RedisUrl.parse(f"redis+sentinel://{','.join(HOSTS)}/{NAME}"), "{genie}:meta")
        assert (await master.call("ROLE"))[0] == b"master"
        assert str(master.address) == "r1:6379"
        assert group.sentinels.fail_over()
        connection = await master.connect()
        await master.call("HSET", "{genie}:h", "a", "1")
        assert master.address == connection.address
        assert await connection.call("HGET", "{genie}:h", "a") == b"1"
        assert (await (await group.connect("r1")).call("ROLE"))[0] == b"master"

    run(network, scenario)


def test_a_leader_leaves_a_primary_that_the_sentinels_have_replaced(network: Network) -> None:
    """Without a commit, too: the old primary is cut off, so that nobody demotes it, and it would accept the next one."""

    async def scenario(group: RedisGroup) -> None:
        store = RedisStore(f"redis+sentinel://{','.join(HOSTS)}/{NAME}", allow_data_loss=True)
        await store.open(Node("s1:7077", "s1:7077"), Batch, lambda _: None)
        assert str(store._primary.address) == "r1:6379"
        for other in ("r2", "r3"):
            network.partition("r1", other)
        await group.until(lambda: group.sentinels.master is not group.redises[0])
        await group.until(lambda: str(store._primary.address) != "r1:6379")
        await store.close()

    run(network, scenario)


def test_a_redis_that_crashes_loses_its_last_writes_and_then_loads_its_data(network: Network) -> None:
    async def main() -> None:
        loop = network.loop
        redis = ReplicatedRedis(loop, "redis", ReplicationLog(), Random(1), 0.0)
        redis.start()
        await asyncio.sleep(0)
        connection = await RedisConnection.open(Address("redis", 6379), Login())
        for value in range(4):
            await connection.call("HSET", "h", "a", value)
            await asyncio.sleep(0.4)
        loop.kill(redis.process)
        assert redis.lose_writes_since(loop.time() - 1.0) == 2
        await asyncio.sleep(0.1)
        assert connection._transport is None
        run_id = redis.run_id
        redis.revive(loading_s=3.0)
        await asyncio.sleep(0)
        connection = await RedisConnection.open(Address("redis", 6379), Login())
        assert await error_code(connection.call("HGET", "h", "a")) == "LOADING"
        await asyncio.sleep(3.0)
        assert await connection.call("HGET", "h", "a") == b"1"
        assert (redis.offset, redis.run_id == run_id) == (2, False)

    network.loop.run_until_complete(main())
