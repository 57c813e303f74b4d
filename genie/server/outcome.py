"""The outcome of a batch: changes to store, and messages to send and connections to close once they are stored."""

from __future__ import annotations

from genie.core import Request
from genie.server.sessions import Outbound
from genie.storage.store import Change


class BatchOutcome:
    """The messages and changes of one batch. The pipeline owns it, and empties it for the next batch.

    Messages are in the `outbox` of each connection. Without `durable` no changes are collected.
    """

    __slots__ = ("changes", "closing", "dirty", "durable", "granted", "stored_below")

    def __init__(self, next_id: int = 1, *, durable: bool = True) -> None:
        self.durable = durable
        """True if the changes of the batch are collected for a store."""
        self.changes: dict[int, Change] = {}
        """Changes of the batch, by id of the request. None deletes the record."""
        self.stored_below = next_id
        """Upper bound of the ids in the store: a request with this id or a greater id was never stored."""
        self.dirty: list[Outbound] = []
        """Connections with messages in their outbox, or with `has_reply`."""
        self.granted: list[Outbound] = []
        """Connections with a request that was granted after a wait, to be flushed first. They may also be in `dirty`."""
        self.closing: list[Outbound] = []
        """Connections to close after the messages of the batch are sent."""

    def send(self, connection: Outbound | None, message: bytes) -> None:
        """Add a message that must not be deferred to the outbox of a connection.

        Do nothing if the connection is lost.
        """
        if connection is not None and not connection.closed:
            if not connection.has_reply:
                connection.has_reply = True
                if not connection.outbox:
                    self.dirty.append(connection)
            connection.outbox.append(message)

    def send_event(self, connection: Outbound, message: bytes) -> None:
        """Add a watch event, which may be deferred, to the outbox of a connection."""
        # Unlike in `send`, `has_reply` is not set.
        if not connection.outbox and not connection.has_reply:
            self.dirty.append(connection)
        connection.watch_bytes += len(message)
        connection.outbox.append(message)

    def store(self, request: Request) -> None:
        """Store the current state of a request with the batch."""
        if self.durable:
            self.changes[request.id] = request

    def delete(self, id: int) -> None:
        """Delete the record of the request with this id with the batch."""
        if self.durable:
            self.changes[id] = None

    def clear(self) -> None:
        """Drop all references to connections."""
        self.dirty.clear()
        self.granted.clear()
        self.closing.clear()
