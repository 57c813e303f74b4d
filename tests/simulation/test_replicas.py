"""Several simulated Redises and their sentinels: what goes to the replicas, what WAIT says, and who becomes the master."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

from genie.storage.redis.connection import ErrorReply, RedisConnection
from genie.storage.redis.primary import Primary
from genie.storage.redis.url import Address, Login, RedisUrl
from genie.testing.simulation.loop import SimLoop
from genie.testing.simulation.network import Network
from genie.testing.simulation.redis.replication import ReplicatedRedis, Writes
from genie.testing.simulation.redis.sentinel import NAME, SENTINEL_PORT, SentinelDiscovery

HOSTS = "r1", "r2", "r3"


class Crowd:
    """A master, two replicas and three sentinels, not yet started."""

    def __init__(self, loop: SimLoop) -> None:
        self.loop = loop
        writes = Writes()
        self.redises = [ReplicatedRedis(loop, host, writes, Random(host), 0.0) for host in HOSTS]
        for replica in self.redises[1:]:
            replica.master, replica.read_only = "r1", True
        self.done: list[str] = []
        self.sentinels = SentinelDiscovery(loop.network, self.redises, Random(1), self.done.append)

    async def start(self) -> None:
        for redis in self.redises:
            redis.start()
        for view in self.sentinels.views:
            await self.loop.spawn(self.loop.node(f"sentinel {view.host}", view.host), self.sentinels.serve(view))
        self.loop.create_task(self.sentinels.watch())
        await self.until(lambda: self.redises[0].copies(0) == 2)

    async def until(self, met: Callable[[], bool]) -> None:
        for _ in range(1_000):
            if met():
                return
            await asyncio.sleep(0.05)
        raise AssertionError("it never came")

    async def link(self, host: str, port: int = 6379) -> RedisConnection:
        return await RedisConnection.open(Address(host, port), Login())

    async def named(self, host: str) -> str:
        """Who is the master by the sentinel on a host."""
        answer = await (await self.link(host, SENTINEL_PORT)).call("SENTINEL", "MASTER", "genie")
        return dict(zip(answer[::2], answer[1::2], strict=True))[b"ip"].decode()  # type: ignore[no-any-return]


def live(loop: SimLoop, life: Callable[[Crowd], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        crowd = Crowd(loop)
        await crowd.start()
        await life(crowd)

    loop.run_until_complete(whole())


async def code(call: Coroutine[Any, Any, Any]) -> str:
    try:
        await call
    except ErrorReply as refused:
        return refused.code
    return ""


def test_what_is_written_is_on_the_replicas_which_take_no_writes(loop: SimLoop) -> None:
    async def life(crowd: Crowd) -> None:
        master, replica = await crowd.link("r1"), await crowd.link("r2")
        await master.call(
            "EVAL", "redis.call('HSET', KEYS[1], 'a', '1'); redis.call('SADD', KEYS[2], 'm')", 2, "h", "s"
        )
        assert await master.call("WAIT", 2, 0) == 2
        assert await replica.call("HGET", "h", "a") == b"1"
        assert await replica.call("SMEMBERS", "s") == [b"m"]
        assert await code(replica.call("HSET", "h", "a", "2")) == "READONLY"
        assert await code(replica.call("EVAL", "return redis.call('HSET', KEYS[1], 'a', '2')", 1, "h")) == "READONLY"
        assert await replica.call("HGET", "h", "a") == b"1"
        role, offset, replicas = await master.call("ROLE")
        assert (role, offset, len(replicas)) == (b"master", 1, 2)
        assert (await replica.call("ROLE"))[:2] == [b"slave", b"r1"]

    live(loop, life)


def test_wait_counts_those_who_have_it_by_then(loop: SimLoop) -> None:
    async def life(crowd: Crowd) -> None:
        master = await crowd.link("r1")
        crowd.redises[1].pause()
        await master.call("HSET", "h", "a", "1")
        began = loop.time()
        assert await master.call("WAIT", 2, 300) == 1
        assert 0.3 <= loop.time() - began < 0.31
        assert await master.call("WAIT", 1, 300) == 1
        crowd.redises[1].resume()
        assert await master.call("WAIT", 2, 300) == 2
        assert await code((await crowd.link("r2")).call("WAIT", 1, 10)) == "ERR"

    live(loop, life)


def test_a_dead_master_is_followed_by_the_replica_that_has_most(loop: SimLoop) -> None:
    async def life(crowd: Crowd) -> None:
        master = await crowd.link("r1")
        await master.call("HSET", "h", "a", "1")
        await master.call("WAIT", 2, 0)
        crowd.redises[1].pause()
        await master.call("HSET", "h", "a", "2")
        await master.call("WAIT", 1, 0)
        loop.kill(crowd.redises[0].process)
        await crowd.until(lambda: crowd.redises[2].master is None)
        assert await crowd.named("r1") == "r3"
        link = await crowd.link("r3")
        assert await link.call("HGET", "h", "a") == b"2"
        await link.call("HSET", "h", "a", "3")
        crowd.redises[0].revive()
        await crowd.until(lambda: crowd.sentinels.settled and crowd.redises[2].copies(3) == 2)
        assert await (await crowd.link("r1")).call("HGET", "h", "a") == b"3"

    live(loop, life)


def test_a_master_that_was_cut_off_loses_what_it_was_given_meanwhile(loop: SimLoop) -> None:
    async def life(crowd: Crowd) -> None:
        network: Network = loop.network
        here = await crowd.link("r1")
        await here.call("HSET", "h", "a", "1")
        await here.call("WAIT", 2, 0)
        for other in ("r2", "r3"):
            network.separate("r1", other)
        await crowd.until(lambda: crowd.sentinels.master is not crowd.redises[0])
        assert await crowd.named("r1") == "r1"  # it has not heard of the election
        await here.call("HSET", "h", "a", "here")
        assert await here.call("WAIT", 1, 100) == 0
        there = await crowd.link(crowd.sentinels.master.host)
        await there.call("HSET", "h", "a", "there")
        network.heal()
        await crowd.until(lambda: crowd.sentinels.settled and crowd.sentinels.master.copies(2) == 2)
        assert await crowd.named("r1") == crowd.sentinels.master.host
        assert here._transport is None, "who talks to it is cut off when it follows"
        assert await (await crowd.link("r1")).call("HGET", "h", "a") == b"there"

    live(loop, life)


def test_one_sentinel_alone_elects_nobody(loop: SimLoop) -> None:
    async def life(crowd: Crowd) -> None:
        for one, other in (("r1", "r2"), ("r1", "r3"), ("r2", "r3")):
            loop.network.separate(one, other)
        await asyncio.sleep(60)
        assert crowd.sentinels.master is crowd.redises[0]
        assert not crowd.done

    live(loop, life)


def test_a_failover_that_was_asked_for_leaves_two_masters_for_a_while(loop: SimLoop) -> None:
    async def life(crowd: Crowd) -> None:
        link = await crowd.link("r1")
        assert crowd.sentinels.fail_over()
        master = crowd.sentinels.master
        assert master is not crowd.redises[0]
        assert (await link.call("ROLE"))[0] == b"master"
        await crowd.until(lambda: crowd.sentinels.settled)
        assert link._transport is None, "who talks to it is cut off when it follows"
        assert (await (await crowd.link("r1")).call("ROLE"))[:2] == [b"slave", master.host.encode()]

    live(loop, life)


def test_of_two_elections_that_did_not_hear_of_each_other_the_later_counts(loop: SimLoop) -> None:
    async def life(crowd: Crowd) -> None:
        assert crowd.sentinels.fail_over()
        for other in ("r2", "r3"):
            loop.network.separate("r1", other)
        await crowd.until(lambda: bool(crowd.done))
        loop.network.heal()
        await crowd.until(lambda: crowd.sentinels.settled)
        assert crowd.done[0].startswith(f"failover to {crowd.sentinels.master.host},")

    live(loop, life)


def test_who_connects_to_another_master_calls_the_old_one_no_more(loop: SimLoop) -> None:
    """That one does not know yet that it is none, and would take what is written to it."""

    async def life(crowd: Crowd) -> None:
        master = Primary(RedisUrl.read(f"redis+sentinel://{','.join(HOSTS)}/{NAME}"), "{genie}:meta")
        assert (await master.call("ROLE"))[0] == b"master"
        assert str(master.address) == "r1:6379"
        assert crowd.sentinels.fail_over()
        link = await master.connect()
        await master.call("HSET", "{genie}:h", "a", "1")
        assert master.address == link.address
        assert await link.call("HGET", "{genie}:h", "a") == b"1"
        assert (await (await crowd.link("r1")).call("ROLE"))[0] == b"master"

    live(loop, life)
