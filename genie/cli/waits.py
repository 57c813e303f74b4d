"""`genie waits`"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import click

from genie.cli.format import clip, duration, printable, table
from genie.cli.inspect import TRANSACTION_COLUMNS, Row
from genie.cli.options import as_known, ask, bare_name, json_option, patience_option, plain_errors, server_options
from genie.protocol import codec
from genie.protocol.limits import MAX_ROWS

RESOURCE_COLUMNS = 60
HEADERS = ("WAITER", "TRANSACTION", "", "BLOCKER", "TRANSACTION", "RESOURCE", "STATE", "FOR")
LAST = len(HEADERS) - 1

Payload = dict[str, Any]


@click.command()
@click.option("--resource", metavar="NAME", help="Only those who wait in the line of this resource.")
@click.option("--transaction", metavar="NAME", help="Only those who wait for this transaction's sake.")
@click.option("--dot", is_flag=True, help="Print a digraph for Graphviz: dashed to those who are ahead in the line.")
@json_option
@server_options
@patience_option
@plain_errors
def waits(
    resource: str | None,
    transaction: str | None,
    dot: bool,
    as_json: bool,
    host: str,
    port: int,
    namespace: str | None,
    patience: float,
) -> None:
    """Show who waits for whom: a line for each request that waits, and each that is in its way.

    A blocker is in the way since it was granted (held) or since it came (queued: it is ahead in the line). --json
    prints nodes and edges: since in unix ms.
    """
    if dot and as_json:
        raise click.UsageError("--dot and --json exclude each other.")
    name = None if resource is None else bare_name(resource)
    payload = ask(
        host,
        port,
        namespace,
        patience,
        lambda client: client.inspected(resource=name, transaction=transaction, limit=MAX_ROWS, only="queue"),
    )
    with as_known():
        if as_json:
            text = codec.dumps(_graph(payload)).decode()
        else:
            text = "\n".join(_dot(payload) if dot else _report(payload, time.time() * 1000))
    click.echo(text)


def _graph(payload: Payload) -> dict[str, Any]:
    """The nodes and the edges; how many requests wait, and how many of them are in the graph."""
    queue = payload["queue"]
    nodes = {row["id"]: _node(row, "queued") | {"blockersTotal": row["blockersTotal"]} for row in queue}
    edges = []
    for row in queue:
        for blocker in row["blockers"]:
            nodes.setdefault(blocker["id"], _node(blocker, blocker["state"]))
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


def _node(row: Row, state: str) -> dict[str, Any]:
    owner = {"transactionName": row["transactionName"]} if "transactionName" in row else {}
    return {"id": row["id"], "state": state, "since": row["since"], **owner}


def _report(payload: Payload, now_ms: float) -> Iterator[str]:
    if not payload["queueTotal"]:
        yield "Nobody waits."
        return
    lines = [line for row in payload["queue"] for line in _edges(row, now_ms)]
    if lines:
        yield from table(HEADERS, lines, (LAST,))
    for note in _notes(payload):
        yield f"{note}."


def _edges(row: Row, now_ms: float) -> Iterator[list[str]]:
    for blocker in row["blockers"]:
        yield [
            *[str(row["id"]), _owner(row), "→", str(blocker["id"]), _owner(blocker)],
            clip(f"{blocker['mode']}:{blocker['resource']}", RESOURCE_COLUMNS),
            *[blocker["state"], duration(now_ms - blocker["since"])],
        ]


def _owner(row: Row) -> str:
    return clip(row.get("transactionName") or "-", TRANSACTION_COLUMNS)


def _notes(payload: Payload) -> Iterator[str]:
    """What the answer leaves out, by the server's limits."""
    queue, total = payload["queue"], payload["queueTotal"]
    unnamed = sum(row["blockersTotal"] - len(row["blockers"]) for row in queue)
    if unnamed:
        yield f"Edges that are not shown: {unnamed:,}, for the server names the first blockers of each who waits"
    if len(queue) < total:
        first = ", holders first" if payload["holders"] else ""  # they weren't asked for: the server is an older one
        yield (
            f"{len(queue):,} of {total:,} who wait are shown: an answer has {MAX_ROWS:,} rows and 256 KiB at most"
            f"{first}; see --resource and --transaction"
        )


def _dot(payload: Payload) -> Iterator[str]:
    graph = _graph(payload)
    yield "digraph waits {"
    yield "  node [shape=box];"
    notes = list(_notes(payload))
    if notes:
        yield f"  label={_quoted(*notes)};"
    for node in graph["nodes"]:
        lines = [str(node["id"]), *([node["transactionName"]] if "transactionName" in node else [])]
        yield f'  "{node["id"]}" [label={_quoted(*lines)}];'
    for edge in graph["edges"]:
        style = "solid" if edge["state"] == "held" else "dashed"
        label = _quoted(f"{edge['mode']}:{edge['resource']}")
        yield f'  "{edge["waiter"]}" -> "{edge["blocker"]}" [style={style}, label={label}];'
    yield "}"


def _quoted(*lines: str) -> str:
    r"""A label. Graphviz reads `\N` and the like in it as names of its own, and `&amp;` as HTML does."""
    text = r"\n".join(printable(line).replace("\\", r"\\").replace('"', r"\"").replace("&", "&amp;") for line in lines)
    return f'"{text}"'
