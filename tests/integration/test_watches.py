"""`watch` on the wire: the held locks, then an event for each change, in order and with bounded memory."""

from __future__ import annotations

import socket
from typing import Any

from support.network.wire import Wire
from support.processes.servers import WAIT_S, Genie, running_server

LAGGED = b'{"command":"event","payload":{"state":"lagged"}}\n'


async def watch(wire: Wire, prefix: str) -> dict[str, Any]:
    wire.send("watch", prefix=prefix)
    watching = await wire.expect("watching")
    assert watching["prefix"] == prefix
    return watching


async def test_each_change_is_one_event_in_order(genie: Genie) -> None:
    wire, other = await Wire.connect(genie.address), await Wire.connect(genie.address)
    held = await other.lock("exclusive:w/1", "shared:w/2", "shared:v", transactionName="T")
    watching = await watch(wire, "w/")
    rows = sorted((row["resource"], row["mode"], row["id"], row["transactionName"]) for row in watching["held"])
    assert rows == [("w/1", "exclusive", held, "T"), ("w/2", "shared", held, "T")]
    assert not watching["truncated"]
    assert len((await watch(wire, "w/1"))["held"]) == 1
    waiting = await other.request("exclusive:w/1")
    assert await other.release(held) == "success"
    await other.expect("locked")
    await other.release(waiting)
    events = [await wire.expect("event") for _ in range(4)]
    assert [(event["state"], event["resource"], event["id"]) for event in events] == [
        ("unlocked", "w/1", held),
        ("unlocked", "w/2", held),
        ("locked", "w/1", waiting),
        ("unlocked", "w/1", waiting),
    ]


async def test_locks_that_expire_or_end_with_their_connection_cause_events(genie: Genie) -> None:
    wire, other = await Wire.connect(genie.address), await Wire.connect(genie.address)
    await watch(wire, "")
    await other.lock("exclusive:brief", transactionTimeout=1)
    states = [await wire.expect("event") for _ in range(2)]
    assert [(event["state"], event["resource"]) for event in states] == [("locked", "brief"), ("unlocked", "brief")]
    other = await Wire.connect(genie.address)
    await other.lock("exclusive:bound", onDisconnect="release")
    await other.close()
    states = [await wire.expect("event") for _ in range(2)]
    assert [(event["state"], event["resource"]) for event in states] == [("locked", "bound"), ("unlocked", "bound")]


async def test_events_of_own_requests_follow_their_replies(genie: Genie) -> None:
    wire = await Wire.connect(genie.address)
    await watch(wire, "own/")
    id_ = await wire.lock("exclusive:own/1")
    assert (await wire.expect("event"))["id"] == id_
    wire.send("request", anyOf=["exclusive:own/1", "exclusive:own/2"], target=1)
    await wire.expect("queued")
    assert (await wire.expect("locked"))["resources"] == ["own/2"]
    assert (await wire.expect("event"))["resource"] == "own/2"
    wire.send("unwatch", prefix="own/")
    assert await wire.expect("unwatched") == {"prefix": "own/"}
    assert await wire.release(id_) == "success"
    wire.send("ping")
    await wire.expect("pong")


async def test_a_connection_has_at_most_a_hundred_watches(genie: Genie) -> None:
    wire = await Wire.connect(genie.address)
    for number in range(100):
        await watch(wire, f"many/{number}/")
    wire.send("watch", prefix="many/100/")
    assert (await wire.expect("error"))["code"] == "too-many"
    await watch(wire, "many/7/")
    wire.send("unwatch", prefix="many/7/")
    await wire.expect("unwatched")
    await watch(wire, "many/100/")


async def test_the_rows_of_watching_are_limited(genie: Genie) -> None:
    wire, other = await Wire.connect(genie.address), await Wire.connect(genie.address)
    ids = [await other.lock(*(f"exclusive:rows/{part}/{i}" for i in range(1_000))) for part in range(11)]
    watching = await watch(wire, "rows/")
    assert (len(watching["held"]), watching["truncated"]) == (10_000, True)
    assert not (await watch(wire, "rows/10/"))["truncated"]
    for id_ in ids:
        await other.release(id_)


async def test_buffered_events_are_limited_in_bytes() -> None:
    with running_server(max_unread=1 << 20) as genie:
        watcher = socket.create_connection(genie.address, WAIT_S)
        watcher.sendall(b'{"command":"watch","payload":{"prefix":"long/"}}\n')
        received = watcher.recv(1 << 20)
        other = await Wire.connect(genie.address)
        await other.lock(*(f"exclusive:long/{i}" for i in range(1_000)), transactionName="x" * 512)  # 640 KB of events
        while not received.endswith(LAGGED):
            received += watcher.recv(1 << 20) or b"closed" + LAGGED
        assert 1 << 17 < len(received) < (1 << 18) + 2_000
        watcher.close()


async def test_a_slow_watcher_is_sent_lagged_and_no_further_events() -> None:
    with running_server(max_unread=1 << 20) as genie:
        slow_watcher = socket.socket()
        slow_watcher.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow_watcher.settimeout(WAIT_S)
        slow_watcher.connect(genie.address)
        slow_watcher.sendall(b'{"command":"watch","payload":{"prefix":"slow_watcher/"}}\n')
        other = await Wire.connect(genie.address)
        names = [f"exclusive:slow_watcher/{'x' * 400}/{i}" for i in range(1_000)]
        for _ in range(20):  # 1 MB of events each: more than the kernel keeps for both sides
            await other.release(await other.lock(*names))
        received = b""
        while LAGGED not in received[-200:]:
            received += slow_watcher.recv(1 << 20) or b"closed" + LAGGED
        assert received.endswith(b"}\n" + LAGGED)
        slow_watcher.sendall(b'{"command":"watch","payload":{"prefix":"slow_watcher/"}}\n')
        with slow_watcher.makefile("rb") as lines:
            watching = lines.readline()
        assert watching == b'{"command":"watching","payload":{"prefix":"slow_watcher/","held":[],"truncated":false}}\n'
        slow_watcher.close()
