"""The admin port under many connections that send nothing, little, or slowly: their number is bounded, and a health check gets
its response, from the same address as from another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import gzip
import resource
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop
from aiohttp import web

from genie.admin import AdminServer, connections
from genie.admin.connections import (
    ACCEPTS_PER_ITERATION,
    MAX_CONNECTIONS,
    MAX_PENDING,
    MAX_UNPARSED_BYTES,
    PARSED_BYTES,
    PART_BYTES,
    Admitted,
)
from genie.admin.endpoints import HealthEndpoints
from genie.admin.http import MAX_SLASHES
from genie.cli.serve import OTHER_OPEN_FILES
from genie.config import Settings
from genie.server.app import Server
from support.network.certificates import Certificates
from support.processes.servers import WAIT_S
from support.runs.searches import SOAK

MANY = 3_000 if SOAK else 800
POLLS = 3
BOUND = MAX_PENDING + MAX_CONNECTIONS + 4 * ACCEPTS_PER_ITERATION
"""Connections of the admin port. Some of them are being closed in this and the next iterations of the event loop."""
REQUEST = b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Long: "
BODY = (
    b"POST /api/release HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nX-Genie: 1\r\n"
    b"Content-Length: 1000\r\n\r\n"
)
HALF_CLIENT_HELLO = bytes.fromhex("1603010200010001fc0303") + b"r" * 32
TLS = ("nothing", "half a ClientHello")
"""What is sent to a port with TLS."""
needs_loopbacks = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has all of 127.0.0.0/8")
needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="counts the open files of this process in /proc")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    made = Certificates(tmp_path_factory.mktemp("certificates"))
    made.issue("admin", "127.0.0.1", "127.0.0.2")
    return made


@pytest.fixture(autouse=True)
def _many_files() -> Iterator[None]:
    """Allow this process to open the connections of the clients as well."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], min(2 * MANY + 1_000, limits[1])), limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@asynccontextmanager
async def admin_port(certificate: Path | None = None) -> AsyncIterator[tuple[AdminServer, int]]:
    tls = {} if certificate is None else {"tls_cert": str(certificate)}
    options = {"port": 0, "admin_port": 0, "admin_host": "0.0.0.0", "insecure": True} | tls  # noqa: S104
    admin = AdminServer(Server(Settings.from_options(**options)))
    await admin.start()
    assert admin.address is not None
    try:
        yield admin, admin.address[1]
    finally:
        await admin.stop()


async def status(port: int, address: str, context: ssl.SSLContext | None, path: str = "/livez") -> str:
    """Return the status line of a new connection's request."""
    async with asyncio.timeout(WAIT_S):
        reader, writer = await asyncio.open_connection(address, port, ssl=context, local_addr=(address, 0))
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {address}\r\n\r\n".encode())
        line = await reader.readline()
        writer.transport.abort()
        return line.decode().removeprefix("HTTP/1.1 ").strip()


class Flood:
    """Many clients of one address, each of which sends something. A client whose connection was closed connects again."""

    def __init__(self, port: int, clients: int, send: Callable[[asyncio.StreamWriter], None]) -> None:
        self._port = port
        self._send = send
        self._tasks = [asyncio.create_task(self._run()) for _ in range(clients)]
        self.connections = 0

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
                try:
                    self.connections += 1
                    self._send(writer)
                    await reader.read()
                finally:
                    writer.transport.abort()

    async def reach(self, connections: int) -> None:
        """Wait until this many connections were opened."""
        async with asyncio.timeout(WAIT_S):
            while self.connections < connections:  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


SENT: dict[str, Callable[[asyncio.StreamWriter], None]] = {
    "nothing": lambda _: None,
    "half a ClientHello": lambda writer: writer.write(HALF_CLIENT_HELLO),
    "half a request": lambda writer: writer.write(REQUEST),
    "no body": lambda writer: writer.write(BODY),
}


@needs_loopbacks
@pytest.mark.parametrize("clients", [70, MANY])
@pytest.mark.parametrize("sent", SENT)
async def test_a_health_check_is_answered_among_many_slow_connections(
    sent: str, clients: int, certificates: Certificates
) -> None:
    tls = sent in TLS
    context = certificates.context() if tls else None
    async with admin_port(certificates.folder / "admin.pem" if tls else None) as (_, port):
        flood = Flood(port, clients, SENT[sent])
        try:
            await flood.reach(clients)
            for _ in range(POLLS):
                assert await status(port, "127.0.0.1", context) == "200 OK", "the address of the others"
                assert await status(port, "127.0.0.2", context) == "200 OK"
        finally:
            await flood.stop()


@pytest.mark.parametrize("sent", SENT)
async def test_a_connection_without_a_complete_request_is_closed(
    sent: str, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "FIRST_REQUEST_TIMEOUT_S", 0.05)
    tls = sent in TLS
    async with admin_port(certificates.folder / "admin.pem" if tls else None) as (admin, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        SENT[sent](writer)
        async with asyncio.timeout(WAIT_S):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            while len(admin.connections):  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0)
        writer.close()


@pytest.mark.parametrize("begin", [REQUEST, BODY], ids=["headers", "body"])
async def test_further_bytes_do_not_extend_the_time_of_a_request(begin: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "FIRST_REQUEST_TIMEOUT_S", 0.05)
    async with admin_port() as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(begin)
        ended = asyncio.create_task(reader.read())
        for _ in range(900):  # fewer than Content-Length
            writer.write(b"x")
            await asyncio.wait({ended}, timeout=0.001)
            if ended.done():
                break
        assert ended.done(), "the server waited for all bytes"
        with contextlib.suppress(ConnectionError):
            assert await ended == b""
        writer.transport.abort()


@pytest.mark.parametrize("closes", [False, True])
async def test_a_broken_request_is_no_defect_of_the_server(closes: bool, capsys: pytest.CaptureFixture[str]) -> None:
    async with admin_port() as (admin, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            BODY if closes else BODY.replace(b"Content-Length: 1000", b"Transfer-Encoding: chunked") + b"x\r\n\r\n"
        )
        async with asyncio.timeout(WAIT_S):
            if closes:
                while not len(admin.connections):  # noqa: ASYNC110 - there is no event to wait for
                    await asyncio.sleep(0)
                writer.transport.abort()
            else:
                assert b" 400 Bad Request" in await reader.readline()
                writer.transport.abort()
            while len(admin.connections):  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0)
    assert "admin request failed" not in capsys.readouterr().out


CHUNKS = b"POST /x HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 9_000


async def test_long_input_is_parsed_in_turns_after_short_input(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[int] = [0]
    parse = web.RequestHandler.data_received

    def record(connection: web.RequestHandler, data: bytes) -> None:
        parsed[-1] += len(data)
        parse(connection, data)

    def end_iteration() -> None:
        parsed.append(0)
        loop.call_soon(end_iteration)

    monkeypatch.setattr(web.RequestHandler, "data_received", record)
    loop = asyncio.get_running_loop()
    loop.call_soon(end_iteration)
    async with admin_port() as (admin, port):
        clients = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        for _, writer in clients:
            writer.write(CHUNKS)
        async with asyncio.timeout(WAIT_S):
            while sum(parsed) < len(CHUNKS):  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0)
            assert await status(port, "127.0.0.1", None) == "200 OK"
            assert sum(parsed) < len(clients) * len(CHUNKS), "the health check did not wait for the others"
            for _, writer in clients:
                writer.transport.abort()
            while len(admin.connections):  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0)
    assert max(parsed) <= PARSED_BYTES + PART_BYTES


async def test_a_connection_with_much_unparsed_input_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    abort, errors = Admitted.abort, list[object]()
    parse, parsed_while_closing = web.RequestHandler.data_received, list[bool]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))

    def abort_and_parse(connection: Admitted) -> None:
        abort(connection)
        monkeypatch.setattr(
            connections, "PARSED_BYTES", PARSED_BYTES
        )  # in this iteration, before the connection is lost

    def record(connection: web.RequestHandler, data: bytes) -> None:
        parsed_while_closing.append(connection.transport is None or connection.transport.is_closing())
        parse(connection, data)

    monkeypatch.setattr(web.RequestHandler, "data_received", record)
    monkeypatch.setattr(connections, "FIRST_REQUEST_TIMEOUT_S", 10 * WAIT_S)
    monkeypatch.setattr(connections, "PARSED_BYTES", 0)
    monkeypatch.setattr(Admitted, "abort", abort_and_parse)
    async with admin_port() as (admin, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(CHUNKS)
        async with asyncio.timeout(WAIT_S):
            turns = admin.connections.input_turns
            while not turns._new:  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0)
            writer.write(b"x" * (MAX_UNPARSED_BYTES - len(CHUNKS) + 1 + PART_BYTES))
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            while len(admin.connections):  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0)
        writer.transport.abort()
    gc.collect()  # reports exceptions of tasks
    assert not errors
    assert not any(parsed_while_closing)


HEADERS = b"".join(b"X-%d: %b\r\n" % (number, b"y" * 8_000) for number in range(3))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n" + 3 * HEADERS, id="one request"),
        pytest.param(5 * (b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n" + HEADERS + b"\r\n"), id="several requests"),
    ],
)
async def test_a_connection_with_many_bytes_of_headers_is_closed(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """aiohttp accepts 128 headers of 8 KiB in a request, and keeps 32 requests until earlier ones are handled."""
    never = asyncio.Event()

    async def live(_: HealthEndpoints, __: web.Request) -> web.Response:
        await never.wait()
        return web.Response()

    monkeypatch.setattr(HealthEndpoints, "live", live)
    monkeypatch.setattr(connections, "FIRST_REQUEST_TIMEOUT_S", 10 * WAIT_S)
    monkeypatch.setattr(connections, "IDLE_TIMEOUT_S", 10 * WAIT_S)
    async with admin_port() as (admin, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(WAIT_S):
            with contextlib.suppress(ConnectionError):
                for start in range(0, len(data), PART_BYTES):
                    writer.write(data[start : start + PART_BYTES])
                    await writer.drain()
                    await asyncio.sleep(0)
                assert await reader.read() == b""
            while len(admin.connections):  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0)
        writer.transport.abort()


async def test_a_path_with_many_slashes_is_rejected_before_it_is_looked_up() -> None:
    """aiohttp looks up the path before each slash: 8,000 of them take 10 ms."""
    async with admin_port() as (_, port):
        assert await status(port, "127.0.0.1", None, MAX_SLASHES * "/") == "404 Not Found"
        assert await status(port, "127.0.0.1", None, (MAX_SLASHES + 1) * "/") == "400 Bad Request"


async def test_requests_one_after_the_other_are_handled_in_an_iteration_each(monkeypatch: pytest.MonkeyPatch) -> None:
    iteration, handled_in = 0, list[int]()

    def end_iteration() -> None:
        nonlocal iteration
        iteration += 1
        loop.call_soon(end_iteration)

    async def live(_: HealthEndpoints, __: web.Request) -> web.Response:
        handled_in.append(iteration)
        return web.Response()

    monkeypatch.setattr(HealthEndpoints, "live", live)
    loop = asyncio.get_running_loop()
    loop.call_soon(end_iteration)
    async with admin_port() as (_, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(20 * b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        async with asyncio.timeout(WAIT_S):
            while len(handled_in) < 20:  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0)
        writer.transport.abort()
    assert len(set(handled_in)) == len(handled_in)


async def test_requests_one_after_the_other_may_have_more_bytes() -> None:
    async with admin_port() as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(WAIT_S):
            for _ in range(6):
                writer.write(b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n" + HEADERS + b"\r\n")
                assert b"200 OK" in await reader.readuntil(b"ok\n")
        writer.transport.abort()


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        pytest.param(gzip.compress(b'{"id":7}'), b"Content-Encoding: gzip\r\n", id="compressed"),
        pytest.param(b'{"x":' + b"[" * 1_100 + b"]" * 1_100 + b"}", b"", id="nested"),
    ],
)
async def test_a_body_that_is_not_decompressed_or_nested_deeply_is_rejected(body: bytes, headers: bytes) -> None:
    async with admin_port() as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(BODY.replace(b"1000\r\n", b"%d\r\n%bConnection: close\r\n" % (len(body), headers)) + body)
        async with asyncio.timeout(WAIT_S):
            response = await reader.read()
        writer.transport.abort()
        assert b" 400 Bad Request" in response
        assert b"the body must be" in response


def open_files() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


@needs_proc
@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("sent", SENT)
def test_the_connections_of_the_admin_port_are_bounded(
    sent: str, loop: Callable[[], asyncio.AbstractEventLoop], certificates: Certificates
) -> None:
    async def main() -> None:
        tls = sent in TLS
        async with admin_port(certificates.folder / "admin.pem" if tls else None) as (admin, port):
            before, most = open_files(), 0
            clients: list[socket.socket] = []
            try:
                for number in range(MANY):
                    client = socket.socket()
                    client.setblocking(False)
                    with contextlib.suppress(BlockingIOError):
                        client.connect(("127.0.0.1", port))
                    clients.append(client)
                    if number % ACCEPTS_PER_ITERATION == 0:
                        await asyncio.sleep(0)
                        most = max(most, open_files() - before - len(clients))
                    with contextlib.suppress(OSError):
                        client.send(
                            {"half a request": REQUEST, "no body": BODY}.get(sent, HALF_CLIENT_HELLO if tls else b"")
                        )
                for _ in range(MANY // ACCEPTS_PER_ITERATION + 100):
                    await asyncio.sleep(0)
                    most = max(most, open_files() - before - len(clients))
            finally:
                for client in clients:
                    client.close()
            assert 0 < most <= BOUND
            assert len(admin.connections) <= MAX_PENDING + MAX_CONNECTIONS
            async with asyncio.timeout(WAIT_S):
                while len(admin.connections):  # noqa: ASYNC110 - there is no event to wait for
                    await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())


def test_the_limit_of_open_files_has_room_for_the_admin_port() -> None:
    assert OTHER_OPEN_FILES >= BOUND + 64


@pytest.mark.parametrize(
    "data",
    [b"", REQUEST, b"\0\r\n\r\n", b"GET /x HTTP/1.1\r\n\r\n", b"PUT /livez HTTP/1.1\r\n\r\n", BODY],
    ids=["nothing", "incomplete", "invalid", "not found", "not allowed", "no body"],
)
def test_a_lost_connection_is_freed(data: bytes) -> None:
    """The garbage collector hardly ever reads all objects: otherwise clients without a token fill the memory."""

    def living() -> int:
        return sum(isinstance(each, Admitted) for each in gc.get_objects())

    async def work() -> int:
        async with admin_port() as (admin, port):
            before = living()
            for _ in range(20):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(data)
                await asyncio.sleep(0.005)
                writer.close()
            async with asyncio.timeout(WAIT_S):
                while len(admin.connections):  # noqa: ASYNC110 - the server tells nobody
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            return living() - before

    gc.collect()
    gc.disable()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            assert runner.run(work()) <= 2, "the event loop may keep the last ones"
    finally:
        gc.enable()
