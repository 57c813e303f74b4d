"""`genie timeouts`: one file a command.

They are imported when they are asked for: what they need is an extra, and the other commands start without it.
"""

from __future__ import annotations

import importlib

import click

from genie.cli.asking import one_line

COMMANDS = ("finalize", "generate", "run", "shift", "status")


class _WhenAsked(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's signature
        if cmd_name not in COMMANDS:
            return None
        try:
            module = importlib.import_module(f"genie.cli.timeouts.{cmd_name}")
        except ModuleNotFoundError as error:
            raise click.ClickException(one_line(error)) from None
        command: click.Command = getattr(module, cmd_name)
        return command


@click.group(cls=_WhenAsked)
def timeouts() -> None:
    """Find the transfers of a ledger whose time has passed."""
