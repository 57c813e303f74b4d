"""A network in memory for `SimLoop`: TCP connections that are slow, cut, half-open, or fine.

The bytes of one connection arrive in order, in arbitrary pieces and after arbitrary times; different connections know
nothing of each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Self

from genie.testing.loop import NODE, Node, SimLoop
from genie.testing.pipe import BEGIN
from genie.testing.sockets import SimSocket
from genie.testing.traffic import Delays, Observer, Silent
from genie.testing.transport import KEEPALIVE_S, Connection, SimTransport


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
