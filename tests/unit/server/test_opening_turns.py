"""The first lines of many connections at the same moment: they are processed in turns, between which other clients are served."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from genie import opening_turns
from genie.server import connection as connection_module
from support.core.sliced_pipeline import Client, World

CONNECTIONS = 20
HELLO = b'{"command":"hello","payload":{}}\n'


@pytest.fixture(name="world")
async def _world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(opening_turns, "OPENING_BATCH_S", 0.0)
    monkeypatch.setattr(connection_module, "OPENING_QUANTUM_S", -1.0)
    return World()


@pytest.mark.parametrize(
    ("data", "answers"),
    [
        (HELLO, ["welcome"]),
        (b'{"command":"ping"}\n' + HELLO, ["pong", "error"]),
        (b'{"command":"hello","payload":{"protocol":7}}\n' + b'{"command":"ping"}\n' * 5, ["error"] * 6),
        (b"GET / HTTP/1.1\n", ["error"]),
    ],
)
async def test_first_lines_are_processed_one_by_one(world: World, data: bytes, answers: list[str]) -> None:
    clients, other = [Client(world) for _ in range(CONNECTIONS)], Client(world)
    other.send("ping")
    await world.settle()
    for client in clients:
        client.connection.data_received(data)
    processed = 0
    for _ in range(10 * CONNECTIONS * len(answers)):
        before, pongs = sum(len(client.received) for client in clients), len(other.received)
        other.send("ping")
        for _ in range(3):  # until the batch is acknowledged
            await asyncio.sleep(0)
        assert len(other.received) > pongs, "the other client is answered between two turns"
        processed = sum(len(client.received) for client in clients)
        assert processed - before <= 4 * len(answers)
    assert processed == CONNECTIONS * len(answers)
    for client in clients:
        assert client.commands() == answers
        assert not client.connection.reading_is_paused


@pytest.mark.parametrize("lines", [1, 50])
async def test_first_lines_are_processed_before_lines_after_a_rejected_hello(world: World, lines: int) -> None:
    clients = [Client(world) for _ in range(CONNECTIONS)]
    for client in clients:
        client.connection.data_received(b'{"command":"hello","payload":{"protocol":7}}\n')
    for _ in range(3 * CONNECTIONS):
        await asyncio.sleep(0)
    for client in clients:
        client.connection.data_received(b'{"command":"ping"}\n' * lines)
    new = Client(world)
    new.connection.data_received(HELLO)
    for _ in range(4):
        await asyncio.sleep(0)
    assert new.commands() == ["welcome"]
    assert sum(len(client.received) for client in clients) <= CONNECTIONS + 4, "one line in an iteration"
    for _ in range(CONNECTIONS * lines):
        Client(world).connection.data_received(HELLO)
        await asyncio.sleep(0)
    assert all(client.commands() == ["error"] * (1 + lines) for client in clients), (
        "the other lines do not wait for ever"
    )


@pytest.mark.parametrize("later", [False, True])
async def test_owners_take_turns(monkeypatch: pytest.MonkeyPatch, later: bool) -> None:
    monkeypatch.setattr(opening_turns, "OPENING_BATCH_S", 0.0)
    turns = opening_turns.OpeningTurns()
    processed: list[str] = []
    for owner in ["many"] * 5 + ["few"] * 2:
        turns.postpone(owner, partial(processed.append, owner), later=later)
    while len(processed) < 7:  # noqa: ASYNC110 - the turns notify no one
        await asyncio.sleep(0)
    assert processed == ["many", "few", "many", "few", "many", "many", "many"]


async def test_input_that_waits_for_its_turn_stays_in_order(world: World) -> None:
    first, last = Client(world), Client(world)
    first.connection.data_received(HELLO)
    last.connection.data_received(HELLO)
    assert last.connection.reading_is_paused
    last.connection.data_received(b'{"command":"ping"}\n')  # TLS may deliver input received earlier
    await world.settle()
    for _ in range(10):
        await asyncio.sleep(0)
    assert last.commands() == ["welcome", "pong"]
    assert not last.connection.reading_is_paused


async def test_the_input_of_a_lost_connection_is_dropped(world: World) -> None:
    first, lost = Client(world), Client(world)
    first.connection.data_received(HELLO)
    lost.connection.data_received(HELLO)
    lost.connection.connection_lost(None)
    for _ in range(10):
        await asyncio.sleep(0)
    assert lost.received == []
