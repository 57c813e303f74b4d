"""`genie inspect`: the held and the waiting requests as a table or JSON."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import click

from genie.cli.format import clip, duration, join_names, remaining, table, width
from genie.cli.options import (
    Querier,
    WholeNumber,
    bare_name,
    checked_reply,
    json_option,
    one_line_errors,
    query,
    server_options,
    timeout_option,
)
from genie.cli.output import print_json, print_lines
from genie.protocol import codec
from genie.protocol.limits import MAX_ROWS
from genie.text import printable

COLUMNS = 100
"""Maximum width of an output line."""
TRANSACTION_COLUMNS = 20
NOTE_COLUMNS = 16
INDENT = "  "
RESOURCES_INDEX = 2
"""Index of the resources column, which gets the remaining width."""
NUMBER_INDEXES = (3, 4, 5)
"""Indexes of the right-aligned columns."""

Row = dict[str, Any]


@click.command()
@click.option("--resource", metavar="NAME", help="Only holders and waiters of this resource, in queue order.")
@click.option("--transaction", metavar="NAME", help="Only this transaction.")
@click.option("--id", type=int, metavar="N", help="Only this request.")
@click.option(
    "--limit",
    type=WholeNumber(1, MAX_ROWS),
    metavar="N",
    help="Maximum number of holders, and of waiters. [default: 100]",
)
@json_option
@server_options
@timeout_option
@one_line_errors
def inspect(
    resource: str | None,
    transaction: str | None,
    id: int | None,
    limit: int | None,
    as_json: bool,
    host: str,
    port: int,
    namespace: str | None,
    timeout: float,
) -> None:
    """Show held locks, waiting requests and their blockers.

    --limit applies to holders and to waiters separately. --json prints the rows as the server sends them: times in
    milliseconds.
    """
    if sum(given is not None for given in (resource, transaction, id)) > 1:
        raise click.UsageError("--resource, --transaction and --id are mutually exclusive: use only one.")
    name = None if resource is None else bare_name(resource)
    payload = query(
        host,
        port,
        namespace=namespace,
        timeout_s=timeout,
        operation=lambda client: _query(client, limit, resource=name, transaction=transaction, id=id),
    )
    if as_json:
        print_json(codec.dumps(payload))
        return
    with checked_reply():
        lines = list(_report_lines(payload, time.time() * 1000))
    print_lines(*lines)


async def _query(client: Querier, limit: int | None, **filters: Any) -> dict[str, Any]:
    """Return the payload of an `inspected` message with up to `limit` holders and up to `limit` waiters.

    The server applies one limit to the sum of holders and waiters, and lists the holders first. If waiters are
    missing, a second command queries only the waiters, so the waiters may be newer than the holders.
    """
    payload = await client.inspected(limit=limit, **filters)
    with checked_reply():
        incomplete = len(payload["queue"]) < payload["queueTotal"] and len(payload["holders"]) > 0
    if incomplete:
        waiters = await client.inspected(limit=limit, only="queue", **filters)
        with checked_reply():
            payload |= {field: waiters[field] for field in ("queue", "queueTotal")}
    return payload


def _report_lines(payload: dict[str, Any], now_ms: float) -> Iterator[str]:
    """Yield the lines of the text output: a table of held requests, and a table of waiting requests."""
    holders, queue = payload["holders"], payload["queue"]
    if not payload["holdersTotal"] and not payload["queueTotal"]:
        yield "No locks are held and no requests wait."
        return
    yield _title("Held", holders, payload["holdersTotal"])
    yield from holder_lines(holders, now_ms)
    yield _title("Waiting", queue, payload["queueTotal"])
    yield from waiter_lines(queue, now_ms)


def holder_lines(rows: list[Row], now_ms: float) -> Iterator[str]:
    """Yield the lines of a table of held requests; no lines if `rows` is empty."""
    if not rows:
        return
    header, *lines = _table(rows, now_ms, since_header="HELD FOR", timeout_header="ENDS IN")
    yield from _indent([header])
    for row, line in zip(rows, lines, strict=True):
        yield from _indent([line, *_note_lines(row)])


def waiter_lines(rows: list[Row], now_ms: float) -> Iterator[str]:
    """Yield the lines of a table of waiting requests and their blockers; no lines if `rows` is empty."""
    if not rows:
        return
    header, *lines = _table(rows, now_ms, since_header="WAITS FOR", timeout_header="TIMES OUT IN")
    yield from _indent([header])
    for row, line in zip(rows, lines, strict=True):
        yield from _indent([line, *_note_lines(row), *blocker_lines(row, now_ms)])


def _note_lines(row: Row) -> Iterator[str]:
    if "note" in row:
        yield INDENT + clip(f"note: {row['note']}", COLUMNS - 2 * len(INDENT))
    if "traceparent" in row:
        yield INDENT + f"trace: {_trace_id(row['traceparent'])}"


def _trace_id(traceparent: str) -> str:
    """Return the trace id of a trace context in the format of W3C Trace Context."""
    return traceparent.split("-")[1]


def _title(label: str, rows: list[Row], total: int) -> str:
    shown = "" if len(rows) == total else f", {len(rows):,} shown (see --limit)"
    return f"{label}: {total:,}{shown}"


def _table(rows: list[Row], now_ms: float, since_header: str, timeout_header: str) -> list[str]:
    """Return the lines of a table: the header, and a line for each request.

    The resources get the width that the other columns leave. The priority column is omitted if all priorities are 0.
    """
    has_priorities = any(row["priority"] for row in rows)
    priority_header = ["PRIORITY"] if has_priorities else []
    headers = ["ID", "TRANSACTION", "RESOURCES", since_header, timeout_header, *priority_header]
    cells = [
        [
            str(row["id"]),
            clip(row.get("transactionName") or "-", TRANSACTION_COLUMNS),
            "",  # the resources, filled in below
            duration(now_ms - row["since"]),
            remaining(row),
            *([str(row["priority"])] if has_priorities else []),
        ]
        for row in rows
    ]
    other_columns_width = width(table(headers, cells, NUMBER_INDEXES)[0]) - len("RESOURCES")
    resources_width = COLUMNS - len(INDENT) - other_columns_width
    for row, row_cells in zip(rows, cells, strict=True):
        row_cells[RESOURCES_INDEX] = join_names(row["resources"], total=row["resourcesTotal"], columns=resources_width)
    return table(headers, cells, NUMBER_INDEXES)


def blocker_lines(row: Row, now_ms: float) -> Iterator[str]:
    """Yield a line for each listed blocker of a waiting request, and a line with the number of the unlisted blockers."""
    for blocker in row["blockers"]:
        owner = f" of {clip(blocker['transactionName'], TRANSACTION_COLUMNS)}" if "transactionName" in blocker else ""
        verb = "holds" if blocker["state"] == "held" else "is ahead in the queue for"
        note = f", {clip(blocker['note'], NOTE_COLUMNS)}" if "note" in blocker else ""
        suffix = f"{note} ({duration(now_ms - blocker['since'])})"
        line = f"└ {blocker['id']}{owner} {verb} {blocker['mode']}:{printable(blocker['resource'])}"
        yield INDENT + clip(line, COLUMNS - 2 * len(INDENT) - len(suffix)) + suffix
        if "traceparent" in blocker:
            yield f"{INDENT}  trace: {_trace_id(blocker['traceparent'])}"
    omitted = row["blockersTotal"] - len(row["blockers"])
    if omitted > 0:
        yield f"{INDENT}└ and {omitted:,} more"


def _indent(lines: list[str]) -> Iterator[str]:
    return (INDENT + line for line in lines)
