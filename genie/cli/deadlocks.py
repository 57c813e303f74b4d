"""`genie deadlocks`"""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime

import click

from genie.admin.models import DeadlockRow, Deadlocks
from genie.cli.admin_client import AdminClient, admin_options, decode_response, query_admin
from genie.cli.format import clip, duration, wrap_text
from genie.cli.inspect import INDENT, TRANSACTION_COLUMNS
from genie.cli.options import WholeNumber, json_option, one_line_errors, timeout_option
from genie.protocol import codec

COLUMNS = 80
"""Maximum width of an output line."""
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
    listed = decode_response(response, Deadlocks)
    click.echo(codec.dumps(response) if as_json else "\n".join(_report_lines(listed, time.time() * 1000)))


def _report_lines(listed: Deadlocks, now_ms: float) -> Iterator[str]:
    """Yield the lines of the text output: the listed deadlocks, and the number of those not listed."""
    if not listed.total:
        yield "No deadlocks since the server started."
        return
    for deadlock in listed.deadlocks:
        yield from _deadlock_lines(deadlock, now_ms)
    if len(listed.deadlocks) < listed.total:
        yield f"{len(listed.deadlocks):,} of {listed.total:,} since the server started are shown."


def _deadlock_lines(deadlock: DeadlockRow, now_ms: float) -> Iterator[str]:
    """Describe a deadlock: time, victim, and the steps of the cycle, which starts and ends at the victim."""
    at = datetime.fromtimestamp(deadlock.at / 1000).astimezone().isoformat(sep=" ", timespec="seconds")
    yield f"{at}, {duration(now_ms - deadlock.at)} ago"
    victim = _format_request(deadlock.id, deadlock.transaction_name)
    yield f"{INDENT}{victim} was ended: it would have created a cycle"
    omitted_steps = deadlock.steps_total - len(deadlock.waits)
    # The owner of each listed waiter; the holder of a step is the waiter of the next one.
    waiters: list[str | None] = [*deadlock.cycle[: len(deadlock.waits)]]
    waiters += [None] * (len(deadlock.waits) - len(waiters))
    holders = [*waiters[1:], None if omitted_steps > 0 else waiters[0]]
    for step, waiter, holder in zip(deadlock.waits, waiters, holders, strict=True):
        yield from _line_with_name(f"{_format_request(step.waiter, waiter)} waits for ", step.resource)
        yield f"{INDENT * 2}which {_format_request(step.holder, holder)} holds"
    if omitted_steps > 0:
        yield f"{INDENT}and {omitted_steps:,} more steps"


def _line_with_name(text: str, name: str) -> Iterator[str]:
    """Return a line of a text and a name; a name that does not fit is wrapped onto lines of its own."""
    first, *rest = wrap_text(name, COLUMNS - len(INDENT) - len(text))
    if rest:
        yield INDENT + text.rstrip()
        yield from (INDENT * 3 + part for part in wrap_text(name, COLUMNS - 3 * len(INDENT)))
    else:
        yield INDENT + text + first


def _format_request(id: int, owner: str | None) -> str:
    """Return the id of a request, and its transaction if it has one; the owner of other requests is their id."""
    return str(id) if owner in (None, str(id)) else f"{id} of {clip(owner, TRANSACTION_COLUMNS)}"
