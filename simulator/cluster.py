"""The simulated deployment: servers, store, clients and nemesis in one thread. A seed decides everything that happens."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from random import Random
from typing import Any
from unittest.mock import patch

from genie.client.aio import connect
from genie.core import grant
from genie.errors import GenieError, Unavailable
from genie.server import dispatcher, pipeline
from genie.storage.redis import checkpoint, commit, keyspace, log
from genie.testing.simulation.history import FAULT, NOTE
from genie.testing.simulation.host import Host
from genie.testing.simulation.loop import NODE, Node, SimLoop, Stuck, deterministic
from genie.testing.simulation.network import Network, RandomDelays
from simulator import invariants
from simulator.beliefs import Beliefs
from simulator.history import LOG, ClusterHistory
from simulator.holding_client import HoldingClient
from simulator.library_client import LibraryClient
from simulator.nemesis import Nemesis
from simulator.scenario import ClientContext, Scenario
from simulator.sentinel import CHECK_INTERVAL_S
from simulator.shadow import Shadows
from simulator.stores import CrashingRedis, OneRedis, RedisWithLineage, RedisWithSentinels
from simulator.wire_client import WireClient

RECOVERY_LIMIT_S = 300.0
"""Time limit for the cluster to finish all requests after the last fault."""
PROBE_PRIORITY = -10
"""Lower than the priority of every other request, so that the final check waits for all of them."""
MAX_PROBE_ATTEMPTS = 60
"""How often the final check tries to reach a server, one second apart."""
INVARIANT_CHECK_INTERVAL_S = 0.5


class Cluster:
    """One run of a scenario. `run` returns the problems of the run itself; the checkers verify the history afterwards."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.loop = SimLoop(step_s=1e-6)
        self.history = ClusterHistory(self.loop.time)
        delays = RandomDelays(self._random("network"), slow_ratio=scenario.slow_ratio)
        self.network = Network(self.loop, delays, self.history)
        self.store: OneRedis | RedisWithLineage
        if scenario.redis_count > 1:
            self.store = RedisWithSentinels(scenario, self.network, self.history)
        elif scenario.redis_crashes:
            self.store = CrashingRedis(scenario, self.network, self.history)
        else:
            self.store = OneRedis(self.loop, self.history)
        self.hosts: list[Host] = []
        self.clients: dict[Node, WireClient | LibraryClient] = {}
        self._tasks: dict[asyncio.Task[Any], Node] = {}
        """The tasks of the clients with their nodes, in the order in which they were started."""
        self._beliefs = Beliefs(self.loop, self.history) if scenario.beliefs else None
        self._context = ClientContext(
            scenario, [f"s{number}:7077" for number in range(1, scenario.server_count + 1)], self.history
        )
        self.problems: list[str] = []
        self._nemesis: Nemesis | None = None

    def run(self) -> list[str]:
        """Run the whole scenario; return descriptions of the problems.

        Problems are violated invariants, exceptions that no task handled, an event loop that is stuck, and clients or locks
        that do not recover in time.
        """

        def record_log(level: str, line: MutableMapping[str, Any]) -> bool:
            running = NODE.get()
            fields = " ".join(f"{name}={value}" for name, value in line.items() if name != "event")
            self.history.append(LOG, "" if running is None else running.name, f"{level}: {line.get('event')} {fields}")
            return True  # the line is not printed

        def record_failure(_loop: object, context: dict[str, Any]) -> None:
            if "exception" in context:
                self._add_problem(f"{context['message']}: {context['exception']!r}")

        self.loop.set_exception_handler(record_failure)
        with (
            deterministic(self.loop, self.scenario.seed, record_log),
            patch.multiple(checkpoint, PART_SIZE=2, CHECKPOINT_INTERVAL_S=1.0),  # many checkpoints in many parts
            patch.object(commit, "TRIM_INTERVAL", 4),
            patch.object(dispatcher, "MAX_ENDED_LOCKS", 1),  # a session ends in many slices
            patch.object(dispatcher, "MAX_REPORTED_REQUESTS", 1),  # and its state is sent in many slices
            patch.object(pipeline, "MAX_FLUSHED_WATCHERS", 1),
            patch.object(grant, "MAX_CANDIDATES", 2),  # one release grants in many slices
            patch.object(log, "MAX_LOG_ENTRIES", 10),  # the log is short: a follower that lags loads the state again
            patch.object(keyspace, "CHUNK", self.scenario.chunk_size),
            patch.object(keyspace, "FIRST_CHUNK", min(keyspace.FIRST_CHUNK, self.scenario.chunk_size)),
            Shadows(self._add_problem).following(),
        ):
            try:
                self.loop.run_until_complete(self._run())
            except Stuck as error:
                self._add_problem(str(error))
            finally:
                for name in sorted(set().union(*(redis.unknown_commands for redis in self.store.redises))):
                    self._add_problem(f"the simulated Redis lacks {name.decode()}")
                self.store.record_final_state()
                self.loop.finish()
        return self.problems

    async def _run(self) -> None:
        """Start servers and clients, inject faults for a while, end all faults, and check that the cluster recovers."""
        scenario = self.scenario
        self.history.append(NOTE, "cluster", str(scenario))
        await self.store.start()
        if isinstance(self.store, RedisWithLineage):
            self._impairments = self.loop.spawn(self.loop.create_node("observer"), self._record_impairments(self.store))
        random = self._random("world")
        for number in range(1, scenario.server_count + 1):
            self.hosts.append(
                Host(
                    f"s{number}",
                    self.loop,
                    self.history,
                    random=random,
                    redis_url=self.store.url,
                    min_replicas=scenario.min_replicas,
                )
            )
        self._start_clients()
        checking = self.loop.create_task(self._check_invariants_regularly())
        nemesis = self._nemesis = Nemesis(
            scenario, self.network, self.history, store=self.store, hosts=self.hosts, clients=list(self.clients)
        )
        await nemesis.run_for(scenario.fault_phase_s)
        nemesis.heal()
        self.history.append(FAULT, "nemesis", "all faults are healed")
        self._context.stopping.set()
        await self._check_recovery()
        checking.cancel()

    def _start_clients(self) -> None:
        """Start the clients: wire clients without sessions, wire clients with sessions, and clients that use the library."""
        scenario, context = self.scenario, self._context
        for number in range(1, scenario.wire_client_count + 1):
            name = f"raw{number}"
            self._start_client(WireClient(context, name, self._random(name), session=None))
        for number in range(1, scenario.session_client_count + 1):
            name = f"ses{number}"
            self._start_client(WireClient(context, name, self._random(name), session=f"the secret of {name}"))
        for number in range(1, scenario.library_client_count + 1):
            name = f"aio{number}"
            random = self._random(name)
            self._start_client(
                LibraryClient(context, name, random)
                if self._beliefs is None
                else HoldingClient(context, name, random, self._beliefs)
            )

    def _start_client(self, client: WireClient | LibraryClient) -> None:
        node = self.loop.create_node(client.name)
        self.clients[node] = client
        self._tasks[self.loop.spawn(node, client.run())] = node

    def _random(self, name: str) -> Random:
        """Return a random generator for one component.

        Each component has its own generator, so that a change of one component does not change the choices of the others.
        """
        return Random(f"{self.scenario.seed} {name}")

    def _add_problem(self, text: str) -> None:
        self.problems.append(f"at {self.loop.time():.6f}: {text}")

    async def _record_impairments(self, store: RedisWithLineage) -> None:
        """Record at intervals which servers are down, stopped or partitioned from a Redis, and which Redis servers do not answer.

        The checkers excuse lost notifications of such an impaired server. The end of a server process is recorded when it
        happens (`Host`), because a server may be down for less than an interval.
        """
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            commands_fail = self._nemesis is not None and self._nemesis.fails_commands
            for host in self.hosts:
                cut_off = any(self.network.is_partitioned(frozenset((host.name, other))) for other in store.hosts)
                if cut_off or host.node.dead or host.node.stopped or commands_fail:
                    self.history.impaired.setdefault(host.name, []).append(self.loop.time())
            for redis in store.redises:
                if not redis.alive or redis.is_loading:
                    self.history.impaired.setdefault(redis.host, []).append(self.loop.time())

    # -- checks while it runs, and at the end -------------------------------------------------------------

    async def _check_invariants_regularly(self) -> None:
        """Check the lock managers at intervals, until a problem is found."""
        while not self.problems:
            await asyncio.sleep(INVARIANT_CHECK_INTERVAL_S)
            self._check_invariants()

    def _check_invariants(self) -> None:
        """Check the invariants of the lock manager on every running server that has one, i.e. on each leader."""
        for host in self.hosts:
            server = host.server
            if server is None or server.default_namespace.pipeline is None or host.node.dead:
                continue
            try:
                invariants.check(server.default_namespace.pipeline.manager)
            except invariants.Violation as error:
                self._add_problem(f"in {host.node.name}: {error}")

    async def _check_recovery(self) -> None:
        """Check that, without faults, every client finishes, every lock can be acquired and no live request remains stored.

        After a failed check the later checks are skipped.
        """
        tasks = {task: node for task, node in self._tasks.items() if not node.dead}
        done, waiting = await asyncio.wait(tasks, timeout=RECOVERY_LIMIT_S) if tasks else (set(), set())
        failed = [f"{tasks[task].name}: {task.exception()!r}" for task in done if task.exception() is not None]
        if failed:
            self.problems.append(f"clients failed: {', '.join(sorted(failed))}")
        if waiting:
            names = sorted(str(self.clients[tasks[task]]) for task in waiting)
            self.problems.append(f"not finished {RECOVERY_LIMIT_S} s after the last fault: {', '.join(names)}")
        if failed or waiting:
            return
        try:
            async with asyncio.timeout(RECOVERY_LIMIT_S):
                await self.store.wait_until_settled()
        except TimeoutError:
            self.problems.append(
                f"the replicas do not follow one primary {RECOVERY_LIMIT_S} s after the last client has finished"
            )
            return
        problem = await self.loop.spawn(self.loop.create_node("last"), self._acquire_everything())
        if problem:
            self.problems.append(problem)
        live = {id_: record for id_, record in self.store.stored_records().items() if record.get("state") != "ended"}
        if live:
            self.problems.append(f"at the end the store still holds {live}")
        self._check_invariants()

    async def _acquire_everything(self) -> str:
        """Acquire and release all resources with the lowest priority; return a description of the problem, or "".

        The request is granted only if no other request holds or awaits one of the resources. The servers are tried in turn
        until one can be reached.
        """
        addresses = self._context.addresses
        for attempt in range(MAX_PROBE_ATTEMPTS):
            try:
                async with connect(addresses[attempt % len(addresses)]) as client:
                    lock = await client.acquire(*self.scenario.resources, queue_timeout=120.0, priority=PROBE_PRIORITY)
                    await lock.release()
                    inspection = await client.inspect()
                    break
            except Unavailable as error:
                if attempt == MAX_PROBE_ATTEMPTS - 1:
                    return f"no server can be reached at the end: {error!r}"
                await asyncio.sleep(1)  # a server may still be starting
            except GenieError as error:
                return f"the locks can't be acquired at the end: {error!r}"
        return f"locks or waiters remain at the end: {inspection}" if inspection.holders or inspection.queue else ""
