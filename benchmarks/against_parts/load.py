"""The load: one thread, epoll, and as little work as possible for each message, so that the server is the bottleneck."""

from __future__ import annotations

import gc
import re
import select
import time
from collections import deque
from dataclasses import dataclass
from random import Random

from benchmarks.peers.peer import PeerFailed, open_socket
from benchmarks.peers.processes import cpu_s

MESSAGE = re.compile(rb'"command": ?"(.)[^\n]*?"id": ?(\d+)')
"""The first letter of a message, and its id: `queued`, `locked`, `released`. An error may have no id."""
RELEASE = b'{"command":"release","payload":{"id":%s}}\n'
STALLED_S = 15.0
"""Timeout without any received byte."""
READ_BYTES = 1 << 18


@dataclass(frozen=True)
class Shape:
    """A kind of load."""

    title: str
    connections: int
    depth: int
    """Requests in flight on each connection."""
    resources: tuple[str, ...] = ("exclusive:accounts/{number}/{slot}",)
    """What the connections lock, in turns: formats of the number of the connection and of the request's slot on it."""
    transactions: bool = False
    """True if a cycle is a transaction: two requests, one after the other, then two releases."""


SHAPES = (
    Shape("one connection", 1, 1),
    Shape("64 connections", 64, 1),
    Shape("64 x 16", 64, 16),
    Shape("one hot key, 64", 64, 1, ("exclusive:hot",)),
    Shape("64, transactions", 64, 1, transactions=True),
)
OWN_UNITS = "1/2:accounts/{number}/{slot}"
UNIT_SHAPES = (
    Shape("64, own units", 64, 1, (OWN_UNITS,)),
    Shape("64 x 16, own units", 64, 16, (OWN_UNITS,)),
    Shape("64 on 32 units", 64, 1, ("1/32:hot",)),
)
"""The shapes in which a connection locks units, which older builds do not know."""


@dataclass(frozen=True)
class Sample:
    """The result of one measurement."""

    rate: float
    """Cycles a second."""
    server_us: float
    """CPU time of the server for a cycle."""
    load_share: float
    """CPU usage of the load, as a share of one processor."""


class Connection:
    """Executes cycles on one connection: a request, and a release when it is granted."""

    def __init__(self, port: int, number: int, shape: Shape) -> None:
        self.sock = open_socket(port)
        resource = shape.resources[number % len(shape.resources)]
        names = [resource.format(number=number, slot=slot).encode() for slot in range(shape.depth)]
        self.requests = [b'{"command":"request","payload":{"resources":["%s"]}}\n' % name for name in names]
        self.unacknowledged = deque(self.requests)
        """Requests without an id. The server sends the ids in order."""
        self.by_id: dict[bytes, bytes] = {}
        self.partial = b""

    def _read_messages(self) -> bytes:
        """Read what has arrived, and return its complete lines."""
        data = self.sock.recv(READ_BYTES)
        if not data:
            raise PeerFailed("the server closed a connection")
        if self.partial:
            data = self.partial + data
        end = data.rfind(b"\n") + 1
        self.partial = data[end:]
        return data[:end]

    def receive(self, *, restart: bool) -> int:
        """Read and answer what has arrived; return the number of completed cycles."""
        cycles = 0
        commands: list[bytes] = []
        by_id, unacknowledged = self.by_id, self.unacknowledged
        data = self._read_messages()
        for kind, id_ in MESSAGE.findall(data):
            if kind == b"q":
                by_id[id_] = unacknowledged.popleft()
            elif kind == b"l":
                commands.append(RELEASE % id_)
            elif kind == b"r":
                cycles += 1
                request = by_id.pop(id_)
                if restart:
                    unacknowledged.append(request)
                    commands.append(request)
            else:
                raise PeerFailed(f"unexpected message: {data[:200]!r}")
        if commands:
            self.sock.send(b"".join(commands))
        return cycles


class TransactionConnection(Connection):
    """Executes transactions on one connection, one at a time. Each locks a random account, then a random order.

    `unacknowledged` is empty when the last transaction has ended.
    """

    def __init__(self, port: int, number: int, shape: Shape) -> None:
        super().__init__(port, number, shape)
        self._number, self._random, self._count = number, Random(number), 0
        self._ids: list[bytes] = []
        self._released = 0
        self.requests = [self._request(b"accounts")]
        self.unacknowledged = deque(self.requests)

    def _request(self, kind: bytes) -> bytes:
        return (
            b'{"command":"request","payload":{"transactionName":"transfer-%d-%d","resources":["exclusive:%s/%d/%d"]}}\n'
            % (self._number, self._count, kind, self._number, self._random.randrange(1_000_000))
        )

    def receive(self, *, restart: bool) -> int:
        """Read and answer what has arrived; return the number of completed transactions."""
        commands: list[bytes] = []
        cycles = 0
        data = self._read_messages()
        for kind, id_ in MESSAGE.findall(data):
            if kind == b"l":
                self._ids.append(id_)
                if len(self._ids) == 1:
                    commands.append(self._request(b"orders"))
                else:
                    commands += [RELEASE % each for each in self._ids]
            elif kind == b"r":
                self._released += 1
                if self._released == len(self._ids) == 2:  # noqa: PLR2004 - both locks
                    cycles, self._count, self._released = cycles + 1, self._count + 1, 0
                    self._ids.clear()
                    if restart:
                        commands.append(self._request(b"accounts"))
                    else:
                        self.unacknowledged.clear()
            elif kind != b"q":
                raise PeerFailed(f"unexpected message: {data[:200]!r}")
        if commands:
            self.sock.send(b"".join(commands))
        return cycles


def measure(port: int, pid: int, shape: Shape, seconds: float, warm_up_s: float) -> Sample:
    """Execute cycles for some time. PeerFailed if the server does not reply."""
    connections: dict[int, Connection] = {}
    gc.collect()
    gc.disable()
    try:
        for number in range(shape.connections):
            connection = (TransactionConnection if shape.transactions else Connection)(port, number, shape)
            connections[connection.sock.fileno()] = connection
        return _run(connections, pid, seconds, warm_up_s)
    except OSError as error:
        raise PeerFailed(f"{type(error).__name__}: {error}") from error
    finally:
        gc.enable()
        for connection in connections.values():
            connection.sock.close()


def _run(connections: dict[int, Connection], pid: int, seconds: float, warm_up_s: float) -> Sample:
    """Start all cycles, measure after the warm-up, and let the last cycles end."""
    with select.epoll() as poller:
        for fd, connection in connections.items():
            poller.register(fd, select.EPOLLIN)
            connection.sock.send(b"".join(connection.requests))
        _execute(poller, connections, warm_up_s)
        cpu, own, began = cpu_s([pid]), time.process_time(), time.perf_counter()
        cycles = _execute(poller, connections, seconds)
        elapsed = time.perf_counter() - began
        server_s, load_s = cpu_s([pid])[pid] - cpu[pid], time.process_time() - own
        _end(poller, connections)
    if not cycles:
        raise PeerFailed("no cycle was completed")
    return Sample(cycles / elapsed, server_s / cycles * 1e6, load_s / elapsed)


def _execute(poller: select.epoll, connections: dict[int, Connection], seconds: float) -> int:
    """Execute cycles for some time, and return how many were completed."""
    cycles, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        ready = poller.poll(STALLED_S)
        if not ready:
            raise PeerFailed(f"received nothing for {STALLED_S:.0f} s")
        for fd, _ in ready:
            cycles += connections[fd].receive(restart=True)
    return cycles


def _end(poller: select.epoll, connections: dict[int, Connection]) -> None:
    """Start no further cycles, and wait until the last ones have ended, so that no key stays locked."""
    while any(connection.by_id or connection.unacknowledged for connection in connections.values()):
        ready = poller.poll(STALLED_S)
        if not ready:
            raise PeerFailed(f"received nothing for {STALLED_S:.0f} s")
        for fd, _ in ready:
            connections[fd].receive(restart=False)
