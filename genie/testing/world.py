"""A simulated world for a service: its processes, three Genie servers, a Redis and a network, on a virtual clock.

A seed and a plan of faults decide everything that happens, so a run can be repeated exactly.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Coroutine, Mapping, MutableMapping, Sequence
from contextvars import Context
from dataclasses import dataclass, replace
from random import Random
from types import MappingProxyType
from typing import Any, TypeVar
from unittest.mock import patch

from genie.core.lock_order.analysis import LockOrder
from genie.testing.faults import MAX_FAULTS, PROCESS_KINDS, REDIS, SERVERS, Fault, Kind
from genie.testing.simulation.history import FAULT, NOTE, Entry, History
from genie.testing.simulation.host import Host
from genie.testing.simulation.loop import NODE, Node, SimLoop, deterministic
from genie.testing.simulation.network import LateMessages, Network, RandomDelays
from genie.testing.simulation.redis.lua import require_lupa
from genie.testing.simulation.redis.server import SimRedis

T = TypeVar("T")

RESERVED_NAMES = ("", "main", "network", REDIS, *SERVERS)
"""Names that no process of a service may have, because a fault or the timeline uses them."""
REDIS_URL = f"redis://{REDIS}:6379/0"
NAMESPACE_META = b"{genie}:meta"
"""The key of the hash whose field `node` describes the leader."""
MAX_VIRTUAL_S = 3_600.0
"""Maximum virtual duration of a run."""
START_LIMIT_S = 60.0
"""Maximum virtual time until a server leads."""
LOST_WRITES = 3
"""Number of writes that Redis loses when it is rolled back."""
LEADERSHIP_EVENTS = frozenset({"leadership acquired", "leadership lost"})
"""Events in the logs of the servers that the timeline has."""
TAKEOVER_CHECK_INTERVAL_S = 0.01
"""Interval of the checks whether another server leads, after the leader was cut off from Redis."""


@dataclass(slots=True, eq=False)
class Process:
    """A process of the service, until it ends. After a crash `run_process` starts it again, as another node."""

    name: str
    node: Node
    """The current or last node of the process."""
    crashed: asyncio.Future[float]
    """Done when the process has crashed. The result is the time in seconds until it is started again."""


class World:
    """One run of a service in a simulated world. `run` returns the result of the service. Its timeline is then in `entries`.

    `faults` is the plan of faults. The servers add what they observe to `lock_orders`, by namespace.
    """

    current: World | None = None
    """The world that is running. None outside of `run`."""

    def __init__(
        self, seed: int, faults: Sequence[Fault], lock_orders: Mapping[str, LockOrder] = MappingProxyType({})
    ) -> None:
        if len(faults) > MAX_FAULTS:
            raise ValueError(f"a plan has at most {MAX_FAULTS} faults, not {len(faults)}")
        self.seed = seed
        self.faults = list(faults)
        self.loop = SimLoop(step_s=1e-6)
        self.history = History(self.loop.time)
        self._late_random = Random(f"{seed} late messages")
        self.network = Network(self.loop, RandomDelays(Random(f"{seed} network")), self.history)
        self.redis = SimRedis()
        self._redis_node = self.loop.create_node(REDIS)
        self.hosts: list[Host] = []
        """The machines of the Genie servers."""
        self.processes: list[Process] = []
        """The running processes of the service, `main` first."""
        self._lock_orders = lock_orders
        self.injected: list[Fault] = []
        """The faults that were possible, with the names of their targets."""

    @property
    def entries(self) -> list[Entry]:
        """The entries of the timeline, in order."""
        return self.history.entries

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine `main` of the service to its end, and return its result.

        Raises what `main` raises, and TimeoutError after `MAX_VIRTUAL_S` seconds of virtual time.
        """
        cleared = dict.fromkeys(("GENIE_TOKEN", "GENIE_TOKEN_FILE", "GENIE_NAMESPACE", "GENIE_PORT"), "")
        environment = {"GENIE_HOST": ",".join(f"{name}:7077" for name in SERVERS), **cleared}
        __tracebackhide__ = True  # pytest shows the line of the test instead
        try:
            require_lupa()
            with (
                deterministic(self.loop, self.seed, self._on_log),
                patch.dict(os.environ, environment),
                patch.object(World, "current", self),
            ):
                try:
                    return self.loop.run_until_complete(self._run(main))
                finally:
                    with patch.object(sys, "unraisablehook", lambda _: None):  # coroutines of crashed processes end now
                        self.loop.finish()
                        self.network.finish()
        finally:
            main.close()

    def _on_log(self, _level: str, line: MutableMapping[str, Any]) -> bool:
        """Return True for a line of a Genie server, which is then dropped.

        Record a change of leadership in the timeline.
        """
        running = NODE.get()
        if running is None or running.host not in SERVERS:
            return False
        if line["event"] in LEADERSHIP_EVENTS:
            self.history.append(NOTE, running.host, line["event"])
        return True

    async def _run(self, main: Coroutine[Any, Any, T]) -> T:
        """Start Redis and the servers, then run `main` with the faults of the plan."""
        await self._start_servers()
        self.history.restart()  # the timeline begins with the service
        for fault in self.faults:
            self._call_later(fault.at_s, self._inject, fault)
        node = self.loop.create_node("main")
        self.processes.append(Process("main", node, self.loop.create_future()))
        async with asyncio.timeout(MAX_VIRTUAL_S):
            return await self.loop.spawn(node, main)

    async def _start_servers(self) -> None:
        """Start Redis and the Genie servers, and wait until one of the servers leads."""
        await self.loop.spawn(self._redis_node, self.redis.serve(REDIS))
        random = Random(f"{self.seed} servers")
        for name in SERVERS:
            host = Host(
                name,
                self.loop,
                self.history,
                random,
                redis_url=REDIS_URL,
                min_replicas=0,
                lock_orders=self._lock_orders,
            )
            self.hosts.append(host)
        async with asyncio.timeout(START_LIMIT_S):
            while not any(  # noqa: ASYNC110 - once in a run
                host.server is not None and host.server.default_namespace.is_leader for host in self.hosts
            ):
                await asyncio.sleep(0.01)

    async def run_process(self, name: str, function: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
        """Run a function as a process of its own, and start it again after each crash, until it returns.

        Returns the result of the function. Raises ValueError if the name is invalid, or a process with this name is
        running.
        """
        self._check_process_name(name)
        process = Process(name, self.loop.create_node(name), self.loop.create_future())
        self.processes.append(process)
        start_count = 1
        try:
            while True:
                task = self.loop.spawn(process.node, function(*args))
                try:
                    await asyncio.wait((task, process.crashed), return_when=asyncio.FIRST_COMPLETED)
                except asyncio.CancelledError:
                    task.cancel()  # if the process crashes now, the task never ends
                    await asyncio.wait((task, process.crashed), return_when=asyncio.FIRST_COMPLETED)
                    raise
                if task.done():
                    return task.result()
                restart_delay_s = process.crashed.result()
                await asyncio.sleep(restart_delay_s)
                start_count += 1
                process.node = self.loop.create_node(f"{name}.{start_count}", name)
                process.crashed = self.loop.create_future()
        finally:
            self.processes.remove(process)
            if not process.node.dead:
                self.loop.kill(process.node)  # ends the tasks and connections that the function has left

    def _check_process_name(self, name: str) -> None:
        """Raise ValueError if the name of a new process is invalid or in use."""
        if name in RESERVED_NAMES or name.isdecimal() or "," in name or name != name.strip():
            raise ValueError(
                f"the name of a process must not be {', '.join(RESERVED_NAMES[1:])}, a number or empty, nor contain a "
                f"comma; it is {name!r}"
            )
        if any(process.name == name for process in self.processes):
            raise ValueError(f"the process {name!r} is running already: give each process another name")

    def note(self, text: str) -> None:
        """Record a note of the running process in the timeline."""
        running = NODE.get()
        self.history.append(NOTE, "" if running is None else running.name, text)

    # -- faults -------------------------------------------------------------------------------------------------

    def _inject(self, fault: Fault) -> None:
        """Inject a fault, and record it with the name of its target. A fault that is impossible now does nothing."""
        if fault.kind in PROCESS_KINDS:
            process = self._find_process(fault.target)
            if process is not None and not process.node.dead:
                self._break_process(fault, process)
        elif fault.kind is Kind.ROLL_BACK_REDIS:
            lost = self.redis.restart(lost_writes=LOST_WRITES)
            self._record(fault, "", f"without its last {lost} writes")
        elif fault.kind is Kind.PAUSE_REDIS:
            self._pause(self._redis_node, fault)
        elif fault.kind is Kind.LOSE_LEASE:
            self._lose_lease(fault)
        elif fault.kind is Kind.DELAY_MESSAGES:
            self._delay_messages(fault)
        else:
            host = next((host for host in self.hosts if host.name == fault.target), None)
            if host is not None and not host.node.dead:
                self._break_server(fault, host)

    def _break_server(self, fault: Fault, host: Host) -> None:
        """Inject a fault of one of `SERVER_KINDS` into a server that runs."""
        if fault.kind is Kind.CRASH_SERVER:
            self._record(fault, host.name, f"back after {fault.duration_s} s")
            host.kill(fault.duration_s, silently=False)
        else:
            self._pause(host.node, fault, host.name)

    def _find_process(self, target: str) -> Process | None:
        """Return the process with the name or the number `target`, or None if there is none.

        The service itself, `main`, has a number only while it is the only process.
        """
        if not target.isdecimal():
            return next((process for process in self.processes if process.name == target), None)
        numbered = [process for process in self.processes if process.name != "main"] or self.processes
        return numbered[int(target) % len(numbered)] if numbered else None

    def _break_process(self, fault: Fault, process: Process) -> None:
        """Inject a fault of one of `PROCESS_KINDS` into a process that runs."""
        node = process.node
        if fault.kind is Kind.PAUSE_PROCESS:
            self._pause(node, fault)
        elif fault.kind is Kind.CRASH_PROCESS:
            if process.name != "main" and not process.crashed.done():  # the crash of `main` would be the end of the run
                self._record(fault, node.name, f"back after {fault.duration_s} s")
                self.loop.kill(node)
                process.crashed.set_result(fault.duration_s)
        elif fault.kind is Kind.CUT_CONNECTIONS:
            self._record(fault, node.name, "")
            for connection in list(self.network.connections):
                if connection.client.node is node and connection.address[0] in SERVERS:
                    self.network.cut(connection, 0.0, fault.duration_s)
        else:
            self._record(fault, node.name, f"for {fault.duration_s} s")
            for server in SERVERS:
                self.network.partition(node.host, server)
                self._call_later(fault.duration_s, self.network.end_partition, node.host, server)

    def _call_later(self, delay_s: float, function: Callable[..., object], *arguments: object) -> None:
        """Call a function after a virtual time. The call belongs to no node, so no crash of a node drops it."""
        self.loop.call_later(delay_s, function, *arguments, context=Context())

    def _find_leader(self) -> Host | None:
        """Return the host of the server that leads according to Redis, or None if no server does, or it has crashed."""
        encoded_node = self.redis.keys.hash(NAMESPACE_META).get(b"node")
        address = json.loads(encoded_node)["listening"] if encoded_node else ""
        return next((host for host in self.hosts if address == f"{host.name}:7077" and not host.node.dead), None)

    def _lose_lease(self, fault: Fault) -> None:
        """Cut the leader off from Redis until another server leads, and for the duration of the fault after that."""
        leader = self._find_leader()
        if leader is None:
            return
        self._record(fault, leader.name, f"cut off from {REDIS} until {fault.duration_s} s after another server leads")
        self.network.partition(leader.name, REDIS)

        def end_after_takeover() -> None:
            if self._find_leader() in (None, leader):
                self._call_later(TAKEOVER_CHECK_INTERVAL_S, end_after_takeover)
            else:
                self._call_later(fault.duration_s, self.network.end_partition, leader.name, REDIS)

        end_after_takeover()

    def _delay_messages(self, fault: Fault) -> None:
        """Delay the messages between the parties of a fault, for its duration."""
        parties = []
        for name in fault.parties:
            process = self._find_process(name)
            if process is None and name not in (*SERVERS, REDIS):
                return  # there is no such party now
            parties.append(name if process is None else process.name)
        hosts = frozenset(parties)
        column = "network"
        if not hosts:
            which = "of all"
        elif len(hosts) == 1:
            column, which = parties[0], "from and to it"
        else:
            which = f"between {' and '.join(parties)}"
        details = f"{which} by up to {fault.delay_s} s, for {fault.duration_s} s"
        self._record(fault, column, details, ",".join(dict.fromkeys(parties)))
        late = LateMessages(hosts, fault.delay_s, self._late_random)
        self.network.delay_messages(late)
        self._call_later(fault.duration_s, self.network.end_delay, late)

    def _pause(self, node: Node, fault: Fault, column: str | None = None) -> None:
        """Stop a node for the duration of a fault, unless it is stopped or dead. `column` is by default its name."""
        if not node.dead and not node.stopped:
            self._record(fault, column or node.name, f"for {fault.duration_s} s")
            self.loop.stop_node(node)
            self._call_later(fault.duration_s, self.loop.continue_node, node)

    def _record(self, fault: Fault, column: str, details: str, target: str | None = None) -> None:
        """Record a fault in a column of the timeline, and in `injected` with the name of its target.

        The default target is the process of this column, if there is one, or else the target of the fault.
        """
        if target is None:
            target = next((process.name for process in self.processes if process.node.name == column), fault.target)
        self.injected.append(replace(fault, target=target))
        self.history.append(FAULT, column, f"{fault.kind} {details}".rstrip())


def has_running_loop() -> bool:
    """Return whether the caller runs in an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def note(text: str) -> None:
    """Add a note to the timeline of the simulated world. Without a simulated world this does nothing."""
    if World.current is not None:
        World.current.note(str(text))


async def process(name: str, function: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
    """Run an async function as a process of its own, which faults can pause, crash or cut off, and return its result.

    After a crash the function is called again, as by a supervisor: what it had in memory is lost. Objects that are
    passed to it, such as a simulated database, are outside of the process and keep their state. When the function
    returns, its process ends: its connections are closed, and its tasks stop. Without a simulated world, this is a
    plain call of the function.

    Raises ValueError if a process with this name is running.
    """
    if World.current is None:
        return await function(*args)
    return await World.current.run_process(name, function, *args)
