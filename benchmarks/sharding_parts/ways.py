"""The ways to lock resources that several shards have: one leader for all, and four ways over shards."""

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
    """One list of resources that somebody wants to hold at once, exclusively."""

    names: tuple[str, ...]
    priority: float = 0
    arrived_ms: float = 0
    """When its client asked first."""
    locked_ms: float = 0
    """When its client knew that it holds all of them."""
    attempts: int = 1
    messages: int = 0
    held: list[tuple[Shard, Request]] = field(default_factory=list)

    def idle_ms(self) -> float:
        """For how long its resources were held before its client could begin, in all."""
        return sum((self.locked_ms - shard.granted_ms[request]) * len(request.names()) for shard, request in self.held)


class Way(ABC):
    """How a client gets all that a job names. The release is the same for all: to every shard at once."""

    def __init__(self, world: World, shards: int, chance: random.Random) -> None:
        self.world = world
        self.shards = [Shard(world, number) for number in range(shards)]
        self.chance = chance

    def acquire(self, job: Job, done: Done) -> None:
        """Call `done` when the client holds all of it."""
        job.arrived_ms = self.world.now
        self.begin(job, self.parts(job), done)

    def release(self, job: Job) -> None:
        """Give all of it back."""
        for shard, request in job.held:
            shard.release(request)
        job.messages += 2 * len(job.held)

    def parts(self, job: Job) -> list[tuple[Shard, Request]]:
        """What it asks of each shard, in the order of the shards, which is the same for all."""
        names: dict[int, list[str]] = {}
        for name in job.names:
            names.setdefault(home(name, len(self.shards)), []).append(name)
        return [(self.shards[number], request_of(job, names[number])) for number in sorted(names)]

    def locked(self, job: Job, done: Done) -> None:
        """Its client knows that it holds all."""
        job.locked_ms = self.world.now
        done(job)

    @abstractmethod
    def begin(self, job: Job, parts: list[tuple[Shard, Request]], done: Done) -> None:
        """Send the first message."""


def request_of(job: Job, names: list[str]) -> Request:
    """A request that waits for as long as it takes."""
    return Request(
        exclusive=tuple(names),
        priority=job.priority,
        queue_timeout_ms=FOR_EVER_MS,
        transaction_timeout_ms=FOR_EVER_MS,
    )


class Leader(Way):
    """One leader has all resources and locks them in one step, as Genie does."""

    def begin(self, job: Job, parts: list[tuple[Shard, Request]], done: Done) -> None:  # noqa: ARG002 - not in parts
        """All in one request."""
        shard, request = self.shards[0], request_of(job, list(job.names))

        def told(_: Event) -> None:
            job.held.append((shard, request))
            self.locked(job, done)

        job.messages += 2
        shard.ask(request, told)


class Ordered(Way):
    """The client locks shard after shard, always in the same order. So it can't deadlock, but holds while it waits."""

    hops = 1
    """How many messages it takes from one shard's answer to the next shard, beyond the one that brings the answer."""
    messages_a_shard = 2

    def begin(self, job: Job, parts: list[tuple[Shard, Request]], done: Done) -> None:
        """Ask the first shard, and when it has answered the next one."""
        left = iter(parts)

        def ask(hops: int) -> None:
            shard, request = next(left, (None, None))
            if shard is None or request is None:
                self.locked(job, done)
                return

            def told(_: Event) -> None:
                job.held.append((shard, request))
                ask(self.hops)

            shard.ask(request, told, hops)
            job.messages += self.messages_a_shard

        job.messages += 2 - self.messages_a_shard
        ask(1)


class Chained(Ordered):
    """The same, but a shard hands the request on to the next one itself: one hop between shards instead of two."""

    hops = 0
    messages_a_shard = 1


class Tried(Way):
    """The client asks all shards at once for what is free now. Where one refuses it gives back all and tries later."""

    longest_pause_ms = 16.0

    def begin(self, job: Job, parts: list[tuple[Shard, Request]], done: Done) -> None:
        """Ask all at once, never to wait."""
        answers = 0

        def told(shard: Shard, request: Request, event: Event) -> None:
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
            shard.ask(request, lambda event, shard=shard, request=request: told(shard, request, event))  # type: ignore[misc]
        job.messages += 2 * len(parts)


class Sequenced(Way):
    """All requests pass one sequencer, which sends each on to its shards at once. So all lines have one order."""

    def __init__(self, world: World, shards: int, chance: random.Random) -> None:
        super().__init__(world, shards, chance)
        self.sequencer = Shard(world, -1)

    def begin(self, job: Job, parts: list[tuple[Shard, Request]], done: Done) -> None:
        """Send it to the sequencer. What one sends to the same shard arrives in the order in which it was sent."""
        costs = self.world.costs

        def told(shard: Shard, request: Request) -> None:
            job.held.append((shard, request))
            if len(job.held) == len(parts):
                self.locked(job, done)

        def spread() -> None:
            for shard, request in parts:
                shard.ask(request, lambda _, shard=shard, request=request: told(shard, request))  # type: ignore[misc]

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
