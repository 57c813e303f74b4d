"""The slot of the locks is migrated in a real cluster: MOVED, ASK, TRYAGAIN and CLUSTERDOWN."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from redises.cluster import MIGRATE_MS, SLOTS, Cluster, Member, slot_of
from redises.group import start_all, until
from support.network.wire import Wire
from support.processes.servers import Genie, running_server
from support.storage.stores import Locks, locks, soon

REDIRECTIONS = ("ASK", "TRYAGAIN")
"""Replies of a node to commands for a slot that is migrated."""


@pytest.fixture(scope="module")
def pair() -> Iterator[Cluster]:
    """Run a cluster of two masters that share the slots."""
    lines = ["cluster-enabled yes", "cluster-node-timeout 2000", "cluster-announce-ip 127.0.0.1", 'save ""']
    with tempfile.TemporaryDirectory() as path:
        cluster = Cluster([Member(Path(path), *lines) for _ in range(2)])
        try:
            start_all(cluster.members)
            asyncio.run(join(cluster))
            yield cluster
        finally:
            cluster.kill()


async def join(cluster: Cluster) -> None:
    for number, node in enumerate(cluster.members):
        node.id = await node.ask("CLUSTER", "MYID")
        await node.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        await node.ask("CLUSTER", "ADDSLOTS", *range(SLOTS // 2 * number, SLOTS // 2 * (number + 1)))
    one, other = cluster.members
    await one.ask("CLUSTER", "MEET", "127.0.0.1", other.port, other.bus)
    await until("the nodes have met", lambda: have_met(cluster))


@pytest.fixture
async def redis(pair: Cluster) -> Cluster:
    """The cluster without data. The slot of the locks may be at either of its nodes."""
    await pair.settled()
    for node in pair.members:
        await node.ask("FLUSHALL")
        await node.ask("CONFIG", "RESETSTAT")
    return pair


async def have_met(cluster: Cluster) -> bool:
    replies = [await node.ask("CLUSTER", "NODES") for node in cluster.members]
    return all(text.count("connected") == 2 and "handshake" not in text for text in replies)


async def old_and_new(redis: Cluster) -> tuple[Member, Member]:
    old = await redis.owner()
    return old, next(node for node in redis.members if node is not old)


def url(redis: Cluster) -> str:
    return f"redis+cluster://127.0.0.1:{redis.members[0].port}"


async def errors(lines: list[dict[str, object]], *codes: str) -> None:
    """Wait until errors with all these codes were logged."""

    async def are_logged() -> bool:
        return all(any(code in str(line.get("reason")) for line in lines) for code in codes)

    await until(f"{codes} in the log", are_logged)


@pytest.mark.parametrize("first", ["meta", "log", "state"])
async def test_a_leader_commits_during_a_slot_migration(redis: Cluster, first: str) -> None:
    """A commit waits while only one of log and meta is migrated. It needs no state, but a checkpoint does."""
    old, new = await old_and_new(redis)
    async with locks(url(redis)) as client:
        await soon(client.lock("a"))
        keys = await old.ask("CLUSTER", "GETKEYSINSLOT", slot_of("genie"), 100)
        early = [key for key in keys if first in key]
        assert early

        acknowledged: list[asyncio.Future[None]] = []

        async def half() -> None:
            with capture_logs() as lines:
                acknowledged.append(client.lock("half"))
                await errors(lines, "TRYAGAIN")
            if first == "state":
                await soon(acknowledged[0])
                assert {line["event"] for line in lines} == {"checkpoint failed, retrying"}
            else:
                assert not acknowledged[0].done()

        async def moved() -> None:
            await soon(acknowledged[0])
            await soon(client.lock("all keys are migrated, and the slot is not reassigned"))

        await redis.move("genie", new, first=early, half=half, moved=moved)
        await soon(client.lock("b"))
        held = set(client.manager.table.held)
    next_leader = Locks(url(redis))
    assert set((await next_leader.open()).manager.table.held) == held
    await next_leader.store.close()


@pytest.mark.parametrize("last", ["meta", "log", "state"])
async def test_a_follower_loads_all_or_nothing_during_a_slot_migration(redis: Cluster, last: str) -> None:
    """The importing node replies with nothing for a key that has not arrived yet."""
    old, new = await old_and_new(redis)
    async with locks(url(redis)) as client:
        for name in "abc":
            await soon(client.lock(name))
    slot = slot_of("genie")
    await new.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", old.id)
    await old.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", new.id)
    keys = await old.ask("CLUSTER", "GETKEYSINSLOT", slot, 100)
    later = [key for key in keys if last in key]
    early = [key for key in keys if last not in key]
    assert early
    assert later
    await old.ask("MIGRATE", "127.0.0.1", new.port, "", 0, MIGRATE_MS, "KEYS", *early)
    follower = Locks(url(redis))
    with capture_logs() as lines:
        opening = asyncio.create_task(follower.open())
        await errors(lines, "TRYAGAIN")
        assert not opening.done()
    await old.ask("MIGRATE", "127.0.0.1", new.port, "", 0, MIGRATE_MS, "KEYS", *later)
    assert len((await opening).manager.table.held) == 3
    for node in (new, old):
        await node.ask("CLUSTER", "SETSLOT", slot, "NODE", new.id)
    await follower.store.close()


async def test_a_commit_is_retried_while_the_cluster_is_down(redis: Cluster) -> None:
    old, _ = await old_and_new(redis)
    async with locks(url(redis)) as client:
        await soon(client.lock("a"))
        slot = await other_slot_of(old)
        await old.ask("CLUSTER", "DELSLOTS", slot)
        await until("the cluster is down", lambda: is_down(old))
        with capture_logs() as lines:
            acknowledged = client.lock("b")
            await errors(lines, "CLUSTERDOWN")
        assert not acknowledged.done()
        await old.ask("CLUSTER", "ADDSLOTS", slot)
        await soon(acknowledged)


@pytest.mark.parametrize("left", [("snapshots",), ("meta", "snapshots"), ("log",)], ids=" ".join)
async def test_no_key_is_written_on_the_importing_node_before_it_has_arrived(
    redis: Cluster, left: tuple[str, ...]
) -> None:
    """Otherwise the same key would be on two nodes, and the migration could not be completed."""
    with running_server(redis, lease=1) as leader:
        client = await Wire.connect(leader.address)
        held = await client.lock("exclusive:a", transactionTimeout=600_000)
    old, new = await old_and_new(redis)
    remaining = {f"{{genie}}:{name}" for name in left}
    keys = set(await old.ask("CLUSTER", "GETKEYSINSLOT", slot_of("genie"), 100))
    next_leader = Genie(redis, lease=1)

    async def has_tried() -> bool:
        errors = [await node.info("errorstats") for node in redis.members]
        return sum(each.get(f"errorstat_{code}", {}).get("count", 0) for each in errors for code in REDIRECTIONS) > 5

    async def check_keys() -> None:
        next_leader.start(wait=False)
        await until("the server has tried to lead", has_tried)
        assert next_leader.log_so_far() is None or "leadership acquired" not in [
            line["event"] for line in next_leader.log
        ]
        assert remaining.isdisjoint(await new.ask("CLUSTER", "GETKEYSINSLOT", slot_of("genie"), 100))

    try:
        await redis.move("genie", new, first=keys - remaining, half=check_keys)
        await asyncio.to_thread(next_leader.until, "leadership acquired")
        client = await Wire.connect(next_leader.address)
        client.send("inspect")
        assert [row["id"] for row in (await client.expect("inspected"))["holders"]] == [held]
    finally:
        next_leader.kill()


async def other_slot_of(node: Member) -> int:
    """Return a slot of a node, other than that of the locks."""
    rows = await node.ask("CLUSTER", "SLOTS")
    first, last = next((row[0], row[1]) for row in rows if row[2][1] == node.port)
    return int(first if first != slot_of("genie") else last)


async def is_down(node: Member) -> bool:
    return "cluster_state:fail" in str(await node.ask("CLUSTER", "INFO"))
