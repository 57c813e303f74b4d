"""Accepting connections: connection limits, TLS handshakes."""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import socket
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import structlog

from genie.net import local_addresses
from genie.observability.limited_log import log_limited
from genie.opening_turns import OpeningTurns
from genie.server.partial_lines import LineOwner, PartialLines
from genie.server.tls import HANDSHAKE_SOCKET
from genie.server.unread_output import SlowConsumer, UnreadOutput
from genie.tasks import cancel_and_wait
from genie.tls import describe_error
from genie.tls_accept import TlsTurns, accept_tls

if TYPE_CHECKING:
    from genie.config import Limits
    from genie.server.tls import TlsContexts

log = structlog.get_logger()


class LimitedConnection(LineOwner, SlowConsumer, Protocol):
    """The part of a connection that the limits use."""


C = TypeVar("C", bound=LimitedConnection)


def is_exposed(host: str) -> bool:
    """Return whether other machines can reach a host name or address. Raises OSError if the name cannot be resolved."""
    return not all(_is_loopback(str(address[0])) for *_, address in local_addresses(host, 0))


def _is_loopback(address: str) -> bool:
    parsed = ipaddress.ip_address(address.partition("%")[0])  # without an IPv6 zone
    # An IPv4-mapped IPv6 address such as ::ffff:127.0.0.1 is loopback if its IPv4 address is.
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback


# -- Admission control: open connections, and how many there may be -----------------------------------

REJECT_SLOTS = 16
"""Number of connections beyond the limits that may be open at a time, so that the server can send them the error."""


class AdmissionControl(Generic[C]):
    """Counts connections, in total and by client address, and rejects connections beyond the limits.

    A TLS handshake counts as a connection. Iteration yields the established connections, including rejected ones, but no
    handshakes.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._open: dict[C, str | None] = {}
        """The address of each open connection. None for a rejected connection, which does not count."""
        self._rejected_count = 0
        """Number of open connections that were rejected."""
        self._handshakes: dict[Hashable, str] = {}
        """TLS handshakes in progress, with the client's address."""
        self._rejected_handshakes: set[Hashable] = set()
        """TLS handshakes in progress beyond the limits. Their connections are rejected when they are established."""
        self._by_address: Counter[str] = Counter()
        """Number of connections and handshakes, by client address."""
        self.unread_output = UnreadOutput(limits.max_unread_total)
        """The output that clients have not read, and its limits."""
        self.partial_lines = PartialLines(limits.max_partial)
        """The incomplete lines of all connections, and their limits."""
        self.opening_turns = OpeningTurns()
        """The turns of the connections before they are READY."""
        self.tls_turns = TlsTurns()
        """The turns of the TLS handshakes, and of long input of TLS connections."""

    def set_limits(self, limits: Limits) -> None:
        """Replace the limits of connections, in total and by address. Open connections stay open."""
        self._limits = limits

    def __len__(self) -> int:
        return len(self._open) - self._rejected_count + len(self._handshakes)

    def __iter__(self) -> Iterator[C]:
        return iter(self._open)

    def admit(self, connection: C, address: str) -> str | None:
        """Count an established connection and return None.

        If it exceeds a limit, mark it as rejected and return the error text.
        """
        reason = self._limit_exceeded(address)
        if reason is None:
            self._open[connection] = address
            self._by_address[address] += 1
        else:
            self._open[connection] = None
            self._rejected_count += 1
        return reason

    def address_of(self, connection: C) -> str | None:
        """Return the address of an open connection, or None for a rejected one."""
        return self._open.get(connection)

    def leave(self, connection: C) -> None:
        """Remove a lost connection and its incomplete line."""
        self.partial_lines.discard(connection)
        self.unread_output.discard(connection)
        if connection in self._open:
            address = self._open.pop(connection)
            if address is None:
                self._rejected_count -= 1
            self._release(address)

    @property
    def crowded(self) -> bool:
        """True if too many rejected connections are open, so that further ones must be closed without lingering."""
        return self._rejected_count > REJECT_SLOTS

    def admit_handshake(self, handshake: Hashable, address: str) -> bool:
        """Count a TLS handshake until `end_handshake`. Return False if the caller must close the socket instead.

        A few handshakes beyond the limits may complete, so that their clients receive the error over TLS.
        """
        if self._limit_exceeded(address) is None:
            self._handshakes[handshake] = address
            self._by_address[address] += 1
        elif (
            len(self._rejected_handshakes) < REJECT_SLOTS
            and len(self._open) < self._limits.max_connections + REJECT_SLOTS
        ):
            self._rejected_handshakes.add(handshake)
        else:
            return False
        return True

    def end_handshake(self, handshake: Hashable) -> None:
        """Remove a handshake that has completed or failed."""
        self._rejected_handshakes.discard(handshake)
        self._release(self._handshakes.pop(handshake, None))

    def _limit_exceeded(self, address: str) -> str | None:
        """Return the error text if one more connection from `address` would exceed a limit, else None."""
        limits = self._limits
        if len(self) >= limits.max_connections:
            return f"too many connections: this server accepts at most {limits.max_connections}"
        if self._by_address[address] >= limits.max_connections_per_address:
            limit = limits.max_connections_per_address
            return f"too many connections from {address}: this server accepts at most {limit} from one address"
        return None

    def _release(self, address: str | None) -> None:
        """Subtract a connection or handshake from the number of its address. Do nothing for None, a rejected one."""
        if address is not None:
            self._by_address[address] -= 1
            if not self._by_address[address]:
                del self._by_address[address]


# -- TLS: connections are counted from the beginning of their handshake --------------------------------

HANDSHAKE_TIMEOUT_S = 10.0
"""Maximum duration of a TLS handshake in seconds."""
TLS_SHUTDOWN_TIMEOUT_S = 5.0
"""Seconds that a client has to confirm the end of a TLS connection before it is aborted."""
ACCEPTS_PER_ITERATION = 16
"""Maximum number of connections that an iteration of the event loop accepts."""
ACCEPT_RETRY_S = 0.5
"""Pause in seconds after `accept` failed, usually because file descriptors or memory are exhausted."""


class TlsListener(Generic[C]):
    """Accepts TLS connections on a bound socket. `make_connection` creates the protocol for an established connection."""

    def __init__(
        self, tls: TlsContexts, admission: AdmissionControl[C], make_connection: Callable[[], asyncio.Protocol]
    ) -> None:
        self._tls = tls
        self._admission = admission
        self._make_connection = make_connection
        self._sock: socket.socket | None = None
        """The listening socket. None before `listen`."""
        self._accepting: asyncio.Task[None] | None = None
        """The task that accepts connections."""
        self._handshakes: set[asyncio.Task[None]] = set()
        """One task for each TLS handshake in progress."""

    def listen(self, sock: socket.socket, backlog: int) -> None:
        """Listen on the socket, and accept connections until `close`."""
        sock.listen(backlog)
        self._sock = sock
        self._accepting = asyncio.get_running_loop().create_task(self._accept(sock))

    async def close(self) -> None:
        """Stop accepting connections, and abort handshakes."""
        await cancel_and_wait(self._accepting)
        if self._sock is not None:
            self._sock.close()
        handshakes = list(self._handshakes)
        for task in handshakes:  # all before the first wait: each wait takes an iteration of the event loop
            task.cancel()
        for task in handshakes:
            await cancel_and_wait(task)

    async def _accept(self, sock: socket.socket) -> None:
        """Accept connections and start their TLS handshakes, until the task is cancelled."""
        loop = asyncio.get_running_loop()
        for number in itertools.count():
            if number % ACCEPTS_PER_ITERATION == 0:
                await asyncio.sleep(0)  # `sock_accept` lets nothing else run while connections are there
            try:
                client, peer = await loop.sock_accept(sock)
            except ConnectionError:  # the client closed the connection before it was accepted
                continue
            except OSError as error:
                log.warning("accept failed on the client port, retrying", reason=str(error), retry_s=ACCEPT_RETRY_S)
                await asyncio.sleep(ACCEPT_RETRY_S)
                continue
            handshake = _TlsHandshake(self._admission, self._make_connection)
            if self._admission.admit_handshake(handshake, peer[0] if peer else ""):
                task = loop.create_task(handshake.run(client, self._tls))
                self._handshakes.add(task)
                task.add_done_callback(self._handshakes.discard)
            else:
                log.debug("connection rejected before its TLS handshake", peer=peer)
                client.close()


class _TlsHandshake(Generic[C]):
    """The TLS handshake of a connection, which counts as a connection."""

    def __init__(self, admission: AdmissionControl[C], make_connection: Callable[[], asyncio.Protocol]) -> None:
        self._admission = admission
        self._make_connection = make_connection

    async def run(self, client: socket.socket, tls: TlsContexts) -> None:
        """Run the handshake until it completes, fails or times out. A failure is logged."""
        peer = None
        try:
            peer = client.getpeername()
            HANDSHAKE_SOCKET.set(client.fileno())  # so that a failed handshake can send its TLS alert
            await accept_tls(
                client,
                tls.wire,
                self._admission.tls_turns,
                self._complete,
                handshake_timeout_s=HANDSHAKE_TIMEOUT_S,
                shutdown_timeout_s=TLS_SHUTDOWN_TIMEOUT_S,
            )
        except OSError as error:  # includes ssl.SSLError
            timed_out = isinstance(error, ConnectionAbortedError)  # how asyncio reports a handshake timeout
            reason = f"timed out after {HANDSHAKE_TIMEOUT_S:g} s" if timed_out else describe_error(error)
            log_limited("info", "TLS handshake failed", peer=peer, reason=reason)
        finally:
            self._admission.end_handshake(self)

    def _complete(self) -> asyncio.Protocol:
        """Return the protocol of the connection, because the handshake is complete."""
        self._admission.end_handshake(self)  # from now on, the connection is counted instead
        return self._make_connection()
