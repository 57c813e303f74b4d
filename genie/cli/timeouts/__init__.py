"""`genie timeouts`: a file for each command, and one for those that write sample data.

They are imported when they are asked for: what they need is an extra, and the other commands start without it.
"""

from __future__ import annotations

import click

from genie.cli.lazy_group import LazyGroup

SAMPLE_DATA = dict.fromkeys(("finalize", "generate", "shift"), "sample_data")


@click.group(cls=LazyGroup, package=__name__, names=("explain", "run", "status"), modules=SAMPLE_DATA)
def timeouts() -> None:
    """Find the transfers of a ledger whose time has passed."""
