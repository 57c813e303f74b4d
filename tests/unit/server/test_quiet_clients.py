"""Quiet clients: how many messages and writes they save for a contended lock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import orjson
import pytest

from genie.config import Limits
from genie.core import LockManager
from genie.observability.stats import Stats
from genie.server.connection import Connection
from genie.server.listener import AdmissionControl
from genie.server.pipeline import Pipeline
from genie.storage.memory import MemoryStore
from support.network.recording_transport import RecordingTransport

ROUNDS = 10
CLIENTS = 3
"""While one client holds the lock, another one waits: its grant is sent before the reply to the client that released the lock."""


class Client:
    """Acquires one lock repeatedly: it releases the lock when it is granted, and then requests it again."""

    def __init__(self, pipeline: Pipeline, admission: AdmissionControl, quiet: bool) -> None:
        self.messages: list[str] = []
        self.writes = 0
        self.request_count = 0
        self.connection = Connection(pipeline, Limits(), admission)
        self.connection.connection_made(RecordingTransport(self._receive))
        self._send("hello", quiet=quiet)

    def request(self) -> None:
        self.request_count += 1
        self._send("request", resources=["exclusive:hot"], ref=f"{self.request_count}")

    def _send(self, command: str, **payload: object) -> None:
        line = orjson.dumps({"command": command, "payload": payload}) + b"\n"
        asyncio.get_running_loop().call_soon(self.connection.data_received, line)

    def _receive(self, data: bytes) -> None:
        self.writes += 1
        for message in map(orjson.loads, data.splitlines()):
            self.messages.append(message["command"])
            if message["command"] == "locked":
                self._send("release", ref=message["payload"]["ref"])
            elif message["command"] == "released" and self.request_count < ROUNDS:
                self.request()


async def until(done: Callable[[], bool]) -> None:
    """Run the event loop until a condition holds, at most 10,000 iterations."""
    for _ in range(10_000):
        if done():
            return
        await asyncio.sleep(0)
    raise AssertionError("the condition does not hold after 10,000 iterations")


async def contend(quiet: bool) -> tuple[list[str], int]:
    """Return the messages to contending clients, without `welcome`, and the number of writes."""
    failed: list[BaseException] = []
    pipeline = Pipeline(LockManager(), MemoryStore(), Limits(), Stats(), lambda: 0.0, failed.append)
    admission = AdmissionControl(Limits())
    clients = [Client(pipeline, admission, quiet) for _ in range(CLIENTS)]
    await until(lambda: all(client.messages == ["welcome"] for client in clients))
    for client in clients:
        client.request()
    await until(lambda: all(client.messages.count("released") == ROUNDS for client in clients))
    pipeline.stop()
    assert not failed
    messages = [message for client in clients for message in client.messages if message != "welcome"]
    return messages, sum(client.writes - 1 for client in clients)


async def test_a_quiet_client_saves_one_message_and_one_write_per_contended_lock() -> None:
    verbose, verbose_writes = await contend(quiet=False)
    quiet, quiet_writes = await contend(quiet=True)
    assert sorted(set(verbose)) == ["locked", "queued", "released"]
    assert sorted(set(quiet)) == ["locked", "released"]
    assert (len(verbose), len(quiet)) == (3 * CLIENTS * ROUNDS, 2 * CLIENTS * ROUNDS)
    assert verbose_writes - quiet_writes >= CLIENTS * (ROUNDS - 1), "each contended request saves one"


@pytest.mark.parametrize("quiet", [True, False])
async def test_a_request_without_a_ref_is_sent_queued_in_any_case(quiet: bool) -> None:
    pipeline = Pipeline(LockManager(), MemoryStore(), Limits(), Stats(), lambda: 0.0, lambda _: None)
    client = Client(pipeline, AdmissionControl(Limits()), quiet)
    client._send("request", resources=["exclusive:a"])
    await until(lambda: "locked" in client.messages)
    assert client.messages == ["welcome", "queued", "locked"]
    pipeline.stop()
