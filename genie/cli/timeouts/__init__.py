"""`genie timeouts`: a module for each command, and one for the commands that write sample data.

The modules are imported when a command is used: they need an extra that other commands do not.
"""

from __future__ import annotations

import click

from genie.cli.lazy_group import LazyGroup

SAMPLE_DATA = dict.fromkeys(("finalize", "generate", "shift"), "sample_data")


@click.group(cls=LazyGroup, package=__name__, names=("explain", "run", "status"), modules=SAMPLE_DATA)
def timeouts() -> None:
    """Find the expired transfers of a ledger."""
