"""`genie inspect`: the held and the waiting requests as a table or JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from genie.cli.format import blocker_lock, duration, fold, join_names, remaining, wrap_table
from genie.cli.options import WholeNumber, bare_name
from genie.cli.query import Output, QueriedServer, Querier, Reply, Row, checked_reply, output_options, server_query
from genie.protocol.limits import MAX_ROWS

INDENT = "  "
"""The indentation of one level."""
NAME_INDEXES = (1, 2)
"""Indexes of the columns that are wrapped on a narrow terminal."""
NUMBER_INDEXES = (3, 4, 5)
"""Indexes of the right-aligned columns."""
LIMIT_HELP = "Maximum number of holders, and of waiters. [default: 100]"


@click.command()
@click.option("--resource", metavar="NAME", help="Only holders and waiters of this resource, in queue order.")
@click.option("--transaction", metavar="NAME", help="Only this transaction.")
@click.option("--id", type=int, metavar="N", help="Only this request.")
@click.option("--limit", type=WholeNumber(1, MAX_ROWS), metavar="N", help=LIMIT_HELP)
@output_options(wide=True)
@server_query
def inspect(
    server: QueriedServer,
    output: Output,
    resource: str | None,
    transaction: str | None,
    id: int | None,
    limit: int | None,
) -> None:
    """Show held locks, waiting requests and their blockers.

    --limit applies to holders and to waiters separately. --json prints the rows as the server sends them: times in
    milliseconds.
    """
    if sum(given is not None for given in (resource, transaction, id)) > 1:
        raise click.UsageError("--resource, --transaction and --id are mutually exclusive: use only one.")
    name = None if resource is None else bare_name(resource)
    reply = server.query(lambda client: _query(client, limit, resource=name, transaction=transaction, id=id))
    output.print(reply, _report_lines)


async def _query(client: Querier, limit: int | None, **filters: Any) -> Reply:
    """Return the payload of an `inspected` message with up to `limit` holders and up to `limit` waiters.

    The server applies one limit to the sum of holders and waiters, and lists the holders first. If waiters are
    missing, a second command queries only the waiters, so the waiters may be newer than the holders.
    """
    payload = await client.inspected(limit=limit, **filters)
    with checked_reply():
        are_waiters_missing = len(payload["queue"]) < payload["queueTotal"] and len(payload["holders"]) > 0
    if are_waiters_missing:
        waiters = await client.inspected(limit=limit, only="queue", **filters)
        with checked_reply():
            payload["queue"], payload["queueTotal"] = waiters["queue"], waiters["queueTotal"]
    return payload


def _report_lines(payload: Reply, now_ms: float, columns: int | None = None) -> Iterator[str]:
    """Yield the lines of the text output: a table of held requests, and a table of waiting requests."""
    holders, queue = payload["holders"], payload["queue"]
    if not payload["holdersTotal"] and not payload["queueTotal"]:
        yield "No locks are held and no requests wait."
        return
    yield _title("Held", holders, payload["holdersTotal"])
    yield from request_lines(holders, now_ms, columns)
    yield _title("Waiting", queue, payload["queueTotal"])
    yield from request_lines(queue, now_ms, columns, waiting=True)


def request_lines(rows: list[Row], now_ms: float, columns: int | None, *, waiting: bool = False) -> Iterator[str]:
    """Yield the lines of a table of held requests or, with `waiting`, of waiting requests with their blockers.

    Without rows, there are no lines.
    """
    if not rows:
        return
    header, *blocks = _table(rows, now_ms, columns, waiting=waiting)
    yield from (INDENT + line for line in header)
    for row, lines in zip(rows, blocks, strict=True):
        if "note" in row:
            lines.extend(fold(INDENT, f"note: {row['note']}", _indented_columns(columns)))
        if "traceparent" in row:
            lines.append(f"{INDENT}trace: {_trace_id(row['traceparent'])}")
        if waiting:
            lines.extend(blocker_lines(row, now_ms, columns))
        yield from (INDENT + line for line in lines)


def _trace_id(traceparent: str) -> str:
    """Return the trace id of a `traceparent` of W3C Trace Context: `00-TRACE_ID-SPAN_ID-FLAGS`."""
    return traceparent.split("-")[1]


def _title(label: str, rows: list[Row], total: int) -> str:
    """Return the title of a table: the number of requests, and how many of them are shown."""
    shown = "" if len(rows) == total else f", {len(rows):,} shown (see --limit)"
    return f"{label}: {total:,}{shown}"


def _indented_columns(columns: int | None) -> int | None:
    """Return the terminal columns that are left for lines that are indented by `INDENT`."""
    return None if columns is None else columns - len(INDENT)


def _table(rows: list[Row], now_ms: float, columns: int | None, *, waiting: bool) -> list[list[str]]:
    """Return the lines of the table's header, and the lines of each request.

    Names are wrapped if the table is wider than `columns`. The priority column is omitted if all priorities are 0.
    """
    times = ["WAITS FOR", "TIMES OUT IN"] if waiting else ["HELD FOR", "ENDS IN"]
    headers = ["ID", "TRANSACTION", "RESOURCES", *times]
    cells = [
        [
            str(row["id"]),
            row.get("transactionName") or "-",
            join_names(row["resources"], total=row["resourcesTotal"]),
            duration(now_ms - row["since"]),
            remaining(row),
        ]
        for row in rows
    ]
    if any(row["priority"] for row in rows):
        headers.append("PRIORITY")
        for row, row_cells in zip(rows, cells, strict=True):
            row_cells.append(str(row["priority"]))
    return wrap_table(headers, cells, _indented_columns(columns), NAME_INDEXES, NUMBER_INDEXES)


def blocker_lines(row: Row, now_ms: float, columns: int | None) -> Iterator[str]:
    """Yield the lines of each listed blocker of a waiting request, and a line with the number of the unlisted blockers.

    The lines are indented once. They leave room for the caller to indent them again.
    """
    for blocker in row["blockers"]:
        owner = f" of {blocker['transactionName']}" if "transactionName" in blocker else ""
        verb = "holds" if blocker["state"] == "held" else "is ahead in the queue for"
        note = f", {blocker['note']}" if "note" in blocker else ""
        since = duration(now_ms - blocker["since"])
        text = f"└ {blocker['id']}{owner} {verb} {blocker_lock(blocker)}{note} ({since})"
        yield from fold(INDENT, text, _indented_columns(columns))
        if "traceparent" in blocker:
            yield f"{INDENT}  trace: {_trace_id(blocker['traceparent'])}"
    omitted = row["blockersTotal"] - len(row["blockers"])
    if omitted > 0:
        yield f"{INDENT}└ and {omitted:,} more"
