"""Whatever comes in, one error goes out, nothing has changed, and nobody else notices."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator

import pytest

from servers import Genie, resident, running_server
from wire import Wire


@pytest.fixture(scope="module")
def genie() -> Iterator[Genie]:
    with running_server() as server:
        yield server


REQUEST = b'{"command":"request","payload":{"resources":%b}}'
WITH = b'{"command":"request","payload":{"resources":["exclusive:x"],"ref":"r",%b}}'

BAD = [
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


@pytest.mark.parametrize(("line", "code", "named"), BAD, ids=lambda value: repr(value)[:60])
async def test_one_error_and_nothing_changed(wire: Wire, line: bytes, code: str, named: str | None) -> None:
    wire.raw(line + b"\n")
    error = await wire.expect("error")
    assert error["code"] == code, error
    assert named is None or named in error["message"], error
    assert error.get("ref") == ("r" if b'"ref":"r"' in line else None)
    if b"hello" in line:
        wire.send("hello")
        await wire.expect("welcome")
    wire.send("inspect")
    found = await wire.expect("inspected")
    assert (found["holdersTotal"], found["queueTotal"]) == (0, 0)


GOOD = [
    REQUEST % b'["exclusive:a:b/c \xc3\xa9\\ud83d\\ude00"]',
    REQUEST % (b'["exclusive:' + b"\xf0\x9f\x98\x80" * 512 + b'"]'),
    WITH % b'"queueTimeout":null,"priority":null,"transactionName":null,"onDisconnect":null,"transactionTimeout":null',
    WITH % b'"note":"nightly job, host-7","queueTimeout":0.5,"queueTimeout":7',
    WITH % b'"transactionTimeout":2147483647,"queueTimeout":2147483647,"priority":-2147483648',
    REQUEST % (b"[" + b",".join(b'"shared:%d"' % i for i in range(1024)) + b"]"),
    b'  { "payload" : { "resources" : [ "shared:ws" ] } , "command" : "request" } \r',
]


@pytest.mark.parametrize("line", GOOD, ids=lambda value: repr(value)[:60])
async def test_what_only_looks_odd_is_taken(wire: Wire, line: bytes) -> None:
    wire.raw(line + b"\n")
    id_ = (await wire.expect("queued"))["id"]
    await wire.expect("locked")
    await wire.release(id_)


async def test_a_line_too_long_is_refused_while_it_comes(genie: Genie, wire: Wire) -> None:
    flood = await Wire.connect(genie.address)
    before = resident(genie)
    try:
        for _ in range(64):
            flood.raw(b"x" * (1 << 20))
            await flood.writer.drain()
    except OSError:
        pass  # the server has hung up, as it should
    assert resident(genie) - before < 16 << 20
    wire.send("ping")
    await wire.expect("pong")
    await flood.close()


async def test_line_too_long_is_said_then_closed(wire: Wire) -> None:
    wire.raw(b'{"command":"ping","payload":{}}\n' + b"y" * (1 << 20) + b"yy")
    await wire.expect("pong")
    assert (await wire.expect("error"))["code"] == "line-too-long"
    assert (await wire.receive())[0] == "closed"


async def test_a_line_of_exactly_the_limit_is_read(wire: Wire) -> None:
    wire.raw(b'{"command":"ping","payload":{"x":"' + b"y" * ((1 << 20) - 37) + b'"}}\r\n')
    assert "unknown field 'x'" in (await wire.expect("error"))["message"]


@pytest.mark.parametrize("method", [b"GET / HTTP/1.1", b"POST /x HTTP/1.0", b"HEAD /", b"\n \r\nGET / HTTP/1.1"])
async def test_web_clients_are_closed_at_once(wire: Wire, method: bytes) -> None:
    wire.raw(method + b'\r\n{"command":"request","payload":{"resources":["exclusive:smuggled"]}}\n')
    assert (await wire.expect("error"))["code"] == "bad-message"
    assert (await wire.receive())[0] == "closed"


async def test_nothing_of_a_web_client_is_carried_out_however_long_its_lines_are() -> None:
    with running_server(max_line=4096) as genie:
        wire = await Wire.connect(genie.address)
        wire.raw(
            b'POST / HTTP/1.1\r\n\r\n{"command":"request","payload":{"resources":["exclusive:smuggled"]}}\n'
            + b"x" * 10_000
        )
        assert (await wire.expect("error"))["code"] == "bad-message"
        assert (await wire.receive())[0] == "closed"
        await wire.close()


async def test_a_client_that_never_reads_is_cut_off() -> None:
    with running_server(max_unread=1 << 16) as genie:
        deaf = socket.socket()
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(genie.address)
        deaf.setblocking(False)
        loop = asyncio.get_running_loop()
        line = b'{"command":"request","payload":{"resources":["exclusive:%b"],"queueTimeout":0}}\n' % (b"d" * 500)
        reader = await Wire.connect(genie.address)
        sent = 0
        with pytest.raises((TimeoutError, OSError)):  # it is not read any more, or it is cut off
            while sent < 256 << 20:
                async with asyncio.timeout(1):
                    await loop.sock_sendall(deaf, line * 100)
                sent += len(line) * 100
        reader.send("ping")
        await reader.expect("pong")
        assert resident(genie) < 200 << 20
        deaf.close()
        await reader.close()


async def test_a_client_that_reads_may_be_told_much_at_once() -> None:
    with running_server(max_unread=1 << 16) as genie:
        client = await Wire.connect(genie.address)
        for number in range(20_000):
            client.raw(b'{"command":"request","payload":{"resources":["exclusive:much/%d"]}}\n' % number)
        for _ in range(20_000):
            await client.expect("queued")
            await client.expect("locked")
        await client.close()


async def test_a_flood_of_bad_lines_is_answered_line_by_line(wire: Wire) -> None:
    wire.raw(b"x\n" * 30_000 + b'{"command":"ping"}\n')
    for _ in range(30_000):
        await wire.expect("error")
    await wire.expect("pong")


async def test_an_inspect_is_bounded_and_many_are_answered_in_order(wire: Wire) -> None:
    ids = [
        await wire.lock(*(f"exclusive:{n}/{m}/{'x' * 490}" for m in range(10)), onDisconnect="release")
        for n in range(200)
    ]
    for _ in range(20):
        wire.send("inspect", limit=1000)
    wire.send("ping")
    for _ in range(20):
        found = await wire.expect("inspected")
        assert len(str(found)) < 1 << 19
        assert 0 < len(found["holders"]) < found["holdersTotal"] == len(ids)
    await wire.expect("pong")


async def test_two_thousand_connections_at_once(genie: Genie) -> None:
    clients = await asyncio.gather(*(Wire.connect(genie.address) for _ in range(2000)))
    for number, client in enumerate(clients):
        client.send("request", resources=[f"exclusive:many/{number}"], onDisconnect="release")
    for client in clients:
        await client.expect("queued")
        await client.expect("locked")
    await asyncio.gather(*(client.close() for client in clients))


async def test_too_many_connections_are_told_so() -> None:
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
