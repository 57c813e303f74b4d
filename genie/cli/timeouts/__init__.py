"""`genie timeouts`: one module for each command, except that one module has all commands that write sample data.

A module is imported only when its command is used, because the modules need an extra (optional dependencies).
"""

from __future__ import annotations

import click

from genie.cli.lazy_group import LazyGroup

SAMPLE_DATA = dict.fromkeys(("finalize", "generate", "shift"), "sample_data")


@click.group(cls=LazyGroup, package=__name__, names=("explain", "run", "status"), modules=SAMPLE_DATA, extra="sql")
def timeouts() -> None:
    """Find the expired transfers of a ledger."""
