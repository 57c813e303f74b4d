"""The reply to `inspect`, converted to Python names and seconds."""

from __future__ import annotations

import pytest

from genie import Blocker, GenieError, Holder, Inspection, Waiter
from genie.client.inspection import parse_inspected

HOLDER = {
    "id": 101,
    "resources": ["exclusive:a", "shared:b"],
    "resourcesTotal": 2,
    "priority": 0,
    "since": 1_790_000_000_500,
    "expiresIn": 9_250.5,
    "transactionName": "transfer-42",
    "note": "billing@host-7",
    "traceparent": "00-a",
    "fence": 201,
}
WAITER = {
    "id": 102,
    "resources": ["exclusive:a"],
    "resourcesTotal": 1,
    "priority": 3,
    "since": 1_790_000_001_000,
    "expiresIn": 5000,
    "blockers": [
        {
            "id": 101,
            "resource": "a",
            "mode": "exclusive",
            "state": "held",
            "since": 1_790_000_000_500,
            "transactionName": "transfer-42",
            "note": "billing@host-7",
            "traceparent": "00-b",
        }
    ],
    "blockersTotal": 1,
}


def test_rows_have_python_names_and_seconds():
    found = parse_inspected({"holders": [HOLDER], "holdersTotal": 7, "queue": [WAITER], "queueTotal": 8})
    blocker = Blocker(101, "a", "exclusive", "held", 1_790_000_000.5, "transfer-42", "billing@host-7", "00-b")
    assert found == Inspection(
        holders=(
            Holder(
                101,
                ("exclusive:a", "shared:b"),
                2,
                0,
                1_790_000_000.5,
                9.2505,
                fence=201,
                transaction="transfer-42",
                note="billing@host-7",
                traceparent="00-a",
            ),
        ),
        holders_total=7,
        queue=(Waiter(102, ("exclusive:a",), 1, 3, 1_790_000_001.0, 5.0, blockers=(blocker,), blockers_total=1),),
        queue_total=8,
    )


def test_a_waiter_without_a_queue_timeout_does_not_expire():
    row = {key: value for key, value in WAITER.items() if key != "expiresIn"}
    found = parse_inspected({"holders": [], "holdersTotal": 0, "queue": [row], "queueTotal": 1})
    assert found.queue[0].expires_in is None


def test_unknown_fields_of_a_newer_server_are_ignored():
    found = parse_inspected(
        {"holders": [HOLDER | {"tomorrow": 1}], "holdersTotal": 1, "queue": [], "queueTotal": 0, "more": []}
    )
    assert found.holders[0].id == 101


@pytest.mark.parametrize("payload", [{}, {"holders": 1, "holdersTotal": 1, "queue": [], "queueTotal": 0}])
def test_an_invalid_reply_is_an_error(payload):
    with pytest.raises(GenieError, match="reply to inspect"):
        parse_inspected(payload)
