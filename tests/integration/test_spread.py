"""Three nodes, three namespaces, one Redis: how leaders spread, what dies with a node, and what clients see of it."""

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
from servers import WAIT_S, Genie, Ground, Redis
from wire import Wire

NAMES = ("a", "b", "c")
SECRET = "a-secret-of-the-spread"  # noqa: S105 - it opens nothing


SHORT_S = 2


class Nodes:
    """`genie serve` processes of the same namespaces, and what each has said of them."""

    def __init__(self, redis: Ground, stack: ExitStack, **settings: object) -> None:
        """Their lease is long; one that is to lose it, or to be missed, has a shorter one."""
        self.redis = redis
        self.all: list[Genie] = []
        self._stack = stack
        self.settings = {"lease": 60, "namespaces": ",".join(NAMES), **settings}

    def start(self, **settings: object) -> Genie:
        """One more."""
        genie = Genie(self.redis, **self.settings | settings)
        self._stack.callback(genie.kill)
        genie.start()
        self.all.append(genie)
        return genie

    def first(self) -> Genie:
        """The first, which leads all of them."""
        for name in NAMES:
            self.redis.found(name)
        genie = self.start()
        until_leading(genie, set(NAMES))
        return genie

    @property
    def addresses(self) -> list[str]:
        return [address(genie) for genie in self.all]


@contextmanager
def nodes(redis: Ground, **settings: object) -> Iterator[Nodes]:
    with ExitStack() as stack:
        yield Nodes(redis, stack, **settings)


def address(genie: Genie) -> str:
    return f"127.0.0.1:{genie.port}"


def leads(genie: Genie) -> set[str]:
    """What it leads, by its log up to where that was read."""
    found: set[str] = set()
    for line in genie.log:
        match line["event"]:
            case "listening":
                found = {name for name, role in line["namespaces"].items() if role == "leader"}
            case "leadership acquired":
                found.add(line["namespace"])
            case "leadership lost" | "leadership transfer started" | "leader changed":
                found.discard(line["namespace"])
            case _:
                pass
    return found


def until_leading(genie: Genie, wanted: set[str] | int) -> set[str]:
    """Read its log until it leads these, or so many."""
    while (found := leads(genie)) != wanted and len(found) != wanted:
        genie.until("")
    return found


def spread(redis: Redis) -> dict[str, int]:
    """The port of who leads each namespace, by what Redis has stored."""
    stored = {name: redis.call("HGET", f"{{{name}}}:meta", "node") for name in NAMES}
    return {
        name: int(msgspec.json.decode(node)["address"].rpartition(":")[2]) if node else 0
        for name, node in stored.items()
    }


async def hello(genie: Genie, namespace: str, **more: object) -> Wire:
    client = await Wire.connect(genie.address)
    client.send("hello", namespace=namespace, **more)
    return client


async def welcomed(genie: Genie, namespace: str) -> Wire:
    client = await hello(genie, namespace)
    assert (await client.expect("welcome"))["namespace"] == namespace
    return client


def three(made: Nodes) -> list[Genie]:
    """Three nodes, each leading one. The second is soon missed when it dies."""
    first = made.first()
    second = made.start(lease=SHORT_S)
    until_leading(second, 1)
    until_leading(first, 2)
    third = made.start()
    until_leading(third, 1)
    until_leading(first, 1)
    assert set(spread(made.redis).values()) == {genie.port for genie in made.all}
    return [first, second, third]


async def leader_of(namespace: str, among: list[Genie]) -> Genie:
    """Which of these leads it, as soon as one does."""
    async with asyncio.timeout(WAIT_S):
        while True:
            for genie in among:
                genie.said()
                if namespace in leads(genie):
                    return genie
            await asyncio.sleep(0.01)


async def test_each_node_that_starts_gets_one_and_the_rest_takes_over_what_dies(redis: Redis) -> None:
    with nodes(redis) as made:
        first, second, third = three(made)
        (of_second,), (of_third,) = leads(second), leads(third)
        client = await welcomed(second, of_second)
        held = await client.lock("exclusive:x", transactionTimeout=600_000)
        second.kill()
        taker = await leader_of(of_second, [first, third])
        check = await welcomed(taker, of_second)
        assert await check.release(held) == "success"
        third.send(signal.SIGTERM)
        assert third.wait() == 0
        until_leading(first, set(NAMES))
        assert of_third in leads(first)
        assert set(spread(redis).values()) == {first.port}


async def test_an_idle_node_gets_what_dies(redis: Redis) -> None:
    with nodes(redis) as made:
        first, second, third = three(made)
        idle = made.start()
        for _ in NAMES:
            idle.until("replica caught up")
        second.kill()
        until_leading(idle, 1)  # what has died, or another for it where somebody else was faster
        assert set(spread(redis).values()) == {first.port, third.port, idle.port}


async def test_clients_go_on_through_a_hand_over_with_what_they_hold(redis: Redis) -> None:
    with nodes(redis) as made:
        first = made.first()
        to = address(first)
        async with (
            connect(to, namespace="a") as a,
            connect(to, namespace="b") as b,
            connect(to, namespace="c") as c,
        ):
            clients = {"a": a, "b": b, "c": c}
            held = {name: await client.acquire("x", transaction_timeout=600) for name, client in clients.items()}
            waiting = {
                name: asyncio.create_task(client.acquire("x", queue_timeout=600)) for name, client in clients.items()
            }
            await asyncio.gather(*(client.ping() for client in clients.values()))  # so they wait by now
            second = await asyncio.to_thread(made.start)
            (moved,) = await asyncio.to_thread(until_leading, second, 1)
            # The clients know the first node alone: it tells them who leads now.
            await asyncio.gather(*(client.ping() for client in clients.values()))
            for name, lock in held.items():
                assert not lock.lost.is_set()
                rows = (await clients[name].inspect(resource="x")).holders
                assert [row.id for row in rows] == [lock.id]
                await lock.release()
                other = await waiting[name]
                assert other.fence > lock.fence
                await other.release()
            wire = await welcomed(second, moved)
            wire.send("inspect", resource="x")
            assert (await wire.expect("inspected"))["holdersTotal"] == 0


class Counter:
    """What nobody may write at the same time as another."""

    def __init__(self) -> None:
        self.value = self.steps = 0
        self.fences: list[int] = []
        self.enough = asyncio.Event()

    async def count(self, client: Any, ended: asyncio.Event) -> None:
        """Add one, again and again, with others' turns between reading and writing."""
        while not ended.is_set():
            async with client.lock("counter", queue_timeout=600, transaction_timeout=600) as lock:
                value = self.value
                await asyncio.sleep(0)
                self.fences.append(lock.fence)
                self.value = value + 1
                self.steps += 1
                self.enough.set()

    async def goes_on(self) -> None:
        """Wait until somebody has counted who began after this."""
        for _ in range(2):
            self.enough.clear()
            async with asyncio.timeout(WAIT_S):
                await self.enough.wait()


async def test_under_load_nothing_is_lost_by_any_move(redis: Redis) -> None:
    with nodes(redis) as made:
        first = made.first()
        counters, ended = {name: Counter() for name in NAMES}, asyncio.Event()

        async def work(name: str) -> None:
            async with connect(made.addresses, namespace=name) as client:
                await counters[name].count(client, ended)

        async with asyncio.TaskGroup() as group:
            for name in NAMES * 3:
                group.create_task(work(name))
            second = await asyncio.to_thread(partial(made.start, lease=SHORT_S))
            await asyncio.to_thread(until_leading, second, 1)
            third = await asyncio.to_thread(made.start)
            await asyncio.to_thread(until_leading, third, 1)
            await asyncio.gather(*(counter.goes_on() for counter in counters.values()))
            (of_second,), (of_third,) = leads(second), leads(third)
            second.kill()
            await leader_of(of_second, [first, third])
            await asyncio.gather(*(counter.goes_on() for counter in counters.values()))
            third.send(signal.SIGTERM)
            assert await asyncio.to_thread(third.wait) == 0
            await leader_of(of_third, [first])
            await asyncio.gather(*(counter.goes_on() for counter in counters.values()))
            ended.set()
        for counter in counters.values():
            assert counter.value == counter.steps
            assert counter.fences == sorted(set(counter.fences)), "each greater than the one before"


async def test_what_a_raw_client_is_told_on_each_node(redis: Redis) -> None:
    with nodes(redis) as made:
        first = made.first()
        second = made.start()
        (moved,) = until_leading(second, 1)
        until_leading(first, 2)
        other = min(leads(first))
        first.until("leader changed")
        wire = await hello(first, moved, session=SECRET)
        told = await wire.expect("error")
        assert (told["code"], told["leader"]) == ("unavailable", address(second))
        assert f"the namespace '{moved}'; its leader is {address(second)}" in told["message"]
        wire.send("request", resources=["exclusive:x"], ref="r")
        told = await wire.expect("error")
        assert (told["code"], told["ref"], told["leader"]) == ("unavailable", "r", address(second))
        wire.send("hello", session=SECRET, namespace=other)
        assert (await wire.expect("welcome"))["namespace"] == other
        nobody = await hello(first, "d")
        told = await nobody.expect("error")
        assert told == {
            "code": "unknown-namespace",
            "message": "this server does not serve the namespace 'd'; it serves a, b, c",
        }
        with pytest.raises(RequestRejected, match=r"does not serve the namespace .d."):
            async with connect(made.addresses, namespace="d", connect_timeout=2):
                pass
        wire = await Wire.connect(second.address)
        wire.send("ping")
        if moved == "a":
            await wire.expect("pong")
        else:
            assert (await wire.expect("error"))["leader"] == address(first), "who says none means the first, a"


async def test_two_namespaces_have_nothing_in_common(redis: Redis) -> None:
    with nodes(redis) as made:
        first = made.first()
        a, b = await welcomed(first, "a"), await welcomed(first, "b")
        of_a = await a.lock("exclusive:x", transactionName="t", transactionTimeout=600_000)
        of_b = await b.lock("exclusive:x", transactionName="t", transactionTimeout=600_000)
        if of_a != of_b:  # numbers begin with the time at which each was led, and may meet
            b.send("release", id=of_a)
            assert (await b.expect("error"))["code"] == "unknown-id"
        b.send("release", id=of_a, namespace="a")
        told = await b.expect("error")
        assert (told["code"], told["id"]) == ("bad-request", of_a)
        assert "namespace must be 'b', which this connection is for, not 'a'" in told["message"]
        for wire, id_ in ((a, of_a), (b, of_b)):
            wire.send("inspect", resource="x")
            assert [row["id"] for row in (await wire.expect("inspected"))["holders"]] == [id_]
            assert await wire.release(id_) == "success"
        one = await hello(first, "a", session=SECRET)
        assert not (await one.expect("welcome"))["resumed"]
        two = await hello(first, "b", session=SECRET)
        assert not (await two.expect("welcome"))["resumed"], "a session is of one namespace"


async def test_while_one_can_t_commit_the_others_go_on() -> None:
    async with running_cluster() as cluster:
        homes = {name: await cluster.owner(name) for name in NAMES}
        slow = homes["a"]
        quick = next(name for name in NAMES if homes[name] is not slow)
        with nodes(cluster, lease=SHORT_S, store_timeout_ms=100) as made:
            genie = made.first()
            a, other = await welcomed(genie, "a"), await welcomed(genie, quick)
            held = await a.lock("exclusive:x", transactionTimeout=600_000)
            await cluster.settled()
            slow.stop()
            a.send("request", resources=["exclusive:y"])
            while leads(genie) != set(NAMES) - {name for name in NAMES if homes[name] is slow}:
                assert await other.release(await other.lock("exclusive:y")) == "success"
                genie.said()
            while (told := await a.receive()) != ("closed", {}):  # its lease ended
                assert told[1]["code"] == "unavailable", "it came while a heartbeat was under way"
            slow.resume()
            until_leading(genie, set(NAMES))
            again = await welcomed(genie, "a")
            assert await again.release(held) == "success"
            assert await other.release(await other.lock("exclusive:y")) == "success"


async def test_a_node_that_can_t_read_one_leads_none_and_disturbs_nobody(redis: Redis) -> None:
    with nodes(redis) as made:
        first = made.first()
        clients = {name: await welcomed(first, name) for name in NAMES}
        redis.call("HDEL", "{b}:meta", "node")
        second = Genie(redis, **made.settings)
        try:
            second.start(wait=False)
            assert await asyncio.to_thread(second.wait) == 1
        finally:
            second.kill()
        for client in clients.values():
            assert await client.release(await client.lock("exclusive:x")) == "success"
        first.said()
        assert leads(first) == set(NAMES)
