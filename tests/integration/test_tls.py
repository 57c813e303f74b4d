"""TLS of the server, the clients for asyncio and threads, and the command line, with real certificates."""

from __future__ import annotations

import asyncio
import gc
import re
import signal
import socket
import ssl
import struct
import threading
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
import uvloop
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.x509.oid import ExtensionOID
from structlog.testing import capture_logs

import genie
import genie.sync
from genie import opening_turns, tls_accept
from genie.client.config import ClientOptions, parse_addresses
from genie.config import Settings
from genie.errors import Unavailable
from genie.server import connection, listener
from genie.server.app import Server
from genie.server.listener import TlsListener
from genie.server.unread_output import MAX_WRITE_BYTES
from genie.tls_accept import TurnsObject
from support.network.certificates import Certificates
from support.processes.commands import genie_cli
from support.processes.ports import free_port
from support.processes.servers import WAIT_S, Genie, running_server

PING = b'{"command":"ping","payload":{}}\n'


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def tls_server(certificates: Certificates) -> Iterator[Genie]:
    with running_server(tls_cert=certificates.server, log_level="debug") as server:
        yield server


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    """Runs a coroutine in an event loop of each kind."""

    def runs(work: Any) -> Any:
        with asyncio.Runner(loop_factory=request.param) as runner:
            return runner.run(asyncio.wait_for(work, WAIT_S))

    return runs


@asynccontextmanager
async def serving(certificates: Certificates, **settings: Any) -> AsyncIterator[tuple[Server, tuple[str, int]]]:
    """A server in this event loop."""
    server = Server(
        Settings.from_options(**{"port": 0, "admin_port": None, "tls_cert": str(certificates.server), **settings})
    )
    address = await server.start()
    try:
        yield server, address
    finally:
        await server.stop()


async def exchange(address: tuple[str, int], context: ssl.SSLContext | None, data: bytes = PING) -> bytes:
    """Everything that is answered until the first line ends."""
    reader, writer = await asyncio.open_connection(*address, ssl=context)
    try:
        writer.write(data)
        return await reader.readline()
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - the server tells nobody
            await asyncio.sleep(0)


def test_the_client_certificate_determines_the_principal(
    run: Callable[[Any], Any], certificates: Certificates, tmp_path: Path
) -> None:
    alice = certificates.issue("alice", "host.example", common_name="alice")
    nameless = certificates.issue("nameless", "host.example", common_name=None)
    stranger = Certificates(tmp_path).issue("mallory", "host.example", common_name="alice")

    async def work() -> None:
        async with serving(certificates, tls_ca=str(certificates.ca)) as (_, address):
            assert b"pong" in await exchange(address, certificates.context(alice))
            assert b"pong" in await exchange(address, certificates.context(nameless))
            with pytest.raises(ssl.SSLError, match="certificate required"):
                await exchange(address, certificates.context())
            with pytest.raises(ssl.SSLError, match="unknown ca"):
                await exchange(address, certificates.context(stranger))

    with capture_logs() as log:
        run(work())
    names = [line["certificate"] for line in log if line["event"] == "connection opened"]
    assert names == ["alice", "host.example"]
    reasons = [line["reason"] for line in log if line["event"] == "TLS handshake failed"]
    assert "presented no certificate" in reasons[0]
    assert "certificate verification failed" in reasons[1]


def test_very_many_certificates_are_not_decoded(
    run: Callable[[Any], Any], certificates: Certificates, tmp_path: Path
) -> None:
    """OpenSSL would decode 100 KiB of certificates for 60 ms before it finds that no trusted CA has signed them."""
    alice = certificates.issue("alice", "host.example", common_name="alice")
    stranger = Certificates(tmp_path)
    chain = tmp_path / "chain.pem"
    chain.write_bytes(stranger.server.read_bytes() + stranger.ca.read_bytes() * 100)

    async def work() -> None:
        async with serving(certificates, tls_ca=str(certificates.ca)) as (server, address):
            with pytest.raises(OSError):  # noqa: PT011 - how the client notices it depends on the system
                await exchange(address, certificates.context(chain))
            await until(lambda: not len(server.connections))
            # Commands in the same packet as the end of the handshake do not count.
            assert b"pong" in await exchange(address, certificates.context(alice), PING * 2_000)

    with capture_logs() as log:
        run(work())
    (reason,) = [line["reason"] for line in log if line["event"] == "TLS handshake failed"]
    assert "more than 16384 bytes" in reason


def test_a_certificate_whose_name_is_not_utf_8_is_rejected(
    run: Callable[[Any], Any], certificates: Certificates
) -> None:
    """The CA has signed it, but Python cannot decode the name."""
    file = certificates.issue("latin", "host.example")
    shown = x509.load_pem_x509_certificate(file.read_bytes())
    key = serialization.load_pem_private_key(file.read_bytes(), None)
    authority = certificates.authority
    builder = x509.CertificateBuilder().subject_name(x509.Name([])).public_key(shown.public_key())
    builder = builder.issuer_name(shown.issuer).serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(shown.not_valid_before_utc).not_valid_after(shown.not_valid_after_utc)
    names = x509.UnrecognizedExtension(ExtensionOID.SUBJECT_ALTERNATIVE_NAME, b"\x30\x03\x82\x01\xff")
    signer = serialization.load_pem_private_key(authority.private_key_pem.bytes(), None)
    signed = builder.add_extension(names, critical=False).sign(signer, hashes.SHA256())  # type: ignore[arg-type]
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    file.write_bytes(signed.public_bytes(pem) + secret)
    defects = []

    async def work() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: defects.append(context))
        async with serving(certificates, tls_ca=str(certificates.ca)) as (server, address):
            with suppress(OSError):
                assert await exchange(address, certificates.context(file)) == b""
            await until(lambda: not len(server.connections))
        gc.collect()  # reports the exceptions of tasks

    with capture_logs() as log:
        run(work())
    assert [line["reason"] for line in log if line["event"] == "TLS handshake failed"] == [
        "the client presented a certificate with a name that is not UTF-8"
    ]
    assert not defects


def test_versions_before_1_2_and_plain_connections_are_rejected(
    run: Callable[[Any], Any], certificates: Certificates
) -> None:
    old = certificates.context()
    old.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="deprecated"):
        old.minimum_version = ssl.TLSVersion.TLSv1
    with pytest.warns(DeprecationWarning, match="deprecated"):
        old.maximum_version = ssl.TLSVersion.TLSv1_1
    still = certificates.context()
    still.maximum_version = ssl.TLSVersion.TLSv1_2

    async def work() -> None:
        async with serving(certificates) as (server, address):
            with pytest.raises(ssl.SSLError, match="protocol version"):
                await exchange(address, old)
            assert b"pong" in await exchange(address, still)
            assert b"requires TLS" in await exchange(address, None)
            assert b"requires TLS" in await exchange(address, None, b"GET / HTTP/1.1\r\n\r\n")
            await until(lambda: not len(server.connections))

    with capture_logs() as log:
        run(work())
    assert all(line["log_level"] != "error" for line in log)


def test_a_stalled_handshake_is_counted_and_closed(
    run: Callable[[Any], Any], certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with serving(certificates) as (server, address):
            reader, writer = await asyncio.open_connection(*address)
            await until(lambda: len(server.connections) == 1)
            assert not list(server.connections)
            assert await reader.read() == b""
            await until(lambda: not len(server.connections))
            writer.close()

    monkeypatch.setattr(listener, "HANDSHAKE_TIMEOUT_S", 0.2)
    with capture_logs() as log:
        run(work())
    assert [line["reason"] for line in log if line["event"] == "TLS handshake failed"] == ["timed out after 0.2 s"]


def test_handshakes_at_the_same_moment_take_turns(
    run: Callable[[Any], Any], certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handshake takes about a millisecond, and thousands of clients may begin theirs at once, without a token."""
    steps = 0
    do_handshake = ssl.SSLObject.do_handshake

    def count(handshake: ssl.SSLObject) -> None:
        nonlocal steps
        steps += 1
        do_handshake(handshake)

    def client_hello() -> bytes:
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        with suppress(ssl.SSLWantReadError):
            do_handshake(certificates.context().wrap_bio(incoming, outgoing, server_hostname="localhost"))
        return outgoing.read()

    async def work() -> None:
        async with serving(certificates) as (server, address):
            clients = [await asyncio.open_connection(*address) for _ in range(20)]
            await until(lambda: len(server.connections) == len(clients) and steps == len(clients))
            for _, writer in clients:
                writer.write(client_hello())
            while steps < 2 * len(clients):
                before = steps
                await asyncio.sleep(0)
                assert steps - before <= 2
            for reader, writer in clients:
                assert await reader.readexactly(1) == b"\x16"
                writer.transport.abort()
            await until(lambda: not len(server.connections))
            assert b"pong" in await exchange(address, certificates.context())

    monkeypatch.setattr(ssl.SSLObject, "do_handshake", count)
    monkeypatch.setattr(opening_turns, "OPENING_BATCH_S", 0.0)
    run(work())


@pytest.mark.parametrize(("established", "reset"), [(False, False), (False, True), (True, False)])
def test_connections_that_are_lost_at_the_same_moment_end_in_turns(
    run: Callable[[Any], Any],
    certificates: Certificates,
    monkeypatch: pytest.MonkeyPatch,
    established: bool,
    reset: bool,
) -> None:
    """The end of 9,000 handshakes takes 0.4 s, and their clients need no token."""

    def connect(address: tuple[str, int]) -> socket.socket:
        sock = socket.create_connection(address)
        if reset:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return certificates.context().wrap_socket(sock, server_hostname="localhost") if established else sock

    async def work() -> None:
        async with serving(certificates) as (server, address):
            clients = [await asyncio.to_thread(connect, address) for _ in range(20)]
            await until(lambda: len(server.connections) == len(clients))
            for _ in range(5 * len(clients)):  # until all handshakes have begun
                await asyncio.sleep(0)
            for client in clients:
                client.close()
            left = len(clients)
            while left:
                await asyncio.sleep(0)
                before, left = left, len(server.connections)
                assert before - left <= 2
            assert b"pong" in await exchange(address, certificates.context())

    monkeypatch.setattr(opening_turns, "OPENING_BATCH_S", 0.0)
    run(work())


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("established", [False, True])
def test_a_lost_connection_is_freed(certificates: Certificates, established: bool, reset: bool) -> None:
    """The garbage collector hardly ever reads all objects: otherwise clients without a token fill the memory."""

    def living() -> int:
        return sum(isinstance(each, tls_accept.Turn) for each in gc.get_objects())

    async def work() -> int:
        async with serving(certificates) as (server, address):
            before = living()
            for _ in range(20):
                context = certificates.context() if established else None
                reader, writer = await asyncio.open_connection(*address, ssl=context)
                writer.write(PING if established else b"\x16\x03\x01")  # the begin of a handshake
                await until(lambda: len(server.connections) == 1)
                if established:
                    assert b"pong" in await reader.readline()
                if reset:
                    writer.transport.abort()
                else:
                    writer.close()
                await until(lambda: not len(server.connections))
            await asyncio.sleep(0.1)
            return living() - before

    gc.collect()
    gc.disable()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # an error of asyncio refers to itself
            assert runner.run(work()) <= 2, "the event loop may keep the last ones"
    finally:
        gc.enable()


def test_long_input_takes_turns(
    run: Callable[[Any], Any], certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """32 KiB of key updates take 10 ms, and a client needs no token to send them."""
    reads = 0
    read = ssl.SSLObject.read

    def count(tls: ssl.SSLObject, *arguments: Any) -> Any:
        nonlocal reads
        reads += isinstance(tls, TurnsObject)
        return read(tls, *arguments)

    async def work() -> None:
        async with serving(certificates) as (server, address):
            clients = [await asyncio.open_connection(*address, ssl=certificates.context()) for _ in range(20)]
            await until(lambda: len(list(server.connections)) == len(clients))
            monkeypatch.setattr(ssl.SSLObject, "read", count)
            for _, writer in clients:
                writer.write(PING * 100)
            while reads < len(clients):
                before = reads
                await asyncio.sleep(0)
                assert reads - before <= 4  # asyncio reads until nothing is left
            for reader, writer in clients:
                for _ in range(100):
                    assert b"pong" in await reader.readline()
                writer.write(PING)  # nothing is left paused
                assert b"pong" in await reader.readline()
                writer.close()
            await until(lambda: not len(server.connections))

    monkeypatch.setattr(opening_turns, "OPENING_BATCH_S", 0.0)
    run(work())


def test_principals_take_turns_with_long_input(
    run: Callable[[Any], Any], certificates: Certificates, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(f'[many]\ntoken = "{"m" * 20}"\n[few]\ntoken = "{"f" * 20}"\n')
    tokens.chmod(0o600)

    async def connect(address: tuple[str, int], token: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*address, ssl=certificates.context())
        writer.write(b'{"command":"hello","payload":{"token":"%s"}}\n' % token.encode())
        assert b"welcome" in await reader.readline()
        return reader, writer

    async def work() -> None:
        async with serving(certificates, token_file=str(tokens)) as (server, address):
            many = [await connect(address, "m" * 20) for _ in range(20)]
            reader, few = await connect(address, "f" * 20)
            for _, writer in many:
                writer.write(PING * 100)
            few.write(PING * 100)
            for _ in range(100):
                assert b"pong" in await reader.readline()
            assert sum(len(stream._buffer) > 0 for stream, _ in many) < 10, "the others still wait"  # type: ignore[attr-defined]
            for stream, writer in many:
                for _ in range(100):
                    assert b"pong" in await stream.readline()
                writer.close()
            few.close()
            await until(lambda: not len(server.connections))

    monkeypatch.setattr(opening_turns, "OPENING_BATCH_S", 0.0)
    run(work())


def test_encrypted_output_that_a_client_does_not_read_is_counted(
    run: Callable[[Any], Any], certificates: Certificates
) -> None:
    """The TLS protocol of the event loop passes on all that it has as soon as a client has read a little, and counts nothing."""
    line, count = b"x" * 100_000 + b"\n", 80

    def connect(address: tuple[str, int]) -> ssl.SSLSocket:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(WAIT_S)
        sock.connect(address)
        return certificates.context().wrap_socket(sock, server_hostname="localhost")

    async def work() -> None:
        async with serving(certificates) as (server, address):
            client = await asyncio.to_thread(connect, address)
            await until(lambda: list(server.connections))
            (connection,) = server.connections
            below_tls = connection._transport.get_extra_info("ssl_object").turn._transport
            for _ in range(count):
                connection._write(line)
            read_bytes = most_passed_on = 0
            while read_bytes < len(line) * count:
                encrypted_bytes = below_tls.get_write_buffer_size()
                most_passed_on = max(most_passed_on, encrypted_bytes)
                if encrypted_bytes > 4 << 10:
                    assert connection.write_blocked, f"{encrypted_bytes} bytes below TLS"
                    assert connection.unread_bytes >= encrypted_bytes
                    assert server.unread_output.bytes > 0
                read_bytes += len(await asyncio.to_thread(client.recv, 16 << 10))
            assert 4 << 10 < most_passed_on < 3 * MAX_WRITE_BYTES, (
                "a part of the output, and few bytes of the one before"
            )
            await until(lambda: not connection.write_blocked)
            assert server.unread_output.bytes == 0
            client.sendall(PING)
            assert b"pong" in await asyncio.to_thread(client.recv, 1024)
            client.close()

    run(work())


def test_handshakes_count_for_the_limits(run: Callable[[Any], Any], certificates: Certificates) -> None:
    async def work() -> None:
        async with serving(certificates, max_connections_per_address=2) as (server, address):
            stalled = [await asyncio.open_connection(*address) for _ in range(2)]
            await until(lambda: len(server.connections) == 2)
            assert b"too-many" in await exchange(address, certificates.context())
            for _, writer in stalled:
                writer.transport.abort()
            await until(lambda: not len(server.connections))
            assert b"pong" in await exchange(address, certificates.context())

    run(work())


def test_handshakes_beyond_the_limit_are_closed_at_once(run: Callable[[Any], Any], certificates: Certificates) -> None:
    async def work() -> None:
        async with serving(certificates, max_connections=1) as (server, address):
            many = [await asyncio.open_connection(*address) for _ in range(18)]
            assert await many[17][0].read() == b""  # one has a place, sixteen would be told why they have none
            assert isinstance(server._listener, TlsListener)
            assert len(server._listener._handshakes) == 17
            for _, writer in many:
                writer.transport.abort()

    run(work())


def test_a_shutdown_ends_handshakes_and_connections(run: Callable[[Any], Any], certificates: Certificates) -> None:
    async def work() -> None:
        async with serving(certificates) as (server, address):
            begun, writer = await asyncio.open_connection(*address)
            await until(lambda: len(server.connections) == 1)
            done, other = await asyncio.open_connection(*address, ssl=certificates.context())
            other.write(PING)
            await done.readline()
            await server.stop()
            assert await begun.read() == b""
            assert await done.read() == b""
            assert not len(server.connections)
            writer.close()
            other.close()

    run(work())


def test_a_shutdown_ends_all_handshakes_in_a_few_iterations(
    run: Callable[[Any], Any], certificates: Certificates
) -> None:
    """New clients are rejected meanwhile, and other clients may make each iteration of the event loop long."""

    async def work() -> None:
        async with serving(certificates) as (server, address):
            begun = [await asyncio.open_connection(*address) for _ in range(20)]
            await until(lambda: len(server.connections) == len(begun))
            assert isinstance(server._listener, TlsListener)
            closing, iterations = asyncio.create_task(server._listener.close()), 0
            while not closing.done():
                await asyncio.sleep(0)
                iterations += 1
            assert iterations < len(begun)
            for reader, writer in begun:
                assert await reader.read() == b""
                writer.close()

    run(work())


def test_many_commands_at_once_are_answered_in_order(run: Callable[[Any], Any], certificates: Certificates) -> None:
    many = 20_000
    command = b'{"command":"request","payload":{"resources":["exclusive:%d"],"ref":"%d"}}\n'

    async def work() -> None:
        async with serving(certificates) as (_, address):
            reader, writer = await asyncio.open_connection(*address, ssl=certificates.context())
            writer.write(b"".join(command % (n, n) for n in range(many)))
            refs = []
            while len(refs) < many:
                message = orjson.loads(await reader.readline())
                if message["command"] == "queued":
                    refs.append(int(message["payload"]["ref"]))
            assert refs == list(range(many))
            writer.transport.abort()

    run(work())


def test_both_clients_lock(run: Callable[[Any], Any], certificates: Certificates, tls_server: Genie) -> None:
    async def work() -> None:
        async with (
            genie.connect(*tls_server.address, ssl=certificates.context()) as client,
            client.lock("mine"),
            asyncio.TaskGroup() as group,
        ):
            for _ in range(50):
                group.create_task(client.ping())

    run(work())
    with genie.sync.connect(*tls_server.address, ssl=certificates.context()) as client, client.lock("mine") as lock:
        assert client.inspect(resource="mine").holders[0].id == lock.id


def test_threads_share_a_tls_connection(certificates: Certificates, tls_server: Genie) -> None:
    inside, most = 0, 0
    failed: list[BaseException] = []

    def work(client: genie.sync.Client) -> None:
        nonlocal inside, most
        try:
            for _ in range(100):
                with client.lock("one"):
                    inside += 1
                    most = max(most, inside)
                    client.inspect(resource="one")
                    inside -= 1
        except BaseException as error:  # noqa: BLE001 - told below
            failed.append(error)

    with genie.sync.connect(*tls_server.address, ssl=certificates.context()) as client:
        threads = [threading.Thread(target=work, args=(client,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failed
    assert most == 1


def test_data_larger_than_a_tls_record_arrives_complete(certificates: Certificates, tls_server: Genie) -> None:
    names = [f"{'x' * 200}{n}" for n in range(1000)]
    with genie.sync.connect(*tls_server.address, ssl=certificates.context()) as client:
        lock = client.acquire_any(names, len(names))
        assert [resource.removeprefix("exclusive:") for resource in lock.resources] == names
        lock.release()


@pytest.mark.parametrize("threads", [False, True])
def test_a_client_reconnects_after_a_killed_server(certificates: Certificates, threads: bool) -> None:
    with running_server(tls_cert=certificates.server) as server:
        up, again = threading.Event(), threading.Event()

        def kill() -> None:
            assert up.wait(WAIT_S)
            server.kill()
            server.start()
            again.set()

        killer = threading.Thread(target=kill)
        killer.start()
        if threads:
            with genie.sync.connect(*server.address, ssl=certificates.context()) as client:
                client.ping()
                up.set()
                assert again.wait(WAIT_S)
                with client.lock("after"):
                    pass
        else:

            async def work() -> None:
                async with genie.connect(*server.address, ssl=certificates.context()) as client:
                    await client.ping()
                    up.set()
                    await asyncio.to_thread(again.wait, WAIT_S)
                    async with client.lock("after"):
                        pass

            asyncio.run(work())
        killer.join()


@pytest.mark.parametrize("threads", [False, True])
def test_a_client_reads_its_certificates_again_for_every_connection(
    certificates: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: bool
) -> None:
    def replace_files(issuer: Certificates) -> None:
        ca.write_bytes(issuer.ca.read_bytes())
        own.write_bytes(issuer.issue("client", common_name="a client").read_bytes())

    def reconnect() -> None:
        connection = client._connection.aio
        connection._loop.call_soon_threadsafe(connection._handler.transport.abort)  # type: ignore[union-attr]

    async def lock() -> None:
        async with genie.connect("127.0.0.1", server.port, ssl=True) as client:
            replace_files(foreign)
            client._connection._handler.transport.abort()  # type: ignore[union-attr]
            with pytest.raises(Unavailable, match="certificate verification failed"):
                while True:
                    with suppress(genie.ConnectionLost):  # the end of the connection was not noticed yet
                        await client.ping()
            replace_files(certificates)
            async with client.lock("rotated", queue_timeout=WAIT_S):
                pass

    ca, own = tmp_path / "ca.pem", tmp_path / "own.pem"
    (tmp_path / "foreign").mkdir()
    foreign = Certificates(tmp_path / "foreign")
    replace_files(certificates)
    monkeypatch.setenv("GENIE_TLS_CA", str(ca))
    monkeypatch.setenv("GENIE_TLS_CERT", str(own))
    with running_server(tls_cert=certificates.server, tls_ca=certificates.ca) as server:
        if not threads:
            asyncio.run(asyncio.wait_for(lock(), WAIT_S))
            return
        with genie.sync.connect("127.0.0.1", server.port, ssl=True) as client:
            replace_files(foreign)
            reconnect()
            with pytest.raises(Unavailable, match="certificate verification failed"):
                while True:
                    with suppress(genie.ConnectionLost):
                        client.ping()
            replace_files(certificates)
            with client.lock("rotated", queue_timeout=WAIT_S):
                pass


def connection_errors(address: tuple[str, int], context: ssl.SSLContext | None) -> set[str]:
    """What both clients say."""
    said = []
    addresses, once = parse_addresses(*address, ssl=context), ClientOptions(waits_for_servers=False)

    async def work() -> None:
        async with genie.Client(addresses, once):
            pass

    with pytest.raises(Unavailable) as caught:
        asyncio.run(work())
    said.append(str(caught.value))
    with pytest.raises(Unavailable) as caught, genie.sync.Client(addresses, once):
        pass
    said.append(str(caught.value))
    assert all("\n" not in text for text in said)
    return {text.partition(": ")[2] for text in said}


@pytest.mark.parametrize(
    ("names", "expired", "why"),
    [(("127.0.0.1",), True, "certificate has expired"), (("elsewhere.example",), False, "not valid for '127.0.0.1'")],
)
def test_a_wrong_server_certificate_is_explained(
    certificates: Certificates, names: tuple[str, ...], expired: bool, why: str
) -> None:
    with running_server(tls_cert=certificates.issue("wrong", *names, expired=expired)) as server:
        (said,) = connection_errors(server.address, certificates.context())
        assert why in said


def test_incompatible_peers_are_explained(certificates: Certificates, tls_server: Genie, genie: Genie) -> None:
    assert (
        connection_errors(tls_server.address, ssl.create_default_context()).pop().endswith("local issuer certificate")
    )
    assert connection_errors(genie.address, certificates.context()) == {"TLS: the peer does not speak TLS"}
    (said,) = connection_errors(tls_server.address, None)
    assert "this server requires TLS" in said
    with running_server(tls_cert=certificates.server, tls_ca=certificates.ca) as strict:
        assert connection_errors(strict.address, certificates.context()) == {
            "TLS: the peer requires a certificate, and none was presented"
        }


def test_the_command_line_uses_tls(certificates: Certificates, tls_server: Genie) -> None:
    host = f"genies://127.0.0.1:{tls_server.port}"
    for parts in (
        ("status",),
        ("inspect", "--resource", "nothing"),
        ("run", "cli", "--", "true"),
        ("bench", "own", "--connections", "2", "--seconds", "1", "--warm-up", "0"),
    ):
        name, *rest = parts
        done = genie_cli(name, "--host", host, *rest, tls_ca=certificates.ca)
        assert done.returncode == 0, done.stderr
    assert "certificate verification failed" in genie_cli("status", "--host", host).stderr
    assert "GENIE_TLS_CA: /nowhere can't be read" in genie_cli("status", "--host", host, tls_ca="/nowhere").stderr


def test_certificates_are_reloaded(certificates: Certificates) -> None:
    certificate = certificates.issue("renewed", "127.0.0.1")
    admin_port = free_port()
    with running_server(tls_cert=certificate, admin_port=admin_port) as server:

        def expiry() -> float:
            url = f"https://127.0.0.1:{admin_port}/metrics"
            with urllib.request.urlopen(url, context=certificates.context()) as response:
                metrics = response.read().decode()
            (value,) = re.findall(r"^genie_certificate_expiry_timestamp_seconds (.*)$", metrics, re.MULTILINE)
            return float(value)

        def serial() -> object:
            with (
                socket.create_connection(server.address) as plain,
                certificates.context().wrap_socket(plain, server_hostname="127.0.0.1") as wrapped,
            ):
                return wrapped.getpeercert()["serialNumber"]  # type: ignore[index]

        before = serial()
        until = datetime(2033, 5, 17, tzinfo=UTC)
        certificates.issue("renewed", "127.0.0.1", until=until)
        assert serial() == before
        server.send(signal.SIGHUP)
        server.until("certificates reloaded")
        renewed = serial()
        assert renewed != before
        assert expiry() == until.timestamp()
        certificate.write_text("nothing")
        server.send(signal.SIGHUP)
        assert "GENIE_TLS_CERT: there is no certificate" in server.until("certificate reload failed")["reason"]
        assert serial() == renewed


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"tls_key": "{server}"}, "GENIE_TLS_KEY is set, but GENIE_TLS_CERT"),
        ({"tls_ca": "{ca}"}, "GENIE_TLS_CA is set, but GENIE_TLS_CERT"),
        ({"tls_cert": "/nowhere"}, "GENIE_TLS_CERT: /nowhere can't be read: No such file or directory"),
        ({"tls_cert": "{server}", "tls_key": "/nowhere"}, "GENIE_TLS_KEY: /nowhere can't be read"),
        ({"tls_cert": "{ca}"}, "GENIE_TLS_CERT: there is no private key in {ca}"),
        ({"tls_cert": "{server}", "tls_key": "{foreign}"}, "does not belong to the certificate in {server}"),
        ({"tls_cert": "{server}", "tls_key": "{locked}"}, "GENIE_TLS_KEY: the key in {locked} is encrypted"),
        ({"tls_cert": "{server}", "tls_ca": "{junk}"}, "GENIE_TLS_CA: there is no certificate in {junk}"),
        ({"tls_cert": "{broken}"}, "GENIE_TLS_CERT: {broken} can't be used"),
    ],
)
def test_wrong_settings_are_explained(certificates: Certificates, settings: dict[str, str], why: str) -> None:
    from cryptography.hazmat.primitives import serialization

    files = {
        "server": certificates.server,
        "ca": certificates.ca,
        "foreign": certificates.issue("foreign", "x.example"),
    }
    files |= {name: certificates.folder / name for name in ("locked", "junk", "broken")}
    key = serialization.load_pem_private_key(certificates.server.read_bytes(), None)
    files["locked"].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    files["junk"].write_text("junk")
    files["broken"].write_bytes(certificates.server.read_bytes().replace(b"M", b"!"))
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is compared
        Server(Settings.from_options(**{name: value.format(**files) for name, value in settings.items()}))
    assert why.format(**files) in str(caught.value)
    assert "\n" not in str(caught.value)


async def test_the_admin_port_uses_tls(certificates: Certificates, tmp_path: Path) -> None:
    other = Certificates(tmp_path)
    alice = certificates.issue("alice", "host.example", common_name="alice")
    stranger = other.issue("mallory", "host.example", common_name="mallory")
    certificate = certificates.issue("admin", "127.0.0.1")
    with running_server(tls_cert=certificate, tls_ca=certificates.ca, admin_port=(port := Genie().port)) as server:

        async def live(context: ssl.SSLContext) -> str:
            async with aiohttp.ClientSession() as web, web.get(f"https://127.0.0.1:{port}/livez", ssl=context) as got:
                return await got.text()

        assert await live(certificates.context()) == "ok\n"
        assert await live(certificates.context(alice)) == "ok\n"
        with pytest.raises(aiohttp.ClientError):
            await live(certificates.context(stranger))
        new = other.issue("new", "127.0.0.1")
        certificate.write_bytes(new.read_bytes())
        server.send(signal.SIGHUP)
        await asyncio.to_thread(server.until, "certificates reloaded")
        assert await live(other.context()) == "ok\n"


def test_close_notify_is_sent_at_once(
    run: Callable[[Any], Any], certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TLS can't be half-closed: waiting for the client to close first would tell it nothing."""
    monkeypatch.setattr(connection, "LINGER_S", 10 * WAIT_S)
    monkeypatch.setattr(connection, "LINGER_IDLE_S", 10 * WAIT_S)

    async def work() -> None:
        async with serving(certificates) as (_, address):
            reader, writer = await asyncio.open_connection(*address, ssl=certificates.context())
            writer.write(b'{"command":"bye"}\n')
            assert orjson.loads(await reader.readline())["command"] == "bye"
            assert await reader.read() == b""
            writer.close()

    run(work())


@pytest.mark.parametrize("authenticated", [True, False])
def test_a_connection_whose_client_ends_while_its_input_is_not_read_is_closed(
    run: Callable[[Any], Any], certificates: Certificates, monkeypatch: pytest.MonkeyPatch, authenticated: bool
) -> None:
    monkeypatch.setattr(listener, "TLS_SHUTDOWN_TIMEOUT_S", 10 * WAIT_S)
    inspects = b'{"command":"inspect","payload":{}}\n' * 300  # a batch executes one of them
    wrong_hello = b'{"command":"hello","payload":{"protocol":1,"token":"%b"}}\n' % (b"x" * 64)

    async def work() -> None:
        settings = {"max_line": 1_000} if authenticated else {"token": "y" * 64}
        async with serving(certificates, **settings) as (server, address):
            clients = [await asyncio.open_connection(*address, ssl=certificates.context()) for _ in range(20)]
            for _, writer in clients:
                writer.write(inspects + b"x" * 2_000 if authenticated else wrong_hello)
                writer.transport.abort()
            await until(lambda: not len(server.connections))

    monkeypatch.setattr(opening_turns, "OPENING_BATCH_S", 0.0)  # one first line in an iteration of the event loop
    run(work())
