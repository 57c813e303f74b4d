"""`genie waits`: the wait-for graph as text, JSON or DOT."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import click

from genie.cli.format import blocker_lock, dot_string, duration, wrap_table
from genie.cli.options import bare_name
from genie.cli.query import Output, QueriedServer, Reply, Row, output_options, server_query
from genie.protocol.limits import MAX_ROWS

HEADERS = ("WAITER", "TRANSACTION", "", "BLOCKER", "TRANSACTION", "RESOURCE", "STATE", "FOR")
NAME_INDEXES = (1, 4, 5)
"""Indexes of the columns that are wrapped on a narrow terminal."""
EDGE_FIELDS = ("resource", "mode", "units", "of", "state", "since")
"""The fields of a blocker that become fields of an edge."""
DOT_HELP = "Print a digraph for Graphviz; dashed edges lead to requests ahead in the queue."


@click.command()
@click.option("--resource", metavar="NAME", help="Only the requests in the queue of this resource.")
@click.option("--transaction", metavar="NAME", help="Only the requests of this transaction.")
@click.option("--dot", is_flag=True, help=DOT_HELP)
@output_options(wide=True)
@server_query
def waits(server: QueriedServer, output: Output, resource: str | None, transaction: str | None, dot: bool) -> None:
    """Show the wait-for graph: a line for each waiting request and each of its blockers.

    A blocker either holds the resource (held) or is ahead in its queue (queued); FOR is the time since it was granted
    or queued. A request without a transaction shows its note in parentheses. --json prints nodes and edges: since in
    unix ms.
    """
    if dot and output.as_json:
        raise click.UsageError("--dot and --json are mutually exclusive: use only one.")
    name = None if resource is None else bare_name(resource)
    reply = server.query(
        lambda client: client.inspected(resource=name, transaction=transaction, limit=MAX_ROWS, only="queue")
    )
    output.print(reply, _dot_lines if dot else _report_lines, document=_json_graph)


def _json_graph(payload: Reply) -> dict[str, Any]:
    """Convert the payload of an `inspected` message to the graph that `--json` prints.

    `queueTotal` is the number of waiting requests, `queueShown` the number of waiting requests that the server listed.
    """
    queue = payload["queue"]
    node_by_id = {row["id"]: _json_node(row, "queued") | {"blockersTotal": row["blockersTotal"]} for row in queue}
    edges = []
    for waiter in queue:
        for blocker in waiter["blockers"]:
            node_by_id.setdefault(blocker["id"], _json_node(blocker, blocker["state"]))
            edges.append({"waiter": waiter["id"], "blocker": blocker["id"], **_copy_fields(blocker, EDGE_FIELDS)})
    return {
        "nodes": list(node_by_id.values()),
        "edges": edges,
        "queueTotal": payload["queueTotal"],
        "queueShown": len(queue),
    }


def _json_node(row: Row, state: str) -> dict[str, Any]:
    """Return the JSON object of a node. `row` is a waiting request or a blocker in a reply."""
    return {"id": row["id"], "state": state, "since": row["since"], **_copy_fields(row, ("transactionName", "note"))}


def _copy_fields(row: Row, fields: Iterable[str]) -> dict[str, Any]:
    """Return the fields that a row has."""
    return {field: row[field] for field in fields if field in row}


def _report_lines(payload: Reply, now_ms: float, columns: int | None = None) -> Iterator[str]:
    """Yield the lines of the text output: a table of the edges, and notes about the edges that the table omits."""
    if not payload["queueTotal"]:
        yield "No requests wait."
        return
    rows = [_edge_cells(waiter, blocker, now_ms) for waiter in payload["queue"] for blocker in waiter["blockers"]]
    if rows:
        for lines in wrap_table(HEADERS, rows, columns, NAME_INDEXES, right_aligned=(len(HEADERS) - 1,)):
            yield from lines
    for note in _truncation_notes(payload):
        yield f"{note}."


def _edge_cells(waiter: Row, blocker: Row, now_ms: float) -> list[str]:
    """Return the table cells of an edge, in the order of `HEADERS`."""
    waiter_cells = [str(waiter["id"]), _owner(waiter)]
    blocker_cells = [str(blocker["id"]), _owner(blocker), blocker_lock(blocker), blocker["state"]]
    return [*waiter_cells, "→", *blocker_cells, duration(now_ms - blocker["since"])]


def _owner(row: Row) -> str:
    """Return the name of a request's transaction. Without one, return `(NOTE)`, or `-` if there is no note either."""
    if row.get("transactionName"):
        return str(row["transactionName"])
    return f"({row['note']})" if row.get("note") else "-"


def _truncation_notes(payload: Reply) -> Iterator[str]:
    """Yield a sentence without a full stop for each limit of the server because of which the reply is incomplete."""
    queue, total = payload["queue"], payload["queueTotal"]
    omitted_edges = sum(row["blockersTotal"] - len(row["blockers"]) for row in queue)
    if omitted_edges:
        yield f"{omitted_edges:,} edges are not shown: the server lists only the first blockers of each waiter"
    if len(queue) < total:
        # An older server ignores the field `only` of the query, and lists holders before the waiting requests.
        holders_first = ", holders first" if payload["holders"] else ""
        yield (
            f"{len(queue):,} of {total:,} waiting requests are shown: a reply has at most {MAX_ROWS:,} rows and 256 KiB"
            f"{holders_first}; see --resource and --transaction"
        )


def _dot_lines(payload: Reply, *_: object) -> Iterator[str]:
    """Yield the lines of the graph in the DOT language of Graphviz. Dashed edges lead to requests ahead in the queue."""
    graph = _json_graph(payload)
    yield "digraph waits {"
    yield "  node [shape=box];"
    notes = list(_truncation_notes(payload))
    if notes:
        yield f"  label={dot_string(*notes)};"
    for node in graph["nodes"]:
        lines = [str(node["id"])]
        if "transactionName" in node:
            lines.append(node["transactionName"])
        yield f'  "{node["id"]}" [label={dot_string(*lines)}];'
    for edge in graph["edges"]:
        style = "solid" if edge["state"] == "held" else "dashed"
        label = dot_string(blocker_lock(edge))
        yield f'  "{edge["waiter"]}" -> "{edge["blocker"]}" [style={style}, label={label}];'
    yield "}"
