"""The handler of a connection: selected by `hello`, and replaced when a follower becomes leader. Without sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import orjson
import pytest

from genie.config import Limits, Settings
from genie.core import LockManager
from genie.errors import Code, RequestRejected
from genie.observability.stats import Stats
from genie.roles import Starting
from genie.server import connection as connection_module
from genie.server import scheduler
from genie.server.app import Server
from genie.server.connection import Connection
from genie.server.follower import FollowerHandler
from genie.server.listener import REJECT_SLOTS, AdmissionControl
from genie.server.peer import CommandHandler, ConnectionState
from genie.server.pipeline import Pipeline
from genie.storage.memory import MemoryStore
from genie.storage.store import Batch, LeadershipLost
from support.core.sliced_pipeline import exceed_store_timeout
from support.network.recording_transport import RecordingTransport


class ManualStore(MemoryStore):
    """A store whose commits are pending until the test acknowledges them."""

    durable = True

    def __init__(self) -> None:
        super().__init__()
        self.pending_commits: list[Callable[[BaseException | None], None]] = []

    def commit(self, batch: Batch, done: Callable[[BaseException | None], None]) -> None:  # noqa: ARG002
        self.pending_commits.append(done)

    def acknowledge(self) -> None:
        self.pending_commits.pop()(None)


class TwoNamespaces:
    """The pipelines of two namespaces, `a`, the default one, and `b`, without sockets."""

    def __init__(self, **limits: Any) -> None:
        self.limits = Limits(**limits)
        self.stores = {"a": ManualStore(), "b": ManualStore()}
        self.pipelines = {
            name: Pipeline(LockManager(), store, Limits(), Stats(), lambda: 0.0, lambda _: None, namespace=name)
            for name, store in self.stores.items()
        }
        self.handlers: dict[str | None, CommandHandler] = {None: self.pipelines["a"], **self.pipelines}
        self.admission = AdmissionControl(self.limits)

    def connect(self) -> tuple[Connection, list[dict[str, Any]]]:
        def find_handler(namespace: str | None) -> CommandHandler | RequestRejected:
            return self.handlers.get(namespace) or RequestRejected(Code.UNKNOWN_NAMESPACE, f"no {namespace}")

        connection = Connection(self.handlers[None], self.limits, self.admission, None, find_handler)
        received: list[dict[str, Any]] = []
        connection.connection_made(
            RecordingTransport(lambda data: received.extend(map(orjson.loads, data.splitlines())))
        )
        return connection, received

    def stop(self) -> None:
        for pipeline in self.pipelines.values():
            pipeline.stop()


def line(command: str, **payload: Any) -> bytes:
    return orjson.dumps({"command": command, "payload": payload}) + b"\n"


def commands(received: list[dict[str, Any]]) -> list[str]:
    return [message["command"] for message in received]


async def test_a_rejected_hello_binds_the_connection_to_no_namespace() -> None:
    server = TwoNamespaces()
    (other, _), (connection, received) = server.connect(), server.connect()
    other.data_received(line("request", resources=["exclusive:1"]))
    connection.data_received(line("hello", sessionTimeout=0))
    await asyncio.sleep(0)
    assert server.stores["a"].pending_commits, "the other connection's batch is not stored yet"
    assert commands(received) == ["error"]
    connection.data_received(line("hello", namespace="b"))
    connection.data_received(line("request", resources=["exclusive:1"]))
    await asyncio.sleep(0)
    assert commands(received) == ["error"], "its lock in b is not stored yet"
    server.stores["b"].acknowledge()
    assert commands(received) == ["error", "welcome", "queued", "locked"]
    server.stores["a"].acknowledge()
    server.stop()


@pytest.mark.parametrize("in_one_read", [True, False])
async def test_each_hello_is_validated_independently(in_one_read: bool) -> None:
    server = TwoNamespaces()
    connection, received = server.connect()
    lines = [
        line("hello", namespace="zzz", ref="1"),
        line("request", resources=["exclusive:1"], ref="2"),
        line("hello", protocol=9, ref="3"),
        line("hello", session="short", ref="4"),
        line("hello", namespace="b", ref="5"),
        line("ping", ref="6"),
    ]
    for data in [b"".join(lines)] if in_one_read else lines:
        connection.data_received(data)
        await asyncio.sleep(0)
    await iterations_until(lambda: server.stores["b"].pending_commits)
    answers = [(message["payload"].get("ref"), message["payload"].get("code")) for message in received]
    assert answers == [
        ("1", "unknown-namespace"),
        ("2", "unavailable"),
        ("3", "unsupported-protocol"),
        ("4", "bad-request"),
    ]
    server.stores["b"].acknowledge()
    await asyncio.sleep(0)
    answers = [(message["command"], message["payload"].get("ref")) for message in received[4:]]
    assert answers == [("welcome", "5"), ("pong", "6")]
    assert not server.stores["a"].pending_commits, "nothing was executed in the default namespace"
    server.stop()


async def test_a_hello_without_a_namespace_selects_the_default_one_even_after_a_rejected_hello() -> None:
    server = TwoNamespaces()
    follower = FollowerHandler(Stats(), "b", 1 << 20, Starting)
    server.handlers["b"] = follower
    connection, received = server.connect()
    connection.data_received(line("hello", namespace="b"))
    connection.data_received(line("hello", sessionTimeout=5))
    await asyncio.sleep(0)
    assert commands(received) == ["error"]
    server.stores["a"].acknowledge()
    assert received[-1]["command"] == "welcome"
    assert received[-1]["payload"]["namespace"] == "a"
    server.stop()


async def test_a_hello_to_another_namespace_waits_until_a_follower_has_rejected_the_commands_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler, "MAX_BATCH", 10)
    server = TwoNamespaces()
    follower = FollowerHandler(Stats(), "a", 1 << 20, Starting)
    server.handlers["a"] = follower
    (other, _), (connection, received) = server.connect(), server.connect()
    count = 5 * scheduler.QUANTUM
    pings = [line("ping", ref=str(number)) for number in range(count)]
    other.data_received(line("hello", namespace="a"))
    follower.submit(other, pings, 1)
    connection.data_received(line("hello", namespace="a", ref="first") + b"".join(pings))
    await iterations_until(lambda: received)
    assert len(received) < count
    connection.data_received(line("hello", namespace="b", ref="second") + line("ping", ref="last"))
    assert connection.reading_is_paused
    await iterations_until(lambda: server.stores["b"].pending_commits)
    server.stores["b"].acknowledge()
    assert [message["payload"]["ref"] for message in received] == ["first", *map(str, range(count)), "second", "last"]
    assert commands(received)[-2:] == ["welcome", "pong"]
    assert connection.queued_bytes == 0
    # The other connection may be the last: if its turn took long, it is served after all light connections.
    await iterations_until(lambda: follower._scheduler.bytes == 0)
    assert not connection.reading_is_paused
    server.stop()


async def iterations_until(condition: Callable[[], object]) -> int:
    """Run the event loop until a condition holds; return the number of iterations."""
    for iteration in range(10_000):
        if condition():
            return iteration
        await asyncio.sleep(0)
    raise AssertionError("the condition does not hold after 10,000 iterations")


async def test_many_lines_after_a_rejected_hello_are_processed_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "OPENING_QUANTUM_S", -1.0)
    server = TwoNamespaces()
    connection, received = server.connect()
    rejected_lines = [line("ping", ref=str(number)) for number in range(50)]
    connection.data_received(line("hello", protocol=7) + b"".join(rejected_lines) + line("hello", ref="accepted"))
    connection.data_received(line("ping", ref="now"))
    assert len(received) < 5
    assert connection.reading_is_paused
    await iterations_until(lambda: server.stores["a"].pending_commits)
    server.stores["a"].acknowledge()
    assert [message["payload"].get("ref") for message in received] == [None, *map(str, range(50)), "accepted", "now"]
    assert commands(received)[-2:] == ["welcome", "pong"]
    assert not connection.reading_is_paused
    server.stop()


@pytest.mark.parametrize(
    "first", [b"hello\n", b'{"command":"Hello"}\n', b'{"command":"hello","payload":{"session":"\xff"}}\n']
)
async def test_commands_after_an_unrecognized_first_line_that_resembles_hello_are_rejected(first: bytes) -> None:
    server = TwoNamespaces()
    connection, received = server.connect()
    connection.data_received(first + line("request", resources=["exclusive:1"], ref="1"))
    await asyncio.sleep(0)
    codes = [message["payload"]["code"] for message in received]
    assert codes[0] in ("bad-json", "unknown-command")
    assert codes[1:] == ["unavailable"]
    assert not server.stores["a"].pending_commits
    server.stop()


async def test_commands_are_executed_before_a_partial_line_over_the_limit_closes_the_connection() -> None:
    server = TwoNamespaces(max_partial=100)
    connection, received = server.connect()
    connection.data_received(line("ping", ref="1"))
    await asyncio.sleep(0)
    server.stores["a"].acknowledge()
    connection.data_received(line("request", resources=["exclusive:1"], ref="2", onDisconnect="release") + b"x" * 101)
    server.stores["a"].acknowledge()  # the request; the next batch ends it
    await asyncio.sleep(0)
    server.stores["a"].acknowledge()
    assert commands(received) == ["pong", "queued", "locked", "error", "released"]
    assert not server.pipelines["a"].manager.table.held
    server.stop()


@pytest.fixture
async def followed(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FollowingServer]:
    """A server that follows, with small batches."""
    monkeypatch.setattr(scheduler, "MAX_BATCH", 10)
    server = FollowingServer()
    yield server
    server.stop()


class FollowingServer(TwoNamespaces):
    """Connections submit to a follower."""

    def __init__(self) -> None:
        super().__init__()
        self.follower = FollowerHandler(Stats(), "a", 1 << 20, Starting)
        self.handlers[None] = self.follower


async def test_a_new_leader_serves_connections_while_it_rejects_the_queued_commands_of_others(
    followed: FollowingServer,
) -> None:
    (flooding, flood_replies), (idle, idle_replies) = followed.connect(), followed.connect()
    count = 10 * scheduler.QUANTUM
    flooding.data_received(b"".join(line("ping", ref=str(number)) for number in range(count)))
    await asyncio.sleep(0)
    followed.follower.hand_over([flooding, idle], followed.pipelines["a"])
    assert len(flood_replies) < count, "the new leader does not wait until all of them are rejected"
    idle.data_received(line("request", resources=["exclusive:1"]))
    await iterations_until(lambda: followed.stores["a"].pending_commits)
    followed.stores["a"].acknowledge()
    assert commands(idle_replies) == ["queued", "locked"]
    assert len(flood_replies) < count
    flooding.data_received(line("ping", ref="rejected, too"))
    await iterations_until(lambda: len(flood_replies) > count)
    flooding.data_received(line("ping", ref="executed"))
    await iterations_until(lambda: len(flood_replies) > count + 1)
    refs = [message["payload"]["ref"] for message in flood_replies]
    assert refs == [*map(str, range(count)), "rejected, too", "executed"]
    assert set(commands(flood_replies[:-1])) == {"error"}
    assert flood_replies[-1]["command"] == "pong"
    assert not followed.follower._scheduler
    assert flooding.queued_bytes == 0


async def test_a_connection_stays_with_the_follower_if_leadership_ends_before_its_commands_are_rejected(
    followed: FollowingServer,
) -> None:
    connection, replies = followed.connect()
    count = 10 * scheduler.QUANTUM
    connection.data_received(b"".join(line("ping") for _ in range(count)))
    followed.follower.hand_over([connection], followed.pipelines["a"])
    followed.follower.cancel_handover()
    await iterations_until(lambda: len(replies) == count)
    assert connection.handler is followed.follower


async def test_a_lost_connection_is_not_handed_over(followed: FollowingServer) -> None:
    connection, _ = followed.connect()
    connection.data_received(b"".join(line("ping") for _ in range(10 * scheduler.QUANTUM)))
    followed.follower.hand_over([connection], followed.pipelines["a"])
    connection.connection_lost(None)
    await iterations_until(lambda: not followed.follower._scheduler)
    assert connection.handler is followed.follower


async def test_queued_commands_are_rejected_in_batches_while_the_store_is_unavailable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = TwoNamespaces()
    pipeline = server.pipelines["a"]
    (other, _), (connection, received), (lost, _) = server.connect(), server.connect(), server.connect()
    other.data_received(line("request", resources=["exclusive:1"]))
    await iterations_until(lambda: server.stores["a"].pending_commits)
    monkeypatch.setattr(scheduler, "MAX_BATCH", 10)
    count = 10 * scheduler.QUANTUM
    connection.data_received(b"".join(line("ping", ref=str(number)) for number in range(count)))
    lost.data_received(line("request", resources=["exclusive:2"], onDisconnect="release"))
    lost.connection_lost(None)
    exceed_store_timeout(pipeline)
    assert received == []
    await asyncio.sleep(0)
    assert 0 < len(received) < count
    await iterations_until(lambda: len(received) == count)
    assert {message["payload"]["code"] for message in received} == {"unavailable"}
    server.stores["a"].acknowledge()
    await asyncio.sleep(0)
    assert not pipeline._scheduler
    assert list(pipeline.manager.table.held) == [min(pipeline.manager.table.held)], (
        "the lock of the lost connection is released"
    )
    server.stop()


async def test_commands_after_a_rejected_hello_are_not_executed_when_the_store_is_available_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler, "MAX_BATCH", 1)
    monkeypatch.setattr(scheduler, "QUANTUM", 1)
    server = TwoNamespaces()
    pipeline = server.pipelines["a"]
    (other, _), (connection, received) = server.connect(), server.connect()
    other.data_received(line("request", resources=["exclusive:1"]))
    await iterations_until(lambda: server.stores["a"].pending_commits)
    connection.data_received(
        line("hello", session="a-secret-of-the-tests") + line("request", resources=["exclusive:2"], ref="1")
    )
    exceed_store_timeout(pipeline)
    await asyncio.sleep(0)
    server.stores["a"].acknowledge()
    for _ in range(10):
        await asyncio.sleep(0)
    assert [message["payload"].get("code") for message in received] == ["unavailable", "unavailable"]
    assert len(pipeline.manager.table.held) == 1
    server.stop()


@pytest.mark.parametrize("rejected_before", [0, REJECT_SLOTS + 1], ids=["room to linger", "crowded"])
async def test_a_connection_over_the_limit_executes_nothing(rejected_before: int) -> None:
    """A TLS transport may still deliver input that was received with the handshake, although it is closing."""
    server = TwoNamespaces(max_connections=1)
    server.connect()
    for _ in range(rejected_before):
        server.connect()
    connection, received = server.connect()
    connection.data_received(line("hello") + line("request", resources=["exclusive:1"]))
    await asyncio.sleep(0)
    assert [message["payload"]["code"] for message in received] == ["too-many"]
    assert connection.state is ConnectionState.AUTHENTICATING
    assert not server.stores["a"].pending_commits
    server.stop()


async def test_a_connection_uses_the_handler_of_the_moment_at_which_it_is_made() -> None:
    """The event loop calls `connection_made` in a later iteration than the one in which it has accepted the connection."""
    server = Server(Settings(port=0))
    await server.start()
    try:
        connection, received = server._make_connection(), list[bytes]()
        pipeline = server.default_namespace.pipeline
        assert connection.handler is pipeline
        assert pipeline is not None
        pipeline._fail(LeadershipLost("another server leads"))
        transport = RecordingTransport(received.append)
        connection.connection_made(transport)
        connection.data_received(b'{"command":"ping"}\n')
        (reply,) = map(orjson.loads, received)
        assert reply["payload"]["code"] == Code.UNAVAILABLE
        connection.eof_received()
        assert transport.is_ended
        connection.connection_lost(None)
    finally:
        await server.stop()
