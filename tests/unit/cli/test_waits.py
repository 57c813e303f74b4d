from __future__ import annotations

import importlib
from typing import Any

import genie.cli.waits  # noqa: F401 - the module, whose name the package gives to the command
from support.admin.inspected_rows import NOW, blocker, inspected, row

WAITS = importlib.import_module("genie.cli.waits")

QUEUE = inspected(
    row(8, "exclusive:a", blockers=[blocker(7, transactionName="t7")]),
    row(9, "shared:a", transactionName="t9", blockers=[blocker(8, state="queued", since=NOW - 250_000)]),
)


def report(payload: dict[str, Any]) -> list[str]:
    return list(WAITS._report_lines(payload, NOW))


def dot(payload: dict[str, Any]) -> list[str]:
    return list(WAITS._dot_lines(payload))


def test_units_and_subtrees_are_shown_as_they_are_requested() -> None:
    counted = blocker(7, resource="pool", mode="units", units=2, of=10)
    payload = inspected(
        row(8, "1/10:pool", blockers=[counted]), row(9, "shared:a/1", blockers=[blocker(7, resource="a/**")])
    )
    assert [" 2/10:pool " in line for line in report(payload)] == [False, True, False]
    assert [" exclusive:a/** " in line for line in report(payload)] == [False, False, True]
    assert any('label="2/10:pool"' in line for line in dot(payload))


def test_an_empty_graph() -> None:
    assert report(inspected(row(7, "a"))) == ["No requests wait."]


def test_one_line_for_each_edge() -> None:
    assert report(QUEUE) == [
        "WAITER  TRANSACTION     BLOCKER  TRANSACTION  RESOURCE     STATE          FOR",
        "8       -            →  7        t7           exclusive:a  held         3.2 s",
        "9       t9           →  8        -            exclusive:a  queued  4 min 10 s",
    ]


def test_a_request_without_a_transaction_shows_its_note() -> None:
    payload = inspected(
        row(9, "shared:a", note="nightly", blockers=[blocker(7, transactionName="t7", note="worker 7")])
    )
    assert report(payload)[1].split()[:5] == ["9", "(nightly)", "→", "7", "t7"]
    assert [node.get("note") for node in WAITS._json_graph(payload)["nodes"]] == ["nightly", "worker 7"]


def test_omitted_edges_and_requests_are_counted() -> None:
    lines = report(inspected(row(8, "a", blockers=[blocker(7)], blockersTotal=12), queueTotal=3_000))
    assert lines[-2] == "11 edges are not shown: the server lists only the first blockers of each waiter."
    assert lines[-1].startswith("1 of 3,000 waiting requests are shown: a reply has at most 1,000 rows")
    assert ", holders first" not in lines[-1]
    older = report(inspected(row(7, "a"), queueTotal=5))[0]
    assert older.startswith(
        "0 of 5 waiting requests are shown: a reply has at most 1,000 rows and 256 KiB, holders first;"
    )


def test_json_contains_each_node_once() -> None:
    graph = WAITS._json_graph(QUEUE)
    since = NOW - 3_200
    assert graph["nodes"] == [
        {"id": 8, "state": "queued", "since": since, "blockersTotal": 1},
        {"id": 9, "state": "queued", "since": since, "transactionName": "t9", "blockersTotal": 1},
        {"id": 7, "state": "held", "since": since, "transactionName": "t7"},
    ]
    assert graph["edges"] == [
        {"waiter": 8, "blocker": 7, "resource": "a", "mode": "exclusive", "state": "held", "since": since},
        {"waiter": 9, "blocker": 8, "resource": "a", "mode": "exclusive", "state": "queued", "since": NOW - 250_000},
    ]
    assert (graph["queueTotal"], graph["queueShown"]) == (2, 2)


def test_dot_edges_to_holders_are_solid_and_to_the_queue_dashed() -> None:
    assert dot(QUEUE) == [
        "digraph waits {",
        "  node [shape=box];",
        '  "8" [label="8"];',
        '  "9" [label="9\\nt9"];',
        '  "7" [label="7\\nt7"];',
        '  "8" -> "7" [style=solid, label="exclusive:a"];',
        '  "9" -> "8" [style=dashed, label="exclusive:a"];',
        "}",
    ]


def test_dot_label_counts_omitted_edges_and_requests() -> None:
    lines = dot(inspected(row(8, "a", blockers=[blocker(7)], blockersTotal=2), queueTotal=2))
    assert lines[2].startswith('  label="1 edges are not shown:')
    assert "\\n1 of 2 waiting requests are shown" in lines[2]


def test_names_are_escaped_in_dot_labels() -> None:
    names = {'a"]; x [label="': r"a\"]; x [label=\"", "a\\": "a\\\\", r"\N": r"\\N", "&lt;": "&amp;lt;"}
    for name, label in (names | {"a\u202eb": "a\\\\u202eb"}).items():
        lines = dot(inspected(row(8, "a", blockers=[blocker(7, resource=name, transactionName=name)])))
        assert f'  "7" [label="7\\n{label}"];' in lines
        assert f'  "8" -> "7" [style=solid, label="exclusive:{label}"];' in lines
