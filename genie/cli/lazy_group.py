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

MAX_MESSAGE = 10_000
"""Characters of an error, which may repeat the value of an environment variable. The middle of a longer one is left out."""
MAX_SENTENCE = 1_000
"""Limit in characters for click's shortened help, which no sentence reaches."""


class ReportedError(click.ClickException):
    """An error of a command that is printed as `PROGRAM: MESSAGE`, like all messages of Genie, in place of click's `Error:`.

    The message is escaped, because it may contain an argument or the text of a server. If the command was not called
    correctly, its usage is printed first. If a group was called without a command, only the help of the group is printed.
    """

    def __init__(self, error: click.ClickException, program: str) -> None:
        self.exit_code = error.exit_code  # type: ignore[misc] # as click's own subclasses do in their class
        if isinstance(error, NoArgsIsHelpError):
            super().__init__(error.format_message())
            return
        usage = ""
        if isinstance(error, click.UsageError) and error.ctx is not None:
            usage = f"{error.ctx.get_usage()}\nTry '{error.ctx.command_path} --help' for help.\n\n"
        message = error.format_message()
        if len(message) > MAX_MESSAGE:
            message = f"{message[: MAX_MESSAGE // 2]}…{message[-MAX_MESSAGE // 2 :]}"
        escaped = "\n".join(map(printable, message.split("\n")))
        super().__init__(f"{usage}{program}: {escaped}")

    def show(self, file: IO[Any] | None = None) -> None:  # noqa: ARG002 - click's signature
        """Print the error to stderr."""
        print_error(self.message)


class HelpfulGroup(click.Group):
    """A group whose help shows the whole first sentence of each command, which click would truncate.

    The error for an unknown command suggests a similar one.
    """

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the first argument names, with the other arguments. Raises UsageError if there is none."""
        names = self.list_commands(ctx)
        if args[0] not in names and not ctx.resilient_parsing:
            import difflib  # noqa: PLC0415 - only for this error

            similar = difflib.get_close_matches(args[0], names, n=1)
            if similar:
                ctx.fail(f"there is no command {args[0]!r}: did you mean {similar[0]!r}?")
        return super().resolve_command(ctx, args)

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
    """A group that imports a command only when it is used.

    If a command needs a package that is not installed, the command fails with an error in one line. The other commands work.

    Args:
        args: arguments of `click.Group`.
        package: the package of the commands.
        names: the names of commands that are functions in modules of the same name.
        modules: the modules of further commands, by the names of the commands.
        requirement: what installs all packages that the commands need, such as `genie-lock[server]`, for the error.
        options: further arguments of `click.Group`.

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
        """Import and return a command. Returns None if no command has this name.

        Raises click.ClickException, which is printed in one line, if the command needs a package that is not installed.
        """
        if cmd_name not in self._modules:
            return None
        try:
            module = importlib.import_module(f"{self._package}.{self._modules[cmd_name]}")
        except ModuleNotFoundError as error:
            is_python_message = str(error).startswith("No module named")
            if not is_python_message:  # a message of Genie, which says what to install
                raise click.ClickException(one_line(error)) from None
            command_path = f"{ctx.command_path} {cmd_name}"
            raise click.ClickException(
                f"{command_path} needs the package {error.name}: pip install '{self._requirement}'"
            ) from None
        command: click.Command = getattr(module, cmd_name)
        return command
