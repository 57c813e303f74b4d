"""What a leader stores of random commands: after each batch, a later leader would continue from the same state."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from random import Random
from typing import Any
from unittest.mock import patch

import orjson

from genie.access import Principal
from genie.config import Limits
from genie.core import grant, lock_table, manager, subtrees
from genie.observability.stats import Stats
from genie.server import dispatcher, pipeline, scheduler, sessions
from genie.server.connection import Connection
from genie.server.listener import AdmissionControl
from genie.server.pipeline import Pipeline
from genie.storage.memory import MemoryStore
from genie.storage.redis.records import RecordDecoder, encode_batch, encode_changes
from genie.storage.store import Batch, StateMachine
from genie.testing.simulation.loop import SimLoop, deterministic
from simulator.invariants import check
from simulator.shadow import Shadow, queues
from support.network.recording_transport import RecordingTransport
from support.runs.searches import seeds

NAMES = ("a/1", "a/2", "a/b/1", "a/b/2", "c", "d")
SUBTREES = ("a/**", "a/b/**", "**")
SECRETS = tuple(f"a secret of number {number}" for number in range(4))
TAKEOVERS = 4
ACTIONS = 150
"""Number of random actions before each takeover."""


class Client:
    """A connection that sends random commands."""

    def __init__(self, world: World) -> None:
        self.world, self.rng = world, world.rng
        self.lines: list[bytes] = []
        """The requests that it has sent."""
        self._partial = b""
        """The incomplete last line of what was received."""
        self.is_watching = False
        self.connection = Connection(world.pipeline, world.limits, world.admission)
        self.transport = RecordingTransport(self._on_data)
        self.connection.connection_made(self.transport)
        if world.principals:
            self.connection.principal = self.rng.choice(world.principals)
        if self.rng.random() < 0.75:
            number = self.rng.randrange(len(SECRETS))
            self.send(
                "hello",
                session=SECRETS[number],
                sessionTimeout=(30, 200, 2_000, 20_000)[number],
                quiet=self.rng.random() < 0.3,
                note=f"session {number}" if number % 2 else None,
            )

    def _on_data(self, data: bytes) -> None:
        """Check that all changes are stored when a message leaves, except deferred events and rejections."""
        *lines, self._partial = (self._partial + data).split(b"\n")
        commands = [orjson.loads(line)["command"] for line in lines]
        if not self.is_watching and not {"error"}.issuperset(commands):
            assert not self.world.store.in_flight, f"{data!r} is sent during a commit"
            assert not self.world.pipeline._outcome.changes, f"{data!r} is sent before a commit"

    def send(self, command: str, **payload: object) -> None:
        fields = {name: value for name, value in payload.items() if value is not None}
        self._send(orjson.dumps({"command": command, "payload": fields}))

    def _send(self, line: bytes) -> None:
        self.world.buffered.setdefault(self, []).append(line)

    def lose(self) -> None:
        """Lose the connection."""
        self.world.flush(self)
        self.world.clients.remove(self)
        self.connection.connection_lost(None)

    def act(self) -> None:
        rng, table = self.rng, self.world.pipeline.manager.table
        moved = [request.id for request in (*table.waiting.values(), *table.unmoved) if request.moved or table.unmoved]
        ids = [*table.held, *table.waiting, *self.world.ended[-3:], *moved]
        match rng.choice(
            ["request"] * 8 + ["release"] * 3 + ["ref", "ref", "extend", "repeat", "repeat", "other", "end"]
        ):
            case "release" if ids:
                self.world.ended.append(rng.choice(ids))
                self.send("release", id=self.world.ended[-1])
            case "ref":
                self.send("release", ref=str(rng.randrange(12)))
            case "extend" if table.held:
                self.send("extend", id=rng.choice([*table.held]), transactionTimeout=rng.choice([1, 50, 500]))
            case "repeat" if self.lines:
                self._send(rng.choice(self.lines))
            case "other":
                self.other()
            case "end":
                self.end()
            case _:
                self.request()

    def other(self) -> None:
        match self.rng.randrange(5):
            case 0:
                self.send("inspect")
            case 1:
                self.is_watching = True
                self.send("watch", prefix="a/")
            case 2:
                self.send("unwatch", prefix="a/")
            case 3:
                self.send("request", resources=[])
            case _:
                self.send("ping")

    def end(self) -> None:
        match self.rng.randrange(4):
            case 0:
                self.send("bye")
            case 1 if self in self.world.clients:
                self.world.flush(self)
                self.connection.eof_received()
            case _:
                self.lose()

    def lock(self, names: tuple[str, ...]) -> str:
        rng = self.rng
        name = rng.choice(names)
        if name.endswith("**") or rng.random() < 0.6:
            return f"{rng.choice(['shared', 'exclusive'])}:{name}"
        limit = rng.choice([2, 3, 4])
        return f"{rng.randint(1, limit)}/{limit}:{name}"

    def request(self) -> None:
        rng = self.rng
        payload: dict[str, Any] = {
            "transactionName": rng.choice(self.world.transactions),
            "priority": rng.choice([0, 0, 0, 1, -1]),
            "queueTimeout": rng.choice(self.world.queue_timeouts_ms),
            "transactionTimeout": rng.choice([20, 200, 3_000]),
            "onDisconnect": rng.choice([None, "keep", "release"]),
            "ref": rng.choice([None, str(rng.randrange(12))]),
            "note": rng.choice([None, None, "a note", "n" * 300]),
            "traceparent": rng.choice([None, "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"]),
        }
        locks: dict[str, str] = {}
        is_any = rng.random() < 0.15
        for _ in range(rng.choice([1, 1, 2, 3])):
            lock = self.lock(NAMES if is_any else self.world.names)
            locks[lock.partition(":")[2]] = lock
        if rng.random() < 0.03:
            locks |= {f"a/{number}": f"exclusive:a/{number}" for number in range(3, 60)}  # a large request
        if is_any:
            del payload["queueTimeout"]
            payload |= {"anyOf": [*locks.values()], "target": rng.randint(1, len(locks))}
        else:
            payload["resources"] = [*locks.values()]
        self.send("request", **payload)
        self.lines.append(self.world.buffered[self][-1])


class ShadowStore(MemoryStore):
    """A store with a shadow of its leader and a follower, which it compares with the leader at each commit."""

    durable = True
    full = False

    def __init__(self, world: World, state: StateMachine) -> None:
        self.world = world
        self.shadow = Shadow(state.snapshot())
        self.decoder = RecordDecoder()
        self.follower = self.shadow.load()
        self.in_flight = False
        self.batches = 0

    def commit(self, batch: Batch, done: Callable[[BaseException | None], None]) -> None:
        assert not self.in_flight
        self.in_flight = True
        self.batches += 1
        self.shadow.append(batch)
        world = self.world
        lines = encode_changes(batch.changes)
        changes = {}
        for id_, line in sorted(lines.items()):
            _, _, record = line.partition(b" ")
            if record or id_ in self.follower:
                changes[id_] = self.decoder.decode(id_, record) if record else None
        self.follower.apply(Batch(changes, batch.next_id, batch.next_fence, batch.clock_ms))
        loaded = self.shadow.load()
        assert queues(self.follower) == queues(loaded)
        assert _contents(self.follower) == _contents(loaded)
        if not world.is_recovering:
            self.shadow.check(world.pipeline._dispatcher)
            check(world.pipeline.manager)
        delay_s = world.rng.choice([0.0, 0.0, 0.0, 0.001, 0.01, 0.1, 2.5] if world.is_slow else [0.0, 0.0005])

        def acknowledge() -> None:
            self.in_flight = False
            done(None)

        if delay_s:
            world.loop.call_later(delay_s, acknowledge)
        elif world.rng.random() < 0.5:
            world.loop.call_soon(acknowledge)
        else:
            acknowledge()


def _contents(state: StateMachine) -> bytes:
    batch = state.snapshot()
    batch.changes = dict(sorted(batch.changes.items()))
    return encode_batch(batch, encode_changes(batch.changes))


class World:
    """A leader, its clients and its store. `run` lets several leaders follow each other."""

    def __init__(self, loop: SimLoop, seed: int) -> None:
        self.loop, self.rng = loop, Random(seed)  # noqa: S311 - reproducible by its seed
        self.limits = Limits(max_state_per_principal=self.rng.choice([0, 2 << 30]))
        self.admission: AdmissionControl[Connection] = AdmissionControl(self.limits)
        self.principals = self.rng.choice([(), (Principal("p"), Principal("q"))])
        self.is_slow = self.rng.random() < 0.5
        self.transactions = self.rng.choice([(None, None, "T1", "T2", "T3"), (None, "T1", "T2", "T3", "T4", "T5")])
        self.names = self.rng.choice([NAMES, NAMES + SUBTREES, ("a/1", "a/2", "a/b/1", "a/**", "a/**", "a/**")])
        self.queue_timeouts_ms = self.rng.choice([(0, 20, 200, 3_000, 2_147_483_647), (3_000, 10_000)])
        self.flush_share = self.rng.choice([0.5, 0.5, 0.05])
        """The share of actions after which the lines of all clients are sent. With a small one, a batch has many commands."""
        self.clients: list[Client] = []
        self.buffered: dict[Client, list[bytes]] = {}
        """Lines of each client that are not sent yet."""
        self.ended: list[int] = []
        self.failures: list[BaseException] = []
        self.is_recovering = False
        self.batches = 0
        loop.set_exception_handler(lambda _, context: self.failures.append(context["exception"]))

    def flush(self, client: Client) -> None:
        """Send the buffered lines of a client in one read."""
        lines = self.buffered.pop(client, [])
        if lines:
            client.connection.data_received(b"\n".join(lines) + b"\n")

    async def run(self) -> int:
        """Return the number of batches."""
        state = StateMachine()
        for _ in range(TAKEOVERS):
            state = await self.lead(state)
        return self.batches

    async def lead(self, state: StateMachine) -> StateMachine:
        """Lead with random commands, and return the state that the store has at the end."""
        rng, loop = self.rng, self.loop
        self.store = store = ShadowStore(self, state)
        state.manager.lead(min_id=0, unix_offset_ms=1e12, lock_order=None)
        self.pipeline = Pipeline(
            state.manager, store, self.limits, Stats(), lambda: loop.time() * 1000, self.failures.append
        )
        self.is_recovering = True
        await self.pipeline.recover(state.retained_replies.values())
        self.is_recovering = False
        await self.pipeline.drained()
        for _ in range(ACTIONS):
            if len(self.clients) < 2 or (len(self.clients) < 8 and rng.random() < 0.1):
                self.clients.append(Client(self))
            for client in [each for each in self.clients if each.transport.is_ended]:
                client.lose()
            if self.clients:
                rng.choice(self.clients).act()
            if rng.random() < self.flush_share:
                for client in [*self.buffered]:
                    self.flush(client)
                await asyncio.sleep(rng.choice([0, 0, 0.0001, 0.002, 0.03, 0.3, 3]))
            assert not self.failures, self.failures
        self.pipeline.stop()
        self.batches += store.batches
        for client in [*self.clients]:
            self.buffered.pop(client, None)
            client.lose()
        self.pipeline.dispose()
        return rng.choice([store.follower, store.shadow.load()])


@contextmanager
def small_limits(rng: Random) -> Iterator[None]:
    """Let work be done in many parts, and few replies be retained."""
    limits: dict[tuple[Any, str], list[object]] = {
        (dispatcher, "MAX_ENDED_LOCKS"): [1, 1_000],
        (dispatcher, "MAX_REPORTED_REQUESTS"): [1, 1_000],
        (dispatcher, "MAX_RECOVERED"): [2, 1_000],
        (dispatcher, "MAX_EXPIRED_SESSIONS"): [2, 1_000],
        (dispatcher, "EXPENSIVE_S"): [-1.0, 3600.0],
        (dispatcher, "MANY_NAMES"): [2, 1_000],
        (pipeline, "MAX_RECOVERED_CHANGES"): [2, 1_000],
        (scheduler, "CHUNK"): [1, scheduler.CHUNK],
        (sessions, "MAX_RETAINED_REPLIES"): [3, 1_000],
        (sessions, "MAX_RETAINED_REPLIES_TOTAL"): [6, 1_000],
        (sessions, "GUARANTEED_REPLIES"): [1, 4],
        (sessions, "MAX_RETAINED_REPLY_BYTES"): [200, 2_000],
        (grant, "MAX_CANDIDATES"): [1, 2, 1_000],
        (manager, "MAX_CANDIDATES"): [1, 2, 1_000],
        (manager, "MAX_CONTINUED_QUEUES"): [1, 1_000],
        (manager, "MAX_ARRIVAL_STEPS"): [20, 6_000],
        (lock_table, "MAX_CLOSED_WAITERS"): [0, 1_000],
        (subtrees, "MAX_CLOSED_WAITERS"): [1, 1_000],
    }
    with ExitStack() as stack:
        for (module, name), values in limits.items():
            stack.enter_context(patch.object(module, name, rng.choice(values)))
        yield


def run(seed: int) -> int:
    """Run a world, and return the number of batches."""
    loop = SimLoop(step_s=1e-6)
    with small_limits(Random(seed)), deterministic(loop, seed, lambda *_: True):  # noqa: S311 - reproducible
        try:
            return loop.run_until_complete(World(loop, seed).run())
        finally:
            loop.finish()


@seeds(30)
def test_a_later_leader_continues_from_the_state_of_the_leader(seed: int) -> None:
    assert run(seed) > TAKEOVERS
