"""Simulated machines. Each runs a Genie server, and starts it again when it has ended."""

from __future__ import annotations

import signal
import socket
from collections.abc import Mapping
from contextvars import Context
from math import inf
from random import Random
from types import MappingProxyType
from typing import cast

from genie.config import Settings
from genie.core.lock_order.analysis import LockOrder
from genie.server.app import Server
from genie.server.machine import Machine
from genie.testing.simulation.history import NOTE, History
from genie.testing.simulation.loop import Node, SimLoop
from genie.testing.simulation.network import SimSocket

RESTART_DELAY_S = 0.05, 2.0
"""The shortest and the longest time until a server that exited is started again."""


class SharedProcess(Machine):
    """The process of a test, in which a server must not change the garbage collection."""

    def prepare_memory(self) -> None:
        """Do nothing."""

    def freeze_memory(self) -> None:
        """Do nothing."""


class SimMachine(SharedProcess):
    """A simulated machine, whose sockets are in the simulated network."""

    def __init__(self, boot_id: str) -> None:
        self._boot_id = boot_id

    def listening_sockets(self, sock: socket.socket) -> list[socket.socket]:
        """Return only the socket: the simulated event loop accepts all connections at once."""
        return [sock]

    def bind(self, host: str, port: int) -> socket.socket:
        return cast("socket.socket", SimSocket((host, port)))

    def lock_address(self, address: tuple[str, int]) -> None:
        """Return None: another server may not bind a simulated address."""

    def boot_id(self) -> str:
        return self._boot_id

    def elapsed_s(self) -> float:
        """Return 0: a pause of the real process, in which no virtual time passes, must not be logged."""
        return 0.0


class Host:
    """A machine with a Genie server. `random` decides the delays of restarts.

    The servers add what they observe to `lock_orders`, by namespace.
    """

    def __init__(
        self,
        name: str,
        loop: SimLoop,
        history: History,
        random: Random,
        *,
        redis_url: str,
        min_replicas: int,
        lock_orders: Mapping[str, LockOrder] = MappingProxyType({}),
    ) -> None:
        self.name = name
        self._loop = loop
        self._history = history
        self._random = random
        self._redis_url = redis_url
        self._min_replicas = min_replicas
        self._lock_orders = lock_orders
        self.node: Node
        """The current or the last server process."""
        self.server: Server | None = None
        """The current or the last server. None until the first server process runs."""
        self.boots = 1
        """Number of boots of the machine. Part of its simulated boot id."""
        self._starts = 0
        """Number of starts of the server. Part of the name of the server process."""
        self._restarting = False
        """True if a restart is scheduled."""
        self.start()

    def start(self) -> None:
        """Start the server, as a new process."""
        self._starts += 1
        self._restarting = False
        self.node = self._loop.create_node(f"{self.name}.{self._starts}", self.name)
        self._history.lifetimes[self.node.name] = self._loop.time(), inf
        self._loop.spawn(self.node, self._serve(self.node))

    def kill(self, restart_after_s: float, *, silently: bool) -> None:
        """Kill the server, and restart it after `restart_after_s` seconds.

        With `silently` the whole machine loses power, so the peers of the server get no FIN or RST. Does nothing if the
        server is already down.
        """
        if not self.node.dead and not self._restarting:
            self._loop.kill(self.node, silently=silently)
            self._record_end(self.node)
            if silently:
                self.boots += 1
            self._restart_after(restart_after_s)

    def terminate(self) -> None:
        """Send SIGTERM to the server: it shuts down gracefully, and is then restarted."""
        if not self.node.dead:
            self._loop.send_signal(self.node, signal.SIGTERM)

    async def _serve(self, process: Node) -> None:
        """Run the server until it exits, then schedule its restart after a random delay."""
        settings = Settings.from_options(
            host=self.name, redis_url=self._redis_url, redis_min_replicas=self._min_replicas
        )
        machine = SimMachine(f"{self.name} {self.boots}")
        self.server = Server(settings, machine=machine, lock_orders=self._lock_orders)
        status = await self.server.run()
        self._history.append(NOTE, process.name, f"exit status {status}")
        if not process.dead:
            self._loop.kill(process)
            self._record_end(process)
            self._restart_after(self._random.uniform(*RESTART_DELAY_S))

    def _record_end(self, process: Node) -> None:
        """Record that a process ended now, and that the host is impaired: it may be restarted very soon."""
        lifetimes, now = self._history.lifetimes, self._loop.time()
        lifetimes[process.name] = lifetimes[process.name][0], now
        self._history.impaired.setdefault(self.name, []).append(now)

    def _restart_after(self, delay_s: float) -> None:
        """Schedule the next start of the server."""
        self._restarting = True
        self._loop.call_later(delay_s, self.start, context=Context())
