"""The environment of a scenario: clients and servers, and the checks at the end."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

from faults.checker import Checker, Violation
from faults.cluster import Cluster
from faults.connection import Connection
from faults.library_client import LibraryClient
from faults.results import Results
from faults.wire_client import WireClient
from faults.worker import Client, Worker
from support.network.proxy import Proxy, chunks, lines, proxy
from support.processes.ports import free_port
from support.processes.servers import Genie, Redis, RedisDeployment, running_redis
from support.storage.stores import stored_records

PROGRESS_TIMEOUT_S = 30.0
"""A client that makes no progress for this long, with servers and Redis available, is a violation (the default)."""


class Environment:
    """A cluster and its clients; a seed decides the choices."""

    def __init__(
        self,
        seed: str,
        cluster: Cluster,
        checker: Checker,
        clients: list[Client],
        connections: set[Connection],
        progress_timeout_s: float,
    ) -> None:
        self.seed = seed
        self.random = random.Random(f"{seed} faults")
        self.cluster = cluster
        self.checker = checker
        self.connections = connections
        self.client_proxies: list[Proxy] = []
        """The proxies between the clients and each server."""
        self.redis_proxies: list[Proxy] = []
        """The proxies between each server and Redis."""
        self.drop_probability = 0.01
        self._stuck_s = progress_timeout_s
        self._clients = clients
        self._workers: list[Worker] = []
        self._tasks: list[asyncio.Task[None]] = []

    def start_clients(self) -> None:
        """Start the workload of all clients."""
        self._workers = [Worker(client, self.checker, self.seed, self.drop_probability) for client in self._clients]
        self._tasks = [asyncio.create_task(worker.run()) for worker in self._workers]

    async def wait_until_all_served(self) -> None:
        """Wait until each client has finished a cycle since now; Violation if one makes no progress, or anything is violated."""
        before, end = dict(self.checker.cycles), time.monotonic() + self._stuck_s
        while True:
            self.checker.check()
            for task in self._tasks:
                if task.done():
                    task.result()
            stuck = [
                client for client in self._clients if self.checker.cycles[client.name] <= before.get(client.name, 0)
            ]
            if not stuck:
                return
            if time.monotonic() > end:
                raise Violation(
                    f"stuck for {self._stuck_s:g} s: {'; '.join(map(str, stuck))}; {await self._inspected()}"
                )
            await asyncio.sleep(0.005)

    async def settle(self) -> None:
        """Wait until all clients are served and then for a random time, so that the next fault comes at any point."""
        await self.wait_until_all_served()
        await asyncio.sleep(self.random.uniform(0, 0.1))

    async def wait_for(self, future: asyncio.Future[float]) -> float:
        """Wait for the time of a grant; Violation if there is none, or anything else was violated."""
        violated = asyncio.create_task(self.checker.violated.wait())
        try:
            await asyncio.wait({future, violated}, timeout=self._stuck_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            violated.cancel()
        self.checker.check()
        if not future.done():
            raise Violation(f"no lock was granted for {self._stuck_s:g} s; {await self._inspected()}")
        return future.result()

    async def finish(self) -> None:
        """Stop all clients; check the counters, and that no lock, waiting request or session is left."""
        await self.wait_until_all_served()
        for worker in self._workers:
            worker.stopping = True
        _, left = await asyncio.wait(self._tasks, timeout=self._stuck_s)
        if left:
            raise Violation(f"clients do not finish: {'; '.join(map(str, self._clients))}; {await self._inspected()}")
        for task in self._tasks:
            task.result()
        for mismatch in self.checker.store.mismatches():
            self.checker.violate(mismatch)
        await asyncio.gather(*(client.leave() for client in self._clients))
        await self._end_sessions()
        await self._check_nothing_left()
        self.checker.check()

    async def _end_sessions(self) -> None:
        """End the sessions of the library clients: resume each with a session timeout of 1 ms."""
        for client in self._clients:
            if isinstance(client, LibraryClient):
                await self.cluster.query_leader("hello", session=client.secret, sessionTimeout=1)

    async def _check_nothing_left(self) -> None:
        """Wait until locks have timed out and sessions have ended: then neither the server nor Redis has any record."""
        end = time.monotonic() + self._stuck_s
        while time.monotonic() < end:
            table = await self.cluster.query_leader("inspect")
            redis = await self.cluster.redis.node_of()
            left = stored_records(redis)
            if not table["holdersTotal"] and not table["queueTotal"] and not left:
                return
            await asyncio.sleep(0.05)
        self.checker.violate(f"remaining: {table} and in Redis {list(left.items())[:5]} of {len(left)}")

    async def _inspected(self) -> str:
        try:
            return str(await self.cluster.query_leader("inspect", resource="counters/**"))
        except Violation as error:
            return f"there is no leader to query: {error!r}"

    async def stop(self) -> None:
        """Stop all tasks, connections and processes."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(client.close() for client in self._clients), return_exceptions=True)
        for connection in list(self.connections):
            connection.abort()
        self.cluster.stop()


@asynccontextmanager
async def single_redis(*options: str) -> AsyncIterator[Redis]:
    """Run a single Redis."""
    with running_redis(*options) as redis:
        yield redis


@asynccontextmanager
async def environment(
    seed: str,
    *,
    servers: int = 2,
    clients: int = 12,
    library: int = 0,
    lease_s: float = 1.0,
    proxy_clients: bool = False,
    proxy_redis: bool = False,
    drop_probability: float = 0.01,
    redis: Callable[[], AbstractAsyncContextManager[RedisDeployment]] = single_redis,
    progress_timeout_s: float = PROGRESS_TIMEOUT_S,
) -> AsyncIterator[Environment]:
    """Run an environment with working clients, of which `library` use the library; `redis` is the deployment."""
    async with AsyncExitStack() as stack:
        deployment = await stack.enter_async_context(redis())
        checker, connections = Checker(), set[Connection]()
        client_proxies, redis_proxies, nodes = [], [], []
        for _ in range(servers):
            settings: dict[str, object] = {"port": free_port(), "lease": lease_s, "store_timeout_ms": 500}
            if proxy_clients:
                client_proxies.append(await stack.enter_async_context(proxy(int(str(settings["port"])), lines)))
                settings["advertise"] = f"127.0.0.1:{client_proxies[-1].port}"
            nodes.append(Genie(deployment, **settings))
            if proxy_redis:
                redis_proxies.append(await stack.enter_async_context(proxy((await deployment.node_of()).port, chunks)))
                nodes[-1].redis_url = redis_proxies[-1].url
        addresses = [("127.0.0.1", proxy_.port) for proxy_ in client_proxies] or [node.address for node in nodes]
        cluster = Cluster(deployment, nodes, addresses, checker)
        wire_clients: list[Client] = [
            WireClient(f"wire-{n}", addresses, checker, connections, seed) for n in range(1, clients - library + 1)
        ]
        library_clients: list[Client] = [
            LibraryClient(f"library-{n}", addresses, checker, seed) for n in range(1, library + 1)
        ]
        env = Environment(seed, cluster, checker, [*wire_clients, *library_clients], connections, progress_timeout_s)
        env.client_proxies, env.redis_proxies, env.drop_probability = client_proxies, redis_proxies, drop_probability
        try:
            await cluster.start()
            env.start_clients()
            await env.wait_until_all_served()
            yield env
        finally:
            await env.stop()


async def wait_for_takeover(env: Environment, results: Results, fault: float, pong_at: asyncio.Task[float]) -> None:
    """Wait until a follower leads and has granted a lock; record the delays. `pong_at` is the task of `start_probing`."""
    grant = env.checker.grant_after(fault, fresh=True)
    results.reply_delays_s.append(await pong_at - fault)
    results.grant_delays_s.append(await env.wait_for(grant) - fault)
    results.faults += 1
