"""The load for peers that are measured by their protocol: one thread, epoll, and messages encoded
in advance.
"""

from __future__ import annotations

import heapq
import random
import select
import time
from collections.abc import Sequence

from benchmarks.peers.counting import Count
from benchmarks.peers.figures import Sample
from benchmarks.peers.peer import PeerFailed, Running, Step, Wire

RETRY_S = (0.001, 0.005)
"""The range of the random time after which a rejected client retries."""
STALLED_S = 15.0
"""Timeout without any received byte."""


class Drive:
    """Executes cycles on each of the connections for some time; the last cycles are completed."""

    def __init__(self, wires: Sequence[Wire], running: Running) -> None:
        self.wires = {wire.sock.fileno(): wire for wire in wires}
        self.count = Count(running, len(wires))
        self.later: list[tuple[float, int]] = []
        """When to retry, and on which connection."""
        self.under_way = len(wires)
        self.over = False

    def run(self, seconds: float) -> Sample:
        """Run the connections for this time. PeerFailed if no more bytes are received."""
        sample = None
        with select.epoll() as poller:
            for number, wire in self.wires.items():
                poller.register(number, select.EPOLLIN)
                self._begin(wire)
            end = time.perf_counter() + seconds
            while self.under_way:
                now = time.perf_counter()
                if now >= end and sample is None:
                    self.over = True
                    sample = self.count.sample()
                ready = poller.poll(self._again(now))
                if not ready and not self.later:
                    raise PeerFailed(f"nothing came for {STALLED_S:.0f} s")
                for number, _ in ready:
                    wire = self.wires[number]
                    self._came(wire, wire.sock.recv(65536))
        return sample or self.count.sample()

    def _begin(self, wire: Wire) -> None:
        wire.began = time.perf_counter()
        wire.sock.send(wire.lock)

    def _again(self, now: float) -> float:
        """Retry on the connections that are due; return the time until the next one."""
        later = self.later
        while later and later[0][0] <= now:
            wire = self.wires[heapq.heappop(later)[1]]
            wire.sock.send(wire.lock)
        return later[0][0] - now if later else STALLED_S

    def _came(self, wire: Wire, data: bytes) -> None:
        if not data:
            raise PeerFailed("closed a connection")
        step = wire.read(data)
        if step is Step.LOCKED:
            wire.sock.send(wire.unlock)
        elif step is Step.UNLOCKED:
            if self.over:
                self.under_way -= 1
                return
            self.count.cycle(wire.number, time.perf_counter() - wire.began)
            self._begin(wire)
        elif step is not Step.WAIT:
            if step is Step.REFUSED:
                self.count.refused += 1
            else:
                self.count.errors += 1
            heapq.heappush(self.later, (time.perf_counter() + random.uniform(*RETRY_S), wire.sock.fileno()))
