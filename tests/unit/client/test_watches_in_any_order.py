"""Whatever happens in whatever order: whoever applies the changes has, in the end, the picture of what is held.

The client's session talks to a server that knows of nothing but watches, over a pipe that delivers late, while locks come and
go, connections are cut, the server calls a client slow, whoever watches is slow, and watches begin and end.
"""

from __future__ import annotations

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from genie.client import watches
from genie.client.session import ClientSession
from genie.client.watches import Watch
from scripted_server import say, welcome
from searches import examples

PREFIXES = ("", "a", "ab", "b")
NAMES = ("a", "ab", "ab/1", "b", "c")
MAX_BUFFERED_CHANGES = 3


@pytest.fixture(autouse=True, scope="module")
def _small_buffer():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watches, "MAX_BUFFERED_CHANGES", MAX_BUFFERED_CHANGES)
        yield


class Server:
    """One connection; `inbox` and `outbox` are what is on its way."""

    def __init__(self) -> None:
        self.held: dict[str, int] = {}
        self.prefixes: set[str] = set()
        self.inbox = self.outbox = b""
        self.ids = 0

    def hang_up(self) -> None:
        self.prefixes.clear()
        self.inbox = self.outbox = b""

    def work(self) -> None:
        lines, self.inbox = self.inbox.splitlines(), b""
        for line in lines:
            message = orjson.loads(line)
            ref = message["payload"]["ref"]
            match message["command"], message["payload"].get("prefix"):
                case "hello", _:
                    self.outbox += welcome(resumed=True)
                case "ping", _:
                    self.outbox += say("pong", ref=ref)
                case "watch", prefix:
                    self.prefixes.add(prefix)
                    rows = [self.row(name) for name in self.held if name.startswith(prefix)]
                    self.outbox += say("watching", prefix=prefix, held=rows, truncated=False, ref=ref)
                case "unwatch", prefix:
                    self.prefixes.discard(prefix)
                    self.outbox += say("unwatched", prefix=prefix, ref=ref)

    def row(self, name: str) -> dict[str, object]:
        return {"resource": name, "mode": "exclusive", "id": self.held[name]}

    def toggle(self, name: str) -> None:
        self.ids += 1
        free = name not in self.held
        self.held.setdefault(name, self.ids)
        if any(map(name.startswith, self.prefixes)):
            self.outbox += say("event", state="locked" if free else "unlocked", **self.row(name))
        if not free:
            del self.held[name]

    def lag(self) -> None:
        if self.prefixes:
            self.prefixes.clear()
            self.outbox += say("event", state="lagged")


class Watcher:
    def __init__(self, prefix: str) -> None:
        self.watch = Watch(prefix)
        self.picture: dict[str, int] = {}
        self.waits = False

    def take(self, count: int) -> None:
        for _ in range(min(count, len(self.watch.changes))):
            change = self.watch.changes.popleft()
            if change.state == "locked":
                assert self.picture.setdefault(change.resource, change.id) == change.id
            else:
                assert self.picture.pop(change.resource) == change.id


class World:
    def __init__(self) -> None:
        self.session, self.server = ClientSession(), Server()
        self.watchers: list[Watcher] = []
        self.connected = False

    def settle(self, outcomes) -> None:
        for call, _, error in outcomes:
            assert error is None
            for watcher in self.watchers:
                if watcher.watch is call:
                    assert watcher.waits, "woken twice"
                    assert watcher.watch.changes
                    watcher.waits = False

    def take(self, watcher: Watcher, count: int) -> None:
        watcher.take(count)
        if not watcher.watch.changes and not watcher.waits:
            watcher.waits = True
            self.session.request_next(watcher.watch, 0.0)

    def send(self) -> None:
        self.server.inbox += self.session.data_to_send()

    def deliver(self, size: int) -> None:
        data, self.server.outbox = self.server.outbox[:size], self.server.outbox[size:]
        self.settle(self.session.receive_data(data, 0.0))
        assert not self.session.close_reason
        assert all(len(watcher.watch.changes) <= MAX_BUFFERED_CHANGES + 2 * len(NAMES) for watcher in self.watchers)

    def cut(self) -> None:
        self.server.hang_up()
        self.settle(self.session.on_disconnected("cut", 0.0))
        self.connected = False

    def calm_down(self) -> None:
        """Everything that is said is heard, and every change is taken."""
        if not self.connected:
            self.connected = True
            self.session.on_connected()
        while True:
            for watcher in self.watchers:
                self.take(watcher, 1000)
            self.send()
            self.server.work()
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


def act(world: World, name: str, value) -> None:
    match name:
        case "toggle":
            world.server.toggle(value)
        case "watch" if len(world.watchers) < 4:
            world.watchers.append(Watcher(value))
            world.take(world.watchers[-1], 1)
        case "end" if value < len(world.watchers):
            watcher = world.watchers.pop(value)
            assert bool(world.session.unwatch(watcher.watch)) == watcher.waits
        case "take" if value[0] < len(world.watchers):
            world.take(world.watchers[value[0]], value[1])
        case "deliver" if world.connected:
            world.deliver(value)
        case "connect" if not world.connected:
            world.connected = True
            world.session.on_connected()
        case "cut":
            world.cut()
        case "lag":
            world.server.lag()
        case "send":
            world.send()
        case "work":
            world.server.work()
        case "calm":
            world.calm_down()


LAG_BEFORE_THE_ANSWER = [
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
"""The second watch has ended, but the server has yet to read its `watch` when it ends all watches of the connection."""


@examples(60)
@example(LAG_BEFORE_THE_ANSWER)
@given(st.lists(steps, min_size=20, max_size=100))
def test_the_picture_is_right_in_the_end(script):
    world = World()
    for name, value in script:
        act(world, name, value)
    world.calm_down()
    for watcher in world.watchers:
        held = {name: id_ for name, id_ in world.server.held.items() if name.startswith(watcher.watch.prefix)}
        assert watcher.picture == held
    assert world.server.prefixes == {watcher.watch.prefix for watcher in world.watchers}
    for watcher in world.watchers:
        world.session.unwatch(watcher.watch)
    world.watchers.clear()
    world.calm_down()
    assert not world.server.prefixes
