"""Watch events of a request with many resources, for many watchers: few messages, and sent in slices."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from typing import Any

import pytest
from structlog.testing import capture_logs

from genie.config import Limits
from genie.core import LockManager
from genie.protocol.resources import MAX_RESOURCES
from genie.server import pipeline, watch_events
from genie.server.connection import Connection
from genie.server.outcome import BatchOutcome
from genie.server.peer import Peer
from genie.server.sessions import SessionTable
from genie.server.state_size import StateSize
from genie.server.watches import WatchRegistry
from support.core.sliced_pipeline import Client, World
from support.network.recording_transport import RecordingTransport

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


def are_events_left(world: World) -> bool:
    """True if there are events that no transport has yet."""
    busy = world.pipeline
    return bool(
        busy._dispatcher.watch_events.waiting or busy._outcome.dirty or busy._deferred._connections or busy._scheduled
    )


async def events(world: World, client: Client) -> list[tuple[str, str]]:
    await world.settle()
    while are_events_left(world):  # noqa: ASYNC110 - each iteration sends a slice
        await asyncio.sleep(0)
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
    assert len(sent) <= 2 * WATCHERS * (2 + sum(map(len, set(sent))) // watch_events.MAX_JOINED_BYTES)
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
    assert max(map(len, sent)) < watch_events.MAX_JOINED_BYTES + 1_000
    assert len(sent) > 1


async def test_lagged_is_the_last_event_of_a_request_and_sent_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_events, "MAX_JOINED_BYTES", 1_000)
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


# -- steps ----------------------------------------------------------------------------------------------


@pytest.fixture(name="steps")
def _steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Few steps in an iteration of the event loop. The result has the sent events and the lookups of each iteration."""
    monkeypatch.setattr(watch_events, "MAX_STEPS", 200)
    monkeypatch.setattr(watch_events, "SLICE", 20)
    steps = [0]
    send_event, matching = BatchOutcome.send_event, WatchRegistry.matching_prefixes

    def send(outcome: BatchOutcome, connection: Any, message: bytes) -> None:
        steps[-1] += 1
        send_event(outcome, connection, message)

    def match(watches: WatchRegistry, name: str) -> tuple[str, ...]:
        steps[-1] += len(watches.prefix_count_by_length)
        return matching(watches, name)

    monkeypatch.setattr(BatchOutcome, "send_event", send)
    monkeypatch.setattr(WatchRegistry, "matching_prefixes", match)
    return steps


async def iterate(world: World, steps: list[int]) -> None:
    """Run the event loop until no events wait."""
    for _ in range(10_000):
        steps.append(0)
        await asyncio.sleep(0)
        assert len(waiting_events(world).waiting) < 50
        if not (waiting_events(world).waiting or world.pipeline._scheduler or world.pipeline._commits.in_flight):
            return
    raise AssertionError("events wait for ever")


def waiting_events(world: World) -> watch_events.WatchEvents:
    return world.pipeline._dispatcher.watch_events


async def test_the_event_of_a_subtree_is_sent_once_to_each_watcher_in_several_iterations(
    steps: list[int], world: World
) -> None:
    watching, holder = watchers(world, number=200), Client(world)
    for number, client in enumerate(watching):
        for prefix in (f"a/{number}", f"a/b/{number}", "c"):
            client.send("watch", prefix=prefix)
    await iterate(world, steps)
    del steps[:]
    steps.append(0)
    holder.send("request", resources=["exclusive:a/**", "shared:a/b/**", "exclusive:d"])
    holder.send("release", id=1)
    await iterate(world, steps)
    assert len(list(filter(None, steps))) > 3, "in slices"
    assert max(steps) <= 2 * 200 + 20
    for client in watching:
        assert await events(world, client) == [
            (state, subtree) for state in ("locked", "unlocked") for subtree in ("a/**", "a/b/**")
        ]


async def test_the_events_of_a_request_are_sent_in_several_iterations(steps: list[int], world: World) -> None:
    """Each name has other watchers. In the end nothing is held, so that nothing but the events sets the timer."""
    watching, holder = watchers(world, "", "a", "a/"), Client(world)
    for number in range(10):
        for client in watching[number::10]:
            client.send("watch", prefix=f"b/{number}")
    for each in watching:
        each.send("unwatch", prefix="")
    await iterate(world, steps)
    names = [f"{'ab'[each % 2]}/{each % 10}{each}" for each in range(100)]
    del steps[:]
    steps.append(0)
    holder.lock(*names)
    holder.send("release", id=1)
    await iterate(world, steps)
    assert sum(map(bool, steps)) > 3
    assert max(steps) <= 2 * 200 + 20 + len(watching)
    for number, client in enumerate(watching):
        expected = [name for name in names if name.startswith(("a", f"b/{number % 10}"))]
        received = await events(world, client)
        assert len(received) == 2 * len(expected)
        assert set(received[: len(expected)]) == {("locked", name) for name in expected}
        assert set(received[len(expected) :]) == {("unlocked", name) for name in expected}


async def test_the_lookups_for_long_names_are_bounded(steps: list[int], world: World) -> None:
    (watching,), holder = watchers(world, number=1), Client(world)
    for length in range(90):
        watching.send("watch", prefix="x" * length + "y")
    watching.send("watch", prefix="x" * 100)
    await iterate(world, steps)
    del steps[:]
    steps.append(0)
    names = ["x" * 100 + f"{each}" for each in range(100)]
    holder.lock(*names)
    await iterate(world, steps)
    assert sum(steps) > 9_000
    assert max(steps) <= 2 * 200 + 20 + 91
    assert len(await events(world, watching)) == 100


async def test_a_watch_waits_for_the_events_of_earlier_changes(steps: list[int], world: World) -> None:
    watching, holder, late = watchers(world, "", number=1_000), Client(world), Client(world)
    late.send("watch", prefix="z")
    await iterate(world, steps)
    holder.lock("a")
    late.send("watch", prefix="")
    late.send("unwatch", prefix="z")
    late.send("ping")
    assert waiting_events(world).waiting
    await iterate(world, steps)
    await world.settle()
    assert await events(world, late) == []
    assert late.commands() == ["watching", "watching", "unwatched", "pong"]
    assert [row["resource"] for row in late.received[1]["payload"]["held"]] == ["a"]
    for client in watching:
        assert await events(world, client) == [("locked", "a")]


async def test_the_first_watch_of_a_connection_does_not_wait(steps: list[int], world: World) -> None:
    """It is not sent the events of changes before it, which `watching` contains already."""
    watching, holder, late = watchers(world, "", number=5_000), Client(world), Client(world)
    lost = Client(world)
    await iterate(world, steps)
    holder.lock("a")
    holder.lock("b")
    late.send("watch", prefix="")
    lost.send("watch", prefix="")
    for _ in range(4):
        await asyncio.sleep(0)
    assert late.commands() == ["watching"]
    assert waiting_events(world).waiting, "it has not waited for the others"
    watches = world.pipeline._dispatcher.watches
    assert set(watches.first_numbers) == {late.connection, lost.connection}
    lost.connection.connection_lost(None)
    for _ in range(3):
        await asyncio.sleep(0)
    assert set(watches.first_numbers) == {late.connection}
    holder.lock("c")
    await iterate(world, steps)
    assert [row["resource"] for row in late.received[0]["payload"]["held"]] == ["a", "b"]
    assert await events(world, late) == [("locked", "c")]
    for client in watching:
        assert await events(world, client) == [("locked", name) for name in "abc"]
    assert not watches.first_numbers


async def test_a_further_watch_waits_only_for_the_events_of_its_connection(steps: list[int], world: World) -> None:
    watching, holder, late = watchers(world, "a", number=5_000), Client(world), Client(world)
    late.send("watch", prefix="b/1")
    await iterate(world, steps)
    holder.lock("a/1")
    late.send("watch", prefix="a")
    late.send("unwatch", prefix="b/1")
    late.send("watch", prefix="b/1")
    for _ in range(8):
        await asyncio.sleep(0)
    assert late.commands() == ["watching", "watching", "unwatched", "watching"]
    assert waiting_events(world).waiting, "it has not waited for the others"
    holder.lock("a/2")
    holder.send("request", resources=["exclusive:b/**"])
    late.send("watch", prefix="c")
    await iterate(world, steps)
    await world.settle()
    while are_events_left(world):  # noqa: ASYNC110 - each iteration sends a slice
        await asyncio.sleep(0)
    assert late.commands()[4:] == ["event", "event", "watching"], "the events precede the reply"
    assert await events(world, late) == [("locked", "a/2"), ("locked", "b/**")]
    for client in watching:
        assert await events(world, client) == [("locked", "a/1"), ("locked", "a/2")]


async def test_few_names_of_waiting_events_are_compared_in_an_iteration(
    steps: list[int], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_events, "MAX_COMPARED_NAMES", 10)
    compared, may_match = [0], watch_events._may_match

    def count(request: Any, prefixes: tuple[str, ...]) -> bool:
        compared[-1] += 1
        return may_match(request, prefixes)

    monkeypatch.setattr(watch_events, "_may_match", count)
    watchers(world, "a", number=2_000)
    holder, late = Client(world), Client(world)
    late.send("watch", prefix="b")
    await iterate(world, steps)
    for number in range(40):
        holder.lock(f"a/{number}")
    late.send("watch", prefix="c")
    for _ in range(30):
        compared.append(0)
        await asyncio.sleep(0)
    assert late.commands() == ["watching", "watching"]
    assert waiting_events(world).waiting
    assert max(compared) == 10
    assert 30 < sum(compared) <= 40, "each once"


@pytest.mark.parametrize("seed", range(5))
async def test_random_watches_get_the_events_of_their_time(
    seed: int, steps: list[int], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each client gets an event for each change while it watched the name, in the order of the changes and of its commands."""
    chance = random.Random(seed)  # noqa: S311
    watchers(world, "a", "b", number=150)
    clients = [Client(world) for _ in range(20)]
    expected: dict[Any, list[tuple[str, str]]] = {client.connection: [] for client in clients}
    add, remove, publish = WatchRegistry.add, WatchRegistry.remove, watch_events.WatchEvents.publish

    def record_add(watches: WatchRegistry, connection: Any, prefix: str) -> str:
        expected[connection].append(("watching", prefix))
        return add(watches, connection, prefix)

    def record_remove(watches: WatchRegistry, connection: Any, prefix: str) -> None:
        expected[connection].append(("unwatched", prefix))
        remove(watches, connection, prefix)

    def record_publish(waiting: watch_events.WatchEvents, request: Any, state: str) -> None:
        (name,) = request.names()
        for connection, messages in expected.items():
            prefixes = waiting._watches.prefixes_of(connection)
            parent = name.removesuffix("**")
            if any(name.startswith(prefix) or (name != parent and prefix.startswith(parent)) for prefix in prefixes):
                messages.append((state, name))
        publish(waiting, request, state)

    await iterate(world, steps)
    monkeypatch.setattr(WatchRegistry, "add", record_add)
    monkeypatch.setattr(WatchRegistry, "remove", record_remove)
    monkeypatch.setattr(watch_events.WatchEvents, "publish", record_publish)
    holder = Client(world)
    names = ["a", "a/1", "a/1/x", "b", "b/2", "c", "c/1", "a/**", "c/**", "**"]
    waited = 0
    for _ in range(300):
        if chance.random() < 0.5:
            client = chance.choice(clients)
            command = chance.choice(["watch", "watch", "unwatch"])
            client.send(command, prefix=chance.choice(["", "a", "a/", "a/1", "b", "c", "c/1/x"]))
        elif world.table.held and chance.random() < 0.6:
            holder.send("release", id=next(iter(world.table.held)))
        else:
            holder.send("request", resources=[f"exclusive:{chance.choice(names)}"], queueTimeout=3_600_000)
        if chance.random() < 0.7:
            await asyncio.sleep(0)
        waited += bool(waiting_events(world).waiting)
    assert waited > 50
    await world.settle()
    for client in clients:
        await events(world, client)
        received = [
            (payload["state"], payload["resource"]) if command == "event" else (command, payload["prefix"])
            for command, payload in ((each["command"], each["payload"]) for each in client.received)
        ]
        assert received == expected[client.connection]


async def test_watchers_lag_if_too_many_events_wait(
    steps: list[int], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_events, "MAX_WAITING_BYTES", 100_000)
    watching, holder = watchers(world, "", "a", number=500), Client(world)
    await iterate(world, steps)
    with capture_logs() as log:
        for id_ in range(1, 201):
            holder.lock("a")
            holder.send("release", id=id_)
        await iterate(world, steps)
    for client in watching:
        received = await events(world, client)
        assert received.count(("lagged", None)) == 1
        assert received[-1] == ("lagged", None)
    assert world.pipeline._dispatcher.stats.lagged_watchers == 500
    entry = next(entry for entry in log if entry["event"] == "watchers lagged, all their watches ended")
    assert (entry["namespace"], entry["watcher_count"]) == ("genie", 500)
    assert entry["waiting_bytes"] > entry["limit_bytes"] == 100_000
    watches = world.pipeline._dispatcher.watches
    assert not any(
        (
            watches.prefixes,
            watches.prefix_count_by_length,
            watches.connections(),
            world.pipeline._dispatcher.size.watches,
        )
    )
    watching[0].send("watch", prefix="")
    await iterate(world, steps)
    holder.lock("b")
    assert (await events(world, watching[0]))[-1] == ("locked", "b")


def test_each_event_is_for_the_connections_that_watch_any_prefix_of_its_name() -> None:
    """Whatever is watched and ended, an event has each watcher once, and the lengths are those of the prefixes."""
    chance = random.Random(5)  # noqa: S311
    watches = WatchRegistry(LockManager().table, StateSize(LockManager(), SessionTable(), Limits()), 1 << 20)
    clients: list[Any] = [Peer() for _ in range(4)]
    watched: dict[int, set[str]] = {number: set() for number in range(len(clients))}
    names = ["".join(name) for size in range(4) for name in itertools.product("ab", repeat=size)]
    for _ in range(3_000):
        number, prefix = chance.randrange(len(clients)), chance.choice(names)
        action = chance.choice(["add", "add", "remove", "remove_all"] if chance.random() < 0.1 else ["add", "remove"])
        if action == "add":
            watches.add(clients[number], prefix)
            watched[number].add(prefix)
        elif action == "remove":
            watches.remove(clients[number], prefix)
            watched[number].discard(prefix)
        else:
            watches.remove_all(clients[number])
            watched[number].clear()
        name = chance.choice(names) + "x"
        found = [each for prefix in watches.matching_prefixes(name) for each in watches.prefixes[prefix]]
        expected = [clients[number] for number, of in watched.items() if name.startswith(tuple(of))]
        assert sorted(map(id, found)) == sorted(map(id, expected))
        assert watches.prefix_count_by_length == Counter(map(len, watches.prefixes))
        assert {id(each): watches.prefixes_of(each) for each in clients} == {
            id(clients[number]): of for number, of in watched.items()
        }


# -- bytes ----------------------------------------------------------------------------------------------

MAX_WRITTEN = 300_000
"""Bytes that one iteration of the event loop writes at most, if it flushes 100,000, and its steps add as many to outboxes."""


@pytest.fixture(name="written")
def _written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Few bytes of events in an iteration of the event loop. The result has the bytes that each iteration writes."""
    monkeypatch.setattr(watch_events, "MAX_STEPS", 100)
    monkeypatch.setattr(watch_events, "SLICE", 10)
    monkeypatch.setattr(pipeline, "MAX_FLUSHED_BYTES", 1_000)
    written = [0]
    write = RecordingTransport.write

    def count(transport: RecordingTransport, data: Any) -> None:
        written[-1] += len(data)
        write(transport, data)

    monkeypatch.setattr(RecordingTransport, "write", count)
    return written


async def publish_many_bytes(world: World, watching: list[Client], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all watchers have about 100,000 bytes of deferred events, which `send_deferred` sends."""
    monkeypatch.setattr(pipeline, "WATCH_FLUSH_INTERVAL_S", 3_600)
    holder = Client(world)
    holder.lock(*(f"{each:0400}" for each in range(200)))
    while not all(client.connection.watch_bytes > 90_000 for client in watching) or world.pipeline._outcome.dirty:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await world.settle()
    assert all(client.connection.deferred for client in watching)


async def send_deferred(world: World, written: list[int]) -> None:
    """Send all events, as after `WATCH_FLUSH_INTERVAL_S`."""
    del written[:]
    written.append(0)
    for _ in range(10):  # meanwhile the pipeline executes what the watchers have sent
        await asyncio.sleep(0)
        written.append(0)
    world.pipeline._deferred._flush()
    while are_events_left(world):
        written.append(0)
        await asyncio.sleep(0)
    assert sum(written) > WATCHERS * 90_000
    assert max(written) < MAX_WRITTEN


@pytest.mark.parametrize("command", ["ping", "bye", "half-close"])
async def test_watchers_that_get_a_reply_after_many_events_are_sent_them_in_slices(
    written: list[int], world: World, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    watching = watchers(world, "")
    await world.settle()
    await publish_many_bytes(world, watching, monkeypatch)
    for client in watching:
        if command == "half-close":
            client.connection.eof_received()
        else:
            client.send(command)
    await send_deferred(world, written)
    last = {"ping": "pong", "bye": "bye", "half-close": "event"}[command]
    for client in watching:
        assert client.commands().count("event") == 200
        assert client.received[-1]["command"] == last
        assert client.transport.is_ended is (command != "ping")


async def test_the_events_before_lagged_are_sent_in_slices(
    written: list[int], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All watchers lag at once."""
    watching, holder = watchers(world, "", "x"), Client(world)
    await world.settle()
    await publish_many_bytes(world, watching, monkeypatch)
    world.pipeline._dispatcher.watches._max_unread_bytes = 90_000
    holder.lock("b")
    await send_deferred(world, written)
    for client in watching:
        states = [message["payload"]["state"] for message in client.received if message["command"] == "event"]
        assert states == ["locked"] * 200 + ["lagged"]


@pytest.mark.usefixtures("written")
async def test_an_iteration_adds_a_bounded_number_of_bytes_to_outboxes(world: World, sent: list[bytes]) -> None:
    watching, holder = watchers(world, ""), Client(world)
    await world.settle()
    holder.lock(*(f"{each:0400}" for each in range(200)))
    added = []
    while are_events_left(world) or not added:
        added.append(sum(map(len, sent)))
        del sent[:]
        await asyncio.sleep(0)
    assert sum(added) > WATCHERS * 90_000
    assert max(added) < MAX_WRITTEN
    for client in watching:
        assert len(await events(world, client)) == 200


async def test_the_watches_that_end_because_of_lagging_watchers_are_steps(
    steps: list[int], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each watcher has a hundred watches. To end them takes as long as to send a hundred events."""
    watching, holder = watchers(world, "", *(f"x{each}" for each in range(99)), number=20), Client(world)
    await iterate(world, steps)
    world.pipeline._dispatcher.watches._max_unread_bytes = -1
    remove = WatchRegistry.remove_all

    def remove_all(watches: WatchRegistry, connection: Any) -> None:
        steps[-1] += len(watches.prefixes_of(connection))
        remove(watches, connection)

    monkeypatch.setattr(WatchRegistry, "remove_all", remove_all)
    del steps[:]
    steps.append(0)
    holder.lock("a")
    await iterate(world, steps)
    assert sum(steps) >= 2_000
    assert max(steps) <= 2 * 200 + 2 * 101 + 20
    for client in watching:
        assert await events(world, client) == [("lagged", None)]
