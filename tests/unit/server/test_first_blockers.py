"""A request with `traceparent` that had to wait is granted with the blockers that it had when its wait began."""

from __future__ import annotations

from typing import Any

import orjson

from genie.config import Limits
from genie.core import LockManager
from genie.core.view import MAX_COUNTED_ON_ARRIVAL, MAX_LISTED_BLOCKERS
from genie.observability.stats import Stats
from genie.server.dispatcher import Dispatcher
from genie.server.outcome import BatchOutcome
from genie.server.peer import ConnectionState, Peer

TRACEPARENT = f"00-{'a' * 32}-{'b' * 16}-01"
HOLDERS_TRACEPARENT = f"00-{'c' * 32}-{'d' * 16}-01"


class Server:
    """A dispatcher with one client. Requests have the ids 1, 2 and so on."""

    def __init__(self) -> None:
        self.dispatcher = Dispatcher(LockManager(), Limits(), Stats(), BatchOutcome(1, durable=False))
        self.client = Peer()
        self.client.enter_state(ConnectionState.READY)
        self.now = 0.0

    def send(self, command: str, **payload: object) -> dict[int, dict[str, Any]]:
        """Execute a command. Return the payloads of `locked` by id."""
        line = orjson.dumps({"command": command, "payload": payload})
        assert self.dispatcher.execute(self.now, self.client, iter((line,))) is None
        messages = [orjson.loads(message) for message in b"".join(self.client.outbox).splitlines()]
        self.client.outbox.clear()
        assert not [message for message in messages if message["command"] == "error"]
        return {message["payload"]["id"]: message["payload"] for message in messages if message["command"] == "locked"}

    def request(self, *names: str, **payload: object) -> dict[int, dict[str, Any]]:
        resources = [name if ":" in name else f"exclusive:{name}" for name in names]
        return self.send("request", resources=resources, **payload)

    @property
    def kept(self) -> list[int]:
        """The ids of the requests whose first blockers are kept."""
        return list(self.dispatcher.size.first_blockers)


def test_a_grant_after_a_wait_has_the_blockers_of_the_time_when_the_wait_began() -> None:
    server = Server()
    server.request("A", traceparent=HOLDERS_TRACEPARENT, note="cron", transactionName="T")
    server.now = 5
    server.request("A", "B")
    server.now = 7
    server.request("shared:A", traceparent=TRACEPARENT, priority=1)
    server.request("A", traceparent=TRACEPARENT, priority=2)  # overtakes, so it is no first blocker
    assert server.kept == [3, 4]
    assert server.send("release", id=4) == {}
    locked = server.send("release", id=1)
    assert locked == {
        3: {
            "id": 3,
            "fence": 2,
            "blockersTotal": 1,
            "blockers": [
                {
                    "id": 1,
                    "transactionName": "T",
                    "resource": "A",
                    "mode": "exclusive",
                    "state": "held",
                    "since": 0,
                    "note": "cron",
                    "traceparent": HOLDERS_TRACEPARENT,
                }
            ],
        }
    }
    assert server.kept == []


def test_the_blockers_are_those_after_a_rearrangement() -> None:
    """Request 4 would close a cycle of T and V, so it overtakes request 3, and waits for the holder only."""
    server = Server()
    server.request("a", transactionName="T")
    server.request("b", transactionName="U")
    server.request("a", "b", transactionName="V")
    server.request("b", transactionName="T", traceparent=TRACEPARENT)
    locked = server.send("release", id=2)[4]
    assert [(blocker["id"], blocker["state"]) for blocker in locked["blockers"]] == [(2, "held")]


def test_a_request_that_is_granted_in_its_own_step_had_no_blockers() -> None:
    server = Server()
    server.request("A", transactionName="T")
    server.request("A", "B")
    assert server.request("B", transactionName="T", traceparent=TRACEPARENT) == {3: {"id": 3, "fence": 2}}
    assert server.kept == []


def test_a_request_without_trace_context_has_no_first_blockers() -> None:
    server = Server()
    server.request("A", traceparent=TRACEPARENT)
    server.request("A")
    assert server.kept == []
    assert server.send("release", id=1) == {2: {"id": 2, "fence": 2}}


def test_blockers_are_listed_and_counted_up_to_a_limit() -> None:
    server = Server()
    count = 2 * MAX_COUNTED_ON_ARRIVAL
    for _ in range(count):
        server.request("shared:A")
    server.request("A", traceparent=TRACEPARENT)
    for id_ in range(1, count):
        server.send("release", id=id_)
    locked = server.send("release", id=count)[count + 1]
    assert locked["blockersTotal"] == MAX_COUNTED_ON_ARRIVAL
    assert [blocker["id"] for blocker in locked["blockers"]] == list(range(1, MAX_LISTED_BLOCKERS + 1))


def test_first_blockers_end_with_the_wait() -> None:
    server = Server()
    server.request("A", transactionTimeout=10_000)
    for timeout_ms in (5, 10_000, 0):
        server.request("A", traceparent=TRACEPARENT, queueTimeout=timeout_ms)
    assert server.kept == [2, 3], "the one that does not wait has none"
    server.now = 6
    server.dispatcher.expire(server.now)
    assert server.kept == [3]
    server.send("release", id=3)
    assert server.kept == []
