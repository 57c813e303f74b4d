"""`genie status`: check whether a server executes commands. The container image uses this command as its health check."""

from __future__ import annotations

import time
from typing import Any

import click

from genie.cli.options import (
    Querier,
    format_servers,
    json_option,
    one_line_errors,
    query,
    server_options,
    timeout_option,
)
from genie.cli.output import print_json, print_lines
from genie.client.config import Address, format_address
from genie.errors import Code, RequestRejected
from genie.protocol import codec


@click.command()
@json_option
@server_options
@timeout_option
@click.option(
    "--local",
    "is_local",
    is_flag=True,
    help="Ask the server of this machine or container, at its admin port, with the settings in its environment.",
)
@one_line_errors
def status(as_json: bool, host: str, port: int, namespace: str | None, timeout: float, is_local: bool) -> None:
    """Check that the server responds: exit status 0 if it does, 1 if not.

    With --local: show the role of one server in each namespace, and who leads. The exit status is 0 if the server is ready.
    It needs no token, and works in the environment of `genie serve`, such as that of a container.

    Of several servers, the leader is checked. The numbers of held and waiting requests are shown to principals that
    may inspect all resources (JSON: null for others). The last line is the version of the server, whether it is
    compiled, and its interpreter.
    """
    if is_local:
        _show_local(timeout, as_json=as_json)
        return

    async def measure(client: Querier) -> tuple[float, dict[str, Any], Address | None, str]:
        """Return the round-trip time of a ping in seconds, the reply to `inspect`, and the leader: its address and build.

        The reply is empty if the principal may not inspect all resources.
        """
        started_s = time.perf_counter()
        await client.ping()
        round_trip_s = time.perf_counter() - started_s
        try:
            totals = await client.inspected(limit=1)
        except RequestRejected as error:
            if error.code != Code.UNAUTHORIZED:
                raise
            totals = {}
        return round_trip_s, totals, client.address, client.server

    round_trip_s, totals, leader, server = query(host, port, namespace=namespace, timeout_s=timeout, operation=measure)
    address = format_address(leader) if leader else format_servers(host, port)
    round_trip_ms = round(round_trip_s * 1000, 3)
    held, waiting = totals.get("holdersTotal"), totals.get("queueTotal")
    if as_json:
        document = {
            "address": address,
            "server": server,
            "roundTripMs": round_trip_ms,
            "held": held,
            "waiting": waiting,
        }
        print_json(codec.dumps(document))
    else:
        counts = f"; requests held: {held}, waiting: {waiting}" if totals else ""
        print_lines(f"{address} leads, and responded in {round_trip_ms:.1f} ms{counts}", server)


def _show_local(timeout_s: float, *, as_json: bool) -> None:
    """Print the roles of the server of this machine or container. Exit with status 1 if the server is not ready."""
    from genie.cli.local_status import read_local_status, read_settings  # noqa: PLC0415 - needs the server and HTTP

    found = read_local_status(read_settings(), timeout_s)
    if as_json:
        print_json(codec.dumps({"ready": found.is_ready, "namespaces": found.namespaces}))
    else:
        print_lines(*(f"{name}: {text}" for name, text in found.namespaces.items()))
    if not found.is_ready:
        raise SystemExit(1)
