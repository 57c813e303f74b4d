"""The command handler of a follower, which rejects every command with the leader's address."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from genie.errors import Code
from genie.protocol import replies
from genie.roles import Following, Role, Starting, StoreUnavailable
from genie.server.peer import CommandHandler, Input, Item, Peer
from genie.server.rejections import reject_item
from genie.server.scheduler import CommandScheduler

if TYPE_CHECKING:
    from genie.observability.stats import Stats
    from genie.server.connection import Connection


class FollowerHandler:
    """Rejects every command as `unavailable`; the error contains the leader's address if it is known.

    While more than `max_bytes` of commands are queued over all connections, reading is paused.
    """

    is_leader = False
    role: Role = Starting()
    """The role of this server, which the error of each rejected command names."""

    def __init__(self, stats: Stats, namespace: str, max_bytes: int) -> None:
        self._stats = stats
        self._namespace = namespace
        self._scheduler = CommandScheduler(max_bytes)
        self._scheduled: asyncio.Handle | None = None
        """The scheduled rejection of the next batch; None if no commands are queued."""
        self._leader_handler: CommandHandler | None = None
        """The pipeline to which the connections of `_awaiting_handover` are handed over. None: this server does not lead."""
        self._awaiting_handover: dict[Peer, Connection] = {}
        """Connections whose queued commands must be rejected before the handover. A peer, mapped to itself as a `Connection`."""

    def submit(self, connection: Peer, items: Input, size: int) -> None:
        """Queue commands and reject one batch immediately. The rest is rejected after other connections were read."""
        self._scheduler.add(connection, items, size)
        if self._scheduled is None:
            self._run()

    def hand_over(self, connections: Iterable[Connection], leader_handler: CommandHandler) -> None:
        """Make `leader_handler` the handler of each connection, because this server leads now.

        A connection with queued commands is handed over later, when all its queued commands are rejected. So the replies
        of each connection stay in the order of its commands, and the pipeline can start immediately.
        """
        self._leader_handler = leader_handler
        for connection in connections:
            if connection.input_queue:
                self._awaiting_handover[connection] = connection
            else:
                connection.handler = leader_handler

    def cancel_handover(self) -> None:
        """Keep the connections that were not handed over yet, because this server lost leadership."""
        self._leader_handler = None
        self._awaiting_handover.clear()

    def on_disconnect(self, connection: Peer) -> None:
        """Drop the reference to a lost connection. A follower has no requests to release."""
        self._awaiting_handover.pop(connection, None)

    def on_writable(self, connection: Peer) -> None:
        """Do nothing: a follower executes no slow commands."""

    def _run(self) -> None:
        """Reject one batch, and schedule the next batch if commands are left."""
        self._scheduler.run_batch(self._reject)
        self._scheduled = asyncio.get_running_loop().call_soon(self._run) if self._scheduler else None

    def _reject(self, connection: Peer, items: Iterator[Item]) -> None:
        """Send `unavailable` for each command."""
        reason = self._describe_leader()
        for item in items:
            if connection.closed:  # no reply can be sent
                continue
            rejection = reject_item(connection, item, reason)
            if rejection is not None:
                self._stats.errors[rejection.code] += 1
                leader = self._leader if rejection.code == Code.UNAVAILABLE else None
                connection.outbox.append(replies.error(rejection, leader))
        connection.flush()
        if not connection.input_queue:
            self._on_all_rejected(connection)

    def _on_all_rejected(self, connection: Peer) -> None:
        """Complete the handover of a connection if this server leads now: its queued commands are all rejected.

        Close the connection if the client has closed its sending side.
        """
        awaiting = self._awaiting_handover.pop(connection, None)
        if awaiting is not None and self._leader_handler is not None:
            awaiting.handler = self._leader_handler
        if connection.closing:
            connection.finish()

    @property
    def _leader(self) -> str | None:
        """The leader's address for clients; None if the leader is unknown."""
        return self.role.leader if isinstance(self.role, Following) else None

    def _describe_leader(self) -> str:
        """Return the error message for rejected commands: why this server does not execute them."""
        match self.role:
            case Following(leader=leader):
                reason = f"its leader is {leader}"
            case StoreUnavailable():
                reason = "its store is unavailable"
            case Starting():
                reason = "it is starting, and its store has not answered yet"
            case _:
                reason = "no leader is known yet"
        return f"this server does not lead the namespace {self._namespace!r}; {reason}"
