"""`genie waits`: the wait-for graph as text, JSON or DOT."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import click

from genie.cli.format import duration, wrap_table
from genie.cli.inspect import Row
from genie.cli.options import (
    bare_name,
    checked_reply,
    json_option,
    one_line_errors,
    query,
    server_options,
    timeout_option,
    wide_option,
)
from genie.cli.output import output_columns, print_json, print_lines
from genie.protocol import codec
from genie.protocol.limits import MAX_ROWS
from genie.text import printable

HEADERS = ("WAITER", "TRANSACTION", "", "BLOCKER", "TRANSACTION", "RESOURCE", "STATE", "FOR")
NAME_INDEXES = (1, 4, 5)
"""Indexes of the columns that are wrapped on a narrow terminal."""
DURATION_INDEX = len(HEADERS) - 1

Payload = dict[str, Any]


@click.command()
@click.option("--resource", metavar="NAME", help="Only the requests in the queue of this resource.")
@click.option("--transaction", metavar="NAME", help="Only the requests of this transaction.")
@click.option(
    "--dot", is_flag=True, help="Print a digraph for Graphviz; dashed edges lead to requests ahead in the queue."
)
@wide_option
@json_option
@server_options
@timeout_option
@one_line_errors
def waits(
    resource: str | None,
    transaction: str | None,
    dot: bool,
    wide: bool,
    as_json: bool,
    host: str,
    port: int,
    namespace: str | None,
    timeout: float,
) -> None:
    """Show the wait-for graph: a line for each waiting request and each of its blockers.

    A blocker either holds the resource (held) or is ahead in its queue (queued); FOR is the time since it was granted
    or queued. --json prints nodes and edges: since in unix ms.
    """
    if dot and as_json:
        raise click.UsageError("--dot and --json are mutually exclusive: use only one.")
    name = None if resource is None else bare_name(resource)
    payload = query(
        host,
        port,
        namespace=namespace,
        timeout_s=timeout,
        operation=lambda client: client.inspected(resource=name, transaction=transaction, limit=MAX_ROWS, only="queue"),
    )
    with checked_reply():
        if as_json:
            document = codec.dumps(_json_graph(payload))
        else:
            lines = list(
                _dot_lines(payload) if dot else _report_lines(payload, time.time() * 1000, output_columns(wide=wide))
            )
    if as_json:
        print_json(document)
    else:
        print_lines(*lines)


def _json_graph(payload: Payload) -> dict[str, Any]:
    """Convert the payload of an `inspected` message to the graph that `--json` prints.

    `queueTotal` is the number of waiting requests, `queueShown` the number of waiting requests that the server listed.
    """
    queue = payload["queue"]
    nodes = {row["id"]: _json_node(row, "queued") | {"blockersTotal": row["blockersTotal"]} for row in queue}
    edges = []
    for row in queue:
        for blocker in row["blockers"]:
            nodes.setdefault(blocker["id"], _json_node(blocker, blocker["state"]))
            edges.append(
                {
                    "waiter": row["id"],
                    "blocker": blocker["id"],
                    **{field: blocker[field] for field in ("resource", "mode", "state", "since")},
                }
            )
    return {
        "nodes": list(nodes.values()),
        "edges": edges,
        "queueTotal": payload["queueTotal"],
        "queueShown": len(queue),
    }


def _json_node(row: Row, state: str) -> dict[str, Any]:
    owner = {"transactionName": row["transactionName"]} if "transactionName" in row else {}
    return {"id": row["id"], "state": state, "since": row["since"], **owner}


def _report_lines(payload: Payload, now_ms: float, columns: int | None = None) -> Iterator[str]:
    """Yield the lines of the text output: a table of the edges, and notes about the edges that the table omits."""
    if not payload["queueTotal"]:
        yield "No requests wait."
        return
    edges = [cells for row in payload["queue"] for cells in _edge_cells(row, now_ms)]
    if edges:
        for lines in wrap_table(HEADERS, edges, columns, NAME_INDEXES, right_aligned=(DURATION_INDEX,)):
            yield from lines
    for note in _truncation_notes(payload):
        yield f"{note}."


def _edge_cells(row: Row, now_ms: float) -> Iterator[list[str]]:
    """Yield the table cells of each edge from a waiting request to a blocker, in the order of `HEADERS`."""
    for blocker in row["blockers"]:
        yield [
            *[str(row["id"]), _owner(row), "→", str(blocker["id"]), _owner(blocker)],
            *[f"{blocker['mode']}:{blocker['resource']}", blocker["state"], duration(now_ms - blocker["since"])],
        ]


def _owner(row: Row) -> str:
    """Return the name of a request's transaction, or `-` for a request without a transaction."""
    return str(row.get("transactionName") or "-")


def _truncation_notes(payload: Payload) -> Iterator[str]:
    """Yield a note for each limit of the server because of which the reply is incomplete."""
    queue, total = payload["queue"], payload["queueTotal"]
    omitted_edges = sum(row["blockersTotal"] - len(row["blockers"]) for row in queue)
    if omitted_edges:
        yield f"{omitted_edges:,} edges are not shown: the server lists only the first blockers of each waiter"
    if len(queue) < total:
        # An older server ignores `only`: its reply also contains holders, which use up rows.
        holders_first = ", holders first" if payload["holders"] else ""
        yield (
            f"{len(queue):,} of {total:,} waiting requests are shown: a reply has at most {MAX_ROWS:,} rows and 256 KiB"
            f"{holders_first}; see --resource and --transaction"
        )


def _dot_lines(payload: Payload) -> Iterator[str]:
    """Yield the lines of the graph in the DOT language of Graphviz. Dashed edges lead to requests ahead in the queue."""
    graph = _json_graph(payload)
    yield "digraph waits {"
    yield "  node [shape=box];"
    notes = list(_truncation_notes(payload))
    if notes:
        yield f"  label={_dot_label(*notes)};"
    for node in graph["nodes"]:
        lines = [str(node["id"]), *([node["transactionName"]] if "transactionName" in node else [])]
        yield f'  "{node["id"]}" [label={_dot_label(*lines)}];'
    for edge in graph["edges"]:
        style = "solid" if edge["state"] == "held" else "dashed"
        label = _dot_label(f"{edge['mode']}:{edge['resource']}")
        yield f'  "{edge["waiter"]}" -> "{edge["blocker"]}" [style={style}, label={label}];'
    yield "}"


def _dot_label(*lines: str) -> str:
    r"""Return a quoted Graphviz label with the given lines. Backslashes, as in `\N`, and HTML entities are escaped."""
    text = r"\n".join(printable(line).replace("\\", r"\\").replace('"', r"\"").replace("&", "&amp;") for line in lines)
    return f'"{text}"'
