"""The simulated shards: virtual time, and for each shard a lock manager, one processor, a commit
delay and a network.
"""

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

OnReply = Callable[[Event], None]
"""Called when the client of a request is notified: all of it is granted, or it has ended."""
FOR_EVER_MS = 2_000_000_000


@dataclass(frozen=True)
class Costs:
    """Assumed costs of operations. A cycle of one resource takes 29 us of CPU time: 34,500 a second, about the
    rate of a server that shares its processor with Redis.
    """

    command_us: float = 14.5
    """CPU time of a request, or a release, for one resource."""
    further_us: float = 1.0
    """CPU time of each further resource in it."""
    hop_ms: float = 0.25
    """Network latency from one machine to another."""
    commit_ms: float = 0.25
    """Delay from the decision to its being stored, before which no client is notified. Commits are
    concurrent.
    """

    def of(self, resources: int) -> float:
        """Return the milliseconds of CPU time of a command with this number of resources."""
        return (self.command_us + self.further_us * (resources - 1)) / 1_000


class World:
    """Virtual time in milliseconds, and the queue of future events. Deterministic: it uses no clock
    and no random numbers.
    """

    def __init__(self, costs: Costs | None = None) -> None:
        self.costs = costs or Costs()
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = count()

    def after(self, delay_ms: float, call: Callable[..., None], *arguments: Any) -> None:
        """Schedule a call after a delay. Calls at the same time are executed in the order of their
        scheduling.
        """
        heapq.heappush(self._due, (self.now + delay_ms, next(self._number), call, arguments))

    def run(self, until_ms: float = float("inf")) -> None:
        """Execute the scheduled calls, up to a time or until none is left."""
        while self._due and self._due[0][0] <= until_ms:
            self.now, _, call, arguments = heapq.heappop(self._due)
            call(*arguments)


class Shard:
    """A leader: the lock manager of some of the resources, and its only processor."""

    def __init__(self, world: World, number: int = 0) -> None:
        self.world = world
        self.number = number
        self.manager = LockManager()
        self.busy_ms = 0.0
        self.granted_ms: dict[Request, float] = {}
        """When the shard decided that a request is granted, before its client is notified; only for
        requests that are held.
        """
        self.queued: Callable[[Shard, Request], None] | None = None
        """Called in the step in which a request begins to wait."""
        self._free_at = 0.0
        self._reply_callbacks: dict[Request, OnReply] = {}

    def send_request(self, request: Request, on_reply: OnReply, hops: int = 1) -> None:
        """Send a request over this number of network hops."""
        self._reply_callbacks[request] = on_reply
        self.world.after(hops * self.world.costs.hop_ms, self._arrive, request, len(request.names()))

    def release(self, request: Request) -> None:
        """Send the release of a request whose client was notified."""
        self.world.after(self.world.costs.hop_ms, self._arrive, Release(request.id), len(request.names()))

    def work(self, cost_ms: float, call: Callable[..., None], *arguments: Any) -> None:
        """Schedule work on the processor after all that has arrived before."""
        now = self.world.now
        self._free_at = max(now, self._free_at) + cost_ms
        self.busy_ms += cost_ms
        self.world.after(self._free_at - now, call, *arguments)

    def _arrive(self, command: Command, resources: int) -> None:
        self.work(self.world.costs.of(resources), self.step, command)

    def step(self, command: Command) -> None:
        """Execute a command now, and notify the clients of the affected requests."""
        world = self.world
        events = self.manager.step(command, world.now)
        for event in events:
            if isinstance(event, Granted | Locked):
                self.granted_ms[event.request] = world.now
                self._reply(event, event.request)
            elif isinstance(event, Released):
                self.granted_ms.pop(event.request, None)
                if event.request in self._reply_callbacks:  # it waited
                    self._reply(event, event.request)
            elif isinstance(event, Queued) and event.request.state is WAITING:
                self._wait(event.request)

    def _wait(self, request: Request) -> None:
        if request.queue_timeout_ms < FOR_EVER_MS:
            self.world.after(request.deadline - self.world.now, self.step, Expire())
        if self.queued is not None:
            self.queued(self, request)

    def _reply(self, event: Event, request: Request) -> None:
        costs = self.world.costs
        self.world.after(costs.commit_ms + costs.hop_ms, self._reply_callbacks.pop(request), event)


def home(name: str, shards: int) -> int:
    """Return the number of the shard of a resource, by a hash of its name."""
    return crc32(name.encode()) % shards
