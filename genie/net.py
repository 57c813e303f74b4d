"""Addresses as text, and TCP keepalive."""

from __future__ import annotations

import contextlib
import errno
import socket
from typing import Any, Protocol

MAX_PORT = (1 << 16) - 1

SERVICE_LINKS = ("tcp://", "udp://", "sctp://")
"""Prefixes of the variables that Kubernetes sets in each pod beside a Service: `NAME_PORT=tcp://IP:PORT`."""


def parse_host_port(text: str) -> tuple[str, int | None]:
    """Split `HOST`, `HOST:PORT`, `[IPv6]`, `[IPv6]:PORT` or a bare IPv6 address.

    Returns:
        The host without brackets, which may be empty, and the port, which is None if the text contains no port.

    Raises:
        ValueError: if the brackets do not enclose the host, or the port is not a number from 1 to 65535.

    """
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError(f"{text}: an IPv6 address is written [ADDRESS] or [ADDRESS]:PORT")
        port = rest[1:]
    elif text.count(":") > 1:  # a bare IPv6 address
        host, port = text, ""
    else:
        host, _, port = text.partition(":")
    return host, parse_port(port, text) if port else None


def parse_port(port: str | int, source: str) -> int:
    """Return a TCP port as a number.

    Raises:
        ValueError: if the port is not a number from 1 to 65535. The message begins with `source`, which says where the
            port was read, for example the name of an environment variable.

    """
    text = str(port).strip()
    # `int` alone would also accept signs, underscores and other digits, and would reject very long numbers.
    is_short_number = text.isascii() and text.isdecimal() and len(text) <= len(str(MAX_PORT))
    number = int(text) if is_short_number else 0  # 0 is not a valid port
    if not 0 < number <= MAX_PORT:
        raise ValueError(f"{source}: a port is a number from 1 to {MAX_PORT}, not {port!r}")
    return number


def is_service_link(value: str) -> bool:
    """Return whether the value of a variable for a port is a service link of Kubernetes instead of a port."""
    return value.startswith(SERVICE_LINKS)


def format_host_port(host: str, port: int) -> str:
    """Return `HOST:PORT`. An IPv6 address gets brackets: `[ADDRESS]:PORT`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class SocketLike(Protocol):
    """A socket, or the substitute that a transport returns for `get_extra_info("socket")`."""

    def setsockopt(self, level: int, option: int, value: int, /) -> None:
        """Set an option."""


def enable_keepalive(sock: SocketLike, *, idle_s: int, interval_s: int = 5, probes: int = 3) -> None:
    """Enable TCP keepalive: the kernel ends a connection whose peer has vanished without closing it.

    The kernel probes the peer after `idle_s` seconds without traffic, and then every `interval_s` seconds. It ends the
    connection after `probes` unanswered probes, or if sent data is not acknowledged within the same time. An OSError of
    a socket that has already failed is ignored, because the next read from the socket reports it. Options that the
    platform does not have are skipped.
    """
    options = {
        "TCP_KEEPIDLE": idle_s,
        "TCP_KEEPINTVL": interval_s,
        "TCP_KEEPCNT": probes,
        "TCP_USER_TIMEOUT": 1000 * (idle_s + interval_s * probes),  # milliseconds
    }
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in options.items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def local_addresses(host: str, port: int) -> list[tuple[Any, ...]]:
    """Return what `socket.getaddrinfo` returns for an address to listen on, without duplicates. An empty host stands for
    all addresses of the machine.

    Raises OSError if the host cannot be resolved, also if it cannot be a host name.
    """
    try:
        infos = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except UnicodeError:  # for example an empty part, as in `a..b`
        raise OSError(errno.EINVAL, "not a host name") from None
    return list(dict.fromkeys(infos))


def bind_all(host: str, port: int) -> list[socket.socket]:
    """Return a socket for each address of a host name, bound to the address, for `create_server(sock=...)`.

    uvloop resolves a name that is passed to `create_server`, even an address, in threads that never end. In a process
    with more than one thread each system call on a socket takes longer: 64 clients got 3 % fewer locks (measured).

    Raises:
        OSError: if the name cannot be resolved, or an address is not available.

    """
    sockets: list[socket.socket] = []
    infos = local_addresses(host, port)
    try:
        for family, kind, protocol, _, address in infos:
            sock = socket.socket(family, kind, protocol)
            sockets.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:  # the IPv4 addresses have a socket of their own
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind(address)
    except OSError:
        for sock in sockets:
            sock.close()
        raise
    return sockets
