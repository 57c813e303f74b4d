"""Leadership balancing: three nodes, three namespaces, one Redis, and the clients of each namespace."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import msgspec
import pytest

from genie import RequestRejected, connect
from redises.cluster import running_cluster
from support.network.wire import Wire
from support.processes.servers import WAIT_S, Genie, Redis, RedisDeployment

NAMES = ("a", "b", "c")
SECRET = "a-secret-of-the-tests"  # noqa: S105 - not a real secret


SHORT_S = 2


class Cluster:
    """`genie serve` processes with the same namespaces."""

    def __init__(self, redis: RedisDeployment, stack: ExitStack, **settings: object) -> None:
        """Nodes have a long lease by default. A node that is to crash or to lose its lease gets a shorter one."""
        self.redis = redis
        self.all: list[Genie] = []
        self._stack = stack
        self.settings = {"lease": 60, "namespaces": ",".join(NAMES), **settings}

    def start(self, **settings: object) -> Genie:
        """Start another node."""
        genie = Genie(self.redis, **self.settings | settings)
        self._stack.callback(genie.kill)
        genie.start()
        self.all.append(genie)
        return genie

    def first(self) -> Genie:
        """Start the first node, and wait until it leads all namespaces."""
        for name in NAMES:
            self.redis.create_namespace(name)
        genie = self.start()
        wait_until_leading(genie, set(NAMES))
        return genie

    @property
    def addresses(self) -> list[str]:
        return [address(genie) for genie in self.all]


@contextmanager
def running_nodes(redis: RedisDeployment, **settings: object) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(redis, stack, **settings)


def address(genie: Genie) -> str:
    return f"127.0.0.1:{genie.port}"


def led_namespaces(genie: Genie) -> set[str]:
    """Return the namespaces that a node leads, according to the part of its log that was read."""
    led: set[str] = set()
    for line in genie.log:
        match line["event"]:
            case "listening":
                led = {name for name, role in line["namespaces"].items() if role == "leader"}
            case "leadership acquired":
                led.add(line["namespace"])
            case "leadership lost" | "leadership transfer started" | "leader changed":
                led.discard(line["namespace"])
            case _:
                pass
    return led


def wait_until_leading(genie: Genie, expected: set[str] | int) -> set[str]:
    """Read the log of a node until it leads exactly these namespaces, or this number of them."""
    while (led := led_namespaces(genie)) != expected and len(led) != expected:
        genie.until("")
    return led


def leader_ports(redis: Redis) -> dict[str, int]:
    """Return the port of the leader of each namespace, as stored in Redis; 0 if there is none."""
    stored = {name: redis.call("HGET", f"{{{name}}}:meta", "node") for name in NAMES}
    return {
        name: int(msgspec.json.decode(node)["address"].rpartition(":")[2]) if node else 0
        for name, node in stored.items()
    }


async def hello(genie: Genie, namespace: str, **more: object) -> Wire:
    client = await Wire.connect(genie.address)
    client.send("hello", namespace=namespace, **more)
    return client


async def connect_to(genie: Genie, namespace: str) -> Wire:
    client = await hello(genie, namespace)
    assert (await client.expect("welcome"))["namespace"] == namespace
    return client


def start_three_nodes(cluster: Cluster) -> list[Genie]:
    """Start three nodes, each of which leads one namespace. The second has a short lease."""
    first = cluster.first()
    second = cluster.start(lease=SHORT_S)
    wait_until_leading(second, 1)
    wait_until_leading(first, 2)
    third = cluster.start()
    wait_until_leading(third, 1)
    wait_until_leading(first, 1)
    assert set(leader_ports(cluster.redis).values()) == {genie.port for genie in cluster.all}
    return [first, second, third]


async def leader_of(namespace: str, among: list[Genie]) -> Genie:
    """Wait until one of these nodes leads the namespace, and return it."""
    async with asyncio.timeout(WAIT_S):
        while True:
            for genie in among:
                genie.log_so_far()
                if namespace in led_namespaces(genie):
                    return genie
            await asyncio.sleep(0.01)


async def test_each_new_node_gets_a_namespace_and_the_others_take_over_after_a_crash(redis: Redis) -> None:
    with running_nodes(redis) as cluster:
        first, second, third = start_three_nodes(cluster)
        (led_by_second,), (led_by_third,) = led_namespaces(second), led_namespaces(third)
        client = await connect_to(second, led_by_second)
        held = await client.lock("exclusive:x", transactionTimeout=600_000)
        second.kill()
        new_leader = await leader_of(led_by_second, [first, third])
        client_of_new_leader = await connect_to(new_leader, led_by_second)
        assert await client_of_new_leader.release(held) == "success"
        third.send(signal.SIGTERM)
        assert third.wait() == 0
        wait_until_leading(first, set(NAMES))
        assert led_by_third in led_namespaces(first)
        assert set(leader_ports(redis).values()) == {first.port}


async def test_an_idle_node_takes_over_after_a_crash(redis: Redis) -> None:
    with running_nodes(redis) as cluster:
        first, second, third = start_three_nodes(cluster)
        idle = cluster.start()
        for _ in NAMES:
            idle.until("replica loaded")
        second.kill()
        wait_until_leading(idle, 1)  # that of the crashed node, or another one if another node was faster
        assert set(leader_ports(redis).values()) == {first.port, third.port, idle.port}


async def test_clients_keep_their_locks_and_queue_positions_through_a_leadership_transfer(redis: Redis) -> None:
    with running_nodes(redis) as cluster:
        first = cluster.first()
        to = address(first)
        async with (
            connect(to, namespace="a", response_timeout=WAIT_S) as a,
            connect(to, namespace="b", response_timeout=WAIT_S) as b,
            connect(to, namespace="c", response_timeout=WAIT_S) as c,
        ):
            clients = {"a": a, "b": b, "c": c}
            held = {name: await client.acquire("x", transaction_timeout=600) for name, client in clients.items()}
            waiting = {
                name: asyncio.create_task(client.acquire("x", queue_timeout=600)) for name, client in clients.items()
            }
            await asyncio.gather(
                *(client.ping() for client in clients.values())
            )  # then the requests are in the wait queue
            second = await asyncio.to_thread(cluster.start)
            (moved,) = await asyncio.to_thread(wait_until_leading, second, 1)
            # The clients only know the first node, which redirects them to the leader.
            await asyncio.gather(*(client.ping() for client in clients.values()))
            for name, lock in held.items():
                assert not lock.lost.is_set()
                rows = (await clients[name].inspect(resource="x")).holders
                assert [row.id for row in rows] == [lock.id]
                await lock.release()
                other = await waiting[name]
                assert other.fence > lock.fence
                await other.release()
            wire = await connect_to(second, moved)
            wire.send("inspect", resource="x")
            assert (await wire.expect("inspected"))["holdersTotal"] == 0


class Counter:
    """A counter that is only correct if its increments exclude each other."""

    def __init__(self) -> None:
        self.value = self.steps = 0
        self.fences: list[int] = []
        self.incremented = asyncio.Event()

    async def increment_until(self, client: Any, ended: asyncio.Event) -> None:
        """Increment the counter under a lock until `ended`, with a context switch between reading and writing."""
        while not ended.is_set():
            async with client.lock("counter", queue_timeout=600, transaction_timeout=600) as lock:
                value = self.value
                await asyncio.sleep(0)
                self.fences.append(lock.fence)
                self.value = value + 1
                self.steps += 1
                self.incremented.set()

    async def wait_for_increment(self) -> None:
        """Wait until a client has acquired the lock after this call, and incremented the counter."""
        for _ in range(2):
            self.incremented.clear()
            async with asyncio.timeout(WAIT_S):
                await self.incremented.wait()


async def test_mutual_exclusion_holds_under_load_through_transfers_and_crashes(redis: Redis) -> None:
    with running_nodes(redis) as cluster:
        first = cluster.first()
        counters, ended = {name: Counter() for name in NAMES}, asyncio.Event()

        async def run_client(name: str) -> None:
            async with connect(cluster.addresses, namespace=name, response_timeout=WAIT_S) as client:
                await counters[name].increment_until(client, ended)

        async with asyncio.TaskGroup() as group:
            for name in NAMES * 3:
                group.create_task(run_client(name))
            second = await asyncio.to_thread(partial(cluster.start, lease=SHORT_S))
            await asyncio.to_thread(wait_until_leading, second, 1)
            third = await asyncio.to_thread(cluster.start)
            await asyncio.to_thread(wait_until_leading, third, 1)
            await asyncio.gather(*(counter.wait_for_increment() for counter in counters.values()))
            (led_by_second,), (led_by_third,) = led_namespaces(second), led_namespaces(third)
            second.kill()
            await leader_of(led_by_second, [first, third])
            await asyncio.gather(*(counter.wait_for_increment() for counter in counters.values()))
            third.send(signal.SIGTERM)
            assert await asyncio.to_thread(third.wait) == 0
            await leader_of(led_by_third, [first])
            await asyncio.gather(*(counter.wait_for_increment() for counter in counters.values()))
            ended.set()
        for counter in counters.values():
            assert counter.value == counter.steps
            assert counter.fences == sorted(set(counter.fences)), "each greater than the previous one"


async def test_each_node_redirects_clients_to_the_leader_of_their_namespace(redis: Redis) -> None:
    with running_nodes(redis) as cluster:
        first = cluster.first()
        second = cluster.start()
        (moved,) = wait_until_leading(second, 1)
        wait_until_leading(first, 2)
        other = min(led_namespaces(first))
        first.until("leader changed")
        wire = await hello(first, moved, session=SECRET)
        message = await wire.expect("error")
        assert (message["code"], message["leader"]) == ("unavailable", address(second))
        assert f"the namespace '{moved}'; the leader is {address(second)}" in message["message"]
        wire.send("request", resources=["exclusive:x"], ref="r")
        message = await wire.expect("error")
        assert (message["code"], message["ref"], message["leader"]) == ("unavailable", "r", address(second))
        wire.send("hello", session=SECRET, namespace=other)
        assert (await wire.expect("welcome"))["namespace"] == other
        unserved = await hello(first, "d")
        message = await unserved.expect("error")
        assert message == {
            "code": "unknown-namespace",
            "message": "this server does not serve the namespace 'd'; it serves a, b, c",
        }
        with pytest.raises(RequestRejected, match=r"does not serve the namespace .d."):
            async with connect(cluster.addresses, namespace="d", connect_timeout=2):
                pass
        wire = await Wire.connect(second.address)
        wire.send("ping")
        if moved == "a":
            await wire.expect("pong")
        else:
            assert (await wire.expect("error"))["leader"] == address(first), (
                "without a namespace it is for the default one"
            )


async def test_namespaces_are_independent(redis: Redis) -> None:
    with running_nodes(redis) as cluster:
        first = cluster.first()
        a, b = await connect_to(first, "a"), await connect_to(first, "b")
        id_in_a = await a.lock("exclusive:x", transactionName="t", transactionTimeout=600_000)
        id_in_b = await b.lock("exclusive:x", transactionName="t", transactionTimeout=600_000)
        if id_in_a != id_in_b:  # ids start at the time when leadership was acquired, and may coincide
            b.send("release", id=id_in_a)
            assert (await b.expect("error"))["code"] == "unknown-id"
        b.send("release", id=id_in_a, namespace="a")
        message = await b.expect("error")
        assert (message["code"], message["id"]) == ("bad-request", id_in_a)
        assert "namespace must be 'b', the namespace of this connection, not 'a'" in message["message"]
        for wire, id_ in ((a, id_in_a), (b, id_in_b)):
            wire.send("inspect", resource="x")
            assert [row["id"] for row in (await wire.expect("inspected"))["holders"]] == [id_]
            assert await wire.release(id_) == "success"
        session_in_a = await hello(first, "a", session=SECRET)
        assert not (await session_in_a.expect("welcome"))["resumed"]
        session_in_b = await hello(first, "b", session=SECRET)
        assert not (await session_in_b.expect("welcome"))["resumed"], "a session belongs to one namespace"


async def test_other_namespaces_are_served_while_one_cannot_commit() -> None:
    async with running_cluster() as redis_cluster:
        primaries = {name: await redis_cluster.owner(name) for name in NAMES}
        slow = primaries["a"]
        unaffected = next(name for name in NAMES if primaries[name] is not slow)
        with running_nodes(redis_cluster, lease=SHORT_S, store_timeout_ms=100) as cluster:
            genie = cluster.first()
            a, other = await connect_to(genie, "a"), await connect_to(genie, unaffected)
            held = await a.lock("exclusive:x", transactionTimeout=600_000)
            await redis_cluster.settled()
            slow.stop()
            a.send("request", resources=["exclusive:y"])
            while led_namespaces(genie) != set(NAMES) - {name for name in NAMES if primaries[name] is slow}:
                assert await other.release(await other.lock("exclusive:y")) == "success"
                genie.log_so_far()
            while (message := await a.receive()) != ("closed", {}):  # its lease expired
                assert message[1]["code"] == "unavailable", "the commit in flight was a heartbeat"
            slow.resume()
            wait_until_leading(genie, set(NAMES))
            next_client = await connect_to(genie, "a")
            assert await next_client.release(held) == "success"
            assert await other.release(await other.lock("exclusive:y")) == "success"


async def test_a_node_that_cannot_read_a_namespace_stops_and_does_not_affect_the_leader(redis: Redis) -> None:
    with running_nodes(redis) as cluster:
        first = cluster.first()
        clients = {name: await connect_to(first, name) for name in NAMES}
        redis.call("HSET", redis.call("HGET", "{b}:meta", "state").decode(), "9", '{"unknown":1}')
        second = Genie(redis, **cluster.settings)
        try:
            second.start(wait=False)
            assert await asyncio.to_thread(second.wait) == 1
        finally:
            second.kill()
        for client in clients.values():
            assert await client.release(await client.lock("exclusive:x")) == "success"
        first.log_so_far()
        assert led_namespaces(first) == set(NAMES)
