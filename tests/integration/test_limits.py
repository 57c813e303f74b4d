"""Limits: each has a setting and an error of its own, and a rejected request changes nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from contextlib import ExitStack

import orjson
import pytest
import uvloop

from genie.config import Settings
from genie.server.app import Server
from genie.server.machine import RECEIVE_BUFFER_BYTES, Machine
from support.network.wire import Wire
from support.processes.ports import free_port
from support.processes.servers import WAIT_S, running_redis, running_server

SESSION = "a secret of sixteen"


async def rejection_message(client: Wire, *resources: str, **payload: object) -> str:
    client.send("request", resources=list(resources), ref="over", **payload)
    error = await client.expect("error")
    assert (error["code"], error["ref"]) == ("too-many", "over")
    return str(error["message"])


async def test_the_number_of_locks_is_limited() -> None:
    with running_server(max_locks=3) as genie:
        client = await Wire.connect(genie.address)
        held = await client.lock("exclusive:a", "shared:b")
        assert "at most 3 can be held" in await rejection_message(client, "exclusive:c", "exclusive:d")
        await client.lock("exclusive:c")
        assert "at most 3 can be held" in await rejection_message(client, "shared:b")
        await client.release(held)
        await client.lock("exclusive:a", "exclusive:b")


async def test_a_request_with_any_of_counts_all_its_choices() -> None:
    """How many of them it acquires is not known before."""
    with running_server(max_locks=3) as genie:
        client = await Wire.connect(genie.address)
        choices = [f"exclusive:{number}" for number in range(2_000)]
        client.send("request", anyOf=choices, target=4)
        assert (await client.expect("error"))["code"] == "too-many"
        client.send("request", anyOf=choices[:3], target=2)
        await client.expect("queued")
        assert (await client.expect("locked"))["resources"] == ["0", "1"]


async def test_the_number_of_wait_queue_entries_is_limited() -> None:
    with running_server(max_queue=2) as genie:
        client = await Wire.connect(genie.address)
        held = await client.lock("exclusive:a")
        waiting = await client.request("exclusive:a", "exclusive:b")
        assert "at most 2 entries" in await rejection_message(client, "exclusive:a")
        uncontended = await client.lock("exclusive:c")  # a request that does not wait needs no entry
        await client.release(held)
        assert (await client.expect("locked"))["id"] == waiting
        await client.request("exclusive:c")
        await client.release(uncontended)


async def test_the_requests_of_a_connection_are_limited() -> None:
    with running_server(max_requests_per_connection=3) as genie:
        client, other = await Wire.connect(genie.address), await Wire.connect(genie.address)
        held = await client.lock("exclusive:a")
        waiting = await client.request("exclusive:a")
        await client.lock("exclusive:b", onDisconnect="release")
        assert "this connection already has 3 held or waiting" in await rejection_message(client, "exclusive:c")
        await other.lock("exclusive:c")
        assert await client.release(waiting) == "success"
        await client.request("exclusive:c")
        await rejection_message(client, "exclusive:d")
        await client.release(held)
        await client.lock("exclusive:d")


async def test_ended_requests_do_not_count_whatever_the_reason() -> None:
    with running_server(max_requests_per_connection=2) as genie:
        client = await Wire.connect(genie.address)
        await client.lock("exclusive:a")
        for payload in ({"queueTimeout": 0}, {"queueTimeout": 1}):
            await client.request("exclusive:a", **payload)
            assert (await client.expect("released"))["reason"] == "queue-timeout"
        await client.lock("exclusive:b", transactionTimeout=1)
        assert (await client.expect("released"))["reason"] == "transaction-timeout"
        client.send("request", anyOf=["exclusive:a"], target=1)
        await client.expect("queued")
        assert (await client.expect("released"))["reason"] == "insufficient"
        client.send("request", anyOf=["exclusive:b"], target=1)
        await client.expect("queued")
        await client.expect("locked")
        await rejection_message(client, "exclusive:c")


async def test_the_requests_of_a_session_are_limited() -> None:
    with running_server(max_requests_per_session=2, max_requests_per_connection=9) as genie:
        client = await Wire.connect(genie.address)
        client.send("hello", session=SESSION)
        await client.expect("welcome")
        await client.lock("exclusive:a")
        await client.request("exclusive:a")
        assert "this session already has 2 held or waiting" in await rejection_message(client, "exclusive:b")


async def test_the_number_of_connections_is_limited() -> None:
    with running_server(max_connections=1) as genie:
        first = await Wire.connect(genie.address)
        first.send("ping")
        await first.expect("pong")
        second = await Wire.connect(genie.address)
        error = await second.expect("error")
        assert error["code"] == "too-many"
        assert "accepts at most 1" in error["message"]
        assert await second.receive() == ("closed", {})


async def test_connections_beyond_the_limit_are_rejected_while_the_store_is_unavailable() -> None:
    with (
        running_redis() as redis,
        running_server(redis, max_connections=1, store_timeout_ms=600_000, lease=600) as genie,
    ):
        first = await Wire.connect(genie.address)
        await first.lock("exclusive:a")
        redis.send(signal.SIGSTOP)
        first.send("request", resources=["exclusive:b"])
        genie.until("store unavailable")
        for _ in range(3):
            second = await Wire.connect(genie.address)
            assert (await second.expect("error"))["code"] == "too-many"
            assert await second.receive() == ("closed", {})
        redis.send(signal.SIGCONT)
        await first.expect("queued")
        await first.expect("locked")


async def test_the_connections_from_one_address_are_limited() -> None:
    with running_server(max_connections_per_address=1) as genie:
        first = await Wire.connect(genie.address)
        first.send("ping")
        await first.expect("pong")
        second = await Wire.connect(genie.address)
        error = await second.expect("error")
        assert error["code"] == "too-many"
        assert "from one address" in error["message"]
        assert await second.receive() == ("closed", {})
        other = Wire(*await asyncio.open_connection(*genie.address, local_addr=("127.0.0.2", 0)))
        other.send("ping")
        await other.expect("pong")
        other.writer.close()
        first.writer.close()
        await first.writer.wait_closed()
        while True:  # until the server has detected the end of the first connection
            next_connection = await Wire.connect(genie.address)
            next_connection.send("ping")
            if (await next_connection.receive())[0] == "pong":
                return


async def test_a_slow_consumer_is_sent_the_reason_of_its_disconnection() -> None:
    """The error is the last message, if the client continues to read."""
    with running_server(max_unread=1 << 16) as genie:
        holder = await Wire.connect(genie.address)
        ids = [await holder.lock(f"exclusive:{number}") for number in range(200)]
        slow_consumer = socket.socket()
        slow_consumer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        slow_consumer.connect(genie.address)
        slow_consumer.settimeout(WAIT_S)
        for number in range(len(ids)):
            for request in range(100):
                ref = f"{number} {request} ".ljust(128, "\N{MUSICAL SYMBOL G CLEF}")  # half a kilobyte in each message
                payload = {"resources": [f"shared:{number}"], "ref": ref}
                slow_consumer.sendall(orjson.dumps({"command": "request", "payload": payload}) + b"\n")
            queued_count = 0
            while queued_count < 100:
                queued_count += slow_consumer.recv(1 << 16).count(b"\n")
        for id in ids:  # each release grants 100 requests in a batch of its own
            await holder.release(id)
        received = b""
        await asyncio.to_thread(genie.until, "slow consumer disconnected")
        while not received.endswith(b"}\n") or b'"error"' not in received[-300:]:
            data = await asyncio.to_thread(slow_consumer.recv, 1 << 20)
            assert data, "the connection was closed without an error"
            received += data
        slow_consumer.close()
        assert b'"too-many"' in received[-300:]


async def test_the_memory_of_all_requests_is_limited() -> None:
    with running_server(max_state=1 << 20) as genie:
        client, other = await Wire.connect(genie.address), await Wire.connect(genie.address)
        wide = "\U0001f512" * 500
        ids: list[int] = []
        while True:
            client.send("request", resources=[f"exclusive:{len(ids)}{wide}"], note=wide[:256])
            command, answer = await client.receive()
            if command == "error":
                break
            ids.append(int(answer["id"]))
            assert (await client.expect("locked"))["id"] == ids[-1]
        assert 50 < len(ids) < 300
        assert answer["code"] == "too-many"
        for message in (answer["message"], await rejection_message(other, f"exclusive:x{wide}", note=wide[:256])):
            assert "too much memory" in message
            assert "at most 1048576 bytes" in message
        await client.release(ids[0])
        await other.lock(f"exclusive:x{wide}", note=wide[:256])


async def test_one_read_of_a_connection_is_small() -> None:
    """So that many connections cannot exceed the bound of queued commands by much before reading is paused."""
    listening = Machine().bind("127.0.0.1", 0)
    listening.listen()
    with listening, socket.create_connection(listening.getsockname()), listening.accept()[0] as accepted:
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) <= 2 * RECEIVE_BUFFER_BYTES


def test_connections_that_arrive_together_are_accepted_in_few_iterations_of_the_event_loop() -> None:
    """While clients keep the server busy, an iteration takes 5 ms, and the event loop accepts one connection of a socket in it."""

    async def accept() -> None:
        server = Server(Settings(port=0))
        address = await server.start()
        clients = [socket.create_connection(address) for _ in range(64)]
        iterations = 0
        while len(server.connections) < len(clients):
            await asyncio.sleep(0)
            iterations += 1
        for client in clients:
            client.close()
        await server.stop()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
        assert iterations <= len(clients) // 2

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(accept(), WAIT_S))


FEW_FILES = """
import resource
from genie.cli import main
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
main(prog_name="genie")
"""


def test_clients_cannot_use_up_the_open_files_that_health_checks_need() -> None:
    port, admin_port = free_port(), free_port()
    environment = os.environ | {"GENIE_PORT": str(port), "GENIE_ADMIN_PORT": str(admin_port)}
    with ExitStack() as stack:
        server = stack.enter_context(
            subprocess.Popen([sys.executable, "-c", FEW_FILES, "serve"], env=environment, stdout=subprocess.PIPE)
        )
        stack.callback(server.kill)
        assert server.stdout is not None
        server.stdout.readline()
        for _ in range(150):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), WAIT_S))
        rejected = stack.enter_context(socket.create_connection(("127.0.0.1", port), WAIT_S))
        assert b"too-many" in rejected.recv(1000)
        with urllib.request.urlopen(f"http://127.0.0.1:{admin_port}/livez", timeout=WAIT_S) as response:
            assert response.status == 200
