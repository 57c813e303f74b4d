"""The asyncio lock of redis-py, with default settings."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import redis.asyncio

from benchmarks.peers.peer import HOLD_MS, HOST, Cycle, LibraryPeer, PeerFailed, Running
from benchmarks.peers.redis_server import missing, redis_server
from benchmarks.peers.redis_set import DELETE_OURS


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


class RedisPyPipelined(RedisPy):
    """The commands of the lock, for several keys in one pipeline. It cannot wait: a key that is locked is an error."""

    name = "Redis, redis-py's pipeline"
    slug = "redis-py-pipeline"
    depths = frozenset({16})
    batch = 16

    @asynccontextmanager
    async def client(self, running: Running, connections: int) -> AsyncIterator[Cycle]:
        """See `LibraryPeer`."""
        async with redis.asyncio.Redis(host=HOST, port=running.port, max_connections=connections) as client:
            digest = await client.script_load(DELETE_OURS)

            async def cycle(key: str) -> None:
                keys, token = [f"{key}/{number}" for number in range(self.batch)], secrets.token_hex(16)
                async with client.pipeline(transaction=False) as pipeline:
                    for each in keys:
                        pipeline.set(each, token, nx=True, px=HOLD_MS)
                    if not all(await pipeline.execute()):
                        raise PeerFailed("a key is locked")
                    for each in keys:
                        pipeline.evalsha(digest, 1, each, token)
                    if not all(await pipeline.execute()):
                        raise PeerFailed("a lock was lost")

            yield cycle
