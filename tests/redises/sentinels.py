"""A Redis master with replicas, and three sentinels."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from redis import RedisError, ResponseError

from redises.group import kill_all, start_all, until
from redises.node import REDISES_AT, SENTINELS_AT, Node
from support.network.proxy import chunks, proxy

NAME = "locks"
QUICK = {
    # Shorter intervals than the sentinels' defaults, in milliseconds.
    "INFO-PERIOD": 200,
    "PING-PERIOD": 300,  # a replica without a reply for five of these is not promoted
    "ASK-PERIOD": 100,
    "PUBLISH-PERIOD": 250,
    # By default a sentinel that was not scheduled for 2 s does nothing for 30 s (TILT mode).
    "TILT-TRIGGER": 20_000,
    "TILT-PERIOD": 1_000,
}


class Sentinels:
    """The deployment: `redises` are the master and its replicas."""

    def __init__(self, redises: list[Node], sentinels: list[Node]) -> None:
        self.redises = redises
        self.sentinels = sentinels

    @property
    def url(self) -> str:
        return f"redis+sentinel://{','.join(f'127.0.0.1:{node.port}' for node in self.sentinels)}/{NAME}"

    def at(self, port: object) -> Node:
        """Return the Redis at a port."""
        return next(node for node in self.redises if node.known_port == int(str(port)))

    async def agreed(self) -> Node | None:
        """Return the master on which all live sentinels agree, if it has that role; None otherwise."""
        live = [node for node in self.sentinels if node.is_live]
        addresses = await asyncio.gather(*(node.ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", NAME) for node in live))
        if len({tuple(address) for address in addresses}) != 1:
            return None
        master = self.at(addresses[0][1])
        return master if not master.is_live or (await master.ask("ROLE"))[0] == "master" else None

    async def master(self) -> Node:
        """Wait until the sentinels agree on a master; return it."""
        masters: list[Node] = []

        async def agree() -> bool:
            masters[:] = [node for node in [await self.agreed()] if node is not None]
            return bool(masters)

        await until("the sentinels agree on a master", agree)
        return masters[0]

    def create_namespace(self, namespace: str = "genie") -> None:
        """Create a namespace, at the master."""
        next(node for node in self.redises if node.is_live and node.call("ROLE")[0] == b"master").create_namespace(
            namespace
        )

    async def node_of(self, _: str = "genie") -> Node:
        """Return the node of a namespace: the master."""
        return await self.master()

    async def replicas(self) -> list[Node]:
        """Return the replicas, live or not."""
        master = await self.master()
        return [node for node in self.redises if node is not master]

    async def successor(self, old: Node) -> Node:
        """Wait until the sentinels agree on another master; return it."""

        async def changed() -> bool:
            master = await self.agreed()
            return master is not None and master is not old and master.is_live

        await until(f"another Redis than {old} is the master", changed)
        return await self.master()

    async def settled(self) -> Node:
        """Wait until all live replicas have caught up, and the sentinels know them; return the master."""
        await until("the master and its replicas are settled", self._is_settled)
        return await self.master()

    async def _is_settled(self) -> bool:
        master = await self.agreed()
        if master is None or not master.is_live:
            return False
        others = [node for node in self.redises if node.is_live and node is not master]
        info = await master.info("replication")
        online = [value for key, value in info.items() if key.startswith("slave") and isinstance(value, dict)]
        ports = {value["port"] for value in online if value["state"] == "online"}
        if not {node.known_port for node in others} <= ports:
            return False
        for node in others:
            replica_info = await node.info("replication")
            if (replica_info["master_port"], replica_info["master_link_status"]) != (master.known_port, "up"):
                return False
            if replica_info["slave_repl_offset"] < info["master_repl_offset"]:
                return False
        return all(await asyncio.gather(*(self._sees(node, master, others) for node in self.sentinels if node.is_live)))

    async def _sees(self, sentinel: Node, master: Node, others: list[Node]) -> bool:
        """Return whether a sentinel knows the master, the other sentinels, and replicas that it can promote."""
        master_fields = parse_fields(await sentinel.ask("SENTINEL", "MASTER", NAME))
        if (master_fields["port"], master_fields["flags"]) != (str(master.known_port), "master"):
            return False
        if int(master_fields["num-other-sentinels"]) != len(self.sentinels) - 1:
            return False
        listed = map(parse_fields, await sentinel.ask("SENTINEL", "REPLICAS", NAME))
        usable = {int(row["port"]) for row in listed if row["flags"] == "slave" and row["master-link-status"] == "ok"}
        return {node.known_port for node in others} <= usable

    async def failover(self) -> Node:
        """SENTINEL FAILOVER: wait until all sentinels know the new master; return it."""
        old = await self.settled()
        await self.begin_failover()
        return await self.successor(old)

    async def begin_failover(self) -> None:
        """Request a failover, as soon as a sentinel accepts it: it rejects one while another is in progress."""

        async def accepted() -> bool:
            with suppress(ResponseError):
                return bool(await self.sentinels[0].ask("SENTINEL", "FAILOVER", NAME))
            return False

        await until("a sentinel starts a failover", accepted)

    def kill(self) -> None:
        """End all processes."""
        kill_all([*self.sentinels, *self.redises])


def parse_fields(flat: list[Any]) -> dict[str, str]:
    """Convert a flat list of names and values, as in RESP2, to a dict."""
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _sentinel(folder: Path, master: Node, down_after_ms: int, failover_timeout_ms: int) -> Node:
    return Node(
        folder,
        f"sentinel monitor {NAME} 127.0.0.1 {master.known_port} 2",
        f"sentinel down-after-milliseconds {NAME} {down_after_ms}",
        f"sentinel failover-timeout {NAME} {failover_timeout_ms}",
        f"sentinel parallel-syncs {NAME} 2",
        "sentinel announce-ip 127.0.0.1",
        *([] if master.front is None else [f"bind-source-addr {SENTINELS_AT}"]),
        sentinel=True,
    )


@asynccontextmanager
async def running_sentinels(
    *lines: str,
    replicas: int = 2,
    down_after_ms: int = 500,
    failover_timeout_ms: int = 1_000,
    min_replicas_to_write: int = 0,
    appendonly: bool = True,
    quick: bool = True,
    fronts: bool = False,
) -> AsyncIterator[Sentinels]:
    """Run the deployment. `lines` are added to the configuration of each Redis; `quick`: use the intervals of `QUICK`.

    With `fronts` each Redis can be isolated (on Linux, where the loopback has more than one address).
    """
    common = [
        f"appendonly {'yes' if appendonly else 'no'}",
        *["appendfsync everysec", 'save ""', "repl-diskless-sync-delay 0", "repl-ping-replica-period 1"],
        *["replica-announce-ip 127.0.0.1", f"min-replicas-to-write {min_replicas_to_write}"],
        *["min-replicas-max-lag 2", *([f"bind-source-addr {REDISES_AT}"] if fronts else []), *lines],
    ]
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        proxies = [await stack.enter_async_context(proxy(0, chunks)) if fronts else None for _ in range(replicas + 1)]

        master = Node(folder, *common, front=proxies[0])
        follow = f"replicaof 127.0.0.1 {master.known_port}"
        others = [Node(folder, *common, follow, front=front) for front in proxies[1:]]
        sentinels = [_sentinel(folder, master, down_after_ms, failover_timeout_ms) for _ in range(3)]
        deployment = Sentinels([master, *others], sentinels)
        try:
            start_all([*sentinels, master, *others])
            if quick:
                await _shorten_intervals(deployment.sentinels)
            await deployment.settled()
            yield deployment
        finally:
            deployment.kill()


async def _shorten_intervals(sentinels: list[Node]) -> None:
    """Shorten the intervals of the sentinels; before Redis 7 that is not supported."""
    with suppress(RedisError):
        for node in sentinels:
            await node.ask("SENTINEL", "DEBUG", *chain(*QUICK.items()))
