"""Sessions, repeated requests, extensions and watches with units and subtrees, in memory and with Redis."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.network.wire import Wire
from support.processes.servers import Genie, Redis, running_server

SECRET = "a secret of units and subtrees"  # noqa: S105 - it guards nothing
LONG = {"queueTimeout": 600_000, "transactionTimeout": 600_000}


@pytest.fixture(params=["memory", "redis"])
def genie(request: pytest.FixtureRequest) -> Iterator[Genie]:
    redis = request.getfixturevalue("redis") if request.param == "redis" else None
    with running_server(redis) as server:
        yield server


async def hello(genie: Genie, **payload: Any) -> tuple[Wire, bool]:
    """Connect, and begin or resume the session. Return the connection, and whether the session was resumed."""
    wire = await Wire.connect(genie.address)
    wire.send("hello", session=SECRET, **payload)
    return wire, (await wire.expect("welcome"))["resumed"]


async def messages_until_pong(wire: Wire) -> list[tuple[str, int]]:
    """Return the messages that have been sent before the reply to a ping, each with the id of its request, sorted."""
    wire.send("ping")
    messages = []
    while (message := await wire.receive())[0] != "pong":
        assert message[0] != "closed", messages
        messages.append((message[0], message[1]["id"]))
    return sorted(messages)


async def counts(wire: Wire, resource: str) -> tuple[int, int]:
    """Return the number of holders and of waiters of a resource."""
    wire.send("inspect", resource=resource)
    reply = await wire.expect("inspected")
    return reply["holdersTotal"], reply["queueTotal"]


async def refused(wire: Wire, *resources: str) -> int:
    """Request what is not free, without waiting. Return the number of blockers."""
    await wire.request(*resources, queueTimeout=0)
    ended = await wire.expect("released")
    assert ended["reason"] == "queue-timeout"
    return int(ended["blockersTotal"])


LOCKS = {"u": ["2/3:pool"], "s": ["exclusive:tree/**"]}
"""What the session holds, by ref."""
WAITS = {"w": ["2/3:pool"], "x": ["exclusive:tree/1", "1/3:tree/pool"]}
"""What the session waits for then, by ref. The second request waits for another owner as well."""


async def begin(genie: Genie, **payload: Any) -> tuple[Wire, Wire, dict[str, int]]:
    """Let a session hold `LOCKS` and wait for `WAITS`. Return its connection, another one, and the ids by ref."""
    client, resumed = await hello(genie, **payload)
    assert not resumed
    ids = {ref: await client.lock(*locks, ref=ref, onDisconnect="release", **LONG) for ref, locks in LOCKS.items()}
    ids |= {ref: await client.request(*locks, ref=ref, **LONG) for ref, locks in WAITS.items()}
    return client, await Wire.connect(genie.address), ids


async def repeat_all(client: Wire, ids: dict[str, int]) -> None:
    """Send all requests again, and check that each has its id and its state."""
    for ref, locks in (LOCKS | WAITS).items():
        client.send("request", resources=locks, ref=ref, onDisconnect="release" if ref in LOCKS else None, **LONG)
        assert (await client.expect("queued"))["id"] == ids[ref]
        if ref in LOCKS:
            assert (await client.expect("locked"))["id"] == ids[ref]


async def check_counted_once(other: Wire) -> None:
    """Check that the repeated requests have not been counted twice."""
    assert [await counts(other, name) for name in ("pool", "tree/1", "tree/**")] == [(1, 1), (1, 1), (1, 1)]
    assert await refused(other, "1/3:pool") == 2, "one unit is free, but the waiting request is ahead"
    assert await refused(other, "shared:tree/2") == 1


async def check_order_of_release(client: Wire, other: Wire, ids: dict[str, int]) -> None:
    """Release the held locks, one after the other: the waiting requests get them, and one unit is free beside them."""
    for held, granted in (("u", "w"), ("s", "x")):
        client.send("release", id=ids[held])
        replies = [await client.receive(), await client.receive()]
        assert sorted((command, payload["id"]) for command, payload in replies) == [
            ("locked", ids[granted]),
            ("released", ids[held]),
        ]
    await other.release(await other.lock("1/3:pool"))
    assert await refused(other, "2/3:pool") == 1
    await other.release(await other.lock("2/3:tree/pool", "exclusive:tree/2"))
    for ref in WAITS:
        await client.release(ids[ref])
    assert [await counts(other, name) for name in ("pool", "tree/**")] == [(0, 0), (0, 0)]
    await other.release(await other.lock("3/3:pool", "exclusive:**"))


async def test_a_repeated_request_is_counted_once(genie: Genie) -> None:
    client, other, ids = await begin(genie)
    await repeat_all(client, ids)
    await check_counted_once(other)
    await check_order_of_release(client, other, ids)


async def test_a_resumed_session_is_counted_once(genie: Genie) -> None:
    client, other, ids = await begin(genie)
    await client.close()
    client, resumed = await hello(genie)
    assert resumed
    states = [("locked" if ref in LOCKS else "queued", id_) for ref, id_ in ids.items()]
    assert await messages_until_pong(client) == sorted(states)
    await repeat_all(client, ids)
    await check_counted_once(other)
    await check_order_of_release(client, other, ids)


async def test_a_session_survives_a_restart_of_the_server(redis: Redis) -> None:
    with running_server(redis) as genie:
        client, other, ids = await begin(genie, sessionTimeout=60_000)
        genie.kill()
        genie.start()
        client, resumed = await hello(genie)
        assert resumed
        other = await Wire.connect(genie.address)
        states = [("locked" if ref in LOCKS else "queued", id_) for ref, id_ in ids.items()]
        assert await messages_until_pong(client) == sorted(states)
        await repeat_all(client, ids)
        await check_counted_once(other)
        await check_order_of_release(client, other, ids)


async def test_what_an_expired_session_had_is_free_and_can_be_locked_again(genie: Genie) -> None:
    client, other, ids = await begin(genie, sessionTimeout=100)
    next_units = await other.request("3/3:pool", **LONG)
    next_name = await other.request("exclusive:tree/7", **LONG)
    await client.close()
    assert {(await other.expect("locked"))["id"] for _ in range(2)} == {next_units, next_name}
    client, resumed = await hello(genie)
    assert not resumed
    again = {ref: await client.request(*locks, ref=ref, **LONG) for ref, locks in LOCKS.items()}
    assert set(again.values()).isdisjoint(ids.values())
    assert [await counts(other, name) for name in ("pool", "tree/**", "tree/1")] == [(1, 1), (1, 1), (0, 1)]
    for released, ref in (next_units, "u"), (next_name, "s"):
        await other.release(released)
        assert (await client.expect("locked"))["id"] == again[ref]
    assert await refused(other, "2/3:pool") == 1


async def test_an_extension_keeps_units_and_subtrees_and_a_timeout_ends_them(genie: Genie) -> None:
    client, other, watcher = [await Wire.connect(genie.address) for _ in range(3)]
    watcher.send("watch", prefix="e/")
    await watcher.expect("watching")
    kept = [await client.lock(lock, transactionTimeout=400) for lock in ("2/3:e/pool", "shared:e/t/**")]
    for id_ in kept:
        client.send("extend", id=id_, transactionTimeout=600_000)
        assert (await client.expect("extended"))["transactionTimeout"] == 600_000
    short = [await client.lock(lock, transactionTimeout=400) for lock in ("1/3:e/pool", "shared:e/t/1")]
    units = {"resource": "e/pool", "mode": "units", "of": 3}
    subtree, name = {"resource": "e/t/**", "mode": "shared"}, {"resource": "e/t/1", "mode": "shared"}
    granted = [
        units | {"units": 2, "id": kept[0]},
        subtree | {"id": kept[1]},
        units | {"units": 1, "id": short[0]},
        name | {"id": short[1]},
    ]
    for lock in granted:
        assert await watcher.expect("event") == {"state": "locked"} | lock
    waiting = await other.request("1/3:e/pool", **LONG)
    assert (await other.expect("locked"))["id"] == waiting, "as soon as the shorter lock has timed out"
    ended = [await watcher.expect("event") for _ in range(3)]
    assert sorted(ended, key=lambda event: event["id"]) == [
        {"state": "unlocked"} | granted[2],
        {"state": "unlocked"} | granted[3],
        {"state": "locked"} | units | {"units": 1, "id": waiting},
    ]
    assert [await counts(other, name) for name in ("e/pool", "e/t/**")] == [(2, 0), (1, 0)]
    assert await refused(other, "1/3:e/pool") == 2
    for id_ in kept:
        client.send("release", id=id_)
    assert [await watcher.expect("event") for _ in kept] == [{"state": "unlocked"} | lock for lock in granted[:2]]
