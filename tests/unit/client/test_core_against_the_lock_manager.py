"""Whatever happens in whatever order: every call gets one outcome, and nobody holds what no one asked to keep.

The client's core talks to the server's, over a pipe that delivers late and in pieces, while callers give up, strangers
release, time passes and the connection is cut.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from genie.client import calls
from genie.client.calls import Call, Extend, Ping, Request, State
from genie.client.core import Core
from genie.config import Settings
from genie.core import LockManager
from genie.errors import GenieError, LockLost
from genie.protocol import messages
from genie.server.connection import HANGUP
from genie.server.dispatch import Dispatch
from genie.server.session import Session


class Peer:
    """A connection, as far as the server's inner part sees it."""

    def __init__(self) -> None:
        self.session = Session(self)  # type: ignore[arg-type]
        self.out: list[bytes] = []
        self.closed = self.fresh = self.parted = self.snubbed = False


class Server:
    """One connection at a time, and a stranger's; `inbox` and `outbox` are what is on its way."""

    def __init__(self) -> None:
        self.manager = LockManager()
        self.dispatch = Dispatch(self.manager, Settings())
        self.client, self.stranger = Peer(), Peer()
        self.inbox = b""
        self.outbox = b""

    def work(self, now: float) -> None:
        lines, self.inbox = self.inbox.split(b"\n")[:-1], b""
        self.dispatch.now = now * 1000
        todo = iter(lines)
        while self.dispatch.take(self.client, todo):  # type: ignore[arg-type]
            pass
        self.told()

    def told(self) -> None:
        self.outbox += b"".join(self.client.out)
        self.client.out.clear()

    def release(self, id: int, now: float) -> None:
        self.dispatch.now = now * 1000
        self.dispatch.take(self.stranger, iter([messages.command("release", id=id)]))  # type: ignore[arg-type]
        self.told()

    def expire(self, now: float) -> None:
        self.dispatch.now = now * 1000
        self.dispatch.expire()
        self.told()

    def cut(self, now: float) -> None:
        self.client.closed = True
        self.dispatch.now = now * 1000
        self.dispatch.take(self.client, iter([HANGUP]))  # type: ignore[arg-type]
        self.client = Peer()
        self.inbox = self.outbox = b""


class World:
    def __init__(self) -> None:
        self.now = 0.0
        self.server = Server()
        self.core = Core()
        self.core.connected(self.now)
        self.requests: list[Request] = []
        self.due: dict[Call, str] = {}
        self.lost: dict[Request, GenieError] = {}

    def settle(self, outcomes) -> None:
        for call, _, error in outcomes:
            if call.waiter is not None:
                call.waiter = None
                del self.due[call]
            elif isinstance(call, Request) and call.error is not None:
                assert call not in self.lost, "lost twice"
                assert isinstance(error, LockLost)
                self.lost[call] = error

    def ask(self, call: Call) -> None:
        call.waiter = self.due[call] = type(call).__name__
        self.core.send(call, self.now)

    def up(self) -> None:
        """Send; the server works; its answers arrive. As often as it takes."""
        while True:
            self.server.inbox += self.core.outgoing()
            self.server.work(self.now)
            if not self.server.outbox:
                break
            self.deliver(len(self.server.outbox))

    def deliver(self, size: int) -> None:
        data, self.server.outbox = self.server.outbox[:size], self.server.outbox[size:]
        self.settle(self.core.receive(data, self.now))
        assert not self.core.broken


steps = st.one_of(
    st.tuples(st.just("request"), st.sampled_from("abc"), st.sampled_from([0, 1, 60]), st.sampled_from([1, 3, 60])),
    st.tuples(
        st.sampled_from(["leave", "abandon", "extend", "stranger", "by id"]),
        st.integers(0, 50),
        st.sampled_from([1, 5]),
    ),
    st.tuples(st.just("deliver"), st.integers(1, 400)),
    st.tuples(st.just("pass"), st.sampled_from([0.4, 1.1, 4.0])),
    st.tuples(st.sampled_from(["send", "work", "tick", "ping", "cut"])),
)


def act(world: World, name: str, values: list) -> None:
    core, server = world.core, world.server
    request = world.requests[values[0] % len(world.requests)] if len(values) == 2 and world.requests else None
    match name, values:
        case "request", [resource, wait, hold]:
            made = calls.request(core.ref(), [resource], queue_timeout=wait, transaction_timeout=hold)
            world.requests.append(made)
            world.ask(made)
        case "leave", _ if request and request.state is State.HELD:
            release = core.leave(request, world.now)
            release.waiter = world.due[release] = "leave"
        case "abandon", _ if request:
            world.due.pop(request, None)
            core.abandon(request, world.now)
        case "extend", [_, hold] if request and request.state is State.HELD:
            world.ask(Extend(request, hold))
        case "by id", _ if request and request.id:
            world.ask(calls.Release(request.id))
        case "ping", _:
            world.ask(Ping())
        case "stranger", _ if request and request.id:
            server.release(request.id, world.now)
        case "deliver", [size]:
            world.deliver(size)
        case _:
            happen(world, name, values)


def happen(world: World, name: str, values: list) -> None:
    core, server = world.core, world.server
    match name, values:
        case "pass", [seconds]:
            world.now += seconds
            server.expire(world.now)
        case "send", _:
            server.inbox += core.outgoing()
        case "work", _:
            server.work(world.now)
        case "tick", _:
            world.settle(core.tick(world.now))
        case "cut", _:
            server.cut(world.now)
            world.settle(core.disconnected("cut"))
            core.connected(world.now)


@settings(max_examples=300, deadline=None)
@given(st.lists(steps, max_size=60))
def test_every_call_ends_and_nothing_is_left_behind(script):
    world = World()
    for name, *values in script:
        act(world, name, values)
    world.up()
    # Once everything that was said has been heard, both sides agree on what is held. Only what has outlived its hold
    # by the client's clock may end at the server a moment later.
    held = set(world.server.manager.table.held)
    believed = {request.id for request in world.requests if request.state is State.HELD}
    outlived = {request.id for request in world.lost}
    assert believed <= held
    assert held - believed <= outlived | never_heard_of(world)
    waiting = {request for request in world.requests if request.state is State.QUEUED}
    assert set(world.due) == waiting
    assert {request.id for request in waiting} == set(world.server.manager.table.waiting)
    assert set(world.lost) == {request for request in world.requests if request.error is not None}
    for request in world.requests:
        world.due.pop(request, None)
        world.core.abandon(request, world.now)
    world.up()
    assert set(world.server.manager.table.held) <= outlived | never_heard_of(world)
    world.now += 60.1
    world.server.expire(world.now)
    assert set(world.server.manager.table.held) <= never_heard_of(world)
    assert not world.server.manager.table.waiting
    assert not world.core.owes


def never_heard_of(world: World) -> set[int]:
    """Granted on a connection that was cut before even the id came."""
    heard = {request.id for request in world.requests}
    return {id_ for id_ in world.server.manager.table.held if id_ not in heard}
