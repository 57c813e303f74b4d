"""`genie status`"""

from __future__ import annotations

import time
from typing import Any

import click

from genie.cli.options import Asker, ask, json_option, patience_option, plain_errors, server_options, whereabouts
from genie.client.config import Address, format_address
from genie.errors import Code, RequestRejected
from genie.protocol import codec


@click.command()
@json_option
@server_options
@patience_option
@plain_errors
def status(as_json: bool, host: str, port: int, namespace: str | None, patience: float) -> None:
    """Is the server there? Exits 0 if it answers and 1 if not, which makes it a health check.

    Of several servers, and where the one that is asked follows another, it is the one that leads that answers.
    What is held and who waits is told to names that may inspect everything (JSON: null for others).
    """

    async def question(client: Asker) -> tuple[float, dict[str, Any], Address | None]:
        began = time.perf_counter()
        await client.ping()
        round_trip = time.perf_counter() - began
        try:
            totals = await client.inspected(limit=1)
        except RequestRejected as error:
            if error.code != Code.UNAUTHORIZED:
                raise
            totals = {}  # it does its work, and how much of it is not for this name
        return round_trip, totals, client.address

    round_trip, totals, leader = ask(host, port, namespace, patience, question)
    address, round_trip_ms = format_address(leader) if leader else whereabouts(host, port), round(round_trip * 1000, 3)
    held, waiting = totals.get("holdersTotal"), totals.get("queueTotal")
    if as_json:
        click.echo(codec.dumps({"address": address, "roundTripMs": round_trip_ms, "held": held, "waiting": waiting}))
    else:
        numbers = f"; requests held: {held}, waiting: {waiting}" if totals else ""
        click.echo(f"{address} answers in {round_trip_ms:.1f} ms{numbers}")
