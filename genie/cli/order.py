"""`genie order`: the order in which transactions take locks, and where it can deadlock, as text, JSON or DOT."""

from __future__ import annotations

import time
from collections.abc import Iterator

import click

from genie.admin.models import Inversion, Order, OrderEdge
from genie.cli.admin_client import AdminClient, admin_options, decode_response, query_admin
from genie.cli.format import duration, wrap_table
from genie.cli.inspect import INDENT
from genie.cli.options import WholeNumber, json_option, one_line_errors, timeout_option, wide_option
from genie.cli.output import output_columns, print_json, print_lines
from genie.core.lock_order.inversions import describe_edge
from genie.protocol import codec
from genie.text import printable

DEFAULT_LIMIT, MAX_LIMIT = 100, 1_000
HEADERS = ("HELD", "", "THEN", "REQUESTS", "LAST")


@click.command()
@click.option(
    "--limit",
    type=WholeNumber(1, MAX_LIMIT),
    metavar="N",
    default=DEFAULT_LIMIT,
    show_default=True,
    help="Maximum number of edges, the most frequent first.",
)
@click.option("--dot", is_flag=True, help="Print a digraph for Graphviz; the edges of inversions are red.")
@wide_option
@json_option
@admin_options
@timeout_option
@one_line_errors
def order(
    limit: int,
    dot: bool,
    wide: bool,
    as_json: bool,
    admin_host: str,
    admin_port: str,
    namespace: str | None,
    timeout: float,
) -> None:
    """Show in which order transactions take locks, by classes of names, and which orders can deadlock (inversions).

    Queries the admin port of the leader, which observes transactions since its start. --json prints the response: times
    in unix ms.
    """
    if dot and as_json:
        raise click.UsageError("--dot and --json are mutually exclusive: use only one.")
    response = query_admin(
        AdminClient(admin_host, admin_port, namespace, timeout), lambda client: client.get("/api/order", limit)
    )
    shown = decode_response(response, Order)
    if as_json:
        print_json(codec.dumps(response))
    else:
        lines = _dot_lines(shown) if dot else _report_lines(shown, time.time() * 1000, output_columns(wide=wide))
        print_lines(*lines)


def _report_lines(shown: Order, now_ms: float, columns: int | None) -> Iterator[str]:
    """Yield the lines of the text output: the inversions, then the edges."""
    if not shown.edges:
        yield "No transaction has asked for a lock while it held another one."
        return
    if not shown.inversions:
        yield "No inversion: no two transactions that were seen can deadlock."
    for inversion in shown.inversions:
        yield from _inversion_lines(inversion, now_ms)
    if len(shown.inversions) < shown.total:
        yield f"{len(shown.inversions):,} of {shown.total:,} inversions are shown."
    for inversion in shown.guarded:
        names = ", ".join(map(printable, inversion.guards))
        yield f"Harmless while {names} is also held: {printable(inversion.description)}."
    yield ""
    edges = [_edge_cells(edge, now_ms) for edge in shown.edges]
    for lines in wrap_table(HEADERS, edges, columns, wrapped=(0, 2), right_aligned=(3, 4)):
        yield from lines
    if len(shown.edges) < shown.edges_total:
        yield f"{len(shown.edges):,} of {shown.edges_total:,} edges are shown."
    if shown.dropped:
        yield f"{shown.dropped:,} requests were not analysed completely, because of a limit."


def _inversion_lines(inversion: Inversion, now_ms: float) -> Iterator[str]:
    """Yield a line with what is wrong, and two lines for each direction: its example, and how often it was seen."""
    yield f"Can deadlock: {printable(inversion.description)}."
    for edge in inversion.edges:
        example = edge.example
        held, asked = f"{edge.held_mode}:{example.held}", f"{edge.asked_mode}:{example.asked}"
        yield INDENT + printable(describe_edge(example.transaction_name, held, asked))
        details = [f"request {example.id}", f"{duration(now_ms - example.at)} ago"]
        if isinstance(example.principal, str):
            details.append(f"by {example.principal}")
        if isinstance(example.note, str):
            details.append(f"note: {example.note}")
        times = "once" if edge.count == 1 else f"{edge.count:,} times, last {duration(now_ms - edge.last_at)} ago"
        yield INDENT * 2 + printable(", ".join(details)) + f"; seen {times}"


def _edge_cells(edge: OrderEdge, now_ms: float) -> list[str]:
    """Return the table cells of an edge, in the order of `HEADERS`."""
    held, asked = printable(f"{edge.held_mode}:{edge.held}"), printable(f"{edge.asked_mode}:{edge.asked}")
    if edge.relation != "classes":
        asked += f" ({edge.relation})"
    return [held, "→", asked, f"{edge.count:,}", duration(now_ms - edge.last_at)]


def _dot_lines(shown: Order) -> Iterator[str]:
    """Yield the lines of a digraph: an arrow from what is held to what is asked for then."""
    in_inversions = [edge for inversion in shown.inversions for edge in inversion.edges]
    inverted = {(edge.held, edge.asked) for edge in in_inversions}
    # An edge of an inversion may be beyond the limit, and an edge may be in several inversions.
    edges = {
        (edge.held, edge.held_mode, edge.asked, edge.asked_mode, edge.relation): edge
        for edge in (*shown.edges, *in_inversions)
    }
    counts: dict[tuple[str, str], int] = {}
    for edge in edges.values():
        counts[edge.held, edge.asked] = counts.get((edge.held, edge.asked), 0) + edge.count
    yield "digraph lock_order {"
    for (held, asked), count in counts.items():
        color = " color=red" if (held, asked) in inverted else ""
        yield f'  {_quote(held)} -> {_quote(asked)} [label="{count}"{color}];'
    yield "}"


def _quote(name: str) -> str:
    escaped = printable(name).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
