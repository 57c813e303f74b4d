"""The command handler of a follower. It rejects every command, with the leader's address."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from genie.errors import Code
from genie.observability.roles import describe_outage, unix_begin
from genie.protocol import replies
from genie.roles import Following, Role, Starting, StoreUnavailable
from genie.server.peer import CommandHandler, Input, Item, Peer
from genie.server.rejections import reject_item
from genie.server.scheduler import CommandScheduler
from genie.server.turns import IterationTurns

if TYPE_CHECKING:
    from genie.observability.stats import Stats
    from genie.server.connection import Connection


class FollowerHandler:
    """Rejects every command as `unavailable`; the error contains the leader's address if it is known.

    While more than `max_bytes` of commands are queued over all connections, reading is paused.
    """

    is_leader = False

    def __init__(
        self,
        stats: Stats,
        namespace: str,
        max_bytes: int,
        read_role: Callable[[], Role],
        turns: IterationTurns | None = None,
    ) -> None:
        self._stats = stats
        self._namespace = namespace
        self._read_role = read_role
        """Returns the role of this server, which the error of each rejected command names."""
        self._scheduler = CommandScheduler(max_bytes, turns or IterationTurns())
        self._scheduled: asyncio.Handle | None = None
        """The scheduled rejection of the next batch. None if no commands are queued."""
        self._leader_handler: CommandHandler | None = None
        """The pipeline to which the connections of `_awaiting_handover` are handed over, while this server leads."""
        self._awaiting_handover: dict[Peer, Connection] = {}
        """Connections whose queued commands must be rejected before the handover. The value is the same object as the
        key, with the type `Connection`."""

    def submit(self, connection: Peer, items: Input, size: int) -> None:
        """Queue commands and reject one batch immediately. The rest is rejected after other connections were read."""
        self._scheduler.add(connection, items, size)
        if self._scheduled is None:
            self._run()

    def on_partial_line(self, connection: Peer, size: int) -> None:
        """Stop reading from a connection with an incomplete line of `size` bytes if too many bytes are queued."""
        self._scheduler.check_partial_line(connection, size)

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
        """Keep the connections that are not handed over yet, because this server does not lead any longer."""
        self._leader_handler = None
        self._awaiting_handover.clear()

    def on_disconnect(self, connection: Peer) -> None:
        """Drop all references to a lost connection. A follower has no requests to release."""
        self._awaiting_handover.pop(connection, None)
        connection.session.dispose()

    def on_writable(self, connection: Peer) -> None:
        """Do nothing: a follower executes no slow commands."""

    def _run(self) -> None:
        """Reject one batch, and schedule the next batch if commands are left."""
        self._scheduler.run_batch(self._reject)
        self._scheduled = asyncio.get_running_loop().call_soon(self._run) if self._scheduler else None

    def _reject(self, connection: Peer, items: Iterator[Item]) -> None:
        """Send `unavailable` for each command. After the last queued command, hand the connection over if this server leads."""
        role = self._read_role()
        leader = role.leader if isinstance(role, Following) else None
        reason = f"this server does not lead the namespace {self._namespace!r}; {_why_not_leading(role)}"
        for item in items:
            if connection.closed:  # no reply can be sent
                continue
            rejection = reject_item(connection, item, reason)
            if rejection is not None:
                self._stats.errors[rejection.code] += 1
                # The leader would reject a malformed line, too, so the error of such a line does not name the leader.
                is_unavailable = rejection.code == Code.UNAVAILABLE
                connection.outbox.append(replies.error(rejection, leader if is_unavailable else None))
        connection.flush()
        if connection.input_queue:
            return
        handed_over = self._awaiting_handover.pop(connection, None)
        if handed_over is not None and self._leader_handler is not None:
            handed_over.handler = self._leader_handler
        if connection.closing:  # the client has closed its sending side
            connection.finish()


def _why_not_leading(role: Role) -> str:
    """Return why a server with this role does not execute commands."""
    match role:
        case Following(leader=leader):
            return f"the leader is {leader}"
        case StoreUnavailable(outage=outage):
            return describe_outage(unix_begin(outage))
        case Starting():
            return "this server is starting, and the store has not answered yet"
        case _:
            return "no leader is known yet"
