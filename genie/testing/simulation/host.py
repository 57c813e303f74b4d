"""A simulated machine that runs a Genie server, and restarts it whenever it ends."""

from __future__ import annotations

import signal
import socket
from contextvars import Context
from math import inf
from random import Random
from typing import cast

from genie.config import Settings
from genie.server.app import Server
from genie.testing.simulation.history import NOTE, History
from genie.testing.simulation.loop import Node, SimLoop
from genie.testing.simulation.network import SimSocket

RESTART_DELAY_S = 0.05, 2.0
"""The shortest and the longest time until a server that exited is started again."""


class Host:
    """One machine. `random` decides the restart delays; `node` is the current or the last server process."""

    def __init__(
        self, name: str, loop: SimLoop, history: History, random: Random, *, redis_url: str, min_replicas: int
    ) -> None:
        self.name = name
        self._loop = loop
        self._history = history
        self._random = random
        self._redis_url = redis_url
        self._min_replicas = min_replicas
        self.node: Node
        self.server: Server | None = None
        self.boots = 1
        """How often the machine was booted."""
        self._starts = 0
        self._restarting = False
        self.start()

    def start(self) -> None:
        """Start the server, as a new process."""
        self._starts += 1
        self._restarting = False
        self.node = self._loop.create_node(f"{self.name}.{self._starts}", self.name)
        self._history.lifetimes[self.node.name] = self._loop.time(), inf
        self._loop.spawn(self.node, self._serve(self.node))

    def kill(self, restart_after_s: float, *, silently: bool) -> None:
        """Crash the server by SIGKILL or, with `silently`, by a power failure of its machine; restart it after a delay."""
        if not self.node.dead and not self._restarting:
            self._loop.kill(self.node, silently=silently)
            self._record_end(self.node)
            if silently:
                self.boots += 1
            self._restart_after(restart_after_s)

    def terminate(self) -> None:
        """SIGTERM: the server shuts down gracefully and is restarted."""
        if not self.node.dead:
            self._loop.send_signal(self.node, signal.SIGTERM)

    async def _serve(self, process: Node) -> None:
        """Run the server until it exits by itself, then restart it after a random delay."""
        settings = Settings.from_options(
            host=self.name, redis_url=self._redis_url, redis_min_replicas=self._min_replicas
        )
        self.server = Server(settings, bind_to=lambda host, port: cast("socket.socket", SimSocket((host, port))))
        status = await self.server.run()
        self._history.append(NOTE, process.name, f"exit status {status}")
        if not process.dead:
            self._loop.kill(process)
            self._record_end(process)
            self._restart_after(self._random.uniform(*RESTART_DELAY_S))

    def _record_end(self, process: Node) -> None:
        """Record the end of a process in the history."""
        lifetimes = self._history.lifetimes
        lifetimes[process.name] = lifetimes[process.name][0], self._loop.time()

    def _restart_after(self, delay_s: float) -> None:
        self._restarting = True
        self._loop.call_later(delay_s, self.start, context=Context())
