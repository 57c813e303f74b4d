"""`watch` on the wire: what is held, then all that happens, in order, and never more than the watcher can take."""

from __future__ import annotations

import socket
from typing import Any

from servers import WAIT_S, Genie, running_server
from wire import Wire

LAGGED = b'{"command":"event","payload":{"state":"lagged"}}\n'


async def watched(wire: Wire, prefix: str) -> dict[str, Any]:
    wire.send("watch", prefix=prefix)
    told = await wire.expect("watching")
    assert told["prefix"] == prefix
    return told


async def test_each_change_is_told_once_in_order(genie: Genie) -> None:
    wire, other = await Wire.connect(genie.address), await Wire.connect(genie.address)
    held = await other.lock("exclusive:w/1", "shared:w/2", "shared:v", transactionName="T")
    told = await watched(wire, "w/")
    rows = sorted((row["resource"], row["mode"], row["id"], row["transactionName"]) for row in told["held"])
    assert rows == [("w/1", "exclusive", held, "T"), ("w/2", "shared", held, "T")]
    assert not told["truncated"]
    assert len((await watched(wire, "w/1"))["held"]) == 1
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


async def test_locks_that_end_by_themselves_are_told(genie: Genie) -> None:
    wire, other = await Wire.connect(genie.address), await Wire.connect(genie.address)
    await watched(wire, "")
    await other.lock("exclusive:brief", transactionTimeout=1)
    states = [await wire.expect("event") for _ in range(2)]
    assert [(event["state"], event["resource"]) for event in states] == [("locked", "brief"), ("unlocked", "brief")]
    other = await Wire.connect(genie.address)
    await other.lock("exclusive:bound", onDisconnect="release")
    await other.close()
    states = [await wire.expect("event") for _ in range(2)]
    assert [(event["state"], event["resource"]) for event in states] == [("locked", "bound"), ("unlocked", "bound")]


async def test_what_it_takes_itself_is_told_behind_the_answer(genie: Genie) -> None:
    wire = await Wire.connect(genie.address)
    await watched(wire, "own/")
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


async def test_a_connection_has_a_hundred_watches(genie: Genie) -> None:
    wire = await Wire.connect(genie.address)
    for number in range(100):
        await watched(wire, f"many/{number}/")
    wire.send("watch", prefix="many/100/")
    assert (await wire.expect("error"))["code"] == "too-many"
    await watched(wire, "many/7/")
    wire.send("unwatch", prefix="many/7/")
    await wire.expect("unwatched")
    await watched(wire, "many/100/")


async def test_no_more_rows_than_ten_thousand(genie: Genie) -> None:
    wire, other = await Wire.connect(genie.address), await Wire.connect(genie.address)
    ids = [await other.lock(*(f"exclusive:rows/{part}/{i}" for i in range(1_000))) for part in range(11)]
    told = await watched(wire, "rows/")
    assert (len(told["held"]), told["truncated"]) == (10_000, True)
    assert not (await watched(wire, "rows/10/"))["truncated"]
    for id_ in ids:
        await other.release(id_)


async def test_what_comes_at_once_is_bounded_in_bytes() -> None:
    with running_server(max_unread=1 << 20) as genie:
        watcher = socket.create_connection(genie.address, WAIT_S)
        watcher.sendall(b'{"command":"watch","payload":{"prefix":"long/"}}\n')
        heard = watcher.recv(1 << 20)
        other = await Wire.connect(genie.address)
        await other.lock(*(f"exclusive:long/{i}" for i in range(1_000)), transactionName="x" * 512)  # 640 KB of events
        while not heard.endswith(LAGGED):
            heard += watcher.recv(1 << 20) or b"closed" + LAGGED
        assert 1 << 17 < len(heard) < (1 << 18) + 2_000
        watcher.close()


async def test_who_does_not_read_is_told_so_and_no_more() -> None:
    with running_server(max_unread=1 << 20) as genie:
        deaf = socket.socket()
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.settimeout(WAIT_S)
        deaf.connect(genie.address)
        deaf.sendall(b'{"command":"watch","payload":{"prefix":"deaf/"}}\n')
        other = await Wire.connect(genie.address)
        names = [f"exclusive:deaf/{'x' * 400}/{i}" for i in range(1_000)]
        for _ in range(20):  # 1 MB of events each: more than the kernel keeps for both sides
            await other.release(await other.lock(*names))
        heard = b""
        while LAGGED not in heard[-200:]:
            heard += deaf.recv(1 << 20) or b"closed" + LAGGED
        assert heard.endswith(b"}\n" + LAGGED)
        deaf.sendall(b'{"command":"watch","payload":{"prefix":"deaf/"}}\n')
        with deaf.makefile("rb") as lines:
            told = lines.readline()
        assert told == b'{"command":"watching","payload":{"prefix":"deaf/","held":[],"truncated":false}}\n'
        deaf.close()
