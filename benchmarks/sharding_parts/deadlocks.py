"""Transactions that lock in steps on several shards, and a detector that merges their wait-for
graphs and aborts victims.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from benchmarks.sharding_parts.graph import Graph, cycle, merged, truth, waits_of
from benchmarks.sharding_parts.world import FOR_EVER_MS, Shard, World, home
from genie.core import WAITING, Deadlocked, Event, Release, Released, Request


@dataclass(frozen=True)
class Steps:
    """The parameters of clients in a closed loop: each transaction has several steps, each a
    request for several resources.
    """

    clients: int = 32
    transactions: int = 3_000
    steps: int = 3
    resources: int = 2
    keys: int = 400
    shared: float = 0.5
    """The share of resources that are requested in shared mode."""
    work_ms: float = 2.0
    """Mean working time after each step."""
    queue_timeout_ms: float = 10_000
    apart: bool = False
    """Whether shards report their graphs at different times within a period, so that a view is up
    to a period older.
    """
    early: float = 0.0
    """The share of transactions that release the locks of their first step before they request
    those of the last one.
    """


@dataclass
class Ends:
    """Statistics of transactions and deadlocks."""

    begun: int = 0
    ended: int = 0
    duration_ms: float = 0
    at_once: int = 0
    """Requests that a shard has rejected in the step of their arrival, because it saw the whole
    cycle.
    """
    gathered: int = 0
    """Requests that the detector has aborted because of the merged graph."""
    needless: int = 0
    """Of these: avoidable by a queue rearrangement, since there was no cycle of held locks when the
    victim was chosen.
    """
    phantom: int = 0
    """Of these: phantom deadlocks, without any cycle."""
    timed_out: int = 0
    rearrangements: int = 0
    stuck_ms: list[float] = field(default_factory=list)
    """The times from the moment in which a cycle over shards closed until one of its members was
    aborted or had timed out, sorted.
    """


class Transaction:
    """A transaction, from its first request until it succeeds; it is retried after it was aborted."""

    def __init__(self, name: str, wanted: list[dict[str, bool]], early: bool) -> None:
        self.name = name
        self.tries = 0
        self.wanted = wanted
        """For each step, the resources and whether each is requested in exclusive mode."""
        self.early = early
        self.held: list[list[tuple[Shard, Request]]] = []
        self.asks: tuple[Shard, Request] | None = None
        self.stuck_since_ms: float | None = None


class Steppers:
    """The simulation: clients, shards, and a detector that runs every `period_ms`; None for no
    detector.
    """

    def __init__(self, load: Steps, shards: int, period_ms: float | None, seed: int) -> None:
        self.world = World()
        self.load = load
        self.shards = [Shard(self.world, number) for number in range(shards)]
        self.ends = Ends()
        self.period_ms = period_ms
        self.active: dict[str, Transaction] = {}
        self._chance = random.Random(seed)
        self._jitter = random.Random(seed + 1)
        if shards > 1:
            for shard in self.shards:
                shard.queued = self._look

    def run(self) -> Ends:
        """Run until every transaction has succeeded."""
        for _ in range(self.load.clients):
            self.world.after(self._chance.random(), self._next)
        if self.period_ms is not None:
            self.world.after(self.period_ms, self._gather)
        self.world.run()
        self.ends.rearrangements = sum(shard.manager.rearrangements for shard in self.shards)
        self.ends.stuck_ms.sort()
        return self.ends

    # -- a transaction -------------------------------------------------------------------------------------

    def _next(self) -> None:
        load = self.load
        if self.ends.begun == load.transactions:
            return
        self.ends.begun += 1
        numbers = self._chance.sample(range(load.keys), load.steps * load.resources)
        drawn = [
            {f"key/{n}": self._chance.random() >= load.shared for n in numbers[i :: load.steps]}
            for i in range(load.steps)
        ]
        transaction = Transaction("", drawn, self._chance.random() < load.early)
        transaction.name = f"t{self.ends.begun}"
        self.active[transaction.name] = transaction
        self._step(transaction)

    def _step(self, transaction: Transaction) -> None:
        """Request the resources of the next step from one shard after another."""
        number = len(transaction.held)
        wanted, left = transaction.wanted[number], dict[int, list[str]]()
        if transaction.early and number == len(transaction.wanted) - 1:
            for shard, request in transaction.held[0]:
                shard.release(request)
            transaction.held[0] = []
        for name in wanted:
            left.setdefault(home(name, len(self.shards)), []).append(name)
        transaction.held.append([])
        self._ask(transaction, [(self.shards[shard], left[shard]) for shard in sorted(left)])

    def _ask(self, transaction: Transaction, left: list[tuple[Shard, list[str]]]) -> None:
        if not left:
            self.world.after(self._chance.expovariate(1 / self.load.work_ms), self._worked, transaction)
            return
        shard, names = left[0]
        wanted = transaction.wanted[len(transaction.held) - 1]
        request = Request(
            shared=tuple(name for name in names if not wanted[name]),
            exclusive=tuple(name for name in names if wanted[name]),
            transaction=transaction.name,
            queue_timeout_ms=self.load.queue_timeout_ms,
            transaction_timeout_ms=FOR_EVER_MS,
        )

        def on_reply(event: Event) -> None:
            transaction.asks = None
            if isinstance(event, Released):
                self._fail(transaction, event)
            else:
                self._move_on(transaction)
                transaction.held[-1].append((shard, request))
                self._ask(transaction, left[1:])

        transaction.asks = shard, request
        shard.send_request(request, on_reply)

    def _worked(self, transaction: Transaction) -> None:
        if len(transaction.held) < len(transaction.wanted):
            self._step(transaction)
            return
        self._give_back(transaction)
        del self.active[transaction.name]
        self.ends.ended += 1
        self.ends.duration_ms = self.world.now
        self.world.after(1, self._next)

    def _fail(self, transaction: Transaction, event: Released) -> None:
        """Release all locks, and retry later under a new name."""
        if isinstance(event, Deadlocked):
            self.ends.at_once += 1
        elif event.reason == "queue-timeout":
            self.ends.timed_out += 1
        self._move_on(transaction)
        self._give_back(transaction)
        del self.active[transaction.name]
        transaction.tries += 1
        transaction.name = f"{transaction.name.partition('.')[0]}.{transaction.tries}"
        self.active[transaction.name] = transaction
        self.world.after(self._chance.uniform(0, 2 * self.load.work_ms), self._step, transaction)

    def _give_back(self, transaction: Transaction) -> None:
        for shard, request in (each for step in transaction.held for each in step):
            shard.release(request)
        transaction.held.clear()

    def _move_on(self, transaction: Transaction) -> None:
        if transaction.stuck_since_ms is not None:
            self.ends.stuck_ms.append(self.world.now - transaction.stuck_since_ms)
            transaction.stuck_since_ms = None

    # -- who gathers ---------------------------------------------------------------------------------------

    def _look(self, shard: Shard, request: Request) -> None:
        """Record the time when a cycle closes. Its members can't be granted any more."""
        del shard
        owner = str(request.owner)
        if cycle(truth(self.shards), owner) is not None:
            self.active[owner].stuck_since_ms = self.world.now

    def _gather(self) -> None:
        """Query the wait-for graph of every shard. Replies wait for the shard's processor, so they
        are of different times.
        """
        graphs: list[Graph] = []
        costs = self.world.costs

        def shown(shard: Shard) -> None:
            graph = waits_of(shard.manager)
            self.world.after(costs.hop_ms * (1 + self._jitter.random()), answered, graph)

        def answered(graph: Graph) -> None:
            graphs.append(graph)
            if len(graphs) == len(self.shards):
                self._judge(merged(graphs))

        for shard in self.shards:
            later_ms = self._jitter.random() * (self.period_ms or 0) if self.load.apart else 0.0
            hop_ms = costs.hop_ms * (1 + self._jitter.random())
            self.world.after(later_ms + hop_ms, shard.work, costs.of(1), shown, shard)
        if self.active:
            self.world.after(self.period_ms or 0, self._gather)

    def _judge(self, graph: Graph) -> None:
        """Abort the youngest member of each cycle in the merged graph."""
        for owner in sorted(graph, key=lambda name: int(name[1:].partition(".")[0])):
            while (found := cycle(graph, owner)) is not None:
                victim = max(found, key=lambda name: int(name[1:].partition(".")[0]))
                graph.pop(victim)
                self.world.after(self.world.costs.hop_ms, self._end, victim, found)

    def _end(self, victim: str, found: list[str]) -> None:
        """Send the abort of a victim to the shard in which it waits."""
        transaction = self.active.get(victim)
        if transaction is None or transaction.asks is None:
            return
        shard, request = transaction.asks
        shard.work(self.world.costs.of(1), self._cancel, shard, request, found)

    def _cancel(self, shard: Shard, request: Request, found: list[str]) -> None:
        """Abort the waiting request of a victim, if it still waits; record whether there really was
        a deadlock.
        """
        if shard.manager.table.find(getattr(request, "id", 0)) is not request or request.state is not WAITING:
            return
        now = truth(self.shards)
        victim = str(request.owner)
        self.ends.gathered += 1
        if cycle(now, victim) is None:
            self.ends.phantom += 1
        elif not any(cycle(now, owner, hard_only=True) for owner in found):
            self.ends.needless += 1
        shard.step(Release(request.id))


def steps(load: Steps, shards: int, period_ms: float | None = None, *, seed: int = 1) -> Ends:
    """Run the simulation. Without a detector, deadlocks that no shard sees last until the
    `queueTimeout`.
    """
    return Steppers(load, shards, period_ms, seed).run()
