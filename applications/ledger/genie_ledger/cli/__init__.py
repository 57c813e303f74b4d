"""The command-line program `genie-ledger`: one module for each command, except that one has all that write sample data.

A module is imported only when its command is used.
"""

from __future__ import annotations

import click

import genie
from genie.cli.toolkit import LazyGroup

SAMPLE_DATA = dict.fromkeys(("finalize", "generate", "shift"), "sample_data")


@click.group(
    "genie-ledger",
    cls=LazyGroup,
    package=__name__,
    names=("explain", "run", "status"),
    modules=SAMPLE_DATA,
    requirement="genie-ledger",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(genie.__version__, prog_name="genie-ledger")
def main() -> None:
    """Find the expired transfers of a ledger."""
