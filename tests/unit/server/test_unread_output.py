"""The limits of what clients do not read: over all connections, and the time without progress."""

from __future__ import annotations

import asyncio
import itertools
import socket
import sys
from collections import deque
from contextlib import ExitStack

import pytest

from genie.config import Limits, Settings
from genie.server import byte_limit, connection, pipeline, unread_output
from genie.server.app import Server
from genie.server.connection import Connection
from genie.server.peer import MAX_BYTES_BEFORE_REPLY
from genie.server.unread_output import COMMAND_FACTOR, MAX_WRITE_BYTES, UnreadOutput
from genie.testing.simulation.loop import SimLoop, deterministic
from support.core.sliced_pipeline import Client, World
from support.network.recording_transport import RecordingTransport
from support.processes.servers import WAIT_S

MEGABYTE = 1 << 20
LOCK = b'{"command":"request","payload":{"resources":["exclusive:%d-%b"]}}\n'
LONG = "\U00010348".encode() * 450
WATCH = b'{"command":"watch","payload":{"prefix":""}}\n'


class SlowReader:
    """Has unread bytes until the test says that they were read, or it is closed."""

    def __init__(self, output: UnreadOutput) -> None:
        self.output, self.blocked_bytes, self.reason = output, 0, ""

    def receive(self, size: int) -> None:
        self.blocked_bytes += size
        self.output.add(self, size)

    def abort_slow_consumer(self, reason: str) -> None:
        self.blocked_bytes, self.reason = 0, reason


async def test_the_largest_are_closed_beyond_the_limit() -> None:
    output = UnreadOutput(1_000)
    small, large, reading = (SlowReader(output) for _ in range(3))
    small.receive(150)
    large.receive(600)
    reading.receive(200)
    reading.blocked_bytes = 10
    small.receive(60)
    assert (output.bytes, output.closed) == (820, 0), "what was read since does not count"
    small.receive(200)
    assert "more than 1000 unread bytes" in large.reason
    assert (output.bytes, output.closed, len(output)) == (420, 1, 2)
    output.discard(small)
    output.discard(reading)
    assert (output.bytes, len(output)) == (0, 0)


async def test_many_are_closed_in_several_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_limit, "MAX_CLOSED_LARGE_CONNECTIONS", 10)
    output = UnreadOutput(1_000)
    readers = [SlowReader(output) for _ in range(1_000)]
    for reader in readers:
        reader.receive(1)
    readers[0].receive(2)
    assert (output.closed, output.bytes) == (1, 999), "within the limit at once"
    counts = []
    for _ in range(15):
        await asyncio.sleep(0)
        counts.append(output.closed)
    assert counts[:3] == [11, 21, 31]
    assert (output.bytes, len(output)) == (900, 900)


def test_a_client_that_reads_nothing_is_closed_and_a_slow_one_is_not() -> None:
    async def main() -> None:
        output = UnreadOutput(1_000)
        stalled, slow = SlowReader(output), SlowReader(output)
        stalled.receive(10)
        slow.receive(100)
        for _ in range(10):
            await asyncio.sleep(unread_output.MAX_STALL_S / 2)
            slow.blocked_bytes -= 1
        assert stalled.reason == "the client has read nothing for 30 s"
        assert not slow.reason
        await asyncio.sleep(3 * unread_output.MAX_STALL_S)
        assert slow.reason
        assert (output.bytes, len(output), output.closed) == (0, 0, 2)

    loop = SimLoop()
    with deterministic(loop, seed=1):
        loop.run_until_complete(main())
    loop.close()


def test_many_clients_that_read_nothing_are_closed_in_several_iterations() -> None:
    async def main() -> None:
        output = UnreadOutput(1_000_000)
        readers = [SlowReader(output) for _ in range(350)]
        for reader in readers:
            reader.receive(10)
        await asyncio.sleep(unread_output.MAX_STALL_S)
        counts = [0]
        for _ in range(10):
            counts.append(sum(bool(reader.reason) for reader in readers))
            await asyncio.sleep(0)
        assert max(b - a for a, b in itertools.pairwise(counts)) <= unread_output.MAX_CLOSED_STALLED_CONNECTIONS
        assert (counts[-1], len(output), output.bytes) == (350, 0, 0)

    loop = SimLoop()
    loop.run_until_complete(main())
    loop.finish()


async def test_clients_that_do_not_read_cost_a_bounded_number_of_bytes() -> None:
    """Each answer has a megabyte: without a bound, 14 of them for each of 12 connections."""
    server = Server(Settings.from_options(port=0, admin_port=None, max_unread_total=2 * MEGABYTE))
    address = await server.start()
    greatest = 0
    with ExitStack() as stack:
        filling = stack.enter_context(socket.create_connection(address))
        filling.sendall(b"".join(LOCK % (number, LONG) for number in range(560)))
        async with asyncio.timeout(WAIT_S):
            while server.default_namespace.manager.table.locks < 560:  # noqa: ASYNC110 - the client reads nothing
                await asyncio.sleep(0)
        for _ in range(12):
            hostile = stack.enter_context(socket.socket())
            hostile.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            hostile.connect(address)
            hostile.sendall(14 * WATCH)
        async with asyncio.timeout(WAIT_S):
            while server.unread_output.closed < 3:
                greatest = max(greatest, server.unread_output.bytes)
                await asyncio.sleep(0)
        honest = stack.enter_context(socket.create_connection(address))
        honest.sendall(b'{"command":"ping"}\n')
        assert await asyncio.get_running_loop().run_in_executor(None, honest.recv, 100)
        greatest = max(greatest, server.unread_output.bytes)
    assert MEGABYTE < greatest <= 4 * MEGABYTE, "the limit, and one answer"
    await server.stop()
    assert server.unread_output.bytes == 0


class Transport(RecordingTransport):
    """Pauses the connection when the client has not read enough, as the transports of event loops do."""

    def __init__(self, client: Connection) -> None:
        self.client, self.writes = client, list[bytes]()
        super().__init__(self.writes.append)
        self.unread_bytes = 0
        client.connection_made(self)

    def write(self, data: bytes) -> None:
        super().write(data)
        if self.unread_bytes > unread_output.WRITE_BUFFER_BYTES:
            self.client.pause_writing()

    def write_eof(self) -> None:
        super().write_eof()
        self.writes.append(b"EOF")

    def read(self) -> None:
        """Let the client read all output."""
        self.unread_bytes = 0
        self.client.resume_writing()


EVENT = b"%05d: an event of a lock that another client holds, and that this client watches, without reading it\n"


@pytest.mark.parametrize("end", ["reads", "finish", "loses"])
async def test_many_short_messages_for_a_client_that_does_not_read_are_few_writes(end: str) -> None:
    world = World()
    watcher = Connection(world.pipeline, Limits(), world.admission)
    transport = Transport(watcher)
    messages = [EVENT % number for number in range(10_000)]
    size = sum(map(len, messages))
    for message in messages:
        watcher.outbox.append(message)
        watcher.flush()
    assert sum(map(len, transport.writes)) == transport.unread_bytes < 200
    assert watcher.unread_bytes == world.admission.unread_output.bytes == size
    assert sum(map(sys.getsizeof, watcher._held_output)) < 1.2 * size
    written = len(transport.writes)
    if end == "loses":
        watcher.connection_lost(None)
        assert (watcher.unread_bytes, watcher._held_output) == (0, deque())
        return
    if end == "finish":
        watcher.finish()
        watcher.finish()
    for _ in range(len(messages)):
        transport.read()
        if watcher.write_blocked:
            assert transport.unread_bytes <= MAX_WRITE_BYTES, "also at the end"
            assert watcher.unread_bytes == world.admission.unread_output.bytes
    if end == "finish":
        assert transport.writes.pop() == b"EOF"
    assert b"".join(transport.writes) == b"".join(messages)
    assert len(transport.writes) - written <= 1 + size // MAX_WRITE_BYTES * 1.1
    assert (watcher.unread_bytes, world.admission.unread_output.bytes) == (0, 0)


async def test_a_long_answer_is_written_in_parts() -> None:
    """The transport would keep all of it until the client has read the last byte."""
    world = World()
    reader = Connection(world.pipeline, Limits(), world.admission)
    transport, answer = Transport(reader), b"".join(EVENT % number for number in range(10_000))
    reader.outbox.append(answer)
    reader.flush()
    assert list(map(len, transport.writes)) == [MAX_WRITE_BYTES]
    assert reader.unread_bytes == world.admission.unread_output.bytes == len(answer)
    while reader.write_blocked:
        transport.read()
    assert b"".join(transport.writes) == answer
    assert max(map(len, transport.writes)) == MAX_WRITE_BYTES


async def test_the_error_for_a_slow_consumer_follows_its_messages() -> None:
    world = World()
    reader = Connection(world.pipeline, Limits(max_unread=1 << 16), world.admission)
    transport = Transport(reader)
    for number in range(2):
        reader.outbox.append(b"%d" % number * 100_000)
        reader.flush()
    while reader.write_blocked:
        transport.read()
    received = b"".join(transport.writes)
    assert received.startswith(b"0" * 100_000 + b'{"command":"error"')
    assert received.endswith(b"EOF")


async def test_the_answer_to_a_slow_command_is_not_deferred_with_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would not count as unread, and the client could have further answers before it reads."""
    monkeypatch.setattr(pipeline, "WATCH_FLUSH_INTERVAL_S", 1_000.0)
    world = World()
    reader, holder = Connection(world.pipeline, Limits(), world.admission), Client(world)
    transport = Transport(reader)
    reader.data_received(WATCH)
    await world.settle()
    transport.read()
    holder.lock(*(f"{each:0400}" for each in range(100)))
    await world.settle()
    assert reader.deferred
    assert reader.watch_bytes > MAX_BYTES_BEFORE_REPLY
    reader.data_received(10 * WATCH)
    await world.settle()
    assert not reader.deferred
    assert b"".join([*transport.writes, *reader._held_output]).count(b"watching") < 4, "then it must read"
    assert reader.write_blocked


async def test_a_slow_command_sends_the_deferred_events_of_one_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many connections may have many events and a slow command, and not read."""
    monkeypatch.setattr(pipeline, "WATCH_FLUSH_INTERVAL_S", 1_000.0)
    world, flushed, flush = World(), [0], Connection.flush_deferred
    readers = [Connection(world.pipeline, Limits(), world.admission) for _ in range(50)]
    transports, holder = [Transport(reader) for reader in readers], Client(world)

    def count(reader: Connection) -> None:
        flushed[-1] += 1
        flush(reader)

    for reader in readers:
        reader.data_received(WATCH)
    await world.settle()
    for transport in transports:
        transport.read()
    holder.lock(*(f"{each:0400}" for each in range(100)))
    await world.settle()
    monkeypatch.setattr(Connection, "flush_deferred", count)
    for reader in readers:
        assert reader.deferred
        reader.data_received(WATCH)
    while world.pipeline._scheduler:
        await asyncio.sleep(0)
        flushed.append(0)
    assert sum(flushed) == len(readers)
    assert max(flushed) == 1
    assert all(reader.write_blocked for reader in readers), "and their commands are parked"
    flushed.clear()
    flushed.append(0)
    holder.lock("more events")
    await world.settle()
    for transport in transports:
        transport.read()
    assert sum(flushed) == 0, "what waits for a client that does not read is not copied"


async def test_queued_lines_count_with_their_memory() -> None:
    world = World()
    world.store.held_back = []
    reader = Connection(world.pipeline, Limits(), world.admission)
    Transport(reader)
    reader.data_received(b'{"command":"request","payload":{"resources":["exclusive:a"]}}\n')
    reader.data_received(100 * WATCH)
    assert reader.blocked_bytes == COMMAND_FACTOR * reader.queued_bytes == COMMAND_FACTOR * 100 * len(WATCH)
    reader.data_received(1_000 * WATCH)
    assert reader.blocked_bytes == COMMAND_FACTOR * 100 * len(WATCH) + 1_000 * len(WATCH), "they are not split yet"
    world.store.acknowledge()


async def test_a_slow_consumer_that_reads_late_causes_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection ends before the grace period, at whose end the server aborts the others."""
    errors: list[dict[str, object]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: errors.append(context))
    monkeypatch.setattr(connection, "SLOW_CONSUMER_GRACE_S", 0.5)
    monkeypatch.setattr(connection, "LINGER_IDLE_S", 0.05)
    server = Server(Settings.from_options(port=0, admin_port=None, max_unread=1 << 16))
    address = await server.start()
    with socket.create_connection(address) as filling, socket.socket() as late:
        filling.sendall(b"".join(LOCK % (number, LONG) for number in range(560)))
        async with asyncio.timeout(WAIT_S):
            while server.default_namespace.manager.table.locks < 560:  # noqa: ASYNC110 - the client reads nothing
                await asyncio.sleep(0)
            late.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            late.connect(address)
            late.setblocking(False)
            late.sendall(14 * WATCH)
            while not server.unread_output.bytes:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            filling.sendall(LOCK % (0, b"an event for the watcher"))
            while not any(each.closed for each in server.connections):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await asyncio.sleep(2 * connection.LINGER_IDLE_S)
            while await loop.sock_recv(late, 1 << 20):
                pass
        await asyncio.sleep(2 * connection.SLOW_CONSUMER_GRACE_S)
    await server.stop()
    assert errors == []
