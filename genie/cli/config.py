"""`genie config`: check the settings of a server, and show where each of them comes from."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import click

from genie.access import AccessControl
from genie.cli.configuration import Configuration
from genie.cli.options import InvalidArgument, json_option, replace_variables_by_options
from genie.cli.output import print_json, print_lines
from genie.cli.serve import check_advertised, check_exposure, serve
from genie.config import SECRETS, Settings, file_key
from genie.protocol import codec
from genie.server.app import make_stores
from genie.server.tls import make_tls_contexts

HIDDEN = "***"
"""Shown in place of a secret."""


@click.group()
def config() -> None:
    """Check the settings of a server, and show where each of them comes from.

    Both commands take the options and the variables of `genie serve`.
    """


@config.command()
@click.pass_context
def check(ctx: click.Context, /, **options: Any) -> None:
    """Check the settings without starting a server: the file, and the certificates and tokens that the settings name.

    The exit status is 0 if the settings are valid, else 2.
    """
    configuration = Configuration(ctx, options)
    settings = configuration.load()
    errors = asyncio.run(_find_errors(settings))
    if errors:
        raise InvalidArgument("\n".join(map(replace_variables_by_options, errors)))
    print_lines(f"{configuration.path or 'the configuration'}: valid")


async def _find_errors(settings: Settings) -> list[str]:
    """Return an error for each invalid part of the settings. Stores are made in an event loop, as by a server."""
    errors: list[str] = []

    def attempt(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except ValueError as error:
            errors.append(str(error))

    attempt(check_advertised, settings.advertise)
    attempt(make_tls_contexts, settings.tls)
    attempt(make_stores, settings)
    needs_certificates = settings.tls.ca is not None
    access = attempt(AccessControl.load, settings.token, settings.token_file, certificates_required=needs_certificates)
    if access is not None and access.allows_anonymous and not settings.insecure:
        attempt(check_exposure, settings)
    return errors


@config.command()
@json_option
@click.pass_context
def show(ctx: click.Context, /, as_json: bool, **options: Any) -> None:
    """Show each setting with its value, and where the value comes from. Secrets are hidden."""
    configuration = Configuration(ctx, options)
    values = configuration.load().options()
    rows = [
        {"key": file_key(name), "value": _shown(name, values[name]), "source": configuration.origins[name]}
        for name in (str(param.name) for param in serve.params)
        if name in values
    ]
    if as_json:
        print_json(codec.dumps({"settings": rows}))
        return
    widths = [max(len(_text(row[column])) for row in rows) for column in ("key", "value")]
    for row in rows:
        print_lines(f"{row['key']:<{widths[0]}}  {_text(row['value']):<{widths[1]}}  {row['source']}")


def _shown(name: str, value: Any) -> Any:
    """Return the value of a setting with secrets hidden."""
    if value is None or name not in SECRETS:
        return value
    return _without_password(value) if name == "redis_url" else HIDDEN


def _without_password(url: str) -> str:
    """Return a URL of Redis with its passwords hidden. A URL that cannot be split for certain is hidden as a whole."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return HIDDEN
    login, at, hosts = parts.netloc.rpartition("@")
    user = login.partition(":")[0]
    if (
        "@" in parts.path + parts.query + parts.fragment or "@" in login
    ):  # a password with a character that is not escaped
        return HIDDEN
    query = "&".join(
        f"{name}={HIDDEN}" if "password" in name else f"{name}={value}"
        for name, _, value in (item.partition("=") for item in parts.query.split("&"))
        if name
    )
    return f"{parts.scheme}://{user}{f':{HIDDEN}' if ':' in login else ''}{at}{hosts}{parts.path}{'?' if query else ''}{query}"


def _text(value: Any) -> str:
    """Return a value as a person reads it."""
    if value is None:
        return "none"
    return ",".join(value) if isinstance(value, tuple) else str(value)


for command in (check, show):
    command.params[:0] = serve.params
