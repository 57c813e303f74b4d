"""Authentication by tokens, and the permissions of principals, at the level of the protocol."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import stat
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from genie.config import Settings
from genie.server import auth
from genie.server.app import Server
from support.network.wire import Wire
from support.processes.servers import WAIT_S, Genie, Redis, running_redis, running_server

PAYMENTS, LIMITS, LOOK_OUT, OPS = (
    "token-of-payments",
    "token-of-the-limits",
    "token-of-the-look-out",
    "token-of-the-ops",
)
FILE = f"""
[payments]
token = "{PAYMENTS}"
prefixes = ["accounts/", "rates"]

[limits]
token = "{LIMITS}"

["look out"]
token = "{LOOK_OUT}"
may = ["inspect"]

[ops]
token = "{OPS}"
prefixes = ["ops/"]
may = ["admin"]
"""
SECRET = "a-secret-of-the-tests"  # noqa: S105 - it opens nothing
WRONG = "a-token-of-nobody's"


def write_token_file(folder: Path, text: str = FILE) -> Path:
    path = folder / "tokens"
    path.write_text(text)
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def genie(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Genie]:
    path = write_token_file(tmp_path_factory.mktemp("access"))
    with running_server(token_file=path) as server:
        yield server


async def enter(genie: Genie, token: str, **payload: Any) -> Wire:
    wire = await Wire.connect(genie.address)
    wire.send("hello", token=token, **payload)
    await wire.expect("welcome")
    return wire


async def assert_rejected(wire: Wire) -> dict[str, Any]:
    """Assert that the server sends exactly one error and closes the connection."""
    payload = await wire.expect("error")
    assert payload["code"] == "unauthorized"
    assert "token" in payload["message"]
    with contextlib.suppress(ConnectionResetError):  # what it said besides is not read
        assert await wire.receive() == ("closed", {})
    return payload


async def unauthorized(wire: Wire, *said: str, **fields: Any) -> None:
    payload = await wire.expect("error")
    assert payload.pop("code") == "unauthorized"
    message = payload.pop("message")
    assert all(word in message for word in said), message
    assert payload == fields


# -- who comes in -------------------------------------------------------------------------------------------------


def hello(**payload: Any) -> bytes:
    return orjson.dumps({"command": "hello", "payload": payload}) + b"\n"


NO_HELLO = [
    b'{"command":"ping","payload":{}}\n',
    b'{"command":"request","payload":{"resources":["exclusive:a"],"ref":"r1"}}\n',
    hello(token=PAYMENTS)[:-3] + b"\n",
    b'{"command":"Hello","payload":{"token":"%b"}}\n' % PAYMENTS.encode(),
    b'["hello"]\n',
    b'"hello"\n',
    b"garbage\n",
    b"\xff\xfe\x00\n",
    b"[" * 2000 + b"\n",
    b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01",
    b" " * 8 + b"x" * 4097,
    b"x" * 4098 + b"\n",
    hello(token=PAYMENTS, padding="x" * 4096),
    hello(token=WRONG, padding="x" * 4096),
    b"{" + b" " * 300_000,
]
NO_TOKEN = [
    hello(),
    hello(session=SECRET),
    hello(token=None),
    hello(token=5),
    hello(token=""),
    hello(token=[PAYMENTS]),
    b'{"command":"hello","payload":"%b"}\n' % PAYMENTS.encode(),
]
UNKNOWN_TOKEN = [hello(token=WRONG), hello(token=PAYMENTS[:-1]), hello(token=PAYMENTS + " ")]


@pytest.mark.parametrize(
    ("first", "denial"),
    [
        *((line, "the first line must be hello with a token of this server") for line in NO_HELLO),
        *((line, "hello carried no token, and this server requires one") for line in NO_TOKEN),
        *((line, "the token of hello is not known") for line in UNKNOWN_TOKEN),
    ],
)
async def test_any_first_command_but_an_authenticated_hello_is_rejected(
    genie: Genie, first: bytes, denial: str
) -> None:
    """A missing token is no secret. Which of the unknown tokens it was makes no difference."""
    wire = await Wire.connect(genie.address)
    wire.raw(first + b'{"command":"ping","payload":{}}\n' * 3)
    assert (await assert_rejected(wire))["message"].startswith(denial)


async def test_commands_after_a_wrong_token_are_not_executed(genie: Genie) -> None:
    wire = await Wire.connect(genie.address)
    wire.raw(hello(token=WRONG) + b'{"command":"request","payload":{"resources":["exclusive:behind"]}}\n')
    await assert_rejected(wire)
    ops = await enter(genie, OPS)
    ops.send("inspect", resource="behind")
    assert (await ops.expect("inspected"))["holdersTotal"] == 0


async def test_hello_may_arrive_in_pieces_after_blank_lines(genie: Genie) -> None:
    wire = await Wire.connect(genie.address)
    line = hello(token=LIMITS, client="pieces/1")
    for piece in (b"\r\n", b" \n\n", line[:1], line[1:9], line[9:-1], b"\r", b"\n", b'{"command":"pi', b'ng"}\n'):
        wire.raw(piece)
        await wire.writer.drain()
        await asyncio.sleep(0)
    await wire.expect("welcome")
    await wire.expect("pong")


async def test_the_longest_hello_may_be_followed_by_a_long_line_in_the_same_read(genie: Genie) -> None:
    wire = await Wire.connect(genie.address)
    line = hello(token=LIMITS)
    first = line[:1] + b" " * (4097 - len(line)) + line[1:]
    assert len(first) == 4097
    long = orjson.dumps({"command": "ping", "payload": {}}).replace(b"{}", b"{" + b" " * 100_000 + b"}")
    wire.raw(first[:-1] + b"\r\n" + long + b"\n" + b'{"command":"ping"}\n')
    await wire.expect("welcome")
    await wire.expect("pong")
    await wire.expect("pong")


async def test_the_usual_line_limit_applies_after_hello() -> None:
    with running_server(token=PAYMENTS, max_line=5000) as server:
        wire = await Wire.connect(server.address)
        wire.raw(hello(token=PAYMENTS) + b"x" * 5002)
        await wire.expect("welcome")
        assert (await wire.expect("error"))["code"] == "line-too-long"
        assert await wire.receive() == ("closed", {})


async def test_an_invalid_session_is_reported_only_with_a_valid_token(genie: Genie) -> None:
    wire = await Wire.connect(genie.address)
    wire.raw(hello(token=LIMITS, session="short"))
    payload = await wire.expect("error")
    assert (payload["code"], payload["message"][:15]) == ("bad-request", "hello: session ")
    wire.send("request", resources=["exclusive:behind a wrong session"])
    assert (await wire.expect("error"))["code"] == "unavailable"
    wire.raw(hello(token=LIMITS, session="long enough to be one"))
    await wire.expect("welcome")
    await wire.lock("exclusive:behind a wrong session")


@pytest.mark.parametrize(
    ("payload", "message"), [({}, "carried no token"), ({"token": WRONG}, "is not known")], ids=["none", "wrong"]
)
async def test_a_hello_after_a_rejected_one_needs_its_own_token(
    genie: Genie, payload: dict[str, Any], message: str
) -> None:
    wire = await Wire.connect(genie.address)
    wire.send("hello", protocol=7, token=LIMITS)
    assert (await wire.expect("error"))["code"] == "unsupported-protocol"
    wire.send("hello", **payload)
    wire.send("request", resources=["exclusive:nothing"])
    error = await wire.expect("error")
    assert error["code"] == "unauthorized"
    assert message in error["message"]
    await wire.expect("closed")
    await wire.close()


async def test_a_hello_after_a_rejected_one_sets_the_principal(genie: Genie) -> None:
    wire = await Wire.connect(genie.address)
    wire.send("hello", protocol=7, token=LIMITS)
    wire.send("hello", token=LOOK_OUT)
    wire.send("request", resources=["exclusive:nothing"])
    assert (await wire.expect("error"))["code"] == "unsupported-protocol"
    await wire.expect("welcome")
    assert "look out" in (await wire.expect("error"))["message"]
    await wire.close()


async def test_a_second_hello_changes_nothing(genie: Genie) -> None:
    wire = await enter(genie, PAYMENTS)
    wire.send("hello", token=OPS)
    assert (await wire.expect("error"))["code"] == "bad-request"
    wire.send("request", resources=["exclusive:ops/1"])
    await unauthorized(wire, "'ops/1'", "payments")


@pytest.mark.parametrize("said", [b"", b"\n\n"])
async def test_a_client_that_disconnects_without_data_gets_no_error(genie: Genie, said: bytes) -> None:
    wire = await Wire.connect(genie.address)
    wire.raw(said)
    wire.writer.write_eof()
    assert await wire.receive() == ("closed", {})


@pytest.mark.parametrize("said", [b"{", hello(token=PAYMENTS)[:-1]])
async def test_a_client_that_disconnects_within_the_first_line_is_rejected(genie: Genie, said: bytes) -> None:
    wire = await Wire.connect(genie.address)
    wire.raw(said)
    wire.writer.write_eof()
    await assert_rejected(wire)


async def test_a_client_that_half_closes_after_hello_gets_its_replies(genie: Genie) -> None:
    wire = await Wire.connect(genie.address)
    wire.raw(hello(token=PAYMENTS) + b'{"command":"ping"}\n')
    wire.writer.write_eof()
    await wire.expect("welcome")
    await wire.expect("pong")
    assert await wire.receive() == ("closed", {})


async def test_a_token_is_ignored_by_a_server_without_tokens() -> None:
    with running_server() as server:
        wire = await Wire.connect(server.address)
        wire.send("hello", token="whatever it is")
        await wire.expect("welcome")
        other = await Wire.connect(server.address)
        other.send("hello", token=5)
        assert "token must be a string of 1 to 1024 characters" in (await other.expect("error"))["message"]


async def test_the_token_of_the_environment_variable_grants_all_permissions() -> None:
    with running_server(token=PAYMENTS) as server:
        wire = await enter(server, PAYMENTS, session=SECRET)
        id_ = await wire.lock("exclusive:anything")
        other = await enter(server, PAYMENTS)
        assert await other.release(id_) == "success"
        other.send("watch", prefix="")
        await other.expect("watching")


async def test_followers_and_servers_without_a_store_authenticate_too(tmp_path: Path) -> None:
    path = write_token_file(tmp_path)
    with running_redis() as redis:
        options = {"token_file": path, "lease": 600}
        with running_server(redis, **options) as leader, running_server(redis, **options) as follower:
            stranger = await Wire.connect(follower.address)
            stranger.send("hello", token=WRONG)
            assert "leader" not in await assert_rejected(stranger)
            known = await Wire.connect(follower.address)
            known.send("hello", token=LIMITS)
            assert (await known.expect("error"))["leader"].endswith(str(leader.port))
            known.send("hello", token=LIMITS)
            assert (await known.expect("error"))["code"] == "unavailable"
        with running_server(redis, namespace="away", token_file=path, store_timeout_ms=1000, lease=600) as server:
            wire = await enter(server, LIMITS)
            redis.send(signal.SIGSTOP)
            try:
                wire.send("request", resources=["exclusive:a"])
                server.until("store unavailable")
                stranger = await Wire.connect(server.address)
                stranger.send("ping")
                await assert_rejected(stranger)
            finally:
                redis.send(signal.SIGCONT)


@pytest.fixture
async def in_process_server() -> AsyncIterator[tuple[str, int]]:
    """A server in this process."""
    server = Server(Settings(port=0, token=PAYMENTS))
    try:
        yield await server.start()
    finally:
        await server.stop()


async def test_authentication_times_out_but_an_authenticated_client_may_be_idle(
    in_process_server: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    timers: list[asyncio.TimerHandle] = []
    start_timer = auth.Handshake.start_timer

    def record(self: auth.Handshake, on_timeout: Callable[[], None]) -> None:
        start_timer(self, on_timeout)
        assert self._timer is not None
        timers.append(self._timer)

    monkeypatch.setattr(auth.Handshake, "start_timer", record)
    known = await Wire.connect(in_process_server)
    known.raw(hello(token=PAYMENTS))
    await known.expect("welcome")
    assert [timer.cancelled() for timer in timers] == [True]
    monkeypatch.setattr(auth, "HELLO_TIMEOUT_S", 0.05)
    silent, slow = await Wire.connect(in_process_server), await Wire.connect(in_process_server)
    slow.raw(hello(token=PAYMENTS)[:20])
    await assert_rejected(silent)
    await assert_rejected(slow)
    known.send("ping")
    await known.expect("pong")


async def test_no_token_is_logged(tmp_path: Path) -> None:
    with running_server(token_file=write_token_file(tmp_path), log_level="debug") as server:
        for line, reason in ((hello(token=WRONG), "unknown token"), (hello(), "no token"), (b"garbage\n", "no hello")):
            wire = await Wire.connect(server.address)
            wire.raw(line)
            await assert_rejected(wire)
            logged = server.until("authentication failed")
            assert (logged["reason"], logged["level"]) == (reason, "warning")
            assert logged["peer"]
        (await enter(server, OPS)).send("ping")
        server.send(signal.SIGTERM)
        server.until("server stopped")
        assert not any(token in str(server.log) for token in (WRONG, OPS, PAYMENTS))


async def test_a_world_readable_token_file_is_logged(tmp_path: Path) -> None:
    path = write_token_file(tmp_path)
    path.chmod(0o644)
    with running_server(token_file=path) as server:
        (warning,) = [
            line
            for line in server.log
            if line["event"] == "token file is world-readable, every user of the machine can read the tokens"
        ]
        assert (warning["level"], warning["file"]) == ("warning", str(path))


# -- what a name may do -------------------------------------------------------------------------------------------


async def test_a_missing_permission_is_reported(genie: Genie) -> None:
    wire = await enter(genie, LOOK_OUT, session=SECRET)
    wire.send("request", resources=["exclusive:a"], ref="r1")
    await unauthorized(wire, "lock", "look out", ref="r1")
    wire.send("request", anyOf=["exclusive:a"], target=1, ref="r2")
    await unauthorized(wire, "lock", ref="r2")
    wire.send("release", id=7)
    await unauthorized(wire, "lock", id=7)
    wire.send("extend", id=7, transactionTimeout=1)
    await unauthorized(wire, "lock", id=7)
    wire.send("ping")
    await wire.expect("pong")
    wire.send("inspect")
    await wire.expect("inspected")
    wire.send("watch", prefix="")
    await wire.expect("watching")


async def test_permission_to_lock_does_not_include_inspection(tmp_path: Path) -> None:
    with running_server(token_file=write_token_file(tmp_path, f'[a]\ntoken = "{LIMITS}"\nmay = ["lock"]\n')) as server:
        wire = await enter(server, LIMITS)
        wire.send("inspect")
        await unauthorized(wire, "inspect")
        wire.send("watch", prefix="a")
        await unauthorized(wire, "inspect")
        await wire.lock("exclusive:a")


async def test_every_resource_of_a_request_needs_an_allowed_prefix(genie: Genie) -> None:
    wire = await enter(genie, PAYMENTS)
    wire.send("request", resources=["exclusive:accounts/p1", "shared:limits/2"], ref="r1")
    await unauthorized(wire, "'limits/2'", "'accounts/', 'rates'", ref="r1")
    wire.send("request", anyOf=["exclusive:accounts/p1", "exclusive:account"], target=1, ref="r2")
    await unauthorized(wire, "'account'", ref="r2")
    wire.send("request", resources=["shared:Accounts/1"])
    await unauthorized(wire, "'Accounts/1'")
    other = await enter(genie, LIMITS)
    await other.lock("exclusive:accounts/p1", "exclusive:limits/2")
    id_ = await wire.lock("exclusive:accounts/p2", "shared:rates", "shared:rates/eur", ref="r1")
    wire.send("request", resources=["exclusive:accounts/p2", "shared:rates", "shared:rates/eur"], ref="r1")
    assert (await wire.expect("queued"))["id"] == id_
    assert "expiresIn" in await wire.expect("locked")
    wire.send("request", anyOf=["exclusive:accounts/p3", "shared:rates"], target=1)
    await wire.expect("queued")
    assert (await wire.expect("locked"))["resources"] == ["accounts/p3"]


async def test_a_lock_belongs_to_its_principal(genie: Genie) -> None:
    limits, payments, ops = await enter(genie, LIMITS), await enter(genie, PAYMENTS), await enter(genie, OPS)
    held = await limits.lock("exclusive:accounts/own")
    waiting = await limits.request("exclusive:accounts/own")
    for id_ in (held, waiting):
        payments.send("release", id=id_)
        await unauthorized(payments, str(id_), "payments", id=id_)
        payments.send("extend", id=id_, transactionTimeout=1000)
        await unauthorized(payments, str(id_), id=id_)
    same = await enter(genie, LIMITS)
    same.send("extend", id=held, transactionTimeout=60_000)
    await same.expect("extended")
    assert await same.release(waiting) == "success"
    assert (await limits.expect("released"))["id"] == waiting
    ops.send("extend", id=held, transactionTimeout=50_000)
    await ops.expect("extended")
    assert await ops.release(held) == "success", "whatever its name is"
    assert (await limits.expect("released"))["id"] == held


async def test_prefixes_restrict_what_an_admin_locks_but_not_what_it_inspects(genie: Genie) -> None:
    ops = await enter(genie, OPS)
    ops.send("request", resources=["exclusive:accounts/1"])
    await unauthorized(ops, "'accounts/1'", "'ops/'")
    await ops.lock("exclusive:ops/1")
    ops.send("inspect")
    await ops.expect("inspected")
    ops.send("watch", prefix="")
    await ops.expect("watching")


async def test_prefixes_restrict_what_is_visible(genie: Genie) -> None:
    limits, payments = await enter(genie, LIMITS), await enter(genie, PAYMENTS)
    held = await limits.lock("exclusive:accounts/seen", "exclusive:hidden", transactionName="seen-1")
    await limits.lock("shared:hidden too", transactionName="hidden-1")
    waiting = await limits.request("shared:accounts/seen", "exclusive:hidden too", transactionName="seen-2")
    for payload in ({}, {"resource": "hidden"}, {"resource": "accounts"}, {"id": held}, {"transactionName": "seen-1"}):
        payments.send("inspect", **payload)
        await unauthorized(payments, "resource", "'accounts/', 'rates'")
    payments.send("inspect", resource="accounts/seen")
    found = await payments.expect("inspected")
    (holder,), (waiter,) = found["holders"], found["queue"]
    assert (holder["id"], holder["resources"], holder["resourcesTotal"]) == (held, ["exclusive:accounts/seen"], 2)
    assert (waiter["id"], waiter["resources"], waiter["resourcesTotal"]) == (waiting, ["shared:accounts/seen"], 2)
    assert [blocker["resource"] for blocker in waiter["blockers"]] == ["accounts/seen"]
    assert waiter["blockersTotal"] == 2
    assert "hidden" not in str(found)
    for prefix in ("", "account", "limits/"):
        payments.send("watch", prefix=prefix)
        await unauthorized(payments, "prefix", "'accounts/', 'rates'")
    payments.send("watch", prefix="accounts/s")
    assert [row["resource"] for row in (await payments.expect("watching"))["held"]] == ["accounts/seen"]
    payments.send("unwatch", prefix="")
    await payments.expect("unwatched")


async def test_a_deadlock_shows_notes_only_of_requests_for_visible_resources(genie: Genie) -> None:
    limits, payments = await enter(genie, LIMITS), await enter(genie, PAYMENTS)
    await limits.lock("exclusive:accounts/cycle-b", transactionName="one")
    await limits.lock("exclusive:hidden/cycle", transactionName="two")
    await payments.lock("exclusive:accounts/cycle-a", transactionName="victim")
    traced = {"traceparent": "00-aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa-bbbbbbbbbbbbbbbb-01"}
    await limits.request("exclusive:hidden/cycle", transactionName="one", note="a secret", **traced)
    await limits.request("exclusive:accounts/cycle-a", transactionName="two", note="for all", **traced)
    payments.send("request", resources=["exclusive:accounts/cycle-b"], transactionName="victim", note="mine")
    await payments.expect("queued")
    waits = (await payments.expect("released"))["waits"]
    assert [(wait["resource"], wait.get("note"), "traceparent" in wait) for wait in waits] == [
        ("accounts/cycle-b", "mine", False),
        ("hidden/cycle", None, False),
        ("accounts/cycle-a", "for all", True),
    ]


async def test_a_session_belongs_to_its_principal(genie: Genie) -> None:
    first = await enter(genie, LIMITS, session=SECRET + "1")
    id_ = await first.lock("exclusive:accounts/session", ref="r1")
    stranger = await Wire.connect(genie.address)
    stranger.send("hello", token=PAYMENTS, session=SECRET + "1")
    assert (await stranger.expect("welcome"))["resumed"] is False
    first.send("ping")
    await first.expect("pong")  # it has not lost its session
    again = await Wire.connect(genie.address)
    again.send("hello", token=LIMITS, session=SECRET + "1")
    assert (await again.expect("welcome"))["resumed"] is True
    assert (await again.expect("locked"))["id"] == id_
    assert (await first.expect("error"))["code"] == "session-taken-over"
    assert await first.receive() == ("closed", {})


async def test_principals_of_locks_survive_a_restart_and_a_failover(redis: Redis, tmp_path: Path) -> None:
    path = write_token_file(tmp_path)
    options = {"token_file": path, "lease": 600}
    with running_server(redis, **options) as server:
        wire = await enter(server, LIMITS)
        kept = await wire.lock("exclusive:accounts/kept", transactionTimeout=600_000)
        session = await enter(server, LIMITS, session=SECRET, sessionTimeout=600_000)
        waiting = await session.request("exclusive:accounts/kept", queueTimeout=600_000)
        server.send(signal.SIGTERM)  # so that the next one leads at once
        assert server.wait() == 0
    with running_server(redis, **options) as leader, running_server(redis, **options) as follower:
        await self_only(leader, kept)
        leader.send(signal.SIGTERM)
        assert leader.wait() == 0
        follower.until("leadership acquired")
        await self_only(follower, kept)
        again = await Wire.connect(follower.address)
        again.send("hello", token=LIMITS, session=SECRET)
        assert (await again.expect("welcome"))["resumed"] is True
        assert (await again.expect("queued"))["id"] == waiting
        assert await again.release(kept) == "success"
        assert (await again.expect("locked"))["id"] == waiting


async def self_only(server: Genie, id_: int) -> None:
    payments = await enter(server, PAYMENTS)
    payments.send("release", id=id_)
    await unauthorized(payments, id=id_)


# -- the file is read again ---------------------------------------------------------------------------------------


async def test_sighup_reloads_the_token_file(tmp_path: Path) -> None:
    path = write_token_file(tmp_path)
    with running_server(token_file=path) as server:
        payments, limits, ops = await enter(server, PAYMENTS), await enter(server, LIMITS), await enter(server, OPS)
        held = await limits.lock("exclusive:accounts/1")
        path.write_text(f"""
            [payments]
            token = "{WRONG}"
            prefixes = ["ops/"]
            [ops]
            token = "{OPS}"
            may = ["admin"]
        """)
        server.send(signal.SIGHUP)
        line = server.until("access tokens reloaded")
        assert (line["file"], line["connections_closed"]) == (str(path), 1)

        await unauthorized(limits, "access revoked")
        assert await limits.receive() == ("closed", {})
        gone = await Wire.connect(server.address)
        gone.send("hello", token=LIMITS)
        await assert_rejected(gone)

        payments.send("request", resources=["exclusive:accounts/2"])
        await unauthorized(payments, "'ops/'")
        await payments.lock("exclusive:ops/1")
        old = await Wire.connect(server.address)
        old.send("hello", token=PAYMENTS)
        await assert_rejected(old)
        await enter(server, WRONG)
        assert await ops.release(held) == "success", "what was held stays held until somebody who may releases it"


async def test_an_invalid_token_file_changes_nothing(tmp_path: Path) -> None:
    path = write_token_file(tmp_path)
    with running_server(token_file=path) as server:
        limits = await enter(server, LIMITS)
        for text in ("", "[limits]", FILE + 'more = "x"'):
            path.write_text(text)
            server.send(signal.SIGHUP)
            line = server.until("access token reload failed")
            assert line["level"] == "error"
            assert str(path) in line["reason"]
        path.unlink()
        server.send(signal.SIGHUP)
        assert "can't be read" in server.until("access token reload failed")["reason"]
        limits.send("ping")
        await limits.expect("pong")
        await enter(server, PAYMENTS)


async def test_a_file_with_a_single_token_is_reloaded_too(tmp_path: Path) -> None:
    path = write_token_file(tmp_path, PAYMENTS)
    with running_server(token_file=path) as server:
        path.write_text(LIMITS)
        server.send(signal.SIGHUP)
        server.until("access tokens reloaded")
        await enter(server, LIMITS)


async def test_a_watcher_that_loses_its_permission_is_disconnected(tmp_path: Path) -> None:
    path = write_token_file(tmp_path)
    with running_server(token_file=path) as server:
        in_process_server, outside = await enter(server, LIMITS), await enter(server, LIMITS)
        for wire, prefix in ((in_process_server, "accounts/1"), (outside, "")):
            wire.send("watch", prefix=prefix)
            await wire.expect("watching")
        path.write_text(FILE.replace("[limits]\n", '[limits]\nprefixes = ["accounts/"]\n'))
        server.send(signal.SIGHUP)
        assert server.until("access tokens reloaded")["connections_closed"] == 1
        await unauthorized(outside, "access revoked")
        assert await outside.receive() == ("closed", {})
        await in_process_server.lock("exclusive:accounts/1")
        assert (await in_process_server.expect("event"))["resource"] == "accounts/1"


@pytest.mark.parametrize("half_closes", [False, True])
async def test_a_removed_watcher_that_reads_slowly_is_sent_nothing_new(tmp_path: Path, half_closes: bool) -> None:
    """Its commands wait until it reads, and the end of the connection waits for the commands."""
    path = write_token_file(tmp_path)
    with running_server(token_file=path) as server:
        owner = await enter(server, PAYMENTS)
        await owner.lock(*[f"exclusive:accounts/{i:0>500}" for i in range(1_000)])
        with socket.create_connection(server.address) as watcher:
            watcher.sendall(hello(token=LOOK_OUT) + b'{"command":"watch","payload":{"prefix":"accounts/"}}\n' * 60)
            if half_closes:
                watcher.shutdown(socket.SHUT_WR)
            watcher.recv(1, socket.MSG_PEEK)
            for _ in range(100):  # the server executes one slow command in a batch, until the buffers are full
                owner.send("ping")
                await owner.expect("pong")
            path.write_text(FILE.replace("look out", "look in").replace(LOOK_OUT, LOOK_OUT + "-2"))
            server.send(signal.SIGHUP)
            server.until("access tokens reloaded")
            await owner.lock("exclusive:accounts/secret")
            watcher.settimeout(WAIT_S)
            received = b""
            while data := watcher.recv(1 << 20):
                received += data
        assert b"watching" in received
        assert b"unauthorized" in received
        assert b"accounts/secret" not in received


# -- how it starts ------------------------------------------------------------------------------------------------


def start_and_fail(**settings: object) -> tuple[int, str]:
    """Start a server with invalid settings; return its exit status and its output."""
    import subprocess
    import sys

    environment = {name: value for name, value in os.environ.items() if not name.startswith("GENIE_")}
    environment |= {
        f"GENIE_{name.upper()}": str(value) for name, value in ({"port": 0, "admin_port": ""} | settings).items()
    }
    done = subprocess.run(
        [sys.executable, "-m", "genie.cli", "serve"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    return done.returncode, done.stderr


EVERYWHERE = "0.0.0.0"  # noqa: S104 - that is the point


@pytest.mark.parametrize(
    "settings",
    [
        {"host": EVERYWHERE},
        {"host": "::"},
        {"admin_host": EVERYWHERE, "admin_port": 0},
        {"host": "192.0.2.1"},
        {"host": "::ffff:192.0.2.1"},
    ],
)
def test_unauthenticated_access_beyond_loopback_is_rejected_at_the_start(settings: dict[str, object]) -> None:
    status, said = start_and_fail(**settings)
    (name,) = [name for name in settings if name.endswith("host")]
    assert status == 2
    assert said.startswith(f"genie: GENIE_{name.upper()}={settings[name]} would allow unauthenticated access")
    assert "GENIE_TOKEN" in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"token": "short"}, "GENIE_TOKEN must have 16 to 1024 characters, and has 5"),
        ({"token": PAYMENTS, "token_file": "x"}, "are mutually exclusive: set only one"),
        ({"token_file": "/nonexistent/tokens"}, "can't be read"),
    ],
)
def test_invalid_token_settings_are_reported_at_the_start(settings: dict[str, object], said: str) -> None:
    status, told = start_and_fail(**settings)
    assert status == 2
    assert said in told
    assert len(told.splitlines()) == 1


async def test_a_server_listens_on_all_addresses_with_a_token_or_with_insecure() -> None:
    with running_server(host=EVERYWHERE, token=PAYMENTS) as server:
        await enter(server, PAYMENTS)
        assert not [line for line in server.log if line["event"] == "unauthenticated access allowed"]
    with running_server(host=EVERYWHERE, insecure=1) as server:
        (warning,) = [line for line in server.log if line["event"] == "unauthenticated access allowed"]
        assert (warning["level"], warning["host"]) == ("warning", EVERYWHERE)
        (await Wire.connect(server.address)).send("ping")


def test_the_token_file_of_these_tests_is_private(tmp_path: Path) -> None:
    assert stat.S_IMODE(write_token_file(tmp_path).stat().st_mode) == 0o600
