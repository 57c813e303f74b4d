"""Fair scheduling of client commands, in batches that are bounded by time.

Each connection has a bounded input queue. The queues are served round robin, each for a quantum of time or of commands.
A connection that used up its quantum is *busy* as long as it has more queued, and for a while after it did so again. So
is one that sent much at once. Every other one is *light*. Light connections run first, so a `ping` waits for the rest of
one batch, however many connections flood the server (fq_codel schedules packets in the same way). Each batch gives the
busy connections at least one turn: the light ones cannot starve them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from operator import length_hint
from sys import maxsize

from genie.protocol.framing import SPLIT_BYTES, UnsplitLines
from genie.server.peer import Input, InputQueue, Item, Peer, Queued

BATCH_S = 0.005
"""Seconds of one batch. The turn that is running then is completed."""

QUANTUM_S = 0.0005
"""Seconds of one turn. The commands of a chunk that is running then are completed."""

QUANTUM = 200
"""Commands of one turn, however quick they are."""

LIGHT_SHARE = 0.01
"""A connection that used up its quantum twice is busy until its last turn is only this share of the time since."""

MAX_BATCH = 2_000
"""Commands of one batch. The turn that is running then is completed."""

MAX_BATCH_BYTES = 512 << 10
"""Bytes of the commands of one batch, rounded up to what was read at once."""

CHUNK = 32
"""Commands that run before the clock is read again."""

CHUNK_BYTES = 4 << 10
"""Bytes of them. One command may name thousands of resources, and then takes as long as many."""

MAX_QUEUED_BYTES = 64 << 10
"""Bytes of queued commands of one connection. The server reads no more of it until it has run some of them."""

Execute = Callable[[Peer, Iterator[Item]], bool]
"""Runs commands of a connection. True: it stopped before their end, so that other connections get their turn."""


class CommandScheduler:
    """The input queues of all connections. Beyond `max_bytes` of queued commands no connection is read."""

    def __init__(self, max_bytes: int) -> None:
        self.bytes = 0
        """Bytes of all queued commands."""
        self._max_bytes = max_bytes
        self._clock = time.monotonic  # not the event loop's: uvloop reads its own once an iteration
        self.light: deque[Peer] = deque()
        """Light connections that have commands queued; neither queue is ever replaced."""
        self.busy: deque[Peer] = deque()
        """Busy ones."""
        self._paused: dict[Peer, None] = {}
        """Connections that are paused because of all queued bytes, not only of their own."""
        self._room = self._room_bytes = 0
        """Commands, and bytes of them, that the batch may still run."""

    def __bool__(self) -> bool:
        """Return whether commands are queued."""
        return bool(self.light or self.busy)

    def add(self, connection: Peer, items: Input, size: int) -> None:
        """Queue items of one connection, in order, that were read as `size` bytes."""
        if not connection.input_queue:
            if size > SPLIT_BYTES or (connection.busy_until and connection.busy_until > self._clock()):
                self.busy.append(connection)
            else:
                self.light.append(connection)
        connection.input_queue.append((iter(items), maxsize if isinstance(items, UnsplitLines) else len(items), size))
        if size:
            self.bytes += size
            connection.queued_bytes += size
            if self.bytes > self._max_bytes:
                self._paused[connection] = None
                connection.pause_input()
            elif connection.queued_bytes > MAX_QUEUED_BYTES:
                connection.pause_input()

    def run_batch(self, execute: Execute) -> None:
        """Run queued commands, as many as fit into one batch."""
        light, busy, clock = self.light, self.busy, self._clock
        now = clock()
        end = now + BATCH_S
        self._room, self._room_bytes = MAX_BATCH, MAX_BATCH_BYTES
        busy_wait = bool(busy)
        while light:
            connection = light.popleft()
            queue = connection.input_queue
            queued = queue.popleft()
            if not queue and queued[1] <= CHUNK and queued[2] <= CHUNK_BYTES:  # nearly always: all of it is one chunk
                self._run_chunk(connection, queued, execute)
                began, now = now, clock()
                if now - began >= QUANTUM_S:
                    self._overran(connection, began, now)
                if queue:
                    light.append(connection)
            else:
                queue.appendleft(queued)
                now = self._run_turn(connection, execute, now)
            if now >= end or self._room <= 0 or self._room_bytes <= 0:
                if busy_wait:
                    break
                return
        while busy:
            now = self._run_turn(busy.popleft(), execute, now)
            if now >= end or self._room <= 0 or self._room_bytes <= 0:
                return

    def take_all(self, connection: Peer) -> Iterator[Iterator[Item]]:
        """Remove and return everything that is queued of a connection whose turn it is."""
        queue = connection.input_queue
        while queue:
            items, _, size = queue.popleft()
            yield items
            self._count_finished(connection, size)

    def clear(self) -> None:
        """Drop all references to connections."""
        self.light.clear()
        self.busy.clear()

    def _run_turn(self, connection: Peer, execute: Execute, now: float) -> float:
        """Run commands of a connection for its quantum. Takes and returns the time."""
        queue, clock, began = connection.input_queue, self._clock, now
        end, last, more = now + QUANTUM_S, self._room - QUANTUM, True
        while queue and more and self._room > last and now < end:
            queued = queue.popleft()
            if queued[1] > CHUNK or queued[2] > CHUNK_BYTES:
                queued = _first_chunk(queue, *queued)
            more = self._run_chunk(connection, queued, execute)
            now = clock()
        if now >= end or self._room <= last:
            self._overran(connection, began, now)
            if queue:
                self.busy.append(connection)
        elif queue:
            self.light.append(connection)
        return now

    def _run_chunk(self, connection: Peer, queued: Queued, execute: Execute) -> bool:
        """Run these commands. False: other connections get their turn before the rest of them, or before any more."""
        items, count, size = queued
        self._room -= count
        stopped = execute(connection, items)
        if stopped and (left := length_hint(items)):
            connection.input_queue.appendleft((items, left, size))
        else:
            self.bytes -= size
            self._room_bytes -= size
            connection.queued_bytes -= size
            if connection.input_paused:
                self._resume(connection)
        return not stopped

    def _overran(self, connection: Peer, began: float, now: float) -> None:
        """A connection used up its quantum. Once may be a pause of the process, and no work; twice makes it busy."""
        until = began + (now - began) / LIGHT_SHARE
        if connection.overran_until > began:
            connection.busy_until = until
        connection.overran_until = until

    def _count_finished(self, connection: Peer, size: int) -> None:
        self.bytes -= size
        connection.queued_bytes -= size
        if connection.input_paused:
            self._resume(connection)

    def _resume(self, connection: Peer) -> None:
        """Resume a paused connection, and those paused for the sum, if the queued bytes are below the bounds again."""
        if self.bytes > self._max_bytes:
            self._paused[connection] = None
            return
        if connection.queued_bytes <= MAX_QUEUED_BYTES:
            self._paused.pop(connection, None)
            connection.resume_input()
        while self._paused:
            paused, _ = self._paused.popitem()
            if paused.queued_bytes <= MAX_QUEUED_BYTES:
                paused.resume_input()


def _first_chunk(queue: InputQueue, items: Iterator[Item], count: int, size: int) -> Queued:
    """Cut off what runs in one go, and put the rest back. Its bytes count as finished when the last of it is."""
    if isinstance(items, UnsplitLines):
        lines = [line for line in items.split_next() if line]
        if items:
            queue.appendleft((items, maxsize, size))
            size = 0
        items, count = iter(lines), len(lines)
    limit = CHUNK if size <= CHUNK_BYTES else max(1, min(CHUNK, count * CHUNK_BYTES // size))
    if count <= limit:
        return items, count, size
    queue.appendleft((items, count - limit, size))
    return iter([*islice(items, limit)]), limit, 0
