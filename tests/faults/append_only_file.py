"""The append-only file of a Redis, which loses its end as if the machine had failed before the last fsync."""

from __future__ import annotations

import asyncio
import os
import time

from redises.group import until
from support.processes.servers import Redis

SAMPLE_INTERVAL_S = 0.005
OPTIONS = ("--appendfsync", "everysec", "--auto-aof-rewrite-percentage", "0")
"""A Redis with these options writes to one file only: it does not rewrite the file."""


class AppendOnlyFile:
    """The file to which a Redis appends. `watch` samples its size, so that `cut` knows the size at an earlier time."""

    def __init__(self, redis: Redis) -> None:
        files = [
            *redis.folder.glob("appendonlydir/*.incr.aof"),
            *redis.folder.glob("appendonly.aof"),
        ]  # Redis 7, Redis 6
        (self._path,) = files
        self._sizes = [(time.monotonic(), self._size)]
        """When a size was sampled, and the size: since the last `cut`, after which the file was on the disk."""

    @property
    def _size(self) -> int:
        return self._path.stat().st_size

    async def watch(self) -> None:
        """Sample the size until cancelled."""
        while True:
            self._sizes.append((time.monotonic(), self._size))
            await asyncio.sleep(SAMPLE_INTERVAL_S)

    async def wait_until_written(self) -> None:
        """Wait until Redis writes to the file."""
        size = self._size

        async def is_written() -> bool:
            return self._size != size

        await until("Redis writes to its file", is_written)

    def cut(self, since: float) -> int:
        """Remove what Redis has written since a time, but nothing from before the last `cut`; return how many bytes."""
        before = self._size
        size = max((sample for sample in self._sizes if sample[0] <= since), default=self._sizes[0])[1]
        os.truncate(self._path, size)
        self._sizes = [(time.monotonic(), size)]
        return before - size
