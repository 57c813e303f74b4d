"""What every client does: take the lock, read, think, write one more, give the lock back."""

from __future__ import annotations

import asyncio
import random
from typing import Protocol

from faults.watch import Grant, Watch

KEYS = ("counters/1", "counters/2", "counters/3")
HOLD_MS = 120_000
THINK_S = 0.004
PAUSE_S = 0.02
SLEEPY = 0.01
"""The share of locks whose holder sleeps until they have timed out, and writes then."""
NAP_MS = (60, 120)


class Client(Protocol):
    """One of the kinds."""

    name: str
    secret: str

    async def lock(self, keys: tuple[str, ...], hold_ms: int) -> Grant | None:
        """Wait for a lock."""

    async def extend(self, hold_ms: int) -> None:
        """Let its hold begin anew."""

    async def release(self) -> str:
        """Give it back."""

    def drop(self) -> None:
        """Lose the connection on purpose."""

    async def leave(self) -> None:
        """Be gone, with nothing left behind."""

    async def close(self) -> None:
        """Be gone."""


class Worker:
    """One client at its work until it is told to stop, which it does between two locks."""

    def __init__(self, client: Client, watch: Watch, seed: str, drops: float) -> None:
        self.client = client
        self._watch = watch
        self._random = random.Random(f"{seed} works as {client.name}")
        self._drops = drops
        """How often it loses its connection on purpose."""
        self.stopping = False

    async def run(self) -> None:
        """Cycle by cycle."""
        while not self.stopping:
            await self._cycle()
            self._watch.cycles[self.client.name] += 1
            if self._random.random() < self._drops:
                self.client.drop()
            await asyncio.sleep(self._random.uniform(0, PAUSE_S))

    async def _cycle(self) -> None:
        random_, watch = self._random, self._watch
        keys = tuple(random_.sample(KEYS, 1 if random_.random() < 0.7 else 2))
        sleepy = random_.random() < SLEEPY
        hold_ms = random_.randint(*NAP_MS) if sleepy else HOLD_MS
        grant = await self.client.lock(keys, hold_ms)
        if grant is None:
            watch.counts["lost unheard"] += 1
            return
        values = {key: watch.read(grant, key) for key in keys}
        await asyncio.sleep(random_.uniform(0, THINK_S))
        if sleepy:
            watch.counts["naps"] += 1
            await asyncio.sleep(hold_ms / 1000 + random_.uniform(0, 0.05))
        elif random_.random() < 0.1:
            await self.client.extend(HOLD_MS)
        for key, value in values.items():
            if value is not None:
                watch.write(grant, key, value + 1)
        watch.left(grant)
        reason = await self.client.release()
        if reason == "transaction-timeout":
            watch.counts["timed out"] += 1
