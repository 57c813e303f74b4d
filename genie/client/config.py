"""A client's configuration, from its arguments and the environment: addresses, TLS, token, namespace."""

from __future__ import annotations

import inspect
import logging
import os
import ssl as ssl_module
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from ssl import SSLContext
from typing import Literal, NamedTuple, TypeAlias

from genie.client.process import current_process
from genie.net import format_host_port, is_service_link, parse_host_port, parse_port
from genie.protocol import diagnostics
from genie.tls import MIN_VERSION, load_ca, load_certificate

logger = logging.getLogger("genie.client")
"""The logger of the clients. They log only warnings, for example about a lock whose release was not confirmed."""

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 7077

KEEPALIVE_IDLE_S = 5
"""Time without traffic after which the kernel probes the server."""

MAX_TOKEN_FILE_CHARACTERS = 1 << 16
"""Read limit for the file GENIE_TOKEN_FILE."""

PLAIN_PREFIX, TLS_PREFIX = "genie://", "genies://"

Token: TypeAlias = str | Callable[[], str | None]
"""A token, or a function that returns it. The function is called for each connection, and must not block."""


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """The options of a client, which `genie.connect` describes. Times are in seconds, or are timedeltas."""

    connect_timeout: float | timedelta = 10.0
    response_timeout: float | timedelta = 1.0
    session: str | None = None
    session_timeout: float | timedelta = 10.0
    token: Token | None = None
    namespace: str | None = None
    note: str | None = None
    lazy: bool = False
    waits_for_servers: bool = True
    """If false, entering the client fails as soon as no server has answered in one round, as the command line needs it."""


class Address(NamedTuple):
    """The address of a server, and how to connect to it."""

    host: str
    port: int
    tls: SSLContext | Literal[True] | None = None
    """The context of TLS connections. None selects plain connections. With True, each connection gets a new context from the
    files that the environment names, so that certificates can be replaced while the program runs."""

    def context(self) -> SSLContext | None:
        """Return the TLS context of a new connection, or None for a plain one. Raises ValueError if a file is invalid."""
        return tls_context() if self.tls is True else self.tls


def parse_addresses(
    host: str | Sequence[str] | None = None, port: int | None = None, *, ssl: bool | SSLContext | None = None
) -> list[Address]:
    """Return the addresses to connect to, in order.

    Args:
        host: one address, several addresses separated by commas, or a list: `HOST`, `HOST:PORT` or `[IPv6]:PORT`.
            Default: GENIE_HOST, else 127.0.0.1. The prefix `genies://` selects TLS, `genie://` a plain connection. An
            address without a prefix uses TLS if another address has the prefix `genies://`, or if `ssl` is true.
        port: the port of addresses without a port. Default: GENIE_PORT, else 7077. GENIE_PORT is read only if an address
            has no port, and ignored if it is a service link of Kubernetes.
        ssl: True, or the context of TLS connections. For True, environment variables configure TLS (`tls_context`).

    Raises:
        ValueError: if an address, the port or a TLS variable is invalid, or `ssl` contradicts a prefix.
        TypeError: if `ssl` is neither a bool nor a context.

    """
    if not (ssl is None or isinstance(ssl, bool | SSLContext)):
        raise TypeError(f"ssl must be True, False, None or an ssl.SSLContext, not {ssl!r}")
    if host is None:
        host = os.environ.get("GENIE_HOST") or DEFAULT_HOST
    texts = host.split(",") if isinstance(host, str) else host
    texts = [text.strip() for text in texts if text.strip()]
    if not texts:
        raise ValueError(f"host must contain at least one server address, not {host!r}")
    tls = _select_tls(texts, ssl)
    addresses = [_parse_prefixed(text, tls) for text in texts]
    for address in addresses:
        address.context()  # raises an error if a file is invalid
    default_port = None if port is None else parse_port(port, "port")
    if default_port is None and all(address.port for address in addresses):
        return addresses
    default_port = default_port or _environment_port()
    return [address if address.port else address._replace(port=default_port) for address in addresses]


def _select_tls(addresses: list[str], ssl: bool | SSLContext | None) -> SSLContext | Literal[True] | None:
    """Return the TLS context of all addresses without the prefix `genie://`, as in `Address.tls`.

    Raises ValueError if `ssl` contradicts the prefix of an address.
    """
    for address in addresses:
        if (address.startswith(PLAIN_PREFIX) and ssl) or (address.startswith(TLS_PREFIX) and ssl is False):
            raise ValueError(f"{address}: the prefix contradicts ssl={ssl!r}: leave out one of the two")
    if isinstance(ssl, SSLContext):
        return ssl
    has_tls_prefix = any(address.startswith(TLS_PREFIX) for address in addresses)
    return True if ssl or has_tls_prefix else None


def _environment_port() -> int:
    """Return the port in GENIE_PORT, else the default port. Raises ValueError if the variable is not a port."""
    text = os.environ.get("GENIE_PORT") or str(DEFAULT_PORT)
    if is_service_link(text):
        _warn_port_ignored(text)
        return DEFAULT_PORT
    return parse_port(text, "GENIE_PORT")


@cache  # so that each value is logged once
def _warn_port_ignored(value: str) -> None:
    logger.warning(
        "GENIE_PORT=%s ignored, using port %d: it is a Kubernetes service link (enableServiceLinks)",
        value,
        DEFAULT_PORT,
    )


def _parse_prefixed(text: str, tls: SSLContext | Literal[True] | None) -> Address:
    """Parse an address with an optional prefix. With `genie://` the connection is plain, and `tls` is ignored.

    An address without a port gets the port 0, which the caller replaces by the default port.
    """
    if text.startswith(PLAIN_PREFIX):
        tls = None
    text = text.removeprefix(PLAIN_PREFIX).removeprefix(TLS_PREFIX).removesuffix("/")
    return parse_address(text, 0, tls)


def parse_address(
    text: str, default_port: int = DEFAULT_PORT, tls: SSLContext | Literal[True] | None = None
) -> Address:
    """Parse one address without a prefix. Raises ValueError if the text is not an address.

    `default_port` is the port of an address without a port. `tls` becomes the TLS context of the address.
    """
    if "/" in text:
        raise ValueError(f"{text}: an address is HOST, HOST:PORT or [IPv6]:PORT, with the prefix {TLS_PREFIX} for TLS")
    host, own_port = parse_host_port(text)
    return Address(host or DEFAULT_HOST, default_port if own_port is None else own_port, tls)


def format_address(address: Address) -> str:
    """Return the text of an address: `HOST:PORT`, with the prefix `genies://` for TLS. `parse_addresses` accepts the text."""
    return f"{TLS_PREFIX if address.tls else ''}{format_host_port(address.host, address.port)}"


def tls_context() -> SSLContext:
    """Create a client's TLS context from GENIE_TLS_CA, GENIE_TLS_CERT and GENIE_TLS_KEY.

    The server's certificate and host name are verified. GENIE_TLS_CA is a PEM file with the trusted CAs. If it is not
    set, the system's CAs are trusted. GENIE_TLS_CERT and GENIE_TLS_KEY are the client's certificate and its private key;
    set them if the server requires client certificates.

    Raises:
        ValueError: if a file is missing or invalid, or GENIE_TLS_KEY is set without GENIE_TLS_CERT. The message names the
            variable.

    """
    ca, certificate, key = (os.environ.get(f"GENIE_TLS_{name}") or None for name in ("CA", "CERT", "KEY"))
    if key and not certificate:
        raise ValueError("GENIE_TLS_KEY is set without GENIE_TLS_CERT: set GENIE_TLS_CERT to the client's certificate")
    # `create_default_context` trusts the system's CAs, `PROTOCOL_TLS_CLIENT` none. Both verify the host name.
    context = SSLContext(ssl_module.PROTOCOL_TLS_CLIENT) if ca else ssl_module.create_default_context()
    context.minimum_version = MIN_VERSION
    if ca:
        load_ca(context, ca)
    if certificate:
        load_certificate(context, certificate, key)
    return context


def check_token(token: Token | None) -> Token | None:
    """Return the token unchanged. Raises TypeError if it is neither a string nor a function that can return one."""
    if token is None or isinstance(token, str):
        return token
    if not callable(token) or inspect.iscoroutinefunction(token):
        raise TypeError(
            f"token must be a string, or a function without await that returns one, not {type(token).__name__}"
        )
    return token


def resolve_token(token: Token | None = None) -> str | None:
    """Return the token to authenticate with: the argument, else GENIE_TOKEN, else the word in GENIE_TOKEN_FILE.

    If the argument is a function, it is called. Returns None if no token is configured, or if the argument or the result of
    the function is an empty string.

    Raises:
        Exception: the exception of the function.
        ValueError: if the file can't be read, or does not contain exactly one word. So the file of a server that lists
            several principals is rejected.

    """
    if callable(token):
        return token() or None
    if token is not None:
        return token or None
    environment_token = os.environ.get("GENIE_TOKEN")
    if environment_token:
        return environment_token
    path = os.environ.get("GENIE_TOKEN_FILE")
    return _read_token_file(path) if path else None


def _read_token_file(path: str) -> str:
    """Return the token in a client's token file. Raises ValueError if the file does not contain exactly one word."""
    try:
        with Path(path).open(encoding="utf-8") as file:
            words = file.read(MAX_TOKEN_FILE_CHARACTERS).split()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ValueError(f"GENIE_TOKEN_FILE: {path} can't be read: {reason}") from None
    if len(words) != 1:
        raise ValueError(f"GENIE_TOKEN_FILE: {path} must contain one word, the token, not {len(words)}")
    return words[0]


def resolve_note(note: str | None = None) -> str | None:
    """Return the note of a client: the argument, else `PROGRAM PID@HOST`. Returns None if the argument is an empty string."""
    if note is None:
        note = current_process().default_note()
    return note or None


def resolve_namespace(namespace: str | None = None) -> str | None:
    """Return the namespace to connect to: the argument, else GENIE_NAMESPACE.

    Returns None if neither is given, or the variable is empty. Then the server uses the first of its namespaces. Raises
    ValueError if the namespace is not a valid name.
    """
    source = "namespace"
    if namespace is None:
        source = "GENIE_NAMESPACE"
        namespace = os.environ.get(source) or None
    if namespace is None:
        return None
    problem = diagnostics.namespace_error(namespace)
    if problem is not None:
        raise ValueError(f"{source} {problem}, not {namespace!r}")
    return namespace
