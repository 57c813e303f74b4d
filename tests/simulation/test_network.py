"""The simulated network: delivery, flow control, closing, resets, partitions and crashes."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest

from genie.testing.simulation.loop import Node, SimLoop
from genie.testing.simulation.network import HIGH, Network, RandomDelays, SimTransport


class RecordingProtocol(asyncio.Protocol):
    """Records the bytes and the callbacks that it gets."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.calls: list[str] = []
        self.error: Exception | None = None
        self.keep_open = False

    def connection_made(self, transport: Any) -> None:
        self.transport: SimTransport = transport

    def data_received(self, data: bytes) -> None:
        self.pieces.append(data)

    def eof_received(self) -> bool:
        self.calls.append("eof")
        return self.keep_open

    def connection_lost(self, exc: Exception | None) -> None:
        self.calls.append("lost")
        self.error = exc

    def pause_writing(self) -> None:
        self.calls.append("paused")

    def resume_writing(self) -> None:
        self.calls.append("resumed")


class Pair:
    """A connection between two nodes."""

    def __init__(self, loop: SimLoop, delays: RandomDelays | None = None) -> None:
        self.loop = loop
        self.network = Network(loop, delays)
        self.a, self.b = loop.create_node("a"), loop.create_node("b")
        self.client, self.server = RecordingProtocol(), RecordingProtocol()

    async def open(self) -> Pair:
        await self.loop.spawn(self.b, self._listen())
        await self.loop.spawn(self.a, self._connect())
        await asyncio.sleep(5)
        return self

    async def _listen(self) -> None:
        await asyncio.get_running_loop().create_server(lambda: self.server, "b", 1)

    async def _connect(self) -> None:
        await asyncio.get_running_loop().create_connection(lambda: self.client, "b", 1)

    def protocol_of(self, node: Node) -> RecordingProtocol:
        return self.client if node is self.a else self.server


@pytest.mark.parametrize(
    ("to_server", "to_client"), [(True, True), (True, False), (False, True)], ids=["both", "to server", "to client"]
)
def test_a_silenced_connection_loses_the_bytes_of_its_directions_and_notifies_no_side(
    loop: SimLoop, to_server: bool, to_client: bool
) -> None:
    async def main() -> None:
        pair = await Pair(loop).open()
        [connection] = pair.network.connections
        pair.client.transport.write(b"in flight")
        pair.network.silence(connection, to_server=to_server, to_client=to_client)
        pair.client.transport.write(b", later")
        pair.server.transport.write(b"an answer")
        await asyncio.sleep(100)
        assert b"".join(pair.server.pieces) == (b"" if to_server else b"in flight, later")
        assert b"".join(pair.client.pieces) == (b"" if to_client else b"an answer")
        assert pair.server.calls == pair.client.calls == []
        pair.client.transport.abort()
        await asyncio.sleep(100)
        assert pair.server.calls == ([] if to_server else ["lost"])
        pair.network.reset_later(connection.server, 5.0)
        await asyncio.sleep(6)
        assert pair.server.calls == ["lost"]

    loop.run_until_complete(main())


@pytest.mark.parametrize("seed", range(10))
def test_bytes_arrive_in_order_in_random_pieces(loop: SimLoop, seed: int) -> None:
    async def main() -> None:
        pair = await Pair(loop, RandomDelays(Random(seed), slow_ratio=0.3)).open()
        sent = b""
        for number in range(300):
            data = b"%d " % number
            sent += data
            pair.client.transport.write(data)
            await asyncio.sleep(0.001)
        await asyncio.sleep(10)
        assert b"".join(pair.server.pieces) == sent
        assert 1 < len(pair.server.pieces) != 300

    loop.run_until_complete(main())


def test_connecting_without_a_listener_fails(loop: SimLoop) -> None:
    Network(loop)
    with pytest.raises(ConnectionRefusedError):
        loop.run_until_complete(loop.create_connection(RecordingProtocol, "b", 1))


def test_an_address_in_use_cannot_be_bound_again(loop: SimLoop) -> None:
    async def main() -> None:
        listener = await loop.create_server(RecordingProtocol, "b", 1)
        with pytest.raises(OSError, match="in use"):
            await loop.create_server(RecordingProtocol, "b", 1)
        listener.close()
        await loop.create_server(RecordingProtocol, "b", 1)

    loop.run_until_complete(main())


def test_close_sends_the_buffer_and_then_eof(loop: SimLoop) -> None:
    async def main() -> None:
        pair = await Pair(loop).open()
        pair.server.transport.pause_reading()
        pair.client.transport.write(bytes(1 << 20))
        pair.client.transport.close()
        await asyncio.sleep(1)
        assert pair.client.calls == ["paused"]
        pair.server.transport.resume_reading()
        await asyncio.sleep(1)
        assert sum(map(len, pair.server.pieces)) == 1 << 20
        assert pair.server.calls == ["eof", "lost"]
        assert pair.server.error is None
        assert pair.client.calls[-1] == "lost"

    loop.run_until_complete(main())


def test_a_writer_is_paused_and_resumed(loop: SimLoop) -> None:
    async def main() -> None:
        pair = await Pair(loop).open()
        pair.server.transport.pause_reading()
        pair.client.transport.write(bytes(1 << 20))
        assert pair.client.calls == ["paused"]
        assert pair.client.transport.get_write_buffer_size() > HIGH
        pair.server.transport.resume_reading()
        await asyncio.sleep(1)
        assert pair.client.calls == ["paused", "resumed"]
        assert pair.client.transport.get_write_buffer_size() == 0

    loop.run_until_complete(main())


def test_a_half_closed_connection_can_still_send(loop: SimLoop) -> None:
    async def main() -> None:
        pair = await Pair(loop).open()
        pair.server.keep_open = True
        pair.client.transport.write_eof()
        await asyncio.sleep(1)
        pair.server.transport.write(b"reply")
        pair.server.transport.close()
        await asyncio.sleep(1)
        assert (pair.client.pieces, pair.client.calls) == ([b"reply"], ["eof", "lost"])

    loop.run_until_complete(main())


def test_writing_to_a_closed_connection_resets_it(loop: SimLoop) -> None:
    async def main() -> None:
        pair = await Pair(loop).open()
        pair.server.keep_open = True
        pair.client.transport.close()
        await asyncio.sleep(1)
        assert pair.server.calls == ["eof"]
        pair.server.transport.write(b"hello?")
        await asyncio.sleep(1)
        assert isinstance(pair.server.error, ConnectionResetError)

    loop.run_until_complete(main())


def test_each_side_detects_a_broken_connection_after_its_own_delay(loop: SimLoop) -> None:
    async def main() -> None:
        pair = await Pair(loop).open()
        pair.client.transport.write(b"in flight")
        pair.network.cut(next(iter(pair.network.connections)), 1.0, 20.0)
        await asyncio.sleep(2)
        assert pair.client.calls == ["lost"]
        pair.server.transport.write(b"lost")
        await asyncio.sleep(10)
        assert (pair.server.calls, pair.server.pieces) == ([], [])
        await asyncio.sleep(10)
        assert pair.server.calls == ["lost"]

    loop.run_until_complete(main())


def test_after_a_partition_heals_bytes_arrive(loop: SimLoop) -> None:
    async def main() -> None:
        pair = await Pair(loop).open()
        pair.network.partition("a", "b")
        pair.client.transport.write(b"kept")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await loop.spawn(pair.a, pair._connect())
        assert pair.server.pieces == []
        pair.network.heal()
        await asyncio.sleep(1)
        assert pair.server.pieces == [b"kept"]

    loop.run_until_complete(main())


def test_a_crash_ends_the_connections_of_the_process(loop: SimLoop) -> None:
    async def main() -> None:
        pair = await Pair(loop).open()
        loop.kill(pair.b)
        await asyncio.sleep(1)
        assert pair.client.calls == ["eof", "lost"]
        with pytest.raises(ConnectionRefusedError):
            await loop.spawn(pair.a, pair._connect())

    loop.run_until_complete(main())


def test_a_power_failure_is_detected_by_keepalive(loop: SimLoop) -> None:
    async def main() -> None:
        pair = await Pair(loop).open()
        loop.kill(pair.b, silently=True)
        pair.client.transport.write(b"hello?")
        await asyncio.sleep(4)
        assert pair.client.calls == []
        await asyncio.sleep(60)
        assert pair.client.calls == ["lost"]

    loop.run_until_complete(main())


def test_a_stopped_process_reads_buffered_bytes_when_it_continues(loop: SimLoop) -> None:
    async def main() -> None:
        pair = await Pair(loop).open()
        loop.stop_node(pair.b)
        pair.client.transport.write(b"one ")
        pair.client.transport.write(b"two")
        pair.client.transport.close()
        await asyncio.sleep(5)
        assert pair.server.pieces == []
        loop.continue_node(pair.b)
        await asyncio.sleep(1)
        assert b"".join(pair.server.pieces) == b"one two"
        assert pair.server.calls == ["eof", "lost"]

    loop.run_until_complete(main())
