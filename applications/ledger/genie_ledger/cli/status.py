"""`genie-ledger status`: the progress of the handler."""

from __future__ import annotations

import asyncio

import click
import orjson

from genie.cli.toolkit import json_option, one_line_errors, print_json, print_lines
from genie_ledger import Ledger
from genie_ledger.cli.options import ledger_options
from genie_ledger.schema import open_ledger
from genie_ledger.status import Status
from genie_ledger.status import status as query_status


@click.command()
@one_line_errors
@ledger_options
@json_option
def status(url: str, ledger: Ledger, as_json: bool) -> None:
    """Show the progress of the handler, and the number of pending transfers.

    \b
      segment      the last state change that the handler has read
      lag          number of state changes after it
      pending      tracked transfers that were not delivered
      overdue      pending transfers whose expiration date has passed
      delivered    transfers that were delivered and are not final yet
      unlisted     transfers in states that are neither processing nor final
                   states, by state: tracked ones, and those with one of the
                   last 100,000 state changes; shown if there are any
    """  # noqa: D301 - click needs the backspace character before a paragraph that must not be rewrapped
    progress = asyncio.run(_query_status(url, ledger))
    if as_json:
        position = {"segment": progress.segment, "last": progress.last, "lag": progress.lag}
        counts = {"pending": progress.pending, "overdue": progress.overdue, "delivered": progress.delivered}
        print_json(orjson.dumps(position | counts | {"unlisted": dict(progress.unlisted)}))
        return
    print_lines(f"segment: {progress.segment:,} of {progress.last:,}, lag: {progress.lag:,}")
    print_lines(f"pending: {progress.pending:,}, overdue: {progress.overdue:,}, delivered: {progress.delivered:,}")
    if progress.unlisted:
        states = ", ".join(f"{count:,} {state}" for state, count in progress.unlisted.items())
        print_lines(f"unlisted: {states}")


async def _query_status(url: str, ledger: Ledger) -> Status:
    async with open_ledger(url, ledger) as database:
        return await query_status(database, ledger)
