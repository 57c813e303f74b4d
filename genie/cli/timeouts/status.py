"""`genie timeouts status`"""

from __future__ import annotations

import asyncio

import click

from genie.cli.options import json_option, one_line_errors
from genie.cli.timeouts.options import ledger_options
from genie.protocol import codec
from genie.timeouts import Ledger
from genie.timeouts.schema import open_ledger
from genie.timeouts.status import Status
from genie.timeouts.status import status as status_of


@click.command()
@one_line_errors
@ledger_options
@json_option
def status(url: str, ledger: Ledger, as_json: bool) -> None:
    """Show how far the handler has come, and what is left.

    \b
      segment      the state change up to which it has read
      lag          state changes behind that
      pending      transfers that were taken in and not handed over
      overdue      those of them that are to be handed over now
      handed over  transfers that were, and are not final yet
    """  # noqa: D301 - click wants the character itself before a text that must keep its lines
    found = asyncio.run(_status(url, ledger))
    if as_json:
        names = {"segment": found.segment, "last": found.last, "lag": found.lag}
        counts = {"pending": found.pending, "overdue": found.overdue, "handedOver": found.handed_over}
        click.echo(codec.dumps(names | counts))
        return
    click.echo(f"segment: {found.segment:,} of {found.last:,}, lag: {found.lag:,}")
    click.echo(f"pending: {found.pending:,}, overdue: {found.overdue:,}, handed over: {found.handed_over:,}")


async def _status(url: str, ledger: Ledger) -> Status:
    async with open_ledger(url, ledger) as database:
        return await status_of(database, ledger)
