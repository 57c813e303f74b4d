"""The command-line program `genie`: one module for each command."""

from __future__ import annotations

import click

from genie.cli.lazy_group import LazyGroup
from genie.version import VERSION

COMMANDS = (
    "bench",
    "config",
    "deadlocks",
    "explain",
    "history",
    "inspect",
    "order",
    "release",
    "replay",
    "run",
    "serve",
    "status",
    "store",
    "timeouts",
    "top",
    "waits",
    "watch",
)


@click.group(
    cls=LazyGroup,
    package=__name__,
    names=COMMANDS,
    extra="server",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(VERSION, prog_name="genie")
def main() -> None:
    """Locks for transactions that span services."""
