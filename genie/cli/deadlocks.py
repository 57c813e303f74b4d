"""`genie deadlocks`: the latest deadlocks that a server has detected, as text or JSON."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime

import click

from genie.admin.models import DeadlockRow, Deadlocks
from genie.cli.admin_client import AdminClient, admin_options, decode_response, query_admin
from genie.cli.format import duration, fold
from genie.cli.inspect import INDENT
from genie.cli.options import WholeNumber, json_option, one_line_errors, timeout_option
from genie.cli.output import output_columns, print_json, print_lines
from genie.protocol import codec

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
    if as_json:
        print_json(codec.dumps(response))
    else:
        print_lines(*_report_lines(listed, time.time() * 1000, output_columns(wide=False)))


def _report_lines(listed: Deadlocks, now_ms: float, columns: int | None) -> Iterator[str]:
    """Yield the lines of the text output: the listed deadlocks, and the number of those not listed."""
    if not listed.total:
        yield "No deadlocks since the server started."
        return
    for deadlock in listed.deadlocks:
        yield from _deadlock_lines(deadlock, now_ms, columns)
    if len(listed.deadlocks) < listed.total:
        yield f"{len(listed.deadlocks):,} of {listed.total:,} since the server started are shown."


def _deadlock_lines(deadlock: DeadlockRow, now_ms: float, columns: int | None) -> Iterator[str]:
    """Yield the lines that describe a deadlock: its time, its victim, and the steps of the cycle.

    The cycle starts and ends at the victim. The server may list only the first steps of a long cycle.
    """
    at = datetime.fromtimestamp(deadlock.at / 1000).astimezone().isoformat(sep=" ", timespec="seconds")
    yield f"{at}, {duration(now_ms - deadlock.at)} ago"
    victim = _format_request(deadlock.id, deadlock.transaction_name)
    yield from fold(INDENT, f"{victim} was ended: it would have created a cycle", columns)
    omitted_steps = deadlock.steps_total - len(deadlock.waits)
    waiter_owners: list[str | None] = [*deadlock.cycle[: len(deadlock.waits)]]
    waiter_owners += [None] * (len(deadlock.waits) - len(waiter_owners))
    # The holder of a step is the waiter of the next step; the holder of the last step is the victim.
    holder_owners = [*waiter_owners[1:], None if omitted_steps > 0 else waiter_owners[0]]
    for step, waiter_owner, holder_owner in zip(deadlock.waits, waiter_owners, holder_owners, strict=True):
        yield from fold(INDENT, f"{_format_request(step.waiter, waiter_owner)} waits for {step.resource}", columns)
        yield from fold(INDENT * 2, f"which {_format_request(step.holder, holder_owner)} holds", columns)
    if omitted_steps > 0:
        yield f"{INDENT}and {omitted_steps:,} more steps"


def _format_request(id: int, owner: str | None) -> str:
    """Return the id of a request, followed by its transaction if it has one.

    `owner` is the name of the transaction. For a request without a transaction, `owner` is the id of the request or
    None.
    """
    return str(id) if owner in (None, str(id)) else f"{id} of {owner}"
