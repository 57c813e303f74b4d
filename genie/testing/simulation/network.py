"""A network in memory for `SimLoop`: TCP connections with delays, partitions, resets and half-open connections.

The bytes of one connection arrive in order, in random fragments and after random delays. Connections are independent of
each other.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple, Self, cast

from genie.testing.simulation.loop import NODE, Node, SimLoop


class Listener:
    """A listening socket, which `SimLoop.create_server` returns. The running node owns the listener."""

    def __init__(self, network: Network, factory: Callable[[], asyncio.Protocol], address: tuple[str, int]) -> None:
        self._network = network
        self.factory = factory
        self.node = NODE.get() or network.external_node
        self.address = address
        self.sockets = (SimSocket(address),)

    def close(self) -> None:
        if self._network.listeners.get(self.address) is self:
            del self._network.listeners[self.address]

    def is_serving(self) -> bool:
        """Return whether the listener still accepts connections."""
        return self._network.listeners.get(self.address) is self

    async def wait_closed(self) -> None:
        """Return at once: `close` has no work to wait for."""

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
        self.observer = observer or Observer()
        self.listeners: dict[tuple[str, int], Listener] = {}
        self.connections: dict[Connection, None] = {}
        self.external_node = loop.create_node("world", "127.0.0.1")
        """The node of connections that are made outside of all other nodes, such as those of a test."""
        self._partitioned: dict[frozenset[str], int] = {}
        """By pair of hosts, the number of partitions between them that have not ended."""
        self._late: list[LateMessages] = []
        """The additional delays that apply now."""
        self._waiting_for_heal: list[asyncio.Future[None]] = []
        """A future for each `connect` that a partition delays."""
        self._connection_count = 0
        """How many connections were made. Connections are numbered from 1."""
        self._last_port = 50_000
        """The last port that was chosen for a listener without a fixed port."""
        loop.network = self

    # -- for the loop -------------------------------------------------------------------------------------

    def listen(self, factory: Callable[[], asyncio.Protocol], host: str | None, port: int) -> Listener:
        """Accept connections at an address, and return the listener.

        Without a `host`, the listener uses the host of the running node. Port 0 selects a free port. Raises OSError if
        the address is in use.
        """
        node = NODE.get() or self.external_node
        if not port:
            self._last_port += 1
            port = self._last_port
        address = (host or node.host, port)
        if address in self.listeners:
            raise OSError(errno.EADDRINUSE, f"address already in use: {address}")
        listener = self.listeners[address] = Listener(self, factory, address)
        return listener

    async def connect(
        self, factory: Callable[[], asyncio.Protocol], host: str, port: int
    ) -> tuple[SimTransport, asyncio.Protocol]:
        """Connect to an address, and return the client's transport and protocol.

        Each side creates its protocol when the handshake reaches that side. While the two hosts are partitioned,
        `connect` waits. Raises ConnectionRefusedError if no process listens at the address.
        """
        client_node = NODE.get() or self.external_node
        host = "127.0.0.1" if host == "localhost" else host
        hosts = frozenset((client_node.host, host))
        await asyncio.sleep(self.one_way_delay_s(hosts))
        await self._wait_while_partitioned(hosts)
        listener = self.listeners.get((host, port))
        if listener is None:
            await asyncio.sleep(self.one_way_delay_s(hosts))
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"Connect call failed ('{host}', {port})")
        self._connection_count += 1
        established: asyncio.Future[asyncio.Protocol] = self.loop.create_future()
        connection = Connection(self, self._connection_count, client_node, factory, established, listener)
        self.connections[connection] = None
        self.observer.opened(connection)
        connection.client.out.send(ESTABLISHED)
        connection.server.out.send(ESTABLISHED)
        try:
            return connection.client, await established
        except BaseException:
            connection.client.abort()
            raise

    async def _wait_while_partitioned(self, hosts: frozenset[str]) -> None:
        """Wait until the two hosts in `hosts` are not partitioned from each other."""
        while self.is_partitioned(hosts):
            healed: asyncio.Future[None] = self.loop.create_future()
            self._waiting_for_heal.append(healed)
            await healed

    def is_partitioned(self, hosts: frozenset[str]) -> bool:
        """Return whether the two hosts in `hosts` are partitioned from each other."""
        return hosts in self._partitioned

    def one_way_delay_s(self, hosts: frozenset[str]) -> float:
        """Return how many seconds the next segment between the two hosts in `hosts` is in flight."""
        return self.delays.one_way_delay_s() + sum(late.delay_s() for late in self._late if late.concerns(hosts))

    def remove_if_ended(self, connection: Connection) -> None:
        """Forget a connection once it has ended on both sides."""
        if connection.client.has_ended and connection.server.has_ended:
            self.connections.pop(connection, None)

    def on_crash(self, node: Node, *, silently: bool) -> None:
        """End the listeners and connections of a node that was killed.

        Normally the kernel of the node sends FIN or RST to the peers. With `silently` the whole machine has lost power:
        it sends nothing, and the peers detect the loss only by TCP keepalive.
        """
        for address, listener in list(self.listeners.items()):
            if listener.node is node:
                del self.listeners[address]
        for connection in list(self.connections):
            client, server = connection.client, connection.server
            for side, peer in ((client, server), (server, client)):
                if side.node is node:
                    connection.silent = silently  # `side.on_crash` depends on this
                    side.on_crash()
                    if silently:
                        self.reset_later(peer, self.delays.keepalive_s())
                    self.remove_if_ended(connection)

    def finish(self) -> None:
        """End all connections without notifying the protocols, because the simulation has ended.

        Without this, a `StreamWriter` that is garbage-collected later would warn that it was not closed.
        """
        for connection in self.connections:
            connection.client.has_ended = connection.server.has_ended = True
        self.connections.clear()

    # -- faults -------------------------------------------------------------------------------------------

    def partition(self, one: str, other: str) -> None:
        """Partition two hosts in both directions. Bytes are delayed but not lost, because TCP retransmits.

        The partition lasts until `end_partition`, which is called as often as this method, or until `heal`.
        """
        hosts = frozenset((one, other))
        self._partitioned[hosts] = self._partitioned.get(hosts, 0) + 1

    def end_partition(self, one: str, other: str) -> None:
        """End one partition of two hosts. They stay partitioned while another partition of them lasts."""
        hosts = frozenset((one, other))
        count = self._partitioned.get(hosts, 0)
        if count > 1:
            self._partitioned[hosts] = count - 1
        elif count:
            del self._partitioned[hosts]
            self._deliver_delayed()

    def heal(self) -> None:
        """End all partitions: delayed `connect` calls continue, and delayed segments are delivered."""
        self._partitioned.clear()
        self._deliver_delayed()

    def delay_messages(self, late: LateMessages) -> None:
        """Delay the messages that `late` concerns and that are sent from now on, until `end_delay`."""
        self._late.append(late)

    def end_delay(self, late: LateMessages) -> None:
        """End the effect of `delay_messages` for messages that are sent from now on."""
        self._late.remove(late)

    def _deliver_delayed(self) -> None:
        """Continue `connect` calls and deliveries after a partition has ended.

        Another partition may delay them again.
        """
        for future in self._waiting_for_heal:
            if not future.done():
                future.set_result(None)
        self._waiting_for_heal.clear()
        for connection in self.connections:
            connection.client.out.schedule_delivery()
            connection.server.out.schedule_delivery()

    def cut(self, connection: Connection, client_after_s: float, server_after_s: float) -> None:
        """Break a connection and lose the bytes in flight.

        The client detects the break after `client_after_s` seconds, the server after `server_after_s` seconds.
        """
        self.silence(connection)
        self.reset_later(connection.client, client_after_s)
        self.reset_later(connection.server, server_after_s)

    def silence(self, connection: Connection, *, to_server: bool = True, to_client: bool = True) -> None:
        """Lose everything in one or both directions of a connection from now on, also FIN and RST.

        The connection is half-open: no side is notified, and a side that ends the connection does not notify the other.
        """
        if to_server:
            connection.client.out.break_silently()
        if to_client:
            connection.server.out.break_silently()

    def reset_later(self, side: SimTransport, after_s: float) -> None:
        """Reset one side of a connection after `after_s` seconds, as a kernel that detects that the connection is broken."""
        self.loop.call_later(after_s, side.reset, context=side.node.context)


# -- One direction of a connection: the bytes in flight and when they arrive --------

DATA, ESTABLISHED, END, RESET = "data", "established", "end", "reset"
"""Kinds of segments: bytes, the handshake, FIN and RST."""


class Segment(NamedTuple):
    """A part of a connection's bytes, or a signal without bytes, that is in flight."""

    arrives_at: float
    """The virtual time of its arrival."""
    kind: str
    data: bytes


class Pipe:
    """One direction of a connection: the segments in flight from `source` to `destination`, in order.

    `hosts` are the hosts of both.
    """

    def __init__(self, network: Network, hosts: frozenset[str]) -> None:
        self.network = network
        self.hosts = hosts
        self.source: SimTransport
        self.destination: SimTransport
        self.segments: deque[Segment] = deque()
        """The segments in flight, in order."""
        self.buffered = 0
        """The number of bytes that are in flight or not yet read by the destination."""
        self._last_arrival_at = 0.0
        """When the last segment that was sent arrives."""
        self._timer: asyncio.TimerHandle | None = None
        self.broken = False
        """True if the pipe drops new segments, without notifying the sender."""

    def send(self, kind: str, data: bytes = b"") -> None:
        """Send a segment of a kind, with the bytes if the kind is `DATA`.

        The segment arrives after a random delay, but never before an earlier segment.
        """
        if self.broken:
            return
        arrives_at = self.network.loop.time() + self.network.one_way_delay_s(self.hosts)
        self._last_arrival_at = max(self._last_arrival_at, arrives_at)
        self.segments.append(Segment(self._last_arrival_at, kind, data))
        self.buffered += len(data)
        self.schedule_delivery()

    def clear(self) -> None:
        """Drop the segments in flight."""
        self.segments.clear()
        self.buffered = 0

    def break_silently(self) -> None:
        """Drop the segments in flight and all later segments."""
        self.clear()
        self.broken = True

    def schedule_delivery(self) -> None:
        """Set a timer that delivers the next segment when the segment arrives.

        No timer is set if one is already set, nothing is in flight, the hosts are partitioned, or the next segment has
        bytes and the destination has paused reading. `heal` and `resume_reading` call this method again.
        """
        if self._timer is not None or not self.segments:
            return
        segment = self.segments[0]
        if segment.kind is DATA and self.destination.reading_paused():
            return  # `resume_reading` schedules the delivery
        if self.network.is_partitioned(self.hosts):
            return  # `heal` schedules the delivery
        # A dead node runs no callbacks, but its kernel still takes segments.
        node = self.network.external_node if self.destination.node.dead else self.destination.node
        self._timer = self.network.loop.call_at(segment.arrives_at, self._deliver, context=node.context)

    def reschedule_delivery(self) -> None:
        """Set the delivery timer again after the destination's process has ended.

        A dead process runs no timers, but its kernel still receives segments.
        """
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.schedule_delivery()

    def _deliver(self) -> None:
        """Deliver the next segment, and schedule the delivery of the segment after it."""
        self._timer = None
        if self.network.is_partitioned(self.hosts) or not self.segments:
            return
        if self.segments[0].kind is not DATA:
            self.destination.segment_received(self.segments.popleft().kind)
        elif not self.destination.reading_paused():
            self._deliver_data()
        self.schedule_delivery()

    def _deliver_data(self) -> None:
        """Deliver the bytes of all segments that have arrived.

        If `Delays.fragment` splits the bytes, only the first fragment is delivered, and the rest arrives after another
        delay.
        """
        now = self.network.loop.time()
        arrived = []
        while self.segments and self.segments[0].kind is DATA and self.segments[0].arrives_at <= now:
            arrived.append(self.segments.popleft().data)
        data = b"".join(arrived)
        size = self.network.delays.fragment(len(data)) if data else 0
        if size < len(data):
            arrives_at = now + self.network.delays.one_way_delay_s()
            self.segments.appendleft(Segment(arrives_at, DATA, data[size:]))
        self.buffered -= size
        self.destination.data_received(data[:size])
        self.source.drain_soon()


# -- Stand-ins for sockets --------


class SimSocket:
    """Replaces a socket, for example in `get_extra_info("socket")`. It has addresses, and ignores socket options."""

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
        """Return the address of the peer. Raises OSError if the socket is not connected."""
        if self._peer is None:
            raise OSError("not connected")
        return self._peer

    def fileno(self) -> int:
        """Return -1: a simulated socket has no file descriptor."""
        return -1

    def close(self) -> None:
        """Do nothing."""


# -- Observers and delays --------


class Observer:
    """Gets a call when a connection opens or closes, when a process writes bytes, and when a process receives bytes.

    This base class ignores every call.
    """

    def opened(self, connection: Connection) -> None:
        """Called when a connection is established."""

    def sent(self, transport: SimTransport, data: bytes) -> None:
        """Called when a process writes bytes."""

    def received(self, transport: SimTransport, data: bytes) -> None:
        """Called before bytes are passed to a process."""

    def closed(self, transport: SimTransport, how: str) -> None:
        """Called when one side of a connection ends.

        `how` is `close`, `abort` or `kill` if the process ends its side, and `end` (FIN) or `reset` (RST) if the
        process is notified that the peer has ended the connection.
        """


KEEPALIVE_S = 5.0, 35.0
"""The shortest and the longest time in which TCP keepalive detects that the peer's machine has lost power."""


class Delays:
    """Chooses how segments are delayed and fragmented. In this base class they arrive at once and whole."""

    def one_way_delay_s(self) -> float:
        """Return how many seconds the next segment is in flight."""
        return 0.0

    def fragment(self, size: int) -> int:
        """Return how many of `size` arrived bytes are delivered now. The rest is delayed again."""
        return size

    def reset_discards_data(self) -> bool:
        """Return whether an RST overtakes and discards the bytes that are in flight."""
        return False

    def keepalive_s(self) -> float:
        """Return after how many seconds TCP keepalive detects that the peer's machine has lost power."""
        return KEEPALIVE_S[1]


class RandomDelays(Delays):
    """Random delays below 1 ms, and fragments in one of eight deliveries.

    A share of the segments, `slow_ratio`, is slow: these are in flight for 1 ms to `max_slow_s` seconds.
    """

    def __init__(self, random: Random, *, slow_ratio: float = 0.02, max_slow_s: float = 0.2) -> None:
        self.random = random
        self.slow_ratio = slow_ratio
        self.max_slow_s = max_slow_s

    def one_way_delay_s(self) -> float:
        """Return a random delay in seconds."""
        if self.random.random() < self.slow_ratio:
            return self.random.uniform(0.001, self.max_slow_s)
        return self.random.uniform(0.00005, 0.0008)

    def fragment(self, size: int) -> int:
        """Return a random part of `size` with probability one eighth, otherwise `size`."""
        return self.random.randint(1, size) if self.random.random() < 0.125 else size

    def reset_discards_data(self) -> bool:
        """Return True with probability one half."""
        return self.random.random() < 0.5

    def keepalive_s(self) -> float:
        """Return a random time in seconds."""
        return self.random.uniform(*KEEPALIVE_S)


class LateMessages:
    """Additional delays of the messages between some hosts, for `Network.delay_messages`.

    `hosts` selects the messages: two hosts those between them, one host those from and to it, an empty set all
    messages. Each message takes between half of `max_delay_s` and `max_delay_s` longer.
    """

    def __init__(self, hosts: frozenset[str], max_delay_s: float, random: Random) -> None:
        self._hosts = hosts
        self._max_delay_s = max_delay_s
        self._random = random

    def concerns(self, hosts: frozenset[str]) -> bool:
        """Return whether messages between the two hosts in `hosts` are late."""
        return self._hosts <= hosts

    def delay_s(self) -> float:
        """Return by how many seconds the next message is late."""
        return self._random.uniform(self._max_delay_s / 2, self._max_delay_s)


# -- Transports --------

WINDOW = 256 << 10
"""The maximum number of bytes in flight or unread in one direction of a connection. The sender buffers the rest."""
HIGH, LOW = 64 << 10, 16 << 10
"""Above `HIGH` bytes in the send buffer `pause_writing` of the protocol is called, and at `LOW` bytes `resume_writing`."""


class SimTransport(asyncio.Transport):
    """One side of a simulated TCP connection, in the process `node`.

    `out` is the pipe to the peer and `into` the pipe from the peer. `own` and `peer` are the addresses of the two
    sides. `factory` makes the protocol when the handshake reaches this side. On the client side, the protocol is then
    the result of `established`.
    """

    def __init__(
        self,
        connection: Connection,
        node: Node,
        factory: Callable[[], asyncio.Protocol],
        established: asyncio.Future[asyncio.Protocol] | None,
        out: Pipe,
        into: Pipe,
        own: Any,
        peer: Any,
    ) -> None:
        super().__init__({"socket": SimSocket(own, peer), "sockname": own, "peername": peer})
        self.connection = connection
        self.node = node
        self.network = out.network
        self.out = out
        self.into = into
        out.source = into.destination = self
        self._factory = factory
        self._protocol: Any = None
        self._established = established
        self._buffer = bytearray()
        """The bytes that wait for space in the peer's window."""
        self.read_paused = False
        """True if the protocol has paused reading."""
        self._closing = False
        """True if the process has called `close` or `abort`."""
        self._eof_written = False
        """True if the process has called `write_eof`."""
        self._writing_paused = False
        """True if the protocol was asked to pause writing."""
        self._draining = False
        """True if a call of `_drain` is scheduled."""
        self.has_ended = False
        """True if the connection has ended on this side."""

    # -- for the protocol ---------------------------------------------------------------------------------

    def write(self, data: Any) -> None:
        """Send the bytes that fit into the peer's window, and buffer the rest.

        If more than `HIGH` bytes are buffered, `pause_writing` of the protocol is called.
        """
        if self._eof_written:
            raise RuntimeError("Cannot call write() after write_eof()")
        if self.has_ended or self._closing or not data or self.node.dead:
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
        """Half-close the connection: send FIN after the buffered bytes."""
        if not self._eof_written and not self.has_ended and not self._closing:
            self._eof_written = True
            if not self._buffer:
                self.out.send(END)

    def can_write_eof(self) -> bool:
        return True

    def get_write_buffer_size(self) -> int:
        """Return the number of bytes that wait for space in the peer's window."""
        return len(self._buffer)

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """Return the fixed limits, the lower one first."""
        return LOW, HIGH

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Do nothing: the limits are fixed."""

    def pause_reading(self) -> None:
        """Stop the delivery of received bytes to the protocol: the bytes stay in the kernel."""
        self.read_paused = True

    def resume_reading(self) -> None:
        """Deliver received bytes to the protocol again."""
        self.read_paused = False
        if not self._closing and not self.has_ended:
            self.into.schedule_delivery()

    def is_reading(self) -> bool:
        """Return whether received bytes are delivered to the protocol."""
        return not self.read_paused and not self._closing

    def is_closing(self) -> bool:
        """Return whether `close` or `abort` was called, or the connection has ended."""
        return self._closing or self.has_ended

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = cast("asyncio.Protocol", protocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        return cast("asyncio.BaseProtocol", self._protocol)

    def close(self) -> None:
        """End the connection once the buffered bytes are sent."""
        if self._closing or self.has_ended or self.node.dead:
            return
        self._closing = True
        self.into.schedule_delivery()
        if not self._buffer:
            self._shut_down("close")

    def abort(self) -> None:
        """End the connection at once, and drop the buffered bytes."""
        if self.has_ended or self.node.dead:
            return
        self._closing = True
        self._buffer.clear()
        self._shut_down("abort")

    # -- from the network ---------------------------------------------------------------------------------

    def segment_received(self, kind: str) -> None:
        """Process a segment without bytes: the handshake, FIN or RST."""
        if self.has_ended:
            return
        if kind is ESTABLISHED:
            self._protocol = self._factory()
            self._protocol.connection_made(self)
            if self._established is not None and not self._established.done():
                self._established.set_result(self._protocol)
        elif kind is RESET:
            self._finish("reset", ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"))
        elif not self._closing and self._protocol is not None:  # FIN
            self.network.observer.closed(self, "end")
            keeps_half_open = self._protocol.eof_received()
            if not keeps_half_open:
                self.close()

    def reading_paused(self) -> bool:
        """Return whether received bytes stay in the kernel because the process has paused reading."""
        return self.read_paused and not self.has_ended

    def data_received(self, data: bytes) -> None:
        """Pass bytes to the protocol, or reply with RST if the connection has ended on this side."""
        if self.has_ended:
            self.out.send(RESET)
        elif not self._closing and data:
            self.network.observer.received(self, data)
            self._protocol.data_received(data)

    def drain_soon(self) -> None:
        """Schedule the sending of buffered bytes, because the peer's window has space again."""
        if self._buffer and not self._draining:
            self._draining = True
            self.network.loop.call_soon(self._drain, context=self.node.context)

    def _drain(self) -> None:
        """Send the buffered bytes that fit into the peer's window.

        Resumes the protocol if the buffer has shrunk to `LOW` bytes. Completes a `close` or `write_eof` if the buffer
        is empty now.
        """
        self._draining = False
        room = max(0, WINDOW - self.out.buffered)
        if self.has_ended or not self._buffer or not room:
            return
        self.out.send(DATA, bytes(self._buffer[:room]))
        del self._buffer[:room]
        if self._writing_paused and len(self._buffer) <= LOW:
            self._writing_paused = False
            self._protocol.resume_writing()
        if not self._buffer:
            if self._closing:
                self._shut_down("close")
            elif self._eof_written:
                self.out.send(END)

    def reset(self) -> None:
        """End this side because its kernel has detected that the connection is broken."""
        if not self.has_ended and not self.node.dead:
            self._finish("reset", ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"))

    def on_crash(self) -> None:
        """End this side after its process has crashed.

        Bytes in flight still arrive at the peer, followed by FIN or RST from the kernel. If the machine has lost power
        (`Connection.silent`), neither FIN nor RST is sent.
        """
        if not self.has_ended:
            self.has_ended = True
            self.network.observer.closed(self, "kill")
            if self.connection.silent:
                self.out.broken = True
            else:
                self.out.send(RESET if self._has_unread() else END)
            self.into.reschedule_delivery()

    def _shut_down(self, how: str) -> None:
        """End this side because its process ends the connection. `how` is `close` or `abort`.

        The peer gets FIN. As in TCP, the peer gets RST instead if the process aborts or leaves received bytes unread.
        """
        if how == "abort" or self._has_unread():
            if self.network.delays.reset_discards_data():  # by the seed: the RST overtakes data in flight
                self.out.clear()
            self.out.send(RESET)
        elif not self._eof_written:
            self.out.send(END)
        self._finish(how, None)

    def _has_unread(self) -> bool:
        """Return whether the peer has sent bytes that the process has not read."""
        return any(segment.kind is DATA for segment in self.into.segments)

    def _finish(self, how: str, error: Exception | None) -> None:
        """Mark this side as ended, and notify the observer and the protocol.

        `how` is passed to `Observer.closed`, and `error` to `connection_lost` of the protocol. If the protocol does not
        exist yet, the pending `connect` raises `error`.
        """
        self.has_ended = True
        self._buffer.clear()
        self.network.observer.closed(self, how)
        self.network.remove_if_ended(self.connection)
        if self._protocol is not None:
            self.network.loop.call_soon(self._protocol.connection_lost, error, context=self.node.context)
        elif self._established is not None and not self._established.done():
            self._established.set_exception(error or ConnectionAbortedError(errno.ECONNABORTED, "aborted"))


class Connection:
    """A TCP connection: the transports of client and server, and a pipe for each direction.

    `client` is the node that connects. Its protocol, which `factory` makes, is the result of `established`.
    """

    def __init__(
        self,
        network: Network,
        number: int,
        client: Node,
        factory: Callable[[], asyncio.Protocol],
        established: asyncio.Future[asyncio.Protocol],
        listener: Listener,
    ) -> None:
        self.number = number
        self.address = address = listener.address
        server = listener.node
        hosts = frozenset((client.host, server.host))
        to_server, to_client = Pipe(network, hosts), Pipe(network, hosts)
        client_address = (client.host, 40_000 + number)
        self.client = SimTransport(
            self, client, factory, established, out=to_server, into=to_client, own=client_address, peer=address
        )
        self.server = SimTransport(
            self, server, listener.factory, None, out=to_client, into=to_server, own=address, peer=client_address
        )
        self.silent = False
        """True if the machine of one side has lost power, so that this side sends nothing any more."""

    def __repr__(self) -> str:
        return f"<{self.client.node.name}-{self.server.node.name}#{self.number}>"
