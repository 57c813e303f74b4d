"""The client when the server ends a connection with an error and resets it, and a write fails before the error is read."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable

import orjson
import pytest
import uvloop

from genie import Client, ConnectionLost, RequestRejected, connect
from support.network.fake_server import error
from support.processes.servers import WAIT_S

RESET_AT_CLOSE = struct.pack("ii", 1, 0)
"""SO_LINGER for no time."""


LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def listen() -> socket.socket:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    return listener


async def shake_hands(listener: socket.socket) -> socket.socket:
    """Accept the client. Returns the server's socket, which sends at once, and resets the connection when it is closed."""
    loop = asyncio.get_running_loop()
    peer, _ = await loop.sock_accept(listener)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_CLOSE)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    received = b""
    while received.count(b"\n") < 2:
        received += await loop.sock_recv(peer, 4096)
    hello, ping = map(orjson.loads, received.splitlines())
    welcome = {"protocol": 1, "server": "fake", "namespace": "n", "resumed": False, "quiet": True}
    for command, payload in (("welcome", {**welcome, "ref": hello["payload"]["ref"]}), ("pong", ping["payload"])):
        peer.sendall(orjson.dumps({"command": command, "payload": payload}) + b"\n")
    return peer


async def end_connection(client: Client, peer: socket.socket, message: str) -> None:
    """Send an error and reset the connection. The client writes before it reads."""
    handler = client._connection._handler
    assert handler is not None
    await handler.handshake_done.wait()
    peer.sendall(message.encode() + b"\n")
    peer.close()
    with pytest.raises(ConnectionLost):
        await client.ping()


async def three_takeovers_end_the_client() -> None:
    with listen() as listener:
        entering = asyncio.create_task(connect(*listener.getsockname()).__aenter__())
        for _ in range(3):
            peer = await shake_hands(listener)
            client = await entering
            await end_connection(client, peer, error("session-taken-over"))
        with pytest.raises(RequestRejected, match="3 times in a row"):
            await client.ping()
        await client.close()


async def the_named_leader_is_next() -> None:
    with listen() as listener, listen() as leader:
        entering = asyncio.create_task(connect(*listener.getsockname()).__aenter__())
        peer = await shake_hands(listener)
        client = await entering
        host, port = leader.getsockname()
        await end_connection(client, peer, error("unavailable", leader=f"{host}:{port}"))
        with await shake_hands(leader):
            pass
        client._connection.abort()


@pytest.mark.parametrize("new_event_loop", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("scenario", [three_takeovers_end_the_client, the_named_leader_is_next])
def test_the_error_before_a_reset(
    scenario: Callable[[], Awaitable[None]], new_event_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def within_limit() -> None:
        async with asyncio.timeout(WAIT_S):
            await scenario()

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(within_limit())
