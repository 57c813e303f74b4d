"""Counts the work of a server for one cycle: `python -m work.lockstep SHAPE [REDIS_PORT NAMESPACE]` prints it as JSON.

A cycle is a request, `queued`, `locked`, a release and `released`. The server and its clients run in this one process and
take turns. The clients send only when the server waits for input, and the server runs only when all that they sent can be
read. Meanwhile time stands still, so no timer fires. Replies of Redis are read when the server has nothing else to do. So
the order of all inputs, and with it every count, is the same in each run, however busy the machine is.
"""

from __future__ import annotations

import _socket
import asyncio
import gc
import json
import os
import re
import select
import selectors
import socket
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from work.clock import Clock, real_monotonic  # isort: skip - before other modules import the clock

import hiredis
import orjson

from genie.config import Settings
from genie.observability import logs
from genie.server.app import Server
from genie.storage.redis import checkpoint
from work.opcodes import AllocationCounter, OpcodeCounter

WAIT_S = 60.0
"""A generous time limit for input that must arrive."""


@dataclass(frozen=True)
class Shape:
    """A kind of load."""

    connections: int
    depth: int
    """Requests in flight on each connection."""
    hot: bool
    """True if all requests lock the same key, or each one a key of its own."""
    lock: str = field(default="exclusive", kw_only=True)
    """What a request asks for: `exclusive`, or units such as `1/32`."""
    idle: str = field(default="", kw_only=True)
    """A lock that another connection holds all the time."""
    warm_up: int
    """Steps before the count begins. After them all caches and tables have their size."""
    steps: int
    """Counted steps. In each step, each client that has something to send sends it."""
    allocation_steps: int
    """Further steps, in which only allocations are counted, because that is slow."""


SHAPES: Final = {
    "one connection": Shape(1, 1, hot=False, warm_up=100, steps=200, allocation_steps=40),
    "64 connections": Shape(64, 1, hot=False, warm_up=8, steps=16, allocation_steps=2),
    "64 x 16": Shape(64, 16, hot=False, warm_up=3, steps=1, allocation_steps=1),
    "hot key": Shape(64, 1, hot=True, warm_up=128, steps=128, allocation_steps=16),
    "units": Shape(64, 1, hot=False, lock="1/32", warm_up=8, steps=16, allocation_steps=2),
    "hot units": Shape(64, 1, hot=True, lock="1/32", warm_up=16, steps=8, allocation_steps=2),
    "beside a subtree": Shape(64, 1, hot=False, idle="exclusive:orders/**", warm_up=8, steps=16, allocation_steps=2),
}


# -- the clients --------------------------------------------------------------------------------------

IDLE, SENT, QUEUED, LOCKED, RELEASING = range(5)


class Slot:
    """A sequence of cycles on a connection, one at a time."""

    def __init__(self, resource: str) -> None:
        payload = {"resources": [resource]}
        self.request = orjson.dumps({"command": "request", "payload": payload}) + b"\n"
        self.state = IDLE
        self.id = 0

    def command(self) -> bytes:
        """Return the next command to send; empty while the slot waits for a reply."""
        if self.state == IDLE:
            self.state = SENT
            return self.request
        if self.state == LOCKED:
            self.state = RELEASING
            return b'{"command":"release","payload":{"id":%d}}\n' % self.id
        return b""


class Client:
    """One connection to the server."""

    def __init__(self, port: int, slots: list[Slot]) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.fd = self.sock.fileno()
        self.slots = slots
        self.by_id: dict[int, Slot] = {}
        self.unacknowledged: deque[Slot] = deque()
        self.partial = b""
        self.cycles = 0

    def send(self, slots: list[Slot]) -> bool:
        """Send the next command of each of these slots in one piece. Return whether there was one."""
        data = b""
        for slot in slots:
            command = slot.command()
            if slot.state == SENT and command:
                self.unacknowledged.append(slot)
            data += command
        assert not data or os.write(self.fd, data) == len(data)
        return bool(data)

    def receive(self) -> None:
        """Read what has arrived, without waiting."""
        data = os.read(self.fd, 1 << 20)
        assert data, "the server closed a connection"
        *lines, self.partial = (self.partial + data).split(b"\n")
        for line in lines:
            message = orjson.loads(line)
            self.on_message(message["command"], message["payload"])

    def on_message(self, command: str, payload: dict[str, Any]) -> None:
        if command == "queued":
            slot = self.unacknowledged.popleft()
            slot.id, slot.state = payload["id"], QUEUED
            self.by_id[slot.id] = slot
        elif command == "locked":
            self.by_id[payload["id"]].state = LOCKED
        else:
            assert command == "released", (command, payload)
            assert payload["reason"] == "success", payload
            self.by_id.pop(payload["id"]).state = IDLE
            self.cycles += 1


class Clients:
    """All clients of a shape."""

    def __init__(self, shape: Shape, port: int) -> None:
        self.shape = shape
        self.all = [
            Client(
                port,
                [
                    Slot(f"{shape.lock}:{'hot' if shape.hot else f'accounts/{number}/{slot}'}")
                    for slot in range(shape.depth)
                ],
            )
            for number in range(shape.connections)
        ]
        self.slots = [slot for client in self.all for slot in client.slots]
        self.first_step = True

    @property
    def cycles(self) -> int:
        return sum(client.cycles for client in self.all)

    def send(self) -> list[Client]:
        """Send all commands that are due, and return the clients that sent.

        In the first step only every second slot sends. So in each later step half of the commands are requests and half
        are releases.
        """
        every = 2 if self.first_step and not self.shape.hot and len(self.slots) > 1 else 1
        self.first_step = False
        due = {id(slot) for slot in self.slots[::every]}
        return [client for client in self.all if client.send([slot for slot in client.slots if id(slot) in due])]

    @property
    def answered(self) -> bool:
        """True if the server has answered all commands, and has granted the hot key."""
        states = [slot.state for slot in self.slots]
        if self.shape.hot:
            return SENT not in states and RELEASING not in states and (LOCKED in states or QUEUED not in states)
        return all(state in {IDLE, LOCKED} for state in states)

    def close(self) -> None:
        for client in self.all:
            client.sock.close()


# -- the server ---------------------------------------------------------------------------------------


class Counts:
    """What the server did between `start` and `stop`."""

    def __init__(self, redis_port: int) -> None:
        self.counting = False
        self.reads = self.writes = self.polls = 0
        self.redis_bytes = self.redis_commands = 0
        self._redis_port = redis_port
        self._awaited: Counter[int] = Counter()
        """Commands without a reply on each connection to Redis."""
        self._active: set[int] = set()
        """Connections to Redis that sent a command since time stands still. Others may wait in a blocking command."""
        self._replies: defaultdict[int, hiredis.Reader] = defaultdict(hiredis.Reader)

    def start(self) -> None:
        """Start counting."""
        self.redis_commands -= commands_of_redis(self._redis_port)
        self.counting = True

    def stop(self) -> None:
        """Stop counting."""
        self.counting = False
        self.redis_commands += commands_of_redis(self._redis_port)

    def awaited(self) -> list[int]:
        """Return the connections to Redis on which the server awaits a reply."""
        return [fd for fd in sorted(self._active) if self._awaited[fd]]

    def wait_for_replies(self, fds: Iterable[int]) -> None:
        """Wait until all replies on these connections to Redis can be read, so that one read returns them all."""
        for fd in fds:
            end = real_monotonic() + WAIT_S
            while _available_replies(fd) < self._awaited[fd]:
                assert real_monotonic() < end, f"Redis has not replied to {self._awaited[fd]} commands"
                _readable([fd], 1)

    def totals(self) -> dict[str, int]:
        """Return the counts by name."""
        totals = {"reads": self.reads, "writes": self.writes, "polls": self.polls}
        if self._redis_port:
            totals |= {"redis_commands": self.redis_commands, "redis_bytes": self.redis_bytes}
        return totals

    def install(self) -> None:
        """Count the reads and writes of all sockets of the server. The clients do not use these methods."""
        counts = self
        plain_recv, plain_send = socket.socket.recv, socket.socket.send

        def recv(self: socket.socket, size: int) -> bytes:
            data = plain_recv(self, size)
            counts.reads += counts.counting
            if counts.is_redis(self):
                fd = self.fileno()
                counts._awaited[fd] -= _values(counts._replies[fd], data)
            return data

        def send(self: socket.socket, data: bytes) -> int:
            counts.writes += counts.counting
            if counts.is_redis(self):
                counts._awaited[self.fileno()] += _values(hiredis.Reader(), bytes(data))
                if Clock.frozen_at is not None:
                    counts._active.add(self.fileno())
                counts.redis_bytes += len(data) * counts.counting
            return plain_send(self, data)

        socket.socket.recv = recv  # type: ignore[method-assign,assignment]
        socket.socket.send = send  # type: ignore[method-assign,assignment]

    def is_redis(self, sock: socket.socket) -> bool:
        """True if this is a connection to Redis."""
        peer = sock.getpeername() if self._redis_port else None
        return type(peer) is tuple and peer[1] == self._redis_port


def _values(reader: hiredis.Reader, data: bytes) -> int:
    """Return how many commands or replies are complete with these bytes."""
    reader.feed(data)
    count = 0
    while reader.gets() is not False:
        count += 1
    return count


def _available_replies(fd: int) -> int:
    """Return how many replies can be read from a connection to Redis."""
    with socket.socket(fileno=os.dup(fd)) as sock:
        try:
            return _values(hiredis.Reader(), _socket.socket.recv(sock, 1 << 20, socket.MSG_PEEK))
        except BlockingIOError:
            return 0


def _peer_port(fd: int) -> int | None:
    """Return the port at the other end of a connection; None for other files."""
    try:
        with socket.socket(fileno=os.dup(fd)) as sock:
            return int(sock.getpeername()[1])
    except (OSError, IndexError):
        return None


class LockstepSelector(selectors.EpollSelector):
    """The selector of the server's event loop. From `begin` until the end of the count it lets the clients take turns."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self._counts = counts
        self._clients: Clients | None = None
        self._steps = 0
        """Steps until the next phase."""
        self._phases: Iterator[int] = iter(())
        """The begin of each phase; yields its number of steps."""
        self._server_side: dict[Client, selectors.SelectorKey] = {}
        self.finished = asyncio.Event()
        self.totals: dict[str, float] = {}
        """What was counted for one cycle."""

    def begin(self, clients: Clients) -> None:
        """Stop the time. From now on the server and these clients take turns."""
        keys = {_peer_port(key.fd): key for key in self.get_map().values()}
        self._server_side = {client: keys[client.sock.getsockname()[1]] for client in clients.all}
        self._clients = clients
        self._phases = self._count(clients, clients.shape)
        Clock.freeze()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """See `selectors.BaseSelector`. Without a timeout of 0, the server has nothing else to do."""
        if self._clients is None:
            return super().select(timeout)
        self._counts.polls += self._counts.counting
        if timeout is not None and timeout <= 0:
            return []
        if awaited := self._counts.awaited():
            self._counts.wait_for_replies(awaited)
            return [(self.get_map()[fd], selectors.EVENT_READ) for fd in awaited]
        while not self._clients.answered:
            by_fd = {client.sock.fileno(): client for client in self._clients.all}
            for fd in _readable(by_fd, 1):
                by_fd[fd].receive()
        if self._steps == 0:
            self._steps = next(self._phases, 0)
            if self._steps == 0:
                self._clients = None
                Clock.thaw()
                self.finished.set()
                return []
        self._steps -= 1
        senders = [self._server_side[client].fd for client in self._clients.send()]
        return self._ready(senders, len(senders))

    def _ready(self, fds: Collection[int], count: int) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait until this number of connections of the server can be read, and return them in a fixed order."""
        ready = _readable(fds, count)
        return [(self.get_map()[fd], selectors.EVENT_READ) for fd in fds if fd in ready]

    def _count(self, clients: Clients, shape: Shape) -> Iterator[int]:
        """Execute the phases: warm up, count all but allocations, and count allocations. Yields the steps of each phase."""
        yield shape.warm_up
        gc.collect()
        gc.disable()
        before, opcodes = clients.cycles, OpcodeCounter(_excludes)
        self._counts.start()
        opcodes.start()
        yield shape.steps
        opcodes.stop()
        self._counts.stop()
        cycles = clients.cycles - before
        before, allocations = clients.cycles, AllocationCounter(_excludes)
        allocations.start()
        yield shape.allocation_steps
        allocations.stop()
        self.totals = {
            "opcodes": opcodes.count / cycles,
            "allocations": allocations.count / (clients.cycles - before),
            **{name: count / cycles for name, count in self._counts.totals().items()},
        }


def _readable(fds: Collection[int], count: int) -> set[int]:
    """Wait until at least `count` of these connections can be read, and return all that can."""
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    end = real_monotonic() + WAIT_S
    while len(ready := {fd for fd, _ in poller.poll(100)}) < count:
        assert real_monotonic() < end, f"only {len(ready)} of {len(fds)} connections can be read"
    return ready


def _excludes(name: str) -> bool:
    """True if a file is not the server's: the event loop, or the clients."""
    return name.startswith((*EVENT_LOOP, str(Path(__file__).parent)))


EVENT_LOOP: Final = (str(Path(asyncio.__file__).parent), selectors.__file__, socket.__file__)
"""Not counted, because uvloop replaces it in production."""


def commands_of_redis(port: int) -> int:
    """Return how many commands this Redis has executed, including those of scripts, without INFO."""
    if not port:
        return 0
    reader = hiredis.Reader()
    with socket.create_connection(("127.0.0.1", port)) as sock:
        os.write(sock.fileno(), b"INFO commandstats\r\n")
        while (reply := reader.gets()) is False:
            reader.feed(os.read(sock.fileno(), 1 << 16))
    return sum(map(int, re.findall(rb"cmdstat_(?!info:)[^:]+:calls=(\d+)", reply)))


async def measure(shape: Shape, redis_port: int, namespace: str, selector: LockstepSelector) -> None:
    """Start a server, and let it serve the clients of a shape."""
    url = f"redis://127.0.0.1:{redis_port}/0" if redis_port else None
    server = Server(Settings.from_options(port=0, redis_url=url, namespaces=(namespace,)))
    _, port = await server.start()
    clients = Clients(shape, port)
    while len(server.connections) < shape.connections or not server.default_namespace.is_leader:  # noqa: ASYNC110 - no event
        await asyncio.sleep(0.001)
    idle = await lock(shape.idle, port) if shape.idle else None
    selector.begin(clients)
    await selector.finished.wait()
    clients.close()
    if idle is not None:
        idle.close()
    while len(server.connections):  # noqa: ASYNC110 - no event
        await asyncio.sleep(0.001)
    await server.stop()


async def lock(resource: str, port: int) -> asyncio.StreamWriter:
    """Lock a resource on a connection of its own, for longer than a count takes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    payload = {"resources": [resource], "transactionTimeout": 1000 * WAIT_S * 10}
    writer.write(orjson.dumps({"command": "request", "payload": payload}) + b"\n")
    assert [orjson.loads(await reader.readline())["command"] for _ in range(2)] == ["queued", "locked"]
    return writer


def main(shape: str, redis_port: int = 0, namespace: str = "genie") -> None:
    """Count one shape in this process, and print the counts for one cycle."""
    logs.configure("error", "json")
    checkpoint.CHECK_INTERVAL_S = WAIT_S * 10  # no checkpoint may begin before time stands still
    counts = Counts(redis_port)
    counts.install()
    selector = LockstepSelector(counts)
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        runner.run(measure(SHAPES[shape], redis_port, namespace, selector))
    print(json.dumps(selector.totals))


if __name__ == "__main__":
    main(sys.argv[1], *([int(sys.argv[2]), sys.argv[3]] if len(sys.argv) > 2 else []))
