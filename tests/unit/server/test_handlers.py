"""Which handler a connection goes to, with its bytes given by hand, and commits that are answered when it is said."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import orjson
import pytest

from genie.config import Limits
from genie.core import LockManager
from genie.errors import Code, RequestRejected
from genie.observability.stats import Stats
from genie.server import connection as connection_module
from genie.server import scheduler
from genie.server.connection import Connection
from genie.server.follower import FollowerHandler
from genie.server.listener import AdmissionControl
from genie.server.peer import CommandHandler
from genie.server.pipeline import Pipeline
from genie.storage.memory import MemoryStore
from genie.storage.store import Batch
from recording_transport import RecordingTransport


class Held(MemoryStore):
    """Takes batches, and answers when it is told to."""

    durable = True

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[Callable[[BaseException | None], None]] = []

    def commit(self, batch: Batch, done: Callable[[BaseException | None], None]) -> None:  # noqa: ARG002
        self.waiting.append(done)

    def answer(self) -> None:
        self.waiting.pop()(None)


class World:
    """Two namespaces, a and b. Who says none is at a."""

    def __init__(self, **limits: Any) -> None:
        self.limits = Limits(**limits)
        self.stores = {"a": Held(), "b": Held()}
        self.pipelines = {
            name: Pipeline(LockManager(), store, Limits(), Stats(), lambda: 0.0, lambda _: None, namespace=name)
            for name, store in self.stores.items()
        }
        self.handlers: dict[str | None, CommandHandler] = {None: self.pipelines["a"], **self.pipelines}
        self.admission = AdmissionControl(self.limits)

    def enter(self) -> tuple[Connection, list[dict[str, Any]]]:
        def find_handler(namespace: str | None) -> CommandHandler | RequestRejected:
            return self.handlers.get(namespace) or RequestRejected(Code.UNKNOWN_NAMESPACE, f"no {namespace}")

        connection = Connection(self.handlers[None], self.limits, self.admission, None, find_handler)
        told: list[dict[str, Any]] = []
        connection.connection_made(RecordingTransport(lambda data: told.extend(map(orjson.loads, data.splitlines()))))
        return connection, told

    def stop(self) -> None:
        for pipeline in self.pipelines.values():
            pipeline.stop()


def line(command: str, **payload: Any) -> bytes:
    return orjson.dumps({"command": command, "payload": payload}) + b"\n"


def commands(told: list[dict[str, Any]]) -> list[str]:
    return [message["command"] for message in told]


async def test_a_rejected_hello_leaves_nothing_behind_and_nothing_is_sent_before_it_is_stored() -> None:
    world = World()
    (other, _), (connection, told) = world.enter(), world.enter()
    other.data_received(line("request", resources=["exclusive:1"]))
    connection.data_received(line("hello", sessionTimeout=0))
    await asyncio.sleep(0)
    assert world.stores["a"].waiting, "the other connection's batch is not stored yet"
    assert commands(told) == ["error"]
    connection.data_received(line("hello", namespace="b"))
    connection.data_received(line("request", resources=["exclusive:1"]))
    await asyncio.sleep(0)
    assert commands(told) == ["error"], "its lock in b is not stored"
    world.stores["b"].answer()
    assert commands(told) == ["error", "welcome", "queued", "locked"]
    world.stores["a"].answer()
    world.stop()


@pytest.mark.parametrize("in_one_read", [True, False])
async def test_each_hello_is_judged_by_itself(in_one_read: bool) -> None:
    world = World()
    connection, told = world.enter()
    sent = [
        line("hello", namespace="zzz", ref="1"),
        line("request", resources=["exclusive:1"], ref="2"),
        line("hello", protocol=9, ref="3"),
        line("hello", session="short", ref="4"),
        line("hello", namespace="b", ref="5"),
        line("ping", ref="6"),
    ]
    for read in [b"".join(sent)] if in_one_read else sent:
        connection.data_received(read)
        await asyncio.sleep(0)
    await turns_until(lambda: world.stores["b"].waiting)
    answers = [(message["payload"].get("ref"), message["payload"].get("code")) for message in told]
    assert answers == [
        ("1", "unknown-namespace"),
        ("2", "unavailable"),
        ("3", "unsupported-protocol"),
        ("4", "bad-request"),
    ]
    world.stores["b"].answer()
    await asyncio.sleep(0)
    answers = [(message["command"], message["payload"].get("ref")) for message in told[4:]]
    assert answers == [("welcome", "5"), ("pong", "6")]
    assert not world.stores["a"].waiting, "nothing was done in the first namespace"
    world.stop()


async def test_a_hello_without_a_namespace_is_for_the_first_also_behind_one_that_was_refused() -> None:
    world = World()
    follower = FollowerHandler(Stats(), "b", 1 << 20)
    world.handlers["b"] = follower
    connection, told = world.enter()
    connection.data_received(line("hello", namespace="b"))
    connection.data_received(line("hello", sessionTimeout=5))
    await asyncio.sleep(0)
    assert commands(told) == ["error"]
    world.stores["a"].answer()
    assert told[-1]["command"] == "welcome"
    assert told[-1]["payload"]["namespace"] == "a"
    world.stop()


async def test_a_hello_to_another_namespace_waits_until_a_follower_has_rejected_the_commands_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler, "MAX_BATCH", 10)
    world = World()
    follower = FollowerHandler(Stats(), "a", 1 << 20)
    world.handlers["a"] = follower
    (other, _), (connection, sent) = world.enter(), world.enter()
    count = 5 * scheduler.QUANTUM
    pings = [line("ping", ref=str(number)) for number in range(count)]
    other.data_received(line("hello", namespace="a"))
    follower.submit(other, pings, 1)
    connection.data_received(line("hello", namespace="a", ref="first") + b"".join(pings))
    await turns_until(lambda: sent)
    assert len(sent) < count
    connection.data_received(line("hello", namespace="b", ref="second") + line("ping", ref="last"))
    assert connection.reading_is_paused
    await turns_until(lambda: world.stores["b"].waiting)
    world.stores["b"].answer()
    assert [message["payload"]["ref"] for message in sent] == ["first", *map(str, range(count)), "second", "last"]
    assert commands(sent)[-2:] == ["welcome", "pong"]
    assert follower._scheduler.bytes == connection.queued_bytes == 0
    assert not connection.reading_is_paused
    world.stop()


async def turns_until(condition: Callable[[], object]) -> int:
    """Let the event loop run; return how many turns that took."""
    for turn in range(10_000):
        if condition():
            return turn
        await asyncio.sleep(0)
    raise AssertionError("this never came")


async def test_lines_after_a_rejected_hello_are_judged_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "OPENING_QUANTUM_S", 0.0)
    world = World()
    connection, told = world.enter()
    refused = [line("ping", ref=str(number)) for number in range(50)]
    connection.data_received(line("hello", protocol=7) + b"".join(refused) + line("hello", ref="at last"))
    connection.data_received(line("ping", ref="now"))
    assert len(told) < 5
    assert connection.reading_is_paused
    await turns_until(lambda: world.stores["a"].waiting)
    world.stores["a"].answer()
    assert [message["payload"].get("ref") for message in told] == [None, *map(str, range(50)), "at last", "now"]
    assert commands(told)[-2:] == ["welcome", "pong"]
    assert not connection.reading_is_paused
    world.stop()


@pytest.mark.parametrize(
    "first", [b"hello\n", b'{"command":"Hello"}\n', b'{"command":"hello","payload":{"session":"\xff"}}\n']
)
async def test_a_first_line_that_may_have_meant_hello_opens_nothing(first: bytes) -> None:
    world = World()
    connection, told = world.enter()
    connection.data_received(first + line("request", resources=["exclusive:1"], ref="1"))
    await asyncio.sleep(0)
    codes = [message["payload"]["code"] for message in told]
    assert codes[0] in ("bad-json", "unknown-command")
    assert codes[1:] == ["unavailable"]
    assert not world.stores["a"].waiting
    world.stop()


async def test_commands_run_before_the_incomplete_line_that_ends_their_connection() -> None:
    world = World(max_partial=100)
    connection, told = world.enter()
    connection.data_received(line("ping", ref="1"))
    await asyncio.sleep(0)
    world.stores["a"].answer()
    connection.data_received(line("request", resources=["exclusive:1"], ref="2", onDisconnect="release") + b"x" * 101)
    await asyncio.sleep(0)
    world.stores["a"].answer()
    assert commands(told) == ["pong", "queued", "locked", "error", "released"]
    assert not world.pipelines["a"].manager.table.held
    world.stop()


@pytest.fixture
async def followed(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FollowingServer]:
    """A server that follows, with small batches."""
    monkeypatch.setattr(scheduler, "MAX_BATCH", 10)
    server = FollowingServer()
    yield server
    server.stop()


class FollowingServer(World):
    """Connections submit to a follower."""

    def __init__(self) -> None:
        super().__init__()
        self.follower = FollowerHandler(Stats(), "a", 1 << 20)
        self.handlers[None] = self.follower


async def test_a_new_leader_serves_connections_while_it_rejects_the_queued_commands_of_others(
    followed: FollowingServer,
) -> None:
    (flooding, flood_replies), (idle, idle_replies) = followed.enter(), followed.enter()
    count = 10 * scheduler.QUANTUM
    flooding.data_received(b"".join(line("ping", ref=str(number)) for number in range(count)))
    await asyncio.sleep(0)
    followed.follower.hand_over([flooding, idle], followed.pipelines["a"])
    assert len(flood_replies) < count, "the new leader does not wait until all of them are rejected"
    idle.data_received(line("request", resources=["exclusive:1"]))
    await turns_until(lambda: followed.stores["a"].waiting)
    followed.stores["a"].answer()
    assert commands(idle_replies) == ["queued", "locked"]
    assert len(flood_replies) < count
    flooding.data_received(line("ping", ref="rejected, too"))
    await turns_until(lambda: len(flood_replies) > count)
    flooding.data_received(line("ping", ref="executed"))
    await turns_until(lambda: len(flood_replies) > count + 1)
    refs = [message["payload"]["ref"] for message in flood_replies]
    assert refs == [*map(str, range(count)), "rejected, too", "executed"]
    assert set(commands(flood_replies[:-1])) == {"error"}
    assert flood_replies[-1]["command"] == "pong"
    assert not followed.follower._scheduler
    assert flooding.queued_bytes == 0


async def test_a_connection_stays_with_the_follower_if_leadership_ends_before_its_commands_are_rejected(
    followed: FollowingServer,
) -> None:
    connection, replies = followed.enter()
    count = 10 * scheduler.QUANTUM
    connection.data_received(b"".join(line("ping") for _ in range(count)))
    followed.follower.hand_over([connection], followed.pipelines["a"])
    followed.follower.cancel_handover()
    await turns_until(lambda: len(replies) == count)
    assert connection.handler is followed.follower


async def test_a_lost_connection_is_not_handed_over(followed: FollowingServer) -> None:
    connection, _ = followed.enter()
    connection.data_received(b"".join(line("ping") for _ in range(10 * scheduler.QUANTUM)))
    followed.follower.hand_over([connection], followed.pipelines["a"])
    connection.connection_lost(None)
    await turns_until(lambda: not followed.follower._scheduler)
    assert connection.handler is followed.follower


async def test_much_is_refused_in_batches_while_the_store_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    pipeline = world.pipelines["a"]
    (other, _), (connection, told), (left, _) = world.enter(), world.enter(), world.enter()
    other.data_received(line("request", resources=["exclusive:1"]))
    await turns_until(lambda: world.stores["a"].waiting)
    monkeypatch.setattr(scheduler, "MAX_BATCH", 10)
    count = 10 * scheduler.QUANTUM
    connection.data_received(b"".join(line("ping", ref=str(number)) for number in range(count)))
    left.data_received(line("request", resources=["exclusive:2"], onDisconnect="release"))
    left.connection_lost(None)
    pipeline._on_store_timeout()
    assert told == []
    await asyncio.sleep(0)
    assert 0 < len(told) < count
    await turns_until(lambda: len(told) == count)
    assert {message["payload"]["code"] for message in told} == {"unavailable"}
    world.stores["a"].answer()
    await asyncio.sleep(0)
    assert not pipeline._scheduler
    assert list(pipeline.manager.table.held) == [min(pipeline.manager.table.held)], (
        "nothing of the connection that was lost"
    )
    world.stop()


async def test_what_was_sent_after_a_hello_does_not_run_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "MAX_BATCH", 1)
    monkeypatch.setattr(scheduler, "QUANTUM", 1)
    world = World()
    pipeline = world.pipelines["a"]
    (other, _), (connection, told) = world.enter(), world.enter()
    other.data_received(line("request", resources=["exclusive:1"]))
    await turns_until(lambda: world.stores["a"].waiting)
    connection.data_received(
        line("hello", session="a-secret-of-the-tests") + line("request", resources=["exclusive:2"], ref="1")
    )
    pipeline._on_store_timeout()
    await asyncio.sleep(0)
    world.stores["a"].answer()
    for _ in range(10):
        await asyncio.sleep(0)
    assert [message["payload"].get("code") for message in told] == ["unavailable", "unavailable"]
    assert len(pipeline.manager.table.held) == 1
    world.stop()
