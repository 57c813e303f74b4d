"""A network in memory for `SimLoop`: TCP connections that are slow, cut, half-open, or fine.

The bytes of one connection arrive in order, in arbitrary pieces and after arbitrary times; different connections know
nothing of each other.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any, Protocol, Self, cast

from genie.testing.simulation.loop import NODE, Node, SimLoop


class Listener:
    """What `create_server` gives."""

    def __init__(self, network: Network, factory: Callable[[], asyncio.Protocol], address: tuple[str, int]) -> None:
        self._network = network
        self.factory = factory
        self.node = NODE.get() or network.nowhere
        self.address = address
        self.sockets = (SimSocket(address),)

    def close(self) -> None:
        """Take no more connections."""
        if self._network.listeners.get(self.address) is self:
            del self._network.listeners[self.address]

    def is_serving(self) -> bool:
        """Whether it takes any."""
        return self._network.listeners.get(self.address) is self

    async def wait_closed(self) -> None:
        """At once."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        self.close()


class Network:
    """Hosts and the connections between their processes. `delays` are those of all of them."""

    def __init__(self, loop: SimLoop, delays: Delays | None = None, observer: Observer | None = None) -> None:
        self.loop = loop
        self.delays = delays or Delays()
        self.observer: Observer = observer or Silent()
        self.listeners: dict[tuple[str, int], Listener] = {}
        self.connections: dict[Connection, None] = {}
        self.nowhere = loop.node("world", "127.0.0.1")
        """Whose the connections are that no node makes."""
        self._cut: dict[frozenset[str], None] = {}
        self._waiting: list[asyncio.Future[None]] = []
        self._numbers = 0
        self._ports = 50_000
        loop.network = self

    # -- for the loop -------------------------------------------------------------------------------------

    def listen(self, factory: Callable[[], asyncio.Protocol], host: str | None, port: int) -> Listener:
        """Take connections at an address; OSError where somebody does."""
        node = NODE.get() or self.nowhere
        if not port:
            self._ports += 1
            port = self._ports
        address = (host or node.host, port)
        if address in self.listeners:
            raise OSError(98, f"address already in use: {address}")
        listener = self.listeners[address] = Listener(self, factory, address)
        return listener

    async def connect(
        self, factory: Callable[[], asyncio.Protocol], host: str, port: int
    ) -> tuple[SimTransport, asyncio.Protocol]:
        """Connect to an address; OSError where nobody takes it. Waits while the two hosts are separated."""
        node = NODE.get() or self.nowhere
        host = "127.0.0.1" if host == "localhost" else host
        there = frozenset((node.host, host))
        await asyncio.sleep(self.delays.one_way())
        while self.separated(there):
            healed: asyncio.Future[None] = self.loop.create_future()
            self._waiting.append(healed)
            await healed
        listener = self.listeners.get((host, port))
        if listener is None:
            await asyncio.sleep(self.delays.one_way())
            raise ConnectionRefusedError(111, f"Connect call failed ('{host}', {port})")
        self._numbers += 1
        connection = Connection(self, self._numbers, node, listener.node, (host, port))
        self.connections[connection] = None
        self.observer.opened(connection)
        made: asyncio.Future[asyncio.Protocol] = self.loop.create_future()

        def accepted() -> None:
            connection.server.begin(listener.factory())

        def opened() -> None:
            protocol = factory()
            connection.client.begin(protocol)
            if not made.done():
                made.set_result(protocol)

        connection.server.begins, connection.client.begins = accepted, opened
        connection.client.out.send(BEGIN)
        connection.server.out.send(BEGIN)
        connection.client.waiter = made
        try:
            return connection.client, await made
        except BaseException:
            connection.client.abort()
            raise

    def separated(self, hosts: frozenset[str]) -> bool:
        """Whether nothing gets from the one to the other for now."""
        return hosts in self._cut

    def ended(self, connection: Connection) -> None:
        """One side is through with it."""
        if connection.client.gone and connection.server.gone:
            self.connections.pop(connection, None)

    def bury(self, node: Node, *, silently: bool) -> None:
        """A process has ended."""
        for address, listener in list(self.listeners.items()):
            if listener.node is node:
                del self.listeners[address]
        for connection in list(self.connections):
            for side, other in (
                (connection.client, connection.server),
                (connection.server, connection.client),
            ):
                if side.node is node:
                    connection.silent = silently
                    side.bury()
                    if silently:
                        self._learn_late(other)
                    self.ended(connection)

    # -- faults -------------------------------------------------------------------------------------------

    def separate(self, one: str, other: str) -> None:
        """Let nothing get from one host to another, in either direction, until `heal`. TCP keeps it and tries again."""
        self._cut[frozenset((one, other))] = None

    def heal(self) -> None:
        """Let everything through again."""
        self._cut.clear()
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
        self._waiting.clear()
        for connection in self.connections:
            connection.client.out.arm()
            connection.server.out.arm()

    def cut(self, connection: Connection, client_after_s: float, server_after_s: float) -> None:
        """End a connection from outside. What is under way is lost, and each side learns of it after a time of its own."""
        for pipe, side, after_s in (
            (connection.client.out, connection.client, client_after_s),
            (connection.server.out, connection.server, server_after_s),
        ):
            pipe.clear()
            pipe.broken = True
            self.loop.call_later(after_s, side.lose, "reset", context=side.node.context)

    def _learn_late(self, side: SimTransport) -> None:
        shortest, longest = KEEPALIVE_S
        random = getattr(self.delays, "random", None)
        after_s = longest if random is None else random.uniform(shortest, longest)
        self.loop.call_later(after_s, side.lose, "reset", context=side.node.context)


# -- One direction of a connection of a simulated network: what is on its way, and when it arrives --------

DATA, BEGIN, END, RESET = "data", "begin", "end", "reset"
"""What goes through: bytes, and that the connection is made, that no more bytes come, or that it is broken off."""


class Pipe:
    """One direction of a connection: what is on its way to `to`."""

    def __init__(self, network: Network, hosts: frozenset[str]) -> None:
        self.network = network
        self.hosts = hosts
        self.source: SimTransport
        self.to: SimTransport
        self.chunks: deque[tuple[float, str, bytes]] = deque()
        self.load = 0
        """Bytes under way or unread."""
        self._last_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.broken = False
        """Nothing goes through, and nobody is told."""

    def send(self, kind: str, data: bytes = b"") -> None:
        """Put something on its way."""
        if self.broken:
            return
        at = max(self._last_at, self.network.loop.time() + self.network.delays.one_way())
        self._last_at = at
        self.chunks.append((at, kind, data))
        self.load += len(data)
        self.arm()

    def clear(self) -> None:
        """Lose what is under way."""
        self.chunks.clear()
        self.load = 0

    def arm(self) -> None:
        """Deliver the next chunk when it is due, unless something keeps it."""
        if self._timer is not None or not self.chunks or (self.chunks[0][1] is DATA and self.to.holds_off()):
            return
        if self.network.separated(self.hosts):
            return  # `heal` arms it again
        node = self.network.nowhere if self.to.node.dead else self.to.node
        self._timer = self.network.loop.call_at(self.chunks[0][0], self._deliver, context=node.context)

    def arm_anew(self) -> None:
        """The same, when the process that would have been given it has ended: its kernel deals with it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.arm()

    def _deliver(self) -> None:
        self._timer = None
        if self.network.separated(self.hosts) or not self.chunks:
            return
        now = self.network.loop.time()
        if self.chunks[0][1] is not DATA:
            _, kind, _ = self.chunks.popleft()
            self.to.arrive(kind)
        elif not self.to.holds_off():
            parts = []
            while self.chunks and self.chunks[0][1] is DATA and self.chunks[0][0] <= now:
                parts.append(self.chunks.popleft()[2])
            data = b"".join(parts)
            first = self.network.delays.cut_at(len(data)) if data else 0
            if first < len(data):
                self.chunks.appendleft((now + self.network.delays.one_way(), DATA, data[first:]))
            self.load -= first
            self.to.take(data[:first])
            self.source.drain_soon()
        self.arm()


# -- What stands for a socket where the network is simulated --------


class SimSocket:
    """What `get_extra_info("socket")` gives: options are taken and ignored."""

    family = socket.AF_INET
    type = socket.SOCK_STREAM

    def __init__(self, own: tuple[str, int], peer: tuple[str, int] | None = None) -> None:
        self._own = own
        self._peer = peer

    def setsockopt(self, *_arguments: object) -> None:
        """Ignore it."""

    def getsockname(self) -> tuple[str, int]:
        """The own address."""
        return self._own

    def getpeername(self) -> tuple[str, int]:
        """The other side's."""
        if self._peer is None:
            raise OSError("not connected")
        return self._peer

    def fileno(self) -> int:
        """None."""
        return -1

    def close(self) -> None:
        """Nothing to close."""


# -- What a simulated network leaves to chance, and who looks on --------


class Observer(Protocol):
    """Sees all bytes: when they are handed to a transport, and when a protocol gets them."""

    def opened(self, connection: Connection) -> None:
        """A connection was made."""

    def sent(self, transport: SimTransport, data: bytes) -> None:
        """A process has written this."""

    def got(self, transport: SimTransport, data: bytes) -> None:
        """A process is about to be given this."""

    def closed(self, transport: SimTransport, how: str) -> None:
        """A process has ended its side (`close`, `abort`, `kill`), or has learnt of its end (`end`, `reset`)."""


class Silent:
    """An observer that looks away."""

    def opened(self, connection: Connection) -> None:
        """Look away."""

    def sent(self, transport: SimTransport, data: bytes) -> None:
        """Look away."""

    def got(self, transport: SimTransport, data: bytes) -> None:
        """Look away."""

    def closed(self, transport: SimTransport, how: str) -> None:
        """Look away."""


class Delays:
    """How long things take on a network, in seconds. This one takes no time at all and breaks nothing up."""

    def one_way(self) -> float:
        """From one host to another."""
        return 0.0

    def cut_at(self, size: int) -> int:
        """How many of so many bytes arrive in the first piece."""
        return size

    def loses_unread(self) -> bool:
        """Whether a reset overtakes what was sent before it."""
        return False


class RandomDelays(Delays):
    """Mostly quick, sometimes slow, rarely very slow."""

    def __init__(self, random: Random, *, slow: float = 0.02, slow_s: float = 0.2) -> None:
        self.random = random
        self.slow = slow
        self.slow_s = slow_s
        self.fault_free = False

    def one_way(self) -> float:
        """From 50 µs on."""
        if self.random.random() < self.slow:
            return self.random.uniform(0.001, self.slow_s)
        return self.random.uniform(0.00005, 0.0008)

    def cut_at(self, size: int) -> int:
        """Anywhere, once in eight times."""
        return self.random.randint(1, size) if self.random.random() < 0.125 else size

    def loses_unread(self) -> bool:
        """Every other time."""
        return self.random.random() < 0.5


# -- One connection of a simulated network: what each side writes, on its way, and arrived --------

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
