"""Clients at work on servers: what a scenario disturbs, and what is looked at in the end."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

from faults.cluster import Cluster
from faults.figures import Figures
from faults.library_client import LibraryClient
from faults.link import Link
from faults.watch import Broken, Watch
from faults.wire_client import WireClient
from faults.worker import Client, Worker
from ports import free_port
from proxy import Proxy, chunks, lines, proxy
from servers import Genie, Ground, Redis, running_redis

STUCK_S = 30.0
"""Who has waited for so long, with servers and Redis there, is stuck, where a world has no other bound."""


class World:
    """One cluster and its clients, from a seed."""

    def __init__(
        self, seed: str, cluster: Cluster, watch: Watch, clients: list[Client], links: set[Link], stuck_s: float
    ) -> None:
        self.seed = seed
        self.random = random.Random(f"{seed} faults")
        self.cluster = cluster
        self.watch = watch
        self.links = links
        self.front: list[Proxy] = []
        """Between the clients and each server."""
        self.back: list[Proxy] = []
        """Between each server and Redis."""
        self.drops = 0.01
        self._stuck_s = stuck_s
        self._clients = clients
        self._workers: list[Worker] = []
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        """Let the clients work."""
        self._workers = [Worker(client, self.watch, self.seed, self.drops) for client in self._clients]
        self._tasks = [asyncio.create_task(worker.run()) for worker in self._workers]

    async def everybody_served(self) -> None:
        """Until each client has had a lock since now. Broken, where one is stuck, or anything was wrong."""
        before, end = dict(self.watch.cycles), time.monotonic() + self._stuck_s
        while True:
            self.watch.check()
            for task in self._tasks:
                if task.done():
                    task.result()
            stuck = [client for client in self._clients if self.watch.cycles[client.name] <= before.get(client.name, 0)]
            if not stuck:
                return
            if time.monotonic() > end:
                raise Broken(f"stuck for {self._stuck_s:g} s: {'; '.join(map(str, stuck))}; {await self._inspected()}")
            await asyncio.sleep(0.005)

    async def calm(self) -> None:
        """Wait until all is well, and then a while: the next fault finds the clients anywhere."""
        await self.everybody_served()
        await asyncio.sleep(self.random.uniform(0, 0.1))

    async def waited(self, future: asyncio.Future[float]) -> float:
        """The outcome of what must happen, in time."""
        broken = asyncio.create_task(self.watch.broken.wait())
        try:
            await asyncio.wait({future, broken}, timeout=self._stuck_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            broken.cancel()
        self.watch.check()
        if not future.done():
            raise Broken(f"nobody was granted a lock for {self._stuck_s:g} s; {await self._inspected()}")
        return future.result()

    async def finish(self) -> None:
        """Let all clients come to their end, and see what is left: the counters as acknowledged, and no lock."""
        await self.everybody_served()
        for worker in self._workers:
            worker.stopping = True
        _, left = await asyncio.wait(self._tasks, timeout=self._stuck_s)
        if left:
            raise Broken(f"does not come to an end: {'; '.join(map(str, self._clients))}; {await self._inspected()}")
        for task in self._tasks:
            task.result()
        for wrong in self.watch.store.wrong():
            self.watch.violate(wrong)
        await asyncio.gather(*(client.leave() for client in self._clients))
        await self._end_sessions()
        await self._nothing_left()
        self.watch.check()

    async def _end_sessions(self) -> None:
        """Those of our own client can't be told to end: say hello in their place, for a millisecond."""
        for client in self._clients:
            if isinstance(client, LibraryClient):
                await self.cluster.ask("hello", session=client.secret, sessionTimeout=1)

    async def _nothing_left(self) -> None:
        """Sleepers' locks time out, and sessions end; then neither the server nor Redis has anything."""
        end = time.monotonic() + self._stuck_s
        while time.monotonic() < end:
            table = await self.cluster.ask("inspect")
            redis = await self.cluster.redis.home()
            left = redis.call("HGETALL", redis.call("HGET", "{genie}:meta", "records"))
            left.pop(b"0", None)  # no record: it only keeps the key
            if not table["holdersTotal"] and not table["queueTotal"] and not left:
                return
            await asyncio.sleep(0.05)
        self.watch.violate(f"left over: {table} and in Redis {list(left.items())[:5]} of {len(left)}")

    async def _inspected(self) -> str:
        try:
            return str(await self.cluster.ask("inspect"))
        except Broken as error:
            return f"and no leader to ask: {error!r}"

    async def stop(self) -> None:
        """End everything that runs in this process."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(client.close() for client in self._clients), return_exceptions=True)
        for link in list(self.links):
            link.abort()
        self.cluster.stop()


@asynccontextmanager
async def alone(*options: str) -> AsyncIterator[Redis]:
    """One Redis."""
    with running_redis(*options) as redis:
        yield redis


@asynccontextmanager
async def world(
    seed: str,
    *,
    servers: int = 2,
    clients: int = 12,
    library: int = 0,
    lease_s: float = 1.0,
    front: bool = False,
    back: bool = False,
    drops: float = 0.01,
    redis: Callable[[], AbstractAsyncContextManager[Ground]] = alone,
    stuck_s: float = STUCK_S,
) -> AsyncIterator[World]:
    """A world whose clients are at work. `library` of the `clients` are our own, and `redis` is what keeps the locks."""
    async with AsyncExitStack() as stack:
        ground = await stack.enter_async_context(redis())
        watch, links = Watch(), set[Link]()
        fronts, backs, nodes = [], [], []
        for _ in range(servers):
            settings: dict[str, object] = {"port": free_port(), "lease": lease_s, "store_timeout_ms": 500}
            if front:
                fronts.append(await stack.enter_async_context(proxy(int(str(settings["port"])), lines)))
                settings["advertise"] = f"127.0.0.1:{fronts[-1].port}"
            nodes.append(Genie(ground, **settings))
            if back:
                backs.append(await stack.enter_async_context(proxy((await ground.home()).port, chunks)))
                nodes[-1].redis_url = backs[-1].url
        addresses = [("127.0.0.1", each.port) for each in fronts] or [node.address for node in nodes]
        cluster = Cluster(ground, nodes, addresses, watch)
        wires: list[Client] = [
            WireClient(f"wire-{n}", addresses, watch, links, seed) for n in range(1, clients - library + 1)
        ]
        ours: list[Client] = [LibraryClient(f"library-{n}", addresses, watch, seed) for n in range(1, library + 1)]
        made = World(seed, cluster, watch, [*wires, *ours], links, stuck_s)
        made.front, made.back, made.drops = fronts, backs, drops
        try:
            await cluster.start()
            made.begin()
            await made.everybody_served()
            yield made
        finally:
            await made.stop()


async def taken_over(w: World, found: Figures, fault: float, answer: asyncio.Task[float]) -> None:
    """Wait until a follower leads, and has granted a lock."""
    grant = w.watch.grant_after(fault, fresh=True)
    found.answer_s.append(await answer - fault)
    found.away_s.append(await w.waited(grant) - fault)
    found.faults += 1
