"""`genie status --local`: ask the server of this machine or container, with the settings of its own environment.

The admin port answers `/readyz` without a token, so the command needs none of the clients' tokens and certificates.
"""

from __future__ import annotations

import ssl
from http import HTTPStatus
from typing import NamedTuple

import aiohttp
import click

from genie.cli.configuration import Configuration
from genie.cli.options import run_async
from genie.cli.serve import serve
from genie.client.config import format_address, parse_address
from genie.config import Settings
from genie.errors import Unavailable

LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - compared, not bound
"""The address at which a server that listens on all interfaces is asked."""


class LocalStatus(NamedTuple):
    """The roles of a server in its namespaces."""

    is_ready: bool
    namespaces: dict[str, str]
    """The description of the role by namespace."""


def read_settings() -> Settings:
    """Return the settings that a server with the environment of this command has."""
    with serve.make_context("genie serve", []) as ctx:
        return Configuration(ctx, ctx.params).load()


def read_local_status(settings: Settings, timeout_s: float) -> LocalStatus:
    """Read `/readyz` of the server with these settings. Raises Unavailable if the server does not answer."""
    if settings.admin.port is None:
        raise click.ClickException("the server has no admin port, which --local needs: set GENIE_ADMIN_PORT")
    return run_async(_read(settings, settings.admin.port, timeout_s))


async def _read(settings: Settings, port: int, timeout_s: float) -> LocalStatus:
    """Read `/readyz` at the admin port. With TLS, only the certificate of the settings is accepted."""
    host = LOOPBACK.get(settings.admin.host, settings.admin.host)
    address = format_address(parse_address(host, port))
    tls = None if settings.tls.cert is None else _trust_only(settings.tls.cert)
    url = f"{'http' if tls is None else 'https'}://{address}/readyz"
    try:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url, ssl=tls or True) as response:
            status, text = response.status, await response.text()
    except TimeoutError:
        raise Unavailable(f"the admin port {address} did not respond within {timeout_s:g} s") from None
    except aiohttp.ClientConnectorCertificateError as error:
        raise Unavailable(f"{address} has another certificate than GENIE_TLS_CERT: {error.certificate_error}") from None
    except aiohttp.ClientConnectorError as error:
        raise Unavailable(f"cannot connect to the admin port {address}: {error.os_error}") from None
    except (aiohttp.ClientError, OSError) as error:
        raise Unavailable(f"{address} did not respond in HTTP: {error or type(error).__name__}") from None
    if status not in (HTTPStatus.OK, HTTPStatus.SERVICE_UNAVAILABLE):
        raise Unavailable(f"the admin port {address} responded {status}")
    namespaces = dict(line.partition(": ")[::2] for line in text.splitlines())
    return LocalStatus(status == HTTPStatus.OK, namespaces)


def _trust_only(certificate: str) -> ssl.SSLContext:
    """Return a TLS context that trusts the server's own certificate file, whatever name the certificate has."""
    context = ssl.create_default_context(cafile=certificate)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.check_hostname = False
    return context
