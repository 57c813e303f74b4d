"""What a batch has caused, and what the pipeline does once the batch is stored: messages, changes, connections to close."""

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
        """Add a message to the outbox of a connection, for replies and for the outcome of a client's own request.

        Does nothing if the connection is lost.
        """
        if connection is not None and not connection.closed:
            if not connection.has_reply:
                connection.has_reply = True
                if not connection.outbox:
                    self.dirty.append(connection)
            connection.outbox.append(message)

    def send_event(self, connection: Outbound, message: bytes) -> None:
        """Add a watch event to the outbox. Unlike `send`, do not set `has_reply`, so that the event may be deferred."""
        if not connection.outbox and not connection.has_reply:
            self.dirty.append(connection)
        connection.watch_bytes += len(message)
        connection.outbox.append(message)

    def store(self, request: Request) -> None:
        """Add a request to the changes."""
        if self.durable:
            self.changes[request.id] = request

    def delete(self, id: int) -> None:
        """Add the deletion of a record, by the id of its request, to the changes."""
        if self.durable:
            self.changes[id] = None

    def clear(self) -> None:
        """Drop all references to connections."""
        self.dirty.clear()
        self.granted.clear()
        self.closing.clear()
