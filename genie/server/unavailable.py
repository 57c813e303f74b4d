"""Rejects the commands of a pipeline while the store is unavailable.

Three kinds of items are postponed: the end of a connection's input, a `bye` of which slices are left, and the rest of
the state of a resumed session.
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
        """The postponed items with their connections, in order."""
        self._with_postponed_bye: set[Peer] = set()
        """The connections whose `bye` is in `postponed`."""

    def run_batch(self) -> None:
        """Reject queued commands for the time of one batch."""
        self._scheduler.run_batch(self.reject, self.reject)

    def reject(self, connection: Peer, items: Iterator[Item]) -> None:
        """Reject commands of a connection. The errors follow the replies that wait for the batch in flight.

        If too many messages are in its outbox, the connection is aborted.
        """
        errors: list[RequestRejected] = []
        has_hello = self._collect_errors(connection, items, errors)
        if has_hello:
            # The later commands need the session of the rejected `hello`. So they must be rejected, too, even if the
            # store is available again by then.
            self._scheduler.replace_all(connection, partial(_error_or_item, connection))
        had_replies = bool(connection.outbox)
        self._notifier.reject_now(connection, errors)
        if had_replies and len(connection.outbox) > MAX_BUFFERED_REPLIES + MAX_BUFFERED_EVENTS:
            connection.abort()

    def queue_postponed(self) -> None:
        """Queue the postponed items, because the store is available again.

        The end of the input is queued after the commands of its connection. The state of a resumed session is queued
        before them, because it must precede all replies. A `bye` also is, because the commands after it are not
        executed.
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
        self._with_postponed_bye.clear()

    def _collect_errors(self, connection: Peer, items: Iterator[Item], errors: list[RequestRejected]) -> bool:
        """Append the errors for rejected items to `errors`, and postpone the others.

        Return whether the items include a `hello`. Commands after a postponed `bye` get no error.
        """
        has_hello = False
        for item in items:
            if item is END_OF_INPUT or item is SESSION_STATE:
                self.postponed.append((connection, item))
                continue
            if connection.session.ending is not None:
                if connection not in self._with_postponed_bye:  # the first item is the `bye`
                    self._with_postponed_bye.add(connection)
                    self.postponed.append((connection, item))
                continue
            has_hello = has_hello or isinstance(item, Hello)
            rejection = reject_item(connection, item)
            if rejection is not None:
                errors.append(rejection)
        return has_hello


def _error_or_item(connection: Peer, item: Item) -> Item:
    """Return the error that replaces an item that is not executed, or the item itself if it needs no error."""
    return reject_item(connection, item) or item
