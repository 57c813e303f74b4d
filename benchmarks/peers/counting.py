"""Counters of a running load."""

from __future__ import annotations

import time

from benchmarks.peers.figures import Sample, percentile
from benchmarks.peers.peer import Running
from benchmarks.peers.processes import busy_s, cpu_s


class Count:
    """Counts cycles from its creation on, for this number of connections."""

    def __init__(self, running: Running, connections: int) -> None:
        self.errors = 0
        self.refused = 0
        self._cycles = [0] * connections
        self._durations: list[float] = []
        self._handed_over = 0
        self._last = -1
        self._pids = running.pids
        self._server_s = cpu_s(self._pids)
        self._busy_s, self._load_s, self._began = busy_s(), time.process_time(), time.perf_counter()

    def cycle(self, number: int, duration: float) -> None:
        """Count a cycle of a connection."""
        self._durations.append(duration)
        self._cycles[number] += 1
        if number != self._last:
            self._handed_over += 1
            self._last = number

    def sample(self) -> Sample:
        """Return the counts up to now."""
        seconds = time.perf_counter() - self._began
        load_s, all_s = time.process_time() - self._load_s, busy_s() - self._busy_s
        server_s = sum(now - self._server_s.get(pid, 0.0) for pid, now in cpu_s(self._pids).items())
        durations = sorted(self._durations)
        return Sample(
            cycles=len(durations),
            seconds=seconds,
            p50_us=percentile(durations, 0.5) * 1e6,
            p99_us=percentile(durations, 0.99) * 1e6,
            errors=self.errors,
            refused=self.refused,
            handed_over=self._handed_over,
            least=min(self._cycles),
            most=max(self._cycles),
            server_s=server_s,
            load_s=load_s,
            others_s=max(0.0, all_s - server_s - load_s),
        )
