"""Which option or variable a value came from, for error messages.

An option may be given on the command line or by a variable of the environment. A message that names the other one sends
its reader to the wrong place.
"""

from __future__ import annotations

import math
import os
import re
from typing import Any

import click
from click.core import ParameterSource

from genie.errors import Code, RequestRejected

MAX_PORT = 65535
VARIABLE = re.compile(r"\bGENIE_[A-Z_]+\b")


class SourcedOption(click.Option):
    """An option whose errors name the variable instead, where the value came from the environment."""

    def get_error_hint(self, ctx: click.Context | None) -> str:
        """Return the option as written, or the variable."""
        return f"'{self.opts[0]}'" if ctx is None else f"'{_source(self, ctx)}'"


class EmptiableOption(SourcedOption):
    """An option whose variable may be empty, which differs from a variable that is not set."""

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:  # noqa: ARG002 - click's signature
        """Return the value of the variable; None where it is not set."""
        return os.environ.get(str(self.envvar))


class WrongValue(click.ClickException):
    """A usage error: a value that no server, file or database had to be asked about. One line, exit status 2."""

    exit_code = 2


class WholeNumber(click.IntRange):
    """A whole number within bounds. The error names both bounds, also where the text is no number."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Convert to an int."""
        try:
            return int(super().convert(value, param, ctx))
        except click.BadParameter:
            self.fail(f"a whole number {_bounds(self)} is needed, not {value!r}.", param, ctx)


class Number(click.FloatRange):
    """A number within bounds, like WholeNumber. Unlike click's own range it rejects `nan`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Convert to a float."""
        try:
            number = float(super().convert(value, param, ctx))
        except click.BadParameter:
            number = math.nan
        if math.isnan(number):
            self.fail(f"a number {_bounds(self)} is needed, not {value!r}.", param, ctx)
        return number


def _bounds(numbers: click.IntRange | click.FloatRange) -> str:
    if numbers.max is None:
        return f"of at least {numbers.min}"
    return f"from {numbers.min} to {numbers.max}"


class PortType(click.ParamType[int]):
    """A port number, from `minimum` to 65535."""

    name = "port"

    def __init__(self, minimum: int = 1) -> None:
        self._minimum = minimum

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Convert to an int."""
        try:
            port = int(value)
        except ValueError:
            port = -1
        if not self._minimum <= port <= MAX_PORT:
            self.fail(f"a port is a number from {self._minimum} to {MAX_PORT}, not {value!r}.", param, ctx)
        return port


def source_of(parameter: str) -> str:
    """Return the option or the variable that the value of a parameter of the running command came from.

    The option where it has its default, and the parameter's name outside of a command.
    """
    ctx = click.get_current_context(silent=True)
    for param in () if ctx is None else ctx.command.params:
        if ctx is not None and param.name == parameter:
            return _source(param, ctx)
    return parameter


def with_sources(message: str) -> str:
    """Return the message with each GENIE_ variable replaced by its option, where that was given on the command line."""
    ctx = click.get_current_context(silent=True)
    if ctx is None:
        return message
    given = {
        variable: param.opts[0]
        for param in ctx.command.params
        if param.name is not None and ctx.get_parameter_source(param.name) is ParameterSource.COMMANDLINE
        for variable in _variables(param)
    }
    return VARIABLE.sub(lambda found: given.get(found[0], found[0]), message)


def token_hint(error: BaseException) -> str:
    """Return where the rejected token came from, to be appended to the message of the error; else an empty text."""
    if not isinstance(error, RequestRejected) or error.code != Code.UNAUTHORIZED:
        return ""
    path = os.environ.get("GENIE_TOKEN_FILE")
    if os.environ.get("GENIE_TOKEN"):
        return " (the token sent is that of GENIE_TOKEN)"
    if path:
        return f" (the token sent is that of GENIE_TOKEN_FILE, {path})"
    return " (no token was sent: GENIE_TOKEN and GENIE_TOKEN_FILE are not set)"


def _source(param: click.Parameter, ctx: click.Context) -> str:
    if param.name is not None and ctx.get_parameter_source(param.name) is ParameterSource.ENVIRONMENT:
        variables = _variables(param)
        return next((variable for variable in variables if os.environ.get(variable)), variables[0])
    return param.opts[0]


def _variables(param: click.Parameter) -> list[str]:
    if param.envvar is None:
        return []
    return [param.envvar] if isinstance(param.envvar, str) else list(param.envvar)
