"""`genie deadlocks`"""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime

import click

from genie.admin.models import DeadlockRow, Deadlocks
from genie.cli.admin_client import AdminClient, admin_options, decode_response, query_admin
from genie.cli.format import clip, duration, fold
from genie.cli.inspect import INDENT, TRANSACTION_COLUMNS
from genie.cli.options import WholeNumber, json_option, one_line_errors, timeout_option
from genie.protocol import codec

COLUMNS = 80
"""Maximum width of a line."""
DEFAULT_LIMIT, MAX_LIMIT = 10, 100


@click.command()
@click.option(
    "--limit",
    type=WholeNumber(1, MAX_LIMIT),
    metavar="N",
    default=DEFAULT_LIMIT,
    show_default=True,
    help="Maximum number of deadlocks.",
)
@json_option
@admin_options
@timeout_option
@one_line_errors
def deadlocks(
    limit: int, as_json: bool, admin_host: str, admin_port: str, namespace: str | None, timeout: float
) -> None:
    """Show the latest deadlocks, newest first: the request that was ended, and the cycle that it would have created.

    Queries the admin port of one server, which keeps deadlocks since its start. --json prints the response: times in
    unix ms.
    """
    response = query_admin(
        AdminClient(admin_host, admin_port, namespace, timeout), lambda client: client.get("/api/deadlocks", limit)
    )
    answer = decode_response(response, Deadlocks)
    click.echo(codec.dumps(response) if as_json else "\n".join(_report(answer, time.time() * 1000)))


def _report(answer: Deadlocks, now_ms: float) -> Iterator[str]:
    if not answer.total:
        yield "No deadlocks since the server started."
        return
    for row in answer.deadlocks:
        yield from _deadlock(row, now_ms)
    if len(answer.deadlocks) < answer.total:
        yield f"{len(answer.deadlocks):,} of {answer.total:,} since the server started are shown."


def _deadlock(row: DeadlockRow, now_ms: float) -> Iterator[str]:
    """Describe a deadlock: time, victim, and the steps of the cycle, which starts and ends at the victim."""
    at = datetime.fromtimestamp(row.at / 1000).astimezone().isoformat(sep=" ", timespec="seconds")
    yield f"{at}, {duration(now_ms - row.at)} ago"
    yield f"{INDENT}{_who(row.id, row.transaction_name)} was ended: it would have created a cycle"
    more = row.steps_total - len(row.waits)
    owners: list[str | None] = [*row.cycle[: len(row.waits)]]
    owners += [None] * (len(row.waits) - len(owners))
    for step, waiter, holder in zip(row.waits, owners, [*owners[1:], None if more > 0 else owners[0]], strict=True):
        yield from _folded(f"{_who(step.waiter, waiter)} waits for ", step.resource)
        yield f"{INDENT * 2}which {_who(step.holder, holder)} holds"
    if more > 0:
        yield f"{INDENT}and {more:,} more steps"


def _folded(text: str, name: str) -> Iterator[str]:
    """Return a line that ends with a name; a long name is wrapped onto lines of its own."""
    first, *more = fold(name, COLUMNS - len(INDENT) - len(text))
    if more:
        yield INDENT + text.rstrip()
        yield from (INDENT * 3 + part for part in fold(name, COLUMNS - 3 * len(INDENT)))
    else:
        yield INDENT + text + first


def _who(id: int, owner: str | None) -> str:
    """Name a request by its id and its transaction. A request without one has its id as the owner."""
    return str(id) if owner in (None, str(id)) else f"{id} of {clip(owner, TRANSACTION_COLUMNS)}"
