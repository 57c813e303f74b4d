"""Measures the duration of each iteration of an event loop, by a callback that runs in every
iteration.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections import Counter
from typing import Any


class Longest:
    """Reads the clock in every iteration of the event loop, from its creation until `stop`.
    Meanwhile the loop never sleeps.
    """

    def __init__(self) -> None:
        self.seconds_ms: list[float] = []
        """Of each second, the CPU time of the loop's thread in the longest iteration.

        In a virtual machine it may sometimes be too long, by time that the host gave to others.
        """
        self.wall_ms = 0.0
        """The longest iteration by the wall clock."""
        self.turns = 0
        self.collector_ms = 0.0
        """The longest pause of the garbage collector, which is not included in the others: it
        traverses the locks.
        """
        self.collections: Counter[int] = Counter()
        """How often the garbage collector ran, by generation."""
        self._collecting_s = self._collected_s = 0.0
        gc.callbacks.append(self._collector)
        self._loop = asyncio.get_running_loop()
        self._cpu_s, self._wall_s = time.thread_time(), time.perf_counter()
        self._longest_ms, self._until_s = 0.0, self._wall_s + 1
        self._next = self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        cpu_s, wall_s = time.thread_time(), time.perf_counter()
        if wall_s >= self._until_s:
            self.seconds_ms.append(self._longest_ms)
            self._longest_ms, self._until_s = 0.0, wall_s + 1
        self._longest_ms = max(self._longest_ms, (cpu_s - self._cpu_s - self._collected_s) * 1000)
        self.wall_ms = max(self.wall_ms, (wall_s - self._wall_s) * 1000)
        self.turns += 1
        self._cpu_s, self._wall_s, self._collected_s = cpu_s, wall_s, 0.0
        self._next = self._loop.call_soon(self._turn)

    def _collector(self, phase: str, about: dict[str, Any]) -> None:
        if phase == "start":
            self._collecting_s = time.thread_time()
            return
        took_s = time.thread_time() - self._collecting_s
        self._collected_s += took_s
        self.collector_ms = max(self.collector_ms, took_s * 1000)
        self.collections[about["generation"]] += 1

    def stop(self) -> None:
        """Stop measuring."""
        self._next.cancel()
        gc.callbacks.remove(self._collector)
