"""Whatever happens in whatever order: every call gets one outcome, and nobody holds what no one asked to keep.

The client's session talks to the server's, over a pipe that delivers late and in pieces, while callers give up, strangers
release, time passes, the connection is cut, or left for its silence, and the server is started again, with or without
its store.
"""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

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
from genie.server.dispatcher import Dispatcher
from genie.server.peer import END_OF_INPUT, ConnectionState, Peer
from genie.storage.redis.records import RecordDecoder, encode
from genie.storage.store import Batch, RetainedReply, StateMachine
from searches import examples

SESSION_S = 10.0


class Client(Peer):
    """A client without a connection."""

    def __init__(self) -> None:
        super().__init__()
        self.enter_state(ConnectionState.READY)
        self.session.quiet = True


class Server:
    """One connection at a time, and a stranger's; `input_queue` and `outbox` are what is on its way."""

    def __init__(self) -> None:
        self.manager = LockManager()
        self.dispatcher = Dispatcher(self.manager, Limits(), Stats())
        self.client, self.stranger = Client(), Client()
        self.stored: dict[int, bytes] = {}
        self.input_queue = b""
        self.outbox = b""

    def work(self, now: float) -> None:
        lines, self.input_queue = self.input_queue.split(b"\n")[:-1], b""
        self.dispatcher.notifier.now = now * 1000
        if lines and (hello := read_hello(lines[0])) is not None:
            self.dispatcher.execute(self.client, iter([hello]))
            del lines[0]
        todo = iter(lines)
        while self.dispatcher.execute(self.client, todo):
            pass
        self.told()

    def told(self) -> None:
        """Store what changed, then let everybody hear of it."""
        for id_, change in self.dispatcher.notifier.write_set.items():
            self.stored.pop(id_, None)
            if isinstance(change, RetainedReply) or (change is not None and change.state is not ENDED):
                self.stored[id_] = encode(change)
        self.dispatcher.notifier.write_set.clear()
        self.dispatcher.notifier.stored_below = self.manager.next_id
        self.outbox += b"".join(self.client.outbox)
        self.client.outbox.clear()

    def id_of(self, request: Request) -> int:
        """The id of a request that waits, which its client is not told; 0 where there is none."""
        waiting = self.manager.table.waiting.values()
        return next((other.id for other in waiting if other.ref == request.ref), 0)

    def release(self, id: int, now: float) -> None:
        self._by_stranger(messages.command("release", id=id), now)

    def extend(self, id: int, hold: float, now: float) -> None:
        self._by_stranger(messages.command("extend", id=id, transactionTimeout=hold * 1000), now)

    def _by_stranger(self, line: bytes, now: float) -> None:
        self.dispatcher.notifier.now = now * 1000
        self.dispatcher.execute(self.stranger, iter([line]))
        self.told()

    def expire(self, now: float) -> None:
        self.dispatcher.notifier.now = now * 1000
        self.dispatcher.expire()
        self.told()

    def hang_up(self, peer: Client, now: float) -> None:
        peer.closed = True
        self.dispatcher.notifier.now = now * 1000
        self.dispatcher.execute(peer, iter([END_OF_INPUT]))
        self.told()

    def start_again(self, stored: dict[int, bytes], now: float) -> None:
        read = RecordDecoder().decode
        replica = StateMachine()
        changes = {id_: read(id_, data) for id_, data in stored.items()}
        # Without a store ids begin at the time of the start, which is beyond all that were given out.
        next_id = self.manager.next_id + (0 if stored else 1000)
        replica.apply(Batch(changes, next_id, self.manager.next_fence, now * 1000))
        self.stored = dict(stored)
        self.manager = replica.manager
        self.dispatcher = Dispatcher(self.manager, Limits(), Stats())
        self.client, self.stranger = Client(), Client()
        self.input_queue = self.outbox = b""
        self.dispatcher.notifier.now = now * 1000
        self.dispatcher.recover(replica.retained_replies.values())
        self.told()


class World:
    """`stray` are the ids that the client has never heard of, held for a session that has ended.

    `may_have_ended` are the ids that a stranger or a call by id may have released, that timed out, or that the server lost.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.server = Server()
        self.session = ClientSession(session_timeout=SESSION_S)
        self.requests: list[Request] = []
        self.due: dict[Call, str] = {}
        self.lost: dict[Request, GenieError] = {}
        self.ids: dict[int, Request] = {}
        self.detached: set[Request] = set()
        self.may_have_ended: set[int] = set()
        self.old_peer: Client | None = None
        self.connected = False
        self.up()

    @property
    def stray(self) -> set[int]:
        held = self.server.manager.table.held
        return {id_ for id_, request in held.items() if request.origin is None and id_ not in self.ids}

    def settle(self, outcomes) -> None:
        for call, _, error in outcomes:
            if call.waiter is not None:
                assert not (isinstance(call, Request) and isinstance(error, ConnectionLost)), "it would go on waiting"
                call.waiter = None
                del self.due[call]
            elif isinstance(call, Request) and call.error is not None and not isinstance(error, Unavailable):
                assert call not in self.lost, "lost twice"
                assert isinstance(error, LockLost)
                self.lost[call] = error

    def ask(self, call: Call) -> None:
        call.waiter = self.due[call] = type(call).__name__
        self.session.send(call, self.now)

    def cut(self) -> None:
        self.server.input_queue = self.server.outbox = b""
        self.settle(self.session.on_disconnected("cut", self.now))
        self.connected = False

    def connect(self) -> None:
        """A new connection; the server may not have seen the end of the old one yet."""
        self.connected = True
        self.server.client, old = Client(), self.server.client
        self.server.outbox = b""  # the rest was for the old one
        self.session.on_connected()
        if not old.closed:
            self.old_peer = old

    def up(self) -> None:
        """Connect; send; the server works; its answers arrive. As often as it takes."""
        if not self.connected:
            self.connect()
        while True:
            self.send()
            self.server.work(self.now)
            if not self.server.outbox:
                break
            self.deliver(len(self.server.outbox))
        if self.old_peer is not None:
            self.server.hang_up(self.old_peer, self.now)
            self.old_peer = None

    def send(self) -> None:
        self.server.input_queue += self.session.data_to_send()

    def deliver(self, size: int) -> None:
        data, self.server.outbox = self.server.outbox[:size], self.server.outbox[size:]
        self.settle(self.session.receive_data(data, self.now))
        assert not self.session.close_reason
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
        st.sampled_from(["leave", "leave", "abandon", "abandon", "extend", "detach", "stranger", "by id"]),
        st.integers(0, 5),
        st.sampled_from([1, 5]),
    ),
    st.tuples(st.just("lose"), st.booleans()),
    st.tuples(st.sampled_from(["cut", "restart", "forget", "connect", "connect", "connect"])),
    st.tuples(st.just("deliver"), st.integers(1, 400)),
    st.tuples(st.just("pass"), st.sampled_from([0.4, 1.1, 4.0, SESSION_S])),
    st.tuples(st.sampled_from(["send", "work", "tick", "ping"])),
)


def act(world: World, name: str, values: list) -> None:
    session, server = world.session, world.server
    request = world.requests[-1 - values[0] % len(world.requests)] if len(values) == 2 and world.requests else None
    match name, values:
        case "request", [resource, wait, hold]:
            made = commands.make_request(session.new_ref(), [resource], queue_timeout=wait, transaction_timeout=hold)
            world.requests.append(made)
            world.ask(made)
        case "choose", [names, target, hold]:
            made = make_any_request(session.new_ref(), [*names], target, transaction_timeout=hold)
            world.requests.append(made)
            world.ask(made)
        case "leave", _ if request and request.state is RequestState.HELD:
            release = session.release(request, world.now)
            release.waiter = world.due[release] = "leave"
        case "detach", _ if request and request.is_held(world.now):
            session.detach(request, world.now)
            server.extend(request.id, 60, world.now)
            world.detached.add(request)
        case "abandon", _ if request:
            world.due.pop(request, None)
            session.abandon(request, world.now)
        case "extend", [_, hold] if request and request.state is RequestState.HELD and session.up:
            world.ask(Extend(request.id, hold, request))
        case "by id", _ if request and (id_ := request.id or server.id_of(request)):
            world.may_have_ended.add(id_)
            world.ask(commands.Release(id_))
        case "ping", _ if session.up:
            world.ask(Ping())
        case "stranger", _ if request and request.id:
            world.may_have_ended.add(request.id)
            server.release(request.id, world.now)
        case _:
            happen(world, name, values)


def happen(world: World, name: str, values: list) -> None:
    session, server = world.session, world.server
    match name, values:
        case "deliver", [size] if world.connected:
            world.deliver(size)
        case "pass", [seconds]:
            world.now += seconds
            held = server.manager.table.held.values()
            world.may_have_ended |= {lock.id for lock in held if lock.deadline <= world.now * 1000}
            server.expire(world.now)
        case "send", _:
            world.send()
        case "work", _:
            server.work(world.now)
        case "tick", _:
            world.settle(session.on_timer(world.now))
            if session.close_reason:
                world.cut()  # the server was silent for too long; it does not see the end before the next connection
        case "up", _:
            world.up()
        case "connect", _ if not world.connected and world.old_peer is None:
            world.connect()
        case "lose", [arrived] if world.connected:
            if arrived:
                server.work(world.now)  # but the answers are lost
            world.cut()  # and the server hears nothing of it
        case "cut", _:
            server.hang_up(server.client, world.now)
            world.cut()
        case "restart" | "forget", _:
            world.may_have_ended |= set(server.manager.table.held if name == "forget" else ())
            server.start_again(server.stored if name == "restart" else {}, world.now)
            world.old_peer = None
            world.cut()


TIMED_OUT_BEFORE_A_RESTART = [
    *[("request", "a", 0, 3), ("request", "b", 0, 3), ("up",), ("lose", False)],
    *[("pass", 4.0), ("restart",), ("leave", 0, 1)],
]
"""The resume says that the lock timed out, and the release finds that the server has forgotten the id: lost once."""
RELEASED_BEFORE_A_RESTART = [("request", "a", 0, 3), ("up",), ("leave", 0, 1), ("send",), ("lose", True), ("restart",)]
"""The release was executed, its answer was lost, and the server has forgotten the id: nothing is left of the request."""

RELEASED_BY_ID_WHILE_IT_WAITS = [("request", "a", 0, 60), ("request", "a", 60, 60), ("up",), ("by id", 0, 1)]
"""The client does not know the id of its request that waits, and the answer to the release has no `ref` of that."""

HANDED_OVER_BEFORE_A_CUT = [
    *[("request", "a", 0, 3), ("up",), ("detach", 0, 1), ("lose", False)],
    *[("pass", 4.0), ("tick",)],
]
"""The client's own hold ends while it has no connection, and that of the client that took over does not."""


@examples(50)
@example(HANDED_OVER_BEFORE_A_CUT)
@example(RELEASED_BY_ID_WHILE_IT_WAITS)
@example(TIMED_OUT_BEFORE_A_RESTART)
@example(RELEASED_BEFORE_A_RESTART)
@given(st.lists(steps, min_size=30, max_size=100))
def test_every_call_ends_and_nothing_is_left_behind(script):
    world = World()
    for name, *values in script:
        act(world, name, values)
    world.up()
    # Once everything that was said has been heard, both sides agree on what is held. Only what has expired locally
    # by the client's clock may end at the server a moment later.
    held = set(world.server.manager.table.held)
    believed = {request.id for request in world.requests if request.state is RequestState.HELD}
    for request in world.requests:
        if request.id in held & believed:
            assert {parse_resource(name)[1] for name in request.resources} == set(
                world.server.manager.table.held[request.id].names()
            )
    expired_locally = {request.id for request, error in world.lost.items() if isinstance(error, TransactionTimeout)}
    detached = {request.id for request in world.detached}
    assert believed <= held
    assert detached - world.may_have_ended <= held
    assert held - believed <= expired_locally | detached | world.stray
    waiting = {request for request in world.requests if request.state is RequestState.WAITING}
    assert set(world.due) == waiting
    assert {request.ref for request in waiting} == {
        request.ref for request in world.server.manager.table.waiting.values()
    }
    assert set(world.lost) == {request for request in world.requests if request.error is not None}
    for request in world.requests:
        world.due.pop(request, None)
        world.session.abandon(request, world.now)
    world.up()
    held = set(world.server.manager.table.held)
    assert detached - world.may_have_ended <= held
    assert held <= expired_locally | detached | world.stray
    world.now += 60.1
    world.server.expire(world.now)
    assert not world.server.manager.table.held
    assert not world.server.manager.table.waiting
    assert not world.session._pending
    assert not world.session._requests.by_ref
