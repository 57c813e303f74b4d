"""The command handler of a follower: it rejects every command, with the leader's address."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING

from genie.errors import Code
from genie.protocol import replies
from genie.server.peer import Input, Item, Peer
from genie.server.rejections import reject_item
from genie.server.scheduler import CommandScheduler

if TYPE_CHECKING:
    from genie.observability.stats import Stats


class FollowerHandler:
    """Rejects every command as `unavailable`; the error names the leader, where it is known.

    `max_bytes` bounds the queued commands of all connections.
    """

    is_leader = False
    leader: str | None = None
    """The leader's address for clients."""

    def __init__(self, stats: Stats, namespace: str, max_bytes: int) -> None:
        self._stats = stats
        self._namespace = namespace
        self._scheduler = CommandScheduler(max_bytes)
        self._scheduled: asyncio.Handle | None = None

    def submit(self, connection: Peer, items: Input, size: int) -> None:
        """Reject items: as many as fit into one batch at once, the rest after other connections were read."""
        self._scheduler.add(connection, items, size)
        if self._scheduled is None:
            self._run()

    def reject_all(self) -> None:
        """Reject everything that is queued, now: the connections get another handler."""
        while self._scheduler:
            self._scheduler.run_batch(self._reject)
        if self._scheduled is not None:
            self._scheduled.cancel()
            self._scheduled = None

    def on_disconnect(self, connection: Peer) -> None:
        """Do nothing: no requests are bound to connections of a follower."""

    def _run(self) -> None:
        self._scheduler.run_batch(self._reject)
        self._scheduled = asyncio.get_running_loop().call_soon(self._run) if self._scheduler else None

    def _reject(self, connection: Peer, items: Iterator[Item]) -> bool:
        why = self._describe_leader()
        for item in items:
            if connection.closed:
                continue
            rejected = reject_item(connection, item, why)
            if rejected is not None:
                self._stats.errors[rejected.code] += 1
                leader = self.leader if rejected.code == Code.UNAVAILABLE else None
                connection.outbox.append(replies.error(rejected, leader))
        connection.flush()
        if connection.closing and not connection.input_queue:
            connection.finish()
        return False

    def _describe_leader(self) -> str:
        if self.leader is None:
            return (
                f"this server does not lead the namespace {self._namespace!r}; its leader is unknown, or the store is "
                "unavailable"
            )
        return f"this server does not lead the namespace {self._namespace!r}; its leader is {self.leader}"
