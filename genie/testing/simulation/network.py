"""A network in memory for `SimLoop`: TCP connections with delays, partitions, resets and half-open connections.

The bytes of one connection arrive in order, in random pieces and after random delays. Connections are independent of each
other.
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
    """A listening socket: what `create_server` returns."""

    def __init__(self, network: Network, factory: Callable[[], asyncio.Protocol], address: tuple[str, int]) -> None:
        self._network = network
        self.factory = factory
        self.node = NODE.get() or network.outside
        self.address = address
        self.sockets = (SimSocket(address),)

    def close(self) -> None:
        if self._network.listeners.get(self.address) is self:
            del self._network.listeners[self.address]

    def is_serving(self) -> bool:
        """Return whether it accepts connections."""
        return self._network.listeners.get(self.address) is self

    async def wait_closed(self) -> None:
        """Return at once."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        self.close()


class Network:
    """The connections between all nodes, and the partitions between hosts.

    `delays` chooses delays and fragmentation, `observer` is notified of connections and bytes.
    """

    def __init__(self, loop: SimLoop, delays: Delays | None = None, observer: Observer | None = None) -> None:
        self.loop = loop
        self.delays = delays or Delays()
        self.observer: Observer = observer or NullObserver()
        self.listeners: dict[tuple[str, int], Listener] = {}
        self.connections: dict[Connection, None] = {}
        self.outside = loop.node("world", "127.0.0.1")
        """The node of connections that are made outside any other node."""
        self._partitioned: dict[frozenset[str], None] = {}
        self._waiting_for_heal: list[asyncio.Future[None]] = []
        self._connection_count = 0
        self._last_port = 50_000
        loop.network = self

    # -- for the loop -------------------------------------------------------------------------------------

    def listen(self, factory: Callable[[], asyncio.Protocol], host: str | None, port: int) -> Listener:
        """Accept connections at an address; `OSError` if it is in use."""
        node = NODE.get() or self.outside
        if not port:
            self._last_port += 1
            port = self._last_port
        address = (host or node.host, port)
        if address in self.listeners:
            raise OSError(98, f"address already in use: {address}")
        listener = self.listeners[address] = Listener(self, factory, address)
        return listener

    async def connect(
        self, factory: Callable[[], asyncio.Protocol], host: str, port: int
    ) -> tuple[SimTransport, asyncio.Protocol]:
        """Connect to an address; return the client's transport and protocol. Waits while the two hosts are partitioned.

        ConnectionRefusedError if no process listens. Each side creates its protocol when the handshake reaches it.
        """
        node = NODE.get() or self.outside
        host = "127.0.0.1" if host == "localhost" else host
        hosts = frozenset((node.host, host))
        await asyncio.sleep(self.delays.one_way())
        while self.separated(hosts):
            healed: asyncio.Future[None] = self.loop.create_future()
            self._waiting_for_heal.append(healed)
            await healed
        listener = self.listeners.get((host, port))
        if listener is None:
            await asyncio.sleep(self.delays.one_way())
            raise ConnectionRefusedError(111, f"Connect call failed ('{host}', {port})")
        self._connection_count += 1
        connection = Connection(self, self._connection_count, node, listener.node, (host, port))
        self.connections[connection] = None
        self.observer.opened(connection)
        established: asyncio.Future[asyncio.Protocol] = self.loop.create_future()

        def start_server_side() -> None:
            connection.server.start(listener.factory())

        def start_client_side() -> None:
            protocol = factory()
            connection.client.start(protocol)
            if not established.done():
                established.set_result(protocol)

        connection.server.on_established, connection.client.on_established = start_server_side, start_client_side
        connection.client.out.send(ESTABLISHED)
        connection.server.out.send(ESTABLISHED)
        connection.client.waiter = established
        try:
            return connection.client, await established
        except BaseException:
            connection.client.abort()
            raise

    def separated(self, hosts: frozenset[str]) -> bool:
        """Return whether two hosts are partitioned from each other."""
        return hosts in self._partitioned

    def remove_if_ended(self, connection: Connection) -> None:
        """Remove a connection if both sides have ended it."""
        if connection.client.gone and connection.server.gone:
            self.connections.pop(connection, None)

    def on_crash(self, node: Node, *, silently: bool) -> None:
        """End the listeners and connections of a node that was killed.

        `silently`: its machine lost power, so the peers get no FIN or RST, and notice it by keepalive only.
        """
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
                    side.on_crash()
                    if silently:
                        self._reset_after_keepalive(other)
                    self.remove_if_ended(connection)

    # -- faults -------------------------------------------------------------------------------------------

    def separate(self, one: str, other: str) -> None:
        """Partition two hosts in both directions until `heal`. TCP retransmits, so no bytes are lost."""
        self._partitioned[frozenset((one, other))] = None

    def heal(self) -> None:
        self._partitioned.clear()
        for future in self._waiting_for_heal:
            if not future.done():
                future.set_result(None)
        self._waiting_for_heal.clear()
        for connection in self.connections:
            connection.client.out.arm()
            connection.server.out.arm()

    def cut(self, connection: Connection, client_after_s: float, server_after_s: float) -> None:
        """Break a connection. The bytes in flight are lost, and each side detects it after a delay of its own."""
        for pipe, side, detected_after_s in (
            (connection.client.out, connection.client, client_after_s),
            (connection.server.out, connection.server, server_after_s),
        ):
            pipe.clear()
            pipe.broken = True
            self.loop.call_later(detected_after_s, side.reset, context=side.node.context)

    def _reset_after_keepalive(self, side: SimTransport) -> None:
        """Reset one side after the time in which TCP keepalive detects that the machine of the peer is gone."""
        shortest, longest = KEEPALIVE_S
        random = getattr(self.delays, "random", None)
        after_s = longest if random is None else random.uniform(shortest, longest)
        self.loop.call_later(after_s, side.reset, context=side.node.context)


# -- One direction of a connection: the bytes in flight and when they arrive --------

DATA, ESTABLISHED, END, RESET = "data", "established", "end", "reset"
"""Kinds of segments: bytes, the handshake, FIN and RST."""


class Pipe:
    """One direction of a connection: the segments in flight from `source` to `to`, each with its time of arrival."""

    def __init__(self, network: Network, hosts: frozenset[str]) -> None:
        self.network = network
        self.hosts = hosts
        self.source: SimTransport
        self.to: SimTransport
        self.segments: deque[tuple[float, str, bytes]] = deque()
        self.buffered = 0
        """Bytes in flight or not yet read."""
        self._last_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.broken = False
        """Segments are dropped silently."""

    def send(self, kind: str, data: bytes = b"") -> None:
        """Send a segment: it arrives after a random delay, and not before earlier segments."""
        if self.broken:
            return
        at = max(self._last_at, self.network.loop.time() + self.network.delays.one_way())
        self._last_at = at
        self.segments.append((at, kind, data))
        self.buffered += len(data)
        self.arm()

    def clear(self) -> None:
        """Drop the segments in flight."""
        self.segments.clear()
        self.buffered = 0

    def arm(self) -> None:
        """Set the timer that delivers the next segment, unless reading is paused or the hosts are partitioned."""
        if self._timer is not None or not self.segments or (self.segments[0][1] is DATA and self.to.reading_paused()):
            return
        if self.network.separated(self.hosts):
            return  # `heal` arms it again
        node = self.network.outside if self.to.node.dead else self.to.node
        self._timer = self.network.loop.call_at(self.segments[0][0], self._deliver, context=node.context)

    def rearm(self) -> None:
        """Set the timer again after the receiving process has ended: its kernel still takes the segments."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.arm()

    def _deliver(self) -> None:
        """Deliver the next segment; of data, everything that has arrived, or a fragment and the rest later."""
        self._timer = None
        if self.network.separated(self.hosts) or not self.segments:
            return
        now = self.network.loop.time()
        if self.segments[0][1] is not DATA:
            _, kind, _ = self.segments.popleft()
            self.to.segment_received(kind)
        elif not self.to.reading_paused():
            arrived = []
            while self.segments and self.segments[0][1] is DATA and self.segments[0][0] <= now:
                arrived.append(self.segments.popleft()[2])
            data = b"".join(arrived)
            size = self.network.delays.fragment(len(data)) if data else 0
            if size < len(data):
                self.segments.appendleft((now + self.network.delays.one_way(), DATA, data[size:]))
            self.buffered -= size
            self.to.data_received(data[:size])
            self.source.drain_soon()
        self.arm()


# -- Stand-ins for sockets --------


class SimSocket:
    """Stands in for a socket in `get_extra_info("socket")`: it knows its addresses and ignores options."""

    family = socket.AF_INET
    type = socket.SOCK_STREAM

    def __init__(self, own: tuple[str, int], peer: tuple[str, int] | None = None) -> None:
        self._own = own
        self._peer = peer

    def setsockopt(self, *_arguments: object) -> None:
        """Ignore the option."""

    def getsockname(self) -> tuple[str, int]:
        """Return the local address."""
        return self._own

    def getpeername(self) -> tuple[str, int]:
        """Return the address of the peer; `OSError` if there is none."""
        if self._peer is None:
            raise OSError("not connected")
        return self._peer

    def fileno(self) -> int:
        """Return -1: there is no descriptor."""
        return -1

    def close(self) -> None:
        """Do nothing."""


# -- Observers and delays --------


class Observer(Protocol):
    """Is notified of connections, and of bytes when they are written and when a protocol gets them."""

    def opened(self, connection: Connection) -> None:
        """Called when a connection is established."""

    def sent(self, transport: SimTransport, data: bytes) -> None:
        """Called when a process writes bytes."""

    def received(self, transport: SimTransport, data: bytes) -> None:
        """Called before bytes are passed to a process."""

    def closed(self, transport: SimTransport, how: str) -> None:
        """Called when a process ends its side (`close`, `abort`, `kill`), or is notified of the end (`end`, `reset`)."""


class NullObserver:
    """Ignores every notification."""

    def opened(self, connection: Connection) -> None:
        pass

    def sent(self, transport: SimTransport, data: bytes) -> None:
        pass

    def received(self, transport: SimTransport, data: bytes) -> None:
        pass

    def closed(self, transport: SimTransport, how: str) -> None:
        pass


class Delays:
    """Chooses delays and fragmentation. This class chooses none: segments arrive at once and whole."""

    def one_way(self) -> float:
        """Return the delay of one segment, in seconds."""
        return 0.0

    def fragment(self, size: int) -> int:
        """Return how many of `size` bytes arrive first."""
        return size

    def loses_unread(self) -> bool:
        """Return whether a reset discards the bytes in flight before it."""
        return False


class RandomDelays(Delays):
    """Random delays below 1 ms, for a share `slow_ratio` of 1 ms to `max_slow_s`; one in eight segments is fragmented."""

    def __init__(self, random: Random, *, slow_ratio: float = 0.02, max_slow_s: float = 0.2) -> None:
        self.random = random
        self.slow_ratio = slow_ratio
        self.max_slow_s = max_slow_s

    def one_way(self) -> float:
        """Return a random delay, in seconds."""
        if self.random.random() < self.slow_ratio:
            return self.random.uniform(0.001, self.max_slow_s)
        return self.random.uniform(0.00005, 0.0008)

    def fragment(self, size: int) -> int:
        """Return a random size, or the whole."""
        return self.random.randint(1, size) if self.random.random() < 0.125 else size

    def loses_unread(self) -> bool:
        """Return True with probability one half."""
        return self.random.random() < 0.5


# -- Transports --------

WINDOW = 256 << 10
"""Bytes in flight and unread in one direction of a connection, above which the sender buffers."""
HIGH, LOW = 64 << 10, 16 << 10
"""Sizes of the send buffer, in bytes, at which the protocol is paused and resumed."""
KEEPALIVE_S = 5.0, 35.0
"""The shortest and the longest time after which keepalive detects that the machine of the peer is gone."""


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
        self.on_established: Callable[[], None]
        """Called when the handshake reaches this side: creates and starts the protocol."""
        self.waiter: asyncio.Future[asyncio.Protocol] | None = None
        """The result of `connect`, until the connection is established."""
        self._buffer = bytearray()
        self.read_paused = False
        self._closing = False
        self._eof_written = False
        self._writing_paused = False
        self._draining = False
        self.gone = False
        """The connection has ended on this side."""

    # -- for the protocol ---------------------------------------------------------------------------------

    def write(self, data: Any) -> None:
        """Send what fits into the window of the peer, and buffer the rest; pause the protocol if too much is buffered."""
        if self._eof_written:
            raise RuntimeError("Cannot call write() after write_eof()")
        if self.gone or self._closing or not data or self.node.dead:
            return
        self.network.observer.sent(self, bytes(data))
        room = 0 if self._buffer else max(0, WINDOW - self.out.buffered)
        if room:
            self.out.send(DATA, bytes(data[:room]))
        self._buffer += data[room:]
        if len(self._buffer) > HIGH and not self._writing_paused:
            self._writing_paused = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def write_eof(self) -> None:
        """Send FIN after the buffered bytes."""
        if not self._eof_written and not self.gone and not self._closing:
            self._eof_written = True
            if not self._buffer:
                self.out.send(END)

    def can_write_eof(self) -> bool:
        return True

    def get_write_buffer_size(self) -> int:
        """Return the number of buffered bytes."""
        return len(self._buffer)

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """Return the fixed limits."""
        return LOW, HIGH

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Do nothing: the limits are fixed."""

    def pause_reading(self) -> None:
        """Leave received bytes in the kernel."""
        self.read_paused = True

    def resume_reading(self) -> None:
        """Deliver received bytes again."""
        self.read_paused = False
        if not self._closing and not self.gone:
            self.into.arm()

    def is_reading(self) -> bool:
        """Return whether received bytes are delivered."""
        return not self.read_paused and not self._closing

    def is_closing(self) -> bool:
        """Return whether `close` or `abort` was called, or the connection has ended."""
        return self._closing or self.gone

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = cast("asyncio.Protocol", protocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        return cast("asyncio.BaseProtocol", self._protocol)

    def close(self) -> None:
        """End the connection after the buffered bytes are sent."""
        if self._closing or self.gone or self.node.dead:
            return
        self._closing = True
        self.into.arm()
        if not self._buffer:
            self._shut_down("close", None)

    def abort(self) -> None:
        """End the connection at once."""
        if self.gone or self.node.dead:
            return
        self._closing = True
        self._buffer.clear()
        self._shut_down("abort", None)

    # -- from the network ---------------------------------------------------------------------------------

    def start(self, protocol: asyncio.Protocol) -> None:
        """Attach the protocol: the connection is established."""
        self._protocol = protocol
        protocol.connection_made(self)

    def segment_received(self, kind: str) -> None:
        """Process a segment without bytes."""
        if self.gone:
            return
        if kind is ESTABLISHED:
            self.on_established()
        elif kind is RESET:
            self._end("reset", ConnectionResetError(104, "Connection reset by peer"))
        elif not self._closing and self._protocol is not None:
            self.network.observer.closed(self, "end")
            if not self._protocol.eof_received():
                self.close()

    def reading_paused(self) -> bool:
        """Return whether received bytes stay in the kernel."""
        return self.read_paused and not self.gone

    def data_received(self, data: bytes) -> None:
        """Pass bytes to the protocol; if this side has ended the connection, reply with RST."""
        if self.gone:
            self.out.send(RESET)
        elif not self._closing and data:
            self.network.observer.received(self, data)
            self._protocol.data_received(data)

    def drain_soon(self) -> None:
        """Schedule sending buffered bytes: there is space in the window again."""
        if self._buffer and not self._draining:
            self._draining = True
            self.network.loop.call_soon(self._drain, context=self.node.context)

    def _drain(self) -> None:
        """Send buffered bytes that fit into the window; resume the protocol, or finish a `close` or `write_eof`."""
        self._draining = False
        room = max(0, WINDOW - self.out.buffered)
        if self.gone or not self._buffer or not room:
            return
        self.out.send(DATA, bytes(self._buffer[:room]))
        del self._buffer[:room]
        if self._writing_paused and len(self._buffer) <= LOW:
            self._writing_paused = False
            self._protocol.resume_writing()
        if not self._buffer:
            if self._closing:
                self._shut_down("close", None)
            elif self._eof_written:
                self.out.send(END)

    def reset(self) -> None:
        """End this side: its kernel has detected that the connection is broken."""
        if not self.gone and not self.node.dead:
            self._end("reset", ConnectionResetError(104, "Connection reset by peer"))

    def on_crash(self) -> None:
        """End this side after its process has crashed: bytes that were sent before still arrive, then FIN or RST."""
        if not self.gone:
            self.gone = True
            self.network.observer.closed(self, "kill")
            if self.connection.silent:
                self.out.broken = True
            else:
                self.out.send(RESET if self._has_unread() else END)
            self.into.rearm()

    def _shut_down(self, how: str, error: Exception | None) -> None:
        """End this side with FIN, or with RST where the process aborts or leaves bytes unread, as TCP does."""
        if how == "abort" or self._has_unread():
            if self.network.delays.loses_unread():
                self.out.clear()
            self.out.send(RESET)
        elif not self._eof_written:
            self.out.send(END)
        self._end(how, error)

    def _has_unread(self) -> bool:
        return any(kind is DATA for _, kind, _ in self.into.segments)

    def _end(self, how: str, error: Exception | None) -> None:
        """End this side: notify the observer (`how`) and the protocol or, before it exists, `connect` (`error`)."""
        self.gone = True
        self._buffer.clear()
        self.network.observer.closed(self, how)
        self.network.remove_if_ended(self.connection)
        if self._protocol is not None:
            self.network.loop.call_soon(self._protocol.connection_lost, error, context=self.node.context)
        elif self.waiter is not None and not self.waiter.done():
            self.waiter.set_exception(error or ConnectionAbortedError(103, "aborted"))


class Connection:
    """A TCP connection: the transports of client and server, and a pipe for each direction."""

    def __init__(self, network: Network, number: int, client: Node, server: Node, address: tuple[str, int]) -> None:
        self.number = number
        hosts = frozenset((client.host, server.host))
        to_server, to_client = Pipe(network, hosts), Pipe(network, hosts)
        own = (client.host, 40_000 + number)
        self.client = SimTransport(self, client, to_server, to_client, own, address)
        self.server = SimTransport(self, server, to_client, to_server, address, own)
        self.address = address
        self.silent = False
        """The machine of one side has lost power."""

    def __repr__(self) -> str:
        return f"<{self.client.node.name}-{self.server.node.name}#{self.number}>"
