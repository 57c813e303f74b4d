"""The connections of the admin port: accepting them, their TLS handshakes, their number and their time limits.

A connection is *pending* until its first request is complete, with its body. Then it is *established*. The number of
each kind is limited. If there are too many pending connections, a new one replaces the oldest of the address that has
the most. So clients that send nothing, or send slowly, do not use up the open files of the server. They do not keep out
a health check from another address. They keep out one from their own address only if they open `MAX_PENDING` connections
before its request is complete.

Each iteration of the event loop parses a limited part of the input. It takes a microsecond to parse two or three bytes
of a chunked body, which a client can send without authentication.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import Callable
from typing import Final

import structlog

from genie.tls import describe_error
from genie.tls_accept import TlsTurns, accept_tls

log = structlog.get_logger()

MAX_PENDING: Final = 448
"""Maximum number of connections whose first request is not complete. Connections in their TLS handshake count."""
MAX_CONNECTIONS: Final = 64
"""Maximum number of established connections. A browser opens up to six connections, Prometheus one or two."""
BACKLOG: Final = 1024
"""Number of connections that the kernel keeps until the server accepts them. If more arrive at once, a client repeats
its attempt to connect after a second, which is as long as a health check of Kubernetes waits."""
ACCEPTS_PER_ITERATION: Final = 16
"""Maximum number of connections that an iteration of the event loop accepts from a listening socket. Limited, because
the server executes no commands meanwhile."""
FIRST_REQUEST_TIMEOUT_S: Final = 5.0
"""Maximum time until the first request of a connection is complete, with its TLS handshake."""
IDLE_TIMEOUT_S: Final = 30.0
"""Maximum time that a connection may stay open without a further request."""
RESPONSE_TIMEOUT_S: Final = 60.0
"""Maximum time for handling a request, in addition to the idle timeout."""
TLS_SHUTDOWN_TIMEOUT_S: Final = 5.0
"""Maximum time that a client has to confirm the end of a TLS connection."""
ACCEPT_RETRY_S: Final = 0.5
"""Pause after `accept` failed, usually because file descriptors or memory are exhausted."""
MAX_UNPARSED_BYTES: Final = 64 << 10
"""Maximum size of the input of a connection that waits to be parsed. A connection with more input is closed, because no
request is as long."""
PART_BYTES: Final = 4 << 10
"""Size of the part of the input of a connection that is parsed at a time."""
PARSED_BYTES: Final = 12 << 10
"""How many bytes of all connections an iteration of the event loop parses. The last part may exceed this."""
MIN_PART_BYTES: Final = 512
"""A shorter part counts as this many bytes, because even a short request takes some time."""

ParsePart = Callable[[], tuple[int, bool]]
"""Parses the next part of the input of a connection. Returns the bytes of the part, and whether more input waits."""


class InputTurns:
    """Parses the input of connections, a limited number of bytes in each iteration of the event loop.

    Of each connection with waiting input, it keeps the function that parses the next part.
    """

    def __init__(self) -> None:
        self._new: deque[ParsePart] = deque()
        """Connections of whose input no part was parsed. They precede the others, so a health check does not wait for
        long input."""
        self._begun: deque[ParsePart] = deque()
        """Connections with further input after a part was parsed."""

    def add(self, parse: ParsePart) -> None:
        """Add a connection that has input now and had none before."""
        if not self._new and not self._begun:
            asyncio.get_running_loop().call_soon(self._run)
        self._new.append(parse)

    def _run(self) -> None:
        """Parse `PARSED_BYTES` bytes, and if more input waits, continue in the next iteration of the event loop."""
        remaining_bytes = PARSED_BYTES
        while remaining_bytes > 0 and (self._new or self._begun):
            parse = (self._new or self._begun).popleft()
            size, has_more = parse()
            remaining_bytes -= max(size, MIN_PART_BYTES)
            if has_more:
                self._begun.append(parse)
        if self._new or self._begun:
            asyncio.get_running_loop().call_soon(self._run)


class Admitted:
    """A connection of the admin port, from `accept` until it is closed."""

    __slots__ = ("address", "deadline", "is_busy", "sock", "task", "timer", "transport")

    def __init__(self, sock: socket.socket, address: str, deadline: float) -> None:
        self.sock = sock
        self.address = address
        """The client's IP address."""
        self.deadline = deadline
        """Event-loop time at which the connection is closed."""
        self.is_busy = False
        """True if a request is being handled. A busy connection is not replaced by another connection."""
        self.task: asyncio.Task[None] | None = None
        """The task that sets up the transport, with the TLS handshake."""
        self.transport: asyncio.Transport | None = None
        """The transport of the client. None until the TLS handshake is complete."""
        self.timer: asyncio.TimerHandle | None = None
        """Calls `_check_deadline`."""

    def abort(self) -> None:
        """Close the connection at once, also during its TLS handshake."""
        if self.transport is not None:
            self.transport.abort()
        elif self.task is not None:
            self.task.cancel()


class _Pool:
    """A set of connections that knows which address has the most."""

    def __init__(self) -> None:
        self._by_address: dict[str, dict[Admitted, None]] = {}
        """The connections of each address in the order in which they were added, as keys."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, connection: Admitted) -> bool:
        return connection in self._by_address.get(connection.address, ())

    def add(self, connection: Admitted) -> None:
        self._by_address.setdefault(connection.address, {})[connection] = None
        self._count += 1

    def remove(self, connection: Admitted) -> None:
        of_address = self._by_address[connection.address]
        del of_address[connection]
        self._count -= 1
        if not of_address:
            del self._by_address[connection.address]

    def oldest_of_most(self) -> Admitted:
        """Return the oldest connection of the address with the most connections."""
        most: dict[Admitted, None] = max(self._by_address.values(), key=len)
        return next(iter(most))

    def longest_idle_of_most(self) -> Admitted | None:
        """Return the connection that has been idle for longest, of the address with the most idle connections.

        Returns None if no connection is idle.
        """
        most_idle: list[Admitted] = []
        for of_address in self._by_address.values():
            idle = [connection for connection in of_address if not connection.is_busy]
            if len(idle) > len(most_idle):
                most_idle = idle
        # All idle connections have the same timeout, so the one with the earliest deadline has been idle for longest.
        return min(most_idle, key=lambda connection: connection.deadline, default=None)


class AdminConnections:
    """Accepts connections, limits their number, and closes connections that take too long.

    `tls` is the TLS context, or None for plain HTTP. `make_protocol` returns the protocol of a connection. The protocol
    calls `opened` when the connection is set up, and `discard` when it is closed.
    """

    def __init__(self, tls: ssl.SSLContext | None, make_protocol: Callable[[Admitted], asyncio.Protocol]) -> None:
        self._tls = tls
        self._make_protocol = make_protocol
        self._pending = _Pool()
        """Connections before their first complete request."""
        self._established = _Pool()
        """Connections since their first complete request."""
        self._listeners: dict[socket.socket, asyncio.TimerHandle | None] = {}
        """The listening sockets, each with the timer of the next attempt after a failed `accept`, or None."""
        self.input_turns = InputTurns()
        """Parses the input of all connections."""
        self._tls_turns = TlsTurns()

    def __len__(self) -> int:
        return len(self._pending) + len(self._established)

    def listen(self, sock: socket.socket) -> None:
        """Accept the connections of a bound socket until `close`."""
        sock.setblocking(False)
        sock.listen(BACKLOG)
        self._resume_accepting(sock)

    async def close(self) -> None:
        """Stop accepting connections, and abort the pending ones. The protocols close the established ones."""
        for sock, retry in self._listeners.items():
            asyncio.get_running_loop().remove_reader(sock)
            if retry is not None:
                retry.cancel()
            sock.close()
        self._listeners.clear()
        tasks = []
        while self._pending:
            connection = self._pending.oldest_of_most()
            if connection.task is not None:
                tasks.append(connection.task)
            self._abort(connection)
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- Accepting ------------------------------------------------------------------------------------

    def _resume_accepting(self, sock: socket.socket) -> None:
        """Accept the connections of a listening socket from now on."""
        self._listeners[sock] = None
        asyncio.get_running_loop().add_reader(sock, self._accept, sock)

    def _accept(self, sock: socket.socket) -> None:
        """Accept some waiting connections. If more wait, the event loop calls this again in its next iteration."""
        for _ in range(ACCEPTS_PER_ITERATION):
            try:
                client, peer = sock.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:  # the client closed the connection before it was accepted
                continue
            except OSError as error:
                log.warning("accept failed on the admin port, retrying", reason=str(error), retry_s=ACCEPT_RETRY_S)
                loop = asyncio.get_running_loop()
                loop.remove_reader(sock)
                self._listeners[sock] = loop.call_later(ACCEPT_RETRY_S, self._resume_accepting, sock)
                return
            self._admit(client, peer[0])

    def _admit(self, client: socket.socket, address: str) -> None:
        """Count a connection as pending, and begin its TLS handshake."""
        if len(self._pending) >= MAX_PENDING:
            self._abort(self._pending.oldest_of_most())
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        connection = Admitted(client, address, loop.time() + FIRST_REQUEST_TIMEOUT_S)
        self._pending.add(connection)
        connection.timer = loop.call_at(connection.deadline, self._check_deadline, connection)
        connection.task = loop.create_task(self._set_up(connection))
        connection.task.add_done_callback(lambda _: self._on_set_up(connection))

    async def _set_up(self, connection: Admitted) -> None:
        """Connect the socket with its protocol, after the TLS handshake if there is one. A failure is logged."""
        try:
            if self._tls is None:
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: self._make_protocol(connection), connection.sock
                )
            else:
                await accept_tls(
                    connection.sock,
                    self._tls,
                    self._tls_turns,
                    lambda: self._make_protocol(connection),
                    handshake_timeout_s=FIRST_REQUEST_TIMEOUT_S,
                    shutdown_timeout_s=TLS_SHUTDOWN_TIMEOUT_S,
                )
        except OSError as error:  # includes ssl.SSLError
            log.debug("TLS handshake failed on the admin port", peer=connection.address, reason=describe_error(error))

    def _on_set_up(self, connection: Admitted) -> None:
        """Close the socket of a connection whose setup has failed or was cancelled."""
        if connection.transport is None:
            connection.sock.close()
            self.discard(connection)

    # -- The life of a connection ---------------------------------------------------------------------

    def opened(self, connection: Admitted, transport: asyncio.Transport) -> bool:
        """Record the transport of a connection whose setup is complete, with the TLS handshake.

        Return False if the connection was aborted in the meantime.
        """
        connection.transport = transport
        if connection in self._pending:
            return True
        transport.abort()
        return False

    def begin_request(self, connection: Admitted) -> bool:
        """Mark a connection as busy, because its request is complete.

        Return False if too many connections are established. Then the connection stays pending, and must be closed
        after the response.
        """
        if connection in self._pending:
            if len(self._established) >= MAX_CONNECTIONS:
                idle = self._established.longest_idle_of_most()
                if idle is None:
                    return False
                self._abort(idle)
            self._pending.remove(connection)
            self._established.add(connection)
        if connection in self._established:
            connection.is_busy = True
            connection.deadline = asyncio.get_running_loop().time() + IDLE_TIMEOUT_S + RESPONSE_TIMEOUT_S
        return True

    def end_request(self, connection: Admitted) -> None:
        """Mark a connection as idle."""
        if connection in self._established:
            connection.is_busy = False
            connection.deadline = asyncio.get_running_loop().time() + IDLE_TIMEOUT_S

    def discard(self, connection: Admitted) -> None:
        """Remove a connection that is closed or about to be closed, and cancel its timer."""
        for pool in (self._pending, self._established):
            if connection in pool:
                pool.remove(connection)
        if connection.timer is not None:
            connection.timer.cancel()

    def _abort(self, connection: Admitted) -> None:
        """Remove a connection, and close it at once."""
        self.discard(connection)
        connection.abort()

    def _check_deadline(self, connection: Admitted) -> None:
        """Close a connection whose deadline has passed. Otherwise schedule the next check."""
        loop = asyncio.get_running_loop()
        remaining_s = connection.deadline - loop.time()
        if remaining_s <= 0:
            self._abort(connection)
        else:
            # When a request ends, the deadline becomes earlier: check again after at most the idle timeout.
            delay_s = min(remaining_s, IDLE_TIMEOUT_S)
            connection.timer = loop.call_later(delay_s, self._check_deadline, connection)
