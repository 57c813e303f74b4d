"""Rejected commands: those of an outage in slices, between which other clients are served, and the fields of their errors."""

from __future__ import annotations

import asyncio
from itertools import pairwise

from genie.config import Limits
from genie.server import scheduler
from support.core.sliced_pipeline import SECRET, Client, World, exceed_store_timeout

LINES = 10_000
REQUEST = b'{"command":"request","payload":{"resources":["exclusive:b"]}}\n'


async def queue_after_hello(world: World, client: Client, lines: bytes = b"x\n" * LINES + REQUEST) -> None:
    """Queue a `hello` and very many lines after it, while a commit is in flight that exceeds the store timeout."""
    world.store.held_back = []
    Client(world).lock("a")
    await asyncio.sleep(0)
    client.send("hello", session=SECRET, sessionTimeout=60_000)
    client.connection.data_received(lines)
    exceed_store_timeout(world.pipeline)


def codes(client: Client) -> list[str]:
    return [message["payload"].get("code", "") for message in client.received]


async def test_the_commands_after_a_rejected_hello_are_rejected_in_slices() -> None:
    world = World()
    client, other = Client(world), Client(world)
    await queue_after_hello(world, client)
    counts = [0]
    while counts[-1] < LINES + 2:
        pongs = len(other.received)
        other.send("ping")
        for _ in range(3):
            await asyncio.sleep(0)
        assert len(other.received) == pongs + 1, "the other client is answered in between"
        counts.append(len(client.received))
    assert max(after - before for before, after in pairwise(counts)) <= 3 * (scheduler.MAX_BATCH + scheduler.QUANTUM)
    assert codes(client) == ["unavailable", *["bad-json"] * LINES, "unavailable"]
    world.pipeline.stop()


async def test_the_commands_after_a_rejected_hello_are_not_executed_when_the_store_is_available_again() -> None:
    world = World()
    client = Client(world)
    await queue_after_hello(world, client)
    await asyncio.sleep(0)
    assert 0 < len(client.received) < LINES
    client.lock("c")
    client.send("hello", session=SECRET, sessionTimeout=60_000)
    client.lock("d")
    world.store.acknowledge()
    await world.settle()
    for _ in range(3):  # the lines after the first `hello` are read when all earlier ones are rejected
        await asyncio.sleep(0)
    await world.settle()
    assert codes(client)[: LINES + 3] == ["unavailable", *["bad-json"] * LINES, "unavailable", "unavailable"]
    assert client.commands()[LINES + 3 :] == ["welcome", "queued", "locked"]
    assert {*world.table.uncontended} == {"a", "d"}
    world.pipeline.stop()


async def test_blank_lines_after_a_rejected_hello_get_no_error() -> None:
    world = World()
    client = Client(world)
    await queue_after_hello(world, client, b"\n \n" * LINES + b"x\n")
    for _ in range(2 * LINES // scheduler.CHUNK):
        await asyncio.sleep(0)
    assert not world.pipeline._scheduler
    assert codes(client) == ["unavailable", "bad-json"]
    world.pipeline.stop()


async def test_lines_after_a_rejected_hello_wait_for_the_replies_that_wait_for_a_commit() -> None:
    world = World()
    client = Client(world)
    client.send("hello", protocol=99)
    client.connection.outbox.append(b'{"command":"pong","payload":{}}\n')  # as a reply during a commit
    client.connection.data_received(b"x\n")
    for _ in range(5):
        await asyncio.sleep(0)
    assert client.commands() == ["error"]
    client.connection.flush()
    for _ in range(2):
        await asyncio.sleep(0)
    assert client.commands() == ["error", "pong", "error"]
    world.pipeline.stop()


async def test_a_client_that_does_not_read_its_errors_is_disconnected_and_its_locks_end_after_the_outage() -> None:
    world = World()
    client = Client(world)
    client.lock("a", onDisconnect="release")
    await world.settle()
    world.store.held_back = []
    Client(world).lock("b")
    await asyncio.sleep(0)
    client.connection.data_received(REQUEST * scheduler.CHUNK)
    client.connection.data_received(REQUEST)  # the second and last chunk of a turn
    client.connection.pause_writing()
    client.transport.unread_bytes = Limits().max_unread  # the errors of the first chunk exceed it
    exceed_store_timeout(world.pipeline)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not world.failures
    assert client.connection.closed
    assert set(world.table.uncontended) == {"a", "b"}
    world.store.acknowledge()
    await world.settle()
    assert set(world.table.uncontended) == {"b"}
    assert not world.pipeline._scheduler
    world.pipeline.stop()


async def test_the_error_of_a_release_or_extension_has_its_id_and_its_ref() -> None:
    world = World()
    client, other = Client(world), Client(world)
    world.store.held_back = []
    other.lock("a")
    await asyncio.sleep(0)
    client.send("release", id=7)
    client.send("release", id=8, ref="r")
    client.send("extend", id=9, transactionTimeout=1_000)
    exceed_store_timeout(world.pipeline)
    for _ in range(5):
        await asyncio.sleep(0)
    assert codes(client) == ["unavailable"] * 3
    found = [(message["payload"].get("id"), message["payload"].get("ref")) for message in client.received]
    assert found == [(7, None), (8, "r"), (9, None)]
    world.store.acknowledge()
    await world.settle()
    world.pipeline.stop()


async def test_the_error_of_a_release_for_another_namespace_has_its_id_and_its_ref() -> None:
    world = World()
    client = Client(world)
    client.send("release", id=7, ref="r", namespace="other")
    client.send("extend", id=8, transactionTimeout=1_000, namespace="other")
    await world.settle()
    found = [(message["payload"]["code"], message["payload"].get("id")) for message in client.received]
    assert found == [("bad-request", 7), ("bad-request", 8)]
    assert client.received[0]["payload"]["ref"] == "r"
    world.pipeline.stop()
