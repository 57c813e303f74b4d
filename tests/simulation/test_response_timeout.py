"""How long calls of the client wait for a server, in virtual time: for their queue timeout and `response_timeout`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

import genie
from genie.testing.simulation.loop import SimLoop, deterministic
from genie.testing.simulation.network import Network

PORT = 7077


def run(main: Callable[[Network], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine in a simulated world."""
    loop = SimLoop()
    network = Network(loop)
    with deterministic(loop, 1):
        try:
            loop.run_until_complete(main(network))
        finally:
            network.finish()
            loop.finish()


class Server(asyncio.Protocol):
    """A server that accepts every client, grants every request of a lock `held…`, and answers nothing else."""

    connections: list[Server]
    held: list[str]
    """The ref of the lock, if it is held."""

    def __init__(self) -> None:
        self.connections.append(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def data_received(self, data: bytes) -> None:
        for line in data.splitlines():
            message = json.loads(line)
            command, payload = message["command"], message["payload"]
            if command == "hello":
                welcome = {"protocol": 1, "server": "s", "features": [], "pingInterval": 2000, "namespace": "genie"}
                self.say("welcome", **welcome, resumed=bool(self.held), quiet=True, ref="hello")
                for ref in self.held:
                    self.say("locked", id=7, fence=7, expiresIn=900_000, ref=ref)
            elif payload.get("ref") == "resume":
                self.say("pong", ref="resume")
            elif payload.get("resources") == ["exclusive:held"]:
                self.held.append(payload["ref"])
                self.say("locked", id=7, fence=7, ref=payload["ref"])

    def say(self, command: str, **payload: Any) -> None:
        self.transport.write(json.dumps({"command": command, "payload": payload}).encode() + b"\n")


async def serve() -> Any:
    """Start a server."""
    Server.connections, Server.held = [], []
    return await asyncio.get_running_loop().create_server(Server, "127.0.0.1", PORT)


async def seconds_until_failed(call: Awaitable[object]) -> float:
    """Return how long a call takes to fail."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises((genie.Unavailable, genie.ConnectionLost)):  # the keepalive closes the connection meanwhile
        await call
    return loop.time() - began


@pytest.mark.parametrize("hangs", [True, False], ids=["hangs", "is down"])
@pytest.mark.parametrize("limit", [1.0, 4.0])
def test_a_call_fails_after_the_response_timeout_if_the_server(hangs: bool, limit: float) -> None:
    async def main(_network: Network) -> None:
        server = await serve()
        timeouts = {} if limit == 1.0 else {"response_timeout": limit}
        async with genie.connect(port=PORT, **timeouts) as client:
            lock = await client.acquire("held", transaction_timeout=1000)
            if not hangs:
                server.close()
                for connection in Server.connections:
                    connection.transport.abort()
                await asyncio.sleep(0.1)
            for call in (
                lambda: client.try_acquire("a"),
                lambda: client.acquire_any(["a"], 1),
                lambda: client.extend(3, 5),
                lambda: lock.extend(2000),
                client.ping,
                client.inspect,
                lambda: client.release(3),
                lock.release,
            ):
                waited = await seconds_until_failed(call())
                assert waited < limit + 0.01
                assert hangs or waited > limit - 0.01
            waited = await seconds_until_failed(client.acquire("a", queue_timeout=0.5))
            assert waited == pytest.approx(0.5 + limit, abs=0.01)

    run(main)


def test_a_call_that_began_while_disconnected_succeeds_after_a_reconnect_within_the_response_timeout() -> None:
    async def main(_network: Network) -> None:
        server = await serve()
        async with genie.connect(port=PORT, response_timeout=5.0) as client:
            server.close()
            for connection in Server.connections:
                connection.transport.abort()
            await asyncio.sleep(0.1)
            acquiring = asyncio.create_task(client.try_acquire("held"))
            await asyncio.sleep(2)
            await serve()
            lock = await acquiring
            assert lock is not None
            assert lock.held

    run(main)
