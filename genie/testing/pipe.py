"""One direction of a connection of a simulated network: what is on its way, and when it arrives."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from genie.testing.network import Network
    from genie.testing.transport import SimTransport

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
