"""`genie release`"""

from __future__ import annotations

import click

from genie.cli.asking import ask, json_option, patience_option, plain_errors, server_options
from genie.protocol import codec

SUCCESS = "success"


@click.command()
@click.argument("id", type=int)
@json_option
@server_options
@patience_option
@plain_errors
def release(id: int, as_json: bool, host: str, port: int, namespace: str | None, patience: float) -> None:
    """End the lock ID, or cancel the request ID that waits, whoever made it.

    Prints why it ended: "success", or an earlier reason if it had ended before. An ID that the server doesn't know is
    an error.
    """
    reason = ask(host, port, namespace, patience, lambda client: client.release(id))
    if as_json:
        click.echo(codec.dumps({"id": id, "reason": reason}))
    else:
        click.echo(f"{id} is released: {reason}")
