"""Who follows batch by batch has what the leader has, and goes on from there as the leader would."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import orjson
import pytest

from genie.config import Limits
from genie.core import LockManager, Request
from genie.observability.stats import Stats
from genie.protocol.commands import Hello
from genie.server import dispatcher
from genie.server.dispatcher import Dispatcher
from genie.server.peer import END_OF_INPUT, ConnectionState, Item, Peer
from genie.storage.redis.records import RecordDecoder, encode
from genie.storage.store import Batch, RetainedReply, StateMachine, is_stored
from genie.testing.simulation.invariants import check

STEPS = 120


class Client(Peer):
    """A client without a connection."""

    def __init__(self) -> None:
        super().__init__()
        self.enter_state(ConnectionState.READY)


def line(command: str, **payload: object) -> bytes:
    return orjson.dumps({"command": command, "payload": payload})


def stored(batch: Batch) -> dict[int, bytes]:
    """The living requests as they are stored."""
    return {
        id_: encode(change)
        for id_, change in batch.changes.items()
        if isinstance(change, Request) and is_stored(change)
    }


def lines(manager: LockManager) -> dict[str, list[int]]:
    """Who of those that are stored waits for what, in order."""
    found = {}
    for name, resource in manager.table.resources.items():
        if resource.wait_queue is not None:
            order = [entry[2].id for entry in resource.wait_queue.entries() if is_stored(entry[2])]
            if order:
                found[name] = order
    return found


class Pair:
    def __init__(self, chance: Random, manager: LockManager, endings: list[RetainedReply], now: float) -> None:
        self.chance, self.manager, self.now = chance, manager, now
        self.dispatcher = Dispatcher(manager, Limits(), Stats())
        self.peers: list[Client] = []
        self.decoder = RecordDecoder()
        self.dispatcher.notifier.now = now
        self.dispatcher.recover(endings)

    def step(self, replica: StateMachine) -> None:
        """What comes within one batch, and the batch."""
        self.now += self.chance.choice([0, 1, 20, 300])
        self.dispatcher.notifier.now = self.now
        self.dispatcher.expire()
        for _ in range(self.chance.choice([1, 1, 3, 8])):
            self.act()
        changes, self.dispatcher.notifier.write_set = self.dispatcher.notifier.write_set, {}
        self.dispatcher.notifier.stored_below = self.manager.next_id
        for peer in self.dispatcher.notifier.dirty:
            peer.outbox.clear()
        self.dispatcher.notifier.dirty.clear()
        batch = Batch({}, self.manager.next_id, self.manager.next_fence, self.now)
        for id_, change in changes.items():
            gone = change is None or (
                isinstance(change, Request) and id_ not in (self.manager.table.held | self.manager.table.waiting)
            )
            batch.changes[id_] = None if gone else self.decoder.decode(id_, encode(change))  # type: ignore[arg-type]
        replica.apply(batch)

    def act(self) -> None:
        chance = self.chance
        if not self.peers or chance.random() < 0.15:
            peer = Client()
            self.peers.append(peer)
            if chance.random() < 0.8:
                number = chance.randrange(4)
                timeout = 50.0 if number else 2000.0
                self.say(peer, Hello(f"a secret of number {number}", timeout, quiet=chance.random() < 0.5))
            return
        peer = chance.choice(self.peers)
        match chance.randrange(9):
            case 8:
                self.say(peer, line("release", ref=str(chance.randrange(10))))
            case 0:
                if chance.random() < 0.2:
                    self.say(peer, line("bye"))
                peer.closed = True
                self.peers.remove(peer)
                self.say(peer, END_OF_INPUT)
            case 1 | 2:
                known = [*self.manager.table.held, *self.manager.table.waiting]
                if known:
                    self.say(peer, line("release", id=chance.choice(known)))
            case 3:
                if self.manager.table.held:
                    self.say(peer, line("extend", id=chance.choice([*self.manager.table.held]), transactionTimeout=500))
            case _:
                names = chance.sample("abcd", chance.choice([1, 1, 2, 3]))
                self.say(
                    peer,
                    line(
                        "request",
                        resources=[f"{chance.choice(['shared', 'exclusive'])}:{name}" for name in names],
                        transactionName=chance.choice([None, "T1", "T2", "T3", "T4"]),
                        priority=chance.choice([0, 0, 1, -1]),
                        queueTimeout=chance.choice([0, 100, 5000]),
                        transactionTimeout=chance.choice([100, 5000]),
                        onDisconnect=chance.choice(["keep", "release"]),
                        ref=chance.choice([None, str(chance.randrange(10))]),
                    ),
                )

    def say(self, peer: Client, item: Item) -> None:
        items: Iterator[Item] = iter([item])
        self.dispatcher.execute(peer, items)


@pytest.mark.parametrize("seed", range(60))
def test_a_replica_is_what_the_leader_is(seed: int) -> None:
    chance = Random(seed)  # noqa: S311 - it is repeated by its seed
    replica = StateMachine()
    pair = Pair(chance, LockManager(), [], 0.0)
    for number in range(STEPS):
        pair.step(replica)
        leader = pair.dispatcher.snapshot(pair.manager.next_id)
        assert stored(replica.snapshot()) == stored(leader)
        assert lines(replica.manager) == lines(pair.manager)
        kept = {id_: change.message for id_, change in leader.changes.items() if isinstance(change, RetainedReply)}
        assert {id_: ending.message for id_, ending in replica.retained_replies.items()}.items() <= kept.items()
        check(pair.manager)
        if number % 40 == 39:  # it takes over, and another follows
            manager, endings = replica.manager, list(replica.retained_replies.values())
            following = StateMachine()
            following.apply(_again(replica.snapshot()))
            pair = Pair(chance, manager, endings, pair.now)
            replica = following


def _again(batch: Batch) -> Batch:
    """What another process would have read."""
    read = RecordDecoder().decode
    changes = {id_: read(id_, encode(change)) for id_, change in batch.changes.items()}  # type: ignore[arg-type]
    return Batch(dict(changes), batch.next_id, batch.next_fence, batch.clock_ms)


def test_a_session_has_so_many_requests_and_no_more() -> None:
    handler, peer = Dispatcher(LockManager(), Limits(max_requests_per_session=2), Stats()), Client()
    wanted = [line("request", resources=[f"exclusive:{number}"], ref=f"{number}") for number in range(3)]
    handler.execute(peer, iter([Hello("a secret of sixteen")]))
    handler.execute(peer, iter(wanted))
    assert b'"too-many"' in peer.outbox[-1]
    assert b'"ref":"2"' in peer.outbox[-1]
    peer.outbox.clear()
    handler.execute(peer, iter([wanted[1], line("release", id=1), wanted[2]]))
    assert [b'"too-many"' in said for said in peer.outbox] == [False] * len(peer.outbox)


def test_sessions_end_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "MAX_EXPIRY_CHANGES", 4)
    handler = Dispatcher(LockManager(), Limits(), Stats())
    for number in range(3):
        peer = Client()
        handler.execute(peer, iter([Hello(f"a secret of number {number}")]))
        asked = [line("request", resources=[f"shared:{name}"], transactionTimeout=1e9) for name in "abc"]
        handler.execute(peer, iter([*asked, END_OF_INPUT]))
    handler.notifier.now = 1e6
    left = []
    for _ in range(3):
        handler.notifier.write_set.clear()
        handler.expire()
        left.append(len(list(handler.sessions)))
    assert left == [1, 0, 0]
    assert len(handler.manager.table.held) == 9


def test_a_hello_that_comes_too_late_takes_nothing() -> None:
    """The connection that said it is gone, and another one has the session by now."""
    handler, late, living = Dispatcher(LockManager(), Limits(), Stats()), Client(), Client()
    handler.execute(living, iter([Hello("a secret of sixteen")]))
    late.closed = True
    handler.execute(late, iter([Hello("a secret of sixteen")]))
    handler.execute(late, iter([line("request", resources=["exclusive:a"]), END_OF_INPUT]))
    assert living.session.connection is living
    assert not handler.manager.table.held


def test_the_reason_of_an_ended_request_survives_a_restart() -> None:
    """A release by `ref` repeats it, and so does a request with the same `ref`."""
    handler, other, peer = Dispatcher(LockManager(), Limits(), Stats()), Client(), Client()
    wait = line("request", resources=["exclusive:a"], queueTimeout=5, ref="1")
    handler.execute(other, iter([line("request", resources=["exclusive:a"])]))
    handler.execute(peer, iter([Hello("a secret of sixteen")]))
    handler.execute(peer, iter([wait]))
    handler.notifier.now = 6
    handler.expire()
    decoder = RecordDecoder()
    stored = [
        decoder.decode(id_, encode(change))
        for id_, change in handler.snapshot(100).changes.items()
        if change is not None
    ]
    again, peer = Dispatcher(LockManager(), Limits(), Stats()), Client()
    again.recover([ending for ending in stored if isinstance(ending, RetainedReply)])
    again.execute(peer, iter([Hello("a secret of sixteen")]))
    again.execute(peer, iter([wait, line("release", ref="1")]))
    assert [b'"queue-timeout"' in line for line in peer.outbox[-2:]] == [True, True]
    assert peer.outbox[-1] == b'{"command":"released","payload":{"id":2,"reason":"queue-timeout","ref":"1"}}\n'


@pytest.mark.parametrize("durable", [True, False])
def test_a_connection_that_is_gone_remembers_no_endings(durable: bool) -> None:
    """Session and ending would refer to each other, and nothing would free them."""
    handler, peer = Dispatcher(LockManager(), Limits(), Stats(), durable=durable), Client()
    handler.execute(peer, iter([line("request", resources=["exclusive:a"], transactionTimeout=5, ref="1")]))
    peer.closed = True
    handler.execute(peer, iter([END_OF_INPUT]))
    handler.notifier.now = 6
    handler.expire()
    assert not handler.manager.table.held
    assert peer.session.retained_replies is None
    assert peer.session.find("1") is None
