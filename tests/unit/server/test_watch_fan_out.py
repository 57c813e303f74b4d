"""Watch events of a request with many resources, for many watchers: few messages, and sent in slices."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from genie.protocol.resources import MAX_RESOURCES
from genie.server import notifier, pipeline
from genie.server.connection import Connection
from genie.server.outcome import BatchOutcome
from support.core.sliced_pipeline import Client, World

WATCHERS = 50


@pytest.fixture(name="world")
async def _world() -> World:
    return World()


@pytest.fixture(name="sent")
def _sent(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The messages with events that are added to outboxes."""
    sent: list[bytes] = []
    send_event = BatchOutcome.send_event

    def record(outcome: BatchOutcome, connection: Any, message: bytes) -> None:
        sent.append(message)
        send_event(outcome, connection, message)

    monkeypatch.setattr(BatchOutcome, "send_event", record)
    return sent


def watchers(world: World, *prefixes: str, number: int = WATCHERS) -> list[Client]:
    clients = [Client(world) for _ in range(number)]
    for client in clients:
        for prefix in prefixes:
            client.send("watch", prefix=prefix)
    return clients


async def events(world: World, client: Client) -> list[tuple[str, str]]:
    await world.settle()
    await asyncio.sleep(2 * pipeline.WATCH_FLUSH_INTERVAL_S)
    payloads = [message["payload"] for message in client.received if message["command"] == "event"]
    return [(payload["state"], payload.get("resource")) for payload in payloads]


async def test_the_events_of_a_request_are_few_messages(world: World, sent: list[bytes]) -> None:
    watching, holder = watchers(world, "", "a/"), Client(world)
    await world.settle()
    names = [f"{'ab'[each % 2]}/{each}" for each in range(MAX_RESOURCES)]
    holder.lock(*names)
    await world.settle()
    holder.send("release", id=next(iter(world.table.held)))
    await world.settle()
    assert len(sent) <= 2 * WATCHERS * (2 + sum(map(len, set(sent))) // notifier.MAX_JOINED_BYTES)
    for client in watching:
        received = await events(world, client)
        assert len(received) == 2 * MAX_RESOURCES
        assert set(received[:MAX_RESOURCES]) == {("locked", name) for name in names}
        assert set(received[MAX_RESOURCES:]) == {("unlocked", name) for name in names}


async def test_the_events_of_long_names_are_split(world: World, sent: list[bytes]) -> None:
    (watching,), holder = watchers(world, "", number=1), Client(world)
    await world.settle()
    holder.lock(*(f"{each:0500}" for each in range(MAX_RESOURCES)))
    assert len(await events(world, watching)) == MAX_RESOURCES
    assert max(map(len, sent)) < notifier.MAX_JOINED_BYTES + 1_000
    assert len(sent) > 1


async def test_lagged_is_the_last_event_of_a_request_and_sent_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifier, "MAX_JOINED_BYTES", 1_000)
    (watching,), holder = watchers(world, "", "a", number=1), Client(world)
    await world.settle()
    world.pipeline._dispatcher.watches._max_unread_bytes = 3_000
    holder.lock(*(f"{'ab'[each % 2]}/{each}" for each in range(MAX_RESOURCES)))
    received = await events(world, watching)
    assert 10 < len(received) < 100
    assert received[-1] == ("lagged", None)
    assert received.count(("lagged", None)) == 1
    assert not world.pipeline._dispatcher.watches.prefixes


@pytest.mark.parametrize("limit", [{"MAX_FLUSHED_WATCHERS": 10}, {"MAX_FLUSHED_BYTES": 1_000}])
async def test_watchers_are_flushed_in_slices(
    world: World, limit: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in limit.items():
        monkeypatch.setattr(pipeline, name, value)
    flushed, flush = [0], Connection.flush_deferred

    def count(connection: Connection) -> None:
        flushed[-1] += 1
        flush(connection)

    monkeypatch.setattr(Connection, "flush_deferred", count)
    watching, holder = watchers(world, ""), Client(world)
    await world.settle()
    holder.lock("a")
    await world.settle()
    while sum(flushed) < WATCHERS:
        flushed.append(0)
        await asyncio.sleep(0)
    assert max(flushed) <= 2 * 12
    for client in watching:
        assert await events(world, client) == [("locked", "a")]
