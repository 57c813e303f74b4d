"""The workload of each client: acquire locks, read the counters, wait, write them incremented, release."""

from __future__ import annotations

import asyncio
import random
from typing import Protocol

from faults.checker import KEYS, POOL, Checker, Grant

HOLD_MS = 120_000
THINK_TIME_S = 0.004
PAUSE_S = 0.02
POOL_RATIO = 0.25
"""The share of cycles that lock a unit of the pool instead of counters."""
TIMEOUT_RATIO = 0.01
"""The share of locks whose holder waits until they have timed out, and then writes."""
SHORT_HOLD_MS = (60, 120)


class Client(Protocol):
    """A wire client or a library client."""

    name: str
    secret: str

    async def lock(self, keys: tuple[str, ...], hold_ms: int) -> Grant | None:
        """Wait for a lock."""

    async def extend(self, hold_ms: int) -> None:
        """Extend the lock."""

    async def release(self) -> str:
        """Release the lock; return the reason of its end."""

    def drop(self) -> None:
        """Abort the connection."""

    async def leave(self) -> None:
        """End the session, and close the client."""

    async def close(self) -> None:
        """Close the client."""


class Worker:
    """Runs the workload of one client until `stopping` is set; it stops between two cycles."""

    def __init__(self, client: Client, checker: Checker, seed: str, drop_probability: float) -> None:
        self.client = client
        self._checker = checker
        self._random = random.Random(f"{seed} works as {client.name}")
        self._drop_probability = drop_probability
        """The probability of aborting the connection after a cycle."""
        self.stopping = False

    async def run(self) -> None:
        """Run cycles until stopped."""
        while not self.stopping:
            await self._cycle()
            self._checker.cycles[self.client.name] += 1
            if self._random.random() < self._drop_probability:
                self.client.drop()
            await asyncio.sleep(self._random.uniform(0, PAUSE_S))

    async def _cycle(self) -> None:
        random_, checker = self._random, self._checker
        keys = tuple(random_.sample(KEYS, random_.choice((1, 1, 1, 1, 1, 2, 2, 3))))
        if random_.random() < POOL_RATIO:
            keys = (POOL,)
        waits_for_timeout = random_.random() < TIMEOUT_RATIO
        hold_ms = random_.randint(*SHORT_HOLD_MS) if waits_for_timeout else HOLD_MS
        grant = await self.client.lock(keys, hold_ms)
        if grant is None:
            checker.counts["timed out before the notification"] += 1
            return
        values = {key: checker.read(grant, key) for key in keys if key != POOL}
        await asyncio.sleep(random_.uniform(0, THINK_TIME_S))
        if waits_for_timeout:
            checker.counts["holders waiting for the timeout"] += 1
            await asyncio.sleep(hold_ms / 1000 + random_.uniform(0, 0.05))
        elif random_.random() < 0.1:
            await self.client.extend(HOLD_MS)
        for key, value in values.items():
            if value is not None:
                checker.write(grant, key, value + 1)
        checker.lost(grant)
        reason = await self.client.release()
        if reason == "transaction-timeout":
            checker.counts["timed out"] += 1
