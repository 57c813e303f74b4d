"""`genie deadlocks`: the latest deadlocks that a server has detected, as text or JSON."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

import click
from msgspec import UNSET

from genie.admin.models import DeadlockRow, Deadlocks
from genie.cli.admin_client import AdminClient, admin_query
from genie.cli.format import duration, fold, request_name
from genie.cli.inspect import INDENT
from genie.cli.options import WholeNumber
from genie.cli.query import Output, output_options

MAX_LIMIT = 100
LIMIT_HELP = "Maximum number of deadlocks."


@click.command()
@click.option("--limit", type=WholeNumber(1, MAX_LIMIT), metavar="N", default=10, show_default=True, help=LIMIT_HELP)
@output_options(wide=False)
@admin_query
def deadlocks(admin: AdminClient, output: Output, limit: int) -> None:
    """Show the latest deadlocks, newest first: the request that was ended, and the cycle that it would have created.

    Queries the admin port of one server, which keeps deadlocks since its start. --json prints the response: times in
    unix ms.
    """
    response, listed = admin.query("/api/deadlocks", Deadlocks, limit)
    output.print(listed, _report_lines, document=lambda _: response)


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

    The cycle starts and ends at the victim. The server lists only the first steps of a long cycle.
    """
    at = datetime.fromtimestamp(deadlock.at / 1000).astimezone().isoformat(sep=" ", timespec="seconds")
    yield f"{at}, {duration(now_ms - deadlock.at)} ago"
    victim = request_name(deadlock.id, deadlock.transaction_name)
    yield from fold(INDENT, f"{victim} was ended: it would have created a cycle", columns)
    owner_by_step = dict(enumerate(deadlock.cycle))
    steps_total = max(deadlock.steps_total, len(deadlock.waits))
    for index, step in enumerate(deadlock.waits):
        next_index = (index + 1) % steps_total  # after the last step, the victim
        waiter = request_name(step.waiter, owner_by_step.get(index))
        holder = request_name(step.holder, owner_by_step.get(next_index))
        waited_for = step.resource if step.units is UNSET else f"{step.units}/{step.of}:{step.resource}"
        yield from fold(INDENT, f"{waiter} waits for {waited_for}", columns)
        yield from fold(INDENT * 2, f"which {holder} holds", columns)
    if steps_total > len(deadlock.waits):
        yield f"{INDENT}and {steps_total - len(deadlock.waits):,} more steps"
