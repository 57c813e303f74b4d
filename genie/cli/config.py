"""`genie config`: check the settings of a server, show where each of them comes from, and how much memory they permit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import click

from genie.access import AccessControl
from genie.cli.configuration import Configuration
from genie.cli.lazy_group import HelpfulGroup
from genie.cli.options import InvalidArgument, json_option, replace_variables_by_options
from genie.cli.output import print_json, print_lines
from genie.cli.serve import check_advertised, check_exposure, serve
from genie.config import SECRETS, Settings, file_key
from genie.protocol import codec
from genie.server.app import make_stores
from genie.server.memory_bounds import MIB, STATE_COSTS, memory_bounds, principal_share, total_bytes
from genie.server.tls import make_tls_contexts

HIDDEN = "***"
"""Shown in place of a secret."""


@click.group(cls=HelpfulGroup)
def config() -> None:
    """Check the settings of a server, show where each of them comes from, and how much memory they permit.

    All commands take the options and the variables of `genie serve`.
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
    """Return an error for each invalid part of the settings. Async, because stores are made in an event loop."""
    errors: list[str] = []

    def collect_error(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call a function, and return its result, or None if it raises an error."""
        try:
            return function(*arguments, **options)
        except ValueError as error:
            errors.append(str(error))

    collect_error(check_advertised, settings.advertise)
    collect_error(make_tls_contexts, settings.tls)
    collect_error(make_stores, settings)
    needs_certificates = settings.tls.ca is not None
    access = collect_error(
        AccessControl.load, settings.token, settings.token_file, certificates_required=needs_certificates
    )
    if access is not None and access.allows_anonymous and not settings.insecure:
        collect_error(check_exposure, settings)
    return errors


@config.command()
@json_option
@click.pass_context
def show(ctx: click.Context, /, as_json: bool, **options: Any) -> None:
    """Show each setting with its value, and where the value comes from. Secrets are hidden."""
    configuration = Configuration(ctx, options)
    values = configuration.load().options()
    names = [str(param.name) for param in serve.params if param.name in values]
    rows = [
        {"key": file_key(name), "value": _hide_secret(name, values[name]), "source": configuration.origins[name]}
        for name in names
    ]
    if as_json:
        print_json(codec.dumps({"settings": rows}))
        return
    key_width = max(len(row["key"]) for row in rows)
    value_width = max(len(_value_text(row["value"])) for row in rows)
    for row in rows:
        print_lines(f"{row['key']:<{key_width}}  {_value_text(row['value']):<{value_width}}  {row['source']}")


@config.command()
@json_option
@click.pass_context
def limits(ctx: click.Context, /, as_json: bool, **options: Any) -> None:
    """Show the greatest amount of memory that clients can make a server with these settings use.

    Each row is a limit: how many objects it permits, the bytes of one object, and the product. For a limit that applies to
    each namespace separately, the product includes all namespaces.
    """
    report = _limits_report(Configuration(ctx, options).load())
    if as_json:
        print_json(codec.dumps(report))
    else:
        _print_limits(report)


def _limits_report(settings: Settings) -> dict[str, Any]:
    """Return the content of `genie config limits --json`."""
    namespaces = len(settings.namespaces)
    rows = [
        {
            "what": bound.what,
            "setting": None if bound.setting is None else file_key(bound.setting),
            "limit": bound.value,
            "bytes_each": bound.each,
            "namespaces": namespaces if bound.per_namespace else 1,
            "bytes": bound.total(namespaces),
        }
        for bound in memory_bounds(settings)
    ]
    max_state = settings.limits.max_state
    costs = [{"what": what, "bytes_each": each, "fit": max_state // each} for what, each in STATE_COSTS.items()]
    share = [{"what": what, "limit": limit} for what, limit in principal_share(settings).items()]
    return {"limits": rows, "bytes": total_bytes(settings), "max_state": costs, "principal": share}


def _print_limits(report: dict[str, Any]) -> None:
    """Print the report of `genie config limits` as tables."""
    print_lines(_limit_line("", "setting", "limit", "bytes each", "MiB at most"))
    for row in report["limits"]:
        limit, bytes_each, mib = f"{row['limit']:,}", f"{row['bytes_each']:,}", f"{_to_mib(row['bytes']):,}"
        repeated = "" if row["namespaces"] == 1 else f"  in {row['namespaces']} namespaces"
        print_lines(_limit_line(row["what"], row["setting"] or "", limit, bytes_each, mib) + repeated)
    print_lines(_limit_line("all limits together", "", "", "", f"{_to_mib(report['bytes']):,}"), "")
    print_lines("limits.max_state is enough for any one of these:")
    for cost in report["max_state"]:
        print_lines(f"{cost['fit']:>13,} {cost['what']}, {cost['bytes_each']:,} bytes each")
    print_lines("", "If clients need a token, one principal has at most:")
    for part in report["principal"]:
        print_lines(f"{part['limit']:>13,} {part['what']}")


def _limit_line(what: str, setting: str, limit: str, bytes_each: str, mib: str) -> str:
    """Return a line of the table of limits, with aligned columns."""
    return f"{what:<42}{setting:<26}{limit:>13}  {bytes_each:>11}  {mib:>11}"


def _to_mib(size_bytes: int) -> int:
    """Return a size in MiB, rounded up."""
    return -(-size_bytes // MIB)


def _hide_secret(name: str, value: Any) -> Any:
    """Return the value of a setting, without the secrets that it contains."""
    if value is None or name not in SECRETS:
        return value
    return _hide_passwords(value) if name == "redis_url" else HIDDEN


def _hide_passwords(url: str) -> str:
    """Return a URL of Redis with its passwords hidden. If the password can't be found for certain, all is hidden."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return HIDDEN
    login, at, hosts = parts.netloc.rpartition("@")
    has_unescaped_password = "@" in parts.path + parts.query + parts.fragment or "@" in login
    if has_unescaped_password:
        return HIDDEN
    user, colon, _ = login.partition(":")
    shown_login = f"{user}:{HIDDEN}" if colon else user
    fields = []
    for field in parts.query.split("&"):
        name, _, value = field.partition("=")
        if name:
            fields.append(f"{name}={HIDDEN if 'password' in name else value}")
    query = f"?{'&'.join(fields)}" if fields else ""
    return f"{parts.scheme}://{shown_login}{at}{hosts}{parts.path}{query}"


def _value_text(value: Any) -> str:
    """Return the value of a setting as text: `none` for None, and a list with commas."""
    if value is None:
        return "none"
    return ",".join(value) if isinstance(value, tuple) else str(value)


for command in (check, show, limits):
    command.params[:0] = serve.params  # adds the options of `genie serve` in front of the command's own
