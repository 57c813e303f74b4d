"""Who takes what connections bring: the pipeline of a server that leads, or the handler of one that doesn't."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from genie.errors import Code
from genie.protocol import replies
from genie.server.scheduler import CommandScheduler

if TYPE_CHECKING:
    from genie.observability.stats import Stats
    from genie.server.connection import Connection, Input, Item


class CommandHandler(Protocol):
    """What a connection hands its lines to."""

    leads: bool
    """Whether commands are carried out here."""

    def submit(self, connection: Connection, items: Input, size: int) -> None:
        """Lines of one connection, in order, that came in `size` bytes."""

    def gone(self, connection: Connection) -> None:
        """A connection has ended."""


class FollowerHandler:
    """Answers every command with `unavailable` and, where that is known, the address of the server that leads."""

    leads = False
    leader: str | None = None

    def __init__(self, stats: Stats, namespace: str, max_bytes: int) -> None:
        self._stats = stats
        self._namespace = namespace
        self._scheduler = CommandScheduler(max_bytes)
        self._scheduled: asyncio.Handle | None = None

    def _why(self) -> str:
        if self.leader is None:
            return (
                f"this server does not lead the namespace {self._namespace!r}, and knows of none that does "
                "(or can't reach the store)"
            )
        return f"this server does not lead the namespace {self._namespace!r}; {self.leader} does"

    def submit(self, connection: Connection, items: Input, size: int) -> None:
        """Refuse commands: at once as many as fit into one batch, the rest when others were read in between."""
        self._scheduler.add(connection, items, size)
        if self._scheduled is None:
            self._run()

    def complete(self) -> None:
        """Refuse what is queued, now: the connections get another handler."""
        while self._scheduler:
            self._scheduler.run_batch(self._refuse)
        if self._scheduled is not None:
            self._scheduled.cancel()
            self._scheduled = None

    def _run(self) -> None:
        self._scheduler.run_batch(self._refuse)
        self._scheduled = asyncio.get_running_loop().call_soon(self._run) if self._scheduler else None

    def _refuse(self, connection: Connection, items: Iterator[Item]) -> bool:
        why = self._why()
        for item in items:
            if connection.closed:
                continue
            rejected = connection.unavailable(item, why)
            if rejected is not None:
                self._stats.errors[rejected.code] += 1
                leader = self.leader if rejected.code == Code.UNAVAILABLE else None
                connection.outbox.append(replies.error(rejected, leader))
        connection.flush()
        if connection.closing and not connection.input_queue:
            connection.finish()
        return False

    def gone(self, connection: Connection) -> None:
        """It had nothing here."""
