"""Encoding of `locked`: with blockers only for a request with a trace context that had to wait."""

from __future__ import annotations

import orjson
import pytest

from genie.core import Blocker, Context, Cycle, Deadlocked, Mode, Reason, Request, Wait
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
