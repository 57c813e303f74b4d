"""Encoding of `locked`: with blockers only for a request with a trace context that had to wait."""

from __future__ import annotations

import orjson
import pytest

from genie.access import Principal
from genie.core import (
    NEVER,
    Blocker,
    Context,
    Cycle,
    Deadlocked,
    Inspection,
    Mode,
    Reason,
    Request,
    Row,
    State,
    TimedOut,
    Wait,
)
from genie.errors import Blocker as ListedBlocker
from genie.protocol import messages, replies

BLOCKERS = (
    Blocker(7, "t", "a", Mode.EXCLUSIVE, True, 1_790_000_000_500, Context(note="cron", traceparent="00-a")),
    Blocker(8, None, "a", Mode.SHARED, False, 1_790_000_001_000),
)


def held_request(ref: str | None) -> Request:
    request = Request(exclusive=("a",), ref=ref, context=Context(traceparent="00-b"))
    request.id, request.fence = 9, 3
    return request


def test_locked_after_a_wait_has_the_blockers() -> None:
    line = replies.locked_after_wait(held_request("r"), BLOCKERS, 12)
    assert orjson.loads(line) == {
        "command": "locked",
        "payload": {
            "id": 9,
            "fence": 3,
            "blockers": [
                {
                    "id": 7,
                    "resource": "a",
                    "mode": "exclusive",
                    "state": "held",
                    "since": 1_790_000_000_500,
                    "transactionName": "t",
                    "note": "cron",
                    "traceparent": "00-a",
                },
                {"id": 8, "resource": "a", "mode": "shared", "state": "queued", "since": 1_790_000_001_000},
            ],
            "blockersTotal": 12,
            "ref": "r",
        },
    }
    message = messages.read(line.rstrip(b"\n"))
    assert isinstance(message, messages.Locked)
    assert (message.payload.id, message.payload.fence, message.payload.ref) == (9, 3, "r")
    assert message.payload.blockersTotal == 12
    assert [row.to_blocker() for row in message.payload.blockers or ()] == [
        ListedBlocker(7, "a", "exclusive", "held", 1_790_000_000.5, "t", "cron", "00-a"),
        ListedBlocker(8, "a", "shared", "queued", 1_790_000_001.0),
    ]


def test_locked_without_a_wait_has_no_blockers() -> None:
    for ref in (None, "r"):
        message = messages.read(replies.locked(held_request(ref)).rstrip(b"\n"))
        assert isinstance(message, messages.Locked)
        assert message.payload.blockers is None


@pytest.mark.parametrize("owners", [2, 100, 101, 5_000])
def test_a_deadlock_lists_at_most_100_transactions(owners: int) -> None:
    waits = tuple(Wait("\U0001f512" * 512, number, number + 1, Context(note="n" * 512)) for number in range(owners))
    names = tuple(f"{number}" + "\U0001f512" * 500 for number in range(owners))
    event = Deadlocked(held_request("r"), Reason.DEADLOCK, Cycle(names, waits))
    line = replies.released(event, 5.0, "r")
    assert len(line) < 1 << 20
    payload = orjson.loads(line)["payload"]
    assert payload["cycle"] == list(names[:100])
    assert len(payload["waits"]) == min(100, owners)
    assert payload.get("cycleTotal") == (owners if owners > 100 else None)


def test_a_principal_gets_the_notes_of_requests_for_its_names_only() -> None:
    """It sees a subtree above its names. But a request that waits for the subtree may be for a name beside them."""
    principal = Principal("p", ("a/x/", "b/"))
    resources, notes = ("a/x/1", "a/x/**", "b/1", "a/**", "**", "c"), ["a/x/1", "a/x/**", "b/1", None, None, None]
    waits = tuple(Wait(name, 1, 2, Context(note=name, traceparent=name)) for name in resources)
    blockers = tuple(
        Blocker(7, "t", name, Mode.EXCLUSIVE, True, 1_790_000_000_500, Context(note=name, traceparent=name))
        for name in resources
    )
    waiting = Request(exclusive=("b/2",), context=Context(note="mine"))
    waiting.id, waiting.fence, waiting.since, waiting.since_unix_ms = 9, 3, 0.0, 1_790_000_000_500
    waiting.state, waiting.deadline = State.WAITING, NEVER
    inspection = Inspection([Row(waiting, blockers, len(blockers))], [Row(holding(name)) for name in resources], 1, 6)
    released = orjson.loads(
        replies.released(Deadlocked(waiting, Reason.DEADLOCK, Cycle(resources, waits)), 5.0, "r", principal)
    )
    timed_out = orjson.loads(
        replies.released(TimedOut(waiting, Reason.QUEUE_TIMEOUT, blockers, len(blockers)), 5.0, "r", principal)
    )
    locked = orjson.loads(replies.locked_after_wait(waiting, blockers, len(blockers), principal))
    inspected = orjson.loads(replies.inspected(inspection, 5.0, principal))["payload"]
    for rows in (released["payload"]["waits"], timed_out["payload"]["blockers"], locked["payload"]["blockers"]):
        assert [row["resource"] for row in rows] == [*resources]
        assert [row.get("note") for row in rows] == [row.get("traceparent") for row in rows] == notes
    assert [row.get("note") for row in inspected["holders"][0]["blockers"]] == notes[:-1]
    assert [row.get("note") for row in inspected["queue"]] == notes


def holding(name: str) -> Request:
    request = Request(exclusive=(name,), context=Context(note=name))
    request.id, request.fence, request.state, request.deadline = 8, 2, State.HELD, NEVER
    request.since_unix_ms = 1_790_000_000_500
    return request
