"""`Dispatcher.execute` grants and releases inline: its effects equal those of the notifier for the same events.

All that the dispatcher and the connections refer to is compared. So an effect that is added to one of the two alone, such as a
count, a charge, a change for the store or a message, fails a test.
"""

from __future__ import annotations

import json
from collections import deque
from enum import Enum
from itertools import product
from typing import Any

import pytest

from genie.access import LOCK, Principal
from genie.config import Limits
from genie.core import LockManager, Release, Request, Take
from genie.observability.stats import Stats
from genie.protocol.commands import read_hello
from genie.protocol.resources import parse_choices
from genie.server.dispatcher import Dispatcher
from genie.server.outcome import BatchOutcome
from genie.server.peer import ConnectionState, Peer
from genie.server.sessions import is_same_request

OPTIONS = list(product((False, True), repeat=5))
"""With and without: a session, a principal, a durable store, a watcher, `quiet`."""
PRINCIPAL = Principal("service", permissions=frozenset({LOCK}))
ID = 1_000
"""The id of the first request."""
REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ref": {"ref": "r"},
    "bound": {"onDisconnect": "release"},
    "bound with a ref": {"onDisconnect": "release", "ref": "r"},
    "transaction": {"transactionName": "t", "note": "of the request"},
    "large": {"note": "n" * 200, "ref": "r"},
}


RESOURCES = [["exclusive:a", "exclusive:b"], ["shared:a", "shared:b"], ["1/2:a"], ["1/2:a", "exclusive:b"]]


class CountingRecorder:
    """Counts the lines of a history. The lines differ: the fast path records the command, the notifier the event."""

    def __init__(self) -> None:
        self.count = 0

    def begin_turn(self, *_: object) -> CountingRecorder:
        return self

    def append(self, _line: object) -> None:
        self.count += 1

    def on_events(self, *_: object) -> None:
        self.count += 1


class World:
    """A dispatcher and its connections: a client, perhaps with a session, and perhaps a watcher of all names."""

    def __init__(self, options: tuple[bool, ...]) -> None:
        session, principal, durable, watched, quiet = options
        self.manager = LockManager(ID, 77)
        outcome, recorder = BatchOutcome(ID, durable=durable), CountingRecorder()
        self.dispatcher = Dispatcher(self.manager, Limits(), Stats(), outcome, recorder)  # type: ignore[arg-type]
        self.client, self.other, self.watcher = Peer(), Peer(), Peer()
        for peer in (self.client, self.other, self.watcher):
            peer.enter_state(ConnectionState.READY)
        self.client.principal = PRINCIPAL if principal else None
        if session:
            self.send("hello", session="secret-of-16-chars", quiet=quiet)
        elif quiet:
            self.send("hello", quiet=True)
        if watched:
            assert not self.dispatcher.watches.add(self.watcher, "")

    def send(self, command: str, now: float = 10.0, peer: Peer | None = None, **payload: Any) -> None:
        line = json.dumps({"command": command, "payload": payload}).encode()
        item: Any = read_hello(line) if command == "hello" else line
        assert self.dispatcher.execute(now, peer or self.client, iter((item,))) is None

    def take_messages(self) -> list[bytes]:
        """Return and remove the bytes of the messages to each connection."""
        outboxes = [peer.outbox for peer in (self.client, self.other, self.watcher)]
        messages = [b"".join(outbox) for outbox in outboxes]
        for outbox in outboxes:
            outbox.clear()
        return messages

    def state(self) -> Any:
        """Return all that the dispatcher and the connections refer to, and the bytes of the messages to each connection."""
        return self.take_messages(), dump([self.dispatcher, self.client, self.other, self.watcher], {})


def dump(value: Any, seen: dict[int, int]) -> Any:  # noqa: PLR0911 - one for each kind
    """Return a value, and all that it refers to, in a form that can be compared."""
    if value is None or isinstance(value, (int, float, str, bytes, Enum, type)):
        return value
    if isinstance(value, tuple):
        return [type(value).__name__, *(dump(each, seen) for each in value)]
    if id(value) in seen:
        return f"again {seen[id(value)]}"
    seen[id(value)] = len(seen)
    if isinstance(value, dict):
        return [type(value).__name__, *((dump(key, seen), dump(each, seen)) for key, each in value.items())]
    if isinstance(value, (list, deque)):
        return [type(value).__name__, *(dump(each, seen) for each in value)]
    if isinstance(value, (set, frozenset)):
        return [type(value).__name__, *sorted(map(str, value))]
    names = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
    names += getattr(value, "__struct_fields__", ()) or getattr(value, "__dict__", ())
    return [type(value).__name__, *((name, dump(getattr(value, name, None), seen)) for name in sorted({*names}))]


@pytest.mark.parametrize("payload", list(REQUESTS.values()), ids=list(REQUESTS))
@pytest.mark.parametrize("resources", RESOURCES, ids=" ".join)
@pytest.mark.parametrize("waits", [False, True], ids=["held", "waiting"])
def test_a_release_has_the_effects_of_its_event(payload: dict[str, Any], resources: list[str], waits: bool) -> None:
    for options in OPTIONS:
        fast, slow = World(options), World(options)
        for world in (fast, slow):
            if waits:
                world.send("request", peer=world.other, resources=["exclusive:a"])
            world.send("request", resources=resources, **payload)
        assert fast.take_messages() == slow.take_messages(), options
        released = ID + waits
        fast.send("release", 5_000.0, id=released, ref="of the release")
        events = slow.manager.step(Release(released), 5_000.0)
        slow.dispatcher.notifier.handle_events(events, 5_000.0, slow.client, "of the release")
        assert not fast.manager.table.find(released)
        assert fast.state() == slow.state(), options


@pytest.mark.parametrize("payload", list(REQUESTS.values()), ids=list(REQUESTS))
@pytest.mark.parametrize("resources", RESOURCES, ids=" ".join)
def test_a_grant_has_the_effects_of_its_event(payload: dict[str, Any], resources: list[str]) -> None:
    """Only a request with `anyOf` has an event for a grant without a wait."""
    for options in OPTIONS:
        fast, slow = World(options), World(options)
        fast.send("request", 20.0, resources=resources, **payload)
        (granted,) = fast.manager.table.held.values()
        request = Request(
            transaction=granted.transaction,
            ref=granted.ref,
            release_on_disconnect=granted.release_on_disconnect,
            context=granted.context,
        )
        choices, units = parse_choices(resources)
        slow.dispatcher._take(20.0, slow.client, Take(request, choices, [1] * len(choices), len(choices), units))
        assert is_same_request(request, granted)
        (fast_messages, fast_state), (slow_messages, slow_state) = fast.state(), slow.state()
        to_clients = fast_messages[0], slow_messages[0]
        commands = [[json.loads(line)["command"] for line in lines.splitlines()] for lines in to_clients]
        assert commands[0] == commands[1], "their fields differ: only the client of `anyOf` is told the names"
        assert fast_messages[1:] == slow_messages[1:], options
        assert fast_state == slow_state, options
