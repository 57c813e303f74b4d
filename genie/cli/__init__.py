"""`genie`: the command line. One file a command."""

from __future__ import annotations

import click

from genie.cli.serve import serve


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="genie-lock", prog_name="genie")
def main() -> None:
    """Locks for transactions that span services."""


main.add_command(serve)
