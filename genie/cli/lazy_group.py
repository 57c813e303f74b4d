"""A click group that imports a command only when it is used, for a fast start and optional dependencies."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any

import click
from click.exceptions import NoArgsIsHelpError

from genie.cli.options import one_line
from genie.cli.output import print_error
from genie.text import printable

MAX_SENTENCE = 1_000
"""A length that no sentence exceeds, so that click truncates no sentence."""


class ReportedError(click.ClickException):
    """An error of a command, which prints as all messages of Genie do. Click would print `Error:` before it.

    The message is escaped, because it may contain an argument or the text of a server. It begins with the name of the
    program, after the usage of the command if the command was not called correctly. A group without a command prints only
    its help.
    """

    def __init__(self, error: click.ClickException, program: str) -> None:
        self.exit_code = error.exit_code  # type: ignore[misc] # as click's own subclasses do in their class
        if isinstance(error, NoArgsIsHelpError):
            super().__init__(error.format_message())
            return
        usage = ""
        if isinstance(error, click.UsageError) and error.ctx is not None:
            usage = f"{error.ctx.get_usage()}\nTry '{error.ctx.command_path} --help' for help.\n\n"
        escaped = "\n".join(map(printable, error.format_message().split("\n")))
        super().__init__(f"{usage}{program}: {escaped}")

    def show(self, file: IO[Any] | None = None) -> None:  # noqa: ARG002 - click's signature
        """Print the error to stderr."""
        print_error(self.message)


class HelpfulGroup(click.Group):
    """A group whose help shows the whole first sentence of each command. Click would truncate it."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands, each with the whole first sentence of its help."""
        rows = []
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                rows.append((name, command.get_short_help_str(limit=MAX_SENTENCE)))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


class LazyGroup(HelpfulGroup):
    """A group of commands of which each is imported when it is used.

    Each of the commands `names` is a function in the module of the same name in `package`. `modules` maps further
    commands to modules with other names. If a command needs a package that is not installed, it fails with a one-line
    error, which names `requirement`, such as `genie-lock[server]`, with these packages; the other commands work.
    """

    def __init__(
        self,
        *args: Any,
        package: str,
        names: Iterable[str],
        modules: Mapping[str, str] | None = None,
        requirement: str,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self._package = package
        self._requirement = requirement
        self._modules = {name: name for name in names} | dict(modules or {})

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        """Parse the arguments of the group."""
        with self._reported_errors():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Parse the arguments of a command, and execute the command."""
        with self._reported_errors():
            return super().invoke(ctx)

    @contextmanager
    def _reported_errors(self) -> Iterator[None]:
        """Replace an error of click by a `ReportedError`."""
        try:
            yield
        except ReportedError:
            raise
        except click.ClickException as error:
            raise ReportedError(error, self.name or "genie") from None

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
                f"{command_path} needs the package {error.name}: pip install '{self._requirement}'"
            ) from None
        command: click.Command = getattr(module, cmd_name)
        return command
