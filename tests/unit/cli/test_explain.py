from __future__ import annotations

import importlib
from typing import Any

import pytest

from genie.cli.format import width
from support.admin.inspected_rows import NOW, blocker, inspected, row

Rows = dict[str, Any]


def report(
    request: Rows,
    blockers: dict[str, Rows] | None = None,
    queues: dict[str, Rows] | None = None,
    columns: int | None = None,
) -> list[str]:
    replies = {"request": inspected(request), "blockers": blockers or {}, "queues": queues or {}}
    return list(importlib.import_module("genie.cli.explain")._report_lines(replies, NOW, columns))


def test_a_waiter_with_its_blockers_and_when_they_stop_blocking() -> None:
    waits = row(
        9,
        "exclusive:a",
        "shared:b",
        transactionName="t9",
        blockers=[blocker(7, transactionName="t7"), blocker(7, resource="b"), blocker(8, state="queued")],
    )
    replies = {
        "7": inspected(row(7, "exclusive:a", "exclusive:b", expiresIn=4_000)),
        "8": inspected(row(8, "exclusive:a", blockers=[])),
    }
    assert report(waits, replies) == [
        "9 of t9 has waited for 3.2 s and times out in 6.8 s.",
        "Requests: exclusive:a shared:b",
        "Blocked by: 3",
        "  └ 7 of t7 holds exclusive:a (3.2 s)",
        "  └ 7 holds exclusive:b (3.2 s)",
        "  └ 8 is ahead in the queue for exclusive:a (3.2 s)",
        "It is granted when",
        "  7 releases or times out: in 4.0 s at the latest, unless it is extended",
        "  8 is granted and releases, or ends: it times out in 6.8 s if it still waits",
    ]


def test_a_request_for_units_waits_for_enough_of_its_blockers_only() -> None:
    units = {"resource": "pool", "mode": "units", "units": 1, "of": 3}
    waits = row(
        9,
        "exclusive:a",
        "2/3:pool",
        blockers=[blocker(6), blocker(6, **units), blocker(7, **units), blocker(8, state="queued", **units)],
        blockersTotal=5,
    )
    replies = {
        "6": inspected(row(6, "exclusive:a", "1/3:pool", expiresIn=4_000)),
        "7": inspected(row(7, "1/3:pool", expiresIn=9_000)),
        "8": inspected(row(8, "1/3:pool", blockers=[])),
    }
    lines = report(waits, replies)
    assert lines[lines.index("It is granted when") + 1 :] == [
        "  6 releases or times out: in 4.0 s at the latest, unless it is extended",
        "  2/3:pool fits, after enough of these have ended:",
        "    6 releases or times out: in 4.0 s at the latest, unless it is extended",
        "    7 releases or times out: in 9.0 s at the latest, unless it is extended",
        "    8 is granted and releases, or ends: it times out in 6.8 s if it still waits",
        "  and enough of the 1 more no longer block it",
    ]


def test_a_request_for_units_times_out_before_the_first_holder() -> None:
    units = {"resource": "pool", "mode": "units", "units": 1, "of": 2}
    waits = row(9, "1/2:pool", blockers=[blocker(7, **units), blocker(8, **units)])
    for first, is_first in (6_700, False), (6_900, True):
        replies = {
            str(id): inspected(row(id, "1/2:pool", expiresIn=expires)) for id, expires in ((7, 9_000), (8, first))
        }
        lines = report(waits, replies)
        assert ("Unless a blocker releases earlier, it times out first." in lines) is is_first


def test_unlisted_blockers_are_counted() -> None:
    lines = report(row(9, "a", blockers=[blocker(7)], blockersTotal=1_000), {"7": inspected(row(7, "exclusive:a"))})
    assert lines[2] == "Blocked by: 1,000"
    assert lines[4] == "  └ and 999 more"
    assert lines[-1] == "  and the 999 more no longer block it"


def test_a_holder_whose_timeout_is_later_than_the_waiters() -> None:
    replies = {"7": inspected(row(7, "exclusive:a", expiresIn=6_801))}
    assert (
        report(row(9, "a", blockers=[blocker(7)]), replies)[-1]
        == "Unless a blocker releases earlier, it times out first."
    )


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (inspected(), "8 has ended"),
        (
            inspected(row(8, "a")),
            "8 (granted since) releases or times out: in 6.8 s at the latest, unless it is extended",
        ),
    ],
)
def test_a_blocker_that_changed_since_the_first_query(reply: Rows, text: str) -> None:
    assert f"  {text}" in report(row(9, "a", blockers=[blocker(8, state="queued")]), {"8": reply})


def test_a_waiter_without_blockers() -> None:
    assert report(row(9, "shared:a", blockers=[]))[-1] == "No request blocks it any more."


def test_a_holder_with_its_timeout_and_its_waiters() -> None:
    holder = row(7, "exclusive:a", "shared:b", transactionName="t7")
    queues = {
        "a": inspected(
            row(8, "shared:a", blockers=[blocker(7)]),
            row(9, "exclusive:a", transactionName="t7", blockers=[blocker(8, state="queued")]),
        ),
        "b": inspected(
            row(10, "shared:b", blockers=[blocker(11, resource="b", state="queued")]),
            row(11, "exclusive:b", transactionName="t11", blockers=[blocker(7, resource="b", mode="shared")]),
        ),
    }
    assert report(holder, queues=queues) == [
        "7 of t7 has held for 3.2 s and ends in 6.8 s, unless it is extended.",
        "Holds: exclusive:a shared:b",
        "Waiting for it:",
        "  └ 8 for shared:a (3.2 s, times out in 6.8 s)",
        "  └ 11 of t11 for exclusive:b (3.2 s, times out in 6.8 s)",
    ]


def test_a_waiter_for_units_waits_for_each_holder_of_units() -> None:
    holders = [blocker(id, resource="pool", mode="units", units=1, of=20) for id in range(100, 110)]
    queue = inspected(row(8, "2/20:pool", blockers=holders, blockersTotal=20))  # the server lists only ten blockers
    assert report(row(7, "1/20:pool"), queues={"pool": queue})[-1] == "  └ 8 for 2/20:pool (3.2 s, times out in 6.8 s)"


def test_a_waiter_with_unlisted_resources_is_found_by_its_blockers() -> None:
    names = [f"exclusive:{number}" for number in range(10)]
    queue = inspected(
        row(8, *names, resourcesTotal=20, blockers=[blocker(7, mode="shared")]),
        row(9, *names, resourcesTotal=20, blockers=[blocker(8, state="queued")]),
    )
    assert report(row(7, "shared:a"), queues={"a": queue})[2:] == [
        "Waiting for it:",
        "  └ 8 for a (3.2 s, times out in 6.8 s)",
    ]


def test_a_holder_without_waiters() -> None:
    assert report(row(7, "a"), queues={"a": inspected()})[-1] == "No request waits for it."


def test_unlisted_waiters_and_resources_of_a_holder_are_counted() -> None:
    queue = inspected(*(row(id, "exclusive:a", blockers=[]) for id in range(100, 112)), queueTotal=5_012)
    lines = report(row(7, "exclusive:a", resourcesTotal=300), queues={"a": queue})
    assert sum(" for exclusive:a (" in line for line in lines) == 10
    assert lines[-3:] == [
        "  └ and 2 more for exclusive:a",
        "  └ 5,000 more requests are in the wait queue of a; the server did not list them",
        "The waiters of 299 more of its resources are unknown: the server does not list them.",
    ]


def test_every_line_fits_the_terminal_and_nothing_is_truncated() -> None:
    long = {"transactionName": "t" * 512, "since": NOW - 999 * 86_400_000, "expiresIn": 86_369_000}
    name = "口" * 512
    id = 2**53 - 1
    waits = row(id, f"exclusive:{name}", **long, blockers=[blocker(id, resource=name, transactionName="t" * 512)])
    holder = row(id - 1, f"exclusive:{name}", **(long | {"transactionName": "u"}))
    crowd = inspected(*[waits] * 12, queueTotal=10**6)
    lines = [
        *report(waits, {str(id): inspected(holder)}, columns=100),
        *report(holder, queues={name: crowd}, columns=100),
    ]
    assert max(map(width, lines)) == 100
    assert "…" not in "".join(lines)


def test_an_unknown_id_has_no_report() -> None:
    empty = {"request": inspected(), "blockers": {}, "queues": {}}
    assert list(importlib.import_module("genie.cli.explain")._report_lines(empty, NOW)) == []
