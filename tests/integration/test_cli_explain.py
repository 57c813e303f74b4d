"""`genie explain` and `genie waits`, against a real server."""

from __future__ import annotations

import json

import pytest

from support.network.wire import Wire
from support.processes.commands import genie_cli
from support.processes.servers import Genie


@pytest.fixture
async def wire(genie: Genie) -> Wire:
    return await Wire.connect(genie.address)


HOUR_MS = 3_600_000


async def test_explain_a_waiting_request_and_a_holder(genie: Genie, wire: Wire) -> None:
    held = await wire.lock("exclusive:e/a", "shared:e/b", transactionName="t1", transactionTimeout=HOUR_MS)
    ahead = await wire.request("exclusive:e/b", queueTimeout=HOUR_MS)
    last = await wire.request("exclusive:e/a", "shared:e/b", transactionName="t3", queueTimeout=HOUR_MS // 2)
    waits, holds = genie_cli("explain", str(last), port=genie.port), genie_cli("explain", str(held), port=genie.port)
    waiter_replies = json.loads(genie_cli("explain", str(last), "--json", port=genie.port).stdout)
    holder_replies = json.loads(genie_cli("explain", str(held), "--json", port=genie.port).stdout)
    assert (waits.returncode, holds.returncode) == (0, 0)
    assert waits.stdout.startswith(f"{last} of t3 has waited for ")
    assert f"\nBlocked by: 2\n  └ {held} of t1 holds exclusive:e/a (" in waits.stdout
    assert f"\n  └ {ahead} is ahead in the queue for exclusive:e/b (" in waits.stdout
    assert f"\n  {held} releases or times out: in " in waits.stdout
    assert f"\n  {ahead} is granted and releases, or ends: it times out in " in waits.stdout
    assert waits.stdout.endswith("\nUnless a blocker releases earlier, it times out first.\n")
    assert holds.stdout.startswith(f"{held} of t1 has held for ")
    assert f"\nWaiting for it:\n  └ {last} of t3 for exclusive:e/a (" in holds.stdout
    assert f"\n  └ {ahead} for exclusive:e/b (" in holds.stdout
    assert holds.stdout.count("└") == 2
    assert waiter_replies["request"]["queue"][0]["id"] == last
    assert waiter_replies["blockers"][str(held)]["holders"][0]["id"] == held
    assert waiter_replies["blockers"][str(ahead)]["queue"][0]["id"] == ahead
    assert [row["id"] for row in holder_replies["queues"]["e/b"]["queue"]] == [ahead, last]
    for id_ in (last, ahead, held):
        wire.send("release", id=id_)


async def test_explain_a_holder_with_waiters_above_and_below_its_names(genie: Genie, wire: Wire) -> None:
    other = await Wire.connect(genie.address)
    name = await wire.lock("shared:x/1", "shared:x/2", transactionTimeout=HOUR_MS)
    subtree = await wire.lock("shared:y/**", transactionTimeout=HOUR_MS)
    above = await other.request("exclusive:x/**", queueTimeout=HOUR_MS)
    below = await other.request("1/2:y/1", queueTimeout=HOUR_MS)
    shared = await other.request("shared:x/1", queueTimeout=HOUR_MS)
    of_name, of_subtree = [genie_cli("explain", str(id_), port=genie.port).stdout for id_ in (name, subtree)]
    assert f"\nWaiting for it:\n  └ {above} for exclusive:x/** (" in of_name
    assert f"\nWaiting for it:\n  └ {below} for 1/2:y/1 (" in of_subtree
    assert (of_name + of_subtree).count("└") == 2, "the subtree waits once, and the shared lock only for the subtree"
    for id_ in (shared, below, above, subtree, name):
        wire.send("release", id=id_)


async def test_explain_of_an_ended_request_is_an_error(genie: Genie, wire: Wire) -> None:
    ended = await wire.lock("exclusive:e/ended")
    await wire.release(ended)
    failed = genie_cli("explain", str(ended), port=genie.port)
    assert (failed.returncode, failed.stdout) == (1, "")
    assert failed.stderr == f"genie: request {ended} does not exist or has ended\n"


async def test_waits_prints_edges_as_text_dot_and_json(genie: Genie, wire: Wire) -> None:
    held = await wire.lock("shared:w/a", transactionName='t"1', transactionTimeout=HOUR_MS)
    waiter = await wire.request("exclusive:w/a", transactionName="t2", queueTimeout=HOUR_MS)
    last = await wire.request("shared:w/a", "shared:w/b", queueTimeout=HOUR_MS)
    shown = genie_cli("waits", "--resource", "exclusive:w/a", port=genie.port)
    of_one = genie_cli("waits", "--transaction", "t2", "--json", port=genie.port)
    dot = genie_cli("waits", "--resource", "w/a", "--dot", port=genie.port)
    empty = genie_cli("waits", "--resource", "w/b", "--transaction", "t2", port=genie.port)
    for id_ in (last, waiter, held):
        wire.send("release", id=id_)
    rows = [line.split() for line in shown.stdout.splitlines()[1:]]
    assert [row[:7] for row in rows] == [
        [str(waiter), "t2", "→", str(held), 't"1', "shared:w/a", "held"],
        [str(last), "-", "→", str(waiter), "t2", "exclusive:w/a", "queued"],
    ]
    graph = json.loads(of_one.stdout)
    assert [(edge["waiter"], edge["blocker"]) for edge in graph["edges"]] == [(waiter, held)]
    assert {node["id"]: node["state"] for node in graph["nodes"]} == {waiter: "queued", held: "held"}
    assert f'"{held}" [label="{held}\\nt\\"1"];' in dot.stdout
    assert f'"{waiter}" -> "{held}" [style=solid, label="shared:w/a"];' in dot.stdout
    assert f'"{last}" -> "{waiter}" [style=dashed, label="exclusive:w/a"];' in dot.stdout
    assert empty.stdout == "No requests wait.\n"


async def test_waits_lists_waiters_of_a_resource_with_a_thousand_holders(genie: Genie, wire: Wire) -> None:
    for number in range(1_000):
        wire.send("request", resources=["shared:full"], transactionTimeout=HOUR_MS, ref=str(number))
    for _ in range(1_000):
        await wire.expect("queued")
        held = (await wire.expect("locked"))["id"]
    waiter = await wire.request("exclusive:full", queueTimeout=HOUR_MS)
    shown, explained = (
        genie_cli("waits", "--resource", "full", port=genie.port),
        genie_cli("explain", str(held), port=genie.port),
    )
    header, *edges, note = shown.stdout.splitlines()
    assert [header.split()[0], *(edge.split()[0] for edge in edges)] == ["WAITER", *[str(waiter)] * 10]
    assert note.startswith("990 edges are not shown:")
    assert f"\nWaiting for it:\n  └ {waiter} for exclusive:full (" in explained.stdout


def test_dot_and_json_exclude_each_other(genie: Genie) -> None:
    failed = genie_cli("waits", "--dot", "--json", port=genie.port)
    assert failed.returncode == 2
    assert "are mutually exclusive" in failed.stderr
