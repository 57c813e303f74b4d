"""A Redis cluster: three masters that share the slots, and a replica of each."""

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

from redises.group import kill_all, start_all, until
from redises.node import Node
from support.network.certificates import Certificates
from support.processes.ports import free_port
from support.processes.servers import redis_version

SLOTS = 16_384
MASTERS = 3
MIGRATE_MS = 5_000
AT_ONCE = 100
Hook = Callable[[], Awaitable[object]]
"""Called between the steps of a slot migration."""


async def nothing() -> None:
    """No pause."""


class Member(Node):
    """A node of the cluster; `id` is its node id."""

    id = ""

    def __init__(self, folder: Path, *lines: str, tls: bool = False) -> None:
        self.bus = free_port()
        self.tls_port = free_port() if tls else 0
        ports = [f"cluster-port {self.bus}"] if redis_version() >= (7,) else []
        super().__init__(folder, *ports, *([f"tls-port {self.tls_port}"] if tls else []), *lines)
        if not ports:  # Redis 6.2 derives it
            self.bus = 10_000 + (self.tls_port or self.port)


class Cluster:
    """The cluster: queries of the owners of slots, failovers and slot migrations."""

    def __init__(self, members: list[Member]) -> None:
        self.members = members

    @property
    def url(self) -> str:
        """The URL with some of the members; the others must be discovered."""
        return f"redis+cluster://{','.join(f'127.0.0.1:{node.port}' for node in self.members[:3])}/"

    @property
    def live_members(self) -> list[Member]:
        return [node for node in self.members if node.is_live]

    async def owners(self, slot: int) -> set[int]:
        """Return the ports of the masters of a slot according to all live members; 0: no master."""
        ports = set()
        for node in self.live_members:
            rows = await node.ask("CLUSTER", "SLOTS")
            ports.add(next((row[2][1] for row in rows if row[0] <= slot <= row[1]), 0))
        return ports

    async def owner(self, namespace: str = "genie") -> Member:
        """Wait until all live members agree on the master of a namespace's slot; return it."""
        owners: list[Member] = []

        async def agreed() -> bool:
            ports = await self.owners(slot_of(namespace))
            owners[:] = [node for node in self.live_members if ports == {node.port}]
            return bool(owners) and (await owners[0].ask("ROLE"))[0] == "master"

        await until(f"the members agree on who has {{{namespace}}}", agreed)
        return owners[0]

    def create_namespace(self, namespace: str = "genie") -> None:
        """Create a namespace, at the master of its slot."""
        rows = self.live_members[0].call("CLUSTER", "SLOTS")
        port = next(row[2][1] for row in rows if row[0] <= slot_of(namespace) <= row[1])
        next(node for node in self.live_members if node.port == port).create_namespace(namespace)

    async def node_of(self, namespace: str = "genie") -> Node:
        """Return the node of a namespace: the master of its slot."""
        return await self.owner(namespace)

    async def masters(self) -> list[Member]:
        """Return the live masters, in the order of their slots."""
        rows = await self.live_members[0].ask("CLUSTER", "SLOTS")
        ports = list(dict.fromkeys(row[2][1] for row in sorted(rows, key=lambda row: row[0])))
        by_port = {node.port: node for node in self.live_members}
        return [by_port[port] for port in ports if port in by_port]

    async def replicas(self, master: Member) -> list[Member]:
        """Return the live replicas of a master."""
        live_members = [(node, await node.ask("ROLE")) for node in self.live_members]
        return [node for node, role in live_members if role[0] == "slave" and role[2] == master.port]

    async def successor(self, old: Member, namespace: str = "genie") -> Member:
        """Wait until another node is the master of a namespace's slot, and all live members serve; return it."""

        async def other() -> bool:
            return not await self.owners(slot_of(namespace)) & {old.port, 0} and await self.serves()

        await until(f"another has the slots of {old}", other)
        return await self.owner(namespace)

    async def failover(self, namespace: str = "genie") -> Member:
        """CLUSTER FAILOVER: let a replica take over from its healthy master; return it."""
        await self.settled()
        old = await self.owner(namespace)
        await (await self.replicas(old))[0].ask("CLUSTER", "FAILOVER")
        return await self.successor(old, namespace)

    async def serves(self) -> bool:
        """Return whether all live members serve."""
        replies = await asyncio.gather(*(node.ask("CLUSTER", "INFO") for node in self.live_members))
        return all(dict(line.split(":") for line in info.split())["cluster_state"] == "ok" for info in replies)

    async def settled(self) -> None:
        """Wait until all live members serve and agree, and each replica has caught up with its master."""
        await until("the cluster is settled", self._is_settled)

    async def _is_settled(self) -> bool:
        if not await self.serves():
            return False
        named = {str(await node.ask("CLUSTER", "SLOTS")) for node in self.live_members}
        flags = [
            line.split()[2] for node in self.live_members for line in (await node.ask("CLUSTER", "NODES")).splitlines()
        ]
        suspects = sum("fail" in flag or "handshake" in flag for flag in flags)
        if len(named) != 1 or suspects > len(self.live_members) * (len(self.members) - len(self.live_members)):
            return False
        for node in self.live_members:
            role = await node.ask("ROLE")
            if role[0] == "master":
                continue
            master = next((other for other in self.live_members if other.port == role[2]), None)
            if master is None or role[3] != "connected" or role[4] < (await master.ask("ROLE"))[1]:
                return False
        return True

    async def move(
        self,
        namespace: str,
        to: Member,
        *,
        first: Collection[str] = (),
        begun: Hook = nothing,
        half: Hook = nothing,
        moved: Hook = nothing,
    ) -> None:
        """Migrate the slot of a namespace with its keys, as `redis-cli --cluster reshard` does.

        `begun` runs before any key is migrated, `half` when some of them are (those in `first`, or a random half), `moved`
        when all are, but the slot is not reassigned yet.
        """
        slot, old = slot_of(namespace), await self.owner(namespace)
        await to.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", old.id)
        await old.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", to.id)
        await begun()
        keys = await old.ask("CLUSTER", "GETKEYSINSLOT", slot, AT_ONCE)
        random.shuffle(keys)  # any of the keys may be migrated first
        await self._migrate(old, to, [key for key in keys if key in first] or keys[: max(1, len(keys) // 2)])
        await half()
        while keys := await old.ask("CLUSTER", "GETKEYSINSLOT", slot, AT_ONCE):
            await self._migrate(old, to, keys)
        await moved()
        await to.ask("CLUSTER", "SETSLOT", slot, "NODE", to.id)
        await old.ask("CLUSTER", "SETSLOT", slot, "NODE", to.id)
        await until(f"all members know that {to} has the slot", lambda: self._agree_on(slot, to))

    async def _migrate(self, old: Member, to: Member, keys: list[str]) -> None:
        """Migrate keys without REPLACE, as resharding does: if both nodes have a key, it was written at the wrong one."""
        if not keys:
            return
        try:
            await old.ask("MIGRATE", "127.0.0.1", to.tls_port or to.port, "", 0, MIGRATE_MS, "KEYS", *keys)
        except ResponseError as error:
            existing = await to.ask("CLUSTER", "GETKEYSINSLOT", key_slot(keys[0].encode()), AT_ONCE)
            raise AssertionError(
                f"{error}: {keys} of {old} are to be moved, and {to} already has {existing}"
            ) from error

    async def _agree_on(self, slot: int, owner: Member) -> bool:
        return await self.owners(slot) == {owner.port}

    def kill(self) -> None:
        """End all processes."""
        kill_all(self.members)


def slot_of(namespace: str) -> int:
    """Return the slot of all keys of a namespace."""
    return key_slot(f"{{{namespace}}}".encode())


@asynccontextmanager
async def running_cluster(
    *lines: str,
    node_timeout_ms: int = 1_000,
    appendonly: bool = True,
    replicas: bool = True,
    certificates: Certificates | None = None,
) -> AsyncIterator[Cluster]:
    """Run a cluster of three masters with a replica each. `lines` are added to the configuration of each node.

    With `certificates`, each node has a port for TLS as well, and the nodes use TLS among themselves.
    """
    common = [
        *["cluster-enabled yes", f"cluster-node-timeout {node_timeout_ms}", "cluster-require-full-coverage no"],
        *["cluster-announce-ip 127.0.0.1", "cluster-migration-barrier 10", "cluster-replica-validity-factor 0"],
        *[f"appendonly {'yes' if appendonly else 'no'}", "appendfsync everysec", 'save ""'],
        *["repl-diskless-sync-delay 0", "repl-ping-replica-period 1", *lines],
    ]
    if certificates is not None:
        common += [f"tls-{name}-file {certificates.server}" for name in ("cert", "key")]
        common += [
            f"tls-ca-cert-file {certificates.ca}",
            "tls-auth-clients no",
            "tls-replication yes",
            "tls-cluster yes",
        ]
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        count = MASTERS * (2 if replicas else 1)
        cluster = Cluster([Member(folder, *common, tls=certificates is not None) for _ in range(count)])
        try:
            start_all(cluster.members)
            await _join(cluster)
            yield cluster
        finally:
            cluster.kill()


async def _join(cluster: Cluster) -> None:
    """Form the cluster: let the nodes meet, assign the slots to three of them, and make the others replicas."""
    members = cluster.members
    for epoch, node in enumerate(members, 1):
        node.id = await node.ask("CLUSTER", "MYID")
        await node.ask("CLUSTER", "SET-CONFIG-EPOCH", epoch)
    for node, other in permutations(members, 2):
        await node.ask("CLUSTER", "MEET", "127.0.0.1", other.port, other.bus)
    masters, replicas = members[:MASTERS], members[MASTERS:]
    bounds = [SLOTS * part // len(masters) for part in range(len(masters) + 1)]
    for node, first, slots_end in zip(masters, bounds, bounds[1:], strict=False):
        await node.ask("CLUSTER", "ADDSLOTS", *range(first, slots_end))

    async def met() -> bool:
        replies = await asyncio.gather(*(node.ask("CLUSTER", "NODES") for node in members))
        return all(len(text.splitlines()) == len(members) and "handshake" not in text for text in replies)

    await until("the members have met", met)
    for node, master in zip(replicas, masters, strict=False):
        await node.ask("CLUSTER", "REPLICATE", master.id)
    await cluster.settled()
