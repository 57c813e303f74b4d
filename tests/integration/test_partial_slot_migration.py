"""A slot migration that stops halfway: the keys of a namespace are on two nodes."""

from __future__ import annotations

import asyncio

import pytest

from redises.cluster import running_cluster, slot_of
from support.network.wire import Wire
from support.processes.servers import Genie, running_server

LINES = 12
"""More lines than a server without its store logs in a few leases."""


@pytest.mark.parametrize("left", [("snapshots",), ("meta", "snapshots"), ("log",)], ids=" ".join)
async def test_no_key_is_written_on_the_importing_node_before_it_has_arrived(left: tuple[str, ...]) -> None:
    """Otherwise the same key would be on two nodes, and the migration could not be completed."""
    async with running_cluster() as redis:
        with running_server(redis, lease=1) as leader:
            client = await Wire.connect(leader.address)
            held = await client.lock("exclusive:a", transactionTimeout=600_000)
        old = await redis.owner()
        to = next(node for node in await redis.masters() if node is not old)
        remaining = {f"{{genie}}:{name}" for name in left}
        keys = set(await old.ask("CLUSTER", "GETKEYSINSLOT", slot_of("genie"), 100))
        next_leader = Genie(redis, lease=1)

        async def check_keys() -> None:
            next_leader.start(wait=False)
            why = None
            for _ in range(LINES):
                line = await asyncio.to_thread(next_leader.until, "")
                assert line["event"] != "leadership acquired"
                if why is not None and line.get("error") == why:
                    break  # a repeated error is logged after ten seconds: it has tried for many leases
                why = line.get("error")
            assert remaining.isdisjoint(await to.ask("CLUSTER", "GETKEYSINSLOT", slot_of("genie"), 100))

        try:
            await redis.move("genie", to, first=keys - remaining, half=check_keys)
            await asyncio.to_thread(next_leader.until, "leadership acquired")
            client = await Wire.connect(next_leader.address)
            client.send("inspect")
            assert [row["id"] for row in (await client.expect("inspected"))["holders"]] == [held]
        finally:
            next_leader.kill()
