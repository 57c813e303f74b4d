"""The asyncio lock of redis-py, with default settings."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import redis.asyncio

from benchmarks.peers.peer import HOLD_MS, HOST, Cycle, LibraryPeer, Running
from benchmarks.peers.redis_server import missing, redis_server


class RedisPy(LibraryPeer):
    """A connection for each task. A waiting task retries every 0.1 s, the default."""

    name = "Redis, redis-py's `Lock`"
    slug = "redis-py"

    def missing(self) -> str | None:
        """See `Peer`."""
        return missing()

    @contextmanager
    def running(self, folder: Path, prefix: Sequence[str]) -> Iterator[Running]:
        """See `Peer`."""
        with redis_server(folder, prefix) as server:
            yield replace(server, versions=(*server.versions, f"redis-py {version('redis')}"))

    @asynccontextmanager
    async def client(self, running: Running, connections: int) -> AsyncIterator[Cycle]:
        """See `LibraryPeer`."""
        async with redis.asyncio.Redis(host=HOST, port=running.port, max_connections=connections) as client:

            async def cycle(key: str) -> None:
                async with client.lock(key, timeout=HOLD_MS / 1000):
                    pass

            yield cycle
