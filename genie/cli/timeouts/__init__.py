"""`genie timeouts`: one file a command.

They are imported when they are asked for: what they need is an extra, and the other commands start without it.
"""

from __future__ import annotations

import click

from genie.cli.lazy_group import WhenAsked


@click.group(cls=WhenAsked, package=__name__, names=("explain", "finalize", "generate", "run", "shift", "status"))
def timeouts() -> None:
    """Find the transfers of a ledger whose time has passed."""
