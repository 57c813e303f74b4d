"""Where the servers are, how long to wait between attempts to reach them, and how a dead connection is noticed."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from ssl import SSLContext
from typing import NamedTuple, Protocol

from genie.client.tls import context
from genie.protocol import diagnostics

HOST = "127.0.0.1"
PORT = 7077

FIRST_DELAY = 0.025
"""Seconds; soon, since a standby takes over within a few tenths of a second."""
LONGEST_DELAY = 2.0

KEEPALIVE_IDLE = 5
"""Seconds of silence after which the kernel asks whether the other side is there, and between two such questions."""
KEEPALIVE_PROBES = 3

MAX_TOKEN_FILE = 1 << 16
"""Characters that are read of a file with a token."""

PLAIN, TLS = "genie://", "genies://"


class Address(NamedTuple):
    """Where a server is, and what TLS to it goes by; None: it is reached without."""

    host: str
    port: int
    tls: SSLContext | None = None


def addresses(
    host: str | Sequence[str] | None = None, port: int | None = None, *, ssl: bool | SSLContext | None = None
) -> list[Address]:
    """Who to connect to, in order.

    `host` is one address, several with commas between them, or a list of them: `HOST`, `HOST:PORT` or `[IPv6]:PORT`.
    `port` is for those that name none. What is left out comes from GENIE_HOST and GENIE_PORT, else it is
    127.0.0.1 and 7077.

    An address behind `genies://` is reached by TLS, one behind `genie://` without. What has neither is reached by TLS
    where another of them is, or where `ssl` is True or a context. What TLS goes by is that context, else the
    environment's (`tls.context`). ValueError also where `ssl` contradicts an address, TypeError where it is anything else.
    """
    if not (ssl is None or isinstance(ssl, bool | SSLContext)):
        raise TypeError(f"ssl: it is True, False, None or an ssl.SSLContext, not {ssl!r}")
    if host is None:
        host = os.environ.get("GENIE_HOST") or HOST
    if port is None:
        port = _port(os.environ.get("GENIE_PORT") or PORT, "GENIE_PORT")
    texts = host.split(",") if isinstance(host, str) else host
    texts = [text.strip() for text in texts if text.strip()]
    if not texts:
        raise ValueError("no address of a server is given")
    secure = bool(ssl) or (ssl is None and any(text.startswith(TLS) for text in texts))
    for text in texts:
        if (text.startswith(PLAIN) and ssl) or (text.startswith(TLS) and ssl is False):
            raise ValueError(f"{text}: ssl={ssl!r} contradicts it")
    shared = (ssl if isinstance(ssl, SSLContext) else context()) if secure else None
    default = _port(port, "port")
    return [_address(text, default, shared) for text in texts]


def _address(text: str, port: int, tls: SSLContext | None) -> Address:
    if text.startswith(PLAIN):
        tls = None
    return address(text.removeprefix(PLAIN).removeprefix(TLS).removesuffix("/"), port, tls)


def address(text: str, port: int = PORT, tls: SSLContext | None = None) -> Address:
    """One address without a scheme; ValueError, if it is none."""
    if "/" in text:
        raise ValueError(f"{text}: an address is HOST, HOST:PORT or [IPv6]:PORT, behind {TLS} for TLS")
    if text.startswith("["):
        name, _, rest = text[1:].partition("]")
        own = rest.removeprefix(":")
    elif text.count(":") > 1:
        name, own = text, ""
    else:
        name, _, own = text.partition(":")
    return Address(name or HOST, _port(own, text) if own else port, tls)


def _port(value: str | int, what: str) -> int:
    try:
        port = int(value)
    except ValueError:
        port = 0
    if not 0 < port < 1 << 16:
        raise ValueError(f"{what}: a port is a number from 1 to 65535, not {value!r}")
    return port


def token(given: str | None = None) -> str | None:
    """What to say first: what is given, else GENIE_TOKEN, else the one word in the file at GENIE_TOKEN_FILE.

    None, or empty: nothing. ValueError where the file can't be read, or holds something else: it may be a server's, with
    tokens for many names.
    """
    found = os.environ.get("GENIE_TOKEN") if given is None else given
    path = os.environ.get("GENIE_TOKEN_FILE")
    if given is None and not found and path:
        try:
            with Path(path).open(encoding="utf-8") as file:
                words = file.read(MAX_TOKEN_FILE).split()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no text"
            raise ValueError(f"GENIE_TOKEN_FILE: {path} can't be read: {why}") from None
        if len(words) != 1:
            raise ValueError(f"GENIE_TOKEN_FILE: {path} must hold one word, the token to say, not {len(words)}")
        (found,) = words
    return found or None


def namespace(given: str | None = None) -> str | None:
    """What connections are for: what is given, else GENIE_NAMESPACE. None: the server's first.

    ValueError where that is none; an empty variable is one that is not set.
    """
    found = (os.environ.get("GENIE_NAMESPACE") or None) if given is None else given
    wrong = None if found is None else diagnostics.namespace_error(found)
    if wrong is not None:
        raise ValueError(f"{'GENIE_NAMESPACE' if given is None else 'namespace'} {wrong}, not {found!r}")
    return found


def spell(address: Address) -> str:
    """An address as people write it."""
    host, port, secure = address
    return f"{TLS if secure else ''}{f'[{host}]' if ':' in host else host}:{port}"


def delays() -> Iterator[float]:
    """Seconds to wait before each further round of attempts.

    They double up to a bound, and each is cut by up to half at random, so that many clients of one server don't come
    back at the same moment.
    """
    delay = FIRST_DELAY
    while True:
        yield delay * random.uniform(0.5, 1)  # noqa: S311 - no secret
        delay = min(2 * delay, LONGEST_DELAY)


class HasOptions(Protocol):
    """A socket, or what an event loop gives for one."""

    def setsockopt(self, level: int, option: int, value: int, /) -> None:
        """Set an option."""


def watch_over(sock: HasOptions) -> None:
    """Let the kernel end a connection whose other side has vanished without a word; without this it never would."""
    options = {
        "TCP_KEEPIDLE": KEEPALIVE_IDLE,
        "TCP_KEEPINTVL": KEEPALIVE_IDLE,
        "TCP_KEEPCNT": KEEPALIVE_PROBES,
        "TCP_USER_TIMEOUT": 1000 * KEEPALIVE_IDLE * (KEEPALIVE_PROBES + 1),
    }
    with contextlib.suppress(OSError):  # the connection may have ended already, and whoever reads from it will see
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in options.items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
