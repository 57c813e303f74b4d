"""One redis-server of several: it is known to the others by its port, and keeps what they told it in a file."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from redis.asyncio import Redis as Client

from ports import free_port
from proxy import Proxy
from servers import Redis

SENTINELS_AT = "127.0.0.2"
REDISES_AT = "127.0.0.3"
"""From where they connect to each other, where there are proxies which must tell them from others."""
ANSWER_S = 2.0
"""How long one that is asked may take: one that is stopped never answers."""


class Node(Redis):
    """A redis-server, or a sentinel. `lines` are its configuration, which it writes anew when it changes its part.

    `front` is a proxy before it: the others know it by that one's port, as does everybody whom they tell of it.
    """

    def __init__(self, folder: Path, *lines: str, sentinel: bool = False, front: Proxy | None = None) -> None:
        super().__init__(folder)
        while (folder / str(self.port)).exists():  # another of these has chosen it, and does not listen yet
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
        """By SIGSTOP."""
        self._sentinel = sentinel
        self._file = self.folder / "redis.conf"
        common = [f"port {self.port}", "bind 127.0.0.1", f"dir {self.folder}", "loglevel warning", "logfile log"]
        self._file.write_text("\n".join([*common, *lines, ""]))

    def __str__(self) -> str:
        return f"Redis at {self.port}"

    def arguments(self) -> list[str]:
        return [str(self._file), *(["--sentinel"] if self._sentinel else [])]

    @property
    def lives(self) -> bool:
        """It runs, and answers."""
        return self.process is not None and not self.stopped

    def kill(self) -> None:
        super().kill()
        self.stopped = False

    def stop(self) -> None:
        """SIGSTOP: its connections stay open, and nobody answers."""
        self.send(signal.SIGSTOP)
        self.stopped = True

    def resume(self) -> None:
        self.send(signal.SIGCONT)
        self.stopped = False

    def isolate(self) -> None:
        """Let neither sentinels nor other servers hear of it. It goes on, and so does everybody else who knows it."""
        assert self.front is not None
        self.front.part(SENTINELS_AT, REDISES_AT)

    def hush(self) -> None:
        """Let the other servers hear nothing of it: its replicas lag, and nobody sees it."""
        assert self.front is not None
        self.front.part(REDISES_AT)

    def forget(self) -> None:
        """It is dead, and what is on its way from it comes never."""
        assert self.front is not None
        self.front.cut()
        self.front.part()

    def rejoin(self) -> None:
        """The end of that."""
        assert self.front is not None
        self.front.part()

    def restart(self) -> None:
        """Start one that was killed. It comes back as what it was, until the others tell it better."""
        self.start()

    async def ask(self, *parts: object) -> Any:
        """One command and its answer, as RESP2 has it, with text for bytes."""
        async with Client(
            port=self.port,
            decode_responses=True,
            protocol=2,
            socket_timeout=ANSWER_S,
            socket_connect_timeout=ANSWER_S,
        ) as client:
            return await client.execute_command(*parts)

    async def info(self, section: str) -> dict[str, Any]:
        """A section of INFO."""
        found: dict[str, Any] = await self.ask("INFO", section)
        return found
