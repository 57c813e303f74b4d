"""The store of a simulated world: a single Redis."""

from __future__ import annotations

from genie.testing.simulation.history import History, Message, StoreRecorder
from genie.testing.simulation.loop import Node, SimLoop
from genie.testing.simulation.redis.server import SimRedis


class OneRedis:
    """A single Redis and the recorder of its writes."""

    url = "redis://redis:6379/0"
    hosts = ("redis",)

    def __init__(self, loop: SimLoop, history: History) -> None:
        self._loop = loop
        self.master = SimRedis()
        self.redises = [self.master]
        self.recorder = StoreRecorder(self.master, history)
        self.process = loop.create_node("redis")

    @property
    def processes(self) -> list[Node]:
        """The Redis processes, which can be stopped."""
        return [self.process]

    async def start(self) -> None:
        await self._loop.spawn(self.process, self.master.serve("redis"))

    def stored_records(self) -> dict[int, Message]:
        """Return the records that the store holds now, by request id."""
        return self.recorder.stored_records()

    def detect_lost_writes(self) -> None:
        """Let the recorder compare the store with the recorded state, after a fault that may have lost writes."""
        self.recorder.detect_lost_writes()

    def heal(self) -> None:
        """Do nothing: no fault of a single Redis lasts."""

    async def wait_until_settled(self) -> None:
        """Return at once: there are no replicas that would have to follow a primary."""

    def record_final_state(self) -> None:
        """Do nothing: only several Redis servers have a final state, which selects the surviving lineage."""
