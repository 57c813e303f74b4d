"""`genie status --local`: reads the status of the server of this machine or container, with the settings of its environment.

The admin port answers `/readyz` without a token. So the command needs no token and no certificate of a client.
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
"""By an address that stands for all interfaces: the address to which this command connects."""


class LocalStatus(NamedTuple):
    """The readiness of a server, and its role in each namespace."""

    is_ready: bool
    namespaces: dict[str, str]
    """The description of the server's role, by namespace."""


def read_settings() -> Settings:
    """Return the settings that `genie serve` has without options in the environment of this command."""
    with serve.make_context("genie serve", []) as ctx:
        return Configuration(ctx, ctx.params).load()


def read_local_status(settings: Settings, timeout_s: float) -> LocalStatus:
    """Read `/readyz` of the server with these settings.

    Raises ClickException if the server has no admin port, and Unavailable if it does not answer.
    """
    if settings.admin.port is None:
        raise click.ClickException("the server has no admin port, which --local needs: set GENIE_ADMIN_PORT")
    return run_async(_fetch_readiness(settings, settings.admin.port, timeout_s))


async def _fetch_readiness(settings: Settings, port: int, timeout_s: float) -> LocalStatus:
    """Fetch `/readyz` from the admin port. With TLS, only the certificate of the settings is accepted."""
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
        raise Unavailable(f"the admin port {address} responded {status} to /readyz, not 200 or 503")
    namespaces = {}
    for line in text.splitlines():
        namespace, _, role = line.partition(": ")
        namespaces[namespace] = role
    return LocalStatus(status == HTTPStatus.OK, namespaces)


def _trust_only(certificate: str) -> ssl.SSLContext:
    """Return a TLS context that trusts only this certificate file, without a check of the host name."""
    context = ssl.create_default_context(cafile=certificate)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.check_hostname = False
    return context
