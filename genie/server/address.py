"""The address of a server: taken once, at its start, whatever role it has."""

from __future__ import annotations

import errno
import ipaddress
import socket
import sys


def bind(host: str, port: int) -> socket.socket:
    """A socket on an address, not listening yet. OSError where it can't be had."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


def beyond_loopback(host: str) -> bool:
    """Whether others than this machine's own processes can reach what listens on this host. OSError: it has no address."""
    found = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return not all(_is_loopback(str(address[0])) for *_, address in found)


def _is_loopback(address: str) -> bool:
    found = ipaddress.ip_address(address.partition("%")[0])
    inner = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (inner or found).is_loopback


def guard(address: tuple[str, int]) -> socket.socket | None:
    """Make sure that no other server has bound the same address and is loading, too.

    Until one of them listens, which is only after loading, Linux lets both bind (the option that a restart needs,
    SO_REUSEADDR, allows it), and the second would take the store from the first. A name in the abstract namespace
    of Unix sockets is free again whenever its process ends, in whatever way.
    """
    if sys.platform != "linux":
        return None
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.bind(f"\0genie {address[0]} {address[1]}")
    except OSError:
        sock.close()
        raise OSError(errno.EADDRINUSE, "another server is starting on this address") from None
    return sock
