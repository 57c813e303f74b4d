"""`genie status`: check whether a server executes commands. The container image uses this command as its health check."""

from __future__ import annotations

import time
from typing import Any

import click

from genie.cli.query import Output, QueriedServer, Querier, output_options, server_query
from genie.client.config import format_address
from genie.errors import Code, RequestRejected

LOCAL_HELP = "Ask the server of this machine or container, at its admin port, with the settings in its environment."


@click.command()
@output_options(wide=False)
@server_query
@click.option("--local", "is_local", is_flag=True, help=LOCAL_HELP)
def status(server: QueriedServer, output: Output, is_local: bool) -> None:
    """Check that the server responds: exit status 0 if it does, 1 if not.

    With --local: show the role of one server in each namespace, and the leader. The exit status is 0 if the server is ready.
    It needs no token, and works in the environment of `genie serve`, for example in its container.

    Of several servers, the leader is checked. The numbers of held and waiting requests are shown to principals that
    may inspect all resources (JSON: null for others). The last line is the version of the server, whether it is
    compiled, and its interpreter.
    """
    if is_local:
        from genie.cli.local_status import read_local_status, read_settings  # noqa: PLC0415 - needs the server and HTTP

        found = read_local_status(read_settings(), server.timeout_s)
        document = {"ready": found.is_ready, "namespaces": found.namespaces}
        output.print(document, lambda *_: [f"{name}: {text}" for name, text in found.namespaces.items()])
        raise SystemExit(0 if found.is_ready else 1)
    output.print(server.query(lambda client: _measure(client, server.addresses)), _report_lines)


async def _measure(client: Querier, addresses: str) -> dict[str, Any]:
    """Measure a round trip to the leader, and return the document that `--json` prints.

    `addresses` is the address in the document if the connection has just been lost. The numbers of requests are None if the
    principal may not inspect all resources.
    """
    started_at = time.perf_counter()
    await client.ping()
    round_trip_s = time.perf_counter() - started_at
    try:
        totals = await client.inspected(limit=1)
    except RequestRejected as error:
        if error.code != Code.UNAUTHORIZED:
            raise
        totals = {}
    return {
        "address": format_address(client.address) if client.address else addresses,
        "server": client.server,
        "roundTripMs": round(round_trip_s * 1000, 3),
        "held": totals.get("holdersTotal"),
        "waiting": totals.get("queueTotal"),
    }


def _report_lines(document: dict[str, Any], *_: object) -> list[str]:
    """Return the lines of the text output for the document that `--json` prints."""
    line = f"{document['address']} leads, and responded in {document['roundTripMs']:.1f} ms"
    if document["held"] is not None:
        line += f"; requests held: {document['held']}, waiting: {document['waiting']}"
    return [line, document["server"]]
