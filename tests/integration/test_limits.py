"""Every limit has a setting, and its own word when it is reached. Nothing changes by what is refused."""

from __future__ import annotations

import asyncio
import signal
import socket

import orjson

from servers import WAIT_S, running_redis, running_server
from wire import Wire

SESSION = "a secret of sixteen"


async def refused(client: Wire, *resources: str, **payload: object) -> str:
    client.send("request", resources=list(resources), ref="over", **payload)
    error = await client.expect("error")
    assert (error["code"], error["ref"]) == ("too-many", "over")
    return str(error["message"])


async def test_the_locks_in_all() -> None:
    with running_server(max_locks=3) as genie:
        client = await Wire.connect(genie.address)
        held = await client.lock("exclusive:a", "shared:b")
        assert "at most 3 can be held" in await refused(client, "exclusive:c", "exclusive:d")
        await client.lock("exclusive:c")
        assert "at most 3 can be held" in await refused(client, "shared:b")
        await client.release(held)
        await client.lock("exclusive:a", "exclusive:b")


async def test_the_locks_in_all_by_choice() -> None:
    """What it may take counts, for that is only known when it has."""
    with running_server(max_locks=3) as genie:
        client = await Wire.connect(genie.address)
        choices = [f"exclusive:{number}" for number in range(2_000)]
        client.send("request", anyOf=choices, target=4)
        assert (await client.expect("error"))["code"] == "too-many"
        client.send("request", anyOf=choices[:3], target=2)
        await client.expect("queued")
        assert (await client.expect("locked"))["resources"] == ["0", "1"]


async def test_the_places_in_all_lines() -> None:
    with running_server(max_queue=2) as genie:
        client = await Wire.connect(genie.address)
        held = await client.lock("exclusive:a")
        waiting = await client.request("exclusive:a", "exclusive:b")
        assert "at most 2 entries" in await refused(client, "exclusive:a")
        free = await client.lock("exclusive:c")  # what needs not wait needs no place
        await client.release(held)
        assert (await client.expect("locked"))["id"] == waiting
        await client.request("exclusive:c")
        await client.release(free)


async def test_the_requests_of_a_connection() -> None:
    with running_server(max_requests_per_connection=3) as genie:
        client, other = await Wire.connect(genie.address), await Wire.connect(genie.address)
        held = await client.lock("exclusive:a")
        waiting = await client.request("exclusive:a")
        await client.lock("exclusive:b", onDisconnect="release")
        assert "this connection already has 3 held or waiting" in await refused(client, "exclusive:c")
        await other.lock("exclusive:c")
        assert await client.release(waiting) == "success"
        await client.request("exclusive:c")
        await refused(client, "exclusive:d")
        await client.release(held)
        await client.lock("exclusive:d")


async def test_what_has_ended_in_any_way_counts_no_more() -> None:
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
        await refused(client, "exclusive:c")


async def test_the_requests_of_a_session() -> None:
    with running_server(max_requests_per_session=2, max_requests_per_connection=9) as genie:
        client = await Wire.connect(genie.address)
        client.send("hello", session=SESSION)
        await client.expect("welcome")
        await client.lock("exclusive:a")
        await client.request("exclusive:a")
        assert "this session already has 2 held or waiting" in await refused(client, "exclusive:b")


async def test_the_connections_in_all() -> None:
    with running_server(max_connections=1) as genie:
        first = await Wire.connect(genie.address)
        first.send("ping")
        await first.expect("pong")
        second = await Wire.connect(genie.address)
        error = await second.expect("error")
        assert error["code"] == "too-many"
        assert "accepts at most 1" in error["message"]
        assert await second.receive() == ("closed", {})


async def test_no_store_is_waited_for_by_those_who_are_too_many() -> None:
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


async def test_the_connections_from_one_address() -> None:
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
        while True:  # until the server has seen that it left
            again = await Wire.connect(genie.address)
            again.send("ping")
            if (await again.receive())[0] == "pong":
                return


async def test_the_bytes_that_a_client_leaves_unread() -> None:
    """The last thing that it reads, if it reads on, is why it was cut off."""
    with running_server(max_unread=1 << 16) as genie:
        holder = await Wire.connect(genie.address)
        names = [f"{number}{'x' * 500}" for number in range(10)]
        await holder.lock(*(f"exclusive:{name}" for name in names))
        deaf = socket.socket()
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        deaf.connect(genie.address)
        deaf.settimeout(WAIT_S)
        resources = [f"shared:{name}" for name in names]
        heard = b""
        for number in range(1, 2_001):  # each is told 6 KB of blockers, at a time of its own, and that is not read
            payload = {"resources": resources, "queueTimeout": 5_000 + number}
            await asyncio.to_thread(deaf.sendall, orjson.dumps({"command": "request", "payload": payload}) + b"\n")
            while heard.count(b'"command":"queued"') < number:
                heard += await asyncio.to_thread(deaf.recv, 1 << 10)
        await asyncio.to_thread(genie.until, "slow consumer disconnected")
        while not heard.endswith(b"}\n") or b'"error"' not in heard[-300:]:
            more = await asyncio.to_thread(deaf.recv, 1 << 20)
            assert more, "it was not told why it was cut off"
            heard += more
        deaf.close()
        assert b'"too-many"' in heard[-300:]
