"""Virtual time, and a shard: a lock manager, one processor that works through what arrives, a commit, a network."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any
from zlib import crc32

from genie.core import (
    WAITING,
    Command,
    Event,
    Expire,
    Granted,
    Locked,
    LockManager,
    Queued,
    Release,
    Released,
    Request,
)

Told = Callable[[Event], None]
"""Called when the one who asked is told: it holds all that it asked for, or its request has ended."""
FOR_EVER_MS = 2_000_000_000


@dataclass(frozen=True)
class Costs:
    """What things take. A cycle of one resource is 29 us of the processor: 34,500 a second (docs/benchmarks.md)."""

    command_us: float = 14.5
    """Of a request, or a release, for one resource."""
    further_us: float = 1.0
    """Of each further resource that it names."""
    hop_ms: float = 0.25
    """From one machine to another."""
    commit_ms: float = 0.25
    """From the decision to its being stored. Until then nobody is told. Commits go on beside each other."""

    def of(self, resources: int) -> float:
        """Milliseconds of the processor for a command that is about so many resources."""
        return (self.command_us + self.further_us * (resources - 1)) / 1_000


class World:
    """Time in milliseconds, and what is still to happen. Nothing in it knows a clock, and chance is nobody's here."""

    def __init__(self, costs: Costs | None = None) -> None:
        self.costs = costs or Costs()
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = count()

    def after(self, delay_ms: float, call: Callable[..., None], *arguments: Any) -> None:
        """Do it so much later. What falls due at one time happens in the order in which it was asked for."""
        heapq.heappush(self._due, (self.now + delay_ms, next(self._number), call, arguments))

    def run(self, until_ms: float = float("inf")) -> None:
        """Let happen what falls due until then; without a time, until nothing is left."""
        while self._due and self._due[0][0] <= until_ms:
            self.now, _, call, arguments = heapq.heappop(self._due)
            call(*arguments)


class Shard:
    """A leader: the lock manager of some of the resources, and the one processor that it has."""

    def __init__(self, world: World, number: int = 0) -> None:
        self.world = world
        self.number = number
        self.manager = LockManager()
        self.busy_ms = 0.0
        self.granted_ms: dict[Request, float] = {}
        """When it decided that a request holds. Before anybody is told, and only for what is held."""
        self.queued: Callable[[Shard, Request], None] | None = None
        """Called in the step in which a request comes to wait: it looks at the world as it is."""
        self._free_at = 0.0
        self._told: dict[Request, Told] = {}

    def ask(self, request: Request, told: Told, hops: int = 1) -> None:
        """Send it a request over so many hops, 0 from where its process is."""
        self._told[request] = told
        self.world.after(hops * self.world.costs.hop_ms, self._arrive, request, len(request.names()))

    def release(self, request: Request) -> None:
        """Send it the release of a request that was told."""
        self.world.after(self.world.costs.hop_ms, self._arrive, Release(request.id), len(request.names()))

    def work(self, cost_ms: float, call: Callable[..., None], *arguments: Any) -> None:
        """Let its processor do this behind all that has arrived before."""
        now = self.world.now
        self._free_at = max(now, self._free_at) + cost_ms
        self.busy_ms += cost_ms
        self.world.after(self._free_at - now, call, *arguments)

    def _arrive(self, command: Command, resources: int) -> None:
        self.work(self.world.costs.of(resources), self.step, command)

    def step(self, command: Command) -> None:
        """Carry a command out, now, and tell those whom it is about."""
        world = self.world
        events = self.manager.step(command, world.now)
        for event in events:
            if isinstance(event, Granted | Locked):
                self.granted_ms[event.request] = world.now
                self._tell(event, event.request)
            elif isinstance(event, Released):
                self.granted_ms.pop(event.request, None)
                if event.request in self._told:  # it waited
                    self._tell(event, event.request)
            elif isinstance(event, Queued) and event.request.state is WAITING:
                self._wait(event.request)

    def _wait(self, request: Request) -> None:
        if request.queue_timeout_ms < FOR_EVER_MS:
            self.world.after(request.deadline - self.world.now, self.step, Expire())
        if self.queued is not None:
            self.queued(self, request)

    def _tell(self, event: Event, request: Request) -> None:
        costs = self.world.costs
        self.world.after(costs.commit_ms + costs.hop_ms, self._told.pop(request), event)


def home(name: str, shards: int) -> int:
    """The number of the shard to which a resource belongs: by a hash of its name."""
    return crc32(name.encode()) % shards
