"""One master, its replicas, and three sentinels who watch over them."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from redis import RedisError, ResponseError

from proxy import chunks, proxy
from redises.group import end, start, until
from redises.node import REDISES_AT, SENTINELS_AT, Node

NAME = "locks"
QUICK = {
    # What takes a sentinel seconds, so that several see the same at the same time. In milliseconds.
    "INFO-PERIOD": 200,
    "PING-PERIOD": 300,  # who was not heard of for five of them is not promoted; INFO comes every second then
    "ASK-PERIOD": 100,
    "PUBLISH-PERIOD": 250,
    # A sentinel that was not given a processor for 2 s does nothing for 30 s, lest it sees faults that are its own.
    "TILT-TRIGGER": 20_000,
    "TILT-PERIOD": 1_000,
}


class Sentinels:
    """A master that is replaced when it dies. `redises` are the servers of data, `sentinels` those who judge."""

    def __init__(self, redises: list[Node], sentinels: list[Node]) -> None:
        self.redises = redises
        self.sentinels = sentinels

    @property
    def url(self) -> str:
        return f"redis+sentinel://{','.join(f'127.0.0.1:{node.port}' for node in self.sentinels)}/{NAME}"

    def at(self, port: object) -> Node:
        """The server at a port."""
        return next(node for node in self.redises if node.known_port == int(str(port)))

    async def agreed(self) -> Node | None:
        """Whom every living sentinel names as the master, if that one thinks so, too."""
        living = [node for node in self.sentinels if node.lives]
        named = await asyncio.gather(*(node.ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", NAME) for node in living))
        if len({tuple(address) for address in named}) != 1:
            return None
        master = self.at(named[0][1])
        return master if not master.lives or (await master.ask("ROLE"))[0] == "master" else None

    async def master(self) -> Node:
        """The master, as soon as the sentinels agree on one."""
        found: list[Node] = []

        async def agree() -> bool:
            found[:] = [node for node in [await self.agreed()] if node is not None]
            return bool(found)

        await until("the sentinels agree on a master", agree)
        return found[0]

    def found(self, namespace: str = "genie") -> None:
        """Found a namespace, at the master."""
        next(node for node in self.redises if node.lives and node.call("ROLE")[0] == b"master").found(namespace)

    async def home(self, _: str = "genie") -> Node:
        """Where a namespace is: at the master."""
        return await self.master()

    async def replicas(self) -> list[Node]:
        """The others, dead or alive."""
        master = await self.master()
        return [node for node in self.redises if node is not master]

    async def successor(self, old: Node) -> Node:
        """The next master, as soon as the sentinels agree on one."""

        async def changed() -> bool:
            master = await self.agreed()
            return master is not None and master is not old and master.lives

        await until(f"another one is the master than {old}", changed)
        return await self.master()

    async def settled(self) -> Node:
        """Wait until every living replica has what the master has, and the sentinels see all of that: the master."""
        await until("the master and its replicas are settled", self._is_settled)
        return await self.master()

    async def _is_settled(self) -> bool:
        master = await self.agreed()
        if master is None or not master.lives:
            return False
        others = [node for node in self.redises if node.lives and node is not master]
        seen = await master.info("replication")
        online = [value for key, value in seen.items() if key.startswith("slave") and isinstance(value, dict)]
        ports = {value["port"] for value in online if value["state"] == "online"}
        if not {node.known_port for node in others} <= ports:
            return False
        for node in others:
            known = await node.info("replication")
            if (known["master_port"], known["master_link_status"]) != (master.known_port, "up"):
                return False
            if known["slave_repl_offset"] < seen["master_repl_offset"]:
                return False
        return all(await asyncio.gather(*(self._sees(node, master, others) for node in self.sentinels if node.lives)))

    async def _sees(self, sentinel: Node, master: Node, others: list[Node]) -> bool:
        """Whether a sentinel would know whom to promote, and with whom to agree on that."""
        found = fields(await sentinel.ask("SENTINEL", "MASTER", NAME))
        if (found["port"], found["flags"]) != (str(master.known_port), "master"):
            return False
        if int(found["num-other-sentinels"]) != len(self.sentinels) - 1:
            return False
        listed = map(fields, await sentinel.ask("SENTINEL", "REPLICAS", NAME))
        usable = {int(row["port"]) for row in listed if row["flags"] == "slave" and row["master-link-status"] == "ok"}
        return {node.known_port for node in others} <= usable

    async def failover(self) -> Node:
        """A planned one, begun by one sentinel: the new master, when all of them know it."""
        old = await self.settled()
        await self.begin_failover()
        return await self.successor(old)

    async def begin_failover(self) -> None:
        """Tell a sentinel to replace a master that is well. It refuses while another failover is going on."""

        async def told() -> bool:
            with suppress(ResponseError):
                return bool(await self.sentinels[0].ask("SENTINEL", "FAILOVER", NAME))
            return False

        await until("a sentinel begins a failover", told)

    def kill(self) -> None:
        """End all processes."""
        end([*self.sentinels, *self.redises])


def fields(flat: list[Any]) -> dict[str, str]:
    """Pairs one behind the other, as RESP2 has them."""
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
    """All of it, settled. `lines` go into the configuration of each server of data; `quick` sentinels ask more often.

    With `fronts` each of those can be isolated (on Linux, where the loopback has more than one address).
    """
    common = [
        f"appendonly {'yes' if appendonly else 'no'}",
        *["appendfsync everysec", 'save ""', "repl-diskless-sync-delay 0", "repl-ping-replica-period 1"],
        *["replica-announce-ip 127.0.0.1", f"min-replicas-to-write {min_replicas_to_write}"],
        *["min-replicas-max-lag 2", *([f"bind-source-addr {REDISES_AT}"] if fronts else []), *lines],
    ]
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        before = [await stack.enter_async_context(proxy(0, chunks)) if fronts else None for _ in range(replicas + 1)]

        master = Node(folder, *common, front=before[0])
        follow = f"replicaof 127.0.0.1 {master.known_port}"
        others = [Node(folder, *common, follow, front=front) for front in before[1:]]
        judges = [_sentinel(folder, master, down_after_ms, failover_timeout_ms) for _ in range(3)]
        made = Sentinels([master, *others], judges)
        try:
            start([*judges, master, *others])
            if quick:
                await _hurry(made.sentinels)
            await made.settled()
            yield made
        finally:
            made.kill()


async def _hurry(sentinels: list[Node]) -> None:
    """Where a sentinel can't be told (before Redis 7) it takes its time."""
    with suppress(RedisError):
        for node in sentinels:
            await node.ask("SENTINEL", "DEBUG", *chain(*QUICK.items()))
