"""What was said and not yet taken up: bounded, in the order of who spoke, and nobody who says much keeps others waiting."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from operator import length_hint

from genie.server.connection import Connection, Item
from genie.server.dispatch import MAX_TURN, Dispatch

MAX_BATCH = 2_000
"""Commands in one batch. An `inspect`, the one with a long answer, ends its batch."""

MAX_BATCH_BYTES = 512 << 10
"""Bytes of commands in one batch, more or less. A line may name thousands of resources: it is worth many commands."""

MAX_AHEAD = 256 << 10
"""Bytes of commands that may wait for one connection, before no more of it are read."""


class Turns:
    """Connections take turns to have their commands stepped. `max_bytes` may wait of all of them, before no more are read."""

    def __init__(self, max_bytes: int) -> None:
        self.waiting: deque[Connection] = deque()
        """Those in whose `inbox` something waits, each once."""
        self.bytes = 0
        """What waits came in so many."""
        self._max_bytes = max_bytes

    def add(self, connection: Connection, items: Sequence[Item], size: int) -> None:
        """Commands of one connection, in order, that came in `size` bytes."""
        if not connection.inbox:
            self.waiting.append(connection)
        connection.inbox.append((iter(items), len(items), size))
        if size:
            self.bytes += size
            connection.ahead += size
            if connection.ahead > MAX_AHEAD or self.bytes > self._max_bytes:
                connection.pause()

    def take_up(self, dispatch: Dispatch) -> None:
        """Step what waits, as much as one batch may be. Whoever has more goes to the end of the line."""
        take, waiting, room, room_bytes = dispatch.take, self.waiting, MAX_BATCH, MAX_BATCH_BYTES
        while waiting and room > 0 and room_bytes > 0:
            connection = waiting.popleft()
            inbox = connection.inbox
            items, count, size = inbox.popleft()
            looked = take(connection, items if count <= MAX_TURN else islice(items, MAX_TURN))
            left = length_hint(items) if looked or count > MAX_TURN else 0
            if left:
                inbox.appendleft((items, left, size))
            else:
                self._done_with(connection, size)
                room_bytes -= size
            if inbox:
                waiting.append(connection)
            if looked:
                return
            room -= count - left

    def send_away(self) -> Iterator[tuple[Connection, Iterable[Item]]]:
        """Nobody's turn will come: each connection with what it has said. What is added meanwhile waits."""
        sent_away, self.waiting = self.waiting, deque()
        for connection in sent_away:
            inbox, connection.inbox = connection.inbox, deque()
            for items, _, size in inbox:
                yield connection, items
                self._done_with(connection, size)

    def _done_with(self, connection: Connection, size: int) -> None:
        self.bytes -= size
        connection.ahead -= size
        if connection.paused:
            connection.resume()
