"""What the pipeline does with commands while the store is unavailable: it rejects them, and delays the ends of connections."""

from __future__ import annotations

from collections.abc import Iterator

from genie.errors import RequestRejected
from genie.protocol.commands import Hello
from genie.server.notifier import Notifier
from genie.server.peer import END_OF_INPUT, Item, Peer
from genie.server.rejections import reject_item
from genie.server.scheduler import CommandScheduler
from genie.server.watches import MAX_BUFFERED_EVENTS

MAX_BUFFERED_REPLIES = 10_000
"""Maximum number of replies in an outbox while the store is unavailable. A connection with more is aborted."""


class Rejecter:
    """Rejects the queued commands of all connections, because the store is unavailable."""

    def __init__(self, scheduler: CommandScheduler, notifier: Notifier) -> None:
        self._scheduler = scheduler
        self._notifier = notifier
        self.disconnected: list[Peer] = []
        """Connections that were lost while the store was unavailable."""

    def run_batch(self) -> None:
        """Reject queued commands for the time of one batch."""
        self._scheduler.run_batch(self.reject, self._reject_one)

    def reject(self, connection: Peer, items: Iterator[Item]) -> None:
        """Reject commands. The errors follow replies that wait for the batch in flight.

        A connection with too many messages in its outbox is aborted.
        """
        errors: list[RequestRejected] = []
        if self._collect_errors(connection, items, errors):
            # Otherwise the commands after the `hello` could be executed later, without the session that it requested.
            for later_items in self._scheduler.take_all(connection):
                self._collect_errors(connection, later_items, errors)
        had_replies = bool(connection.outbox)
        self._notifier.reject_now(connection, errors)
        if had_replies and len(connection.outbox) > MAX_BUFFERED_REPLIES + MAX_BUFFERED_EVENTS:
            connection.abort()

    def finish(self) -> None:
        """Queue the ends of the lost connections, because the store is available again."""
        for connection in self.disconnected:
            self._scheduler.add(connection, [END_OF_INPUT], size=0)
        self.disconnected.clear()

    def clear(self) -> None:
        """Drop all references to connections."""
        self.disconnected.clear()

    def _reject_one(self, connection: Peer, item: Item) -> None:
        self.reject(connection, iter((item,)))

    def _collect_errors(self, connection: Peer, items: Iterator[Item], errors: list[RequestRejected]) -> bool:
        """Append the errors for rejected items to `errors`. Return whether the items include a `hello`.

        The end of a connection is kept until the store is available again.
        """
        has_hello = False
        for item in items:
            if item is END_OF_INPUT:
                self.disconnected.append(connection)
                continue
            has_hello = has_hello or isinstance(item, Hello)
            rejection = reject_item(connection, item)
            if rejection is not None:
                errors.append(rejection)
        return has_hello
