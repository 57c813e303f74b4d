"""The bytes of queued commands count, however their lines arrive."""

from __future__ import annotations

import asyncio
import json
from functools import partial

import pytest

from genie.access import Principal
from genie.config import Limits
from genie.observability.stats import Stats
from genie.protocol.framing import LONG_LINE_BYTES
from genie.roles import Starting
from genie.server.connection import Connection
from genie.server.follower import FollowerHandler
from genie.server.listener import AdmissionControl
from genie.server.scheduler import LIGHT_BYTES, MAX_QUEUED_BYTES
from genie.server.unread_output import COMMAND_FACTOR
from support.core.sliced_pipeline import Client, World, exceed_store_timeout
from support.network.recording_transport import RecordingTransport

READ_BYTES = 4_096


def long_line(size: int) -> bytes:
    """Return a request with a line of about `size` bytes, without the line end."""
    names = [f"exclusive:name {number:08}" for number in range(size // 26)]
    return json.dumps({"command": "request", "payload": {"anyOf": names, "target": 1}}, separators=(",", ":")).encode()


def receive(client: Client | Connection, data: bytes) -> None:
    connection = client.connection if isinstance(client, Client) else client
    for start in range(0, len(data), READ_BYTES):
        connection.data_received(data[start : start + READ_BYTES])


@pytest.fixture(name="world")
async def _world() -> World:
    return World()


async def test_a_line_of_several_reads_counts_with_all_its_bytes(world: World) -> None:
    world.store.held_back = []
    client = Client(world)
    client.lock("a")
    line = long_line(2 * MAX_QUEUED_BYTES)
    receive(client, line)
    client.connection.data_received(b"\n")
    assert client.connection.queued_bytes == world.pipeline._scheduler.bytes == len(line) + 1
    assert client.connection.reading_is_paused
    world.store.acknowledge()
    await world.settle()
    assert client.connection.queued_bytes == world.pipeline._scheduler.bytes == 0
    assert not client.connection.reading_is_paused
    assert client.commands() == ["queued", "locked"] * 2


@pytest.mark.parametrize("size", [LONG_LINE_BYTES + 100, 2 * MAX_QUEUED_BYTES])
async def test_the_line_of_the_only_connection_counts_while_it_waits(world: World, size: int) -> None:
    client = Client(world)
    line = long_line(size)
    receive(client, line)
    client.connection.data_received(b"\n")
    assert client.commands() == [], "a long line is a slow command, which waits for a later iteration"
    assert client.connection.queued_bytes == world.pipeline._scheduler.bytes == len(line) + 1
    assert client.connection.reading_is_paused == (size > MAX_QUEUED_BYTES)
    await world.settle()
    assert client.connection.queued_bytes == world.pipeline._scheduler.bytes == 0
    assert not client.connection.reading_is_paused
    assert client.commands() == ["queued", "locked"]


async def test_an_incomplete_line_is_not_read_further_while_too_many_bytes_are_queued(world: World) -> None:
    scheduler = world.pipeline._scheduler
    scheduler._max_bytes = 100_000
    world.store.held_back = []
    flood, long, short = Client(world), Client(world), Client(world)
    flood.lock("a")
    line = long_line(120_000)
    receive(long, line[:LIGHT_BYTES])
    receive(short, line[:LIGHT_BYTES])
    receive(flood, line)
    flood.connection.data_received(b"\n")
    assert scheduler.bytes > scheduler._max_bytes
    receive(long, line[LIGHT_BYTES : LIGHT_BYTES + 1])
    assert (long.connection.reading_is_paused, short.connection.reading_is_paused) == (True, False)
    world.store.acknowledge()
    await world.settle()
    assert not long.connection.reading_is_paused
    receive(long, line[LIGHT_BYTES + 1 :] + b"\n")
    await world.settle()
    assert long.commands() == ["queued", "locked"]


@pytest.mark.parametrize("is_closed", [False, True])
async def test_lines_after_a_rejected_hello_count_while_a_follower_is_busy(is_closed: bool) -> None:
    follower, received = FollowerHandler(Stats(), "genie", 1 << 20, Starting), list[bytes]()
    line = long_line(50_000)
    limits = Limits(max_partial=3 * len(line) if is_closed else 4 * len(line))
    admission = AdmissionControl[Connection](limits)
    connection = Connection(follower, limits, admission)
    connection.connection_made(RecordingTransport(received.append))
    connection.data_received(b'{"command":"hello"}\n')
    assert len(received) == 1
    follower._scheduled = asyncio.get_running_loop().call_later(1_000, partial(int, 0))  # another connection is first
    receive(connection, line + b"\n")
    assert connection.queued_bytes == len(line)
    for _ in range(2):  # with TLS, further input may be decrypted
        connection.data_received(line + b"\n")
        assert connection.reading_is_paused or connection.closing
    assert admission.partial_lines.bytes == (0 if is_closed else 3 * (len(line) + 1))
    follower._scheduled.cancel()
    follower._run()
    for _ in range(10):
        await asyncio.sleep(0)
    assert (admission.partial_lines.bytes, connection.queued_bytes) == (0, 0)
    assert len(b"".join(received).splitlines()) == (3 if is_closed else 4)
    assert connection.closing == is_closed
    assert not connection.reading_is_paused


async def test_a_command_that_waits_until_the_client_reads_counts_as_unread(world: World) -> None:
    world.store.held_back = []
    client = Client(world)
    client.lock("a")
    client.send("inspect")
    line = long_line(100_000)
    receive(client, line + b"\n")
    client.transport.unread_bytes = 5_000
    client.connection.pause_writing()
    world.store.acknowledge()
    await world.settle()
    assert world.pipeline._scheduler.bytes == 0, "the inspect is parked"
    assert client.connection.queued_bytes > len(line)
    connection = client.connection
    assert world.admission.unread_output.bytes == connection.unread_bytes + COMMAND_FACTOR * connection.queued_bytes
    assert world.admission.unread_output.bytes > 5 * len(line)
    client.transport.unread_bytes = 0
    client.connection.resume_writing()
    await world.settle()
    assert world.admission.unread_output.bytes == client.connection.queued_bytes == 0
    assert client.commands() == ["queued", "locked", "inspected", "queued", "locked"]


@pytest.mark.parametrize("rest", [b"", b"x" * 100, b"x" * (Limits().max_line + 2)])
async def test_blank_lines_before_an_incomplete_line_are_not_submitted(world: World, rest: bytes) -> None:
    world.store.held_back = []
    client = Client(world)
    client.lock("a")
    await asyncio.sleep(0)
    exceed_store_timeout(world.pipeline)
    client.connection.data_received(b"\n\n" + rest)
    assert client.connection.queued_bytes == 0
    assert client.connection.closing == (len(rest) > Limits().max_line)
    world.store.acknowledge()
    await world.settle()


async def test_long_lines_of_many_principals_do_not_exceed_the_limit(world: World) -> None:
    """Each principal has one connection only."""
    scheduler = world.pipeline._scheduler
    scheduler._max_bytes = 100_000
    world.store.held_back = []
    Client(world).lock("a")
    for number in range(50):
        client = Client(world)
        client.send("ping")  # the connection is READY
        client.connection.principal = Principal(f"principal {number}")
        line = long_line(500_000) + b"\n"
        for start in range(0, len(line), READ_BYTES):
            if client.connection.reading_is_paused:
                break
            client.connection.data_received(line[start : start + READ_BYTES])
    assert scheduler.bytes < 100_000 + 600_000, "the limit and the line that exceeds it"
    assert world.admission.partial_lines.bytes < 50 * (LONG_LINE_BYTES + 2 * READ_BYTES)
