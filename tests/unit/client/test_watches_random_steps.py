"""Random steps: a consumer that applies all changes ends with the locks that are held.

The client's session talks to a server that supports only watches, over a connection that delivers late. Meanwhile locks are
granted and released, connections are lost, the server sends `lagged`, consumers are slow, and watches start and end.
"""

from __future__ import annotations

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from genie.client import watches
from genie.client.session import ClientSession
from genie.client.watches import Watch
from support.network.scripted_server import encode, welcome
from support.runs.searches import examples

PREFIXES = ("", "a", "ab", "b")
NAMES = ("a", "ab", "ab/1", "b", "c")
MAX_BUFFERED_CHANGES = 3


@pytest.fixture(autouse=True, scope="module")
def _small_buffer():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watches, "MAX_BUFFERED_CHANGES", MAX_BUFFERED_CHANGES)
        yield


class Server:
    """A server with one connection; `inbox` and `outbox` are the bytes in transit."""

    def __init__(self) -> None:
        self.held: dict[str, int] = {}
        self.prefixes: set[str] = set()
        self.inbox = self.outbox = b""
        self.ids = 0

    def disconnect(self) -> None:
        self.prefixes.clear()
        self.inbox = self.outbox = b""

    def execute_commands(self) -> None:
        lines, self.inbox = self.inbox.splitlines(), b""
        for line in lines:
            message = orjson.loads(line)
            ref = message["payload"]["ref"]
            match message["command"], message["payload"].get("prefix"):
                case "hello", _:
                    self.outbox += welcome(resumed=True)
                case "ping", _:
                    self.outbox += encode("pong", ref=ref)
                case "watch", prefix:
                    self.prefixes.add(prefix)
                    rows = [self.row(name) for name in self.held if name.startswith(prefix)]
                    self.outbox += encode("watching", prefix=prefix, held=rows, truncated=False, ref=ref)
                case "unwatch", prefix:
                    self.prefixes.discard(prefix)
                    self.outbox += encode("unwatched", prefix=prefix, ref=ref)

    def row(self, name: str) -> dict[str, object]:
        return {"resource": name, "mode": "exclusive", "id": self.held[name]}

    def toggle(self, name: str) -> None:
        self.ids += 1
        free = name not in self.held
        self.held.setdefault(name, self.ids)
        if any(map(name.startswith, self.prefixes)):
            self.outbox += encode("event", state="locked" if free else "unlocked", **self.row(name))
        if not free:
            del self.held[name]

    def lag(self) -> None:
        if self.prefixes:
            self.prefixes.clear()
            self.outbox += encode("event", state="lagged")


class Consumer:
    def __init__(self, prefix: str) -> None:
        self.watch = Watch(prefix)
        self.applied: dict[str, int] = {}
        self.waiting = False

    def take(self, count: int) -> None:
        for _ in range(min(count, len(self.watch.changes))):
            change = self.watch.changes.popleft()
            if change.state == "locked":
                assert self.applied.setdefault(change.resource, change.id) == change.id
            else:
                assert self.applied.pop(change.resource) == change.id


class Simulation:
    def __init__(self) -> None:
        self.session, self.server = ClientSession(), Server()
        self.consumers: list[Consumer] = []
        self.connected = False

    def record_outcomes(self, outcomes) -> None:
        for call, _, error in outcomes:
            assert error is None
            for consumer in self.consumers:
                if consumer.watch is call:
                    assert consumer.waiting, "woken twice"
                    assert consumer.watch.changes
                    consumer.waiting = False

    def take(self, consumer: Consumer, count: int) -> None:
        consumer.take(count)
        if not consumer.watch.changes and not consumer.waiting:
            consumer.waiting = True
            self.session.watches.request_next(consumer.watch, 0.0)

    def send(self) -> None:
        self.server.inbox += self.session.data_to_send()

    def deliver(self, size: int) -> None:
        data, self.server.outbox = self.server.outbox[:size], self.server.outbox[size:]
        self.record_outcomes(self.session.receive_data(data, 0.0))
        assert not self.session.handshake.close_reason
        assert all(len(consumer.watch.changes) <= MAX_BUFFERED_CHANGES + 2 * len(NAMES) for consumer in self.consumers)

    def lose_connection(self) -> None:
        self.server.disconnect()
        self.record_outcomes(self.session.on_disconnected("cut"))
        self.connected = False

    def exchange_all_messages(self) -> None:
        """Connect, and exchange messages until all changes are consumed and nothing is in transit."""
        if not self.connected:
            self.connected = True
            self.session.on_connected(0.0)
        while True:
            for consumer in self.consumers:
                self.take(consumer, 1000)
            self.send()
            self.server.execute_commands()
            if not self.server.outbox:
                break
            self.deliver(len(self.server.outbox))


steps = st.one_of(
    st.tuples(st.just("toggle"), st.sampled_from(NAMES)),
    st.tuples(st.just("toggle"), st.sampled_from(NAMES)),
    st.tuples(st.just("watch"), st.sampled_from(PREFIXES)),
    st.tuples(st.just("end"), st.integers(0, 3)),
    st.tuples(st.just("take"), st.tuples(st.integers(0, 3), st.integers(1, 4))),
    st.tuples(st.just("deliver"), st.integers(1, 400)),
    st.tuples(st.sampled_from(["connect", "send", "work", "send", "work", "cut", "lag", "calm"]), st.none()),
)


def execute_step(simulation: Simulation, name: str, value) -> None:
    match name:
        case "toggle":
            simulation.server.toggle(value)
        case "watch" if len(simulation.consumers) < 4:
            simulation.consumers.append(Consumer(value))
            simulation.take(simulation.consumers[-1], 1)
        case "end" if value < len(simulation.consumers):
            consumer = simulation.consumers.pop(value)
            assert bool(simulation.session.unwatch(consumer.watch, 0.0)) == consumer.waiting
        case "take" if value[0] < len(simulation.consumers):
            simulation.take(simulation.consumers[value[0]], value[1])
        case "deliver" if simulation.connected:
            simulation.deliver(value)
        case "connect" if not simulation.connected:
            simulation.connected = True
            simulation.session.on_connected(0.0)
        case "cut":
            simulation.lose_connection()
        case "lag":
            simulation.server.lag()
        case "send":
            simulation.send()
        case "work":
            simulation.server.execute_commands()
        case "calm":
            simulation.exchange_all_messages()


LAGGED_BEFORE_THE_REPLY = [
    ("watch", ""),
    ("calm", None),
    ("toggle", "a"),
    ("watch", ""),
    ("end", 1),
    ("deliver", 93),
    ("lag", None),
    ("deliver", 49),
    ("end", 0),
]
"""The second watch was closed, but the server executes its `watch` after it sent `lagged`."""


@examples(60)
@example(LAGGED_BEFORE_THE_REPLY)
@given(st.lists(steps, min_size=20, max_size=100))
def test_consumers_end_with_the_locks_that_are_held(script):
    simulation = Simulation()
    for name, value in script:
        execute_step(simulation, name, value)
    simulation.exchange_all_messages()
    for consumer in simulation.consumers:
        held = {name: id_ for name, id_ in simulation.server.held.items() if name.startswith(consumer.watch.prefix)}
        assert consumer.applied == held
    assert simulation.server.prefixes == {consumer.watch.prefix for consumer in simulation.consumers}
    for consumer in simulation.consumers:
        simulation.session.unwatch(consumer.watch, 0.0)
    simulation.consumers.clear()
    simulation.exchange_all_messages()
    assert not simulation.server.prefixes
