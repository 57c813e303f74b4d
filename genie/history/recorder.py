"""Records the history on the leader: what the lock manager did, once it is stored, as lines of a file.

The server appends what happened to a list, which is all that a command costs. After the commit, many events at a time are
encoded, and a thread writes them. If the disk cannot keep up, events are dropped and counted; a commit never waits for it.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from genie import core
from genie.core import HELD, NO_TIMEOUT_MS, WAITING, LockManager, Request
from genie.core.deadlines import NEVER
from genie.core.model import Owner
from genie.history import records
from genie.history.records import TIMEOUT_MS
from genie.history.writer import (
    HistoryWriter,
    Retention,
    clean_up_command,
    name_digest,
    namespace_directory,
    redaction_key,
)

ENCODED_STEPS: Final = 32
"""Number of recorded steps that are encoded together: so few that their requests are still in the processor's cache."""
WRITTEN_BYTES: Final = 256 << 10
"""Bytes of encoded lines that are given to the writer together."""
FLUSH_INTERVAL_S: Final = 0.25
"""Seconds after which fewer are encoded and written as well. A killed server loses the events of this time."""
MAX_WAITS_FOR: Final = 4
"""Number of requests that the line of a waiting request names at most."""

CLEAN_UP_INTERVAL_S: Final = 3_600.0
"""Seconds between two looks for files that are complete or expired."""

log = structlog.get_logger()

Positions = dict[str, tuple[float, int]]
"""Where a request waits in rearranged wait queues: negated priority and ticket by name."""


@dataclass(slots=True)
class Wait:
    """What a step that began with a wait looked like, which later steps change."""

    waits_for: tuple[int, ...]
    """Ids of the first requests that the new request waits for."""
    positions: dict[int, Positions | None]
    """The positions of all requests that the step moved, by id."""


NO_WAIT: Final = Wait((), {})

Step = Request | tuple[float, Request] | tuple[float, list[core.Event], Wait]
"""What one command did: granted a request at once; (time, request) released a held request; or (time, events, wait)."""


class Recorder:
    """Records the steps of one leadership. The dispatcher appends them to `steps`; the pipeline calls `on_stored`.

    `redacted` are prefixes: a name that begins with one is recorded as the prefix and a keyed digest of the name, and a
    request with such a name without its note. So equal names stay equal, and a replay takes the same decisions.
    """

    def __init__(self, writer: HistoryWriter, manager: LockManager, redacted: Sequence[str], key: bytes) -> None:
        self.steps: list[Step] = []
        """Steps that are not encoded yet, in order."""
        self._stored = 0
        """How many of `steps` are stored. Only these are encoded: the others may be lost with the leadership."""
        self._encoded: list[bytes] = []
        """Encoded lines that the writer does not have yet."""
        self._encoded_bytes = 0
        self._writer = writer
        self._offset_ms = manager.unix_offset_ms
        self._redacted = tuple(redacted)
        self._key = key
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._record_state(manager)

    def on_stored(self) -> None:
        """Note that all steps so far are stored."""
        self._stored = len(self.steps)
        if self._stored >= ENCODED_STEPS:
            self._encode()
            if self._encoded_bytes >= WRITTEN_BYTES:
                self._write()
        if self._timer is None and (self._stored or self._encoded):
            self._timer = self._loop.call_later(FLUSH_INTERVAL_S, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.flush()

    def flush(self) -> None:
        """Encode all stored steps, and give them to the writer."""
        if self._stored:
            self._encode()
        if self._encoded:
            self._write()

    def _encode(self) -> None:
        """Encode the stored steps."""
        steps = self.steps[: self._stored]
        del self.steps[: self._stored]
        self._stored = 0
        lines = records.encode_lines(self._lines(steps))
        self._encoded.append(lines)
        self._encoded_bytes += len(lines)

    def _write(self) -> None:
        """Give the encoded lines to the writer."""
        self._writer.write(b"".join(self._encoded))
        self._encoded.clear()
        self._encoded_bytes = 0

    def stop(self) -> None:
        """Write what is stored and drop the other steps. The thread of the writer closes the file."""
        if self._timer is not None:
            self._timer.cancel()
        self.flush()
        self._writer.close()

    # -- lines --------------------------------------------------------------------------------------------

    def _record_state(self, manager: LockManager) -> None:
        """Write the requests that the leader takes over."""
        lines: list[object] = []
        for requests in (manager.table.held, manager.table.waiting):
            lines += map(self._carried, requests.values())
        if lines:
            self._writer.write(records.encode_lines(lines))

    def _lines(self, steps: list[Step]) -> list[object]:
        """Return the lines of steps."""
        offset, redacts, lines = self._offset_ms, bool(self._redacted), list[object]()
        granted, released, append = records.Granted, records.Released, lines.append
        for step in steps:
            if isinstance(step, Request):
                if redacts:
                    append(granted(step.since_unix_ms, *self._fields(step), (), step.fence))
                    continue
                # Written out, with positional arguments, because this loop is what the history costs. msgspec leaves a
                # field out whose value is the same object as the default.
                queue_ms, transaction_ms = step.queue_timeout_ms, step.transaction_timeout_ms
                append(
                    granted(
                        step.since_unix_ms,
                        step.id,
                        step.exclusive,
                        step.shared,
                        step.transaction,
                        step.priority,
                        TIMEOUT_MS if queue_ms == TIMEOUT_MS else queue_ms,
                        TIMEOUT_MS if transaction_ms == TIMEOUT_MS else transaction_ms,
                        step.release_on_disconnect,
                        step.principal,
                        step.note,
                        (),
                        step.fence,
                    )
                )
            elif len(step) == 2:  # noqa: PLR2004 - a released request
                append(released(step[0] + offset, step[1].id))
            else:
                at = step[0] + offset
                for event in step[1]:
                    line = self._line(event, at, step[2])
                    if line is not None:
                        append(line)
                if step[2].positions:
                    lines += self._moved(at, step[2].positions)
        return lines

    def _line(self, event: core.Event, at: float, wait: Wait) -> object | None:
        """Return the line of an event; None for events without one, such as errors."""
        if isinstance(event, core.Locked):
            return records.Locked(at, event.request.id, event.request.fence)
        if isinstance(event, core.Released):
            cycle = event.cycle.owners if isinstance(event, core.Deadlocked) else ()
            return records.Released(at, event.request.id, event.reason, tuple(map(self._owner, cycle)))
        if isinstance(event, core.Queued):
            return records.Queued(at, *self._fields(event.request), wait.waits_for)
        if isinstance(event, (core.Granted, core.Taken)):
            line = records.Granted(at, *self._fields(event.request), (), event.request.fence)
            if self._redacted and isinstance(event, core.Taken):
                line.note = None  # the request may name a redacted resource that it was not granted
            return line
        if isinstance(event, core.Extended):
            return records.Extended(at, event.request.id, event.transaction_timeout_ms)
        return None

    def _moved(self, at: float, positions: dict[int, Positions | None]) -> list[object]:
        """Return the lines about moved requests."""
        return [records.Moved(at, id_, self._redact_names(moved)) for id_, moved in positions.items()]

    def _carried(self, request: Request) -> object:
        deadline = None if request.deadline >= NEVER else request.deadline + self._offset_ms
        fence = request.fence if request.state is HELD else 0
        fields = self._fields(request)
        return records.Carried(
            request.since + self._offset_ms, *fields, (), fence, deadline, self._redact_names(_positions(request))
        )

    def _fields(
        self, request: Request
    ) -> tuple[int, tuple[str, ...], tuple[str, ...], str | None, float, float, float, bool, str | None, str | None]:
        """Return the fields of a request up to its note, redacted."""
        exclusive, shared, transaction, note = request.exclusive, request.shared, request.transaction, request.note
        if self._redacted:
            exclusive, shared = tuple(map(self.redact, exclusive)), tuple(map(self.redact, shared))
            transaction = None if transaction is None else self.redact(transaction)
            if (exclusive, shared, transaction) != (request.exclusive, request.shared, request.transaction) or not (
                exclusive or shared  # a request with `anyOf`, which may name a redacted one
            ):
                note = None
        return (
            request.id,
            exclusive,
            shared,
            transaction,
            request.priority,
            min(request.queue_timeout_ms, NO_TIMEOUT_MS),
            request.transaction_timeout_ms,
            request.release_on_disconnect,
            request.principal,
            note,
        )

    def _redact_names(self, positions: Positions | None) -> Positions | None:
        return None if positions is None else {self.redact(name): entry for name, entry in positions.items()}

    def _owner(self, owner: Owner) -> Owner:
        return self.redact(owner) if isinstance(owner, str) else owner

    def redact(self, name: str) -> str:
        """Return a name as it is recorded: unchanged, or its redacted prefix and 16 hexadecimal digits of its digest."""
        for prefix in self._redacted:
            if name.startswith(prefix):
                return prefix + name_digest(self._key, name)
        return name


def wait_of(manager: LockManager, events: list[core.Event]) -> Wait:
    """Return the wait of a step with these events. Must be called before the next step."""
    first = events[0]
    if not isinstance(first, core.Queued) or first.request.state is not WAITING:
        return NO_WAIT
    positions: dict[int, Positions | None] = {}
    if len(events) > 1 or first.request.moved is not None:
        moved = [first.request, *(event.request for event in events if isinstance(event, core.Moved))]
        positions = {request.id: _positions(request) for request in moved}
    return Wait(_first_blockers(manager, first.request), positions)


def _positions(request: Request) -> Positions | None:
    """Return the positions of a request in rearranged wait queues."""
    return None if request.moved is None else {name: (entry[0], entry[1]) for name, entry in request.moved.items()}


def _first_blockers(manager: LockManager, request: Request) -> tuple[int, ...]:
    """Return the ids of at most `MAX_WAITS_FOR` requests that a waiting request waits for: holders, else the first waiters."""
    found: list[int] = []
    table, owner = manager.table, request.owner
    for name, exclusive in request.modes():
        resource = table.resources.get(name)
        if resource is None:
            continue
        if exclusive or resource.exclusive_count:
            for holder in resource.holders.values():
                if holder.owner != owner:
                    found.append(holder.id)
                    if len(found) == MAX_WAITS_FOR:
                        return tuple(found)
    if not found:
        for name, _exclusive in request.modes():
            resource = table.resources.get(name)
            queue = None if resource is None else resource.wait_queue
            first = None if queue is None else queue.exclusive.first
            if first is not None and first[2].owner != owner:
                found.append(first[2].id)
    return tuple(dict.fromkeys(found))[:MAX_WAITS_FOR]


class History:
    """The history of one namespace on this server: a recorder for each leadership, one after the other.

    Raises ValueError if the directory cannot be created or written.
    """

    def __init__(
        self, directory: str, namespace: str, server: str, retention: Retention, redacted: Sequence[str]
    ) -> None:
        self.directory = namespace_directory(directory, namespace)
        self._namespace, self._server, self._retention, self._redacted = namespace, server, retention, redacted
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.directory).close()
            self._key = redaction_key(self.directory) if redacted else b""
        except OSError as error:
            raise ValueError(f"GENIE_HISTORY_DIR: cannot write to {self.directory}: {error.strerror}") from None
        self._writer: HistoryWriter | None = None
        self._dropped_before = 0
        """Writes that earlier leaderships dropped."""

    def record(self, manager: LockManager) -> Recorder:
        """Start the recording of a leadership, with the requests that `manager` takes over."""
        if self._writer is not None:
            self._dropped_before += self._writer.dropped
        self._writer = HistoryWriter(self.directory, self._namespace, self._server, self._retention)
        return Recorder(self._writer, manager, self._redacted, self._key)

    @property
    def dropped(self) -> int:
        """How many writes, each with many events, were dropped because of the disk."""
        return self._dropped_before + (0 if self._writer is None else self._writer.dropped)

    async def keep_clean(self) -> None:
        """Archive what is complete and delete what is expired, again and again: also on a server that is idle or does not lead."""
        while True:
            try:
                process = await asyncio.create_subprocess_exec(
                    *clean_up_command(self.directory, self._retention), stdin=asyncio.subprocess.DEVNULL
                )
            except OSError as error:
                log.warning("archiver of the history not started", namespace=self._namespace, error=str(error))
            else:
                try:
                    await process.wait()
                finally:
                    if process.returncode is None:  # it is cancelled: what a killed archiver leaves is archived later
                        process.kill()
                        await process.wait()
            await asyncio.sleep(CLEAN_UP_INTERVAL_S)

    def join(self, timeout_s: float) -> None:
        """Wait until a stopped recording is written."""
        if self._writer is not None:
            self._writer.join(timeout_s)
