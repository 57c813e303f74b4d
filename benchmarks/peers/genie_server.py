"""Genie: the server of this checkout with its locks in memory or in Redis, and its client library."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from importlib.metadata import version
from pathlib import Path

import genie
from benchmarks.peers.peer import HOST, Cycle, LibraryPeer, Running, Step, Wire, WirePeer, open_socket
from benchmarks.peers.processes import accepts, free_port, serving
from benchmarks.peers.redis_server import missing, redis_server

LOCKED = re.compile(rb'"locked".*?"id":(\d+)')


@contextmanager
def genie_server(folder: Path, prefix: Sequence[str], redis: Running | None = None) -> Iterator[Running]:
    """Start a server on a free port. With a Redis, the CPU time of both counts."""
    port = free_port()
    command = [*prefix, sys.executable, "-m", "genie.cli", "serve", "--host", HOST, "--port", str(port)]
    command += ["--admin-port", ""]
    if redis is not None:
        command += ["--redis-host", HOST, "--redis-port", str(redis.port)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GENIE_")}
    environment |= {"GENIE_LOG_LEVEL": "warning", "PYTHONPATH": str(Path(genie.__file__).parents[1])}
    with serving(command, folder / "genie.log", lambda: accepts(port), environment=environment) as pid:
        pids, versions = (redis.pids, redis.versions) if redis else ((), ())
        yield Running(port, (pid, *pids), (f"Genie {version('genie-lock')}", *versions))


class GenieWire(Wire):
    """Sends a request, and then a release of the granted id."""

    def __init__(self, sock: socket.socket, key: str, number: int) -> None:
        lock = b'{"command":"request","payload":{"resources":["exclusive:%s"]}}\n' % key.encode()
        super().__init__(sock, number, lock=lock)

    def answer(self, data: bytes) -> Step:
        """See `Wire`."""
        if self.unlock:
            self.unlock = b""
            return Step.UNLOCKED if b'"success"' in data else Step.ERROR
        if found := LOCKED.search(data):
            self.unlock = b'{"command":"release","payload":{"id":%s}}\n' % found[1]
            return Step.LOCKED
        return Step.ERROR if b'"released"' in data or b'"error"' in data else Step.WAIT


class GenieMemory(WirePeer):
    """Genie with its locks in memory."""

    name = "Genie, in memory"
    slug = "genie-memory"

    @contextmanager
    def running(self, folder: Path, prefix: Sequence[str]) -> Iterator[Running]:
        """See `Peer`."""
        with genie_server(folder, prefix) as server:
            yield server

    def connect(self, running: Running, key: str, number: int) -> Wire:
        """See `WirePeer`."""
        return GenieWire(open_socket(running.port), key, number)


class GenieRedis(GenieMemory):
    """Genie with a separate Redis."""

    name = "Genie, in Redis"
    slug = "genie-redis"

    def missing(self) -> str | None:
        """See `Peer`."""
        return missing()

    @contextmanager
    def running(self, folder: Path, prefix: Sequence[str]) -> Iterator[Running]:
        """See `Peer`."""
        with redis_server(folder, prefix) as redis, genie_server(folder, prefix, redis) as server:
            yield server


class GenieClient(LibraryPeer):
    """Genie with its client library: one connection for all tasks."""

    name = "Genie, in Redis, its Python client"
    slug = "genie-client"

    def missing(self) -> str | None:
        """See `Peer`."""
        return missing()

    def running(self, folder: Path, prefix: Sequence[str]) -> AbstractContextManager[Running]:
        """See `Peer`."""
        return GenieRedis().running(folder, prefix)

    @asynccontextmanager
    async def client(self, running: Running, connections: int) -> AsyncIterator[Cycle]:
        """See `LibraryPeer`."""
        del connections
        async with genie.connect(HOST, running.port) as client:

            async def cycle(key: str) -> None:
                async with client.lock(key):
                    pass

            yield cycle
