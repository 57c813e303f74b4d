"""The end of a connection or a session with many requests: in slices, between which other clients are served."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from genie.config import Limits
from genie.core import LockManager, grant
from genie.observability.stats import Stats
from genie.server import dispatcher
from genie.server.connection import Connection
from genie.server.listener import AdmissionControl
from genie.server.pipeline import Pipeline
from genie.storage.memory import MemoryStore
from genie.storage.store import Batch
from recording_transport import RecordingTransport

SLICE = 50
LOCKS = 1_000
SECRET = "secret-of-16-chars"  # noqa: S105


class CountingStore(MemoryStore):
    """A store that keeps the live records, and the number of changes of each batch."""

    durable = True
    full = False

    def __init__(self) -> None:
        super().__init__()
        self.records: dict[int, object] = {}
        self.changes: list[int] = []

    def commit(self, batch: Batch, done: Callable[[BaseException | None], None]) -> None:
        self.changes.append(len(batch.changes))
        for id_, change in batch.changes.items():
            if change is None or getattr(getattr(change, "state", None), "name", "") == "ENDED":
                self.records.pop(id_, None)
            else:
                self.records[id_] = change
        asyncio.get_running_loop().call_soon(done, None)


class Client:
    """A connection, and the messages that it was sent."""

    def __init__(self, world: World) -> None:
        self.received: list[dict[str, Any]] = []
        self.connection = Connection(world.pipeline, Limits(), world.admission)
        self.transport = RecordingTransport(self._on_data)
        self.connection.connection_made(self.transport)

    def _on_data(self, data: bytes) -> None:
        self.received += map(json.loads, data.splitlines())

    def send(self, command: str, **payload: Any) -> None:
        self.connection.data_received(json.dumps({"command": command, "payload": payload}).encode() + b"\n")

    def lock(self, *names: str, **payload: Any) -> None:
        self.send("request", resources=[f"exclusive:{name}" for name in names], **payload)

    def commands(self) -> list[str]:
        return [message["command"] for message in self.received]


class World:
    """A pipeline whose clock the test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self.failures: list[BaseException] = []
        self.store = CountingStore()
        self.manager = LockManager()
        self.stats = Stats()
        self.pipeline = Pipeline(self.manager, self.store, Limits(), self.stats, lambda: self.now, self.failures.append)
        self.admission = AdmissionControl(Limits())
        self.table = self.manager.table

    @property
    def locks(self) -> int:
        """Number of held locks and of entries in wait queues."""
        return self.table.locks + self.table.queue_entries

    async def settle(self) -> None:
        await self.pipeline.drained()
        assert not self.failures

    async def slices(self, other: Client) -> list[int]:
        """Run the event loop until nothing ends any more. Another client sends a `ping` every three iterations.

        Returns the numbers of locks that ended between two of these.
        """
        ended: list[int] = []
        for _ in range(10 * LOCKS // SLICE):
            before, answers = self.locks, len(other.received)
            other.send("ping")
            for _ in range(3):  # until the batch is acknowledged
                await asyncio.sleep(0)
            assert not self.failures
            assert len(other.received) > answers, "the other client is answered between two slices"
            ended.append(before - self.locks)
        return ended


@pytest.fixture(name="world")
async def _world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(dispatcher, "MAX_ENDED_LOCKS", SLICE)
    return World()


async def hold(world: World, client: Client, number: int = LOCKS, **payload: Any) -> None:
    for each in range(number):
        client.lock(f"name/{each}", transactionTimeout=3_600_000, **payload)
    await world.settle()
    assert client.commands().count("locked") == number


async def test_a_lost_connection_ends_in_slices(world: World) -> None:
    leaving, other = Client(world), Client(world)
    await hold(world, leaving, onDisconnect="release")
    other.lock("name/0", "name/999", queueTimeout=60_000)
    await world.settle()
    began = len(world.store.changes)
    leaving.connection.connection_lost(None)
    ended = await world.slices(other)
    assert max(ended) <= 4 * SLICE
    assert max(world.store.changes[began:]) <= 2 * SLICE, "in its turn, and as a slow command"
    assert sum(ended) == LOCKS
    assert other.commands().count("locked") == 1
    assert (world.table.locks, len(world.table.held)) == (2, 1)
    assert not world.pipeline._scheduler


async def test_requests_that_are_granted_while_their_connection_ends_end_too(world: World) -> None:
    """They are `onDisconnect: keep`, but waited when the connection ended."""
    holder, leaving, other = Client(world), Client(world), Client(world)
    await hold(world, holder)
    for number in range(LOCKS):
        leaving.lock(f"name/{number}", queueTimeout=3_600_000)
    await world.settle()
    leaving.connection.connection_lost(None)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert world.table.queue_entries > LOCKS / 2, "it has begun, and is not complete"
    oldest = next(iter(world.table.held))
    holder.send("release", id=oldest)
    await asyncio.sleep(0)
    assert any(request.names() == ("name/0",) for request in world.table.held.values()), "granted to the lost client"
    await world.slices(other)
    assert (len(world.table.held), world.table.queue_entries) == (LOCKS - 1, 0)
    assert not any(request.names() == ("name/0",) for request in world.table.held.values())
    assert len(world.store.records) == LOCKS - 1


@pytest.mark.parametrize("secret", [None, SECRET])
async def test_bye_is_answered_after_the_last_slice(world: World, secret: str | None) -> None:
    leaving, other = Client(world), Client(world)
    if secret:
        leaving.send("hello", session=secret, sessionTimeout=60_000)
    await hold(world, leaving, onDisconnect="release")
    leaving.lock("kept", transactionTimeout=3_600_000)
    await world.settle()
    began = len(world.store.changes)
    leaving.send("bye")
    leaving.lock("after")
    assert "bye" not in leaving.commands()
    ended = await world.slices(other)
    assert max(ended) <= 4 * SLICE
    assert max(world.store.changes[began:]) <= 2 * SLICE, "in its turn, and as a slow command"
    assert leaving.commands()[-LOCKS - 1 :] == ["released"] * LOCKS + ["bye"]
    assert leaving.transport.is_ended
    (kept,) = world.table.held.values()
    assert kept.names() == ("kept",)
    assert secret is None or kept.origin is None
    assert (world.pipeline.session_count, list(world.store.records)) == (0, [kept.id])


async def test_a_drain_waits_for_the_last_slice(world: World) -> None:
    leaving = Client(world)
    await hold(world, leaving, onDisconnect="release")
    leaving.send("bye")
    await world.settle()
    assert leaving.commands()[-1] == "bye"
    assert not world.table.held


async def test_a_half_closed_connection_receives_every_end_and_is_closed(world: World) -> None:
    leaving, other = Client(world), Client(world)
    await hold(world, leaving, onDisconnect="release")
    leaving.connection.write_blocked = True
    began = len(world.store.changes)
    leaving.connection.eof_received()
    ended = await world.slices(other)
    assert max(ended) <= 4 * SLICE
    assert max(world.store.changes[began:]) <= 2 * SLICE, "in its turn, and as a slow command"
    assert leaving.commands()[-LOCKS:] == ["released"] * LOCKS
    assert leaving.transport.is_ended


async def test_a_session_expires_in_slices(world: World) -> None:
    leaving, other = Client(world), Client(world)
    leaving.send("hello", session=SECRET, sessionTimeout=1_000)
    await hold(world, leaving, LOCKS, onDisconnect="release", ref=None)
    for number in range(LOCKS):
        leaving.lock(f"kept/{number}", transactionTimeout=3_600_000)
        leaving.lock(f"name/{number}", queueTimeout=3_600_000)
    await world.settle()
    leaving.connection.connection_lost(None)
    await world.settle()
    world.now, began = 2_000.0, len(world.store.changes)
    asyncio.get_running_loop().call_soon(world.pipeline._expiry._fire)
    ended = await world.slices(other)
    assert max(ended) <= 4 * SLICE
    assert max(world.store.changes[began:]) <= 2 * SLICE, "in its turn, and as a slow command"
    assert sum(ended) == 2 * LOCKS
    assert world.pipeline.session_count == 0
    assert {request.origin for request in world.table.held.values()} == {None}
    assert set(world.store.records) == set(world.table.held)
    assert len(world.table.held) == LOCKS


async def test_what_is_left_of_an_ending_session_can_be_resumed(world: World) -> None:
    leaving = Client(world)
    leaving.send("hello", session=SECRET, sessionTimeout=1_000)
    await hold(world, leaving, onDisconnect="release")
    leaving.connection.connection_lost(None)
    await world.settle()
    world.now = 2_000.0
    world.pipeline._expiry._fire()
    await asyncio.sleep(0)
    left = set(world.table.held)
    assert 0 < len(left) < LOCKS
    again = Client(world)
    again.send("hello", session=SECRET, sessionTimeout=1_000)
    await world.settle()
    assert again.received[0]["payload"]["resumed"] is True
    reported = {message["payload"]["id"] for message in again.received if message["command"] == "locked"}
    assert reported == left == set(world.table.held)
    again.lock("another")
    again.send("bye")
    await world.settle()
    assert again.commands()[-1] == "bye"
    assert len(world.table.held) == 1, "`another`, which is kept"


async def test_a_takeover_stops_the_end_of_the_session_by_bye(world: World) -> None:
    leaving = Client(world)
    leaving.send("hello", session=SECRET, sessionTimeout=1_000)
    await hold(world, leaving, onDisconnect="release")
    leaving.send("bye")
    left = set(world.table.held)
    again = Client(world)
    again.send("hello", session=SECRET, sessionTimeout=1_000)
    await world.settle()
    assert leaving.received[-1]["payload"]["code"] == "session-taken-over"
    assert leaving.transport.is_ended
    assert 0 < len(world.table.held) <= len(left)
    again.send("bye")
    await world.settle()
    assert (again.commands()[-1], len(world.table.held)) == ("bye", 0)


async def test_many_expired_requests_end_in_slices_of_locks(world: World) -> None:
    holder, other = Client(world), Client(world)
    for number in range(20):
        holder.lock(*(f"{number}/{each}" for each in range(200)), transactionTimeout=1_000)
    await world.settle()
    world.now, began = 2_000.0, len(world.store.changes)
    asyncio.get_running_loop().call_soon(world.pipeline._expiry._fire)
    ended = await world.slices(other)
    assert sum(ended) == 4_000
    assert max(world.store.changes[began:]) <= 5, "of 200 locks each"


async def test_a_release_that_grants_very_many_requests_grants_them_in_slices(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grant, "MAX_CANDIDATES", SLICE)
    holder, waiting, other = Client(world), Client(world), Client(world)
    await hold(world, holder, 1)
    for _ in range(LOCKS):
        waiting.send("request", resources=["shared:name/0"], queueTimeout=3_600_000, transactionTimeout=3_600_000)
    await world.settle()
    began = len(world.store.changes)
    holder.send("release", id=next(iter(world.table.held)))
    await world.slices(other)
    assert waiting.commands().count("locked") == LOCKS
    assert max(world.store.changes[began:]) <= SLICE + 1
    assert not world.manager.pending_grants
