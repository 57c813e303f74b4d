"""One connection of a simulated network: what each side writes, on its way, and arrived.

What a real kernel does is kept: it takes bytes for a process that is stopped, and holds so many before the sender must
wait; a connection whose other side is gone is told so when it says something.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from genie.testing.loop import Node
from genie.testing.pipe import BEGIN, DATA, END, RESET, Pipe
from genie.testing.sockets import SimSocket

if TYPE_CHECKING:
    from genie.testing.network import Network

WINDOW = 256 << 10
"""Bytes that a direction of a connection takes before its sender must buffer them."""
HIGH, LOW = 64 << 10, 16 << 10
"""Where a sender is asked to pause, and to go on."""
KEEPALIVE_S = 5.0, 35.0
"""After how long a process learns that the machine on the other side has vanished."""


class SimTransport(asyncio.Transport):
    """One side of a connection."""

    def __init__(self, connection: Connection, node: Node, out: Pipe, into: Pipe, own: Any, peer: Any) -> None:
        super().__init__(
            {"socket": SimSocket(own, peer), "sockname": own, "peername": peer},
        )
        self.connection = connection
        self.node = node
        self.network = out.network
        self.out = out
        self.into = into
        out.source = into.to = self
        self._protocol: Any = None
        self.begins: Callable[[], None]
        """Makes the protocol, when the connection is there."""
        self.waiter: asyncio.Future[asyncio.Protocol] | None = None
        """Who waits for that."""
        self._buffer = bytearray()
        self.read_paused = False
        self._closing = False
        self._eof_written = False
        self._writing_paused = False
        self._draining = False
        self.gone = False
        """Nothing is read or written any more."""

    # -- for the protocol ---------------------------------------------------------------------------------

    def write(self, data: Any) -> None:
        """Send, or buffer what the other side does not take yet."""
        if self._eof_written:
            raise RuntimeError("Cannot call write() after write_eof()")
        if self.gone or self._closing or not data or self.node.dead:
            return
        self.network.observer.sent(self, bytes(data))
        room = 0 if self._buffer else max(0, WINDOW - self.out.load)
        if room:
            self.out.send(DATA, bytes(data[:room]))
        self._buffer += data[room:]
        if len(self._buffer) > HIGH and not self._writing_paused:
            self._writing_paused = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Any) -> None:
        """All of them."""
        self.write(b"".join(list_of_data))

    def write_eof(self) -> None:
        """Say that nothing more will come."""
        if not self._eof_written and not self.gone and not self._closing:
            self._eof_written = True
            if not self._buffer:
                self.out.send(END)

    def can_write_eof(self) -> bool:
        """Yes."""
        return True

    def get_write_buffer_size(self) -> int:
        """Bytes that the other side has no room for yet."""
        return len(self._buffer)

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """Fixed ones."""
        return LOW, HIGH

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Not needed."""

    def pause_reading(self) -> None:
        """Leave what comes with the kernel."""
        self.read_paused = True

    def resume_reading(self) -> None:
        """Take it."""
        self.read_paused = False
        if not self._closing and not self.gone:
            self.into.arm()

    def is_reading(self) -> bool:
        """Whether it is taken."""
        return not self.read_paused and not self._closing

    def is_closing(self) -> bool:
        """Whether `close` or `abort` was called, or the other side is gone."""
        return self._closing or self.gone

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Who is told from now on."""
        self._protocol = cast("asyncio.Protocol", protocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        """Who is told."""
        return cast("asyncio.BaseProtocol", self._protocol)

    def close(self) -> None:
        """Send what is buffered, then end."""
        if self._closing or self.gone or self.node.dead:
            return
        self._closing = True
        self.into.arm()
        if not self._buffer:
            self._leave("close", None)

    def abort(self) -> None:
        """End at once."""
        if self.gone or self.node.dead:
            return
        self._closing = True
        self._buffer.clear()
        self._leave("abort", None)

    # -- from the network ---------------------------------------------------------------------------------

    def begin(self, protocol: asyncio.Protocol) -> None:
        """The connection is made."""
        self._protocol = protocol
        protocol.connection_made(self)

    def arrive(self, kind: str) -> None:
        """Something other than bytes has come."""
        if self.gone:
            return
        if kind is BEGIN:
            self.begins()
        elif kind is RESET:
            self._end("reset", ConnectionResetError(104, "Connection reset by peer"))
        elif not self._closing and self._protocol is not None:
            self.network.observer.closed(self, "end")
            if not self._protocol.eof_received():
                self.close()

    def holds_off(self) -> bool:
        """Whether what comes stays with the kernel."""
        return self.read_paused and not self.gone

    def take(self, data: bytes) -> None:
        """Bytes have come."""
        if self.gone:
            self.out.send(RESET)
        elif not self._closing and data:
            self.network.observer.got(self, data)
            self._protocol.data_received(data)

    def drain_soon(self) -> None:
        """The other side has room again."""
        if self._buffer and not self._draining:
            self._draining = True
            self.network.loop.call_soon(self._drain, context=self.node.context)

    def _drain(self) -> None:
        self._draining = False
        room = max(0, WINDOW - self.out.load)
        if self.gone or not self._buffer or not room:
            return
        self.out.send(DATA, bytes(self._buffer[:room]))
        del self._buffer[:room]
        if self._writing_paused and len(self._buffer) <= LOW:
            self._writing_paused = False
            self._protocol.resume_writing()
        if not self._buffer:
            if self._closing:
                self._leave("close", None)
            elif self._eof_written:
                self.out.send(END)

    def lose(self, how: str) -> None:
        """The network has ended the connection, and this side learns of it now."""
        if not self.gone and not self.node.dead:
            self._end(how, ConnectionResetError(104, "Connection reset by peer"))

    def bury(self) -> None:
        """The process has ended. What its kernel has taken still arrives, and then the end."""
        if not self.gone:
            self.gone = True
            self.network.observer.closed(self, "kill")
            if self.connection.silent:
                self.out.broken = True
            else:
                self.out.send(RESET if self._unread() else END)
            self.into.arm_anew()

    def _leave(self, how: str, error: Exception | None) -> None:
        if how == "abort" or self._unread():
            if self.network.delays.loses_unread():
                self.out.clear()
            self.out.send(RESET)
        elif not self._eof_written:
            self.out.send(END)
        self._end(how, error)

    def _unread(self) -> bool:
        return any(kind is DATA for _, kind, _ in self.into.chunks)

    def _end(self, how: str, error: Exception | None) -> None:
        self.gone = True
        self._buffer.clear()
        self.network.observer.closed(self, how)
        self.network.ended(self.connection)
        if self._protocol is not None:
            self.network.loop.call_soon(self._protocol.connection_lost, error, context=self.node.context)
        elif self.waiter is not None and not self.waiter.done():
            self.waiter.set_exception(error or ConnectionAbortedError(103, "aborted"))


class Connection:
    """Two transports and what lies between them."""

    def __init__(self, network: Network, number: int, client: Node, server: Node, address: tuple[str, int]) -> None:
        self.number = number
        hosts = frozenset((client.host, server.host))
        forth, back = Pipe(network, hosts), Pipe(network, hosts)
        own = (client.host, 40_000 + number)
        self.client = SimTransport(self, client, forth, back, own, address)
        self.server = SimTransport(self, server, back, forth, address, own)
        self.address = address
        self.silent = False

    def __repr__(self) -> str:
        return f"<{self.client.node.name}-{self.server.node.name}#{self.number}>"
