"""Which desk a connection goes to, with its bytes given by hand, and commits that are answered when it is said."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from genie.config import Settings
from genie.core import LockManager
from genie.errors import Code, RequestRejected
from genie.observability.stats import Stats
from genie.server.connection import Connection
from genie.server.desk import Desk, Refusing
from genie.server.pump import Pump
from genie.server.registry import Registry
from genie.storage.base import Batch
from genie.storage.memory import MemoryStore
from hearing import Hearing


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

    def __init__(self) -> None:
        self.stores = {"a": Held(), "b": Held()}
        self.pumps = {
            name: Pump(LockManager(), store, Settings(), Stats(), lambda: 0.0, lambda _: None, name)
            for name, store in self.stores.items()
        }
        self.desks: dict[str | None, Desk] = {None: self.pumps["a"], **self.pumps}
        self.registry = Registry(Settings())

    def enter(self) -> tuple[Connection, list[dict[str, Any]]]:
        def desk_of(namespace: str | None) -> Desk | RequestRejected:
            return self.desks.get(namespace) or RequestRejected(Code.UNKNOWN_NAMESPACE, f"no {namespace}")

        connection = Connection(self.desks[None], Settings(), self.registry, None, desk_of)
        told: list[dict[str, Any]] = []
        connection.connection_made(Hearing(lambda data: told.extend(map(orjson.loads, data.splitlines()))))
        return connection, told

    def stop(self) -> None:
        for pump in self.pumps.values():
            pump.stop()


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
    await asyncio.sleep(0)
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
    follower = Refusing(Stats(), "b")
    world.desks["b"] = follower
    connection, told = world.enter()
    connection.data_received(line("hello", namespace="b"))
    connection.data_received(line("hello", sessionTimeout=5))
    await asyncio.sleep(0)
    assert commands(told) == ["error"]
    world.stores["a"].answer()
    assert told[-1]["command"] == "welcome"
    assert told[-1]["payload"]["namespace"] == "a"
    world.stop()
