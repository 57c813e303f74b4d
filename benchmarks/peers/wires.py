"""The load for peers that are measured by their protocol: one thread, epoll, and bytes made by hand."""

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
"""How long a refused client waits before it asks again: a random time between these."""
STALLED_S = 15.0
"""If nothing at all has come for so long, nothing will."""


class Drive:
    """Cycles on each of the connections, until a time is over; the last ones are let end."""

    def __init__(self, wires: Sequence[Wire], running: Running) -> None:
        self.wires = {wire.sock.fileno(): wire for wire in wires}
        self.count = Count(running, len(wires))
        self.later: list[tuple[float, int]] = []
        """When to ask again, and on which connection."""
        self.under_way = len(wires)
        self.over = False

    def run(self, seconds: float) -> Sample:
        """Drive them for so long. PeerFailed where nothing comes any more."""
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
        """Ask again where it is time to, and say how long nothing is to be done."""
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
