"""Rejects the commands of a pipeline while the store is unavailable.

The ends of connections, a `bye` that has ended some requests, and the rest of the state of resumed sessions, are postponed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from genie.errors import RequestRejected
from genie.protocol.commands import Hello
from genie.server.notifier import Notifier
from genie.server.peer import END_OF_INPUT, SESSION_STATE, Item, Peer
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
        self.postponed: list[tuple[Peer, Item]] = []
        """Connections with the end of their input, with an unfinished `bye`, or with the rest of the state of their session."""
        self._leaving: set[Peer] = set()
        """The connections whose unfinished `bye` is in `postponed`."""

    def run_batch(self) -> None:
        """Reject queued commands for the time of one batch."""
        self._scheduler.run_batch(self.reject, self.reject)

    def reject(self, connection: Peer, items: Iterator[Item]) -> None:
        """Reject commands. The errors follow replies that wait for the batch in flight.

        A connection with too many messages in its outbox is aborted.
        """
        errors: list[RequestRejected] = []
        if self._collect_errors(connection, items, errors):
            # The `hello` is rejected, so later commands must not be executed, even if the store is available again when they are
            # next: they would lack its session.
            self._scheduler.replace_all(connection, partial(_error_or_item, connection))
        had_replies = bool(connection.outbox)
        self._notifier.reject_now(connection, errors)
        if had_replies and len(connection.outbox) > MAX_BUFFERED_REPLIES + MAX_BUFFERED_EVENTS:
            connection.abort()

    def queue_postponed(self) -> None:
        """Queue the postponed items, because the store is available again.

        The state of a resumed session is queued before the commands of its connection, because it must precede all replies. So
        is a `bye`, because the commands after it are not executed.
        """
        for connection, item in self.postponed:
            if item is END_OF_INPUT:
                self._scheduler.add(connection, [item], size=0)
            else:
                self._scheduler.add_first(connection, item)
        self.clear()

    def clear(self) -> None:
        """Drop all references to connections."""
        self.postponed.clear()
        self._leaving.clear()

    def _collect_errors(self, connection: Peer, items: Iterator[Item], errors: list[RequestRejected]) -> bool:
        """Append the errors for rejected items to `errors`. Return whether the items include a `hello`.

        What `postponed` contains waits until the store is available again. Commands after an unfinished `bye` get no error.
        """
        has_hello = False
        for item in items:
            if item is END_OF_INPUT or item is SESSION_STATE:
                self.postponed.append((connection, item))
                continue
            if connection.session.ending is not None:
                if connection not in self._leaving:  # the first item is the `bye`
                    self._leaving.add(connection)
                    self.postponed.append((connection, item))
                continue
            has_hello = has_hello or isinstance(item, Hello)
            rejection = reject_item(connection, item)
            if rejection is not None:
                errors.append(rejection)
        return has_hello


def _error_or_item(connection: Peer, item: Item) -> Item:
    """Return the error for an item that is not executed, or the item itself if it needs no error."""
    return reject_item(connection, item) or item
