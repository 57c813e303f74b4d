"""The wire protocol of a real server."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator

import pytest

from support.network.wire import Wire
from support.processes.servers import Genie, running_server


@pytest.fixture
async def wire(genie: Genie) -> AsyncIterator[Wire]:
    client = await Wire.connect(genie.address)
    yield client
    await client.close()


@pytest.fixture
async def other(genie: Genie) -> AsyncIterator[Wire]:
    client = await Wire.connect(genie.address)
    yield client
    await client.close()


async def test_request_and_release(wire: Wire) -> None:
    wire.send("request", resources=["exclusive:cycle"])
    queued = await wire.expect("queued")
    locked = await wire.expect("locked")
    assert locked == {"id": queued["id"], "fence": locked["fence"]}
    wire.send("release", id=queued["id"])
    assert await wire.expect("released") == {"id": queued["id"], "reason": "success"}


async def test_waiters_are_granted_in_the_order_of_arrival(wire: Wire, other: Wire) -> None:
    first = await wire.lock("exclusive:handover")
    second = await other.request("exclusive:handover")
    third = await wire.request("shared:handover", "shared:more")
    assert first < second < third
    wire.send("release", id=first)
    assert (await wire.expect("released"))["id"] == first
    assert (await other.expect("locked"))["id"] == second
    assert await other.release(second) == "success"
    assert (await wire.expect("locked"))["id"] == third
    await wire.release(third)


async def test_a_higher_priority_is_granted_first(wire: Wire, other: Wire) -> None:
    held = await wire.lock("exclusive:prio")
    low = await other.request("exclusive:prio")
    high = await other.request("exclusive:prio", priority=0.5)
    await wire.release(held)
    assert (await other.expect("locked"))["id"] == high
    await other.release(high)
    assert (await other.expect("locked"))["id"] == low
    await other.release(low)


async def test_a_thousand_commands_in_one_segment_are_answered_in_order(wire: Wire) -> None:
    lines = b"".join(
        b'{"command":"request","payload":{"resources":["exclusive:seg/%d"]}}\r\n\r\n' % i for i in range(1000)
    )
    wire.raw(lines)
    ids = []
    for _ in range(1000):
        ids.append((await wire.expect("queued"))["id"])
        await wire.expect("locked")
    assert ids == sorted(set(ids))
    wire.raw(b"".join(b'{"command":"release","payload":{"id":%d}}\n' % id_ for id_ in ids))
    assert [(await wire.expect("released"))["id"] for _ in ids] == ids


async def test_a_command_may_arrive_byte_by_byte(wire: Wire) -> None:
    for byte in b'{"command":"ping","payload":{}}\n':
        wire.raw(bytes([byte]))
        await wire.writer.drain()
    assert await wire.expect("pong") == {}


async def test_a_request_without_queue_timeout_never_waits(wire: Wire, other: Wire) -> None:
    held = await wire.lock("exclusive:try", transactionName="holder")
    id_ = await other.request("exclusive:try", queueTimeout=0)
    released = await other.expect("released")
    blocker = released.pop("blockers")[0]
    assert released == {"id": id_, "reason": "queue-timeout", "waited": 0, "blockersTotal": 1}
    assert blocker.pop("since") > 1_700_000_000_000
    expected = {"id": held, "transactionName": "holder", "resource": "try", "mode": "exclusive", "state": "held"}
    assert blocker == expected
    await wire.release(held)
    assert await other.release(await other.lock("exclusive:try", queueTimeout=0)) == "success"


async def test_queue_timeout_has_the_blockers(wire: Wire, other: Wire) -> None:
    held = await wire.lock("exclusive:qt")
    other.raw(
        b'{"command":"request","payload":{"resources":["shared:qt"],"queueTimeout":20}}\n'
        b'{"command":"request","payload":{"resources":["exclusive:qt"],"queueTimeout":40}}\n'
    )
    first, second = [(await other.expect("queued"))["id"] for _ in range(2)]
    one, two = await other.expect("released"), await other.expect("released")
    assert (one["id"], one["reason"], one["waited"] >= 20) == (first, "queue-timeout", True)
    assert (two["id"], two["waited"] >= 40) == (second, True)
    assert [(b["id"], b["state"]) for b in one["blockers"]] == [(held, "held")]
    await wire.release(held)


async def test_transaction_timeout_frees_the_lock(wire: Wire, other: Wire) -> None:
    held = await wire.lock("exclusive:tt", transactionTimeout=20)
    waiting = await other.request("exclusive:tt")
    released = await wire.expect("released")
    assert (released["id"], released["reason"], released["held"] >= 20) == (held, "transaction-timeout", True)
    assert (await other.expect("locked"))["id"] == waiting
    assert await wire.release(held) == "transaction-timeout"  # again, with its first reason
    await other.release(waiting)


async def test_no_lock_times_out_early(wire: Wire) -> None:
    """By the clock of a client that counts from the moment at which it sends the request: both clocks are those of Linux."""
    for number in range(200):
        await asyncio.sleep(number % 5 * 0.0003)  # not in step with the server's milliseconds
        sent_at = time.monotonic()
        wire.send("request", resources=["exclusive:early"], transactionTimeout=3)
        await wire.expect("queued")
        await wire.expect("locked")
        assert (await wire.expect("released"))["reason"] == "transaction-timeout"
        assert (time.monotonic() - sent_at) * 1000 >= 3


async def test_extend(wire: Wire) -> None:
    held = await wire.lock("exclusive:ext", transactionTimeout=2_000_000)
    wire.send("extend", id=held, transactionTimeout=20)
    assert await wire.expect("extended") == {"id": held, "transactionTimeout": 20}
    assert (await wire.expect("released"))["reason"] == "transaction-timeout"
    wire.send("extend", id=held, transactionTimeout=20)
    assert await wire.expect("released") == {"id": held, "reason": "transaction-timeout"}


async def test_extend_does_not_affect_waiting_requests(wire: Wire) -> None:
    held = await wire.lock("exclusive:ext2")
    waiting = await wire.request("exclusive:ext2")
    wire.send("extend", id=waiting, transactionTimeout=20)
    error = await wire.expect("error")
    assert (error["code"], error["id"]) == ("bad-request", waiting)
    await wire.release(held)
    assert (await wire.expect("locked"))["id"] == waiting
    await wire.release(waiting)


async def test_any_client_may_release_and_the_owner_is_notified(wire: Wire, other: Wire) -> None:
    held = await wire.lock("exclusive:any", ref="mine")
    assert await other.release(held) == "success"
    assert await wire.expect("released") == {"id": held, "reason": "success", "ref": "mine"}
    assert await wire.release(held) == "success"


async def test_a_queued_request_can_be_cancelled(wire: Wire) -> None:
    held = await wire.lock("exclusive:cancel")
    waiting = await wire.request("exclusive:cancel")
    assert await wire.release(waiting) == "success"
    await wire.release(held)


async def test_an_unknown_id_is_an_error(wire: Wire) -> None:
    for id_ in (1, 0, -5, 2**53 - 1):
        wire.send("release", id=id_)
        assert (await wire.expect("error"))["code"] == "unknown-id"
    for number in (2**53, 2**64, 10**400):
        for more in (b"", b',"more":1'):
            wire.raw(b'{"command":"release","payload":{"id":%d%b}}\n' % (number, more))
            assert (await wire.expect("error"))["code"] in ("bad-request", "bad-json")


async def test_a_ref_comes_back_in_every_message(wire: Wire) -> None:
    wire.send("request", resources=["exclusive:ref"], ref='a "ref" \\ ü')
    for command in ("queued", "locked"):
        assert (await wire.expect(command))["ref"] == 'a "ref" \\ ü'
    wire.send("request", resources=["exclusive:ref"], ref="b", queueTimeout=0)
    for command in ("queued", "released"):
        assert (await wire.expect(command))["ref"] == "b"


async def test_a_repeated_ref_is_executed_once(wire: Wire) -> None:
    held = await wire.lock("exclusive:again", ref="r1")
    wire.send("request", resources=["exclusive:again"], ref="r1")
    assert await wire.expect("queued") == {"id": held, "ref": "r1"}
    assert (await wire.expect("locked"))["id"] == held
    wire.send("request", resources=["exclusive:other"], ref="r1")
    error = await wire.expect("error")
    assert (error["code"], error["ref"]) == ("ref-conflict", "r1")
    assert "id" not in error
    await wire.release(held)
    wire.send("request", resources=["exclusive:again"], ref="r1")
    assert await wire.expect("queued") == {"id": held, "ref": "r1"}
    assert await wire.expect("released") == {"id": held, "reason": "success", "ref": "r1"}


async def test_a_duplicate_resource_is_locked_once_in_the_stronger_mode(wire: Wire, other: Wire) -> None:
    held = await wire.lock("shared:twice", "exclusive:twice", "shared:twice")
    await other.request("shared:twice", queueTimeout=0)
    assert (await other.expect("released"))["blockersTotal"] == 1
    await wire.release(held)


async def test_a_lost_connection_cancels_waiting_requests_and_keeps_locks(genie: Genie, wire: Wire) -> None:
    leaving = await Wire.connect(genie.address)
    kept = await leaving.lock("exclusive:kept")
    await leaving.lock("exclusive:bound", onDisconnect="release")
    await leaving.request("exclusive:kept")
    bound = await wire.request("exclusive:bound")
    waiting = await wire.request("exclusive:kept")
    await leaving.close()
    assert (await wire.expect("locked"))["id"] == bound
    assert await wire.release(kept) == "success"
    assert (await wire.expect("locked"))["id"] == waiting
    await wire.release(bound)
    await wire.release(waiting)


async def test_a_half_closed_connection_gets_its_replies(genie: Genie) -> None:
    client = await Wire.connect(genie.address)
    client.send("request", resources=["exclusive:half"], onDisconnect="release")
    client.send("request", resources=["exclusive:half"])
    client.writer.write_eof()
    assert [(await client.receive())[0] for _ in range(6)] == [
        "queued",
        "locked",
        "queued",
        "released",
        "released",
        "closed",
    ]
    await client.close()


async def test_inspect(wire: Wire) -> None:
    held = await wire.lock("exclusive:look", transactionName="L1")
    waiting = await wire.request("shared:look", "shared:look2", priority=3)
    wire.send("inspect", resource="look")
    found = await wire.expect("inspected")
    assert (found["holdersTotal"], found["queueTotal"]) == (1, 1)
    assert (found["holders"][0]["id"], found["holders"][0]["transactionName"]) == (held, "L1")
    row = found["queue"][0]
    assert (row["id"], row["priority"], row["resources"]) == (waiting, 3, ["shared:look", "shared:look2"])
    assert [blocker["id"] for blocker in row["blockers"]] == [held]
    for asked in ({"transactionName": "L1"}, {"id": held}):
        wire.send("inspect", **asked)
        assert [row["id"] for row in (await wire.expect("inspected"))["holders"]] == [held]
    wire.send("inspect", resource="nobody/knows")
    assert (await wire.expect("inspected"))["holdersTotal"] == 0
    wire.send("inspect", limit=1)
    found = await wire.expect("inspected")
    assert len(found["holders"]) + len(found["queue"]) == 1
    for only, other in (("holders", "queue"), ("queue", "holders")):
        wire.send("inspect", resource="look", limit=1, only=only)
        found = await wire.expect("inspected")
        assert ([row["id"] for row in found[only]], found[other]) == ([held if only == "holders" else waiting], [])
        assert (found["holdersTotal"], found["queueTotal"]) == (1, 1)
    await wire.release(held)
    await wire.expect("locked")
    await wire.release(waiting)


async def test_deadlock_names_the_cycle(wire: Wire, other: Wire) -> None:
    a = await wire.lock("exclusive:dl/a", transactionName="D1")
    b = await other.lock("exclusive:dl/b", transactionName="D2")
    waiting = await wire.request("exclusive:dl/b", transactionName="D1")
    victim = await other.request("exclusive:dl/a", transactionName="D2", queueTimeout=0)
    assert await other.expect("released") == {
        "id": victim,
        "reason": "deadlock",
        "cycle": ["D2", "D1"],
        "waits": [
            {"resource": "dl/a", "waiter": victim, "holder": a},
            {"resource": "dl/b", "waiter": waiting, "holder": b},
        ],
    }
    await other.release(b)
    assert (await wire.expect("locked"))["id"] == waiting
    await wire.release(a)
    await wire.release(waiting)


async def test_sigterm_completes_accepted_commands() -> None:
    with running_server() as genie:
        client = await Wire.connect(genie.address)
        await client.lock("exclusive:term")
        genie.send(signal.SIGTERM)
        assert await client.receive() == ("closed", {})
        assert genie.wait() == 0
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*genie.address)
        await client.close()


async def test_a_second_server_on_the_port_fails_in_one_line(genie: Genie) -> None:
    second = Genie(port=genie.port)
    second.start(wait=False)
    assert second.wait() != 0
