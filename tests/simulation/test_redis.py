"""The simulated Redis, compared with a real one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import redis as redis_py

from genie.storage.redis.connection import ErrorReply, RedisConnection
from genie.storage.redis.primary import CALL_SCRIPT
from genie.storage.redis.url import Address, Login
from genie.testing.simulation.network import Network
from genie.testing.simulation.redis.resp import CommandParser, Failure, Status, encode
from genie.testing.simulation.redis.server import LOADING_COMMANDS, SimRedis
from support.processes.servers import Redis, running_redis

COMMANDS = [
    "HSET h a 1 b 2",
    "HSET h a 3 c 4",
    "HGET h a",
    "HGET h nothing",
    "HMGET h a nothing c",
    "HGETALL h",
    "HGETALL nothing",
    "HDEL h a nothing",
    "HLEN h",
    "HDEL h b c",
    "EXISTS h",
    "SADD s x y x",
    "SADD s x",
    "SMEMBERS s",
    "SREM s x nothing",
    "DEL s h",
    "UNLINK s",
    "EXISTS s h",
    "XADD j 5-1 a 1",
    "XADD j 5-1 a 1",
    "XADD j 5-0 a 1",
    "XADD j 5-2 b 2",
    "XADD j 7-0 c 3 d 4",
    "XLEN j",
    "XRANGE j - +",
    "XRANGE j 5-2 +",
    "XRANGE j (5-2 7",
    "XRANGE j - + COUNT 1",
    "XREVRANGE j + - COUNT 2",
    "XREAD COUNT 2 STREAMS j 0-0",
    "XREAD STREAMS j 7-0",
    "XREAD STREAMS nothing 0-0",
    "XADD j MINID 5-2 8-0 e 5",
    "XRANGE j - +",
    "XADD j NOMKSTREAM MINID = 8-0 9-0 f 6",
    "XADD nothing NOMKSTREAM 1-0 a 1",
    "EXISTS nothing",
    "XADD j NOMKSTREAM 8-5 a 1",
    "XRANGE j - +",
    "HGET j a",
    "HSET j a 1",
    "DEL j",
    "XADD j 1-0 a 1",
    "NOSUCHCOMMAND",
    "EVALSHA 0000000000000000000000000000000000000000 0",
    "EVAL return·{1,2.7,'three',false,{'four'}} 0",
    "EVAL return·redis.call('HGETALL',KEYS[1]) 1 nothing",
    "EVAL return·redis.call('HSET',KEYS[1],'n',ARGV[1]) 1 h 7",
    "EVAL return·redis.status_reply('fine') 0",
    "EVAL return·redis.error_reply('ERR·no') 0",
    "EVAL return·redis.call('HGET','j','a') 0",
    "EVAL return·#redis.call('HMGET',KEYS[1],'n','m') 1 h",
    "EVAL return·redis.call('HMGET',KEYS[1],'n','m')[2]==false 1 h",
]


@pytest.fixture(scope="module")
def real() -> Iterator[Redis]:
    with running_redis() as server:
        yield server


def normalize(reply: Any) -> Any:
    """Return a reply in a form in which the simulated and the real one are equal; of an error only the code."""
    if isinstance(reply, (Failure, redis_py.ResponseError)):
        return "error", str(reply).split()[0]
    if isinstance(reply, Status):
        return bytes(reply)
    if isinstance(reply, dict):
        return [part for item in reply.items() for part in (normalize(item[0]), normalize(item[1]))]
    if isinstance(reply, set):
        return sorted(reply)
    if isinstance(reply, (list, tuple)):
        return [normalize(part) for part in reply]
    return reply


@pytest.mark.server
def test_replies_equal_those_of_a_real_redis(real: Redis) -> None:
    client = redis_py.connection.Connection(host="127.0.0.1", port=real.port, protocol=2)
    client.connect()
    sim = SimRedis()
    for line in COMMANDS:
        command = [part.replace("·", " ").encode() for part in line.split()]
        client.send_command(*command)
        try:
            reply = client.read_response()
        except redis_py.ResponseError as error:
            reply = error
        if command[0] == b"SMEMBERS":
            reply = sorted(reply)
        name = command[0].upper()
        simulated: Any = sim.execute_write([command])[0] if name != b"XREAD" else sim.read(command)
        expected = normalize(reply)
        if isinstance(expected, tuple) and name.startswith(b"EVAL"):
            assert isinstance(normalize(simulated), tuple), line
        elif isinstance(expected, tuple) and expected[1] in ("unknown", "The"):
            assert isinstance(simulated, Failure), line
        else:
            assert normalize(simulated) == expected, line
    client.disconnect()


TRANSACTIONS = """
one XADD j 1-1 a 1
one WATCH j
one MULTI
one XADD j NOMKSTREAM 1-2 b 2
one HSET h n 1
one EXEC
- the WATCH before the transaction is spent
other XADD j 1-3 c 3
one MULTI
one XADD j NOMKSTREAM 1-4 d 4
one EXEC
- another client changes the log
one WATCH j
other XADD j 1-5 c 3
one MULTI
one XADD j NOMKSTREAM 1-6 d 4
one EXEC
one XRANGE j - +
- the same client changes it
one WATCH j
one XADD j 1-7 c 3
one MULTI
one HSET h n 2
one EXEC
- another key, and a write without effect
one WATCH j
other HSET h n 3
other HDEL h m
one MULTI
one HGET h n
one EXEC
- forgotten
one WATCH j
other XADD j 1-8 c 3
one UNWATCH
one MULTI
one HSET h n 4
one EXEC
- deleted, and all keys deleted
one WATCH j
other DEL j
one MULTI
one HSET h n 5
one EXEC
one XADD j 2-0 a 1
one WATCH j
other FLUSHALL
one MULTI
one HSET h n 6
one EXEC
one EXISTS h j
- a missing key
one WATCH j
one MULTI
one XADD j NOMKSTREAM 3-0 a 1
one EXEC
one WATCH j
other XADD j 3-1 a 1
one MULTI
one HSET h n 7
one EXEC
- an error while queueing, and one in EXEC
one WATCH j
one MULTI
one NOSUCHCOMMAND
one HSET h n 8
one EXEC
one MULTI
one XADD j 3-1 a 1
one HSET h n 9
one EXEC
one HGET h n
"""


def without_codes(reply: Any) -> Any:
    """Return a reply with "error" in place of each error: the client library removes the codes of some errors."""
    if isinstance(reply, list):
        return [without_codes(part) for part in reply]
    return "error" if isinstance(reply, (Exception, Failure)) else normalize(reply)


@pytest.mark.server
def test_transactions_equal_those_of_a_real_redis(real: Redis, network: Network) -> None:
    real.call("FLUSHALL")
    clients = {}
    for name in ("one", "other"):
        clients[name] = redis_py.connection.Connection(host="127.0.0.1", port=real.port, protocol=2)
        clients[name].connect()

    async def main() -> None:
        sim = SimRedis()
        await network.loop.spawn(network.loop.create_node("redis", "redis"), sim.serve("redis"))
        simulated = {name: await RedisConnection.open(Address("redis", 6379), Login()) for name in clients}
        for line in TRANSACTIONS.strip().splitlines():
            name, *command = line.split()
            if name == "-":
                continue
            clients[name].send_command(*command)
            try:
                expected = clients[name].read_response()
            except redis_py.ResponseError as error:
                expected = error
            try:
                reply = sim.flush() or b"OK" if command == ["FLUSHALL"] else await simulated[name].call(*command)
            except ErrorReply as error:
                reply = Failure(str(error))
            assert without_codes(reply) == without_codes(expected), line

    network.loop.run_until_complete(main())
    for client in clients.values():
        client.disconnect()


@pytest.mark.server
def test_the_commands_of_a_loading_redis_are_those_of_a_real_redis(real: Redis) -> None:
    simulated = {name.removeprefix("do_") for name in dir(SimRedis) if name.startswith("do_")}
    simulated |= {"hello", "multi", "exec", "watch", "unwatch", "xread", "wait", "psync", "replconf"}
    subcommands = {"client": "client|setname", "config": "config|get", "script": "script|load"}
    client = redis_py.connection.Connection(host="127.0.0.1", port=real.port, protocol=2)
    client.connect()
    accepted = set()
    for name in sorted(simulated):
        client.send_command("COMMAND", "INFO", subcommands.get(name, name))
        (info,) = client.read_response()
        if b"loading" in info[2]:
            accepted.add(name.upper().encode())
    client.disconnect()
    assert accepted == LOADING_COMMANDS


def test_a_redis_that_loads_rejects_commands(network: Network) -> None:
    async def main() -> None:
        sim = SimRedis()
        sim.loaded_at = network.loop.time() + 5
        await network.loop.spawn(network.loop.create_node("redis", "redis"), sim.serve("redis"))
        connection = await RedisConnection.open(Address("redis", 6379), Login())
        assert b"run_id" in await connection.call("INFO")
        for command in (["HSET", "h", "a", "1"], ["EVAL", "return 1", 0], ["XREAD", "STREAMS", "j", "0"]):
            with pytest.raises(ErrorReply, match="LOADING"):
                await connection.call(*command)
        await connection.call("MULTI")
        with pytest.raises(ErrorReply, match="LOADING"):
            await connection.call("HSET", "h", "a", "1")
        await asyncio.sleep(5)
        with pytest.raises(ErrorReply, match="EXECABORT"):
            await connection.call("EXEC")
        assert await connection.call("HSET", "h", "a", "1") == 1

    network.loop.run_until_complete(main())


def test_a_scan_in_parts_takes_a_while_and_returns_all_fields_that_stay(network: Network) -> None:
    async def main() -> None:
        sim = SimRedis()
        sim.scan_s = 1.5
        await network.loop.spawn(network.loop.create_node("redis", "redis"), sim.serve("redis"))
        connection = await RedisConnection.open(Address("redis", 6379), Login())
        await connection.call("HSET", "h", *(part for number in range(9) for part in (f"f{number}", number)))
        cursor, scanned, scan_count, started_at = b"0", {}, 0, network.loop.time()
        while cursor != b"0" or not scan_count:
            cursor, fields = await connection.call("EVAL", CALL_SCRIPT, 1, "h", "HSCAN", cursor, "COUNT", 2)
            scan_count += 1
            scanned |= dict(zip(fields[::2], fields[1::2], strict=True))
            sim.execute_write([[b"HDEL", b"h", fields[0]]])
        assert scanned == {b"f%d" % number: b"%d" % number for number in range(9)}
        assert scan_count == 5
        assert network.loop.time() - started_at == scan_count * 1.5

    network.loop.run_until_complete(main())


async def test_a_restart_loses_whole_writes() -> None:
    sim = SimRedis()

    def execute(line: str) -> object:
        return sim.execute_write([[part.replace("·", " ").encode() for part in line.split()]])[0]

    def state() -> list[object]:
        return [dict(sim.keys.hash(b"h")), set(sim.keys.set(b"s")), normalize(execute("XRANGE j - +"))]

    states = [state()]
    for line in (
        "HSET h a 1 b 2",
        "EVAL redis.call('HSET',KEYS[1],'a','9');redis.call('SADD',KEYS[2],'m') 2 h s",
        "XADD j 1-0 a 1",
        "XADD j MINID 2-0 2-0 b 2",
        "HDEL h a b",
        "HSET h z 26",
        "DEL j s",
        "XADD j 1-1 c 3",
    ):
        execute(line)
        states.append(state())
    while len(states) > 1:
        assert state() == states.pop()
        assert sim.restart(1) == 1
    assert state() == states[0]
    assert sim.restart(5) == 0


async def test_a_restart_undoes_a_transaction_as_a_whole() -> None:
    sim = SimRedis()
    sim.execute_write([[b"HSET", b"h", b"a", b"1"]])
    replies = sim.execute_write([[b"HSET", b"h", b"a", b"2"], [b"HSET", b"j", b"b", b"3"], [b"XADD", b"h", b"1-0"]])
    assert replies[:2] == [0, 1]
    assert isinstance(replies[2], Failure), "the other commands are executed nevertheless"
    sim.restart(1)
    assert (dict(sim.keys.hash(b"h")), dict(sim.keys.hash(b"j"))) == ({b"a": b"1"}, {})


async def test_a_restart_drops_the_scripts() -> None:
    sim = SimRedis()
    (sha,) = sim.execute_write([[b"SCRIPT", b"LOAD", b"return 7"]])
    assert isinstance(sha, bytes)
    assert sim.execute_write([[b"EVALSHA", sha, b"0"]]) == [7]
    sim.restart()
    assert str(sim.execute_write([[b"EVALSHA", sha, b"0"]])[0]).startswith("NOSCRIPT")


def test_commands_are_parsed_however_the_bytes_are_split() -> None:
    data = b"*2\r\n$4\r\nPING\r\n$2\r\n\r\n\r\n*1\r\n$1\r\nx\r\n"
    for position in range(len(data)):
        parser = CommandParser()
        assert parser.feed(data[:position]) + parser.feed(data[position:]) == [[b"PING", b"\r\n"], [b"x"]]


def test_replies_are_encoded_in_resp2_and_resp3() -> None:
    assert encode({b"a": 1}) == b"*2\r\n$1\r\na\r\n:1\r\n"
    assert encode({b"a": 1}, 3) == b"%1\r\n$1\r\na\r\n:1\r\n"
    assert (encode(None), encode(None, 3)) == (b"$-1\r\n", b"_\r\n")
