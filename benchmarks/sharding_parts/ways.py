"""Algorithms that lock resources of several shards: one leader for all, and four that use shards."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.sharding_parts.world import FOR_EVER_MS, Shard, World, home
from genie.core import Event, Granted, Locked, Request

Done = Callable[["Job"], None]


@dataclass(eq=False)
class Job:
    """A list of resources that a client locks exclusively."""

    names: tuple[str, ...]
    priority: float = 0
    arrived_ms: float = 0
    """When its client sent the first request."""
    locked_ms: float = 0
    """When its client knew that it holds all locks."""
    attempts: int = 1
    messages: int = 0
    held: list[tuple[Shard, Request]] = field(default_factory=list)

    def idle_ms(self) -> float:
        """Return the sum of the times for which its resources were held before its client could
        begin.
        """
        return sum((self.locked_ms - shard.granted_ms[request]) * len(request.names()) for shard, request in self.held)


class Way(ABC):
    """An algorithm that locks all resources of a job. The release is the same for all: to every
    shard concurrently.
    """

    def __init__(self, world: World, shards: int, chance: random.Random) -> None:
        self.world = world
        self.shards = [Shard(world, number) for number in range(shards)]
        self.chance = chance

    def acquire(self, job: Job, done: Done) -> None:
        """Acquire all locks of a job, and call `done` when the client knows that it holds them."""
        job.arrived_ms = self.world.now
        self.begin(job, self.parts(job), done)

    def release(self, job: Job) -> None:
        """Release all locks of a job."""
        for shard, request in job.held:
            shard.release(request)
        job.messages += 2 * len(job.held)

    def parts(self, job: Job) -> list[tuple[Shard, Request]]:
        """Return the request for each shard, in the order of the shards, which is the same for all
        clients.
        """
        names: dict[int, list[str]] = {}
        for name in job.names:
            names.setdefault(home(name, len(self.shards)), []).append(name)
        return [(self.shards[number], request_of(job, names[number])) for number in sorted(names)]

    def locked(self, job: Job, done: Done) -> None:
        """Record that the client knows that it holds all locks."""
        job.locked_ms = self.world.now
        done(job)

    @abstractmethod
    def begin(self, job: Job, parts: list[tuple[Shard, Request]], done: Done) -> None:
        """Send the first message."""


def request_of(job: Job, names: list[str]) -> Request:
    """Return a request without timeouts."""
    return Request(
        exclusive=tuple(names),
        priority=job.priority,
        queue_timeout_ms=FOR_EVER_MS,
        transaction_timeout_ms=FOR_EVER_MS,
    )


class Leader(Way):
    """One leader has all resources and locks them atomically, as Genie does."""

    def begin(self, job: Job, parts: list[tuple[Shard, Request]], done: Done) -> None:  # noqa: ARG002 - not in parts
        """Send one request for all resources."""
        shard, request = self.shards[0], request_of(job, list(job.names))

        def on_reply(_: Event) -> None:
            job.held.append((shard, request))
            self.locked(job, done)

        job.messages += 2
        shard.send_request(request, on_reply)


class Ordered(Way):
    """The client locks one shard after another in a fixed order. This can't deadlock, but it holds
    locks while it waits.
    """

    hops = 1
    """Hops from one shard's reply to the next shard, beyond the one of the reply."""
    messages_a_shard = 2

    def begin(self, job: Job, parts: list[tuple[Shard, Request]], done: Done) -> None:
        """Request the locks of the first shard, and after its reply those of the next one."""
        left = iter(parts)

        def send_request(hops: int) -> None:
            shard, request = next(left, (None, None))
            if shard is None or request is None:
                self.locked(job, done)
                return

            def on_reply(_: Event) -> None:
                job.held.append((shard, request))
                send_request(self.hops)

            shard.send_request(request, on_reply, hops)
            job.messages += self.messages_a_shard

        job.messages += 2 - self.messages_a_shard
        send_request(1)


class Chained(Ordered):
    """Like `Ordered`, but each shard forwards the request to the next one: one hop between shards
    instead of two.
    """

    hops = 0
    messages_a_shard = 1


class Tried(Way):
    """The client requests all locks from all shards concurrently without waiting. If one rejects
    it, it releases all and retries later.
    """

    longest_pause_ms = 16.0

    def begin(self, job: Job, parts: list[tuple[Shard, Request]], done: Done) -> None:
        """Send all requests at once, with a queue timeout of 0."""
        answers = 0

        def on_reply(shard: Shard, request: Request, event: Event) -> None:
            nonlocal answers
            answers += 1
            if isinstance(event, Granted | Locked):
                job.held.append((shard, request))
            if answers == len(parts):
                judge()

        def judge() -> None:
            if len(job.held) == len(parts):
                self.locked(job, done)
                return
            self.release(job)
            job.held.clear()
            pause_ms = self.chance.uniform(0, min(self.longest_pause_ms, 2.0 ** min(job.attempts, 10)))
            job.attempts += 1
            self.world.after(pause_ms, lambda: self.begin(job, self.parts(job), done))

        for shard, request in parts:
            request.queue_timeout_ms = 0
            shard.send_request(request, lambda event, shard=shard, request=request: on_reply(shard, request, event))  # type: ignore[misc]
        job.messages += 2 * len(parts)


class Sequenced(Way):
    """All requests pass one sequencer, which forwards them to their shards concurrently. So all
    wait queues have the same order.
    """

    def __init__(self, world: World, shards: int, chance: random.Random) -> None:
        super().__init__(world, shards, chance)
        self.sequencer = Shard(world, -1)

    def begin(self, job: Job, parts: list[tuple[Shard, Request]], done: Done) -> None:
        """Send the request to the sequencer. Messages from one sender to one shard arrive in their
        order.
        """
        costs = self.world.costs

        def on_reply(shard: Shard, request: Request) -> None:
            job.held.append((shard, request))
            if len(job.held) == len(parts):
                self.locked(job, done)

        def spread() -> None:
            for shard, request in parts:
                shard.send_request(request, lambda _, shard=shard, request=request: on_reply(shard, request))  # type: ignore[misc]

        cost_ms = costs.of(len(job.names)) + (len(parts) - 1) * costs.further_us / 1_000
        self.world.after(costs.hop_ms, self.sequencer.work, cost_ms, spread)
        job.messages += 1 + 2 * len(parts)


WAYS: dict[str, type[Way]] = {
    "one leader": Leader,
    "ordered": Ordered,
    "chained": Chained,
    "try-lock": Tried,
    "sequenced": Sequenced,
}
