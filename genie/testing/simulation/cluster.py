"""A simulated world: servers, a Redis, clients and faults in one thread, decided by a seed from beginning to end."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import MutableMapping
from contextvars import Context
from math import inf
from random import Random
from typing import Any, cast
from unittest.mock import patch

from genie.client.aio import connect
from genie.config import Settings
from genie.errors import GenieError, Unavailable
from genie.server.app import Server
from genie.storage import store as node
from genie.testing.simulation import invariants
from genie.testing.simulation.history import FAULT, LOG, NOTE, History
from genie.testing.simulation.library_client import ShippedClient
from genie.testing.simulation.loop import NODE, Node, SimLoop, Stuck, deterministic
from genie.testing.simulation.nemesis import Faults
from genie.testing.simulation.network import Network, RandomDelays, SimSocket
from genie.testing.simulation.scenario import Plan
from genie.testing.simulation.stores import OneRedis, ThreeRedises
from genie.testing.simulation.wire_client import RawClient

PATIENCE_S = 300.0
"""How long everything may take to come to its end once the faults have stopped."""
BEHIND_ALL = -10
"""A priority below that of every wish."""
CHECK_INTERVAL_S = 0.5
"""How often the lock managers are looked at from inside."""
RESTART_S = 0.05, 2.0
"""How long it takes until a server that ended is started again."""


class Host:
    """A machine on which a server is started again whenever it ends."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.node: Node
        self.server: Server | None = None
        self._starts = 0
        self.restarting = False
        self.start()

    def start(self) -> None:
        """Start the server, as a new process."""
        self._starts += 1
        self.restarting = False
        world = self.world
        self.node = world.loop.node(f"{self.name}.{self._starts}", self.name)
        world.history.lives[self.node.name] = world.loop.time(), inf
        world.loop.spawn(self.node, self._serve(self.node))

    def kill(self, after_s: float, *, silently: bool) -> None:
        """SIGKILL, or the end of the machine; it is started again after a while."""
        if not self.node.dead and not self.restarting:
            self.world.loop.kill(self.node, silently=silently)
            self._died(self.node)
            if silently:
                self.world.boots[self.name] = self.world.boots.get(self.name, 1) + 1
            self.again(after_s)

    def _died(self, process: Node) -> None:
        lives = self.world.history.lives
        lives[process.name] = lives[process.name][0], self.world.loop.time()

    def again(self, after_s: float) -> None:
        """Start it again after a while."""
        self.restarting = True
        self.world.loop.call_later(after_s, self.start, context=Context())

    async def _serve(self, process: Node) -> None:
        world = self.world
        settings = Settings.from_options(
            host=self.name, redis_url=world.store.url, redis_min_replicas=world.plan.min_replicas
        )
        self.server = Server(settings, bind_to=lambda host, port: cast("socket.socket", SimSocket((host, port))))
        status = await self.server.run()
        world.history.note(NOTE, process.name, f"exit status {status}")
        if not process.dead:
            world.loop.kill(process)
            self._died(process)
            self.again(world.random.uniform(*RESTART_S))


class World:
    """One run of a plan. `run` returns what went wrong on the way; the history is judged elsewhere."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.random = Random(f"{plan.seed} world")
        self.loop = SimLoop(step_s=1e-6)
        self.history = History(self.loop.time)
        self.delays = RandomDelays(Random(f"{plan.seed} network"), slow=plan.slow)
        self.network = Network(self.loop, self.delays, self.history)
        self.store: OneRedis | ThreeRedises = OneRedis(self) if plan.redises == 1 else ThreeRedises(self)
        self.hosts: list[Host] = []
        self.boots: dict[str, int] = {}
        """How often a machine was started, where that is more than once."""
        self.clients: dict[Node, asyncio.Task[Any]] = {}
        self.programs: dict[Node, RawClient | ShippedClient] = {}
        self.addresses = [f"s{number}:7077" for number in range(1, plan.servers + 1)]
        self.ids: list[int] = []
        """Of requests that some client has heard of."""
        self.ending = False
        """The clients shall come to an end."""
        self.problems: list[str] = []
        self.faults: Faults

    def run(self) -> list[str]:
        """Everything, from the first start to the last release."""

        def log(level: str, line: MutableMapping[str, Any]) -> bool:
            running = NODE.get()
            text = " ".join(f"{name}={value}" for name, value in line.items() if name != "event")
            self.history.note(LOG, "" if running is None else running.name, f"{level}: {line.get('event')} {text}")
            return True

        def failed(_loop: object, context: dict[str, Any]) -> None:
            if "exception" in context:
                self.problems.append(f"at {self.loop.time():.6f}: {context['message']}: {context['exception']!r}")

        self.loop.set_exception_handler(failed)
        with deterministic(self.loop, self.plan.seed, log), patch.object(node, "_boot_id", self._boot):
            try:
                self.loop.run_until_complete(self._live())
            except Stuck as error:
                self.problems.append(f"at {self.loop.time():.6f}: {error}")
            finally:
                self.store.finish()
                self.loop.finish()
        return self.problems

    def _boot(self) -> str:
        """Which start of its machine the running node is on."""
        running = NODE.get()
        return "" if running is None else f"{running.host} {self.boots.get(running.host, 1)}"

    def anybodys_id(self, random: Random) -> int:
        """The id of a request that some client has made lately, or 0."""
        return random.choice(self.ids[-10:]) if self.ids else 0

    # -- its life -----------------------------------------------------------------------------------------

    async def _live(self) -> None:
        plan = self.plan
        self.history.note(NOTE, "world", str(plan))
        faults = self.faults = Faults(self)
        await self.store.start()
        self.hosts = [Host(self, f"s{number}") for number in range(1, plan.servers + 1)]
        for number in range(1, plan.raw + 1):
            self._client(RawClient(self, f"raw{number}", self._chance(f"raw{number}"), None))
        for number in range(1, plan.sessions + 1):
            name = f"ses{number}"
            self._client(RawClient(self, name, self._chance(name), f"the secret of {name}"))
        for number in range(1, plan.shipped + 1):
            self._client(ShippedClient(self, f"aio{number}", self._chance(f"aio{number}")))
        looking = self.loop.create_task(self._inspect())
        await faults.go_on_for(plan.active_s)
        faults.mend()
        self.history.note(FAULT, "world", "all is well from here on")
        self.ending = True
        await self._end()
        looking.cancel()

    async def _end(self) -> None:
        tasks = {task: client for client, task in self.clients.items() if not client.dead}
        done, waiting = await asyncio.wait(tasks, timeout=PATIENCE_S) if tasks else (set(), set())
        failed = [f"{tasks[task].name}: {task.exception()!r}" for task in done if task.exception() is not None]
        if failed:
            self.problems.append(f"clients failed: {', '.join(sorted(failed))}")
        if waiting:
            names = sorted(str(self.programs[tasks[task]]) for task in waiting)
            self.problems.append(f"not at an end {PATIENCE_S} s after the last fault: {', '.join(names)}")
        if failed or waiting:
            return
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self.store.settled()
        except TimeoutError:
            self.problems.append(f"the Redises do not follow one master {PATIENCE_S} s after the last client")
            return
        last = self.loop.node("last")
        problem = await self.loop.spawn(last, self._probe())
        if problem:
            self.problems.append(problem)
        living = {id_: record for id_, record in self.store.stored().items() if record.get("state") != "ended"}
        if living:
            self.problems.append(f"at the end the store still holds {living}")
        self._look_inside()

    async def _inspect(self) -> None:
        """Look now and then whether what must always hold in a lock manager does."""
        while not self.problems:
            await asyncio.sleep(CHECK_INTERVAL_S)
            self._look_inside()

    def _look_inside(self) -> None:
        for host in self.hosts:
            server = host.server
            if server is None or server.default_namespace.pipeline is None or host.node.dead:
                continue
            try:
                invariants.check(server.default_namespace.pipeline.manager)
            except invariants.Violation as error:
                self.problems.append(f"at {self.loop.time():.6f}: in {host.node.name}: {error}")

    async def _probe(self) -> str:
        """Whether everything can be had by somebody new behind all others, and nothing is left then."""
        for attempt in range(60):
            try:
                async with connect(self.addresses[attempt % len(self.addresses)]) as client:
                    lock = await client.acquire(*self.plan.resources, queue_timeout=120.0, priority=BEHIND_ALL)
                    await lock.release()
                    found = await client.inspect()
                    break
            except Unavailable as error:
                if attempt == 59:
                    return f"nobody can be reached at the end: {error!r}"
                await asyncio.sleep(1)  # the last server may be on its way
            except GenieError as error:
                return f"not everything can be had at the end: {error!r}"
        return f"something is left at the end: {found}" if found.holders or found.queue else ""

    # -- for the faults -----------------------------------------------------------------------------------

    def _chance(self, name: str) -> Random:
        return Random(f"{self.plan.seed} {name}")

    def _client(self, program: RawClient | ShippedClient) -> None:
        client = self.loop.node(program.name)
        self.programs[client] = program
        self.clients[client] = self.loop.spawn(client, program.run())

    def terminate(self, host: Host) -> None:
        """SIGTERM."""
        if not host.node.dead:
            self.loop.signal(host.node, signal.SIGTERM)
