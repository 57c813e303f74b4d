"""`genie deadlocks`"""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime

import click

from genie.admin.models import DeadlockRow, Deadlocks
from genie.cli.admin_client import AdminPort, admin_options, ask_admin, known
from genie.cli.format import clip, duration, fold
from genie.cli.inspect import INDENT, TRANSACTION_COLUMNS
from genie.cli.options import WholeNumber, json_option, patience_option, plain_errors
from genie.protocol import codec

COLUMNS = 80
"""What every line fits into."""
LIMIT, MOST = 10, 100


@click.command()
@click.option(
    "--limit",
    type=WholeNumber(1, MOST),
    metavar="N",
    default=LIMIT,
    show_default=True,
    help="Deadlocks to show at most.",
)
@json_option
@admin_options
@patience_option
@plain_errors
def deadlocks(
    limit: int, as_json: bool, admin_host: str, admin_port: str, namespace: str | None, patience: float
) -> None:
    """Show the last deadlocks, the newest first: which request was ended, and the cycle that it would have closed.

    Asks the admin port of one server, which knows of those since its start. --json prints its answer: times in unix ms.
    """
    told = ask_admin(
        AdminPort(admin_host, admin_port, namespace, patience), lambda port: port.get("/api/deadlocks", limit)
    )
    answer = known(told, Deadlocks)
    click.echo(codec.dumps(told) if as_json else "\n".join(_report(answer, time.time() * 1000)))


def _report(answer: Deadlocks, now_ms: float) -> Iterator[str]:
    if not answer.total:
        yield "No deadlock since the start of the server."
        return
    for row in answer.deadlocks:
        yield from _deadlock(row, now_ms)
    if len(answer.deadlocks) < answer.total:
        yield f"{len(answer.deadlocks):,} of {answer.total:,} since the start of the server are shown."


def _deadlock(row: DeadlockRow, now_ms: float) -> Iterator[str]:
    """When and who; then each step of the cycle, which begins and ends with the victim's transaction."""
    at = datetime.fromtimestamp(row.at / 1000).astimezone().isoformat(sep=" ", timespec="seconds")
    yield f"{at}, {duration(now_ms - row.at)} ago"
    yield f"{INDENT}{_who(row.id, row.transaction_name)} was ended: it would have closed a cycle"
    more = row.steps_total - len(row.waits)
    owners: list[str | None] = [*row.cycle[: len(row.waits)]]
    owners += [None] * (len(row.waits) - len(owners))
    for step, waiter, holder in zip(row.waits, owners, [*owners[1:], None if more > 0 else owners[0]], strict=True):
        yield from _folded(f"{_who(step.waiter, waiter)} asks for ", step.resource)
        yield f"{INDENT * 2}which {_who(step.holder, holder)} holds"
    if more > 0:
        yield f"{INDENT}and {more:,} more steps"


def _folded(text: str, name: str) -> Iterator[str]:
    """A line that ends with a name, which has lines of its own where it is long."""
    first, *more = fold(name, COLUMNS - len(INDENT) - len(text))
    if more:
        yield INDENT + text.rstrip()
        yield from (INDENT * 3 + part for part in fold(name, COLUMNS - 3 * len(INDENT)))
    else:
        yield INDENT + text + first


def _who(id: int, owner: str | None) -> str:
    """A request without a transaction is the owner of itself."""
    return str(id) if owner in (None, str(id)) else f"{id} of {clip(owner, TRANSACTION_COLUMNS)}"
