"""Invalid input: it is sent one error, changes nothing, and does not affect other clients."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator

import pytest

from support.network.wire import Wire
from support.processes.servers import Genie, resident_bytes, running_server


@pytest.fixture(scope="module")
def genie() -> Iterator[Genie]:
    with running_server() as server:
        yield server


REQUEST = b'{"command":"request","payload":{"resources":%b}}'
WITH = b'{"command":"request","payload":{"resources":["exclusive:x"],"ref":"r",%b}}'

INVALID_LINES = [
    (b"hello", "bad-json", None),
    (b"{", "bad-json", None),
    (b'{"command":"ping","payload":{}} x', "bad-json", None),
    (b'{"command":"ping","payload":{"x":NaN}}', "bad-json", None),
    (b'{"command":"ping","payload":{"x":1e400}}', "bad-json", None),
    (b'{"command":"ping","payload":{"x":Infinity}}', "bad-json", None),
    (b'{"command":"ping","payload":{"x":"\xff"}}', "bad-json", None),
    (b'{"command":"ping","payload":{"x":"\\ud800"}}', "bad-json", None),
    (b'{"command":"ping","payload":{"x":"\xed\xa0\x80"}}', "bad-json", None),
    (b"[" * 100_000, "bad-json", None),
    (b"[" * 255 + b"]" * 255, "bad-json", None),
    (b'{"command":"ping","payload":' + b"[" * 1_000 + b"]" * 1_000 + b"}", "bad-json", None),
    (b'{"a":' * 100_000, "bad-json", None),
    (b'{"command":"ping","payload":{"x":' + b"[" * 30 + b"]" * 30 + b"}}", "bad-json", None),
    (b"\xef\xbb\xbf{}", "bad-json", None),
    (b"\x00", "bad-json", None),
    (b"[]", "bad-message", None),
    (b"1", "bad-message", None),
    (b"null", "bad-message", None),
    (b'"ping"', "bad-message", None),
    (b"{}", "bad-message", None),
    (b'{"command":1,"payload":{}}', "bad-message", None),
    (b'{"command":"ping","payload":[]}', "bad-message", None),
    (b'{"command":"request"}', "bad-message", "payload"),
    (b'{"command":"fly","payload":{}}', "unknown-command", "fly"),
    (b'{"command":"ping","payload":{},"payloads":{}}', "bad-message", "payloads"),
    (WITH % b'"transactionTimout":5', "bad-request", "did you mean 'transactionTimeout'?"),
    (WITH % b'"unknown":null', "bad-request", "unknown"),
    (WITH % b'"note":""', "bad-request", "note"),
    (
        WITH % b'"traceparent":"00-4BF92F3577B34DA6A3CE929D0E0E4736-00F067AA0BA902B7-01"',
        "bad-request",
        "request: traceparent must be a traceparent of W3C",
    ),
    (WITH % b'"traceparent":"00-00000000000000000000000000000000-00f067aa0ba902b7-01"', "bad-request", "traceparent"),
    (WITH % b'"note":"a\\nb"', "bad-request", "control"),
    (WITH % (b'"note":"' + b"n" * 257 + b'"'), "bad-request", "256"),
    (b'{"command":"request","payload":{"anyOf":["exclusive:a"],"target":0.5}}', "bad-request", "target"),
    (b'{"command":"request","payload":{"anyOf":["exclusive:a"],"target":"0x1"}}', "bad-request", "target"),
    (b'{"command":"request","payload":{"anyOf":["exclusive:a"],"target":1,"weights":[1.5]}}', "bad-request", "weights"),
    (b'{"command":"release","payload":{}}', "bad-request", "id is missing"),
    (b'{"command":"release","payload":{"ref":"r"}}', "unknown-id", "'r'"),
    (b'{"command":"release","payload":{"id":1,"reason":"done"}}', "bad-request", "reason"),
    (b'{"command":"extend","payload":{"id":1,"transactionTimeout":1,"limit":1}}', "bad-request", "limit"),
    (b'{"command":"bye","payload":{"session":"a secret of sixteen"}}', "bad-request", "session"),
    (b'{"command":"inspect","payload":{"only":"holder"}}', "bad-request", "only"),
    (b'{"command":"watch","payload":{"prefix":"","namespaces":["genie"]}}', "bad-request", "did you mean 'namespace'?"),
    (b'{"command":"hello","payload":{"protocol":2}}', "unsupported-protocol", "protocol 2"),
    (b'{"command":"hello","payload":{"quiet":1}}', "bad-request", "quiet"),
    (b'{"command":"hello","payload":{"client":"a\\nb"}}', "bad-request", "client"),
    (b'{"command":"hello","payload":{"namespace":"zzz"}}', "unknown-namespace", "zzz"),
    (b'{"command":"request","payload":{}}', "bad-request", "resources"),
    (REQUEST % b"[]", "bad-request", "resources"),
    (REQUEST % b'"exclusive:a"', "bad-request", "resources"),
    (REQUEST % b"[1]", "bad-request", "resources"),
    (REQUEST % b"[null]", "bad-request", "resources"),
    (REQUEST % b'["a"]', "bad-request", "shared:"),
    (REQUEST % b'["Exclusive:a"]', "bad-request", "shared:"),
    (REQUEST % b'["exclusive:"]', "bad-request", "512"),
    (REQUEST % (b'["exclusive:' + b"a" * 513 + b'"]'), "bad-request", "512"),
    (REQUEST % b'["exclusive:a\\u0000b"]', "bad-request", "control"),
    (REQUEST % b'["exclusive:a\\u0085b"]', "bad-request", "control"),
    (REQUEST % (b"[" + b",".join(b'"exclusive:%d"' % i for i in range(1025)) + b"]"), "bad-request", "1024"),
    (REQUEST % (b"[" + b",".join(b'"exclusive:%d"' % i for i in range(30_000)) + b"]"), "bad-request", "1024"),
    (WITH % b'"queueTimeout":-1', "bad-request", "queueTimeout"),
    (WITH % b'"queueTimeout":2147483648', "bad-request", "queueTimeout"),
    (WITH % b'"queueTimeout":true', "bad-request", "queueTimeout"),
    (WITH % b'"queueTimeout":"5"', "bad-request", "queueTimeout"),
    (WITH % b'"transactionTimeout":0', "bad-request", "transactionTimeout"),
    (WITH % b'"transactionTimeout":0.5', "bad-request", "transactionTimeout"),
    (WITH % b'"transactionTimeout":1e99', "bad-request", "transactionTimeout"),
    (WITH % b'"priority":"high"', "bad-request", "priority"),
    (WITH % b'"priority":2147483649', "bad-request", "priority"),
    (WITH % b'"priority":false', "bad-request", "priority"),
    (WITH % b'"transactionName":""', "bad-request", "transactionName"),
    (WITH % b'"transactionName":7', "bad-request", "transactionName"),
    (WITH % (b'"transactionName":"' + b"t" * 513 + b'"'), "bad-request", "transactionName"),
    (WITH % b'"transactionName":"a\\nb"', "bad-request", "transactionName"),
    (WITH % b'"onDisconnect":"drop"', "bad-request", "onDisconnect"),
    (WITH % b'"onDisconnect":["keep"]', "bad-request", "onDisconnect"),
    (REQUEST % b'["exclusive:x"],"ref":""', "bad-request", "ref"),
    (REQUEST % b'["exclusive:x"],"ref":5', "bad-request", "ref"),
    (REQUEST % (b'["exclusive:x"],"ref":"' + b"r" * 129 + b'"'), "bad-request", "ref"),
    (b'{"command":"release","payload":{}}', "bad-request", "id"),
    (b'{"command":"release","payload":{"id":"7"}}', "bad-request", "id"),
    (b'{"command":"release","payload":{"id":7.5}}', "bad-request", "id"),
    (b'{"command":"release","payload":{"id":true}}', "bad-request", "id"),
    (b'{"command":"extend","payload":{"id":7}}', "bad-request", "transactionTimeout"),
    (b'{"command":"inspect","payload":{"limit":0}}', "bad-request", "limit"),
    (b'{"command":"inspect","payload":{"resource":5}}', "bad-request", "resource"),
    (b'{"command":"inspect","payload":{"only":["queue"]}}', "bad-request", 'only must be "holders" or "queue"'),
]


@pytest.fixture
async def wire(genie: Genie) -> AsyncIterator[Wire]:
    client = await Wire.connect(genie.address)
    yield client
    await client.close()


@pytest.mark.parametrize(("line", "code", "expected_text"), INVALID_LINES, ids=lambda value: repr(value)[:60])
async def test_an_invalid_line_is_sent_one_error_and_changes_nothing(
    wire: Wire, line: bytes, code: str, expected_text: str | None
) -> None:
    wire.raw(line + b"\n")
    error = await wire.expect("error")
    assert error["code"] == code, error
    assert expected_text is None or expected_text in error["message"], error
    assert error.get("ref") == ("r" if b'"ref":"r"' in line else None)
    if b"hello" in line:
        wire.send("hello")
        await wire.expect("welcome")
    wire.send("inspect")
    inspected = await wire.expect("inspected")
    assert (inspected["holdersTotal"], inspected["queueTotal"]) == (0, 0)


UNUSUAL_VALID_LINES = [
    REQUEST % b'["exclusive:a:b/c \xc3\xa9\\ud83d\\ude00"]',
    REQUEST % (b'["exclusive:' + b"\xf0\x9f\x98\x80" * 512 + b'"]'),
    WITH % b'"queueTimeout":null,"priority":null,"transactionName":null,"onDisconnect":null,"transactionTimeout":null',
    WITH % b'"note":"nightly job, host-7","queueTimeout":0.5,"queueTimeout":7',
    WITH % b'"transactionTimeout":2147483647,"queueTimeout":2147483647,"priority":-2147483648',
    REQUEST % (b"[" + b",".join(b'"shared:%d"' % i for i in range(1024)) + b"]"),
    b'  { "payload" : { "resources" : [ "shared:ws" ] } , "command" : "request" } \r',
]


@pytest.mark.parametrize("line", UNUSUAL_VALID_LINES, ids=lambda value: repr(value)[:60])
async def test_unusual_but_valid_lines_are_accepted(wire: Wire, line: bytes) -> None:
    wire.raw(line + b"\n")
    id_ = (await wire.expect("queued"))["id"]
    await wire.expect("locked")
    await wire.release(id_)


async def test_a_line_that_is_too_long_is_not_buffered(genie: Genie, wire: Wire) -> None:
    flood = await Wire.connect(genie.address)
    before = resident_bytes(genie)
    try:
        for _ in range(64):
            flood.raw(b"x" * (1 << 20))
            await flood.writer.drain()
    except OSError:
        pass  # the server has closed the connection
    assert resident_bytes(genie) - before < 16 << 20
    wire.send("ping")
    await wire.expect("pong")
    await flood.close()


async def test_a_line_that_is_too_long_is_sent_an_error_and_closes_the_connection(wire: Wire) -> None:
    wire.raw(b'{"command":"ping","payload":{}}\n' + b"y" * (1 << 20) + b"yy")
    await wire.expect("pong")
    assert (await wire.expect("error"))["code"] == "line-too-long"
    assert (await wire.receive())[0] == "closed"


async def test_a_line_of_exactly_the_limit_is_read(wire: Wire) -> None:
    wire.raw(b'{"command":"ping","payload":{"x":"' + b"y" * ((1 << 20) - 37) + b'"}}\r\n')
    assert "unknown field 'x'" in (await wire.expect("error"))["message"]


@pytest.mark.parametrize(
    "method",
    [
        b"GET / HTTP/1.1",
        b"POST /x HTTP/1.0",
        b"HEAD /",
        b"\n \r\nGET / HTTP/1.1",
        b"PROPFIND /x HTTP/1.1",
        b"get / http/1.1",
    ],
)
async def test_http_clients_are_disconnected_immediately(wire: Wire, method: bytes) -> None:
    wire.raw(method + b'\r\n{"command":"request","payload":{"resources":["exclusive:smuggled"]}}\n')
    assert (await wire.expect("error"))["code"] == "bad-message"
    assert (await wire.receive())[0] == "closed"


async def test_no_line_of_an_http_client_is_executed_even_with_a_line_that_is_too_long() -> None:
    with running_server(max_line=4096) as genie:
        wire = await Wire.connect(genie.address)
        wire.raw(
            b'POST / HTTP/1.1\r\n\r\n{"command":"request","payload":{"resources":["exclusive:smuggled"]}}\n'
            + b"x" * 10_000
        )
        assert (await wire.expect("error"))["code"] == "bad-message"
        assert (await wire.receive())[0] == "closed"
        await wire.close()


async def test_a_slow_consumer_is_disconnected() -> None:
    with running_server(max_unread=1 << 16) as genie:
        slow_consumer = socket.socket()
        slow_consumer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow_consumer.connect(genie.address)
        slow_consumer.setblocking(False)
        loop = asyncio.get_running_loop()
        line = b'{"command":"request","payload":{"resources":["exclusive:%b"],"queueTimeout":0}}\n' % (b"d" * 500)
        reader = await Wire.connect(genie.address)
        sent = 0
        with pytest.raises((TimeoutError, OSError)):  # the server stops reading, or disconnects the client
            while sent < 256 << 20:
                async with asyncio.timeout(1):
                    await loop.sock_sendall(slow_consumer, line * 100)
                sent += len(line) * 100
        reader.send("ping")
        await reader.expect("pong")
        assert resident_bytes(genie) < 200 << 20
        slow_consumer.close()
        await reader.close()


async def test_a_client_that_reads_may_be_sent_more_than_the_output_buffer_limit() -> None:
    with running_server(max_unread=1 << 16) as genie:
        client = await Wire.connect(genie.address)
        for number in range(20_000):
            client.raw(b'{"command":"request","payload":{"resources":["exclusive:much/%d"]}}\n' % number)
        for _ in range(20_000):
            await client.expect("queued")
            await client.expect("locked")
        await client.close()


async def test_each_of_many_invalid_lines_is_sent_an_error(wire: Wire) -> None:
    wire.raw(b"x\n" * 30_000 + b'{"command":"ping"}\n')
    for _ in range(30_000):
        await wire.expect("error")
    await wire.expect("pong")


async def test_the_rows_of_inspect_are_limited_and_replies_are_in_order(wire: Wire) -> None:
    ids = [
        await wire.lock(*(f"exclusive:{n}/{m}/{'x' * 490}" for m in range(10)), onDisconnect="release")
        for n in range(200)
    ]
    for _ in range(20):
        wire.send("inspect", limit=1000)
    wire.send("ping")
    for _ in range(20):
        inspected = await wire.expect("inspected")
        assert len(str(inspected)) < 1 << 19
        assert 0 < len(inspected["holders"]) < inspected["holdersTotal"] == len(ids)
    await wire.expect("pong")


async def test_two_thousand_simultaneous_connections(genie: Genie) -> None:
    clients = await asyncio.gather(*(Wire.connect(genie.address) for _ in range(2000)))
    for number, client in enumerate(clients):
        client.send("request", resources=[f"exclusive:many/{number}"], onDisconnect="release")
    for client in clients:
        await client.expect("queued")
        await client.expect("locked")
    await asyncio.gather(*(client.close() for client in clients))


async def test_connections_beyond_the_limit_are_sent_an_error() -> None:
    with running_server(max_connections=2) as genie:
        first, second = await Wire.connect(genie.address), await Wire.connect(genie.address)
        third = await Wire.connect(genie.address)
        assert (await third.expect("error"))["code"] == "too-many"
        assert (await third.receive())[0] == "closed"
        await first.close()
        first.reader.feed_eof() if not first.reader.at_eof() else None
        second.send("ping")
        await second.expect("pong")
        for client in (second, third):
            await client.close()
