"""Each reply of Redis to a commit, or none: no client is notified before the commit is stored, and it is applied once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from signal import SIGCONT, SIGSTOP
from typing import Any

import pytest
import trustme
from redis import RedisError
from structlog.testing import capture_logs

from genie.storage.redis.connection import RedisConnection, RedisFailure
from genie.storage.redis.store import RedisStore
from genie.storage.redis.url import Address, Login
from redises.group import until
from support.network.wire import Wire
from support.processes.ports import free_port
from support.processes.servers import WAIT_S, Redis, redis_version, running_redis, running_server
from support.storage.relay import Relay, Rule, encoded, error, relay
from support.storage.stores import NAME, Locks, batches, locks, soon, stored

NOT_ACKNOWLEDGED = "commit not acknowledged by Redis before leadership ended"
ERRORS = [
    "READONLY You can't write against a read only replica.",
    "LOADING Redis is loading the dataset in memory",
    "NOREPLICAS Not enough good replicas to write.",
    "MISCONF Errors writing to the AOF file: No space left on device",
    "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
    "EXECABORT Transaction discarded because of previous errors.",
    "MOVED 3999 127.0.0.1:1",
    "ASK 3999 127.0.0.1:1",
    "TRYAGAIN Multiple keys request during rehashing of slot",
    "CLUSTERDOWN The cluster is down",
    "MASTERDOWN RedisConnection with MASTER is down and replica-serve-stale-data is set to 'no'.",
    "UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)",
    "ERR an unknown error",
]


@pytest.fixture(scope="module")
def plain() -> Iterator[Redis]:
    """A Redis for tests that do not change its configuration."""
    with running_redis() as server:
        yield server


@pytest.fixture(autouse=True)
def _empty(request: pytest.FixtureRequest) -> None:
    if "plain" in request.fixturenames:
        request.getfixturevalue("plain").call("FLUSHALL")


@pytest.fixture(autouse=True)
def _long_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commits are retried only for the cause that the test injects, not because the machine is slow."""
    monkeypatch.setattr("genie.storage.redis.commit.COMMIT_TIMEOUT_S", WAIT_S / 2)


async def wait_for_commands(between: Relay, name: str, times: int) -> None:
    """Wait until a command was sent `times` times."""

    async def arrived() -> bool:
        return between.names().count(name) >= times

    await until(f"{times} times {name}", arrived)


async def wait_for_rejection(store: RedisStore) -> None:
    """Wait until Redis has rejected another attempt to commit."""
    before = store.failure_count

    async def failed_again() -> bool:
        return store.failure_count > before

    await until("a commit is rejected", failed_again)


# -- errors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ERRORS, ids=lambda text: text.partition(" ")[0])
@pytest.mark.parametrize("name", ["XADD", "EXEC"])
async def test_a_rejected_commit_is_retried_until_it_is_accepted(plain: Redis, name: str, text: str) -> None:
    async with relay(plain.port) as between, locks(between.url) as client:
        rule = between.say(name, error(text), times=3)
        acknowledged = client.lock("a")
        await rule.met.wait()
        assert not acknowledged.done()
        assert stored(plain) == set()
        await soon(acknowledged)
        await soon(client.lock("b"))
        assert stored(plain) == {1, 2}
        assert batches(plain) == 2


@pytest.mark.parametrize("reply", [["1-1"], "1-1", ["1-1", "1-2"], 1, []], ids=str)
async def test_the_reply_to_another_command_does_not_acknowledge_a_commit(plain: Redis, reply: object) -> None:
    async with relay(plain.port) as between, locks(between.url) as client:
        rule = between.say("EXEC", encoded(reply))
        await soon(client.lock("a"))
        assert rule.met.is_set()
        assert stored(plain) == {1}
        await soon(client.lock("b"))
        assert stored(plain) == {1, 2}
        assert batches(plain) == 2


@pytest.mark.parametrize("extra", [b"+PONG\r\n", b"+PO", b"$3\r\n"])
async def test_a_reply_to_no_command_ends_the_connection(extra: bytes) -> None:
    """Otherwise it would be taken for the reply to the next command."""
    async with relay(script=lambda _: b"+PONG\r\n" + extra) as between:
        connection = await RedisConnection.open(Address("127.0.0.1", between.port), Login())
        with pytest.raises(RedisFailure, match="a reply to no command"):
            await connection.call("PING")
        with pytest.raises(RedisFailure, match=r"not connected|ended"):
            await connection.call("PING")


async def test_an_endless_reply_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("genie.storage.redis.connection.MAX_REPLY_BYTES", 1_000)
    async with relay(script=lambda _: b"$999999999\r\n" + b"x" * 2_000) as between:
        connection = await RedisConnection.open(Address("127.0.0.1", between.port), Login())
        with pytest.raises(RedisFailure, match="a reply of more than 1000 bytes"):
            await connection.call("PING")


async def test_a_reply_while_no_command_is_in_flight_ends_the_connection() -> None:
    closed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"+OK\r\n")
        with suppress(ConnectionError):
            await reader.read()
        closed.set()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        connection = await RedisConnection.open(Address("127.0.0.1", server.sockets[0].getsockname()[1]), Login())
        async with asyncio.timeout(WAIT_S):
            await closed.wait()
        with pytest.raises(RedisFailure, match="not connected"):
            await connection.call("PING")


@pytest.mark.parametrize("text", ERRORS, ids=lambda text: text.partition(" ")[0])
@pytest.mark.parametrize("name", ["ROLE", "WATCH", "EVAL", "SMEMBERS"])
async def test_a_rejected_command_while_taking_over_is_retried(plain: Redis, name: str, text: str) -> None:
    async with relay(plain.port) as between:
        if not (name == "ROLE" and text.startswith("ERR")):
            between.say(name, error(text), times=2)
        async with locks(between.url) as client:
            await soon(client.lock("a"))
        assert stored(plain) == {1}


@pytest.mark.parametrize("position", ["before", "after"])
@pytest.mark.parametrize("name", ["MULTI", "XADD", "EXEC", "WATCH"])
async def test_a_commit_whose_connection_ends_is_applied_once(plain: Redis, name: str, position: str) -> None:
    async with relay(plain.port) as between, locks(between.url) as client:
        for number in range(1, 4):
            rule = between.rule(Rule(name, cut=position))
            await soon(client.lock(f"{number}"))
            assert rule.met.is_set()
            assert stored(plain) == set(range(1, number + 1))
            assert batches(plain) == number


async def test_a_commit_that_is_rejected_when_the_transaction_is_executed_is_retried(plain: Redis) -> None:
    async with relay(plain.port) as between, locks(between.url) as client:
        queued = between.rule(Rule("XADD", held=asyncio.Event()))
        acknowledged = client.lock("a")
        await queued.met.wait()
        assert queued.held is not None
        plain.call("ACL", "SETUSER", "default", "-xadd")
        try:
            with capture_logs() as lines:
                queued.held.set()
                await wait_for_rejection(client.store)
            errors = [line["reason"] for line in lines if line["event"].startswith("store unavailable")]
            assert "ACLs rules changed" in errors[0]
            assert not acknowledged.done()
        finally:
            plain.call("ACL", "SETUSER", "default", "+xadd")
        await soon(acknowledged)
        assert (stored(plain), batches(plain)) == ({1}, 1)


async def test_a_late_reply_on_a_replaced_connection_is_ignored(plain: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("genie.storage.redis.commit.COMMIT_TIMEOUT_S", 0.1)
    async with relay(plain.port) as between, locks(between.url) as client:
        late = between.rule(Rule("EXEC", held=asyncio.Event()))
        await soon(client.lock("a"))
        assert late.met.is_set()
        second = between.rule(Rule("EXEC", held=asyncio.Event()))
        acknowledged = client.lock("b")
        await second.met.wait()
        assert late.held is not None
        assert second.held is not None
        late.held.set()
        await soon(acknowledged)  # on a third connection
        second.held.set()
        await soon(client.lock("c"))
        assert stored(plain) == {1, 2, 3}
        assert batches(plain) == 3


async def test_a_full_redis_before_7_gets_the_commit_when_it_has_memory(plain: Redis) -> None:
    def old(command: tuple[bytes, ...]) -> bytes | None:
        return encoded("redis_version:6.2.14\r\n") if command[0] == b"INFO" else None

    async with relay(plain.port, old) as between, locks(between.url) as client:
        plain.call("CONFIG", "SET", "maxmemory", "1")
        try:
            acknowledged = client.lock("a")
            await wait_for_rejection(client.store)
            await wait_for_rejection(client.store)
            assert not acknowledged.done()
            assert stored(plain) == set()
        finally:
            plain.call("CONFIG", "SET", "maxmemory", "0")
        await soon(acknowledged)
        assert stored(plain) == {1}
        assert batches(plain) == 1
        assert not any(b"#!lua" in part for _, command in between.seen for part in command)


@pytest.mark.skipif(redis_version() < (7,), reason="Redis 6.2 has no scripts that it runs while it is out of memory")
async def test_in_a_full_redis_a_namespace_is_taken_over_and_restored(plain: Redis) -> None:
    async with locks(plain.url) as client:
        await soon(client.lock("a"))
    plain.call("CONFIG", "SET", "maxmemory", "1")
    try:
        async with locks(plain.url) as client:
            plain.call("DEL", f"{{{NAME}}}:meta")
            await soon(client.lock("b"))
            assert stored(plain) == {1}, "the new leader's"
            assert len(plain.call("KEYS", "*:state:*")) == 1, "the old snapshot is deleted"
    finally:
        plain.call("CONFIG", "SET", "maxmemory", "0")


# -- errors of a real Redis -----------------------------------------------------------------------------------


def readonly(redis: Redis) -> Callable[[], object]:
    redis.call("REPLICAOF", "127.0.0.1", "1")
    return lambda: redis.call("REPLICAOF", "NO", "ONE")


def noreplicas(redis: Redis) -> Callable[[], object]:
    redis.call("CONFIG", "SET", "min-replicas-to-write", "1")
    return lambda: redis.call("CONFIG", "SET", "min-replicas-to-write", "0")


def misconf(redis: Redis) -> Callable[[], object]:
    """Make saving fail: the file cannot be replaced."""
    dump = redis.folder / "dump.rdb"
    dump.mkdir()
    redis.call("CONFIG", "SET", "save", "3600 1")
    redis.call("BGSAVE")
    while redis.call("INFO", "persistence")["rdb_bgsave_in_progress"]:
        pass
    assert redis.call("INFO", "persistence")["rdb_last_bgsave_status"] == "err"

    def repair() -> None:
        dump.rmdir()
        redis.call("BGSAVE")

    return repair


@pytest.mark.parametrize("break_it", [readonly, noreplicas, misconf], ids=lambda made: made.__name__)
async def test_a_commit_is_retried_until_redis_accepts_writes(
    redis: Redis, break_it: Callable[[Redis], Callable[[], object]]
) -> None:
    async with relay(redis.port) as between, locks(between.url) as client:
        await soon(client.lock("a"))
        with capture_logs() as lines:
            repair = break_it(redis)
            acknowledged = client.lock("b")
            await wait_for_commands(between, "ROLE", between.names().count("ROLE") + 3)
            assert not acknowledged.done()
            assert stored(redis) == {1}
            repair()
            await soon(acknowledged)
        assert stored(redis) == {1, 2}
        assert batches(redis) == 2
        events = [line["event"] for line in lines]
        assert events.count("store unavailable, queueing commits") == events.count("store available again") == 1
        assert break_it.__name__.upper() in lines[0]["reason"]


async def test_a_commit_is_retried_until_a_busy_script_is_killed(redis: Redis) -> None:
    async with locks(redis.url) as client:
        redis.call("CONFIG", "SET", "lua-time-limit", "1")
        endless = asyncio.create_task(asyncio.to_thread(_fails, redis, "EVAL", "while true do end", "0"))
        await until("it is busy", lambda: asyncio.to_thread(_fails, redis, "ROLE"))
        acknowledged = client.lock("a")
        await wait_for_rejection(client.store)
        assert not acknowledged.done()
        redis.call("SCRIPT", "KILL")
        await soon(acknowledged)
        assert "killed" in await endless
        assert stored(redis) == {1}


def _rewritten(redis: Redis) -> bool:
    found = redis.call("INFO", "persistence")
    return not found["aof_rewrite_in_progress"] and not found["aof_rewrite_scheduled"]


def _fails(redis: Redis, *command: str) -> str:
    """Return the error of a command; empty if it succeeds."""
    try:
        redis.call(*command)
    except RedisError as failure:
        return str(failure)
    return ""


@pytest.mark.skipif(redis_version() < (7,), reason="Redis 6.2 has no loading-process-events-interval-bytes")
async def test_a_commit_is_retried_while_redis_loads_its_dataset(redis: Redis) -> None:
    for number in range(300):
        redis.call("SET", f"{number}", "x" * 100)
    redis.call("BGREWRITEAOF")
    await until("the append-only file is rewritten", lambda: asyncio.to_thread(_rewritten, redis))
    async with locks(redis.url) as client:
        await soon(client.lock("a"))
        redis.kill()
        redis.options = ("--key-load-delay", "3000", "--loading-process-events-interval-bytes", "1024")
        acknowledged = client.lock("b")
        with capture_logs() as lines:
            redis.spawn()

            async def loading() -> bool:
                return any(str(line.get("reason")).startswith("LOADING") for line in lines)

            await until("commits are rejected with LOADING", loading)
            assert not acknowledged.done()
            await soon(acknowledged)
        assert stored(redis) == {1, 2}


# -- replicas and disks ---------------------------------------------------------------------------------------


@asynccontextmanager
async def replicated(*options: str) -> AsyncIterator[tuple[Redis, Redis]]:
    """Run a master and a replica that follows it."""
    with ExitStack() as stack:
        master = stack.enter_context(running_redis("--repl-diskless-sync-delay", "0", *options))
        replica = stack.enter_context(running_redis("--replicaof", "127.0.0.1", str(master.port), *options))

        async def follows() -> bool:
            return bool(master.call("ROLE")[2])

        await until("the replica follows", follows)
        yield master, replica


@asynccontextmanager
async def replicated_store(*lines: str, **options: Any) -> AsyncIterator[tuple[Redis, Redis, Relay, Locks]]:
    """Run a replicated Redis, and a store that leads through a relay to the master."""
    async with (
        replicated(*lines) as (master, replica),
        relay(master.port) as between,
        locks(between.url, **options) as client,
    ):
        yield master, replica, between, client


async def test_a_commit_is_acknowledged_only_when_the_replica_has_it() -> None:
    async with replicated_store(min_replicas=1) as (master, replica, between, client):
        await soon(client.lock("a"))
        replica.send(SIGSTOP)
        before = between.names().count("WAIT")
        acknowledged = client.lock("b")
        await wait_for_commands(between, "WAIT", before + 2)
        assert not acknowledged.done()
        assert stored(master) == {1, 2}
        between.rule(Rule("WAIT", cut="after"))
        connections = between.connections
        await wait_for_commands(between, "EXEC", 3)
        await wait_for_commands(between, "WAIT", before + 4)
        assert between.names().count("XADD") == 2, "an applied commit is not sent again"
        assert between.connections > connections
        assert not acknowledged.done(), "after a retry on a new connection it waits for the replica, too"
        replica.send(SIGCONT)
        await soon(acknowledged)
        assert stored(replica) == {1, 2}
        assert batches(master) == 2


async def test_a_leader_that_steps_down_logs_which_acknowledgements_were_missing() -> None:
    async with replicated_store(min_replicas=1) as (_, replica, between, client):
        await soon(client.lock("a"))
        replica.send(SIGSTOP)
        before = between.names().count("WAIT")
        client.lock("b")
        await wait_for_commands(between, "WAIT", before + 2)  # the second is sent when the first has failed
        with capture_logs() as lines:
            opening = asyncio.create_task(client.open())

            async def is_logged() -> bool:
                return any(line["event"] == NOT_ACKNOWLEDGED for line in lines)

            await until("the missing acknowledgement is logged", is_logged)
            replica.send(SIGCONT)
            await opening
        (line,) = (line for line in lines if line["event"] == NOT_ACKNOWLEDGED)
        assert line["reason"] == "confirmed by 0 of 1 replicas"
        await soon(client.lock("c"))
        with capture_logs() as lines:
            client.lock("d")
            await client.open()
        assert all(line["event"] != NOT_ACKNOWLEDGED for line in lines), "no wait of this commit has failed"


async def test_a_restored_snapshot_is_acknowledged_only_when_the_replica_has_it() -> None:
    async with replicated_store(min_replicas=1) as (master, replica, between, client):
        await soon(client.lock("a"))
        replica.send(SIGSTOP)
        master.call("FLUSHALL")
        before = between.names().count("WAIT")
        acknowledged = client.lock("b")
        await wait_for_commands(between, "WAIT", before + 3)
        assert not acknowledged.done()
        assert stored(master) == {1, 2}
        replica.send(SIGCONT)
        await soon(acknowledged)
        assert stored(replica) == {1, 2}
        await soon(client.lock("c"))
        assert stored(replica) == {1, 2, 3}


@pytest.mark.skipif(redis_version() < (7,), reason="Redis 6.2 has no scripts that it runs while it is out of memory")
async def test_a_commit_to_a_full_redis_waits_for_the_replica_on_a_new_connection_too() -> None:
    async with replicated_store(min_replicas=1) as (master, replica, between, client):
        await soon(client.lock("a"))
        master.call("CONFIG", "SET", "maxmemory", "1")
        replica.send(SIGSTOP)
        lost = between.rule(Rule("UNWATCH", cut="after"))  # the script before it has appended the batch
        acknowledged = client.lock("b")
        await lost.met.wait()
        before = between.names().count("WAIT")
        await wait_for_commands(between, "WAIT", before + 3)
        assert not acknowledged.done()
        assert (stored(master), batches(master)) == ({1, 2}, 2)
        replica.send(SIGCONT)
        await soon(acknowledged)
        assert client.store.full
        assert stored(replica) == {1, 2}


async def test_a_master_with_too_few_replicas_is_rejected(plain: Redis) -> None:
    client = Locks(plain.url, min_replicas=1)
    with capture_logs() as lines:
        opening = asyncio.create_task(client.open())

        async def is_logged() -> bool:
            return any("has 0 replicas, and GENIE_REDIS" in str(line.get("reason")) for line in lines)

        await until("the error is logged", is_logged)
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        await client.store.close()
    assert plain.call("DBSIZE") == 0


def reports_version(version: str) -> Callable[[tuple[bytes, ...]], bytes | None]:
    """Return a script that reports a version of Redis."""
    return lambda command: encoded(f"# Server\r\nredis_version:{version}\r\n") if command[0] == b"INFO" else None


async def test_a_commit_is_acknowledged_only_when_it_is_on_the_disk(plain: Redis) -> None:
    async with relay(plain.port, reports_version("7.2.0")) as between:
        between.say("WAITAOF", encoded([0, 0]), times=2)
        text, unblocked = "UNBLOCKED force unblock from blocking operation", asyncio.Event()
        third = between.rule(Rule("WAITAOF", error(text), held=unblocked))
        last = between.say("WAITAOF", encoded([1, 0]), times=99)
        async with locks(between.url, fsync=True) as client:
            acknowledged = client.lock("a")
            await third.met.wait()
            assert not acknowledged.done()
            unblocked.set()
            await soon(acknowledged)
            assert last.times == 98
        commands = [command[1:] for _, command in between.seen if command[0] == b"WAITAOF"]
        assert commands == [(b"1", b"0", b"%d" % timeout_ms) for timeout_ms in (10, 20, 40, 10)]
        sent = [
            (number, command[0]) for number, command in between.seen if command[0] in (b"WAITAOF", b"EXEC", b"XADD")
        ]
        (first, _), (last_connection, _) = sent[0], sent[-1]
        assert [name for number, name in sent if number == first] == [b"XADD", b"EXEC", *[b"WAITAOF"] * 3]
        assert [name for number, name in sent if number == last_connection] == [b"EXEC", b"WAITAOF"], (
            "the batch is stored"
        )
        assert batches(plain) == 1


async def test_a_redis_that_does_not_write_to_its_disk_is_logged_as_the_cause(plain: Redis) -> None:
    text = "ERR WAITAOF cannot be used when numlocal is set but appendonly is disabled."
    async with relay(plain.port, reports_version("7.2.0")) as between:
        between.say("WAITAOF", error(text), times=2)
        between.say("WAITAOF", encoded([1, 1]), times=99)
        with capture_logs() as lines:
            async with locks(between.url, fsync=True) as client:
                await soon(client.lock("a"))
    assert [line["reason"] for line in lines if line["event"].startswith("store unavailable")] == [
        f"commit not acknowledged: {text}"
    ]


@pytest.mark.skipif(redis_version() < (7, 2), reason="Redis has no WAITAOF before 7.2")
@pytest.mark.parametrize("sync", ["always", "everysec"])
async def test_commits_wait_for_the_disks_of_the_master_and_its_replica(sync: str) -> None:
    options = ("--appendfsync", sync)
    async with replicated_store(*options, min_replicas=1, fsync=True) as (master, replica, _, client):
        with capture_logs() as lines:
            for name in "abcd":
                await soon(client.lock(name))
        assert lines == []
        assert stored(replica) == {1, 2, 3, 4}
        master.call("CONFIG", "SET", "appendonly", "no")
        with capture_logs() as lines:
            acknowledged = client.lock("e")

            async def is_logged() -> bool:
                return any("appendonly is disabled" in str(line.get("reason")) for line in lines)

            await until("the error is logged", is_logged)
            assert not acknowledged.done()
        master.call("CONFIG", "SET", "appendonly", "yes")
        await soon(acknowledged)


async def test_with_fsync_a_redis_without_waitaof_is_rejected(plain: Redis) -> None:
    async with relay(plain.port, reports_version("7.0.15")) as between:
        client = Locks(between.url, fsync=True)
        with pytest.raises(RedisFailure, match=r"GENIE_REDIS_FSYNC needs 7\.2"):
            await client.store._primary.connect()


# -- roles, versions and logins -------------------------------------------------------------------------------


async def test_an_error_says_that_a_redis_is_not_a_master() -> None:
    for role in (["sentinel", ["locks"]], ["slave", "127.0.0.1", 1, "connected", 0]):
        async with relay(0, lambda command, role=role: encoded(role) if command[0] == b"ROLE" else None) as between:
            with pytest.raises(RedisFailure, match=f"is not a master, its role is {role[0]}"):
                await RedisStore(between.url)._primary.connect()


@pytest.mark.parametrize(
    ("info", "version"),
    [
        ("redis_version:7.2.4\r\nserver_name:valkey\r\nvalkey_version:8.1.0", (7, 2)),
        ("redis_version:255.255.255", (255, 255)),
        ("redis_version:8.0-rc1", (8, 0)),
        ("redis_version:9", (9, 0)),
        ("redis_version:", (0, 0)),
        ("something_else:1", (0, 0)),
    ],
)
async def test_versions_of_redis_and_compatible_servers_are_parsed(
    plain: Redis, info: str, version: tuple[int, int]
) -> None:
    def script(command: tuple[bytes, ...]) -> bytes | None:
        return encoded(f"# Server\r\n{info}\r\nredis_mode:standalone\r\n") if command[0] == b"INFO" else None

    async with relay(plain.port, script) as between:
        connection = await RedisStore(between.url)._primary.connect()
        assert connection.version == version
        connection.close()


async def test_an_error_of_a_login_does_not_contain_the_password() -> None:
    replies = {
        b"AUTH": [
            "ERR unknown command `AUTH`, with args beginning with: `me` `hunter2` ",
            "WRONGPASS invalid username-password pair or user is disabled.",
            "ERR hunter2 is not my password",
        ]
    }
    async with relay(0, lambda command: error(replies[command[0]].pop(0))) as between:
        for expected in ("ERR unknown command `AUTH`", "WRONGPASS invalid", "ERR the password was rejected"):
            with pytest.raises(RedisFailure) as caught:
                await RedisStore(f"redis://me:hunter2@127.0.0.1:{between.port}")._primary.connect()
            assert str(caught.value).startswith(f"127.0.0.1:{between.port} rejected the connection: {expected}")
            assert "hunter2" not in str(caught.value)
            assert caught.value.__suppress_context__


async def test_an_error_of_connecting_contains_the_address() -> None:
    port = free_port()
    with pytest.raises(RedisFailure, match=f"^127.0.0.1:{port}: .*(refused|Connect call failed)"):
        await RedisStore(f"redis://127.0.0.1:{port}")._primary.connect()


async def test_an_error_says_that_a_cluster_needs_another_url() -> None:
    async with relay(0, lambda command: error("MOVED 5 127.0.0.1:1") if command[0] == b"GET" else error("ERR")) as one:
        primary = RedisStore(one.url)._primary
        with pytest.raises(RedisFailure, match=r"a cluster node needs a URL with redis\+cluster://"):
            await primary.call("GET", "a")


async def test_a_repeated_error_is_logged_once() -> None:
    commands: list[bytes] = []

    def standalone(command: list[bytes]) -> bytes:
        commands.append(command[0])
        return b"*3\r\n$6\r\nmaster\r\n:0\r\n*0\r\n"

    async def has_retried() -> bool:
        return commands.count(b"ROLE") >= 5

    async with relay(0, standalone) as one:
        client = Locks(one.url, min_replicas=1)
        with capture_logs() as lines:
            opening = asyncio.create_task(client.open())
            await until("it has tried several times", has_retried)
            opening.cancel()
            await asyncio.wait([opening])
        await client.store.close()
    assert [line["reason"] for line in lines] == [
        f"127.0.0.1:{one.port} has 0 replicas, and GENIE_REDIS_MIN_REPLICAS requires 1"
    ]


async def test_an_error_says_that_a_server_is_no_redis() -> None:
    async with relay(0, lambda _: b"HTTP/1.1 400 Bad Request\r\n\r\n") as between:
        with pytest.raises(RedisFailure, match=f":{between.port} sent no valid RESP"):
            await RedisStore(between.url)._primary.connect()


async def test_connections_with_tls(tmp_path: Path) -> None:
    port, authority = free_port(), trustme.CA()
    certificate = authority.issue_cert("localhost")
    certificate.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "server.pem"))
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    options = ["--tls-port", f"{port}", "--tls-auth-clients", "no", "--tls-ca-cert-file", str(tmp_path / "ca.pem")]
    for name in ("cert", "key"):
        options += [f"--tls-{name}-file", str(tmp_path / "server.pem")]
    with running_redis(*options) as redis:
        async with locks(f"rediss://localhost:{port}?ssl_ca_certs={tmp_path / 'ca.pem'}") as client:
            await soon(client.lock("a"))
            assert stored(redis) == {1}
            client.store._writer.drop()
            await soon(client.lock("b"))
            assert stored(redis) == {1, 2}
        untrusted = RedisStore(f"rediss://localhost:{port}")
        with pytest.raises(RedisFailure, match="CERTIFICATE_VERIFY_FAILED"):
            await untrusted._primary.connect()


async def test_no_client_is_notified_of_a_commit_that_a_replica_rejected(redis: Redis) -> None:
    with running_server(redis, lease=60) as genie:
        client, other = await Wire.connect(genie.address), await Wire.connect(genie.address)
        held = await client.lock("exclusive:a", transactionTimeout=600_000)
        redis.call("REPLICAOF", "127.0.0.1", "1")
        client.send("request", resources=["exclusive:b"], transactionTimeout=600_000)
        assert "READONLY" in genie.until("store unavailable")["reason"]
        assert "is not a master, its role is slave" in genie.until("store operation failed")["reason"]
        client.send("ping")
        assert stored(redis) == {held}
        redis.call("REPLICAOF", "NO", "ONE")
        queued = await client.expect("queued")  # and no pong before
        assert (await client.expect("locked"))["id"] == queued["id"]
        assert stored(redis) == {held, queued["id"]}
        await other.request("exclusive:b", queueTimeout=0)
        assert (await other.expect("released"))["blockers"][0]["id"] == queued["id"]


# -- calls ----------------------------------------------------------------------------------------------------


async def test_the_reply_to_a_cancelled_call_is_not_given_to_the_next_one(plain: Redis) -> None:
    primary = RedisStore(plain.url)._primary
    async with relay(plain.port) as between:
        primary = RedisStore(between.url)._primary
        rule = between.rule(Rule("ECHO", held=asyncio.Event()))
        call = asyncio.create_task(primary.call("ECHO", "first"))
        await rule.met.wait()
        second = asyncio.create_task(primary.call("ECHO", "second"))
        call.cancel()
        assert await second == b"second"
        with pytest.raises(asyncio.CancelledError):
            await call
        primary.drop()


@pytest.mark.parametrize("name", ["EVAL", "SMEMBERS", "UNLINK"])
@pytest.mark.parametrize("position", ["before", "after"])
async def test_restoring_a_snapshot_succeeds_after_an_interruption_anywhere(
    plain: Redis, name: str, position: str
) -> None:
    async with relay(plain.port) as between, locks(between.url) as client:
        await soon(client.lock("a"))
        for number in range(6 if name == "EVAL" else 1):
            plain.call("FLUSHALL")
            for _ in range(number):
                between.rule(Rule(name))
            rule = between.rule(Rule(name, cut=position))
            await soon(client.lock(f"{number}"))
            assert rule.met.is_set() or number > 3
            rule.times = 0
            assert stored(plain) == set(client.manager.table.held)
            assert len(plain.call("KEYS", "*:state:*")) == 1


async def test_loading_is_repeated_if_the_namespace_is_empty_after_the_takeover(plain: Redis) -> None:
    async with locks(plain.url) as client:
        for name in "abc":
            await soon(client.lock(name))
        await client.store.resign()
    async with relay(plain.port) as between:
        between.rule(Rule("EVAL", times=3))  # reading `meta`, registering the snapshot, and acquiring leadership
        between.say("EVAL", encoded([[], ""]))
        follower = Locks(between.url)
        assert len((await follower.open()).manager.table.held) == 3
        await follower.store.close()


@pytest.mark.parametrize("position", ["before", "after"])
async def test_a_leader_with_a_commit_in_flight_resigns_only_if_it_is_stored(plain: Redis, position: str) -> None:
    """Otherwise it may be on another Redis, where followers would take the resignation for that commit."""
    async with relay(plain.port) as between, locks(between.url) as client:
        await soon(client.lock("a"))
        rule = between.rule(Rule("EXEC", cut=position))
        acknowledged = client.lock("b")
        await rule.met.wait()
        await client.store.resign()
        assert not acknowledged.done()
        node = plain.call("HGET", f"{{{NAME}}}:meta", "node")
        assert stored(plain) == ({1} if position == "before" else {1, 2})
        assert batches(plain) == (1 if position == "before" else 3)
        assert bool(node) == (position == "before"), "without the resignation a follower waits for the lease"
    assert not acknowledged.done()


async def test_a_leader_does_not_resign_if_redis_lacks_an_acknowledged_commit(plain: Redis) -> None:
    meta, log = f"{{{NAME}}}:meta", f"{{{NAME}}}:log"
    async with locks(plain.url) as client:
        await soon(client.lock("a"))
        plain.call("COPY", log, "early")
        await soon(client.lock("b"))
        plain.call("RENAME", log, "late")
        plain.call("RENAME", "early", log)
        await client.store.resign()
        assert plain.call("HGET", meta, "node"), "a node without these commits would take over at once"
        plain.call("RENAME", "late", log)
        await client.store.resign()
        assert not plain.call("HGET", meta, "node")


async def test_a_candidate_detects_others_with_a_later_position(plain: Redis) -> None:
    stores = [RedisStore(plain.url, NAME) for _ in range(3)]
    one, other, third = (store._keyspace for store in stores)
    assert not await one.publish_position_and_compare((7, 3))
    assert not await other.publish_position_and_compare((7, 5))
    assert not await third.publish_position_and_compare((7, 5)), "both have the same position"
    assert await one.publish_position_and_compare((7, 3))
    assert not await one.publish_position_and_compare((8, 0))
    assert await other.publish_position_and_compare((7, 5))

    async def expired() -> bool:
        return not await one.publish_position_and_compare((7, 3))

    await until("the positions of the others have expired", expired)
    async with locks(plain.url):
        assert not plain.call("EXISTS", f"{{{NAME}}}:positions"), "there are no candidates any more"
    for store in stores:
        await store.close()


async def test_a_connection_that_is_dropped_during_a_restore_is_replaced(plain: Redis) -> None:
    async with relay(plain.port) as between, locks(between.url) as client:
        await soon(client.lock("a"))
        plain.call("FLUSHALL")
        rule = between.rule(Rule("EVAL", held=asyncio.Event()))
        acknowledged = client.lock("b")
        await rule.met.wait()
        client.store._writer.drop()
        assert rule.held is not None
        rule.held.set()
        await soon(acknowledged)
        await soon(client.lock("c"))
        assert stored(plain) == {1, 2, 3}


async def test_a_call_on_a_closed_connection_fails_at_once(plain: Redis) -> None:
    primary = RedisStore(plain.url)._primary
    connection: RedisConnection = await primary.connect()
    connection.close()
    with pytest.raises(RedisFailure, match="not connected"):
        await connection.call("PING")


async def test_a_text_that_cannot_be_a_host_name_is_an_oserror() -> None:
    with pytest.raises(OSError, match="is not a host name"):
        await RedisConnection.open(Address("a..b", 6379), Login())
