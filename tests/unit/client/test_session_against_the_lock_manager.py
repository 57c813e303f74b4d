"""Random steps: every call gets one outcome, and no lock stays held without an owner.

The client's session talks to the server's dispatcher, over a connection that delivers late and in pieces. Meanwhile callers
cancel, another client releases, time passes, the connection is lost or left by the keepalive, and the server restarts,
with or without its store. The commands take the server as much time as the script says.
"""

from __future__ import annotations

from itertools import chain
from unittest import mock

from hypothesis import example, given
from hypothesis import strategies as st

from genie import work_time
from genie.client import commands
from genie.client.commands import Call, Extend, Ping, Request, RequestState, make_any_request
from genie.client.session import ClientSession
from genie.config import Limits
from genie.core import ENDED, LockManager
from genie.errors import ConnectionLost, GenieError, LockLost, TransactionTimeout, Unavailable
from genie.observability.stats import Stats
from genie.protocol import messages
from genie.protocol.commands import read_hello
from genie.protocol.resources import parse_resource
from genie.server.dispatcher import EXPENSIVE_S, Dispatcher
from genie.server.outcome import BatchOutcome
from genie.server.peer import END_OF_INPUT, ConnectionState, Peer
from genie.server.turns import LONG_S
from genie.storage.redis.records import RecordDecoder, encode
from genie.storage.store import Batch, RetainedReply, StateMachine
from support.core.turns import TurnsWithoutLoop
from support.runs.searches import examples

SESSION_S = 10.0

MAX_ITERATIONS = 100
"""More iterations than the slices of an expiry need."""


def make_client() -> Peer:
    """Return the server's view of a connected client, without a connection."""
    client = Peer()
    client.enter_state(ConnectionState.READY)
    client.session.quiet = True
    return client


class Clock:
    """The clock with which the server measures its work. Each command and each slice takes `work_s`."""

    def __init__(self) -> None:
        self.now = self.work_s = 0.0

    def monotonic(self) -> float:
        self.now += self.work_s
        return self.now


class Server:
    """A server with one connection at a time, and another client; `input_queue` and `outbox` are the bytes in transit."""

    def __init__(self) -> None:
        self.manager = LockManager()
        self.dispatcher = self.make_dispatcher()
        self.client, self.other_client = make_client(), make_client()
        self.stored: dict[int, bytes] = {}
        self.input_queue = b""
        self.outbox = b""

    def make_dispatcher(self) -> Dispatcher:
        self.turns = TurnsWithoutLoop()
        outcome = BatchOutcome(self.manager.next_id)
        return Dispatcher(self.manager, Limits(), Stats(), outcome, turns=self.turns)

    def execute_commands(self, now: float) -> None:
        lines, self.input_queue = self.input_queue.split(b"\n")[:-1], b""
        if lines and (hello := read_hello(lines[0])) is not None:
            self.dispatcher.execute(now * 1000, self.client, iter([hello]))
            del lines[0]
        todo = iter(lines)
        unfinished = self.dispatcher.execute(now * 1000, self.client, todo)
        while unfinished is not None:
            items = chain([unfinished], todo)
            unfinished = self.dispatcher.execute(now * 1000, self.client, items, may_be_slow=True)
        self.take_output()

    def take_output(self) -> None:
        """Store the write set, then pass on the replies."""
        outcome = self.dispatcher.outcome
        changes, outcome.changes, outcome.stored_below = outcome.changes, {}, self.manager.next_id
        for id_, change in changes.items():
            self.stored.pop(id_, None)
            if isinstance(change, RetainedReply) or (change is not None and change.state is not ENDED):
                self.stored[id_] = encode(change)
        self.outbox += b"".join(self.client.outbox)
        self.client.outbox.clear()

    def id_of(self, request: Request) -> int:
        """Return the id of a waiting request, which its client does not know; 0 if there is none."""
        waiting = self.manager.table.waiting.values()
        return next((other.id for other in waiting if other.ref == request.ref), 0)

    def release(self, id: int, now: float) -> None:
        self._execute_for_another_client(messages.command("release", id=id), now)

    def extend(self, id: int, hold: float, now: float) -> None:
        self._execute_for_another_client(messages.command("extend", id=id, transactionTimeout=hold * 1000), now)

    def _execute_for_another_client(self, line: bytes, now: float) -> None:
        self.dispatcher.execute(now * 1000, self.other_client, iter([line]))
        self.take_output()

    def expire(self, now: float) -> None:
        """End all that has expired. A slice that must wait runs in a later iteration."""
        deadlines = self.manager.deadlines, self.dispatcher.sessions.deadlines
        for _ in range(MAX_ITERATIONS):
            if min(each.next for each in deadlines) > now * 1000:
                return
            self.turns._end_iteration()
            self.dispatcher.expire(now * 1000)
            self.take_output()
        raise AssertionError("a slice still waits for its turn")

    def disconnect(self, peer: Peer, now: float) -> None:
        peer.closed = True
        self.dispatcher.execute(now * 1000, peer, iter([END_OF_INPUT]))
        self.take_output()

    def restart(self, stored: dict[int, bytes], now: float) -> None:
        read = RecordDecoder().decode
        replica = StateMachine()
        changes = {id_: read(id_, data) for id_, data in stored.items()}
        # Without a store, ids start at the time of the start, which is beyond all assigned ids.
        next_id = self.manager.next_id + (0 if stored else 1000)
        replica.apply(Batch(changes, next_id, self.manager.next_fence, now * 1000))
        self.stored = dict(stored)
        self.manager = replica.manager
        self.dispatcher = self.make_dispatcher()
        self.client, self.other_client = make_client(), make_client()
        self.input_queue = self.outbox = b""
        for _ in self.dispatcher.recover(replica.retained_replies.values(), lambda: now * 1000):
            pass
        self.take_output()


class Simulation:
    """The client, the server, and what is expected of them.

    `may_have_ended` are the ids that another client or a call by id may have released, that timed out, or that the server
    lost. `pending_calls` are those without an outcome. `lost` are the requests whose locks were reported as lost.
    """

    def __init__(self, clock: Clock) -> None:
        self.now = 0.0
        self.clock = clock
        self.server = Server()
        self.session = ClientSession(session_timeout=SESSION_S)
        self.requests: list[Request] = []
        self.pending_calls: dict[Call, str] = {}
        self.lost: dict[Request, GenieError] = {}
        self.ids: dict[int, Request] = {}
        self.detached: set[Request] = set()
        self.may_have_ended: set[int] = set()
        self.old_peer: Peer | None = None
        self.connected = False
        self.connect_until_up()

    @property
    def leaked_locks(self) -> set[int]:
        """Ids of held locks that the client never knew, of a session that has ended."""
        held = self.server.manager.table.held
        return {id_ for id_, request in held.items() if request.origin is None and id_ not in self.ids}

    def record_outcomes(self, outcomes) -> None:
        for call, _, error in outcomes:
            if call.future is not None:
                assert not (isinstance(call, Request) and isinstance(error, ConnectionLost)), (
                    "a request survives a lost connection"
                )
                call.future = None
                del self.pending_calls[call]
            elif isinstance(call, Request) and call.error is not None and not isinstance(error, Unavailable):
                assert call not in self.lost, "lost twice"
                assert isinstance(error, LockLost)
                self.lost[call] = error

    def send_call(self, call: Call) -> None:
        call.future = self.pending_calls[call] = type(call).__name__
        if isinstance(call, Request):
            self.session.requests.send(call, self.now)
        else:
            self.session.send(call, self.now)

    def lose_connection(self) -> None:
        self.server.input_queue = self.server.outbox = b""
        self.record_outcomes(self.session.on_disconnected("cut"))
        self.connected = False

    def connect(self) -> None:
        """Open a new connection; the server may not have detected the end of the old one yet."""
        self.connected = True
        self.server.client, old = make_client(), self.server.client
        self.server.outbox = b""  # the rest was for the old one
        self.session.on_connected(self.now)
        if not old.closed:
            self.old_peer = old

    def connect_until_up(self) -> None:
        """Connect, and exchange messages until nothing is in transit."""
        if not self.connected:
            self.connect()
        while True:
            self.send()
            self.server.execute_commands(self.now)
            if not self.server.outbox:
                break
            self.deliver(len(self.server.outbox))
        if self.old_peer is not None:
            self.server.disconnect(self.old_peer, self.now)
            self.old_peer = None

    def send(self) -> None:
        self.server.input_queue += self.session.data_to_send()

    def deliver(self, size: int) -> None:
        data, self.server.outbox = self.server.outbox[:size], self.server.outbox[size:]
        self.record_outcomes(self.session.receive_data(data, self.now))
        assert not self.session.handshake.close_reason
        self.ids |= {request.id: request for request in self.requests if request.id}


requests = st.tuples(st.just("request"), st.sampled_from("ab"), st.sampled_from([0, 1, 60]), st.sampled_from([3, 60]))
choices = st.tuples(
    st.just("choose"), st.sampled_from(["ab", "ba", "abcd"]), st.integers(1, 3), st.sampled_from([3, 60])
)
steps = st.one_of(
    requests,
    requests,
    choices,
    st.tuples(st.just("up")),
    st.tuples(
        st.sampled_from(["leave", "leave", "abandon", "abandon", "extend", "detach", "other client", "by id"]),
        st.integers(0, 5),
        st.sampled_from([1, 5]),
    ),
    st.tuples(st.just("lose"), st.booleans()),
    st.tuples(st.sampled_from(["cut", "restart", "forget", "connect", "connect", "connect"])),
    st.tuples(st.just("deliver"), st.integers(1, 400)),
    st.tuples(st.just("pass"), st.sampled_from([0.4, 1.1, 4.0, SESSION_S])),
    st.tuples(st.just("load"), st.sampled_from([0.0, 2 * EXPENSIVE_S, 2 * LONG_S])),
    st.tuples(st.sampled_from(["send", "work", "tick", "ping"])),
)


def execute_client_step(simulation: Simulation, name: str, values: list) -> None:
    session, server = simulation.session, simulation.server
    request = (
        simulation.requests[-1 - values[0] % len(simulation.requests)]
        if len(values) == 2 and simulation.requests
        else None
    )
    match name, values:
        case "request", [resource, wait, hold]:
            new_request = commands.make_request(
                session.calls.new_ref(), [resource], queue_timeout=wait, transaction_timeout=hold
            )
            simulation.requests.append(new_request)
            simulation.send_call(new_request)
        case "choose", [names, target, hold]:
            new_request = make_any_request(session.calls.new_ref(), [*names], target, transaction_timeout=hold)
            simulation.requests.append(new_request)
            simulation.send_call(new_request)
        case "leave", _ if request and request.state is RequestState.HELD:
            release = session.requests.release(request, simulation.now)
            release.future = simulation.pending_calls[release] = "leave"
        case "detach", _ if request and request.is_held(simulation.now):
            session.requests.detach(request, simulation.now)
            server.extend(request.id, 60, simulation.now)
            simulation.detached.add(request)
        case "abandon", _ if request:
            simulation.pending_calls.pop(request, None)
            session.abandon(request, simulation.now)
        case "extend", [_, hold] if request and request.state is RequestState.HELD and session.up:
            simulation.send_call(Extend(request.id, hold, request))
        case "by id", _ if request and (id_ := request.id or server.id_of(request)):
            simulation.may_have_ended.add(id_)
            simulation.send_call(commands.Release(id_))
        case "ping", _ if session.up:
            simulation.send_call(Ping())
        case "other client", _ if request and request.id:
            simulation.may_have_ended.add(request.id)
            server.release(request.id, simulation.now)
        case "load", [seconds]:
            simulation.clock.work_s = seconds
        case _:
            execute_step(simulation, name, values)


def execute_step(simulation: Simulation, name: str, values: list) -> None:
    session, server = simulation.session, simulation.server
    match name, values:
        case "deliver", [size] if simulation.connected:
            simulation.deliver(size)
        case "pass", [seconds]:
            simulation.now += seconds
            held = server.manager.table.held.values()
            simulation.may_have_ended |= {lock.id for lock in held if lock.deadline <= simulation.now * 1000}
            server.expire(simulation.now)
        case "send", _:
            simulation.send()
        case "work", _:
            server.execute_commands(simulation.now)
        case "tick", _:
            simulation.record_outcomes(session.on_timer(simulation.now))
            if session.handshake.close_reason:
                simulation.lose_connection()  # silent server; it detects the end at the next connection
        case "up", _:
            simulation.connect_until_up()
        case "connect", _ if not simulation.connected and simulation.old_peer is None:
            simulation.connect()
        case "lose", [arrived] if simulation.connected:
            if arrived:
                server.execute_commands(simulation.now)  # but the replies are lost
            simulation.lose_connection()  # without notice to the server
        case "cut", _:
            server.disconnect(server.client, simulation.now)
            simulation.lose_connection()
        case "restart" | "forget", _:
            simulation.may_have_ended |= set(server.manager.table.held if name == "forget" else ())
            server.restart(server.stored if name == "restart" else {}, simulation.now)
            simulation.old_peer = None
            simulation.lose_connection()


TIMED_OUT_BEFORE_A_RESTART = [
    *[("request", "a", 0, 3), ("request", "b", 0, 3), ("up",), ("lose", False)],
    *[("pass", 4.0), ("restart",), ("leave", 0, 1)],
]
"""The resumption reports the timeout, and the release an unknown id: the lock is lost once."""
RELEASED_BEFORE_A_RESTART = [("request", "a", 0, 3), ("up",), ("leave", 0, 1), ("send",), ("lose", True), ("restart",)]
"""The release was executed, its reply was lost, and the server does not know the id after its restart."""

RELEASED_BY_ID_WHILE_IT_WAITS = [("request", "a", 0, 60), ("request", "a", 60, 60), ("up",), ("by id", 0, 1)]
"""The client does not know the id of its waiting request, and the reply to the release has another `ref`."""

EXPIRES_AFTER_A_LONG_COMMAND = [
    *[("load", 2 * LONG_S), ("request", "a", 0, 60), ("request", "a", 0, 60)],
    *[("up",), ("lose", True)],
]
"""No slice can run in the iteration of the command, so the lock expires in a later iteration."""

DETACHED_BEFORE_A_DISCONNECT = [
    *[("request", "a", 0, 3), ("up",), ("detach", 0, 1), ("lose", False)],
    *[("pass", 4.0), ("tick",)],
]
"""The lock expires on the clock of the disconnected client, but was extended by the client that took it over."""


@examples(50)
@example(DETACHED_BEFORE_A_DISCONNECT)
@example(EXPIRES_AFTER_A_LONG_COMMAND)
@example(RELEASED_BY_ID_WHILE_IT_WAITS)
@example(TIMED_OUT_BEFORE_A_RESTART)
@example(RELEASED_BEFORE_A_RESTART)
@given(st.lists(steps, min_size=30, max_size=100))
def test_every_call_ends_and_no_lock_leaks(script):
    clock = Clock()
    with mock.patch.object(work_time, "now", clock.monotonic):
        check_script(Simulation(clock), script)


def check_script(simulation, script):
    for name, *values in script:
        execute_client_step(simulation, name, values)
    simulation.connect_until_up()
    # Once all messages are delivered, both sides agree on the held locks. Only a lock that has expired on the client's
    # clock may end later at the server.
    held = set(simulation.server.manager.table.held)
    held_by_client = {request.id for request in simulation.requests if request.state is RequestState.HELD}
    for request in simulation.requests:
        if request.id in held & held_by_client:
            assert {parse_resource(name)[1] for name in request.resources} == set(
                simulation.server.manager.table.held[request.id].names()
            )
    expired_locally = {
        request.id for request, error in simulation.lost.items() if isinstance(error, TransactionTimeout)
    }
    detached = {request.id for request in simulation.detached}
    assert held_by_client <= held
    assert detached - simulation.may_have_ended <= held
    assert held - held_by_client <= expired_locally | detached | simulation.leaked_locks
    waiting = {request for request in simulation.requests if request.state is RequestState.WAITING}
    assert set(simulation.pending_calls) == waiting
    assert {request.ref for request in waiting} == {
        request.ref for request in simulation.server.manager.table.waiting.values()
    }
    assert set(simulation.lost) == {request for request in simulation.requests if request.error is not None}
    for request in simulation.requests:
        simulation.pending_calls.pop(request, None)
        simulation.session.abandon(request, simulation.now)
    simulation.connect_until_up()
    held = set(simulation.server.manager.table.held)
    assert detached - simulation.may_have_ended <= held
    assert held <= expired_locally | detached | simulation.leaked_locks
    simulation.now += 60.1
    simulation.server.expire(simulation.now)
    assert not simulation.server.manager.table.held
    assert not simulation.server.manager.table.waiting
    assert not simulation.session.calls.pending
    assert not simulation.session.requests.live.by_ref
