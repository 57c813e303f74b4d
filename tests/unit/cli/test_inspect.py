from __future__ import annotations

import importlib
import uuid
from typing import Any

import pytest

from genie.cli.format import width
from support.admin.inspected_rows import NOW, blocker, row

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def report(payload: dict[str, Any], columns: int | None = None) -> list[str]:
    return list(importlib.import_module("genie.cli.inspect")._report_lines(payload, NOW, columns))


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


def test_a_pipe_gets_whole_names_one_row_a_line() -> None:
    names = [f"transfer-{uuid.UUID(int=number)}" for number in (1, 2)]
    holders = [row(id, "exclusive:" + "a" * 200, transactionName=name) for id, name in enumerate(names, 1)]
    waits = row(9, "exclusive:a", blockers=[blocker(1, transactionName=names[0], note="n" * 100)], note="m" * 200)
    payload = {"holders": holders, "holdersTotal": 2, "queue": [waits | {"blockersTotal": 1}], "queueTotal": 1}
    lines = report(payload)
    assert [line.split()[1:3] for line in lines[2:4]] == [[name, "exclusive:" + "a" * 200] for name in names]
    assert lines[-2:] == ["    note: " + "m" * 200, f"    └ 1 of {names[0]} holds exclusive:a, {'n' * 100} (3.2 s)"]


def test_a_terminal_wraps_names_within_their_columns() -> None:
    name = f"transfer-{uuid.UUID(int=2)}"
    payload = {
        "holders": [row(7, "exclusive:accounts/2", "exclusive:accounts/13", transactionName=name)],
        "holdersTotal": 1,
        "queue": [],
        "queueTotal": 0,
    }
    assert report(payload, columns=70) == [
        "Held: 1",
        "  ID  TRANSACTION            RESOURCES               HELD FOR  ENDS IN",
        "  7   transfer-00000000-000  exclusive:accounts/2       3.2 s    6.8 s",
        "      0-0000-0000-000000000  exclusive:accounts/13",
        "      002",
        "Waiting: 0",
    ]


@pytest.mark.parametrize("columns", [80, 100, 200])
def test_every_line_fits_the_terminal_and_nothing_is_truncated(columns: int) -> None:
    long = {"transactionName": "t" * 512, "note": "n" * 256, "priority": -(2**31), "since": NOW - 999 * 86_400_000}
    names = [f"exclusive:{letter * 512}" for letter in "ab口"]
    waits = row(2**53 - 1, *names, **long, blockers=[blocker(2**53 - 1, **(long | {"resource": "b" * 512}))])
    waits |= {"blockersTotal": 1, "expiresIn": 86_369_000}
    payload = {"holders": [waits], "holdersTotal": 10**6, "queue": [waits], "queueTotal": 10**6}
    text = "".join(lines := report(payload, columns))
    assert max(map(width, lines)) <= max(columns, 100)
    assert [text.count(letter) >= 512 * 2 for letter in "ab口"] == [True] * 3
    assert "…" not in text


def test_bare_name_removes_the_mode() -> None:
    bare_name = importlib.import_module("genie.cli.options").bare_name
    assert [bare_name(name) for name in ("exclusive:a", "shared:a:b", "a:b", "a")] == ["a", "a:b", "a:b", "a"]
