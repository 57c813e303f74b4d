"""A click group that imports a command only when it is used, for a fast start and optional dependencies."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from typing import Any

import click

from genie.cli.options import one_line
from genie.cli.output import printable_message


class LazyGroup(click.Group):
    """A group of commands of which each is imported when it is used.

    Each of the commands `names` is a function in the module of the same name in `package`. `modules` maps further
    commands to modules with other names. If a command needs a package that is not installed, it fails with a one-line
    error, which names `extra`, the extra of genie-lock with these packages; the other commands work.
    """

    def __init__(
        self,
        *args: Any,
        package: str,
        names: Iterable[str],
        modules: Mapping[str, str] | None = None,
        extra: str,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self._package = package
        self._extra = extra
        self._modules = {name: name for name in names} | dict(modules or {})

    def invoke(self, ctx: click.Context) -> Any:
        """Execute a command. If it fails, escape the error message, which may contain an argument or the text of a server."""
        try:
            return super().invoke(ctx)
        except click.ClickException as error:
            error.message = printable_message(error.message)  # type: ignore[misc] # click declares it final
            raise

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Return the names of the commands."""
        return sorted(self._modules)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command and return the command; None if no command has this name.

        Raises click.ClickException, a one-line error, if the command needs a module that is not installed.
        """
        if cmd_name not in self._modules:
            return None
        try:
            module = importlib.import_module(f"{self._package}.{self._modules[cmd_name]}")
        except ModuleNotFoundError as error:
            if not str(error).startswith("No module named"):
                raise click.ClickException(one_line(error)) from None  # names the extra itself
            command_path = f"{ctx.command_path} {cmd_name}"
            raise click.ClickException(
                f"{command_path} needs the package {error.name}: pip install 'genie-lock[{self._extra}]'"
            ) from None
        command: click.Command = getattr(module, cmd_name)
        return command
