"""Commands that take long although they are short: those after them wait for a later batch."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from genie.access import Principal
from genie.core import Inspection, LockManager, Release, Request, Row, State, Take
from genie.errors import RequestRejected
from genie.protocol import commands, replies
from genie.protocol.framing import LONG_LINE_BYTES, LongLine
from genie.protocol.resources import MAX_UNIT_CHOICES
from genie.server import dispatcher
from genie.server.rejections import unavailable
from support.core.sliced_pipeline import SECRET, SLICE, Client, World
from work.opcodes import OpcodeCounter

NAMES = 60
FOREVER = 3_600_000
CHOICES = 3_000


def line(command: str, **payload: Any) -> bytes:
    return json.dumps({"command": command, "payload": payload}).encode() + b"\n"


@pytest.fixture(name="world")
async def _world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(dispatcher, "MANY_NAMES", NAMES - 1)
    monkeypatch.setattr(dispatcher, "MAX_REPORTED_REQUESTS", SLICE)
    return World()


async def hold_large(world: World, client: Client, count: int, mode: str) -> list[int]:
    """Hold locks of `NAMES` names each. Return their ids."""
    for number in range(count):
        names = [f"{mode}:{'' if mode == 'shared' else number}/{name}" for name in range(NAMES)]
        client.send("request", anyOf=names, target=NAMES, transactionName="t", transactionTimeout=FOREVER)
    await world.settle()
    return [message["payload"]["id"] for message in client.received if message["command"] == "locked"]


async def rounds(world: World, other: Client, client: Client) -> list[int]:
    """Run until the client gets no more answers, while another one sends pings. Return the number of answers of each round."""
    counts = []
    while not counts or any(counts[-3:]):
        before, pongs = len(client.received), len(other.received)
        other.send("ping")
        for _ in range(3):  # until the batch is acknowledged
            await asyncio.sleep(0)
        assert len(other.received) > pongs, "the other client is answered in between"
        counts.append(len(client.received) - before)
    assert not world.failures
    return counts


@pytest.mark.parametrize("mode", ["exclusive", "shared"])
async def test_after_the_release_of_very_many_names_other_clients_are_served(
    world: World, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    if mode == "shared":  # its release is a step, whose time is measured
        monkeypatch.setattr(dispatcher, "EXPENSIVE_S", -1.0)
    client, other = Client(world), Client(world)
    ids = await hold_large(world, client, 20, mode)
    other.send("ping")
    await world.settle()
    client.connection.data_received(b"".join(line("release", id=id_) for id_ in ids))
    counts = await rounds(world, other, client)
    assert max(counts) <= 6, "in its turn, and as a slow command, in three iterations"
    assert sum(counts) == len(ids)
    assert world.table.locks == 0


async def test_a_search_for_a_deadlock_ends_the_turn_of_its_connection(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, other = Client(world), Client(world)
    for number in range(5):
        client.lock(f"{number}", transactionName=f"{number}", transactionTimeout=FOREVER)
    for number in range(4):
        client.lock(f"{number + 1}", transactionName=f"{number}", queueTimeout=FOREVER)
    other.send("ping")
    await world.settle()
    monkeypatch.setattr(dispatcher, "EXPENSIVE_S", -1.0)
    before = len(client.received)
    victim = line("request", resources=["exclusive:0"], transactionName="4", queueTimeout=FOREVER)
    client.connection.data_received(victim * 10)
    counts = await rounds(world, other, client)
    assert max(counts) <= 12, "two messages for each, in three iterations"
    assert client.received[-1]["payload"]["reason"] == "deadlock"
    assert sum(counts) == len(client.received) - before == 20


async def test_an_extension_of_a_large_request_is_a_slow_command(world: World) -> None:
    """The extension stores the request with all its names again."""
    client, other = Client(world), Client(world)
    ids = await hold_large(world, client, 20, "exclusive")
    other.send("ping")
    await world.settle()
    began = len(world.store.changes)
    for id_ in ids:
        client.send("extend", id=id_, transactionTimeout=FOREVER)
    client.connection.data_received(b"".join(line("extend", id=id_, transactionTimeout=FOREVER) for id_ in ids))
    assert sum(await rounds(world, other, client)) == 2 * len(ids)
    assert max(world.store.changes[began:]) == 1
    small = Client(world)
    small.lock("small", transactionTimeout=FOREVER)
    await world.settle()
    began = len(world.store.changes)
    id_ = small.received[-1]["payload"]["id"]
    small.connection.data_received(line("extend", id=id_, transactionTimeout=FOREVER) * 10)
    await world.settle()
    assert len(small.received) == 12
    assert len(world.store.changes) <= began + 2


async def test_a_slice_of_the_state_of_a_session_counts_the_resources_that_it_lists(world: World) -> None:
    client, other = Client(world), Client(world)
    client.send("hello", session=SECRET, sessionTimeout=FOREVER)
    ids = await hold_large(world, client, 20, "shared")
    client.connection.connection_lost(None)
    other.send("ping")
    await world.settle()
    again = Client(world)
    again.send("hello", session=SECRET, sessionTimeout=FOREVER)
    counts = await rounds(world, other, again)
    assert max(counts) <= 5, "with `welcome`"
    listed = [message["payload"] for message in again.received[1:]]
    assert [payload["id"] for payload in listed] == ids
    assert all(len(payload["resources"]) == NAMES for payload in listed)


class CountedName(str):
    """A name that counts its comparisons with prefixes."""

    __slots__ = ()
    compared = 0

    def startswith(self, *arguments: Any) -> bool:
        CountedName.compared += 1
        return super().startswith(*arguments)


def test_an_inspection_compares_a_bounded_number_of_names_with_prefixes() -> None:
    principal = Principal("p", prefixes=("own/",))
    rows = []
    for id_ in range(1, 101):
        request = Request(exclusive=tuple(CountedName(f"own/{n}" if n > 9_000 else f"{n}") for n in range(10_000)))
        request.id, request.state, request.since_unix_ms, request.deadline = id_, State.HELD, 0.0, 1
        rows.append(Row(request))
    CountedName.compared = 0
    reply = replies.inspected(Inspection(rows, [], 100, 0), 0.0, principal)
    assert CountedName.compared <= replies.MAX_READ_NAMES + 100 * replies.MAX_ROW_RESOURCES
    assert reply.count(b'"resourcesTotal":10000') == 100
    assert b"own/9001" in reply


def instructions(call: Callable[[], object]) -> int:
    counter = OpcodeCounter()
    counter.start()
    try:
        call()
    finally:
        counter.stop()
    return counter.count


@pytest.mark.parametrize("name", ["own/{}", "\ue000{}", "\U0010ffff{}", "{}\u00a0"])
def test_a_request_with_very_many_choices_executes_few_instructions_for_each(name: str) -> None:
    """True if its characters are printable or not."""
    any_of = [f"exclusive:{name.format(number)}" for number in range(CHOICES)]
    text = line("request", anyOf=any_of, target=len(any_of), transactionName="t", ref="r").rstrip()
    manager = LockManager()
    count = instructions(lambda: manager.step(commands.read(text), 0.0))  # type: ignore[arg-type]
    count += instructions(lambda: manager.step(Release(1), 0.0))
    assert not manager.table.locks
    assert count < 110 * len(any_of)


@pytest.mark.parametrize(
    ("choice", "choices", "limit", "limit_of_all"),
    [("exclusive:{0}", CHOICES, 52, 110), ("{1}/{2}:{0}", MAX_UNIT_CHOICES, 120, 500)],
)
def test_very_many_choices_are_parsed_once_whether_they_are_valid_or_not(
    choice: str, choices: int, limit: int, limit_of_all: int
) -> None:
    any_of = [choice.format(number, number + 1, 2 * number + 2) for number in range(choices)]
    valid = line("request", anyOf=any_of, target=choices, ref="r").rstrip()
    assert instructions(lambda: commands.read(valid)) < limit * choices
    manager = LockManager()
    for _ in range(2):
        count = instructions(lambda: manager.step(commands.read(valid), 0.0))  # type: ignore[arg-type]
        assert count < limit_of_all * choices
    first_value_invalid = valid[:-2] + b',"ref":"r"}}'
    first_value_invalid = first_value_invalid.replace(b'"payload": {', b'"payload": {"ref":0,')
    assert instructions(lambda: commands.read(first_value_invalid)) < limit * choices

    def read_invalid(*more: str) -> None:
        with pytest.raises(RequestRejected, match="anyOf is invalid") as rejected:
            commands.read(line("request", anyOf=[*any_of, *more], target=1, ref="r").rstrip())
        assert rejected.value.ref == "r"

    assert instructions(lambda: read_invalid(any_of[-1])) < limit * choices
    assert instructions(lambda: read_invalid("x:a")) < limit * choices
    assert instructions(lambda: read_invalid("1/2:a/**")) < limit * choices


def test_units_of_too_many_choices_are_rejected() -> None:
    """A choice of units takes the work of several other ones."""
    any_of = [f"1/2:{number}" for number in range(MAX_UNIT_CHOICES)]
    assert isinstance(
        commands.read(line("request", anyOf=[*any_of, "exclusive:a"], target=1).rstrip()), commands.LargeRequest | Take
    )
    with pytest.raises(RequestRejected, match="anyOf must ask for units of at most 2500 resources, not 2501"):
        commands.read(line("request", anyOf=[*any_of, "1/2:a"], target=1).rstrip())


async def test_the_grants_of_a_release_of_very_many_names_are_sent(world: World) -> None:
    holder, waiter, other = Client(world), Client(world), Client(world)
    names = [f"{number}" for number in range(dispatcher.MANY_NAMES + 1)]
    other.lock(*[f"other/{number}" for number in range(20)])  # a request that is charged
    for client in (holder, waiter):
        client.lock(*names, queueTimeout=60_000)
    await world.settle()
    holder.send("release", id=holder.received[0]["payload"]["id"])
    await world.settle()
    assert holder.commands() == ["queued", "locked", "released"]
    assert waiter.commands() == ["queued", "locked"]


async def test_one_long_line_of_all_connections_is_executed_in_an_iteration(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last bytes of a long line, with which it is executed, may be few."""
    executed, read = list[bytes](), dispatcher.read

    def count_long(text: bytes) -> commands.WireCommand:
        executed.extend([text] if len(text) > LONG_LINE_BYTES else [])
        return read(text)

    monkeypatch.setattr(dispatcher, "read", count_long)
    clients, other = [Client(world) for _ in range(10)], Client(world)
    long_line = line("request", anyOf=[f"exclusive:{number}" for number in range(3_000)], target=10**9)
    assert len(long_line) > LONG_LINE_BYTES
    for client in [*clients, other]:
        client.send("ping")
    await world.settle()
    for number, client in enumerate(clients):
        parts = (long_line[:-5], long_line[-5:]) if number % 2 else (long_line,)
        for part in [*parts, *parts, line("ping", ref="after")]:
            client.connection.data_received(part)
    for _ in range(200):
        before, pongs = len(executed), len(other.received)
        other.send("ping")
        for _ in range(3):  # until the batch is acknowledged
            await asyncio.sleep(0)
        assert len(executed) - before <= 3, "one in an iteration"
        assert len(other.received) > pongs
    for client in clients:
        assert client.commands() == ["pong", *["queued", "released"] * 2, "pong"]


async def test_a_long_line_with_very_many_keys_is_not_decoded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    client, read = Client(world), dispatcher.read
    monkeypatch.setattr(
        dispatcher, "read", lambda text: pytest.fail("decoded") if len(text) > LONG_LINE_BYTES else read(text)
    )
    client.send("ping")
    repeated = b",".join([b'"priority":5e-324'] * 2_000)
    client.connection.data_received(b'{"command":"request","payload":{"resources":["shared:a"],%b}}\n' % repeated)
    client.send("ping", ref="after")
    await world.settle()
    assert client.commands() == ["pong", "error", "pong"]
    assert client.received[1]["payload"]["code"] == "bad-json"


async def test_a_long_line_is_rejected_without_reading_its_names_while_the_store_is_unavailable() -> None:
    any_of = [f"exclusive:{number}" for number in range(CHOICES)]
    long_line = LongLine(line("request", anyOf=[*any_of, any_of[0]], target=1, ref="r"))
    rejected = list[RequestRejected | None]()
    assert instructions(lambda: rejected.append(unavailable(long_line, "why"))) < 20 * CHOICES
    assert rejected[0] is not None
    assert (rejected[0].code, rejected[0].message, rejected[0].ref) == ("unavailable", "why", "r")


async def test_a_reload_executes_few_instructions_for_each_watch(world: World) -> None:
    client = Client(world)
    client.connection.principal = Principal("p", ("own/",))
    for number in range(100):
        client.send("watch", prefix=f"own/{number}")
    await world.settle()
    assert client.commands() == ["watching"] * 100
    revoke = world.pipeline._dispatcher.revoke_watches
    assert instructions(lambda: revoke(client.connection)) < 15 * 100
    client.connection.principal = Principal("p", ("other/",), frozenset(("admin",)))
    assert not revoke(client.connection)
    client.connection.principal = Principal("p", ("own/1",))
    assert revoke(client.connection)
    assert not world.pipeline._dispatcher.watches.prefixes


async def count_scans(world: World, other: Client, subtree: str, **options: object) -> None:
    """Request a subtree 30 times, on 10 connections. Check that one request is executed in an iteration, and `other` is served."""
    clients = [Client(world) for _ in range(10)]
    for client in clients:
        for _ in range(3):
            client.send("request", resources=[subtree], queueTimeout=0, **options)

    def count() -> int:
        return sum(message["command"] == "released" for client in clients for message in client.received)

    scans = 0
    for _ in range(200):
        before, pongs = count(), len(other.received)
        other.send("ping")
        for _ in range(3):  # until the batch is acknowledged
            await asyncio.sleep(0)
        assert count() - before <= 3, "one scan in an iteration"
        assert len(other.received) > pongs
        scans = count()
        if scans == 3 * len(clients):
            break
    assert scans == 3 * len(clients)


async def test_a_request_for_a_subtree_that_is_compared_with_the_locks_of_its_transaction_is_a_slow_command(
    world: World,
) -> None:
    holder, other = Client(world), Client(world)
    for number in range(NAMES):
        holder.send("request", resources=[f"exclusive:{number}"], transactionName="T", transactionTimeout=FOREVER)
    holder.send("request", resources=["shared:z/**", "exclusive:z/1"], transactionName="U", transactionTimeout=FOREVER)
    await world.settle()
    await count_scans(world, other, "exclusive:z/**", transactionName="T")


async def test_a_request_for_a_subtree_that_is_compared_with_many_locks_is_a_slow_command(world: World) -> None:
    holder, other = Client(world), Client(world)
    for number in range(NAMES):
        holder.send("request", resources=[f"exclusive:{number}"], transactionTimeout=FOREVER)
    await world.settle()
    await count_scans(world, other, "exclusive:**")
    # What needs no scan is no slow command: units, and a subtree that waits already.
    other.send("request", resources=["exclusive:**"], transactionTimeout=FOREVER)
    await world.settle()
    quick = [Client(world) for _ in range(10)]
    for client in quick:
        client.send("request", resources=["shared:**"])
        client.send("request", resources=["1/2:pool"])
    for _ in range(2):
        await asyncio.sleep(0)
    assert [len([m for m in client.received if m["command"] == "queued"]) for client in quick] == [2] * len(quick)


async def test_choices_in_too_many_directories_are_rejected_and_charge_nothing(world: World) -> None:
    holder, client = Client(world), Client(world)
    holder.send("request", resources=["exclusive:x/**"], transactionTimeout=FOREVER)
    await world.settle()
    size = world.pipeline.state_bytes
    any_of = [f"exclusive:{number}/{'/'.join('abcdefgh')}/z" for number in range(3_000)]
    for ref in ("1", "2"):
        client.connection.data_received(line("request", anyOf=any_of, target=1, ref=ref))
        await world.settle()
    assert [(message["payload"]["code"], message["payload"]["ref"]) for message in client.received] == [
        ("too-many", "1"),
        ("too-many", "2"),
    ]
    assert "5000 levels" in client.received[0]["payload"]["message"]
    assert (world.pipeline.state_bytes, client.connection.session.live_requests) == (size, 0)
