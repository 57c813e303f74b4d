"""Which desk a connection goes to, with its bytes given by hand, and commits that are answered when it is said."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import orjson

from genie.config import Settings
from genie.core import LockManager
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
        self.desks: dict[str, Desk] = {"": self.pumps["a"], **self.pumps}
        self.registry = Registry(Settings())

    def enter(self) -> tuple[Connection, list[dict[str, Any]]]:
        connection = Connection(self.desks[""], Settings(), self.registry, None, self.desks.__getitem__)
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


async def test_who_has_still_to_be_told_of_one_namespace_is_told_nothing_too_early_of_another() -> None:
    world = World()
    (other, _), (connection, told) = world.enter(), world.enter()
    other.data_received(line("request", resources=["exclusive:1"]))
    connection.data_received(line("hello", sessionTimeout=0))
    await asyncio.sleep(0)
    assert world.stores["a"].waiting, "both are in one batch, which is not stored yet"
    connection.data_received(line("hello", namespace="b"))
    connection.data_received(line("request", resources=["exclusive:1"]))
    await asyncio.sleep(0)
    world.stores["a"].answer()
    await asyncio.sleep(0)
    assert commands(told) == ["error"] * 3
    connection.data_received(line("hello", namespace="b"))
    connection.data_received(line("request", resources=["exclusive:1"]))
    await asyncio.sleep(0)
    assert commands(told) == ["error"] * 3, "what it holds there is not stored"
    world.stores["b"].answer()
    assert commands(told) == ["error"] * 3 + ["welcome", "queued", "locked"]
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
