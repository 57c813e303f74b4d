from __future__ import annotations

import importlib
from typing import Any

from genie.cli.format import width
from inspected_rows import NOW, blocker, row

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def report(payload: dict[str, Any]) -> list[str]:
    return list(importlib.import_module("genie.cli.inspect")._report_lines(payload, NOW))


def test_an_empty_server_has_a_message_instead_of_tables() -> None:
    assert report({"holders": [], "holdersTotal": 0, "queue": [], "queueTotal": 0}) == [
        "No locks are held and no requests wait."
    ]


def test_holders_and_waiters_with_their_blockers() -> None:
    payload = {
        "holders": [row(7, "exclusive:a", "shared:b", transactionName="t7")],
        "holdersTotal": 1,
        "queue": [
            row(9, "shared:a", blockers=[blocker(7, transactionName="t7")], blockersTotal=1),
            row(8, "exclusive:a", blockers=[blocker(7), blocker(9, state="queued")], blockersTotal=1_002),
        ],
        "queueTotal": 2,
    }
    assert report(payload) == [
        "Held: 1",
        "  ID  TRANSACTION  RESOURCES             HELD FOR  ENDS IN",
        "  7   t7           exclusive:a shared:b     3.2 s    6.8 s",
        "Waiting: 2",
        "  ID  TRANSACTION  RESOURCES    WAITS FOR  TIMES OUT IN",
        "  9   -            shared:a         3.2 s         6.8 s",
        "    └ 7 of t7 holds exclusive:a (3.2 s)",
        "  8   -            exclusive:a      3.2 s         6.8 s",
        "    └ 7 holds exclusive:a (3.2 s)",
        "    └ 9 is ahead in the queue for exclusive:a (3.2 s)",
        "    └ and 1,000 more",
    ]


def test_rows_beyond_the_limit_are_counted_and_priorities_shown() -> None:
    lines = report({"holders": [row(7, "a", priority=2.5)], "holdersTotal": 12_345, "queue": [], "queueTotal": 0})
    assert lines[0] == "Held: 12,345, 1 shown (see --limit)"
    assert lines[1].endswith("ENDS IN  PRIORITY")
    assert lines[2].endswith("6.8 s       2.5")


def test_notes_traces_and_waits_without_a_timeout() -> None:
    waits = row(
        8, "exclusive:a", blockers=[blocker(7, note="cron@host-1", traceparent=TRACE)], note="page 3", traceparent=TRACE
    ) | {"blockersTotal": 1}
    del waits["expiresIn"]
    payload = {"holders": [], "holdersTotal": 0, "queue": [waits], "queueTotal": 1}
    assert report(payload)[-5:] == [
        "  8   -            exclusive:a      3.2 s         never",
        "    note: page 3",
        "    trace: 4bf92f3577b34da6a3ce929d0e0e4736",
        "    └ 7 holds exclusive:a, cron@host-1 (3.2 s)",
        "      trace: 4bf92f3577b34da6a3ce929d0e0e4736",
    ]


def test_every_line_fits_into_100_columns() -> None:
    long = {"transactionName": "t" * 512, "note": "n" * 256, "priority": -(2**31), "since": NOW - 999 * 86_400_000}
    names = [f"exclusive:{letter * 512}" for letter in "ab口"]
    waits = row(2**53 - 1, *names, **long, blockers=[blocker(2**53 - 1, **(long | {"resource": "b" * 512}))])
    waits |= {"blockersTotal": 1, "expiresIn": 86_369_000}
    payload = {"holders": [waits], "holdersTotal": 10**6, "queue": [waits], "queueTotal": 10**6}
    lines = report(payload)
    assert max(map(width, lines)) == 100


def test_bare_name_removes_the_mode() -> None:
    bare_name = importlib.import_module("genie.cli.options").bare_name
    assert [bare_name(name) for name in ("exclusive:a", "shared:a:b", "a:b", "a")] == ["a", "a:b", "a:b", "a"]
