"""One process of a Redis deployment: a redis-server or a sentinel, with its own folder and configuration file."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from redis.asyncio import Redis as Client

from support.network.proxy import Proxy
from support.processes.ports import free_port
from support.processes.servers import Redis

SENTINELS_AT = "127.0.0.2"
REDISES_AT = "127.0.0.3"
"""The source addresses of their connections: proxies can block these without blocking the servers of Genie."""
REPLY_TIMEOUT_S = 2.0
"""Time limit of a reply: a stopped process never replies."""


class Node(Redis):
    """A redis-server, or a sentinel. `lines` are its configuration, which it rewrites when its role changes.

    `front` is a proxy in front of it, whose port it announces.
    """

    def __init__(self, folder: Path, *lines: str, sentinel: bool = False, front: Proxy | None = None) -> None:
        super().__init__(folder)
        while (folder / str(self.port)).exists():  # chosen by another node, which does not listen yet
            self.port = free_port()
        self.front = front
        self.known_port = self.port
        if front is not None:
            front.target = self.port
            self.known_port = front.port
            lines = (*lines, f"replica-announce-port {front.port}")
        self.folder = folder / str(self.port)
        self.folder.mkdir()
        self.stopped = False
        """The process is stopped by SIGSTOP."""
        self._sentinel = sentinel
        self._file = self.folder / "redis.conf"
        common = [f"port {self.port}", "bind 127.0.0.1", f"dir {self.folder}", "loglevel warning", "logfile log"]
        self._file.write_text("\n".join([*common, *lines, ""]))

    def __str__(self) -> str:
        return f"Redis at {self.port}"

    def arguments(self) -> list[str]:
        return [str(self._file), *(["--sentinel"] if self._sentinel else [])]

    @property
    def is_live(self) -> bool:
        """True if the process runs and is not stopped."""
        return self.process is not None and not self.stopped

    def kill(self) -> None:
        super().kill()
        self.stopped = False

    def stop(self) -> None:
        """SIGSTOP: its connections stay open without replies."""
        self.send(signal.SIGSTOP)
        self.stopped = True

    def resume(self) -> None:
        self.send(signal.SIGCONT)
        self.stopped = False

    def isolate(self) -> None:
        """Partition it from sentinels and other Redises; other clients can still reach it."""
        assert self.front is not None
        self.front.block(SENTINELS_AT, REDISES_AT)

    def stop_replication(self) -> None:
        """Partition it from other Redises: its replicas lag, and the sentinels do not notice."""
        assert self.front is not None
        self.front.block(REDISES_AT)

    def discard_in_flight(self) -> None:
        """Discard the bytes in flight from a killed process, and end the partitions."""
        assert self.front is not None
        self.front.cut()
        self.front.block()

    def rejoin(self) -> None:
        """End the partitions."""
        assert self.front is not None
        self.front.block()

    def restart(self) -> None:
        """Start it after it was killed, with its former role, until it is reconfigured."""
        self.start()

    async def ask(self, *parts: object) -> Any:
        """Send a command, and return its reply in RESP2, with text instead of bytes."""
        async with Client(
            port=self.port,
            decode_responses=True,
            protocol=2,
            socket_timeout=REPLY_TIMEOUT_S,
            socket_connect_timeout=REPLY_TIMEOUT_S,
        ) as client:
            return await client.execute_command(*parts)

    async def info(self, section: str) -> dict[str, Any]:
        """Return a section of INFO."""
        fields: dict[str, Any] = await self.ask("INFO", section)
        return fields
