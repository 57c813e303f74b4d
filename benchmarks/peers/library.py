"""The load for peers that are measured through their client library: a task for each connection."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from benchmarks.peers.counting import Count
from benchmarks.peers.figures import Sample
from benchmarks.peers.peer import Cycle, LibraryPeer, Running

AFTER_ERROR_S = 0.01


async def drive_library(
    peer: LibraryPeer, running: Running, keys: Sequence[str], seconds: float, warmup: float
) -> Sample:
    """Execute cycles on each of the keys, first for the warm-up, then for the measured time."""
    async with peer.client(running, len(keys)) as cycle:
        await _drive(cycle, peer.batch, running, keys, warmup)
        return await _drive(cycle, peer.batch, running, keys, seconds)


async def _drive(cycle: Cycle, batch: int, running: Running, keys: Sequence[str], seconds: float) -> Sample:
    count = Count(running, len(keys))
    end = time.perf_counter() + seconds

    async def work(number: int, key: str) -> None:
        while (began := time.perf_counter()) < end:
            try:
                await cycle(key)
            except Exception:  # noqa: BLE001 - a library's errors are its own
                count.errors += 1
                await asyncio.sleep(AFTER_ERROR_S)
            else:
                duration = time.perf_counter() - began
                for _ in range(batch):
                    count.cycle(number, duration)

    async with asyncio.TaskGroup() as tasks:
        for number, key in enumerate(keys):
            tasks.create_task(work(number, key))
        try:
            await asyncio.sleep(end - time.perf_counter())
        finally:
            end = 0.0  # where this is cancelled and a library keeps that from a task
        return count.sample()
