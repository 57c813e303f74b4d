"""A cluster whose slot moves under the locks: MOVED, ASK, TRYAGAIN and CLUSTERDOWN as Redis itself says them."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from locks import Locks, locks, soon
from redises.cluster import MIGRATE_MS, SLOTS, Cluster, Member, slot_of
from redises.group import start_all, until


@asynccontextmanager
async def pair() -> AsyncIterator[Cluster]:
    """Two masters that share the slots."""
    lines = ["cluster-enabled yes", "cluster-node-timeout 2000", "cluster-announce-ip 127.0.0.1", 'save ""']
    with tempfile.TemporaryDirectory() as place:
        made = Cluster([Member(Path(place), *lines) for _ in range(2)])
        try:
            start_all(made.members)
            for number, node in enumerate(made.members):
                node.id = await node.ask("CLUSTER", "MYID")
                await node.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
                await node.ask("CLUSTER", "ADDSLOTSRANGE", SLOTS // 2 * number, SLOTS // 2 * (number + 1) - 1)
            one, other = made.members
            await one.ask("CLUSTER", "MEET", "127.0.0.1", other.port, other.bus)
            await until("both know each other", lambda: known(made))
            await made.settled()
            yield made
        finally:
            made.kill()


async def known(made: Cluster) -> bool:
    said = [await node.ask("CLUSTER", "NODES") for node in made.members]
    return all(text.count("connected") == 2 and "handshake" not in text for text in said)


async def old_and_new(redis: Cluster) -> tuple[Member, Member]:
    old = await redis.owner()
    return old, next(node for node in redis.members if node is not old)


def url(redis: Cluster) -> str:
    return f"redis+cluster://127.0.0.1:{redis.members[0].port}"


async def errors(lines: list[dict[str, object]], *codes: str) -> None:
    """Each of these was said."""

    async def said() -> bool:
        return all(any(code in str(line.get("error")) for line in lines) for code in codes)

    await until(f"{codes} in the log", said)


async def test_a_slot_moves_under_a_leader() -> None:
    async with pair() as redis:
        _, new = await old_and_new(redis)
        async with locks(url(redis)) as client:
            await soon(client.lock("a"))

            told: list[asyncio.Future[None]] = []

            async def half() -> None:
                with capture_logs() as lines:
                    told.append(client.lock("half"))
                    await errors(lines, "TRYAGAIN")
                assert not told[0].done()

            async def there() -> None:
                await soon(told[0])
                await soon(client.lock("all are there, and the slot is not handed over"))

            await redis.move("genie", new, half=half, moved=there)
            await soon(client.lock("b"))
            held = set(client.manager.table.held)
        next_one = Locks(url(redis))
        assert set((await next_one.open()).manager.table.held) == held
        await next_one.store.close()


@pytest.mark.parametrize("last", ["meta", "log", "records"])
async def test_who_loads_while_a_slot_moves_sees_all_or_nothing(last: str) -> None:
    """Whoever takes a slot over shows nothing for a key that it does not have yet."""
    async with pair() as redis:
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


async def test_a_cluster_that_is_down_for_a_while() -> None:
    async with pair() as redis:
        old, _ = await old_and_new(redis)
        async with locks(url(redis)) as client:
            await soon(client.lock("a"))
            slot = await one_of(old)
            await old.ask("CLUSTER", "DELSLOTS", slot)
            await until("it is down", lambda: down(old))
            with capture_logs() as lines:
                told = client.lock("b")
                await errors(lines, "CLUSTERDOWN")
            assert not told.done()
            await old.ask("CLUSTER", "ADDSLOTS", slot)
            await soon(told)


async def one_of(node: Member) -> int:
    """A slot that it has, and no lock is in."""
    rows = await node.ask("CLUSTER", "SLOTS")
    first, last = next((row[0], row[1]) for row in rows if row[2][1] == node.port)
    return int(first if first != slot_of("genie") else last)


async def down(node: Member) -> bool:
    return "cluster_state:fail" in str(await node.ask("CLUSTER", "INFO"))
