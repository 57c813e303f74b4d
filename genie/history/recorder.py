"""Records the history on the leader: writes the steps of the lock manager as lines of a file, after they are stored.

Requests and releases are recorded as the lines that the client sent, which takes little time. Everything else, such as
the grant of a waiting request, is recorded as events. After the commit, many lines at a time are joined, and a thread
writes them. If the disk or the archiver cannot keep up, lines are dropped and counted. A commit never waits for the
recording.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Final

import structlog

from genie import core
from genie.access import Principal
from genie.core import (
    HELD,
    NO_TIMEOUT_MS,
    SUCCESS,
    WAITING,
    Locked,
    LockManager,
    Queued,
    Released,
    Request,
    State,
    shown_note,
)
from genie.core.deadlines import NEVER
from genie.core.view import find_blockers
from genie.history import records
from genie.history.redaction import Redaction, redaction_key
from genie.history.retention import Retention
from genie.history.writer import HistoryWriter, clean_up_command, namespace_directory
from genie.lock_modes import S, UnitCount
from genie.processes import run_process

JOINED_LINES: Final = 32
"""Stored lines are joined when they are as many. This is few, so that the lines are still in the processor's cache."""
LONG_BYTES: Final = 64 << 10
"""Stored lines are also joined when they have as many bytes: a line may have a MiB, and is decoded when it is joined."""
WRITTEN_BYTES: Final = 256 << 10
"""Joined lines are given to the writer when they have as many bytes."""
FLUSH_INTERVAL_S: Final = 0.25
"""Stored lines are written after this time, however few they are. A killed server loses the events of this time."""
PART_REQUESTS: Final = 100
"""Number of requests of a snapshot that are encoded together."""
MAX_WAITS_FOR: Final = 4
"""Maximum number of blockers in the line of a waiting request."""

CLEAN_UP_INTERVAL_S: Final = 3_600.0
"""Time between two runs of the archiver, also on a server that is idle or does not lead."""
NEEDS_CONTEXT: Final = -1.0
"""Value of `Recorder._marked_at` if the next command needs a mark with its whole context."""
NO_MARK: Final = -1
"""Value of `Recorder._mark_end` and `Recorder._note_end` if the mark is joined already."""

log = structlog.get_logger()

Positions = dict[str, tuple[float, int]]
"""The positions of a request in rearranged wait queues: (negated priority, ticket), by name."""

_Fields = tuple[
    int,
    tuple[str, ...],
    tuple[str, ...],
    str | None,
    float,
    float,
    float,
    bool,
    str | None,
    str | None,
    dict[str, UnitCount] | None,
]
"""The fields of a request in its line, up to its units."""


class Recorder:
    """Records the steps of one leadership as lines.

    A *mark* is a line with the context of the commands that follow: the time, the principal, the note of the session.
    """

    def __init__(self, writer: HistoryWriter, manager: LockManager, redaction: Redaction) -> None:
        # A mark is a line with the time, the principal or the session's note of the commands in the lines after it.
        # More than 16 fields, because each command reads the state of the marks: a field of a field takes two look-ups.
        self._lines: list[bytes] = []
        """Lines that are not joined yet, in order."""
        self._marked_at = NEEDS_CONTEXT
        """The time of the last mark. The line of a command that is executed at another time needs a mark."""
        self._marked_for: Principal | None = None
        """The principal of the last mark. The line of a command of another principal needs a mark."""
        self._mark_end = NO_MARK
        """The length of `_lines` after the last mark was appended. If `_lines` still has this length, no line follows
        the mark."""
        self._marked_note: str | None = None
        """The note of the session in the last mark. The line of a command of a session with another note needs a mark."""
        self._earlier_note: str | None = None
        """The value of `_marked_note` before the last mark of a note."""
        self._note_end = NO_MARK
        """The length of `_lines` after the last mark of a note was appended. If `_lines` still has this length, no line
        follows the mark."""
        self._stored_count = 0
        """Number of `_lines` whose effects are stored. The other lines are not written yet, because they may be lost
        with the leadership."""
        self._stored_bytes = 0
        """The bytes of the stored lines, approximately."""
        self._is_flush_due = False
        """True if `on_stored` must write all lines, because the timer has fired during a commit."""
        self._joined: list[bytes] = []
        """Joined lines that the writer does not have yet."""
        self._joined_bytes = 0
        self._writer = writer
        self._manager = manager
        self._offset_ms = manager.unix_offset_ms
        """Unix time is the lock manager's time plus this."""
        self._redaction = redaction
        self._decoder = records.RawDecoder()
        """Decodes the lines again if names must be redacted."""
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def begin_turn(self, now: float, principal: Principal | None, note: str | None = None) -> list[Any]:
        """Prepare for commands of `principal` that are executed at `now`, and return the list for their lines.

        The dispatcher appends the line of each request that is granted at once, and of each release that ends a
        request. `note` is the note of the session. `now` is the lock manager's time (ms), as in the other methods.
        """
        if now != self._marked_at or principal is not self._marked_for:
            self._mark(now, principal)
        if note != self._marked_note:
            self._mark_note(note)
        return self._lines

    def on_events(self, events: list[core.Event], now: float, line: object = None) -> None:
        """Record the events of a step whose line the dispatcher does not append. Must be called before the next step.

        If the step is a request that the client sent as one line, `line` is this line. A request that waits is then
        recorded as this line.
        """
        first = events[0]
        if len(events) == 1:
            if type(first) is Locked:
                request = first.request
                self._lines.append(records.LOCKED % (now + self._offset_ms, request.id, request.fence))
                return
            # A request that is moved on arrival causes further events, because other requests are moved, too.
            if type(first) is Queued and type(line) is bytes and first.request.state is WAITING:
                self._lines += (records.WAITS % _first_blockers(self._manager, first.request), line)
                return
            if type(first) is Released and first.reason is SUCCESS:
                if now != self._marked_at:
                    self._mark(now, self._marked_for)
                self._lines.append(records.RELEASE % first.request.id)
                return
        at = now + self._offset_ms
        lines = [self._to_line(event, at) for event in events]
        self._lines += [records.encode(each) for each in lines if each is not None]
        if isinstance(first, Queued) and first.request.state is WAITING and first.request.moved is not None:
            self._lines.append(records.encode(records.Moved(at, first.request.id, _positions(first.request))))

    def on_id_skipped(self, now: float) -> None:
        """Append a mark with the next id, because a rejected request has used an id.

        A reader counts requests from the id in the last context, so it would assign the skipped id to the next request.
        """
        note = self._marked_note
        self._mark(now, self._marked_for, with_context=True)
        if note is not None:  # a context resets the note of the session
            self._mark_note(note)

    def _mark(self, now: float, principal: Principal | None, *, with_context: bool = False) -> None:
        """Append a mark for the lines that follow: only their time if the rest of their context is unchanged.

        `with_context` appends the whole context in any case.
        """
        self._drop_unused_note()
        lines, at = self._lines, now + self._offset_ms
        needs_context = with_context or self._marked_at == NEEDS_CONTEXT or principal is not self._marked_for
        if len(lines) == self._mark_end:  # no line follows the last mark: replace it
            replaced = lines.pop()
            needs_context = needs_context or replaced.startswith(records.CONTEXT)
        if needs_context:
            name = None if principal is None else principal.name
            context = records.Context(at, self._manager.next_id, self._manager.next_fence, name)
            lines.append(records.encode(context))
            self._marked_note = None
        else:
            lines.append(records.TIME % at)
        self._marked_at, self._marked_for, self._mark_end = now, principal, len(lines)

    def _mark_note(self, note: str | None) -> None:
        """Append a mark with the note of the session for the lines that follow, unless the last mark has the same note."""
        self._drop_unused_note()
        if note != self._marked_note:
            self._lines.append(records.encode(records.Session(note)))
            self._earlier_note, self._marked_note = self._marked_note, note
            self._note_end = len(self._lines)

    def _drop_unused_note(self) -> None:
        """Remove the last mark of a note if no line follows it."""
        if len(self._lines) == self._note_end:
            self._lines.pop()
            self._stored_count = min(self._stored_count, len(self._lines))
            self._marked_note, self._note_end = self._earlier_note, NO_MARK

    def on_stored(self) -> None:
        """Record that the effects of all lines so far are stored. Join and write the lines if they are many or long."""
        lines = self._lines
        self._stored_bytes += sum(map(len, lines[self._stored_count :]))
        self._stored_count = stored = len(lines)
        if self._is_flush_due:
            self.flush()
        elif stored >= JOINED_LINES or self._stored_bytes >= LONG_BYTES:
            self._join()
            if self._joined_bytes >= WRITTEN_BYTES:
                self._write()
        if self._timer is None and stored:
            self._timer = self._loop.call_later(FLUSH_INTERVAL_S, self._on_timer)

    def _on_timer(self) -> None:
        """Write all lines, or during a commit, let `on_stored` write them."""
        self._timer = None
        if self._stored_count == len(self._lines):
            self.flush()
        else:  # a mark in the stored lines may belong to lines that are not stored yet, so all must be written together
            self._is_flush_due = True

    def flush(self) -> None:
        """Write all lines. The effects of all lines must be stored."""
        self._drop_unused_note()
        lines = self._lines
        self._is_flush_due = False
        if len(lines) == self._mark_end:  # no line follows the last mark
            lines.pop()
        self._stored_count = len(lines)
        if lines:
            self._join()
        self._write()

    def _join(self) -> None:
        """Join all lines, with redacted names and without superfluous text such as spaces."""
        lines = self._lines
        text = b"\n".join(lines) + b"\n"
        if self._redaction.prefixes:
            text = records.encode_lines(map(self._redaction.redact_line, self._decoder.decode(text)))
        elif len(text) > records.MAX_UNCHECKED_BYTES * len(lines):
            text = b"\n".join(map(records.without_padding, lines)) + b"\n"
        lines.clear()
        self._stored_count = self._stored_bytes = 0
        self._mark_end = self._note_end = NO_MARK
        self._joined.append(text)
        self._joined_bytes += len(text)

    def _write(self) -> None:
        """Pass the joined lines to the writer. The next command needs a context, because its line may begin a file."""
        if self._joined_bytes:
            self._writer.write(b"".join(self._joined))
        self._joined.clear()
        self._joined_bytes = 0
        self._marked_at, self._mark_end = NEEDS_CONTEXT, NO_MARK

    def stop(self) -> None:
        """Write the lines whose effects are stored, drop the others, and end the recording.

        `History.join` waits until the lines are on the disk.
        """
        if self._timer is not None:
            self._timer.cancel()
        del self._lines[self._stored_count :]
        self.flush()
        self._writer.close()

    # -- lines --------------------------------------------------------------------------------------------

    def write_snapshot(self) -> Iterator[None]:
        """Write the requests that the leader takes over, in parts: yield after each. To be called before the first event."""
        table = self._manager.table
        held, waiting = list(table.held.values()), list(table.waiting.values())
        live_count = len(held) + len(waiting)
        if not live_count:
            return
        waiting_parts: list[bytes] = []
        waiting_bytes = 0
        for start in range(0, len(waiting), PART_REQUESTS):
            part = self._encode_carried(waiting[start : start + PART_REQUESTS], WAITING)
            waiting_parts.append(part)
            waiting_bytes += len(part)
            if waiting_bytes > self._writer.retention.snapshot_bytes:  # the writer rejects the snapshot
                held.clear()
                break
            yield
        # The thread encodes the held requests, because a million of them take seconds. A request that is released or
        # extended before it is encoded is still recorded correctly, because its end or its extension follows.
        held_parts = (
            self._encode_carried(held[start : start + PART_REQUESTS], HELD)
            for start in range(0, len(held), PART_REQUESTS)
        )
        self._writer.write_snapshot(live_count, chain(held_parts, waiting_parts), waiting_bytes)

    def _encode_carried(self, requests: Iterable[Request], state: State) -> bytes:
        """Return the encoded lines of requests that were in `state` when the leader took over."""
        offset_ms, was_held = self._offset_ms, state is HELD
        lines = []
        for request in requests:
            deadline = None if request.deadline >= NEVER else request.deadline + offset_ms
            fence = request.fence if was_held else 0
            positions = None if was_held else _positions(request)
            at, fields = request.since + offset_ms, self._fields(request)
            lines.append(records.Carried(at, *fields, fence=fence, deadline=deadline, positions=positions))
        return records.encode_lines(map(self._redaction.redact_line, lines))

    def _to_line(self, event: core.Event, at: float) -> records.Line | None:  # noqa: PLR0911 - one for each event
        """Return the line of an event at a time in Unix ms, or None for an event that is not recorded, such as an error."""
        if isinstance(event, Locked):
            return records.Locked(at, event.request.id, event.request.fence)
        if isinstance(event, Released):
            cycle = event.cycle.owners if isinstance(event, core.Deadlocked) else ()
            return records.Released(at, event.request.id, event.reason, cycle)
        if isinstance(event, Queued):
            is_waiting = event.request.state is WAITING
            waits_for = tuple(_first_blockers(self._manager, event.request)) if is_waiting else ()
            return records.Queued(at, *self._fields(event.request), waits_for)
        if isinstance(event, (core.Granted, core.Taken)):
            return records.Granted(at, *self._fields(event.request), fence=event.request.fence)
        if isinstance(event, core.Extended):
            return records.Extended(at, event.request.id, event.transaction_timeout_ms)
        if isinstance(event, core.Moved):
            return records.Moved(at, event.request.id, _positions(event.request))
        return None

    def _fields(self, request: Request) -> _Fields:
        """Return the fields of a request up to its units."""
        # With redaction, the note of a request with `anyOf` is left out: it may contain the name of a resource that the
        # request was not granted, and that would have to be redacted.
        drops_note = bool(self._redaction.prefixes) and request.context.choice_digest is not None
        return (
            request.id,
            request.exclusive,
            request.shared,
            request.transaction,
            request.priority,
            min(request.queue_timeout_ms, NO_TIMEOUT_MS),
            request.transaction_timeout_ms,
            request.release_on_disconnect,
            request.context.principal,
            None if drops_note else shown_note(request),
            request.units or None,
        )


def _positions(request: Request) -> Positions | None:
    """Return the positions of a request in rearranged wait queues, or None if it was not moved."""
    if request.moved is None:
        return None
    return {name: (negated_priority, ticket) for name, (negated_priority, ticket, _) in request.moved.items()}


def _first_blockers(manager: LockManager, request: Request) -> list[int]:
    """Return the ids of at most `MAX_WAITS_FOR` blockers of a waiting request: holders, or else the first waiters."""
    if manager.table.specials:
        blockers, _total = find_blockers(manager.table, request, MAX_WAITS_FOR)
        ids = [blocker.id for blocker in sorted(blockers, key=lambda blocker: not blocker.held)]
        return list(dict.fromkeys(ids))[:MAX_WAITS_FOR]
    return _blocking_holders(manager, request) or _first_exclusive_waiters(manager, request)


def _blocking_holders(manager: LockManager, request: Request) -> list[int]:
    """Return the ids of at most `MAX_WAITS_FOR` holders that conflict with a request for plain names."""
    found: list[int] = []
    for name, mode in request.modes():
        resource = manager.table.resources.get(name)
        if resource is not None and (mode != S or resource.exclusive_count):  # shared locks do not block each other
            for holder in resource.holders.values():
                if holder.owner != request.owner and holder.id not in found:
                    found.append(holder.id)
                    if len(found) == MAX_WAITS_FOR:
                        return found
    return found


def _first_exclusive_waiters(manager: LockManager, request: Request) -> list[int]:
    """Return the ids of the first exclusive waiters for the names of a request, except its own owner's: at most `MAX_WAITS_FOR`."""
    found: list[int] = []
    for name, _mode in request.modes():
        resource = manager.table.resources.get(name)
        queue = None if resource is None else resource.wait_queue
        entry = None if queue is None else queue.exclusive.first
        if entry is not None:
            _priority, _ticket, waiter = entry
            if waiter.owner != request.owner and waiter.id not in found:
                found.append(waiter.id)
    return found[:MAX_WAITS_FOR]


class History:
    """The history of one namespace on this server. Creates a recorder for each leadership.

    Raises ValueError if the directory cannot be created or written.
    """

    def __init__(
        self, directory: str, namespace: str, server: str, retention: Retention, redacted: Sequence[str]
    ) -> None:
        self.directory = namespace_directory(directory, namespace)
        self._namespace, self._server, self._retention = namespace, server, retention
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.directory).close()
            self._redaction = Redaction(redacted, redaction_key(self.directory) if redacted else b"")
        except OSError as error:
            raise ValueError(f"GENIE_HISTORY_DIR: cannot write to {self.directory}: {error.strerror}") from None
        self._writer: HistoryWriter | None = None
        """The writer of the current or last leadership. None before the first leadership."""
        self._dropped_before = 0
        """Number of writes that were dropped in earlier leaderships, or by the archivers that `keep_clean` has run."""

    def start_recorder(self, manager: LockManager) -> Recorder:
        """Return the recorder of a new leadership.

        Its history begins with the requests that `manager` has taken over.
        """
        if self._writer is not None:
            self._dropped_before += self._writer.dropped
        self._writer = HistoryWriter(self.directory, self._namespace, self._server, self._retention)
        return Recorder(self._writer, manager, self._redaction)

    @property
    def dropped(self) -> int:
        """Number of dropped writes. Each write contains many events."""
        return self._dropped_before + (0 if self._writer is None else self._writer.dropped)

    async def keep_clean(self) -> None:
        """Archive the complete files and delete the expired ones every `CLEAN_UP_INTERVAL_S`, until cancelled."""
        while True:
            try:
                # If this is cancelled, another archiver continues the work.
                process = await run_process(clean_up_command(self.directory, self._retention))
                self._dropped_before += int(process.stdout or 0)
            except OSError as error:
                log.warning(
                    "history archiver start failed, retrying",
                    namespace=self._namespace,
                    reason=str(error),
                    retry_s=CLEAN_UP_INTERVAL_S,
                )
            await asyncio.sleep(CLEAN_UP_INTERVAL_S)

    def join(self, timeout_s: float) -> None:
        """Wait until a stopped recording is written, but at most `timeout_s` seconds."""
        if self._writer is not None:
            self._writer.join(timeout_s)
