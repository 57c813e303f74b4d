"""The log of slow waits with their blockers, and of deadlocks with their cycle."""

from __future__ import annotations

from support.network.wire import Wire
from support.processes.servers import running_server

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


async def test_a_slow_wait_is_logged_with_its_blockers() -> None:
    with running_server(slow_wait=0.05) as genie:
        client = await Wire.connect(genie.address)
        held = await client.lock("exclusive:a", transactionName="first", note="cron@host-1", traceparent=TRACE)
        ahead = await client.request("shared:a", transactionName="second", note="report, page 3")
        line = genie.until("slow wait detected")
        assert (line["note"], line["blockers"][0]["note"]) == ("report, page 3", "cron@host-1")
        assert ("traceparent" in line, line["blockers"][0]["traceparent"]) == (False, TRACE)
        assert (line["level"], line["id"], line["transaction"]) == ("warning", ahead, "second")
        waits = await client.request("exclusive:a", "exclusive:b", transactionName="third", priority=-1)
        line = genie.until("slow wait detected")
        assert (line["id"], line["transaction"], line["waited_ms"] >= 50) == (waits, "third", True)
        assert line["resources"] == ["exclusive:a", "exclusive:b"]
        assert [(row["id"], row["transaction"], row["resource"], row["state"]) for row in line["blockers"]] == [
            (held, "first", "exclusive:a", "held"),
            (ahead, "second", "shared:a", "queued"),
        ]
        assert line["blockers_total"] == 2


async def test_a_flood_of_slow_waits_is_summarized() -> None:
    with running_server(slow_wait=0.05) as genie:
        client = await Wire.connect(genie.address)
        await client.lock("exclusive:a")
        client.raw(b'{"command":"request","payload":{"resources":["exclusive:a"]}}\n' * 500)
        told = counted = 0
        while counted + told < 500:
            line = genie.until("slow wait")  # detected, or log entries omitted
            told, counted = told + ("id" in line), counted + line.get("count", 0)
        assert counted + told == 500
        assert told < 100


async def test_shorter_waits_are_not_logged() -> None:
    with running_server(slow_wait=1) as genie:
        client = await Wire.connect(genie.address)
        held = await client.lock("exclusive:a")
        await client.request("exclusive:a", queueTimeout=1)
        assert (await client.expect("released"))["reason"] == "queue-timeout"
        client.raw(
            b'{"command":"request","payload":{"resources":["exclusive:a"]}}\n'
            b'{"command":"release","payload":{"id":%d}}\n' % held
        )
        told = [await client.receive() for _ in range(3)]
        assert sorted(command for command, _ in told) == ["locked", "queued", "released"]
        short = dict(told)["queued"]["id"]
        long = await client.request("exclusive:a")
        assert genie.until("slow wait detected")["id"] == long
        await client.release(short)


async def test_the_log_of_slow_waits_can_be_disabled() -> None:
    with running_server(slow_wait=0) as genie:
        client = await Wire.connect(genie.address)
        held = await client.lock("exclusive:a", transactionName="one")
        await client.request("exclusive:a", queueTimeout=300)
        assert (await client.expect("released"))["reason"] == "queue-timeout"
        await deadlock(client, held)
        genie.until("deadlock detected")
        assert not [line for line in genie.log if line["event"] == "slow wait detected"]


async def test_a_deadlock_is_logged_in_one_line_with_its_cycle() -> None:
    with running_server() as genie:
        client = await Wire.connect(genie.address)
        first = await client.lock("exclusive:a", transactionName="one")
        second, waits, victim = await deadlock(client, first)
        line = genie.until("deadlock detected")
        assert (line["level"], line["id"], line["transaction"]) == ("warning", victim, "two")
        assert (line["cycle"], line["steps"]) == (["two", "one"], 2)
        assert line["waits"] == [
            {"waiter": victim, "resource": "a", "holder": first},
            {"waiter": waits, "resource": "b", "holder": second},
        ]


async def deadlock(client: Wire, first: int) -> tuple[int, int, int]:
    """`two` asks for what `one` holds (`first`, a), which waits for `two`: (what two holds, one's wait, the victim)."""
    second = await client.lock("exclusive:b", transactionName="two")
    waits = await client.request("exclusive:b", transactionName="one")
    victim = await client.request("exclusive:a", transactionName="two")
    ended = await client.expect("released")
    assert (ended["id"], ended["reason"]) == (victim, "deadlock")
    assert first != victim
    return second, waits, victim
