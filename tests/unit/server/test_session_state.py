"""The state of a resumed session with many requests: in slices, between which other clients are served."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from genie.access import Principal
from genie.server import dispatcher
from support.core.sliced_pipeline import LOCKS, SECRET, SLICE, Client, World, exceed_store_timeout, expire, hold


@pytest.fixture(name="world")
async def _world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(dispatcher, "MAX_REPORTED_REQUESTS", SLICE)
    return World()


async def iterations(count: int = 1) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def resumable(world: World, number: int = LOCKS) -> list[int]:
    """Create a detached session that holds `number` locks. Return their ids."""
    holder = Client(world)
    holder.send("hello", session=SECRET, sessionTimeout=60_000)
    await hold(world, holder, number)
    holder.connection.connection_lost(None)
    await world.settle()
    return [*world.table.held]


def resume(world: World) -> Client:
    client = Client(world)
    client.send("hello", session=SECRET, sessionTimeout=60_000)
    client.send("ping")
    return client


def ids(messages: list[dict[str, Any]], command: str) -> list[int]:
    return [message["payload"]["id"] for message in messages if message["command"] == command]


async def test_the_state_is_sent_in_slices_before_any_other_answer(world: World) -> None:
    held, other = await resumable(world), Client(world)
    again, received = resume(world), 0
    sizes = []
    while "pong" not in again.commands():
        sizes.append(len(again.received) - received)
        received, answers = len(again.received), len(other.received)
        other.send("ping")
        await iterations(3)
        assert len(other.received) > answers, "the other client is answered between two slices"
    assert max(sizes) <= 4 * SLICE + 1, "with `welcome`"
    assert again.commands() == ["welcome"] + ["locked"] * LOCKS + ["pong"]
    assert ids(again.received, "locked") == held
    assert not world.pipeline._scheduler


async def test_changes_between_two_slices_do_not_contradict_the_state(world: World) -> None:
    other, (first, *held) = Client(world), await resumable(world)
    waiting = Client(world)
    waiting.send("hello", session=SECRET, sessionTimeout=60_000)
    await world.settle()
    other.lock("contended", "also-contended", transactionTimeout=3_600_000)
    await world.settle()
    blocker = ids(other.received, "locked")[0]
    for name in ("contended", "also-contended"):
        waiting.lock(name, queueTimeout=3_600_000, transactionTimeout=3_600_000)
    await world.settle()
    granted, ended = world.table.waiting
    waiting.connection.connection_lost(None)
    await world.settle()
    again = resume(world)
    await iterations(3)
    assert "pong" not in again.commands()
    assert again.received[1]["payload"]["id"] == first
    for id_ in (ended, blocker, first, held[-1]):  # waits, is held by another, is reported, is not reported yet
        other.send("release", id=id_)
    await world.settle()
    messages = again.received[: again.commands().index("pong")]
    assert ids(messages, "queued") == []
    assert sorted(set(ids(messages, "locked"))) == [first, *held[:-1], granted]
    assert sorted(ids(messages, "released")) == sorted((first, held[-1], ended))
    last = {message["payload"]["id"]: message["command"] for message in messages[1:]}
    assert {id_ for id_, command in last.items() if command == "locked"} == set(world.table.held)


async def test_the_state_waits_until_the_client_reads(world: World) -> None:
    await resumable(world)
    again = resume(world)
    again.connection.pause_writing()
    await iterations(20)
    assert 0 < b"".join(again.connection._held_output).count(b"\n") <= 4 * SLICE, "not all is buffered"
    again.connection.resume_writing()
    await world.settle()
    assert again.commands() == ["welcome"] + ["locked"] * LOCKS + ["pong"]


async def test_a_takeover_and_a_loss_end_the_list(world: World) -> None:
    held = await resumable(world)
    first = resume(world)
    await iterations()
    second = resume(world)
    await iterations(3)
    assert first.received[-1]["payload"]["code"] == "session-taken-over"
    second.connection.connection_lost(None)
    await world.settle()
    assert len(first.received) + len(second.received) < LOCKS
    third = resume(world)
    await world.settle()
    assert ids(third.received, "locked") == held == [*world.table.held]
    third.connection.connection_lost(None)
    await world.settle()
    assert not world.pipeline._scheduler


async def test_replies_are_not_presumed_received_before_they_are_sent(world: World) -> None:
    held, other = await resumable(world), Client(world)
    for id_ in held:
        other.send("release", id=id_)
    await world.settle()
    again = resume(world)
    again.connection.pause_writing()
    await iterations(3)
    assert 0 < b"".join(again.connection._held_output).count(b"\n") < LOCKS
    world.now += 10 * 60_000.0
    again.connection.connection_lost(None)
    await world.settle()
    assert not again.received
    last = resume(world)
    await world.settle()
    assert ids(last.received, "released") == held
    assert last.commands()[-1] == "pong"


async def test_no_command_overtakes_the_state_while_the_store_is_unavailable(world: World) -> None:
    held, other = await resumable(world), Client(world)
    again = resume(world)
    assert "pong" not in again.commands()
    world.store.held_back = []
    other.lock("new", transactionTimeout=3_600_000)
    await iterations()
    assert world.store.held_back
    exceed_store_timeout(world.pipeline)
    await iterations(5)
    again.send("ping", ref="early")
    await iterations(3)
    again.send("ping", ref="late")
    world.store.acknowledge()
    await world.settle()
    commands = again.commands()
    assert (commands[-1], commands.count("pong")) == ("pong", 1)
    assert commands.index("pong") > len(commands) - 1 - commands[::-1].index("locked")
    assert ids(again.received, "locked") == held
    assert commands.count("error") == 2, "the first two pings, which the client repeats"


@pytest.mark.parametrize("prefixes", [None, ("b/",)])
@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_reply_for_a_lost_connection_has_no_notes_of_others(
    world: World, is_lost: bool, prefixes: tuple[str, ...] | None
) -> None:
    """When the client resumes the session, its principal may have other prefixes."""
    holder, client = Client(world), Client(world)
    principal = client.connection.principal = Principal("p", prefixes)
    client.send("hello", session=SECRET, sessionTimeout=10_000)
    holder.lock("b/1", note="of another")
    client.lock("b/1", queueTimeout=1_000)
    await world.settle()
    if is_lost:
        client.connection.connection_lost(None)
        await world.settle()
    world.now += 1_000
    expire(world.pipeline)
    await world.settle()
    if is_lost:
        client = Client(world)
        client.connection.principal = principal
        client.send("hello", session=SECRET)
        await world.settle()
    (released,) = [message["payload"] for message in client.received if message["command"] == "released"]
    assert released["reason"] == "queue-timeout"
    assert [blocker.get("note") for blocker in released["blockers"]] == [None if is_lost and prefixes else "of another"]
