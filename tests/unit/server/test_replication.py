"""Replication: a replica that applies the batches of a leader has its state, and can take over with it."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import orjson
import pytest

from genie.config import Limits
from genie.core import LockManager, Request
from genie.observability.stats import Stats
from genie.protocol.commands import Hello
from genie.server import dispatcher as dispatcher_module
from genie.server.dispatcher import Dispatcher
from genie.server.outcome import BatchOutcome
from genie.server.peer import END_OF_INPUT, ConnectionState, Item, Peer
from genie.storage.redis.records import RecordDecoder, encode
from genie.storage.store import Batch, RetainedReply, StateMachine, is_stored
from simulator.invariants import check

STEPS = 120


def make_client() -> Peer:
    """Return a client without a connection."""
    client = Peer()
    client.enter_state(ConnectionState.READY)
    return client


def line(command: str, **payload: object) -> bytes:
    return orjson.dumps({"command": command, "payload": payload})


def stored_requests(batch: Batch) -> dict[int, bytes]:
    """Return the encoded records of the live requests in a batch, by id."""
    return {
        id_: encode(change)
        for id_, change in batch.changes.items()
        if isinstance(change, Request) and is_stored(change)
    }


def wait_queues(manager: LockManager) -> dict[str, list[int]]:
    """Return the ids of the stored waiting requests of each resource, in queue order."""
    queues = {}
    for name, resource in manager.table.resources.items():
        if resource.wait_queue is not None:
            order = [entry[2].id for entry in resource.wait_queue.entries() if is_stored(entry[2])]
            if order:
                queues[name] = order
    return queues


class Leader:
    """A dispatcher that executes random commands of random clients."""

    def __init__(self, rng: Random, manager: LockManager, retained_replies: list[RetainedReply], now: float) -> None:
        self.rng, self.manager, self.now = rng, manager, now
        self.dispatcher = Dispatcher(manager, Limits(), Stats(), BatchOutcome(manager.next_id))
        self.peers: list[Peer] = []
        self.decoder = RecordDecoder()
        for _ in self.dispatcher.recover(retained_replies, lambda: now):
            pass

    def step(self, replica: StateMachine) -> None:
        """Execute the commands of one batch, and apply the batch to a replica."""
        self.now += self.rng.choice([0, 1, 20, 300])
        self.dispatcher.expire(self.now)
        for _ in range(self.rng.choice([1, 1, 3, 8])):
            self.execute_random_command()
        outcome = self.dispatcher.outcome
        changes, outcome.changes, outcome.stored_below = outcome.changes, {}, self.manager.next_id
        for peer in self.dispatcher.outcome.dirty:
            peer.outbox.clear()
        self.dispatcher.outcome.dirty.clear()
        batch = Batch({}, self.manager.next_id, self.manager.next_fence, self.now)
        for id_, change in changes.items():
            is_deleted = change is None or (
                isinstance(change, Request) and id_ not in (self.manager.table.held | self.manager.table.waiting)
            )
            batch.changes[id_] = None if is_deleted else self.decoder.decode(id_, encode(change))  # type: ignore[arg-type]
        replica.apply(batch)

    def execute_random_command(self) -> None:
        rng = self.rng
        if not self.peers or rng.random() < 0.15:
            peer = make_client()
            self.peers.append(peer)
            if rng.random() < 0.8:
                number = rng.randrange(4)
                timeout = 50.0 if number else 2000.0
                self.execute(peer, Hello(f"a secret of number {number}", timeout, quiet=rng.random() < 0.5))
            return
        peer = rng.choice(self.peers)
        match rng.randrange(9):
            case 8:
                self.execute(peer, line("release", ref=str(rng.randrange(10))))
            case 0:
                if rng.random() < 0.2:
                    self.execute(peer, line("bye"))
                peer.closed = True
                self.peers.remove(peer)
                self.execute(peer, END_OF_INPUT)
            case 1 | 2:
                live_ids = [*self.manager.table.held, *self.manager.table.waiting]
                if live_ids:
                    self.execute(peer, line("release", id=rng.choice(live_ids)))
            case 3:
                if self.manager.table.held:
                    self.execute(
                        peer, line("extend", id=rng.choice([*self.manager.table.held]), transactionTimeout=500)
                    )
            case _:
                names = rng.sample("abcd", rng.choice([1, 1, 2, 3]))
                self.execute(
                    peer,
                    line(
                        "request",
                        resources=[f"{rng.choice(['shared', 'exclusive'])}:{name}" for name in names],
                        transactionName=rng.choice([None, "T1", "T2", "T3", "T4"]),
                        priority=rng.choice([0, 0, 1, -1]),
                        queueTimeout=rng.choice([0, 100, 5000]),
                        transactionTimeout=rng.choice([100, 5000]),
                        onDisconnect=rng.choice(["keep", "release"]),
                        ref=rng.choice([None, str(rng.randrange(10))]),
                    ),
                )

    def execute(self, peer: Peer, item: Item) -> None:
        items: Iterator[Item] = iter([item])
        self.dispatcher.execute(self.now, peer, items)


@pytest.mark.parametrize("seed", range(60))
def test_a_replica_equals_the_state_of_the_leader(seed: int) -> None:
    rng = Random(seed)  # noqa: S311 - reproducible by its seed
    replica = StateMachine()
    leader = Leader(rng, LockManager(), [], 0.0)
    for number in range(STEPS):
        leader.step(replica)
        leader_state = leader.dispatcher.snapshot(leader.manager.next_id, leader.now)
        assert stored_requests(replica.snapshot()) == stored_requests(leader_state)
        assert wait_queues(replica.manager) == wait_queues(leader.manager)
        leader_replies = {
            id_: change.message for id_, change in leader_state.changes.items() if isinstance(change, RetainedReply)
        }
        assert {id_: reply.message for id_, reply in replica.retained_replies.items()}.items() <= leader_replies.items()
        check(leader.manager)
        if number % 40 == 39:  # the replica takes over, and a new one follows it
            manager, retained_replies = replica.manager, list(replica.retained_replies.values())
            next_replica = StateMachine()
            next_replica.apply(_decoded_copy(replica.snapshot()))
            leader = Leader(rng, manager, retained_replies, leader.now)
            replica = next_replica


def _decoded_copy(batch: Batch) -> Batch:
    """Return a batch as another process decodes it."""
    read = RecordDecoder().decode
    changes = {id_: read(id_, encode(change)) for id_, change in batch.changes.items()}  # type: ignore[arg-type]
    return Batch(dict(changes), batch.next_id, batch.next_fence, batch.clock_ms)


def test_the_requests_of_a_session_are_limited() -> None:
    dispatcher, peer = (
        Dispatcher(LockManager(), Limits(max_requests_per_session=2), Stats(), BatchOutcome()),
        make_client(),
    )
    requests = [line("request", resources=[f"exclusive:{number}"], ref=f"{number}") for number in range(3)]
    dispatcher.execute(0, peer, iter([Hello("a secret of sixteen")]))
    dispatcher.execute(0, peer, iter(requests))
    assert b'"too-many"' in peer.outbox[-1]
    assert b'"ref":"2"' in peer.outbox[-1]
    peer.outbox.clear()
    dispatcher.execute(0, peer, iter([requests[1], line("release", id=1), requests[2]]))
    assert [b'"too-many"' in message for message in peer.outbox] == [False] * len(peer.outbox)


@pytest.mark.parametrize("durable", [True, False])
def test_expired_sessions_end_in_bounded_batches(monkeypatch: pytest.MonkeyPatch, durable: bool) -> None:
    monkeypatch.setattr(dispatcher_module, "MAX_EXPIRED_SESSIONS", 8)
    dispatcher = Dispatcher(LockManager(), Limits(), Stats(), BatchOutcome(durable=durable))
    for number in range(3):
        peer = make_client()
        dispatcher.execute(0, peer, iter([Hello(f"a secret of number {number}")]))
        requests = [line("request", resources=[f"shared:{name}"], transactionTimeout=1e9) for name in "abc"]
        dispatcher.execute(0, peer, iter([*requests, END_OF_INPUT]))
    session_counts = []
    for _ in range(3):
        dispatcher.outcome.changes.clear()
        dispatcher.expire(1e6)
        session_counts.append(len(list(dispatcher.sessions)))
    assert session_counts == [1, 0, 0]
    assert len(dispatcher.manager.table.held) == 9


def test_a_hello_of_a_lost_connection_does_not_take_over_the_session() -> None:
    """Another connection has resumed the session before the `hello` is executed."""
    dispatcher, late, current = (
        Dispatcher(LockManager(), Limits(), Stats(), BatchOutcome()),
        make_client(),
        make_client(),
    )
    dispatcher.execute(0, current, iter([Hello("a secret of sixteen")]))
    late.closed = True
    dispatcher.execute(0, late, iter([Hello("a secret of sixteen")]))
    dispatcher.execute(0, late, iter([line("request", resources=["exclusive:a"]), END_OF_INPUT]))
    assert current.session.connection is current
    assert not dispatcher.manager.table.held


def test_the_reason_of_an_ended_request_survives_a_restart() -> None:
    """A release by `ref` repeats it, and so does a request with the same `ref`."""
    dispatcher, other, peer = Dispatcher(LockManager(), Limits(), Stats(), BatchOutcome()), make_client(), make_client()
    waiting_request = line("request", resources=["exclusive:a"], queueTimeout=5, ref="1")
    dispatcher.execute(0, other, iter([line("request", resources=["exclusive:a"])]))
    dispatcher.execute(0, peer, iter([Hello("a secret of sixteen")]))
    dispatcher.execute(0, peer, iter([waiting_request]))
    dispatcher.expire(6)
    decoder = RecordDecoder()
    stored = [
        decoder.decode(id_, encode(change))
        for id_, change in dispatcher.snapshot(100, 6).changes.items()
        if change is not None
    ]
    restarted, peer = Dispatcher(LockManager(), Limits(), Stats(), BatchOutcome()), make_client()
    for _ in restarted.recover([reply for reply in stored if isinstance(reply, RetainedReply)], lambda: 0):
        pass
    restarted.execute(0, peer, iter([Hello("a secret of sixteen")]))
    restarted.execute(0, peer, iter([waiting_request, line("release", ref="1")]))
    assert [b'"queue-timeout"' in line for line in peer.outbox[-2:]] == [True, True]
    assert peer.outbox[-1] == b'{"command":"released","payload":{"id":2,"reason":"queue-timeout","ref":"1"}}\n'


@pytest.mark.parametrize("durable", [True, False])
def test_a_lost_connection_without_session_retains_no_replies(durable: bool) -> None:
    """Retained replies would form a reference cycle with the session."""
    dispatcher, peer = Dispatcher(LockManager(), Limits(), Stats(), BatchOutcome(durable=durable)), make_client()
    dispatcher.execute(0, peer, iter([line("request", resources=["exclusive:a"], transactionTimeout=5, ref="1")]))
    peer.closed = True
    dispatcher.execute(0, peer, iter([END_OF_INPUT]))
    dispatcher.expire(6)
    assert not dispatcher.manager.table.held
    assert peer.session.retained_replies is None
    assert peer.session.find("1") is None
