"""The memory that clients can cause is bounded in bytes, in all and for each principal."""

from __future__ import annotations

import gc
import heapq
import sys
import tracemalloc
from collections.abc import Callable
from random import Random
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genie.access import Principal
from genie.config import Limits
from genie.core import LockManager, Request
from genie.core import size as size_module
from genie.core.size import (
    NAME_BYTES,
    REQUEST_BYTES,
    SHORT_NAMES,
    SHORT_REF,
    SHORT_REF_BYTES,
    SHORT_TEXT,
    SHORT_TEXT_BYTES,
    excess_bytes,
    is_large,
    text_bytes,
)
from genie.observability.stats import Stats
from genie.protocol import commands
from genie.protocol.commands import Hello
from genie.server import sessions as sessions_module
from genie.server.connection import Connection
from genie.server.dispatcher import Dispatcher
from genie.server.listener import AdmissionControl
from genie.server.memory_bounds import CONNECTION_BYTES, ENDED_REQUEST_BYTES, REPLY_BYTES, STATE_COSTS, WIDEST
from genie.server.outcome import BatchOutcome
from genie.server.peer import END_OF_INPUT, ConnectionState, Peer
from genie.server.pipeline import Pipeline
from genie.server.sessions import (
    GUARANTEED_REPLIES,
    MAX_RETAINED_REPLIES,
    MAX_RETAINED_REPLY_BYTES,
    SESSION_BYTES,
    SessionTable,
)
from genie.server.state_size import MAX_REQUEST_BYTES
from genie.server.unread_output import MAX_WRITE_BYTES
from genie.storage.memory import MemoryStore
from genie.storage.redis.records import RecordDecoder, encode
from genie.storage.store import RetainedReply, StateMachine
from support.network.recording_transport import RecordingTransport

MIB = 1 << 20
LONG_ID = 1_700_000_000_000_000


def wide(text: object, characters: int) -> str:
    """Return a text of this length that takes as many bytes as possible."""
    return str(text).ljust(characters, WIDEST)


def ascii_text(text: object, characters: int = SHORT_TEXT) -> str:
    return f"{text}_".ljust(characters, "a")


def traceparent(number: int) -> str:
    return f"00-{number + 1:032x}-{number + 1:016x}-01"


class Server:
    """A dispatcher with clients, whose messages are read at once."""

    def __init__(self, *, durable: bool = True, **limits: int) -> None:
        self.stats = Stats()
        manager = LockManager(next_id=LONG_ID, next_fence=LONG_ID)
        self.dispatcher = Dispatcher(manager, Limits(**limits), self.stats, BatchOutcome(LONG_ID, durable=durable))
        self.manager, self.size = manager, self.dispatcher.size
        self.now = 1_000_000.0

    def connect(self, principal: str | None = None, **hello: object) -> Peer:
        peer = Peer()
        peer.enter_state(ConnectionState.READY)
        peer.principal = None if principal is None else Principal(principal)
        if hello:
            self.execute(peer, Hello(**hello))  # type: ignore[arg-type]
        return peer

    def execute(self, peer: Peer, *items: object) -> list[tuple[str, dict[str, object]]]:
        """Execute commands and store the changes, as a server with Redis does. Return the messages to the client."""
        for item in items:
            unfinished = self.dispatcher.execute(self.now, peer, iter((item,)))  # type: ignore[arg-type]
            while unfinished is not None:
                unfinished = self.dispatcher.execute(self.now, peer, iter((unfinished,)), may_be_slow=True)
        outcome = self.dispatcher.outcome
        for change in outcome.changes.values():
            if change is not None and not (isinstance(change, Request) and change.state.name == "ENDED"):
                encode(change)
        outcome.changes.clear()
        messages = [orjson.loads(message) for message in b"".join(peer.outbox).splitlines()]
        for connection in (peer, *outcome.dirty, *outcome.granted):
            connection.outbox.clear()
            connection.has_reply = False
        for pending in (outcome.dirty, outcome.granted, outcome.closing):
            pending.clear()
        return [(message["command"], message["payload"]) for message in messages]

    def send(self, peer: Peer, command: str, **payload: object) -> list[tuple[str, dict[str, object]]]:
        return self.execute(peer, orjson.dumps({"command": command, "payload": payload}))

    def request(self, peer: Peer, *resources: str, **payload: object) -> str:
        """Return an empty text if a request is accepted, else the message of its error."""
        for command, answer in self.send(peer, "request", resources=list(resources), **payload):
            if command == "error":
                assert answer["code"] == "too-many"
                return str(answer["message"])
        return ""

    def lose(self, peer: Peer) -> None:
        peer.closed = True
        self.execute(peer, END_OF_INPUT)

    @property
    def last_id(self) -> int:
        return self.manager.next_id - 1

    def check(self) -> None:
        """Assert that the account is the sum over all live requests, sessions and watches."""
        size, table, sessions = self.size, self.manager.table, self.dispatcher.sessions
        live = {**table.held, **table.waiting}
        large = {id_ for id_, request in live.items() if is_large(request)}
        assert size.requests.keys() == large
        assert size.short_requests.keys() == {
            id_ for id_, request in live.items() if request.context.principal is not None and id_ not in large
        }
        excess, shares = 0, {}
        for id_ in (*size.requests, *size.short_requests):
            request = live[id_]
            expected = excess_bytes(request)
            names = len(request.names())
            share = max(REQUEST_BYTES + names * NAME_BYTES + expected, names * size.min_name_share)
            if id_ in large:
                assert size.requests[id_] == (request.context.principal, expected, share)
            else:
                assert size.short_requests[id_] == share
            excess += expected
            if request.context.principal is not None:
                shares[request.context.principal] = shares.get(request.context.principal, 0) + share
        watches = self.dispatcher.watches
        prefixes = {(peer, prefix) for peer, prefixes in watches._prefixes_of.items() for prefix in prefixes}
        assert size.watches.keys() == prefixes
        for charge in size.watches.values():
            excess += charge.excess
            if charge.principal is not None:
                shares[charge.principal] = shares.get(charge.principal, 0) + charge.share
        origins = {request.origin for request in live.values()} - {None}
        ended = [origin for origin in origins if origin.key is None and origin.connection is None]  # type: ignore[union-attr]
        detached = [session for session in sessions if session.connection is None]
        assert sessions.disconnected == len(ended) + len(detached)
        for session in (*ended, *detached):
            if session.principal is not None:  # type: ignore[union-attr]
                shares[session.principal] = shares.get(session.principal, 0) + SESSION_BYTES  # type: ignore[union-attr]
        assert (size.excess, size.shares) == (excess, shares)
        entries: dict[str, int] = {}
        for request in table.waiting.values():
            if request.context.principal is not None:
                entries[request.context.principal] = entries.get(request.context.principal, 0) + len(request.names())
        assert size.queue_entries == entries
        traced = {id_ for id_, request in table.waiting.items() if request.context.traceparent is not None}
        assert size.first_blockers.keys() <= traced, (
            "first blockers are kept only for waiting requests with a trace context"
        )


# -- the account ------------------------------------------------------------------------------------------


class RandomClients:
    """Clients that do anything: with long and short texts, with and without a session, a principal, a watch."""

    def __init__(self, seed: int, durable: bool, **limits: int) -> None:
        self.rng = Random(seed)  # noqa: S311 - reproducible
        self.server = Server(durable=durable, **limits)
        self.peers = [self.connect() for _ in range(6)]

    def connect(self) -> Peer:
        hello = {
            "session": self.rng.choice([None, "a secret of sixteen", "another secret of it"]),
            "note": self.rng.choice([None, "short", wide("note", 200)]),
            "session_timeout_ms": 300.0,
        }
        return self.server.connect(self.rng.choice([None, None, "orders", "wallets"]), **hello)

    def text(self, choices: int, characters: int) -> str:
        number = self.rng.randrange(choices)
        return self.rng.choice([str(number), str(number), ascii_text(number, characters), wide(number, characters)])

    def step(self) -> None:
        rng, server = self.rng, self.server
        index = rng.randrange(len(self.peers))
        peer = self.peers[index]
        match rng.randrange(14):
            case 0 | 1 | 2 | 3 | 4 | 5:
                names = {self.text(8, 500) for _ in range(rng.choice([1, 1, 1, 2, 12]))}
                payload = {
                    "resources": [rng.choice(["exclusive:", "exclusive:", "shared:"]) + name for name in names],
                    "queueTimeout": rng.choice([0, 100, 10_000]),
                    "transactionTimeout": rng.choice([100, 10_000]),
                    "transactionName": self.text(3, 500),
                    "note": self.text(3, 250),
                    "ref": self.text(40, 128),
                    "traceparent": traceparent(1),
                    "onDisconnect": rng.choice(["keep", "release"]),
                }
                for name in ("transactionName", "note", "ref", "traceparent"):
                    if rng.random() < 0.5:
                        del payload[name]
                server.send(peer, "request", **payload)
            case 6:
                choices = [f"exclusive:{number}" for number in range(4)] + ["exclusive:" + wide(9, 500)]
                server.send(peer, "request", anyOf=choices, target=rng.randint(1, 5), note=self.text(2, 250))
            case 7 | 8:
                live = [*server.manager.table.held, *server.manager.table.waiting, 1]
                server.send(peer, "release", id=rng.choice(live))
            case 9:
                server.send(peer, "release", ref=self.text(40, 128))
            case 10:
                server.send(peer, rng.choice(["watch", "watch", "unwatch"]), prefix=self.text(3, 500))
            case 11:
                server.now += rng.choice([1, 50, 400])
                server.dispatcher.expire(server.now)
                server.execute(peer)
            case 12:
                server.lose(peer)
                self.peers[index] = self.connect()
            case _:
                server.send(peer, "bye")
                server.lose(peer)
                self.peers[index] = self.connect()


@pytest.mark.parametrize("seed", range(30))
def test_the_account_is_the_sum_of_the_state(seed: int) -> None:
    limits = {"max_state": 300_000, "max_state_per_principal": 120_000} if seed % 3 == 0 else {"max_queue": 12}
    clients = RandomClients(seed, durable=seed % 2 == 0, **limits)
    server = clients.server
    for _ in range(400):
        clients.step()
        server.check()
        if "max_state" in limits:
            assert server.size.bytes <= limits["max_state"] + 8 * SESSION_BYTES
            most = limits["max_state_per_principal"] + 8 * SESSION_BYTES
            assert all(share <= most for share in server.size.shares.values())
        else:
            assert all(entries <= limits["max_queue"] // 2 for entries in server.size.queue_entries.values())
    for peer in clients.peers:
        server.lose(peer)
    for _ in range(20):  # waiting requests are granted, and then expire as well
        server.now += 10**6
        server.dispatcher.expire(server.now)
        server.execute(Peer())
    assert (len(server.dispatcher.sessions), server.manager.table.held) == (0, {})
    server.check()
    assert server.size.bytes == 0
    assert (server.size.requests, server.size.short_requests, server.size.shares) == ({}, {}, {})
    sessions = server.dispatcher.sessions
    assert (sessions._extra_replies, sessions._extra_replies_by_principal, sessions._reply_count) == (0, {}, 0)
    assert not sessions._replies


@given(st.text(alphabet=st.sampled_from(["a", "é", "€", WIDEST]), max_size=600))
def test_a_text_takes_at_most_its_bytes(text: str) -> None:
    copy = "".join([*text])  # not interned
    orjson.dumps(copy)  # keeps the text as UTF-8
    assert sys.getsizeof(copy) <= text_bytes(text)


def test_short_texts_are_included_in_the_bytes_of_a_request() -> None:
    assert text_bytes("a" * SHORT_TEXT) <= SHORT_TEXT_BYTES
    assert text_bytes(WIDEST * SHORT_REF) <= SHORT_REF_BYTES


# -- each kind, filled to its bound -------------------------------------------------------------------------

Fill = Callable[[Server, Peer, int], str]


def locks_with_short_texts(server: Server, peer: Peer, number: int) -> str:
    return server.request(
        peer,
        "exclusive:" + ascii_text(number),
        transactionName=ascii_text(number),
        note=ascii_text(number),
        ref=wide(number, SHORT_REF),
        traceparent=traceparent(number),
        transactionTimeout=1_000_000 + number,
    )


def locks_with_long_texts(server: Server, peer: Peer, number: int) -> str:
    return server.request(
        peer,
        "exclusive:" + wide(number, 512),
        transactionName=wide(number, 512),
        note=wide(number, 256),
        ref=wide(number, 128),
        transactionTimeout=1_000_000 + number,
    )


def locks_of_many_names(server: Server, peer: Peer, number: int) -> str:
    names = [f"exclusive:{ascii_text(f'{number}-{each}')}" for each in range(100)]
    return server.request(peer, *names, transactionName=str(number), ref=str(number))


def shared_locks(server: Server, peer: Peer, number: int) -> str:
    return server.request(peer, *(f"shared:{ascii_text(f'{number}-{each}')}" for each in range(100)))


def locks_of_one_transaction(server: Server, peer: Peer, number: int) -> str:
    return server.request(
        peer,
        "exclusive:" + ascii_text(number),
        transactionName=ascii_text("t"),
        note=ascii_text(number),
        ref=wide(number, SHORT_REF),
        traceparent=traceparent(number),
        transactionTimeout=1_000_000 + number,
    )


def waiting_requests(server: Server, peer: Peer, number: int) -> str:
    return server.request(
        peer, "exclusive:first", note=wide(number, 256), ref=wide(number, 128), queueTimeout=1_000_000 + number
    )


def waiting_requests_with_a_trace(server: Server, peer: Peer, number: int) -> str:
    return server.request(
        peer,
        "exclusive:first",
        transactionName=ascii_text(number),
        note=ascii_text(number),
        traceparent=traceparent(number),
        queueTimeout=1_000_000 + number,
    )


def queues_of_their_own(server: Server, peer: Peer, number: int) -> str:
    name = "exclusive:" + ascii_text(number)
    return server.request(peer, name) or server.request(peer, name, queueTimeout=1_000_000 + number)


def detached_sessions(server: Server, peer: Peer, number: int) -> str:  # noqa: ARG001
    hello = {"session": f"{number:020}", "note": wide(number, 256), "session_timeout_ms": 1_000_000.0 + number}
    other = server.connect(**hello)
    rejection = server.request(other, f"exclusive:{number}")
    server.lose(other)
    return rejection


def ended_sessions(server: Server, peer: Peer, number: int) -> str:  # noqa: ARG001
    """Their locks refer to them."""
    other = server.connect(note=wide(number, 256))
    rejection = server.request(other, f"exclusive:{number}", transactionTimeout=1_000_000 + number)
    server.lose(other)
    return rejection


def watches(server: Server, peer: Peer, number: int) -> str:
    peers: list[Peer] = server.__dict__.setdefault("watchers", [peer])
    if number % 100 == 99:
        peers.append(server.connect())
    ((command, answer),) = server.send(peers[-1], "watch", prefix=wide(number, 512))
    assert command in {"watching", "error"}
    return str(answer["message"]) if command == "error" else ""


FILLS: list[Fill] = [
    locks_with_short_texts,
    locks_with_long_texts,
    locks_of_many_names,
    shared_locks,
    locks_of_one_transaction,
    waiting_requests,
    waiting_requests_with_a_trace,
    queues_of_their_own,
    detached_sessions,
    ended_sessions,
    watches,
]


@pytest.mark.parametrize("principal", [None, "orders"])
@pytest.mark.parametrize("fill", FILLS)
def test_each_kind_is_rejected_at_the_bound_and_takes_at_most_its_memory(
    fill: Fill, principal: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "_single_resource_cache", {})
    bound = 3 * MIB
    server = Server(max_state=bound, max_state_per_principal=bound)
    peer = server.connect(principal, session="a secret of sixteen")
    assert not server.request(peer, "exclusive:first")
    gc.collect()
    tracemalloc.start()
    try:
        started = tracemalloc.get_traced_memory()[0]
        number, rejection = 0, ""
        while not rejection:
            rejection = fill(server, peer, number)
            number += 1
        commands._single_resource_cache.clear()
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0] - started
    finally:
        tracemalloc.stop()
    assert f"at most {bound} bytes" in rejection
    assert number > 20
    assert taken <= server.size.bytes <= bound + SESSION_BYTES
    server.check()
    before = server.size.bytes, {**server.manager.table.held}, {**server.manager.table.waiting}
    assert fill(server, peer, number).startswith(("too much memory", "watch: too much memory"))
    assert before[1:] == ({**server.manager.table.held}, {**server.manager.table.waiting})
    assert server.size.bytes == before[0]


def test_there_is_room_again_after_a_release() -> None:
    server = Server(max_state=2 * MIB)
    peer = server.connect()
    ids = []
    while not locks_with_long_texts(server, peer, len(ids)):
        ids.append(server.last_id)
    for id_ in ids[:2]:
        server.send(peer, "release", id=id_)
    assert not locks_with_long_texts(server, peer, 1_000)
    assert not locks_with_long_texts(server, peer, 1_001)
    assert locks_with_long_texts(server, peer, 1_002)


@pytest.mark.parametrize("principal", [None, "orders"])
@pytest.mark.parametrize("names", [1, 8])
def test_the_bound_is_exact_although_it_is_not_checked_for_each_request(names: int, principal: str | None) -> None:
    bound = 4 * MIB
    server = Server(durable=False, max_state=bound, max_state_per_principal=2 * bound)
    peer, number = server.connect(principal), 0
    while not server.request(peer, *(f"exclusive:{number}-{each}" for each in range(names))):
        number += 1
    assert bound - MAX_REQUEST_BYTES < server.size.bytes <= bound


@pytest.mark.parametrize("principal", [None, "orders"])
def test_watches_take_the_room_of_requests_that_need_no_check(principal: str | None) -> None:
    server = Server(durable=False, max_state=MIB, max_state_per_principal=2 * MIB)
    peer = server.connect(principal)
    assert not server.request(peer, "exclusive:first")
    number = 0
    while not watches(server, peer, number):
        number += 1
    assert [server.request(peer, *(f"exclusive:{each}-{name}" for name in range(8))) == "" for each in range(9)] == [
        False
    ] * 9


def test_a_principal_has_a_bound_of_its_own() -> None:
    server = Server(max_state=4 * MIB, max_state_per_principal=MIB)
    orders, wallets, anonymous = server.connect("orders"), server.connect("wallets"), server.connect()
    number = 0
    while not (rejection := server.request(orders, f"exclusive:{number}")):
        number += 1
    assert rejection == (
        f"too much memory: the requests, sessions and watches of a principal may take at most {MIB} bytes, "
        "and each name counts as at least 2"
    )
    assert number == MIB // STATE_COSTS["locks with short texts"]
    assert not server.request(wallets, "exclusive:w")
    assert not server.request(anonymous, "exclusive:a")
    ((_, answer),) = server.send(orders, "watch", prefix=wide("w", 512))
    assert "of a principal" in str(answer["message"])
    server.send(orders, "release", id=server.last_id - 3)
    assert not server.request(orders, "exclusive:again")
    server.check()


def test_by_default_a_principal_can_use_half_of_the_state() -> None:
    assert Server(max_state=4 * MIB).size.max_share == 2 * MIB


# -- the share of a principal in each count -------------------------------------------------------------------


@pytest.mark.parametrize(("share", "part"), [(0, 2), (MIB, 4), (8 * MIB, 1)])
def test_the_share_of_a_principal_is_the_same_part_of_each_count(share: int, part: int) -> None:
    limits = Limits(max_state=4 * MIB, max_state_per_principal=share)
    assert limits.principal_share == 1 / part
    size = Server(max_state=4 * MIB, max_state_per_principal=share).size
    assert size.max_queue_share == 1_000_000 // part


@pytest.mark.parametrize("names", [1, 8, 40])
def test_a_principal_cannot_have_all_locks(names: int) -> None:
    server = Server(max_locks=200)
    orders, wallets = server.connect("orders"), server.connect("wallets")
    number = 0
    while not (rejection := server.request(orders, *(f"exclusive:{number}-{each}" for each in range(names)))):
        number += 1
    assert "of a principal" in rejection
    assert 100 - names <= server.manager.table.locks <= 100
    for other in range(99 // names):
        assert not server.request(wallets, *(f"exclusive:w{other}-{each}" for each in range(names)))
    server.check()


def test_a_principal_without_many_locks_can_have_one_even_if_the_limit_is_one() -> None:
    server = Server(max_locks=1)
    assert not server.request(server.connect("orders"), "exclusive:a")


def test_a_principal_cannot_have_all_entries_of_the_queues() -> None:
    server = Server(max_queue=40)
    orders, wallets, anonymous = server.connect("orders"), server.connect("wallets"), server.connect()
    assert not server.request(anonymous, "exclusive:a", "exclusive:b")
    ids = []
    for _ in range(10):
        assert not server.request(orders, "exclusive:a", "exclusive:b")
        ids.append(server.last_id)
    rejection = "too many waiting requests: one principal may have at most 20 entries in the wait queues"
    assert server.request(orders, "shared:a") == rejection
    assert not server.request(orders, "exclusive:c"), "a request that need not wait is granted"
    for _ in range(9):
        assert not server.request(wallets, "exclusive:a", "exclusive:b")
    server.send(orders, "release", id=ids.pop())
    assert not server.request(orders, "exclusive:a", "exclusive:b")
    assert server.request(orders, "shared:a") == rejection
    for _ in range(2):
        assert not server.request(anonymous, "exclusive:a")
    assert server.request(anonymous, "exclusive:a").startswith("too many waiting requests: all wait queues together")
    server.check()
    server.send(anonymous, "release", id=ids[0] - 1)  # grants the first request of orders
    assert not server.request(orders, "exclusive:a")
    server.check()


@pytest.mark.parametrize("session", [True, False])
def test_sessions_without_a_connection_are_charged_to_their_principal(session: bool) -> None:
    server = Server(max_state=MIB)
    wallets = server.connect("wallets")
    assert not server.request(wallets, "exclusive:first")

    def begin_and_lose(number: int) -> str:
        peer = server.connect("orders", **({"session": f"{number:020}"} if session else {}))
        if session:  # it retains one reply
            rejection = server.request(peer, "exclusive:first", queueTimeout=0)
        else:  # it has a held lock
            rejection = server.request(peer, f"exclusive:{number}")
        server.lose(peer)
        return rejection

    number = 0
    while not (rejection := begin_and_lose(number)):
        number += 1
    assert "of a principal" in rejection
    server.check()
    assert MIB // 2 - 2 * SESSION_BYTES < server.size.shares["orders"] < MIB // 2 + SESSION_BYTES
    assert not server.request(wallets, "exclusive:w")
    if session:
        peer = server.connect("orders", session=f"{0:020}")
        assert not server.request(peer, "exclusive:o"), "the session that is resumed is not charged"
        server.check()


def test_a_principal_drops_its_own_replies_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "MAX_RETAINED_REPLIES_TOTAL", 40)
    server = Server()
    peers = {name: server.connect(name, session="a secret of sixteen") for name in ("orders", "wallets", "users")}

    def end_requests(name: str, count: int) -> int:
        for _ in range(count):
            assert not server.request(peers[name], "exclusive:a", ref=f"r{server.manager.next_id}")
            server.send(peers[name], "release", id=server.last_id)
        return len(peers[name].session.retained_replies or ())

    assert end_requests("wallets", 5) == 5
    assert end_requests("orders", 200) == 20
    assert end_requests("wallets", 0) == 5
    assert end_requests("users", 18) == 18
    assert [end_requests(name, 0) for name in peers] == [17, 5, 18], "those of the principal with the most are dropped"
    first = peers["wallets"].session.retained_replies[0].ref  # type: ignore[index]
    assert [command for command, _ in server.send(peers["wallets"], "release", ref=first)] == ["released"]


def test_a_principal_with_a_very_small_share_retains_its_last_reply() -> None:
    """Its part of all retained replies is less than one. A reply that is not retained would never be deleted from the store."""
    server = Server(max_state_per_principal=Limits().max_state // 200_000)
    peer = server.connect("orders", session="a secret of sixteen")
    for number in range(3):
        assert not server.request(peer, "exclusive:a", ref=f"r{number}")
        server.send(peer, "release", id=server.last_id)
        (reply,) = peer.session.retained_replies or ()
        assert reply.id == server.last_id


def test_principals_with_replies_are_seldom_searched_for_the_one_with_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """20,000 clients with certificates may retain replies, and 250 requests expire in a slice."""
    monkeypatch.setattr(sessions_module, "MAX_RETAINED_REPLIES_TOTAL", 1_000)
    searched: list[int] = []

    def heapify(items: list[Any]) -> None:
        searched.append(len(items))
        heapq.heapify(items)

    monkeypatch.setattr(sessions_module, "heapify", heapify)
    table, ids = SessionTable(), set[int]()
    rng = Random(12)  # noqa: S311 - not a secret
    sessions = [table.attach(f"{number:020}", 1_000, f"p{number}")[0] for number in range(300)]
    for id_ in range(1, 3_001):
        session = rng.choice(sessions)
        ids.add(id_)
        ids.difference_update(table.retain(session, RetainedReply(id_, None, session, 0.0, b"")))
    assert {id_ for replies in table._replies.values() for id_ in replies} == ids
    assert 990 <= len(ids) <= 1_000
    assert max(map(len, table._replies.values())) <= 5, "the replies of the principals with the most are dropped"
    assert 0 < len(searched) <= 2_000 // 10


def test_connections_of_a_principal_retain_only_its_share_of_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "MAX_RETAINED_REPLIES_TOTAL", 100)
    server = Server(durable=False)

    def end_requests(peer: Peer, count: int) -> int:
        for number in range(count):
            assert not server.request(peer, "exclusive:a", ref=f"r{number}")
            server.send(peer, "release", id=server.last_id)
        return len(peer.session.retained_replies or ())

    orders = [server.connect("orders") for _ in range(3)]
    assert [end_requests(peer, 80) for peer in orders] == [50 + GUARANTEED_REPLIES] + 2 * [GUARANTEED_REPLIES]
    assert end_requests(server.connect("wallets"), 80) == 50 + GUARANTEED_REPLIES
    server.lose(orders[0])
    assert end_requests(orders[1], 80) == 50 + GUARANTEED_REPLIES


def test_the_entries_of_a_request_in_the_queues_of_subtrees_count_for_its_principal() -> None:
    depth, server = 9, Server(max_queue=200)
    orders, wallets = server.connect("orders"), server.connect("wallets")
    for number in range(depth):
        assert not server.request(wallets, "shared:" + "a/" * (number + 1) + "**")
    subtree_ids = [*server.manager.table.held]
    name = "exclusive:" + "a/" * depth
    for number in range(100 // (depth + 1)):
        assert not server.request(orders, f"{name}{number}", queueTimeout=1_000_000)
    assert server.size.queue_entries == {"orders": 100}
    rejection = "too many waiting requests: one principal may have at most 100 entries in the wait queues"
    assert server.request(orders, name + "more", queueTimeout=1_000_000) == rejection
    assert not server.request(wallets, name + "more", queueTimeout=1_000_000)
    for id_ in subtree_ids:
        server.send(wallets, "release", id=id_)
    server.dispatcher.expire(server.now)  # grants what is pending
    assert not server.manager.table.waiting
    assert server.size.queue_entries == {}


def test_a_new_leader_charges_the_sessions_and_replies_of_each_principal() -> None:
    before = Server()
    holder = before.connect("wallets", session="a secret of sixteen")
    assert not before.request(holder, "exclusive:first")
    for number in range(3):  # each retains one reply
        peer = before.connect("orders", session=f"{number:020}", session_timeout_ms=1e6)
        assert not before.request(peer, "exclusive:first", queueTimeout=0)
    assert not before.request(peer, "exclusive:first", queueTimeout=1_000_000)
    after = recovered(before)
    after.check()
    assert after.size.shares["orders"] == 3 * SESSION_BYTES + STATE_COSTS["locks with short texts"]
    assert after.size.queue_entries == {"orders": 1}
    assert {principal: len(replies) for principal, replies in after.dispatcher.sessions._replies.items()} == {
        "orders": 3
    }


# -- retained replies -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("session", [None, "a secret of sixteen"])
@pytest.mark.parametrize("fill", [locks_with_short_texts, locks_with_long_texts, locks_of_many_names])
def test_retained_replies_take_at_most_their_bound(
    fill: Fill, session: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "_single_resource_cache", {})
    server = Server()
    peer = server.connect(session=session)
    count = 300
    gc.collect()
    tracemalloc.start()
    try:
        started = tracemalloc.get_traced_memory()[0]
        for number in range(count):
            assert not fill(server, peer, number)
            server.send(peer, "release", id=server.last_id)
        commands._single_resource_cache.clear()
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0] - started
    finally:
        tracemalloc.stop()
    assert server.size.bytes == 0
    assert len(peer.session.retained_replies or ()) == count
    assert taken <= count * (ENDED_REQUEST_BYTES if session is None else REPLY_BYTES)


def test_a_long_reply_is_retained_without_its_details() -> None:
    server = Server()
    holder, peer = server.connect(), server.connect(session="a secret of sixteen")
    server.request(holder, *[f"exclusive:{wide(str(number), 500)}" for number in range(10)])
    names = [f"exclusive:{wide(str(number), 500)}" for number in range(10)]
    (_, (_, released)) = server.send(peer, "request", resources=names, queueTimeout=0, ref="r")
    assert len(orjson.dumps(released)) > MAX_RETAINED_REPLY_BYTES
    (reply,) = peer.session.retained_replies or ()
    assert 0 < len(reply.message) < 200
    assert orjson.loads(reply.message)["payload"]["reason"] == "queue-timeout"


@pytest.mark.parametrize("session", [None, "a secret of sixteen"])
def test_a_retry_of_a_large_request_that_has_ended_is_recognized(session: str | None) -> None:
    server = Server()
    peer = server.connect(session=session)
    request = {"resources": ["exclusive:" + wide("a", 500), "shared:b"], "note": wide("n", 200), "ref": "r"}
    ((_, _), (_, locked)) = server.send(peer, "request", **request)
    server.send(peer, "release", id=locked["id"])
    (reply,) = peer.session.retained_replies or ()
    assert reply.request is None
    retry = server.send(peer, "request", **request | {"resources": request["resources"][::-1]})
    assert [command for command, _ in retry] == ["queued", "released"]
    ((command, answer),) = server.send(peer, "request", **request | {"note": wide("m", 200)})
    assert (command, answer["code"]) == ("error", "ref-conflict")


def test_connections_without_a_session_share_the_replies_that_they_retain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "MAX_RETAINED_REPLIES_TOTAL", 100)
    server = Server(durable=False)
    peers = [server.connect() for _ in range(5)]

    def end_requests(peer: Peer, count: int) -> int:
        for number in range(count):
            server.request(peer, "exclusive:a", ref=f"r{number}")
            server.send(peer, "release", id=server.last_id)
        return len(peer.session.retained_replies or ())

    assert end_requests(peers[0], 80) == 80
    assert [end_requests(peer, 80) for peer in peers[1:]] == [GUARANTEED_REPLIES] * 4
    server.lose(peers[0])
    assert end_requests(peers[1], 80) > 60
    assert server.dispatcher.sessions._extra_replies <= 100
    monkeypatch.setattr(sessions_module, "MAX_RETAINED_REPLIES_TOTAL", 10**6)
    assert end_requests(peers[2], MAX_RETAINED_REPLIES + 50) == MAX_RETAINED_REPLIES


# -- connections ----------------------------------------------------------------------------------------------


async def test_connections_take_at_most_their_bound() -> None:
    """Without the transport: a socket of uvloop takes about 2 KiB."""
    pipeline = Pipeline(LockManager(), MemoryStore(), Limits(), Stats(), lambda: 0.0, [].append)
    admission: AdmissionControl[Connection] = AdmissionControl(Limits())
    connections, count = [], 200
    gc.collect()
    tracemalloc.start()
    try:
        started = tracemalloc.get_traced_memory()[0]
        for number in range(count):
            connection = Connection(pipeline, Limits(), admission)
            connection.connection_made(RecordingTransport([].append))
            lines = [{"command": "hello", "payload": {"note": wide(number, 256)}}]
            for reply in range(GUARANTEED_REPLIES):
                texts = {
                    "transactionName": ascii_text(number),
                    "note": ascii_text(number),
                    "ref": wide(reply, SHORT_REF),
                }
                resources = [f"exclusive:{ascii_text(f'{number}-{reply}-{name}')}" for name in range(SHORT_NAMES)]
                lines += [
                    {"command": "request", "payload": {"resources": resources, **texts}},
                    {"command": "release", "payload": {"ref": texts["ref"]}},
                ]
            connection.data_received(b"".join(orjson.dumps(line) + b"\n" for line in lines))
            await pipeline.drained()
            connections.append(connection)
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0] - started
    finally:
        tracemalloc.stop()
    assert all(len(connection.session.retained_replies or ()) == GUARANTEED_REPLIES for connection in connections)
    assert taken / count <= CONNECTION_BYTES - MAX_WRITE_BYTES - 2_048
    pipeline.stop()


# -- recovery -------------------------------------------------------------------------------------------------


def recovered(before: Server, **limits: int) -> Server:
    """Return a server that continues from the state that another one has stored."""
    state = StateMachine()
    batch = before.dispatcher.snapshot(before.manager.next_id, before.now)
    decoder = RecordDecoder()
    batch.changes = {id_: decoder.decode(id_, encode(change)) for id_, change in batch.changes.items()}  # type: ignore[arg-type]
    state.apply(batch)
    after = Server(**limits)
    after.dispatcher = Dispatcher(state.manager, Limits(**limits), after.stats, BatchOutcome())
    after.manager, after.size, after.now = state.manager, after.dispatcher.size, before.now
    for _ in after.dispatcher.recover(state.retained_replies.values(), lambda: after.now):
        pass
    return after


def test_a_leader_keeps_a_state_that_is_larger_than_its_bound() -> None:
    before = Server()
    peer = before.connect("orders", session="a secret of sixteen")
    for number in range(40):
        locks_with_long_texts(before, peer, number)
    after = recovered(before, max_state=MIB // 4)
    after.check()
    assert len(after.manager.table.held) == 40
    assert after.size.bytes > MIB // 4
    peer = after.connect("orders", session="a secret of sixteen")
    assert "too much memory" in after.request(peer, "exclusive:more")
    for id_ in list(after.manager.table.held):
        after.send(peer, "release", id=id_)
    after.check()
    assert not after.request(peer, "exclusive:more")


def test_first_blockers_with_long_texts_are_not_kept() -> None:
    """Kept texts would outlive the blockers, which are not charged after their end."""
    server = Server()
    peer = server.connect()
    assert not server.request(peer, "exclusive:a", note="short")
    assert not server.request(peer, "exclusive:a", note=wide("n", 200), traceparent=traceparent(1))
    assert len(server.size.first_blockers) == 1
    assert not server.request(peer, "exclusive:a", traceparent=traceparent(2))
    assert len(server.size.first_blockers) == 1
    assert list(server.size.first_blockers) == [server.last_id - 1]


@pytest.mark.parametrize("held_by_others", [0, 3])
def test_the_choices_of_a_request_are_measured_once(held_by_others: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be 10,000 of them. The request is admitted for all names, and charged for the names that it holds."""
    server = Server()
    peer = server.connect("orders")
    names = [wide(number, 200) for number in range(20)]
    for name in names[:held_by_others]:
        assert not server.request(peer, f"exclusive:{name}")
    measured: list[str] = []

    def measure(text: str) -> int:
        measured.append(text)
        return text_bytes(text)

    monkeypatch.setattr(size_module, "text_bytes", measure)
    server.send(peer, "request", anyOf=[f"exclusive:{name}" for name in names], target=20 - held_by_others)
    assert sorted(measured) == sorted(names)
    monkeypatch.undo()
    request = server.manager.table.held[server.last_id]
    assert len(request.exclusive) == 20 - held_by_others
    assert server.size.requests[request.id].excess == excess_bytes(request) > 0
    server.check()
