"""Each answer that Redis has for a commit, and none: nothing is told before it is stored, it is stored once, and it goes on."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from signal import SIGCONT, SIGSTOP
from typing import Any

import pytest
import trustme
from redis import RedisError
from structlog.testing import capture_logs

from genie.storage.redis.connection import RedisConnection, RedisFailure
from genie.storage.redis.store import RedisStore
from locks import NAME, Locks, batches, locks, soon, stored
from ports import free_port
from redises.group import until
from relay import Relay, Rule, encoded, error, relay
from servers import WAIT_S, Redis, running_redis, running_server
from wire import Wire

REFUSALS = [
    "READONLY You can't write against a read only replica.",
    "LOADING Redis is loading the dataset in memory",
    "NOREPLICAS Not enough good replicas to write.",
    "MISCONF Errors writing to the AOF file: No space left on device",
    "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
    "NOSCRIPT No matching script. Please use EVAL.",
    "MOVED 3999 127.0.0.1:1",
    "ASK 3999 127.0.0.1:1",
    "TRYAGAIN Multiple keys request during rehashing of slot",
    "CLUSTERDOWN The cluster is down",
    "MASTERDOWN RedisConnection with MASTER is down and replica-serve-stale-data is set to 'no'.",
    "UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)",
    "ERR something that nobody has heard of",
]


@pytest.fixture(scope="module")
def plain() -> Iterator[Redis]:
    """One Redis for those that leave it as it was."""
    with running_redis() as server:
        yield server


@pytest.fixture(autouse=True)
def _empty(request: pytest.FixtureRequest) -> None:
    if "plain" in request.fixturenames:
        request.getfixturevalue("plain").call("FLUSHALL")


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent again is sent for the reason that a test gives, and not because something was slow."""
    monkeypatch.setattr("genie.storage.redis.commit.COMMIT_TIMEOUT_S", WAIT_S / 2)


async def seen(between: Relay, name: str, times: int) -> None:
    """So many of these have come by."""

    async def came() -> bool:
        return between.names().count(name) >= times

    await until(f"{times} times {name}", came)


async def refused(store: RedisStore) -> None:
    """Redis has refused, and a further attempt has come to nothing."""
    before = store.failure_count

    async def again() -> bool:
        return store.failure_count > before

    await until("a commit is refused", again)


# -- errors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", REFUSALS, ids=lambda text: text.partition(" ")[0])
async def test_a_commit_that_is_refused_is_sent_until_it_is_taken(plain: Redis, text: str) -> None:
    async with relay(plain.port) as between, locks(between.url) as client:
        rule = between.say("EVALSHA", error(text), times=3)
        told = client.lock("a")
        await rule.met.wait()
        assert not told.done()
        assert stored(plain) == set()
        await soon(told)
        await soon(client.lock("b"))
        assert stored(plain) == {1, 2}
        assert batches(plain) == 2


@pytest.mark.parametrize("text", REFUSALS, ids=lambda text: text.partition(" ")[0])
@pytest.mark.parametrize("name", ["ROLE", "SCRIPT", "EVAL", "SMEMBERS"])
async def test_whatever_is_refused_when_it_begins_is_asked_again(plain: Redis, name: str, text: str) -> None:
    async with relay(plain.port) as between:
        if not (name == "ROLE" and text.startswith("ERR")):
            between.say(name, error(text), times=2)
        async with locks(between.url) as client:
            await soon(client.lock("a"))
        assert stored(plain) == {1}


@pytest.mark.parametrize("place", ["before", "behind"])
async def test_a_connection_that_ends_around_a_commit(plain: Redis, place: str) -> None:
    async with relay(plain.port) as between, locks(between.url) as client:
        for number in range(1, 4):
            rule = between.rule(Rule("EVALSHA", cut=place))
            await soon(client.lock(f"{number}"))
            assert rule.met.is_set()
            assert stored(plain) == set(range(1, number + 1))
            assert batches(plain) == number


async def test_an_answer_that_comes_after_it_was_given_up_answers_nothing(
    plain: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("genie.storage.redis.commit.COMMIT_TIMEOUT_S", 0.1)
    async with relay(plain.port) as between, locks(between.url) as client:
        late = between.rule(Rule("EVALSHA", held=asyncio.Event()))
        await soon(client.lock("a"))
        assert late.met.is_set()
        second = between.rule(Rule("EVALSHA", held=asyncio.Event()))
        told = client.lock("b")
        await second.met.wait()
        assert late.held is not None
        assert second.held is not None
        late.held.set()
        await soon(told)  # on a third connection
        second.held.set()
        await soon(client.lock("c"))
        assert stored(plain) == {1, 2, 3}
        assert batches(plain) == 3


async def test_a_redis_before_7_that_is_full_takes_the_commit_when_it_has_room(plain: Redis) -> None:
    def old(command: tuple[bytes, ...]) -> bytes | None:
        return encoded("redis_version:6.2.14\r\n") if command[0] == b"INFO" else None

    async with relay(plain.port, old) as between, locks(between.url) as client:
        plain.call("CONFIG", "SET", "maxmemory", "1")
        try:
            told = client.lock("a")
            await refused(client.store)
            await refused(client.store)
            assert not told.done()
            assert stored(plain) == set()
        finally:
            plain.call("CONFIG", "SET", "maxmemory", "0")
        await soon(told)
        assert stored(plain) == {1}
        assert batches(plain) == 1
        assert not any(b"#!lua" in part for _, command in between.seen for part in command)


async def test_in_a_full_redis_a_namespace_is_taken_over_and_written_anew(plain: Redis) -> None:
    async with locks(plain.url) as client:
        await soon(client.lock("a"))
    plain.call("CONFIG", "SET", "maxmemory", "1")
    try:
        async with locks(plain.url) as client:
            plain.call("DEL", f"{{{NAME}}}:meta")
            await soon(client.lock("b"))
            assert stored(plain) == {1}, "the new leader's"
            assert len(plain.call("KEYS", "*:records:*")) == 1, "the old copy is unlinked"
    finally:
        plain.call("CONFIG", "SET", "maxmemory", "0")


# -- the same, from Redis itself ------------------------------------------------------------------------------


def readonly(redis: Redis) -> Callable[[], object]:
    redis.call("REPLICAOF", "127.0.0.1", "1")
    return lambda: redis.call("REPLICAOF", "NO", "ONE")


def noreplicas(redis: Redis) -> Callable[[], object]:
    redis.call("CONFIG", "SET", "min-replicas-to-write", "1")
    return lambda: redis.call("CONFIG", "SET", "min-replicas-to-write", "0")


def noscript(redis: Redis) -> Callable[[], object]:
    redis.call("SCRIPT", "FLUSH")
    return lambda: None


def misconf(redis: Redis) -> Callable[[], object]:
    """What it would save cannot be put in its place."""
    place = redis.folder / "dump.rdb"
    place.mkdir()
    redis.call("CONFIG", "SET", "save", "3600 1")
    redis.call("BGSAVE")
    while redis.call("INFO", "persistence")["rdb_bgsave_in_progress"]:
        pass
    assert redis.call("INFO", "persistence")["rdb_last_bgsave_status"] == "err"

    def mend() -> None:
        place.rmdir()
        redis.call("BGSAVE")

    return mend


@pytest.mark.parametrize("break_it", [readonly, noreplicas, misconf, noscript], ids=lambda made: made.__name__)
async def test_a_redis_that_refuses_by_itself(redis: Redis, break_it: Callable[[Redis], Callable[[], object]]) -> None:
    async with relay(redis.port) as between, locks(between.url) as client:
        await soon(client.lock("a"))
        with capture_logs() as lines:
            mend = break_it(redis)
            told = client.lock("b")
            if break_it is not noscript:
                await seen(between, "ROLE", between.names().count("ROLE") + 3)
                assert not told.done()
                assert stored(redis) == {1}
            mend()
            await soon(told)
        assert stored(redis) == {1, 2}
        assert batches(redis) == 2
        events = [line["event"] for line in lines]
        assert events.count("store unavailable, queueing commits") == events.count("store available again") == 1
        assert break_it.__name__.upper() in lines[0]["error"]


async def test_a_redis_that_runs_somebodys_endless_script(redis: Redis) -> None:
    async with locks(redis.url) as client:
        redis.call("CONFIG", "SET", "busy-reply-threshold", "1")
        endless = asyncio.create_task(asyncio.to_thread(_fails, redis, "EVAL", "while true do end", "0"))
        await until("it is busy", lambda: asyncio.to_thread(_fails, redis, "ROLE"))
        told = client.lock("a")
        await refused(client.store)
        assert not told.done()
        redis.call("SCRIPT", "KILL")
        await soon(told)
        assert "killed" in await endless
        assert stored(redis) == {1}


def _rewritten(redis: Redis) -> bool:
    found = redis.call("INFO", "persistence")
    return not found["aof_rewrite_in_progress"] and not found["aof_rewrite_scheduled"]


def _fails(redis: Redis, *command: str) -> str:
    """What is wrong with a command; nothing where it is taken."""
    try:
        redis.call(*command)
    except RedisError as failure:
        return str(failure)
    return ""


async def test_a_redis_that_loads_for_long(redis: Redis) -> None:
    for number in range(300):
        redis.call("SET", f"{number}", "x" * 100)
    redis.call("BGREWRITEAOF")
    await until("it is one file", lambda: asyncio.to_thread(_rewritten, redis))
    async with locks(redis.url) as client:
        await soon(client.lock("a"))
        redis.kill()
        redis.options = ("--key-load-delay", "3000", "--loading-process-events-interval-bytes", "1024")
        told = client.lock("b")
        with capture_logs() as lines:
            redis.spawn()

            async def loading() -> bool:
                return any(str(line.get("error")).startswith("LOADING") for line in lines)

            await until("it says that it loads", loading)
            assert not told.done()
            await soon(told)
        assert stored(redis) == {1, 2}


# -- replicas and disks ---------------------------------------------------------------------------------------


@asynccontextmanager
async def replicated(*options: str) -> AsyncIterator[tuple[Redis, Redis]]:
    """A master and a replica that has all it has."""
    with ExitStack() as stack:
        master = stack.enter_context(running_redis("--repl-diskless-sync-delay", "0", *options))
        replica = stack.enter_context(running_redis("--replicaof", f"127.0.0.1 {master.port}", *options))

        async def follows() -> bool:
            return bool(master.call("ROLE")[2])

        await until("the replica follows", follows)
        yield master, replica


@asynccontextmanager
async def followed(*lines: str, **options: Any) -> AsyncIterator[tuple[Redis, Redis, Relay, Locks]]:
    """The same with a store that leads, and what is between it and the master."""
    async with (
        replicated(*lines) as (master, replica),
        relay(master.port) as between,
        locks(between.url, **options) as client,
    ):
        yield master, replica, between, client


async def test_nothing_is_told_before_the_replica_has_it() -> None:
    async with followed(min_replicas=1) as (master, replica, between, client):
        await soon(client.lock("a"))
        replica.send(SIGSTOP)
        before = between.names().count("WAIT")
        told = client.lock("b")
        await seen(between, "WAIT", before + 2)
        assert not told.done()
        assert stored(master) == {1, 2}
        assert between.names().count("EVALSHA") == 2, "what is written is not written again"
        between.rule(Rule("WAIT", cut="behind"))
        connections = between.connections
        await seen(between, "EVALSHA", 3)
        await seen(between, "WAIT", before + 4)
        assert between.connections > connections
        assert not told.done(), "sent again on a new connection it waits for the replica, too"
        replica.send(SIGCONT)
        await soon(told)
        assert stored(replica) == {1, 2}
        assert batches(master) == 2


async def test_a_state_that_is_written_anew_is_told_when_the_replica_has_it() -> None:
    async with followed(min_replicas=1) as (master, replica, between, client):
        await soon(client.lock("a"))
        replica.send(SIGSTOP)
        master.call("FLUSHALL")
        before = between.names().count("WAIT")
        told = client.lock("b")
        await seen(between, "WAIT", before + 3)
        assert not told.done()
        assert stored(master) == {1, 2}
        replica.send(SIGCONT)
        await soon(told)
        assert stored(replica) == {1, 2}
        await soon(client.lock("c"))
        assert stored(replica) == {1, 2, 3}


async def test_a_master_with_too_few_replicas_is_not_taken(plain: Redis) -> None:
    client = Locks(plain.url, min_replicas=1)
    with capture_logs() as lines:
        opening = asyncio.create_task(client.open())

        async def said() -> bool:
            return any("has 0 replicas, and must have 1" in str(line.get("error")) for line in lines)

        await until("it is said", said)
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        await client.store.close()
    assert plain.call("DBSIZE") == 0


def new(version: str) -> Callable[[tuple[bytes, ...]], bytes | None]:
    """A Redis that says to be of a version."""
    return lambda command: encoded(f"# Server\r\nredis_version:{version}\r\n") if command[0] == b"INFO" else None


async def test_nothing_is_told_before_it_is_on_the_disk(plain: Redis) -> None:
    async with relay(plain.port, new("7.2.0")) as between:
        between.say("WAITAOF", encoded([0, 0]), times=2)
        text, gone = "UNBLOCKED force unblock from blocking operation", asyncio.Event()
        third = between.rule(Rule("WAITAOF", error(text), held=gone))
        last = between.say("WAITAOF", encoded([1, 0]), times=99)
        async with locks(between.url, fsync=True) as client:
            told = client.lock("a")
            await third.met.wait()
            assert not told.done()
            gone.set()
            await soon(told)
            assert last.times == 98
        asked = [command[1:] for _, command in between.seen if command[0] == b"WAITAOF"]
        assert asked == [(b"1", b"0", b"%d" % timeout_ms) for timeout_ms in (10, 20, 40, 10)]
        places = [(number, command[0]) for number, command in between.seen if command[0] in (b"WAITAOF", b"EVALSHA")]
        (first, _), (again, _) = places[0], places[-1]
        assert [name for number, name in places if number == first] == [b"EVALSHA", *[b"WAITAOF"] * 3]
        assert [name for number, name in places if number == again] == [b"EVALSHA", b"WAITAOF"]
        assert batches(plain) == 1


async def test_a_disk_that_is_not_written_to_is_said_to_be_the_reason(plain: Redis) -> None:
    text = "ERR WAITAOF cannot be used when numlocal is set but appendonly is disabled."
    async with relay(plain.port, new("7.2.0")) as between:
        between.say("WAITAOF", error(text), times=2)
        between.say("WAITAOF", encoded([1, 1]), times=99)
        with capture_logs() as lines:
            async with locks(between.url, fsync=True) as client:
                await soon(client.lock("a"))
    assert [line["error"] for line in lines if line["event"].startswith("store unavailable")] == [
        f"commit not acknowledged: {text}"
    ]


def version() -> tuple[int, ...]:
    """Of the redis-server that is here."""
    said = subprocess.run(["redis-server", "--version"], capture_output=True, text=True, check=True).stdout
    return tuple(map(int, said.partition("v=")[2].split()[0].split(".")))


@pytest.mark.skipif(version() < (7, 2), reason="Redis has no WAITAOF before 7.2")
@pytest.mark.parametrize("sync", ["always", "everysec"])
async def test_disks_of_a_master_and_its_replica(sync: str) -> None:
    options = ("--appendfsync", sync)
    async with followed(*options, min_replicas=1, fsync=True) as (master, replica, _, client):
        with capture_logs() as lines:
            for name in "abcd":
                await soon(client.lock(name))
        assert lines == []
        assert stored(replica) == {1, 2, 3, 4}
        master.call("CONFIG", "SET", "appendonly", "no")
        with capture_logs() as lines:
            told = client.lock("e")

            async def said() -> bool:
                return any("appendonly is disabled" in str(line.get("error")) for line in lines)

            await until("it is said", said)
            assert not told.done()
        master.call("CONFIG", "SET", "appendonly", "yes")
        await soon(told)


async def test_a_redis_that_can_not_say_what_is_on_its_disk_is_not_taken(plain: Redis) -> None:
    async with relay(plain.port, new("7.0.15")) as between:
        client = Locks(between.url, fsync=True)
        with pytest.raises(RedisFailure, match=r"GENIE_REDIS_FSYNC needs 7\.2"):
            await client.store._primary.connect()


# -- who it is ------------------------------------------------------------------------------------------------


async def test_a_sentinel_or_a_replica_in_the_place_of_a_master_is_named() -> None:
    for role in (["sentinel", ["locks"]], ["slave", "127.0.0.1", 1, "connected", 0]):
        async with relay(0, lambda command, role=role: encoded(role) if command[0] == b"ROLE" else None) as between:
            with pytest.raises(RedisFailure, match=f"is not a master, its role is {role[0]}"):
                await RedisStore(between.url)._primary.connect()


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ("redis_version:7.2.4\r\nserver_name:valkey\r\nvalkey_version:8.1.0", (7, 2)),
        ("redis_version:255.255.255", (255, 255)),
        ("redis_version:8.0-rc1", (8, 0)),
        ("redis_version:9", (9, 0)),
        ("redis_version:", (0, 0)),
        ("something_else:1", (0, 0)),
    ],
)
async def test_the_versions_of_forks(plain: Redis, said: str, version: tuple[int, int]) -> None:
    def script(command: tuple[bytes, ...]) -> bytes | None:
        return encoded(f"# Server\r\n{said}\r\nredis_mode:standalone\r\n") if command[0] == b"INFO" else None

    async with relay(plain.port, script) as between:
        link = await RedisStore(between.url)._primary.connect()
        assert link.version == version
        link.close()


async def test_a_password_is_not_repeated_by_what_refuses_it() -> None:
    answers = {
        b"AUTH": [
            "ERR unknown command `AUTH`, with args beginning with: `me` `hunter2` ",
            "WRONGPASS invalid username-password pair or user is disabled.",
            "ERR hunter2 is not my password",
        ]
    }
    async with relay(0, lambda command: error(answers[command[0]].pop(0))) as between:
        for expected in ("ERR unknown command `AUTH`", "WRONGPASS invalid", "ERR the password was rejected"):
            with pytest.raises(RedisFailure) as caught:
                await RedisStore(f"redis://me:hunter2@127.0.0.1:{between.port}")._primary.connect()
            assert str(caught.value).startswith(f"127.0.0.1:{between.port} rejected the connection: {expected}")
            assert "hunter2" not in str(caught.value)
            assert caught.value.__suppress_context__


async def test_who_is_not_there_is_named() -> None:
    port = free_port()
    with pytest.raises(RedisFailure, match=f"^127.0.0.1:{port}: .*(refused|Connect call failed)"):
        await RedisStore(f"redis://127.0.0.1:{port}")._primary.connect()


async def test_a_node_of_a_cluster_needs_another_url() -> None:
    async with relay(0, lambda command: error("MOVED 5 127.0.0.1:1") if command[0] == b"GET" else error("ERR")) as one:
        master = RedisStore(one.url)._primary
        with pytest.raises(RedisFailure, match=r"a cluster node needs a URL with redis\+cluster://"):
            await master.call("GET", "a")


async def test_what_goes_on_is_logged_once() -> None:
    asked: list[bytes] = []

    def alone(command: list[bytes]) -> bytes:
        asked.append(command[0])
        return b"*3\r\n$6\r\nmaster\r\n:0\r\n*0\r\n"

    async def often() -> bool:
        return asked.count(b"ROLE") >= 5

    async with relay(0, alone) as one:
        client = Locks(one.url, min_replicas=1)
        with capture_logs() as lines:
            opening = asyncio.create_task(client.open())
            await until("it has tried often", often)
            opening.cancel()
            await asyncio.wait([opening])
        await client.store.close()
    assert [line["error"] for line in lines] == [f"127.0.0.1:{one.port} has 0 replicas, and must have 1"]


async def test_what_is_no_redis_is_named() -> None:
    async with relay(0, lambda _: b"HTTP/1.1 400 Bad Request\r\n\r\n") as between:
        with pytest.raises(RedisFailure, match=f":{between.port} sent no valid RESP"):
            await RedisStore(between.url)._primary.connect()


async def test_it_is_talked_to_in_tls(tmp_path: Path) -> None:
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
        stranger = RedisStore(f"rediss://localhost:{port}")
        with pytest.raises(RedisFailure, match="CERTIFICATE_VERIFY_FAILED"):
            await stranger._primary.connect()


async def test_a_server_tells_its_clients_nothing_that_a_replica_was_to_store(redis: Redis) -> None:
    with running_server(redis, lease=60) as genie:
        client, other = await Wire.connect(genie.address), await Wire.connect(genie.address)
        held = await client.lock("exclusive:a", transactionTimeout=600_000)
        redis.call("REPLICAOF", "127.0.0.1", "1")
        client.send("request", resources=["exclusive:b"], transactionTimeout=600_000)
        assert "READONLY" in genie.until("store unavailable")["error"]
        assert "is not a master, its role is slave" in genie.until("store still unavailable")["error"]
        client.send("ping")
        assert stored(redis) == {held}
        redis.call("REPLICAOF", "NO", "ONE")
        queued = await client.expect("queued")  # and no pong before
        assert (await client.expect("locked"))["id"] == queued["id"]
        assert stored(redis) == {held, queued["id"]}
        await other.request("exclusive:b", queueTimeout=0)
        assert (await other.expect("released"))["blockers"][0]["id"] == queued["id"]


# -- calls ----------------------------------------------------------------------------------------------------


async def test_a_call_that_is_cancelled_leaves_its_answer_to_nobody(plain: Redis) -> None:
    master = RedisStore(plain.url)._primary
    async with relay(plain.port) as between:
        master = RedisStore(between.url)._primary
        rule = between.rule(Rule("ECHO", held=asyncio.Event()))
        call = asyncio.create_task(master.call("ECHO", "first"))
        await rule.met.wait()
        waits = asyncio.create_task(master.call("ECHO", "second"))
        call.cancel()
        assert await waits == b"second"
        with pytest.raises(asyncio.CancelledError):
            await call
        master.drop()


@pytest.mark.parametrize("name", ["EVAL", "SMEMBERS", "UNLINK"])
@pytest.mark.parametrize("place", ["before", "behind"])
async def test_writing_anew_is_broken_off_anywhere_and_done_all_the_same(plain: Redis, name: str, place: str) -> None:
    async with relay(plain.port) as between, locks(between.url) as client:
        await soon(client.lock("a"))
        for number in range(6 if name == "EVAL" else 1):
            plain.call("FLUSHALL")
            for _ in range(number):
                between.rule(Rule(name))
            rule = between.rule(Rule(name, cut=place))
            await soon(client.lock(f"{number}"))
            assert rule.met.is_set() or number > 3
            rule.times = 0
            assert stored(plain) == set(client.manager.table.held)
            assert len(plain.call("KEYS", "*:records:*")) == 1


async def test_a_redis_that_is_empty_for_a_moment_while_it_is_taken_over_is_read_again(plain: Redis) -> None:
    async with locks(plain.url) as client:
        for name in "abc":
            await soon(client.lock(name))
        await client.store.resign()
    async with relay(plain.port) as between:
        between.rule(Rule("EVAL", times=3))  # what it says, its new key, and that this one leads
        between.say("EVAL", b"*0\r\n")
        follower = Locks(between.url)
        assert len((await follower.open()).manager.table.held) == 3
        await follower.store.close()


@pytest.mark.parametrize("place", ["before", "after"])
async def test_who_resigns_with_a_commit_in_flight_must_know_it_stored(plain: Redis, place: str) -> None:
    """Else it may be on another Redis, and the resignation here would pass for it among those who have read it there."""
    async with relay(plain.port) as between, locks(between.url) as client:
        await soon(client.lock("a"))
        rule = between.rule(Rule("EVALSHA", cut=place))
        told = client.lock("b")
        await rule.met.wait()
        await client.store.resign()
        assert not told.done()
        applied, node = plain.call("HMGET", f"{{{NAME}}}:meta", "counters", "node")
        assert stored(plain) == ({1} if place == "before" else {1, 2})
        assert int(applied.split()[0]) == (1 if place == "before" else 3)
        assert bool(node) == (place == "before"), "then whoever follows must wait for the lease"
    assert not told.done()


async def test_who_resigns_where_redis_lacks_what_was_told_leaves_it_to_those_who_have_seen_it(plain: Redis) -> None:
    meta = f"{{{NAME}}}:meta"
    async with locks(plain.url) as client:
        await soon(client.lock("a"))
        early = plain.call("HGET", meta, "counters")
        await soon(client.lock("b"))
        late = plain.call("HGET", meta, "counters")
        plain.call("HSET", meta, "counters", early)
        await client.store.resign()
        assert plain.call("HGET", meta, "node"), "who has seen nothing would lead at once"
        plain.call("HSET", meta, "counters", late)
        await client.store.resign()
        assert not plain.call("HGET", meta, "node")


async def test_who_waits_to_lead_sees_who_waits_beside_it(plain: Redis) -> None:
    stores = [RedisStore(plain.url, NAME) for _ in range(3)]
    one, other, third = (store._keyspace for store in stores)
    assert not await one.publish_position_and_compare((7, 3))
    assert not await other.publish_position_and_compare((7, 5))
    assert not await third.publish_position_and_compare((7, 5)), "both have come as far"
    assert await one.publish_position_and_compare((7, 3))
    assert not await one.publish_position_and_compare((8, 0))
    assert await other.publish_position_and_compare((7, 5))

    async def gone() -> bool:
        return not await one.publish_position_and_compare((7, 3))

    await until("the others are silent and count no more", gone)
    async with locks(plain.url):
        assert not plain.call("EXISTS", f"{{{NAME}}}:positions"), "nobody waits any more"
    for store in stores:
        await store.close()


async def test_a_connection_that_is_dropped_while_the_state_is_written_anew_is_made_again(plain: Redis) -> None:
    async with relay(plain.port) as between, locks(between.url) as client:
        await soon(client.lock("a"))
        plain.call("FLUSHALL")
        rule = between.rule(Rule("EVAL", held=asyncio.Event()))
        told = client.lock("b")
        await rule.met.wait()
        client.store._writer.drop()
        assert rule.held is not None
        rule.held.set()
        await soon(told)
        await soon(client.lock("c"))
        assert stored(plain) == {1, 2, 3}


async def test_a_link_that_is_closed_refuses_at_once(plain: Redis) -> None:
    master = RedisStore(plain.url)._primary
    link: RedisConnection = await master.connect()
    link.close()
    with pytest.raises(RedisFailure, match="not connected"):
        await link.call("PING")
