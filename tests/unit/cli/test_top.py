from __future__ import annotations

import msgspec
import pytest

from genie.admin.models import Edge, HotList, Waits
from genie.cli.format import Column, fit_table, width, wrap_items, wrap_text
from genie.cli.top import Line, Snapshot, render
from genie.version import VERSION
from support.admin.observations import HOLDER, HOT, NOW, QUEUES, WAITERS, WAITS, state

SNAPSHOT = Snapshot(state(), WAITS, HOT)


def texts(lines: list[Line]) -> list[str]:
    return [line.text for line in lines]


@pytest.mark.parametrize("columns", [1, 10, 40, 57, 80, 100, 300])
@pytest.mark.parametrize("rows", [1, 5, 9, 12, 24, 100])
def test_output_fits_any_terminal(columns: int, rows: int) -> None:
    lines = texts(render(SNAPSHOT, columns, rows, "q: quit"))
    assert len(lines) <= rows
    assert all(width(line) <= columns for line in lines)
    assert all(line.isprintable() for line in lines)


def test_all_sections_are_rendered() -> None:
    lines = texts(render(SNAPSHOT, 120, 30, "q: quit"))
    assert lines[:3] == [
        f"genie {VERSION}  leader  namespace genie  store redis  up 1 h 0 min  q: quit",
        "locks 12  held 8  waiting 30  longest wait 9.0 s  wait p50 1.2 ms  p99 31 ms  connections 5  sessions 2",
        "grants 1,200/s  releases 1,199/s  waits 3.2/s  timeouts 0/s  deadlocks 0/s  errors 0/s",
    ]
    line = lines.index("Longest queues (6 of 20)")
    assert lines[line + 2].split() == [
        *["accounts/1[red]x\\x1b[31m", "30", "9.0", "s", "transfer-7", str(HOLDER), "10.0", "s", "1"]
    ]
    line = lines.index("Longest waits (6 of 30)")
    assert lines[line + 2].split() == [
        *[f"#{WAITERS[0]}", str(WAITERS[0]), "9.0", "s", "transfer-7", str(HOLDER), "+11"],
        *["exclusive:a", "held", "10.0", "s"],
    ]
    line = lines.index("Hot resources (last minutes) (6 of 20)")
    assert lines[line + 2].split() == ["hot/0", "16", "min", "40", "s", "100", "3", "1"]
    assert len(lines) == 30


def test_without_a_limit_each_section_has_twenty_rows() -> None:
    lines = texts(render(SNAPSHOT, 120, None))
    assert len(lines) == 3 + 3 * (3 + 20)
    assert "Longest queues" in lines
    assert "Longest waits (20 of 30)" in lines


def test_a_small_screen_drops_the_last_sections_and_shares_unused_rows() -> None:
    small = texts(render(SNAPSHOT, 120, 8))
    assert [line for line in small if "(" in line] == ["Longest queues (2 of 20)"]
    one_line = Snapshot(state(queues=QUEUES[:1]), WAITS, HotList(resources=HOT.resources[:2]))
    lines = texts(render(one_line, 120, 30))
    assert "Longest waits (15 of 30)" in lines
    assert lines[-1].startswith("hot/1 ")
    assert len(lines) == 30


def test_an_idle_server() -> None:
    idle = Snapshot(
        state(queues=[], waiting=0, wait_p50=None, wait_p99=None),
        Waits(nodes=[], edges=[], queue_total=0, queue_shown=0),
        HotList(resources=[]),
    )
    lines = texts(render(idle, 100, 30))
    assert lines[3:] == ["", "No requests wait.", "", "No contention in the last minutes."]
    assert "wait p50 -  p99 -" in lines[1]


def test_waiters_without_known_blockers_and_holders_without_hold_time() -> None:
    without_edges = Waits(nodes=WAITS.nodes[1:2], edges=[], queue_total=1, queue_shown=1)
    lines = texts(render(Snapshot(state(queues=QUEUES[:1], queues_complete=False), without_edges, HOT), 120, 30))
    line = lines.index("Longest waits")
    assert lines[line + 2].split() == [*[f"#{WAITERS[0]}", str(WAITERS[0]), "9.0", "s", "-", "-", "shared:a", "-", "-"]]
    line = lines.index("Longest queues, among the oldest waiters")
    assert lines[line + 2].split()[-2:] == ["-", "1"]


def test_a_request_without_a_transaction_shows_its_note() -> None:
    notes = {WAITERS[0]: "nightly\x1b[2J", HOLDER: "worker 7"}
    nodes = [
        msgspec.structs.replace(node, note=notes[node.id], transaction_name=msgspec.UNSET) if node.id in notes else node
        for node in WAITS.nodes
    ]
    queues = [msgspec.structs.replace(QUEUES[1], transaction_name=None)]
    lines = texts(render(Snapshot(state(queues=queues), msgspec.structs.replace(WAITS, nodes=nodes), HOT), 140, 30))
    assert "  (worker 7)  " in lines[lines.index("Longest queues") + 2]
    (waits_title,) = (line for line in lines if line.startswith("Longest waits"))
    waiter, other = lines[lines.index(waits_title) + 2 :][:2]
    assert waiter.split()[:2] == ["(nightly\\x1b[2J)", str(WAITERS[0])]
    assert "  (worker 7)  " in waiter
    assert other.startswith(f"#{WAITERS[1]}  ")


def test_locks_of_units_and_subtrees_are_shown_as_they_are_requested() -> None:
    pool = Edge(
        waiter=WAITERS[0], blocker=HOLDER, resource="pool", mode="units", state="held", since=NOW, units=2, of=10
    )
    above = Edge(waiter=WAITERS[1], blocker=HOLDER, resource="a/**", mode="exclusive", state="queued", since=NOW)
    snapshot = Snapshot(state(), msgspec.structs.replace(WAITS, edges=[pool, above]), HOT)
    lines = texts(render(snapshot, 120, 30))
    line = lines.index("Longest waits (6 of 30)")
    assert [lines[line + number].split()[-4] for number in (2, 3)] == ["2/10:pool", "exclusive:a/**"]


def test_without_a_limit_of_the_lines_long_names_are_wrapped() -> None:
    names = [f"transfer-{'0' * 30}-{number}" for number in (1, 2)]
    nodes = [
        msgspec.structs.replace(node, transaction_name=name) for node, name in zip(WAITS.nodes, names, strict=False)
    ]
    snapshot = Snapshot(state(), msgspec.structs.replace(WAITS, nodes=[*nodes, *WAITS.nodes[2:]]), HOT)
    for columns in (60, 80):
        shown = texts(render(snapshot, columns, None))
        assert not any("…" in line for line in shown)
        assert max(map(width, shown)) <= columns
    assert any("…" in line for line in texts(render(snapshot, 60, 40)))


def test_at_80_columns_ids_are_dropped_and_transactions_are_complete() -> None:
    names = {WAITERS[0]: "order-4711-settlement", HOLDER: "month-end-report-2026"}
    nodes = [
        msgspec.structs.replace(node, transaction_name=names.get(node.id, node.transaction_name))
        for node in WAITS.nodes
    ]
    lines = [msgspec.structs.replace(line, transaction_name=names[HOLDER]) for line in QUEUES]
    snapshot = Snapshot(state(queues=lines), msgspec.structs.replace(WAITS, nodes=nodes), HOT)
    shown = texts(render(snapshot, 80, 24))
    longest = shown.index(next(line for line in shown if line.startswith("Longest queues")))
    assert shown[longest + 1].split() == ["RESOURCE", "WAITING", "LONGEST", "HOLDER", "HELD", "FOR", "HOLDERS"]
    assert names[HOLDER] in shown[longest + 2]
    waits = shown.index(next(line for line in shown if line.startswith("Longest waits")))
    assert shown[waits + 1].split()[:3] == ["WAITER", "WAITS", "BLOCKER"]
    assert names[WAITERS[0]] in shown[waits + 2]
    assert names[HOLDER] in shown[waits + 2]
    assert not any(f" {id_}" in line for id_ in (HOLDER, *WAITERS) for line in shown)
    assert any(line.startswith(f"#{WAITERS[1]}") for line in shown), "a request without a name is known by its id"


def test_at_80_columns_names_of_27_letters_are_complete() -> None:
    names = {WAITERS[0]: "settlement-of-order-4711-eu", HOLDER: "month-end-report-2026-10-eu"}
    nodes = [
        msgspec.structs.replace(node, transaction_name=names[node.id], blockers_total=1)
        for node in WAITS.nodes
        if node.id in names
    ]
    edges = [edge for edge in WAITS.edges if edge.waiter == WAITERS[0]][:1]
    waits = Waits(nodes=nodes, edges=edges, queue_total=1, queue_shown=1)
    shown = texts(render(Snapshot(state(), waits, HOT), 80, 24))
    table = shown.index("Longest waits")
    assert shown[table + 1].split() == ["WAITER", "WAITS", "BLOCKER", "RESOURCE"]
    for name in names.values():
        assert name in shown[table + 2]


def test_warnings_of_a_follower_and_of_an_unavailable_store() -> None:
    follower = state(
        role="follower", leader="other:7077\x1b[2J", store_unavailable_since=NOW - 90_000, locks_age=60_000
    )
    assert texts(render(Snapshot(follower), 120, None))[3:] == [
        "The store is unavailable since 2026-09-21 14:12:00 UTC (1 min 30 s).",
        "The numbers of locks are those of 1 min 0 s ago, when this server led.",
        "This server is not the leader (follower); other:7077\\x1b[2J is: query its admin port.",
    ]
    full = "The store is out of memory: locks can be released, but no requests are accepted."
    assert full in texts(render(Snapshot(state(store_full=True)), 120, None))
    assert texts(render(Snapshot(state(role="starting")), 40, None))[-2:] == [
        "This server is not the leader",
        "(starting); no leader is known.",
    ]


def test_columns_of_equal_rank_share_the_width() -> None:
    equal = (
        Column("A", 0, min_width=4, preferred_width=8),
        Column("B", 0, min_width=4, preferred_width=8),
        Column("N", 1),
    )
    rows = [["a" * 20, "b" * 6, "123"]]
    assert fit_table(equal, rows, 40)[1] == "a" * 20 + "  " + "b" * 6 + "  123"
    assert fit_table(equal, rows, 21)[1] == "aaaa…aaa  bbbbbb  123"
    assert fit_table(equal, rows, 20)[1] == "aaaaaa…aaaaa  bbbbbb"
    assert fit_table(equal, rows, 12)[1] == "aa…aa  bb…bb"


COLUMNS = (Column("NAME", 0, min_width=8), Column("N", 1, right_aligned=True), Column("OWNER", 2, min_width=6))


def test_columns_shrink_before_they_are_dropped() -> None:
    rows = [["accounts/13", "1,000", "transfer-42"], ["a", "1", "-"]]
    assert fit_table(COLUMNS, rows, 31) == [
        "NAME             N  OWNER",
        "accounts/13  1,000  transfer-42",
        "a                1  -",
    ]
    assert fit_table(COLUMNS, rows, 28)[1] == "accounts/13  1,000  tran…-42"
    assert fit_table(COLUMNS, rows, 23)[1] == "acco…/13  1,000  tra…42"
    assert fit_table(COLUMNS, rows, 22)[1] == "accounts/13  1,000"
    assert fit_table(COLUMNS, rows, 10)[1] == "accou…s/13"
    assert fit_table(COLUMNS, rows, 5)[1] == "acco…"


def test_an_empty_column_is_dropped_before_a_text_shrinks() -> None:
    columns = (Column("NAME", 0, min_width=4), Column("N", 1), Column("MORE", 2), Column("ID", 3))
    rows = [["accounts/13", "1", "", "7"], ["a", "2", "", "8"]]
    assert fit_table(columns, rows, 24)[:2] == ["NAME         N  MORE  ID", "accounts/13  1        7"]
    assert fit_table(columns, rows, 23)[:2] == ["NAME         N  ID", "accounts/13  1  7"]
    assert fit_table(columns, [], 23)[0] == "NAME  N  MORE  ID"


def test_wrapping_of_items_and_names() -> None:
    assert wrap_items(["one", "two", "three", "longer than that"], 10) == ["one  two", "three", "longer th…"]
    assert wrap_items(["口口", "a\x1bb"], 8) == ["口口", "a\\x1bb"]
    assert wrap_text("口口口a\x1b", 4) == ["口口", "口a\\", "x1b"]
    assert wrap_text("", 4) == [""]
