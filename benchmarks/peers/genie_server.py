"""Genie: the server of this checkout with its locks in memory or in Redis, and its client library."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from functools import cache
from importlib.metadata import version
from pathlib import Path

import genie
from benchmarks.against_parts.builds import of_working_tree
from benchmarks.peers.peer import HOST, Cycle, LibraryPeer, Pipeline, Running, Step, Wire, WirePeer, open_socket
from benchmarks.peers.processes import executes, free_port, serving
from benchmarks.peers.redis_server import missing, redis_server

MESSAGE = re.compile(rb'"command":"(.)[^\n]*?"id":(\d+)')
LOCKED = re.compile(rb'"locked".*?"id":(\d+)')


@contextmanager
def genie_server(
    folder: Path, prefix: Sequence[str], redis: Running | None = None, package: Path | None = None
) -> Iterator[Running]:
    """Start a server on a free port. With a Redis, the CPU time of both counts.

    `package` is the folder of the package `genie`; None: that of this process.
    """
    port = free_port()
    command = [*prefix, sys.executable, "-m", "genie.cli", "serve", "--host", HOST, "--port", str(port)]
    command += ["--admin-port", ""]
    if redis is not None:
        command += ["--redis-host", HOST, "--redis-port", str(redis.port)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GENIE_")}
    environment |= {"GENIE_LOG_LEVEL": "warning", "PYTHONPATH": str(package or Path(genie.__file__).parents[1])}
    with serving(command, folder / "genie.log", lambda: executes(port), environment=environment) as pid:
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


class GeniePipeline(Pipeline):
    """The server replies `queued` in the order of the requests; other messages have the id."""

    def __init__(self, sock: socket.socket, keys: Sequence[str], number: int) -> None:
        super().__init__(sock, number)
        self._requests = [
            b'{"command":"request","payload":{"resources":["exclusive:%s"]}}\n' % k.encode() for k in keys
        ]
        self._ids = [b""] * len(keys)
        self._unacknowledged: deque[int] = deque()
        self._by_id: dict[bytes, int] = {}
        self._partial = b""

    def lock(self, key: int) -> bytes:
        """See `Pipeline`."""
        self._unacknowledged.append(key)
        return self._requests[key]

    def unlock(self, key: int) -> bytes:
        """See `Pipeline`."""
        return b'{"command":"release","payload":{"id":%s}}\n' % self._ids[key]

    def read(self, data: bytes) -> Sequence[tuple[int, Step]]:
        """See `Pipeline`."""
        data = self._partial + data
        end = data.rfind(b"\n") + 1
        self._partial = data[end:]
        changes = []
        for kind, id_ in MESSAGE.findall(data, 0, end):
            if kind == b"q":
                self._by_id[id_] = key = self._unacknowledged.popleft()
                self._ids[key] = id_
            elif kind == b"l":
                changes.append((self._by_id[id_], Step.LOCKED))
            else:
                changes.append((self._by_id.pop(id_), Step.UNLOCKED if kind == b"r" else Step.ERROR))
        return changes


class GenieMemory(WirePeer):
    """Genie with its locks in memory."""

    name = "Genie, in memory"
    slug = "genie-memory"
    depths = frozenset({1, 16})

    @contextmanager
    def running(self, folder: Path, prefix: Sequence[str]) -> Iterator[Running]:
        """See `Peer`."""
        with genie_server(folder, prefix) as server:
            yield server

    def connect(self, running: Running, key: str, number: int) -> Wire:
        """See `WirePeer`."""
        return GenieWire(open_socket(running.port), key, number)

    def pipeline(self, running: Running, keys: Sequence[str], number: int) -> Pipeline:
        """See `WirePeer`."""
        return GeniePipeline(open_socket(running.port), keys, number)


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


class GenieMemoryCompiled(GenieMemory):
    """Genie with its locks in memory, compiled by mypyc."""

    name = "Genie, in memory, compiled"
    slug = "genie-memory-compiled"

    def missing(self) -> str | None:
        """See `Peer`."""
        try:
            compiled_package()
        except SystemExit as error:
            return str(error)
        return None

    @contextmanager
    def running(self, folder: Path, prefix: Sequence[str]) -> Iterator[Running]:
        """See `Peer`."""
        with genie_server(folder, prefix, package=compiled_package()) as server:
            yield server


class GenieRedisCompiled(GenieMemoryCompiled):
    """Genie with a separate Redis, compiled by mypyc."""

    name = "Genie, in Redis, compiled"
    slug = "genie-redis-compiled"

    def missing(self) -> str | None:
        """See `Peer`."""
        return missing() or super().missing()

    @contextmanager
    def running(self, folder: Path, prefix: Sequence[str]) -> Iterator[Running]:
        """See `Peer`."""
        with (
            redis_server(folder, prefix) as redis,
            genie_server(folder, prefix, redis, package=compiled_package()) as server,
        ):
            yield server


@cache
def compiled_package() -> Path:
    """Compile the working tree, once for each run. SystemExit if it cannot be compiled."""
    print("compiling Genie", flush=True)
    return of_working_tree(compiled=True).folder


class GenieClient(LibraryPeer):
    """Genie with its client library: one connection for all tasks."""

    name = "Genie, in Redis, its Python client"
    slug = "genie-client"
    depths = frozenset({1, 16})

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
