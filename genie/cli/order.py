"""`genie order`: the order in which transactions take locks, and where it can deadlock, as text, JSON or DOT."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import click

from genie.admin.models import Inversion, Order, OrderEdge
from genie.cli.admin_client import AdminClient, admin_query
from genie.cli.format import dot_string, duration, wrap_table
from genie.cli.inspect import INDENT
from genie.cli.options import WholeNumber
from genie.cli.query import Output, output_options
from genie.core.lock_order.inversions import describe_edge
from genie.text import printable

MAX_LIMIT = 1_000
LIMIT_HELP = "Maximum number of edges, the most frequent first."
HEADERS = ("HELD", "", "THEN", "REQUESTS", "LAST")
NAME_INDEXES = (0, 2)
"""Indexes of the columns that are wrapped on a narrow terminal."""
NUMBER_INDEXES = (3, 4)
"""Indexes of the right-aligned columns."""


@click.command()
@click.option("--limit", type=WholeNumber(1, MAX_LIMIT), metavar="N", default=100, show_default=True, help=LIMIT_HELP)
@click.option("--dot", is_flag=True, help="Print a digraph for Graphviz; the edges of inversions are red.")
@output_options(wide=True)
@admin_query
def order(admin: AdminClient, output: Output, limit: int, dot: bool) -> None:
    """Show in which order transactions take locks, by classes of names, and which orders can deadlock (inversions).

    Queries the admin port of the leader, which observes transactions since its start. --json prints the response: times
    in unix ms.
    """
    if dot and output.as_json:
        raise click.UsageError("--dot and --json are mutually exclusive: use only one.")
    response, shown = admin.query("/api/order", Order, limit)
    output.print(shown, _dot_lines if dot else _report_lines, document=lambda _: response)


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
    for lines in wrap_table(HEADERS, edges, columns, NAME_INDEXES, NUMBER_INDEXES):
        yield from lines
    if len(shown.edges) < shown.edges_total:
        yield f"{len(shown.edges):,} of {shown.edges_total:,} edges are shown."
    if shown.dropped:
        yield f"{shown.dropped:,} requests were not analysed completely, because of a limit."


def _inversion_lines(inversion: Inversion, now_ms: float) -> Iterator[str]:
    """Yield a line with the problem, and two lines for each of its edges: an example, and how often the edge was seen."""
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


def _dot_lines(shown: Order, *_: object) -> Iterator[str]:
    """Yield the lines of a digraph, with an arrow from each held class to each class that is requested next."""
    inversion_edges = [edge for inversion in shown.inversions for edge in inversion.edges]
    inverted = {(edge.held, edge.asked) for edge in inversion_edges}
    # The edges of inversions may be missing in the limited list of edges, and an edge may be in several inversions.
    distinct_edges = {
        (edge.held, edge.held_mode, edge.asked, edge.asked_mode, edge.relation): edge
        for edge in (*shown.edges, *inversion_edges)
    }
    counts = Counter[tuple[str, str]]()  # an arrow stands for the edges of all modes
    for edge in distinct_edges.values():
        counts[edge.held, edge.asked] += edge.count
    yield "digraph lock_order {"
    for (held, asked), count in counts.items():
        color = " color=red" if (held, asked) in inverted else ""
        yield f'  {dot_string(held)} -> {dot_string(asked)} [label="{count}"{color}];'
    yield "}"
