"""A pipeline without sockets and with a clock that the test sets, and its clients: for tests of work in slices."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from genie.config import Limits
from genie.core import LockManager
from genie.observability.stats import Stats
from genie.server.connection import Connection
from genie.server.listener import AdmissionControl
from genie.server.pipeline import Pipeline
from genie.server.turns import IterationTurns
from genie.storage.memory import MemoryStore
from genie.storage.store import Batch
from support.network.recording_transport import RecordingTransport

SLICE = 50
LOCKS = 1_000
SECRET = "secret-of-16-chars"  # noqa: S105


def exceed_store_timeout(pipeline: Pipeline) -> None:
    """Let the pipeline find that the commit in flight has taken longer than the store timeout, but not than the lease."""
    pipeline._commits._sent_at -= 2.5
    tick(pipeline)


def expire(pipeline: Pipeline) -> None:
    """Let the pipeline end what has expired now."""
    pipeline._expiry._fire(pipeline._on_expiry)


def tick(pipeline: Pipeline) -> None:
    """Let the pipeline check its commits now."""
    assert pipeline._ticker is not None
    pipeline._ticker.cancel()
    pipeline._on_tick()


class CountingStore(MemoryStore):
    """A store that keeps the live records, and the number of changes of each batch."""

    durable = True
    full = False

    def __init__(self) -> None:
        super().__init__()
        self.records: dict[int, object] = {}
        self.changes: list[int] = []
        self.held_back: list[Callable[[BaseException | None], None]] | None = None
        """Acknowledgements that `acknowledge` sends. None: each is sent at once."""

    def acknowledge(self) -> None:
        """Send the acknowledgements that were held back."""
        held_back, self.held_back = self.held_back, None
        for done in held_back or ():
            done(None)

    def commit(self, batch: Batch, done: Callable[[BaseException | None], None]) -> None:
        self.changes.append(len(batch.changes))
        for id_, change in batch.changes.items():
            if change is None or getattr(getattr(change, "state", None), "name", "") == "ENDED":
                self.records.pop(id_, None)
            else:
                self.records[id_] = change
        if self.held_back is not None:
            self.held_back.append(done)
        else:
            asyncio.get_running_loop().call_soon(done, None)


class Client:
    """A connection, and the messages that it was sent."""

    def __init__(self, world: World) -> None:
        self.received: list[dict[str, Any]] = []
        self._partial = b""
        """The incomplete last line of what was received."""
        self.connection = Connection(world.pipeline, Limits(), world.admission)
        self.transport = RecordingTransport(self._on_data)
        self.connection.connection_made(self.transport)

    def _on_data(self, data: bytes) -> None:
        *lines, self._partial = (self._partial + data).split(b"\n")
        self.received += map(json.loads, lines)

    def send(self, command: str, **payload: Any) -> None:
        self.connection.data_received(json.dumps({"command": command, "payload": payload}).encode() + b"\n")

    def lock(self, *names: str, **payload: Any) -> None:
        self.send("request", resources=[f"exclusive:{name}" for name in names], **payload)

    def commands(self) -> list[str]:
        return [message["command"] for message in self.received]


class World:
    """A pipeline whose clock the test sets."""

    def __init__(self, turns: IterationTurns | None = None) -> None:
        self.now = 0.0
        self.failures: list[BaseException] = []
        self.store = CountingStore()
        self.manager = LockManager()
        self.stats = Stats()
        self.pipeline = Pipeline(
            self.manager,
            self.store,
            Limits(),
            self.stats,
            lambda: self.now,
            self.failures.append,
            turns=turns,
        )
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


async def hold(world: World, client: Client, number: int = LOCKS, **payload: Any) -> None:
    for each in range(number):
        client.lock(f"name/{each}", transactionTimeout=3_600_000, **payload)
    await world.settle()
    assert client.commands().count("locked") == number
