"""Fair scheduling of client commands, in batches of bounded duration.

Each connection has a bounded input queue. The queues are served round robin; a turn ends after a quantum of time or of
commands. There are three queues:

- *Light* connections run first, so a `ping` waits for at most one batch, however many connections flood the server (fq_codel
  schedules packets in the same way).
- *Busy* connections have sent much input at once, or have used up their quantum and have more commands queued. A connection
  that uses up its quantum repeatedly stays busy for a while. Each batch gives the busy connections at least one turn, so
  that the light connections cannot starve them.
- *Slow* commands, whose work grows with the state of the server or whose lines are long, wait in the third queue.

Many new connections may each send one expensive command, such as a request that searches for a deadlock. If light
connections are left after a batch, the next batch begins with the connections of principals whose turns have not exceeded
the quantum recently. The other principals take turns.

A batch executes at most one slow command, at its end, and `turns.py` decides whether one may begin. The principals take turns. A
slow command is parked while its client does not read messages. A session with many requests ends in slices, which are queued
like slow commands. The ends of all sessions together take turns like one more principal, because other clients wait for the
locks. The state of a resumed session is also sent in slices.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from sys import maxsize

from genie.protocol.framing import SPLIT_BYTES, UnsplitLines, mark_long
from genie.server.peer import Input, InputQueue, Item, Peer, Queued, principal_name
from genie.server.turns import BATCH_S, SHORT_S, IterationTurns

QUANTUM_S = 0.0005
"""Time limit of one turn of a connection, in seconds. A chunk that exceeds the limit is completed."""

QUANTUM = 200
"""Maximum number of commands of one turn, however fast they are."""

LIGHT_SHARE = 0.01
"""A connection that used up its quantum twice stays busy until its last turn took at most this share of the time since
the turn began: after a turn of 1 ms, for 100 ms."""

OVERRUN_MEMORY_S = 1.0
"""Seconds for which a turn that exceeds its quantum puts the light connections of its principal after those of others."""

MAX_BATCH = 2_000
"""Maximum number of commands of one batch. A turn that exceeds the limit is completed."""

MAX_BATCH_BYTES = 512 << 10
"""Maximum bytes of the commands of one batch. The bytes of one read are counted when its last command is finished."""

CHUNK = 32
"""Maximum number of commands of one chunk. The clock is read between chunks."""

HEAVY_S = 0.5
"""A connection that stays busy for longer than this has used 5 ms or more for a turn. Each of its chunks is one command."""

CHUNK_BYTES = 4 << 10
"""A chunk of long commands has fewer commands, about this many bytes: a command with thousands of resources takes long."""

MAX_QUEUED_BYTES = 64 << 10
"""Queued bytes of one connection beyond which the server does not read from it."""

LIGHT_BYTES = 4 << 10
"""Queued bytes of one connection up to which the server reads from it although too many bytes are queued in total. So a client
that sends few commands is served while many others flood the server."""

MAX_RESUMED = 1_000
"""Maximum number of connections from which the server continues to read in one iteration of the event loop."""

Execute = Callable[[Peer, Iterator[Item]], Item | None]
"""Executes or rejects commands of a connection. Returns the item that is not finished, if there is one."""

ENDINGS = ""
"""The name under which the ends of sessions wait in the third queue. No principal has this name."""


class CommandScheduler:
    """The input queues of all connections. While more than `max_bytes` are queued in total, reading is paused.

    What was read before the pause is queued, so that the total exceeds `max_bytes` by at most one read of each connection.
    """

    def __init__(self, max_bytes: int, turns: IterationTurns) -> None:
        """`turns` are shared with the other namespaces of the server."""
        self.bytes = 0
        """Bytes of all queued commands. The commands that the current batch has executed are subtracted at its end."""
        self._max_bytes = max_bytes
        self._turns = turns
        self._clock = time.monotonic  # not the event loop's clock: uvloop reads its clock only once per iteration
        self.light: deque[Peer] = deque()
        """Light connections with queued commands. The pipeline keeps references to `light` and `busy`, so they are never
        replaced."""
        self.busy: deque[Peer] = deque()
        """Busy connections with queued commands."""
        self.slow: dict[str | None, deque[Peer]] = {}
        """Connections whose next command is slow, by the name of their principal or `ENDINGS`. The first name is served
        next."""
        self._overruns: dict[str | None, float] = {}
        """By name of the principal, when one of its turns last exceeded its quantum. The oldest time is first."""
        self._left_light = False
        """True if the last batch has left light connections."""
        self._parked: dict[Peer, None] = {}
        """Connections whose next command is slow, and whose clients do not read. Their bytes are not in `bytes`."""
        self._paused: dict[Peer, None] = {}
        """Connections from which reading is paused because of `max_bytes`, in the order in which they were paused."""
        self._resumption: asyncio.Handle | None = None
        """The scheduled call of `_resume_paused`. None if it is not scheduled."""
        self._room = 0
        """Number of commands that the current batch may still run."""
        self._finished_bytes = 0
        """Bytes of the commands that the current batch has executed."""

    def __bool__(self) -> bool:
        """Return whether commands are queued."""
        return bool(self.light or self.busy or self.slow)

    def add(self, connection: Peer, items: Input, size: int) -> None:
        """Queue commands of one connection in order. `size` is the number of bytes that were read for these commands.

        The fast path is for a light connection without queued commands; `_add_more` handles all others. Reading is paused if
        too many bytes are queued for all connections, except from a connection with at most `LIGHT_BYTES`.
        """
        queue = connection.input_queue
        if queue or size > SPLIT_BYTES or connection.busy_until:
            self._add_more(connection, items, size)
            return
        self.light.append(connection)
        # `items` has a length: `UnsplitLines`, which has none, is always longer than `SPLIT_BYTES`.
        queue.append((iter(items), len(items), size))  # type: ignore[arg-type]
        connection.queued_bytes = size
        self.bytes += size
        if self.bytes > self._max_bytes and size > LIGHT_BYTES:
            self._pause(connection)

    def add_slow(self, connection: Peer, item: Item, items: Iterator[Item], size: int = 0) -> None:
        """Queue a slow command and the commands after it, in front of the queued commands of the connection."""
        rest = [item, *items]
        connection.input_queue.appendleft((iter(rest), len(rest), size))
        self._append_slow(connection)

    def add_first(self, connection: Peer, item: Item) -> None:
        """Queue an item in front of the queued commands of the connection."""
        if not connection.input_queue:
            self.light.append(connection)
        connection.input_queue.appendleft((iter((item,)), 1, 0))

    def _append_slow(self, connection: Peer) -> None:
        if connection.session.ending is not None:
            name: str | None = ENDINGS
        else:
            name = principal_name(connection)
        self.slow.setdefault(name, deque()).append(connection)

    def unpark(self, connection: Peer) -> None:
        """Continue with the commands of a connection whose client reads again, or that was lost."""
        if connection in self._parked:
            del self._parked[connection]
            self.bytes += connection.queued_bytes
            self._append_slow(connection)

    def _add_more(self, connection: Peer, items: Input, size: int) -> None:
        """Queue commands of a connection that has commands queued, sent many bytes, or used much time."""
        self.unpark(connection)  # this input is the end of a parked connection
        if not connection.input_queue:
            if size > SPLIT_BYTES or connection.busy_until > self._clock():
                self.busy.append(connection)
            else:
                self.light.append(connection)
        count = maxsize if isinstance(items, UnsplitLines) else len(items)
        connection.input_queue.append((iter(items), count, size))
        self.bytes += size
        connection.queued_bytes += size
        if self.bytes > self._max_bytes and connection.queued_bytes > LIGHT_BYTES:
            self._pause(connection)
        elif connection.queued_bytes > MAX_QUEUED_BYTES:
            connection.pause_input()

    def _pause(self, connection: Peer) -> None:
        """Stop reading from a connection, because too many bytes are queued for all connections."""
        self._paused[connection] = None
        connection.pause_input()

    def run_batch(self, execute: Execute, execute_slow: Execute | None = None) -> None:
        """Run queued commands up to the limits of one batch: of light connections, of busy connections, and a slow command.

        Busy connections that had commands at the start of the batch get at least one turn. Without `execute_slow`,
        `execute` never stops before a slow command. Nothing is run if the batch must wait for its turn.
        """
        turns = self._turns
        limit_s = turns.begin_batch(id(self)) if turns.is_active else BATCH_S
        if limit_s:
            spent_s = turns.spent_s
            started = now = self._clock()
            end = now + limit_s
            self._room = MAX_BATCH
            busy = self.busy
            due_turns = len(busy)  # if not 0, one turn even if the limits of the batch are reached
            if self._overruns and self._left_light:
                self._order_light(now)
            now = self._run_light(execute, now, end)
            while busy and (due_turns or (now < end and self._room > 0 and self._finished_bytes < MAX_BATCH_BYTES)):
                if turns.is_exhausted:  # by a command of a light connection: the next batch begins with this turn
                    self.light.appendleft(busy.popleft())
                    self._left_light = False  # so that it does not change the order
                    break
                now = self._run_turn(busy.popleft(), execute, now)
                due_turns = 0
            turns.spent_s = spent_s + now - started  # with the expensive commands, which were added already
            if turns.spent_s > SHORT_S:
                turns.spend(0.0)
        if self.slow and execute_slow is not None and turns.begin_slow(id(self)):
            self._run_slow(execute_slow)
        self.bytes -= self._finished_bytes
        self._finished_bytes = 0
        if self._paused and self._resumption is None:
            self._resume_paused()

    def replace_all(self, connection: Peer, replace: Callable[[Item], Item]) -> None:
        """Replace each queued item of a connection, at the moment at which the item would be executed."""
        queue = connection.input_queue
        for _ in range(len(queue)):
            items, count, size = queue.popleft()
            if isinstance(items, UnsplitLines):
                lines: list[Item] = []
                while items:
                    lines += [line for line in items.split_next() if line]
                items, count = iter(lines), len(lines)
            queue.append((map(replace, items), count, size))

    def clear(self) -> None:
        """Drop all references to connections."""
        self.light.clear()
        self.busy.clear()
        self.slow.clear()
        self._parked.clear()

    def _run_light(self, execute: Execute, now: float, end: float) -> float:
        """Run commands of light connections until none are left, or until a limit of the batch is reached.

        `now` is the current time and `end` the end of the batch; returns the time after the last turn.
        """
        light, clock, room, finished_bytes = self.light, self._clock, self._room, self._finished_bytes
        while light:
            connection = light.popleft()
            queue = connection.input_queue
            items, count, size = queue.popleft()
            if queue or count > CHUNK or size > CHUNK_BYTES:
                queue.appendleft((items, count, size))
                self._room, self._finished_bytes = room, finished_bytes
                now = self._run_turn(connection, execute, now)
                room, finished_bytes = self._room, self._finished_bytes
            else:  # the usual case: everything queued is one chunk
                room -= count
                slow = execute(connection, items)
                if slow is not None:
                    self.add_slow(connection, slow, items, size)
                else:
                    # `_count_finished` inlined: a call costs 5 % of the instructions of a read with one command.
                    finished_bytes += size
                    connection.queued_bytes = 0
                    if connection.input_paused:
                        self._finished_bytes = finished_bytes
                        self._resume_reading(connection)
                started, now = now, clock()
                if now - started >= QUANTUM_S:
                    self._record_overrun(connection, started, now)
            if now >= end or room <= 0 or finished_bytes >= MAX_BATCH_BYTES:
                self._left_light = len(light) > 0
                break
        else:
            self._left_light = False
        self._room, self._finished_bytes = room, finished_bytes
        return now

    def _run_turn(self, connection: Peer, execute: Execute, now: float) -> float:
        """Run commands of a connection for one quantum, and requeue the connection if commands are left.

        `now` is the current time; returns the time after the turn.
        """
        queue, clock, started = connection.input_queue, self._clock, now
        end, min_room, stopped = now + QUANTUM_S, self._room - QUANTUM, False
        max_commands = CHUNK if connection.busy_until < now + HEAVY_S else 1
        while queue and not stopped and self._room > min_room and now < end:
            queued = queue.popleft()  # (items, count, bytes)
            if queued[1] > max_commands or queued[2] > CHUNK_BYTES:
                queued = _split_off_chunk(queue, *queued, max_commands)
            stopped = self._run_chunk(connection, queued, execute)
            now = clock()
        if stopped:
            return now
        if now >= end or self._room <= min_room:
            self._record_overrun(connection, started, now)
            if queue:
                self.busy.append(connection)
        elif queue:
            self.light.append(connection)
        return now

    def _run_chunk(self, connection: Peer, queued: Queued, execute: Execute) -> bool:
        """Run one chunk. Return whether `execute` has stopped before a slow command."""
        items, count, size = queued
        self._room -= count
        slow = execute(connection, items)
        if slow is None:
            self._count_finished(connection, size)
        else:
            self.add_slow(connection, slow, items, size)
        return slow is not None

    def _run_slow(self, execute_slow: Execute) -> None:
        """Run the next slow command, and queue what is left of it and the commands after it."""
        connection = self._take_slow()
        if connection is None:
            return
        items, count, size = connection.input_queue.popleft()
        item, started, spent_s = next(items), self._clock(), self._turns.spent_s
        unfinished = execute_slow(connection, iter((item,)))
        if unfinished is not None:
            connection.input_queue.appendleft((items, count - 1, size))
            connection.input_queue.appendleft((iter((unfinished,)), 1, 0))
            self._append_slow(connection)
        elif count > 1:
            connection.input_queue.appendleft((items, count - 1, size))
        else:
            self._count_finished(connection, size)
        if (now := self._clock()) - started >= QUANTUM_S:
            self._record_overrun(connection, started, now)
        self._turns.spent_s = spent_s
        self._turns.spend(now - started)
        if connection.input_queue and unfinished is None:
            (self.busy if connection.busy_until > now else self.light).append(connection)

    def _take_slow(self) -> Peer | None:
        """Remove and return the connection whose slow command is next, or None. Park connections whose clients do not read."""
        while self.slow:
            principal = next(iter(self.slow))
            connections = self.slow.pop(principal)
            connection = connections.popleft()
            if connections:
                self.slow[principal] = connections  # after the other principals
            if not connection.write_blocked or connection.closed or connection.session.ending is not None:
                return connection
            self._parked[connection] = None
            self.bytes -= connection.queued_bytes
        return None

    def _order_light(self, now: float) -> None:
        """Order the light connections by the last overrun of their principal, and then by their own. Drop old overruns."""
        for name, overran in list(self._overruns.items()):
            if overran > now - OVERRUN_MEMORY_S:
                break
            del self._overruns[name]
        overruns, light = self._overruns, self.light
        ordered = sorted(
            light, key=lambda each: (overruns.get(principal_name(each), 0.0), max(each.overran_until, now))
        )
        light.clear()
        light.extend(ordered)

    def _record_overrun(self, connection: Peer, started: float, now: float) -> None:
        """Record that a connection used up its quantum. Make the connection busy if its previous overrun was recent.

        A single overrun does not make it busy, because the whole process may have been paused. The turn has lasted from
        `started` to `now`.
        """
        name = principal_name(connection)
        self._overruns.pop(name, None)
        self._overruns[name] = now
        until = started + (now - started) / LIGHT_SHARE
        if connection.overran_until > started:
            connection.busy_until = until
        connection.overran_until = until

    def _count_finished(self, connection: Peer, size: int) -> None:
        """Subtract the bytes of finished commands from the queued bytes, and resume reading if it was paused."""
        self._finished_bytes += size
        connection.queued_bytes -= size
        if connection.input_paused:
            self._resume_reading(connection)

    def _resume_reading(self, connection: Peer) -> None:
        """Resume reading from a paused connection, unless too many bytes are still queued for it or for all connections."""
        if self.bytes - self._finished_bytes > self._max_bytes:
            self._paused[connection] = None
        elif connection.queued_bytes <= MAX_QUEUED_BYTES:
            self._paused.pop(connection, None)
            connection.resume_input()

    def _resume_paused(self) -> None:
        """Resume reading from some connections, in the order in which they were paused, if the total is within its limit.

        The others follow in the next iteration of the event loop.
        """
        self._resumption = None
        if self.bytes <= self._max_bytes:
            for connection in [*islice(self._paused, MAX_RESUMED)]:
                del self._paused[connection]
                if connection.queued_bytes <= MAX_QUEUED_BYTES:
                    connection.resume_input()
            if self._paused:
                self._resumption = asyncio.get_running_loop().call_soon(self._resume_paused)


def _split_off_chunk(queue: InputQueue, items: Iterator[Item], count: int, size: int, max_commands: int) -> Queued:
    """Split a queued input: return a chunk of at most `max_commands`, and put the other commands back into `queue`.

    The bytes of an input count as finished after its last command. So the commands that are put back keep `size`, and the
    chunk has 0 bytes.
    """
    if isinstance(items, UnsplitLines):
        lines = mark_long([line for line in items.split_next() if line])
        if items:  # more lines are left, of unknown number
            queue.appendleft((items, maxsize, size))
            size = 0  # no limit by bytes: these lines have at most `SPLIT_BYTES`, or they are one line
        items, count = iter(lines), len(lines)
    # Limit long commands to about `CHUNK_BYTES`, at least one. `size` may include earlier chunks: then the chunk is shorter.
    limit = max_commands if size <= CHUNK_BYTES else max(1, min(max_commands, count * CHUNK_BYTES // size))
    if count <= limit:
        return items, count, size
    queue.appendleft((items, count - limit, size))
    return iter([*islice(items, limit)]), limit, 0  # a copy, because the queue has `items` now
