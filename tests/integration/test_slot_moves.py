"""A slot of a cluster that stays half moved: some of a namespace's keys are here, and some are there."""

from __future__ import annotations

import asyncio

import pytest

from redises.cluster import running_cluster, slot_of
from servers import Genie, running_server
from wire import Wire

LINES = 12
"""So many lines a server logs in more than its lease, if it can't go on."""


@pytest.mark.parametrize("left", [("snapshots",), ("meta", "snapshots"), ("log",)], ids=" ".join)
async def test_nothing_is_written_where_its_key_is_not_yet(left: tuple[str, ...]) -> None:
    """Or the same key was in two places, and a resharding could not be brought to its end."""
    async with running_cluster() as redis:
        with running_server(redis, lease=1) as leader:
            client = await Wire.connect(leader.address)
            held = await client.lock("exclusive:a", transactionTimeout=600_000)
        old = await redis.owner()
        to = next(node for node in await redis.masters() if node is not old)
        stay = {f"{{genie}}:{name}" for name in left}
        keys = set(await old.ask("CLUSTER", "GETKEYSINSLOT", slot_of("genie"), 100))
        next_one = Genie(redis, lease=1)

        async def look() -> None:
            next_one.start(wait=False)
            why = None
            for _ in range(LINES):
                line = await asyncio.to_thread(next_one.until, "")
                assert line["event"] != "leadership acquired"
                if why is not None and line.get("error") == why:
                    break  # the same reason is told again after ten seconds: it has tried for many leases
                why = line.get("error")
            assert stay.isdisjoint(await to.ask("CLUSTER", "GETKEYSINSLOT", slot_of("genie"), 100))

        try:
            await redis.move("genie", to, first=keys - stay, half=look)
            await asyncio.to_thread(next_one.until, "leadership acquired")
            client = await Wire.connect(next_one.address)
            client.send("inspect")
            assert [row["id"] for row in (await client.expect("inspected"))["holders"]] == [held]
        finally:
            next_one.kill()
