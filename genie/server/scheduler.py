"""Fair scheduling of client commands, in batches of bounded duration.

Each connection has a bounded input queue. The connections are served round robin: a turn of a connection ends after a
quantum of time or of commands. A connection with queued commands waits for its turn in one of three queues:

- *Busy* connections have sent much input at once, or have used up their quantum and have more commands queued. A connection
  that uses up its quantum repeatedly stays busy for a while. Each batch gives the busy connections at least one turn, so
  that the light connections cannot starve them. Their principals take turns.
- *Light* connections are all others. They run first, so a `ping` waits for at most one batch, however many connections flood
  the server (fq_codel schedules packets in the same way).
- *Slow* commands are those whose work grows with the state of the server, and long lines. A connection whose next command is
  slow waits in the third queue.

Thousands of connections may send commands at the same moment, or many new connections may each send one expensive
command, such as a request that searches for a deadlock. Then a batch may end before it has served all light connections.
The next batch begins with the principals that have few waiting connections, and have not used up a quantum recently. The
light connections of the other principals are *delayed*: their principals take turns, with one turn in each batch, however many
commands others send.

A batch executes at most one slow command, at its end, if `turns.py` permits it. The principals take turns with their
slow commands. A slow command is parked while its client does not read messages. Two kinds of work are done in slices,
which are queued like slow commands: the end of a session with many requests, and the report of the state of a resumed
session. The ends of all sessions together take turns like one more principal, because other clients wait for the locks.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from itertools import islice
from sys import maxsize

from genie import round_robin, work_time
from genie.protocol.framing import LONG_LINE_BYTES, SPLIT_BYTES, UnsplitLines, mark_long
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
"""Seconds for which the light connections of a principal are after those of others, because the principal has used up a
quantum or has had many waiting connections. Also the maximum time for which a connection with an overrun is after the others of
its principal."""

MAX_SAMPLE = 2_000
"""Number of the light connections that are next after a batch, of which those of each principal are counted, at most 1 ms."""

MIN_IN_SAMPLE = 5
"""A principal with at least this number of the next light connections is delayed, if it also has `MIN_SHARE` of them."""

MIN_SHARE = 0.01
"""The share of the next light connections from which a principal is delayed. Those of a client with several tokens may alternate
in the queue, or those of each token may follow those of another, so it does not suffice to compare a few neighbours."""

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

MAX_PAUSED = 32
"""Number of paused connections of a principal up to which the server reads from a connection whose commands are executed,
although too many bytes are queued in total. So a principal that sends long commands on few connections is served while
another one floods the server."""

MAX_RESUMED = 1_000
"""Maximum number of connections from which the server continues to read in one iteration of the event loop."""

Execute = Callable[[Peer, Iterator[Item]], Item | None]
"""Executes or rejects items of a connection in order. Returns the item before which it stopped, or None after the last
one."""

ENDINGS = ""
"""The name under which the ends of sessions wait in the third queue. No principal has this name."""


class CommandScheduler:
    """The input queues of all connections. While more than `max_bytes` are queued in total, reading is paused.

    What was read before the pause is queued, so that the total exceeds `max_bytes` by at most one read of each connection.
    """

    def __init__(self, max_bytes: int, turns: IterationTurns) -> None:
        """`turns` are shared with the other namespaces of the server."""
        # More than 16 fields: the queues, between which connections move, and the limits of a batch, which each turn checks.
        self.bytes = 0
        """Bytes of all queued commands. At the end of a batch, the bytes of its commands are subtracted."""
        self._max_bytes = max_bytes
        self._turns = turns
        self._clock = work_time.now
        self.light: deque[Peer] = deque()
        """Light connections with queued commands, except the delayed ones. The pipeline keeps references to the queues, so
        they are never replaced."""
        self.delayed: defaultdict[tuple[str | None, bool], deque[Peer]] = defaultdict(deque)
        """Delayed light connections, by the name of their principal, and whether they have a recent overrun themselves. No
        queue is empty."""
        self.busy: dict[str | None, deque[Peer]] = {}
        """Busy connections with queued commands, by the name of their principal. The next name is first."""
        self.slow: dict[str | None, deque[Peer]] = {}
        """Connections whose next command is slow, by the name of their principal or `ENDINGS`. The first name is served
        next."""
        self._overruns: dict[str | None, float] = {}
        """Time of the last turn that exceeded its quantum, or at which many light connections waited after a batch, by the name of
        the principal. The oldest time is first."""
        self._has_unserved_light = False
        """True if the last batch ended before it had served all light connections."""
        self._is_busy_first = False
        """True if the next batch begins with a turn of a busy connection. Then there is one."""
        self._parked: dict[Peer, None] = {}
        """Connections whose next command is slow, and whose clients do not read. Their bytes are not in `bytes`: they
        count as unread output (`Connection.blocked_bytes`)."""
        self._paused: dict[Peer, str | None] = {}
        """Connections from which reading is paused because of `max_bytes`, in the order in which they were paused, with the
        names of their principals."""
        self._paused_counts: Counter[str | None] = Counter()
        """The number of connections in `_paused`, by the name of their principal."""
        self._resumption: asyncio.Handle | None = None
        """The scheduled call of `_resume_paused`. None if it is not scheduled."""
        self._remaining_commands = 0
        """Number of commands that the current batch may still run. Negative after a turn that exceeded the limit."""
        self._finished_bytes = 0
        """Bytes of the commands that the current batch has executed."""

    def __bool__(self) -> bool:
        """Return whether commands are queued."""
        return bool(self.light or self.delayed or self.busy or self.slow)

    def add(self, connection: Peer, items: Input, size: int) -> None:
        """Queue commands of one connection in order. `size` is the number of their bytes.

        If too many bytes are queued for all connections, stop reading from this one, unless it has at most
        `LIGHT_BYTES`.
        """
        # The fast path is for a light connection without queued commands. `_add_more` handles all others.
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

    def check_partial_line(self, connection: Peer, size: int) -> None:
        """Stop reading from a connection with an incomplete line of `size` bytes if too many bytes are queued in total.

        Otherwise each connection could add a whole line, of up to a MiB, to the queued bytes. Few connections of each
        principal may add a shorter one: there may be thousands of principals.
        """
        if self.bytes > self._max_bytes and size > LIGHT_BYTES:
            may_complete = size <= LONG_LINE_BYTES and self._is_principal_light(connection)
            if not may_complete:
                self._pause(connection)

    def add_unfinished(self, connection: Peer, item: Item, items: Iterator[Item], size: int) -> None:
        """Queue the slow command `item` and the commands after it, which are left of an input that was executed at once.

        `size` is the number of bytes of the input.
        """
        self._count_queued(connection, size)
        self.add_slow(connection, item, items, size)

    def add_slow(self, connection: Peer, item: Item, items: Iterator[Item], size: int) -> None:
        """Queue the slow command `item` and the commands after it, in front of the queued commands of the connection.

        `size` is the number of bytes of their input, which are counted already.
        """
        commands = [item, *items]
        connection.input_queue.appendleft((iter(commands), len(commands), size))
        self._append_slow(connection)

    def add_first(self, connection: Peer, item: Item) -> None:
        """Queue an item in front of the queued commands of the connection."""
        if not connection.input_queue:
            self.light.append(connection)
        connection.input_queue.appendleft((iter((item,)), 1, 0))

    def _append_slow(self, connection: Peer) -> None:
        """Append a connection to the slow queue of its principal, or to that of the ending sessions."""
        if connection.session.ending is not None:
            name: str | None = ENDINGS
        else:
            name = principal_name(connection)
        round_robin.append(self.slow, name, connection)

    def unpark(self, connection: Peer) -> None:
        """Queue a parked connection again, because its client reads again or the connection is lost."""
        if connection in self._parked:
            del self._parked[connection]
            self.bytes += connection.queued_bytes
            self._append_slow(connection)

    def _add_more(self, connection: Peer, items: Input, size: int) -> None:
        """Queue commands of a connection that has commands queued, sent many bytes, or used much time."""
        self.unpark(connection)  # from a parked connection no commands are read: this is the end of its input
        if not connection.input_queue:
            if size > SPLIT_BYTES or connection.busy_until > self._clock():
                self._append_busy(connection)
            else:
                self.light.append(connection)
        count = maxsize if isinstance(items, UnsplitLines) else len(items)
        connection.input_queue.append((iter(items), count, size))
        self._count_queued(connection, size)

    def _count_queued(self, connection: Peer, size: int) -> None:
        """Add the bytes of an input. Stop reading if too many are queued for the connection or for all."""
        self.bytes += size
        connection.queued_bytes += size
        if self.bytes > self._max_bytes and connection.queued_bytes > LIGHT_BYTES:
            self._pause(connection)
        elif connection.queued_bytes > MAX_QUEUED_BYTES:
            connection.pause_input()

    def _pause(self, connection: Peer) -> None:
        """Stop reading from a connection, because too many bytes are queued for all connections."""
        self._add_paused(connection)
        connection.pause_input()

    def _add_paused(self, connection: Peer) -> None:
        """Add a connection to the paused ones, at the end. Do nothing if it is one of them."""
        if connection not in self._paused:
            name = self._paused[connection] = principal_name(connection)
            self._paused_counts[name] += 1

    def _discard_paused(self, connection: Peer) -> None:
        """Remove a connection from the paused ones. Do nothing if it is not one of them."""
        if connection in self._paused:
            name = self._paused.pop(connection)
            self._paused_counts[name] -= 1
            if not self._paused_counts[name]:
                del self._paused_counts[name]

    def _is_principal_light(self, connection: Peer) -> bool:
        """Return whether a connection belongs to a named principal with few paused connections."""
        principal = connection.principal
        return principal is not None and self._paused_counts[principal.name] <= MAX_PAUSED

    def run_batch(self, execute: Execute, execute_slow: Execute | None = None) -> None:
        """Run one batch: commands of light connections, then of busy connections, and at the end one slow command.

        The time of a batch, its commands and their bytes are limited. If connections are busy at the start, one of them
        gets a turn even if a limit is reached. Nothing is run if the batch must wait for its turn. Without
        `execute_slow`, `execute` must not stop before a slow command.
        """
        turns = self._turns
        limit_s = turns.begin_batch(id(self)) if turns.is_active else BATCH_S
        if limit_s:  # 0 if the batch must wait
            spent_s = turns.spent_s
            started = now = self._clock()
            end = now + limit_s
            self._remaining_commands = MAX_BATCH
            busy = self.busy
            is_turn_due = len(busy) > 0  # one turn, even if a limit of the batch is reached
            if self._has_unserved_light:
                self._delay_light(now)
                now = self._clock()  # the first turn does not include the time of `_delay_light`
            if self._is_busy_first:
                now = self._run_turn(round_robin.take_next(self.busy), execute, now)
                self._is_busy_first = is_turn_due = False
            if now < end:
                now = self._run_light(self.light, execute, now, end)
            # After an expensive command they wait for the next batch.
            if self.delayed and now < end + QUANTUM_S and not turns.is_exhausted:
                now = self._run_delayed(execute, now, max(end, now + QUANTUM_S))
            self._has_unserved_light = len(self.light) > 0 or len(self.delayed) > 0
            if busy:
                now = self._run_busy(execute, now, end, is_turn_due=is_turn_due)
            # The whole time of the batch. It includes the expensive commands, whose time was added already.
            turns.spent_s = spent_s + now - started
            if turns.spent_s > SHORT_S:
                turns.spend(0.0)  # checks the total, and schedules the end of the iteration
        if self.slow and execute_slow is not None and turns.begin_slow(id(self)):
            self._run_slow(execute_slow)
        self.bytes -= self._finished_bytes
        self._finished_bytes = 0
        if self._paused and self._resumption is None:
            self._resume_paused()

    def replace_all(self, connection: Peer, replace: Callable[[Item], Item]) -> None:
        """Replace each queued item of a connection by `replace(item)`, which is called when the item would be executed."""
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
        self.delayed.clear()
        self.busy.clear()
        self._is_busy_first = False
        self.slow.clear()
        self._parked.clear()
        self._paused.clear()
        self._paused_counts.clear()

    def _run_light(self, light: deque[Peer], execute: Execute, now: float, end: float) -> float:
        """Run commands of the connections in `light` until none are left or the batch has reached its limit.

        The limits are the time `end`, the remaining commands, and `MAX_BATCH_BYTES`. `now` is the current time; returns
        the time after the last turn.
        """
        clock = self._clock
        remaining_commands, finished_bytes = self._remaining_commands, self._finished_bytes  # locals are faster
        while light:
            connection = light.popleft()
            queue = connection.input_queue
            items, count, size = queue.popleft()
            if queue or count > CHUNK or size > CHUNK_BYTES:
                queue.appendleft((items, count, size))
                self._remaining_commands, self._finished_bytes = remaining_commands, finished_bytes
                now = self._run_turn(connection, execute, now)
                remaining_commands, finished_bytes = self._remaining_commands, self._finished_bytes
            else:  # the usual case: everything queued is one chunk
                remaining_commands -= count
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
            if now >= end or remaining_commands <= 0 or finished_bytes >= MAX_BATCH_BYTES:
                break
        self._remaining_commands, self._finished_bytes = remaining_commands, finished_bytes
        return now

    def _run_delayed(self, execute: Execute, now: float, end: float) -> float:
        """Run commands of delayed connections until none are left or the batch has reached its limit, of at least one of them.

        The principals take turns of a quantum. The connections of a principal that have an overrun themselves follow its
        others. `now` is the current time; returns the time after the last turn.
        """
        delayed = self.delayed
        while delayed:
            for key in [key for key in delayed if not key[1] or (key[0], False) not in delayed]:
                queue = delayed.pop(key)
                now = self._run_light(queue, execute, now, min(end, now + QUANTUM_S))
                if queue:
                    delayed[key] = queue  # after the other principals
                if now >= end or self._remaining_commands <= 0 or self._finished_bytes >= MAX_BATCH_BYTES:
                    return now
        return now

    def _run_busy(self, execute: Execute, now: float, end: float, *, is_turn_due: bool) -> float:
        """Run turns of busy connections until none are left or the batch has reached its limit, with `is_turn_due` at least one.

        `now` is the current time; returns the time after the last turn.
        """
        while self.busy and (
            is_turn_due or (now < end and self._remaining_commands > 0 and self._finished_bytes < MAX_BATCH_BYTES)
        ):
            if self._turns.is_exhausted:  # by a command of a light connection: the next batch begins with the due turn
                self._is_busy_first = is_turn_due
                break
            now = self._run_turn(round_robin.take_next(self.busy), execute, now)
            is_turn_due = False
        return now

    def _run_turn(self, connection: Peer, execute: Execute, now: float) -> float:
        """Run commands of a connection for one quantum. If commands are left, queue the connection again.

        `now` is the current time; returns the time after the turn.
        """
        queue, clock, started = connection.input_queue, self._clock, now
        end, min_remaining = now + QUANTUM_S, self._remaining_commands - QUANTUM
        max_commands = CHUNK if connection.busy_until < now + HEAVY_S else 1  # 1 if its last turn took very long
        is_next_slow = False
        while queue and not is_next_slow and self._remaining_commands > min_remaining and now < end:
            _, count, size = chunk = queue.popleft()
            if count > max_commands or size > CHUNK_BYTES:
                chunk = _split_off_chunk(queue, *chunk, max_commands)
            is_next_slow = self._run_chunk(connection, chunk, execute)
            now = clock()
        if is_next_slow:  # `_run_chunk` has queued the connection
            return now
        if now >= end or self._remaining_commands <= min_remaining:
            self._record_overrun(connection, started, now)
            if queue:
                self._append_busy(connection)
        elif queue:
            self.light.append(connection)
        return now

    def _run_chunk(self, connection: Peer, chunk: Queued, execute: Execute) -> bool:
        """Run one chunk.

        If `execute` stops before a slow command, queue the rest of the chunk as slow and return True.
        """
        items, count, size = chunk
        self._remaining_commands -= count
        slow = execute(connection, items)
        if slow is None:
            self._count_finished(connection, size)
        else:
            self.add_slow(connection, slow, items, size)
        return slow is not None

    def _run_slow(self, execute_slow: Execute) -> None:
        """Run the next slow command. Queue it again if slices of it are left; then also queue the commands after it."""
        connection = self._take_slow()
        if connection is None:
            return
        items, count, size = connection.input_queue.popleft()
        item, started, spent_s = next(items), self._clock(), self._turns.spent_s
        unfinished = execute_slow(connection, iter((item,)))
        if unfinished is not None:
            if count > 1:
                connection.input_queue.appendleft((items, count - 1, size))
                size = 0  # its bytes count as finished with the last command
            connection.input_queue.appendleft((iter((unfinished,)), 1, size))
            self._append_slow(connection)
        elif count > 1:
            connection.input_queue.appendleft((items, count - 1, size))
        else:
            self._count_finished(connection, size)
        if (now := self._clock()) - started >= QUANTUM_S:
            self._record_overrun(connection, started, now)
        self._turns.spent_s = spent_s  # `execute_slow` may have added a part of the time, which is counted once
        self._turns.spend(now - started)
        if connection.input_queue and unfinished is None:
            if connection.busy_until > now:
                self._append_busy(connection)
            else:
                self.light.append(connection)

    def _append_busy(self, connection: Peer) -> None:
        """Append a connection to the busy connections of its principal."""
        round_robin.append(self.busy, principal_name(connection), connection)

    def _take_slow(self) -> Peer | None:
        """Remove the connection whose slow command is next from its queue and return it. Return None if there is none.

        A connection whose client does not read is parked instead, unless it is lost or its session ends. Deferred events
        of a connection are sent first: otherwise the answer, which may be large, would be deferred, too, and would not count
        as unread output. Those of only one connection, because this takes time.
        """
        has_flushed = False
        while self.slow and not has_flushed:
            connection = round_robin.take_next(self.slow)
            must_run = connection.closed or connection.session.ending is not None
            if connection.deferred and not connection.write_blocked and not must_run:
                connection.flush_deferred()
                has_flushed = True
            if not connection.write_blocked or must_run:
                return connection
            self._parked[connection] = None
            self.bytes -= connection.queued_bytes
        return None

    def _delay_light(self, now: float) -> None:
        """Delay the light connections with a recent overrun, of their own or of their principal, and no others. Drop old overruns.

        Principals with many of the next light connections count as those with a recent overrun. The connections of a
        principal are delayed once in `OVERRUN_MEMORY_S`: the time is proportional to the number of the others.
        """
        overruns, light, delayed = self._overruns, self.light, self.delayed
        for name, overran_at in list(overruns.items()):
            if overran_at > now - OVERRUN_MEMORY_S:
                break
            del overruns[name]
        for (name, has_overrun), queue in list(delayed.items()):  # the delay of some may have ended
            if name not in overruns or (has_overrun and queue[0].overran_until <= now):
                light.extendleft(reversed(delayed.pop((name, has_overrun))))
        counts = Counter(map(principal_name, islice(light, MAX_SAMPLE)))
        min_count = max(MIN_IN_SAMPLE, min(len(light), MAX_SAMPLE) * MIN_SHARE)
        for name, count in counts.items():
            if count >= min_count and name is not None:  # without principals, the order of arrival is as fair
                self._record_principal(name, now)
        if not overruns:
            return
        for _ in range(len(light)):
            connection = light.popleft()
            name, has_overrun = principal_name(connection), connection.overran_until > now
            if has_overrun or name in overruns:
                delayed[name, has_overrun].append(connection)
            else:
                light.append(connection)

    def _record_overrun(self, connection: Peer, started: float, now: float) -> None:
        """Record that a connection used up its quantum in the turn from `started` to `now`.

        Make the connection busy if its previous overrun was recent. A single overrun does not suffice, because the
        whole process may have been paused.
        """
        self._record_principal(principal_name(connection), now)
        until = started + (now - started) / LIGHT_SHARE  # then the turn has taken only this share of the time
        if connection.overran_until > started:
            connection.busy_until = until
        # Limited, because it delays the connection after all others of its principal.
        connection.overran_until = min(until, now + OVERRUN_MEMORY_S)

    def _record_principal(self, name: str | None, now: float) -> None:
        """Record that a principal has used up a quantum, or has many waiting connections."""
        self._overruns.pop(name, None)  # so that the entry is added at the end
        self._overruns[name] = now

    def _count_finished(self, connection: Peer, size: int) -> None:
        """Subtract the bytes of finished commands from those of the connection. Resume reading if that was paused."""
        self._finished_bytes += size
        connection.queued_bytes -= size
        if connection.input_paused:
            self._resume_reading(connection)

    def _resume_reading(self, connection: Peer) -> None:
        """Resume reading from a paused connection, unless too many bytes are still queued for it or for all connections."""
        is_total_exceeded = self.bytes - self._finished_bytes > self._max_bytes
        is_light = connection.queued_bytes <= LIGHT_BYTES and self._is_principal_light(connection)
        if is_total_exceeded and not is_light:
            self._add_paused(connection)
        elif connection.queued_bytes <= MAX_QUEUED_BYTES:
            self._discard_paused(connection)
            connection.resume_input()

    def _resume_paused(self) -> None:
        """Resume reading from up to `MAX_RESUMED` connections, in the order in which they were paused.

        The others follow in the next iteration of the event loop. Nothing is resumed while too many bytes are queued in
        total.
        """
        self._resumption = None
        if self.bytes <= self._max_bytes:
            for connection in [*islice(self._paused, MAX_RESUMED)]:
                self._discard_paused(connection)
                if connection.queued_bytes <= MAX_QUEUED_BYTES:
                    connection.resume_input()
            if self._paused:
                self._resumption = asyncio.get_running_loop().call_soon(self._resume_paused)


def _split_off_chunk(queue: InputQueue, items: Iterator[Item], count: int, size: int, max_commands: int) -> Queued:
    """Return a chunk of at most `max_commands` of `count` items of `size` bytes. Put the other items back into `queue`.

    The bytes of an input count as finished after its last command. So the items that are put back keep `size`, and the
    chunk has 0 bytes.
    """
    if isinstance(items, UnsplitLines):
        lines = mark_long([line for line in items.split_next() if line])
        if items:  # an unknown number of lines is left
            queue.appendleft((items, maxsize, size))
            size = 0  # no limit by bytes: these lines have at most `SPLIT_BYTES`, or they are one line
        items, count = iter(lines), len(lines)
    limit = max_commands
    if size > CHUNK_BYTES:  # long commands: about `CHUNK_BYTES`, but at least one command
        commands_in_chunk_bytes = count * CHUNK_BYTES // size  # fewer if `size` includes earlier chunks
        limit = max(1, min(max_commands, commands_in_chunk_bytes))
    if count <= limit:
        return items, count, size
    queue.appendleft((items, count - limit, size))
    return iter([*islice(items, limit)]), limit, 0  # a copy, because the queue has `items` now
