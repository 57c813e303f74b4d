"""The address of a server: taken once, at its start, whatever role it has."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, cast

import structlog

from genie.server.partial_lines import PartialLines
from genie.server.tls import HANDSHAKE_SOCKET
from genie.tasks import cancel_and_wait
from genie.tls import reason

if TYPE_CHECKING:
    from genie.config import Settings
    from genie.server.connection import Connection
    from genie.server.tls import TlsContexts


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


# -- Every open connection, and how many there may be --------

REJECT_SLOTS = 16
"""Clients beyond the limits that are let through their TLS handshake, at a time, to be told why they are refused."""


class AdmissionControl:
    """Counts connections, in all and by the address that they come from.

    Those whose TLS handshake has not ended count, too, but are not among those that it lists.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._open: dict[Connection, str | None] = {}
        """Every open connection with its address; None where it was refused, and does not count."""
        self._turned_away = 0
        """How many of them were refused."""
        self._beginning: dict[Handshake, str] = {}
        self._refused: set[Handshake] = set()
        """Handshakes beyond the limits."""
        self._from: Counter[str] = Counter()
        self.partial_lines = PartialLines(settings.limits.max_partial)

    def __len__(self) -> int:
        return len(self._open) - self._turned_away + len(self._beginning)

    def __iter__(self) -> Iterator[Connection]:
        return iter(self._open)

    @property
    def handshakes(self) -> list[Handshake]:
        """Those that are under way."""
        return [*self._beginning, *self._refused]

    def begin(self, handshake: Handshake, address: str) -> bool:
        """Count a handshake in, until it ends; False where it must be cut, since there are far too many.

        The connection that it becomes enters after that, in the place that it had. Where it had none that is refused.
        """
        if self._full(address) is None:
            self._beginning[handshake] = address
            self._from[address] += 1
        elif (
            len(self._refused) < REJECT_SLOTS and len(self._open) < self._settings.limits.max_connections + REJECT_SLOTS
        ):
            self._refused.add(handshake)
        else:
            return False
        return True

    def end(self, handshake: Handshake) -> None:
        """A handshake is over, in whatever way."""
        self._refused.discard(handshake)
        self._forget(self._beginning.pop(handshake, None))

    def enter(self, connection: Connection, address: str) -> str | None:
        """Count a connection in; returns why there is no place for it, if so. Then it is listed, and does not count."""
        why = self._full(address)
        if why is None:
            self._open[connection] = address
            self._from[address] += 1
        else:
            self._open[connection] = None
            self._turned_away += 1
        return why

    @property
    def crowded(self) -> bool:
        """Whether so many refused connections are open that the next one must be closed at once."""
        return self._turned_away > REJECT_SLOTS

    def leave(self, connection: Connection) -> None:
        """A connection has ended."""
        self.partial_lines.forget(connection)
        if connection in self._open:
            address = self._open.pop(connection)
            self._turned_away -= address is None
            self._forget(address)

    def _full(self, address: str) -> str | None:
        most, most_of_one = self._settings.limits.max_connections, self._settings.limits.max_connections_per_address
        if len(self) >= most:
            return f"this server takes {most} connections, and has them"
        if self._from[address] >= most_of_one:
            return f"this server takes {most_of_one} connections from one address, and has them from {address}"
        return None

    def _forget(self, address: str | None) -> None:
        if address is not None:
            self._from[address] -= 1
            if not self._from[address]:
                del self._from[address]


# -- Connections before they are some: accepted here, and counted, until their TLS handshake has ended --------

log = structlog.get_logger()

HANDSHAKE_TIMEOUT_S = 10.0
"""How long a handshake may take."""
TLS_SHUTDOWN_TIMEOUT_S = 5.0
"""How long a client may take to say that it has read all, when a connection ends. Then it is cut."""
ACCEPT_RETRY_S = 0.5
"""After how long it accepts again where it can't: there are no more files, or no memory."""


class TlsListener:
    """Accepts on a socket that is bound. `make` makes the connection that a handshake ends in."""

    def __init__(self, tls: TlsContexts, admission: AdmissionControl, make: Callable[[], Connection]) -> None:
        self._tls = tls
        self._admission = admission
        self._make = make
        self._sock: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None

    def listen(self, sock: socket.socket, backlog: int) -> None:
        """Begin."""
        sock.listen(backlog)
        self._sock = sock
        self._accepting = asyncio.get_running_loop().create_task(self._accept(sock))

    async def close(self) -> None:
        """Accept no more, and cut the handshakes that are under way."""
        await cancel_and_wait(self._accepting)
        if self._sock is not None:
            self._sock.close()
        for handshake in self._admission.handshakes:
            await cancel_and_wait(handshake.task)

    async def _accept(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, peer = await loop.sock_accept(sock)
            except ConnectionError:  # it has left again
                continue
            except OSError as error:
                log.warning("no connection can be accepted", why=str(error))
                await asyncio.sleep(ACCEPT_RETRY_S)
                continue
            handshake = Handshake(self._admission, self._make)
            if self._admission.begin(handshake, peer[0] if peer else ""):
                handshake.task = loop.create_task(handshake.run(client, self._tls))
            else:
                log.debug("too many connections: one is cut before its handshake", peer=peer)
                client.close()


class Handshake(asyncio.Protocol):
    """One, which counts as a connection from the beginning."""

    task: asyncio.Task[None] | None = None

    def __init__(self, admission: AdmissionControl, make: Callable[[], Connection]) -> None:
        self._admission = admission
        self._make = make

    async def run(self, client: socket.socket, tls: TlsContexts) -> None:
        """Make it."""
        peer = None
        try:
            peer = client.getpeername()
            HANDSHAKE_SOCKET.set(client.fileno())
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self,
                client,
                ssl=tls.wire,
                ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S,
                ssl_shutdown_timeout=TLS_SHUTDOWN_TIMEOUT_S,
            )
        except OSError as error:  # those of TLS are some, too
            why = (
                f"not done after {HANDSHAKE_TIMEOUT_S:g} s"
                if isinstance(error, ConnectionAbortedError)
                else reason(error)
            )
            log.info("handshake failed", peer=peer, why=why)
        finally:
            self._admission.end(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is done: the connection takes its place, before any byte is read."""
        self._admission.end(self)
        connection = self._make()
        cast("asyncio.Transport", transport).set_protocol(connection)
        connection.connection_made(transport)
