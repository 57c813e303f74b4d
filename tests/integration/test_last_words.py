"""The error before a close arrives, however much the client still sends, and incomplete lines do not fill the memory."""

from __future__ import annotations

import asyncio
from pathlib import Path

import orjson
import pytest

from support.network.certificates import Certificates
from support.network.wire import Wire
from support.processes.servers import WAIT_S, resident_bytes, running_server

pytestmark = pytest.mark.server

TRIES = 20
MEGABYTE = 1 << 20
TOKEN = "a-token-of-the-last-words"  # noqa: S105 - it guards nothing


async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> dict[str, str]:
    """Send everything, then read: the payload of the error that the server closes the connection with."""
    async with asyncio.timeout(WAIT_S):
        writer.write(data)
        await writer.drain()
        message = orjson.loads(await reader.readline())
        assert message["command"] == "error"
        assert await reader.read() == b""
        writer.close()
    payload: dict[str, str] = message["payload"]
    return payload


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"x" * (10 * MEGABYTE), "line-too-long"),
        (b"POST / HTTP/1.1\r\n\r\n" + b"x" * (2 * MEGABYTE), "bad-message"),
        (b"\x16\x03\x01" + b"x" * (2 * MEGABYTE), "bad-message"),
    ],
    ids=["long", "http", "tls"],
)
async def test_an_error_arrives_before_the_end(data: bytes, code: str) -> None:
    with running_server() as genie:
        for _ in range(TRIES):
            assert (await flood(*await asyncio.open_connection(*genie.address), data))["code"] == code


async def test_a_denial_arrives_before_the_end() -> None:
    with running_server(token=TOKEN) as genie:
        for _ in range(TRIES):
            error = await flood(*await asyncio.open_connection(*genie.address), b"x" * (2 * MEGABYTE))
            assert error["code"] == "unauthorized"


async def test_an_error_arrives_before_the_end_by_tls(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    with running_server(tls_cert=certificates.server) as genie:
        for _ in range(5):
            streams = await asyncio.open_connection(*genie.address, ssl=certificates.context())
            assert (await flood(*streams, b"x" * (10 * MEGABYTE)))["code"] == "line-too-long"


async def test_bye_arrives_before_the_end() -> None:
    with running_server() as genie:
        for _ in range(TRIES):
            wire = await Wire.connect(genie.address)
            wire.send("bye")
            for _ in range(20_000):
                wire.send("ping")
            assert await wire.receive() == ("bye", {})
            assert await wire.receive() == ("closed", {})
            await wire.close()


async def test_incomplete_lines_do_not_fill_the_memory() -> None:
    with running_server(max_partial=8 * MEGABYTE) as genie:
        before = resident_bytes(genie)
        held = await Wire.connect(genie.address)
        held.raw(b'{"command":"pi')
        wires = [await Wire.connect(genie.address) for _ in range(64)]
        for wire in wires:
            wire.raw(b"x" * (MEGABYTE - 1))
        answers = {asyncio.create_task(wire.receive()) for wire in wires}
        closed: set[asyncio.Task[tuple[str, dict[str, str]]]] = set()
        async with asyncio.timeout(WAIT_S):
            while len(closed) < 64 - 8:
                done, answers = await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
                closed |= done
        assert {answer.result()[1]["code"] for answer in closed} == {"too-many"}
        assert resident_bytes(genie) - before < 40 * MEGABYTE
        held.raw(b'ng"}\n')
        assert await held.receive() == ("pong", {}), "a short line is not among the longest"
        for answer in answers:
            answer.cancel()
