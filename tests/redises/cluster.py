"""Six servers that are one Redis: three masters that share the slots, and a replica of each."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from itertools import permutations
from pathlib import Path

from redis import ResponseError
from redis.crc import key_slot

from ports import free_port
from redises.group import end, start, until
from redises.node import Node

SLOTS = 16_384
MIGRATE_MS = 5_000
AT_ONCE = 100
Then = Callable[[], Awaitable[object]]
"""What a test does while a slot is on its way."""


async def nothing() -> None:
    """No pause."""


class Member(Node):
    """A server of the cluster: `id` is what the others call it."""

    id = ""

    def __init__(self, folder: Path, *lines: str) -> None:
        self.bus = free_port()
        super().__init__(folder, f"cluster-port {self.bus}", *lines)


class Cluster:
    """Who serves which slot, who takes over from whom, and slots that move."""

    def __init__(self, members: list[Member]) -> None:
        self.members = members

    @property
    def url(self) -> str:
        """Some of the members are named; the rest must be found."""
        return f"redis+cluster://{','.join(f'127.0.0.1:{node.port}' for node in self.members[:3])}/"

    @property
    def living(self) -> list[Member]:
        return [node for node in self.members if node.lives]

    async def owners(self, slot: int) -> set[int]:
        """The ports of the masters of a slot, as the living members see it: one, or they do not agree. 0 is nobody."""
        found = set()
        for node in self.living:
            rows = await node.ask("CLUSTER", "SLOTS")
            found.add(next((row[2][1] for row in rows if row[0] <= slot <= row[1]), 0))
        return found

    async def owner(self, namespace: str = "genie") -> Member:
        """The living master of a namespace, as soon as all living members know it."""
        found: list[Member] = []

        async def agreed() -> bool:
            ports = await self.owners(slot_of(namespace))
            found[:] = [node for node in self.living if ports == {node.port}]
            return bool(found) and (await found[0].ask("ROLE"))[0] == "master"

        await until(f"the members agree on who has {{{namespace}}}", agreed)
        return found[0]

    def found(self, namespace: str = "genie") -> None:
        """Found a namespace, at the master of its slot."""
        rows = self.living[0].call("CLUSTER", "SLOTS")
        port = next(row[2][1] for row in rows if row[0] <= slot_of(namespace) <= row[1])
        next(node for node in self.living if node.port == port).found(namespace)

    async def home(self, namespace: str = "genie") -> Node:
        """Where a namespace is: at the master of its slot."""
        return await self.owner(namespace)

    async def masters(self) -> list[Member]:
        """The living ones that have slots, in the order of the slots."""
        rows = await self.living[0].ask("CLUSTER", "SLOTS")
        ports = list(dict.fromkeys(row[2][1] for row in sorted(rows, key=lambda row: row[0])))
        by_port = {node.port: node for node in self.living}
        return [by_port[port] for port in ports if port in by_port]

    async def replicas(self, master: Member) -> list[Member]:
        """The living ones that follow it."""
        living = [(node, await node.ask("ROLE")) for node in self.living]
        return [node for node, role in living if role[0] == "slave" and role[2] == master.port]

    async def successor(self, old: Member, namespace: str = "genie") -> Member:
        """The next master of a namespace's slot, as soon as there is one and all the living serve again."""

        async def other() -> bool:
            return not await self.owners(slot_of(namespace)) & {old.port, 0} and await self._serves()

        await until(f"another has the slots of {old}", other)
        return await self.owner(namespace)

    async def failover(self, namespace: str = "genie") -> Member:
        """A planned one: a replica takes over from its master, which is well."""
        await self.settled()
        old = await self.owner(namespace)
        await (await self.replicas(old))[0].ask("CLUSTER", "FAILOVER")
        return await self.successor(old, namespace)

    async def _serves(self) -> bool:
        said = await asyncio.gather(*(node.ask("CLUSTER", "INFO") for node in self.living))
        return all(dict(line.split(":") for line in info.split())["cluster_state"] == "ok" for info in said)

    async def settled(self) -> None:
        """Wait until all who live serve, agree, and each replica has what its master has."""
        await until("the cluster is settled", self._is_settled)

    async def _is_settled(self) -> bool:
        if not await self._serves():
            return False
        named = {str(await node.ask("CLUSTER", "SLOTS")) for node in self.living}
        flags = [line.split()[2] for node in self.living for line in (await node.ask("CLUSTER", "NODES")).splitlines()]
        suspects = sum("fail" in flag or "handshake" in flag for flag in flags)
        if len(named) != 1 or suspects > len(self.living) * (len(self.members) - len(self.living)):
            return False
        for node in self.living:
            role = await node.ask("ROLE")
            if role[0] == "master":
                continue
            master = next((other for other in self.living if other.port == role[2]), None)
            if master is None or role[3] != "connected" or role[4] < (await master.ask("ROLE"))[1]:
                return False
        return True

    async def move(
        self,
        namespace: str,
        to: Member,
        *,
        first: Collection[str] = (),
        begun: Then = nothing,
        half: Then = nothing,
        moved: Then = nothing,
    ) -> None:
        """Move the namespace's slot with its keys, as `redis-cli --cluster reshard` does.

        `begun` runs when it is announced and nothing has moved, `half` when some of the keys are here and some there
        (those that are named `first`, or any half of them), `moved` when all are there and the slot is not handed over.
        """
        slot, old = slot_of(namespace), await self.owner(namespace)
        await to.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", old.id)
        await old.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", to.id)
        await begun()
        keys = await old.ask("CLUSTER", "GETKEYSINSLOT", slot, AT_ONCE)
        random.shuffle(keys)  # whatever the order is that it has, any of them may be first
        await self._migrate(old, to, [key for key in keys if key in first] or keys[: max(1, len(keys) // 2)])
        await half()
        while keys := await old.ask("CLUSTER", "GETKEYSINSLOT", slot, AT_ONCE):
            await self._migrate(old, to, keys)
        await moved()
        await to.ask("CLUSTER", "SETSLOT", slot, "NODE", to.id)
        await old.ask("CLUSTER", "SETSLOT", slot, "NODE", to.id)
        await until(f"all know that {to} has the slot", lambda: self._agree_on(slot, to))

    async def _migrate(self, old: Member, to: Member, keys: list[str]) -> None:
        """Without REPLACE, as a resharding does it: a key that both have is somebody's who wrote it where it was not."""
        if not keys:
            return
        try:
            await old.ask("MIGRATE", "127.0.0.1", to.port, "", 0, MIGRATE_MS, "KEYS", *keys)
        except ResponseError as error:
            there = await to.ask("CLUSTER", "GETKEYSINSLOT", key_slot(keys[0].encode()), AT_ONCE)
            raise AssertionError(f"{error}: {keys} of {old} are to be moved, and {to} has {there}") from error

    async def _agree_on(self, slot: int, owner: Member) -> bool:
        return await self.owners(slot) == {owner.port}

    def kill(self) -> None:
        """End all processes."""
        end(self.members)


def slot_of(namespace: str) -> int:
    """Where all keys of a namespace are."""
    return key_slot(f"{{{namespace}}}".encode())


@asynccontextmanager
async def running_cluster(*lines: str, node_timeout_ms: int = 1_000, appendonly: bool = True) -> AsyncIterator[Cluster]:
    """Three masters with a replica each, settled. `lines` go into the configuration of each."""
    common = [
        *["cluster-enabled yes", f"cluster-node-timeout {node_timeout_ms}", "cluster-require-full-coverage no"],
        *["cluster-announce-ip 127.0.0.1", "cluster-migration-barrier 10", "cluster-replica-validity-factor 0"],
        *[f"appendonly {'yes' if appendonly else 'no'}", "appendfsync everysec", 'save ""'],
        *["repl-diskless-sync-delay 0", "repl-ping-replica-period 1", *lines],
    ]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        made = Cluster([Member(folder, *common) for _ in range(6)])
        try:
            start(made.members)
            await _join(made)
            yield made
        finally:
            made.kill()


async def _join(made: Cluster) -> None:
    """Make one cluster of six servers: they meet, three of them share the slots, the others follow them."""
    members = made.members
    for epoch, node in enumerate(members, 1):
        node.id = await node.ask("CLUSTER", "MYID")
        await node.ask("CLUSTER", "SET-CONFIG-EPOCH", epoch)
    for node, other in permutations(members, 2):
        await node.ask("CLUSTER", "MEET", "127.0.0.1", other.port, other.bus)
    masters, replicas = members[:3], members[3:]
    bounds = [SLOTS * part // len(masters) for part in range(len(masters) + 1)]
    for node, first, after in zip(masters, bounds, bounds[1:], strict=False):
        await node.ask("CLUSTER", "ADDSLOTSRANGE", first, after - 1)

    async def met() -> bool:
        said = await asyncio.gather(*(node.ask("CLUSTER", "NODES") for node in members))
        return all(len(text.splitlines()) == len(members) and "handshake" not in text for text in said)

    await until("the members have met", met)
    for node, master in zip(replicas, masters, strict=True):
        await node.ask("CLUSTER", "REPLICATE", master.id)
    await made.settled()
