"""A group of commands that are imported when they are asked for: one starts without what another needs."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import click

from genie.cli.options import one_line


class WhenAsked(click.Group):
    """Each of `names` is a module of `package`, and in it the command of that name.

    What a module needs may be an extra that is not installed: that is one line, and the other commands go.
    """

    def __init__(self, *args: Any, package: str, names: Sequence[str], **options: Any) -> None:
        super().__init__(*args, **options)
        self._package = package
        self._names = names

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """The names."""
        return list(self._names)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's signature
        """One of the commands."""
        if cmd_name not in self._names:
            return None
        try:
            module = importlib.import_module(f"{self._package}.{cmd_name}")
        except ModuleNotFoundError as error:
            raise click.ClickException(one_line(error)) from None
        command: click.Command = getattr(module, cmd_name)
        return command
