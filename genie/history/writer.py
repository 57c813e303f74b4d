"""Writes the lines of the history to files, in a thread, and starts the archiver when a file is complete."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final
from urllib.parse import quote

import structlog

from genie.history import records
from genie.history.archiver import shrink
from genie.history.retention import RESERVED_BYTES, Retention
from genie.history.segments import RAW, STATE, raw_bytes

log = structlog.get_logger()

SEGMENT_S: Final = 3_600.0
"""A file is complete at this age if its events have at least the size of its snapshot."""
MAX_SEGMENT_S: Final = 86_400.0
"""Any file with events is complete at this age."""
MAX_QUEUED_BYTES: Final = 64 << 20
"""Maximum number of bytes that wait for the disk. Further events are dropped."""
ROOM_CHECK_S: Final = 1.0
"""Time between two checks for room while events are dropped."""
DISK_RETRY_S: Final = 10.0
"""Time from an error of the disk until the recording begins a new file."""
ARCHIVER_RETRY_S: Final = 60.0
"""Time after which an archiver that has failed is started again."""


def namespace_directory(directory: str | Path, namespace: str) -> Path:
    """Return the directory with the history of one namespace."""
    name = quote(namespace, safe="")
    if name in (".", ".."):  # these would be other directories
        name = name.replace(".", "%2E")
    return Path(directory) / name


def clean_up_command(directory: Path, retention: Retention) -> list[str]:
    """Return the command line of the process that archives and deletes files."""
    limits = [str(retention.max_bytes), str(retention.max_age_s)]
    return [sys.executable, "-m", "genie.history.archiver", str(directory), *limits]


@dataclass(slots=True)
class DroppedWrites:
    """Counts the dropped writes since the last gap in the file, and the total."""

    count: int = 0
    """Number of writes that were dropped since the last gap."""
    since_ms: float = 0.0
    """When the first of these writes was dropped, in Unix ms."""
    total: int = 0
    """Number of all writes that were dropped."""

    def add(self) -> None:
        """Count one dropped write."""
        if not self.count:
            self.since_ms = time.time() * 1000
        self.count += 1
        self.total += 1

    def take_gap(self) -> bytes:
        """Return the line of the gap, and begin to count for the next gap. Return b"" if no write was dropped."""
        if not self.count:
            return b""
        gap = records.Gap(self.since_ms, dropped=self.count, until=time.time() * 1000)
        self.count = 0
        return records.encode_lines([gap])


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """The first lines of a recording: one line for each live request."""

    live: int
    """The number of live requests."""
    parts: Iterable[bytes]
    """The encoded lines, several in each part. The thread encodes them while it iterates."""


class _RawFile:
    """The file that is written now. It is locked (`flock`), so that no archiver of any server archives it."""

    def __init__(self, directory: Path, opened: records.Opened, snapshot_bytes: int) -> None:
        begin = datetime.fromtimestamp(opened.at / 1000, UTC)
        self.stem = f"{begin:%Y%m%dT%H%M%S.%fZ}-{opened.term}-{opened.number:06}"
        """The name without its suffix."""
        self._state = directory / f"{self.stem}{STATE}" if opened.number > 1 else None
        """The path of its snapshot, which the archiver writes when it archives the previous file. None for the first
        file, which contains its snapshot."""
        # The file gets its name only after it is locked. Otherwise an archiver could take it for a complete file.
        part = directory / f"{self.stem}{RAW}.part"
        self.file = os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "ab")
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX)
            self.write(records.encode_lines([opened]))
            part.rename(directory / f"{self.stem}{RAW}")
        except OSError:  # for example, the disk is full
            part.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # the same error again
                self.file.close()
            raise
        self._opened_at_s = time.monotonic()
        self._opened_size = self.size
        """The size of the file before its first event."""
        self.snapshot_bytes = snapshot_bytes
        """The size of the last known snapshot. A file is complete only if its events have at least this size."""

    @property
    def size(self) -> int:
        """The bytes of the file."""
        return self.file.tell()

    @property
    def _event_bytes(self) -> int:
        """The bytes of the events in the file."""
        return self.size - self._opened_size

    def write(self, lines: bytes) -> None:
        """Append lines."""
        self.file.write(lines)
        self.file.flush()

    def begin_events(self, snapshot_start: int) -> None:
        """Record that the snapshot, which begins at the byte `snapshot_start`, ends here, and that events follow."""
        self._opened_size = self.size
        self.snapshot_bytes = self.size - snapshot_start

    def measure_snapshot(self) -> None:
        """Update `snapshot_bytes` from the snapshot that the archiver has written."""
        if self._state is not None:
            with contextlib.suppress(FileNotFoundError):  # the previous file is not archived yet
                self.snapshot_bytes = self._state.stat().st_size

    def is_complete(self, segment_bytes: int) -> bool:
        """Return whether the next file should begin: this one has reached its maximum age, or its events are large enough.

        Events are large enough if they have at least `segment_bytes`, and at least the size of the snapshot.
        """
        is_large = self._event_bytes > 0 and self._event_bytes >= max(segment_bytes, self.snapshot_bytes)
        return is_large or self.remaining_s() == 0

    def remaining_s(self) -> float | None:
        """Return the seconds until the file reaches its maximum age, or None if it has no events and thus no such age."""
        if not self._event_bytes:
            return None
        max_age_s = SEGMENT_S if self._event_bytes >= self.snapshot_bytes else MAX_SEGMENT_S  # longer for few events
        return max(0.0, self._opened_at_s + max_age_s - time.monotonic())


class _Archiver:
    """Runs the process that archives complete files. Starts the process when it is due, and again after a failure."""

    def __init__(self, directory: Path, namespace: str, retention: Retention) -> None:
        self._command = clean_up_command(directory, retention)
        self._namespace = namespace
        self._process: subprocess.Popen[bytes] | None = None
        self.due_at_s: float | None = 0.0  # at once, because an earlier server may have left complete files
        """When to start the process, on the monotonic clock. None if there is nothing to archive."""

    def retry_later(self) -> None:
        """Start the process after a pause, unless it runs or is due already."""
        if self._process is None and self.due_at_s is None:
            self.due_at_s = time.monotonic() + ARCHIVER_RETRY_S

    def poll(self) -> int | None:
        """Start the process if it is due and does not run.

        If a process has ended, return the number of writes that it has dropped, else None.
        """
        has_ended = self._process is not None and self._process.poll() is not None
        dropped = self.join() if has_ended else None
        is_due = self.due_at_s is not None and time.monotonic() >= self.due_at_s
        if is_due and self._process is None:
            self._start()
        return dropped

    def _start(self) -> None:
        """Start the process, or retry later if that fails."""
        self.due_at_s = None
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
            )
        except OSError as error:  # for example, the limit of processes is reached
            log.warning(
                "history archiver start failed, retrying",
                namespace=self._namespace,
                reason=str(error),
                retry_s=ARCHIVER_RETRY_S,
            )
            self.retry_later()

    def join(self) -> int | None:
        """Wait until the process has ended, and return the number of writes that it has dropped, or None if no process runs."""
        process, self._process = self._process, None
        if process is None:
            return None
        output, _ = process.communicate()
        if process.returncode:
            self.retry_later()
        return int(output or 0)


class HistoryWriter:
    """Appends lines to the current file of one leadership.

    `write` and `close` never wait: a thread writes to the disk. After an error of the disk, the thread drops lines for
    `DISK_RETRY_S`, and then begins the next file. It also drops lines for which the retention leaves no room. A gap in
    the file replaces the dropped lines.
    """

    def __init__(self, directory: Path, namespace: str, server: str, retention: Retention) -> None:
        # More than 16 fields: the arguments, and the state of the event loop and of the thread on both sides of the
        # queue.
        self.directory = directory
        self.retention = retention
        self._namespace, self._server = namespace, server
        self._term = secrets.token_hex(4)
        """Identifies this leadership in the names of its files."""
        self._number = 0
        """How many files this leadership has."""
        self._queue: SimpleQueue[bytes | _Snapshot | None] = SimpleQueue()
        """Lines and snapshots for the thread. None ends the recording."""
        self._queued_sizes: deque[int] = deque()
        """The sizes of the items in the queue. The thread removes from the left, the event loop appends to the right."""
        self._dropped_by_loop = DroppedWrites()
        """The writes that `write` has dropped because the queue was full."""
        self._dropped_by_thread = DroppedWrites()
        """The writes that the thread has dropped. The total includes the writes that the archiver has dropped."""
        # Only the thread uses the next five fields.
        self._has_failed = False
        """True if the disk has failed, and no file could be written since then."""
        self._unrecorded_live: int | None = None
        """Number of live requests in a dropped snapshot, until a line records it. None if no snapshot was dropped."""
        self._other_bytes = 0
        """Bytes of the raw files except the current one, when they were last counted."""
        self._recount_at_s = 0.0
        """When `_other_bytes` may be counted again, on the monotonic clock."""
        self._archiver = _Archiver(directory, namespace, retention)
        self._closed = threading.Event()
        """Set when the last file is written and closed."""
        self._thread = threading.Thread(target=self._run, name="genie-history", daemon=True)
        self._thread.start()

    def write(self, lines: bytes) -> None:
        """Queue lines for the thread, or drop them if too much is queued."""
        if sum(self._queued_sizes) > MAX_QUEUED_BYTES:
            self._dropped_by_loop.add()
            return
        self._enqueue(self._dropped_by_loop.take_gap() + lines)

    def _enqueue(self, lines: bytes) -> None:
        """Queue lines for the thread."""
        self._queued_sizes.append(len(lines))
        self._queue.put(lines)

    @property
    def dropped(self) -> int:
        """Number of dropped writes. Each write contains many events."""
        return self._dropped_by_loop.total + self._dropped_by_thread.total

    def write_snapshot(self, live: int, parts: Iterable[bytes], queued_bytes: int = 0) -> None:
        """Queue the first lines of a recording, one for each of `live` requests.

        The thread iterates over `parts`, which may encode the lines only then. `queued_bytes` is the size of the lines
        that are encoded already.
        """
        self._queued_sizes.append(queued_bytes)
        self._queue.put(_Snapshot(live, parts))

    def close(self) -> None:
        """Signal the thread to end the recording when everything queued is written. `join` waits for that."""
        if gap := self._dropped_by_loop.take_gap():  # no later line can carry it
            self._enqueue(gap)
        self._queue.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait until the file is written and closed. The archiver may still run."""
        self._closed.wait(timeout_s)

    # -- in the thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Record until the recording ends. After an error of the disk, drop lines for a while and try again."""
        ends = False
        while not self._record() and not ends:  # after the end of the recording, `_record` writes the gap
            ends = self._drop_for_a_while()
        self._closed.set()
        self._on_archived(self._archiver.join())

    def _record(self) -> bool:
        """Write to files until the recording ends. Return False if the disk fails before."""
        file: _RawFile | None = None
        lines: bytes | _Snapshot | None = None
        """Lines that were taken from the queue and are not written yet."""
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            shrink(self.directory, self.retention)
            file = self._create_next_file()
            if self._has_failed:
                self._resume(file)
            while (lines := self._next_lines(file)) is not None:
                if os.fstat(file.file.fileno()).st_nlink == 0:  # the file was deleted
                    file.file.close()
                    file = self._create_next_file(file.snapshot_bytes)
                if lines:
                    self._append(file, lines)
                    self._queued_sizes.popleft()
                    lines = None
                file.measure_snapshot()
                if file.is_complete(self.retention.segment_bytes) and self._has_room(file, 0, RESERVED_BYTES // 2):
                    complete, file = file, self._create_next_file(file.snapshot_bytes)
                    self._complete(complete)
                self._archive()
            self._write_gap(file)
        except OSError as error:
            self._on_disk_error(error)
            if lines:
                self._drop(lines)
            return False
        finally:
            if file is not None:
                with contextlib.suppress(OSError):  # the error that was handled already
                    file.file.close()
        return True

    def _complete(self, file: _RawFile) -> None:
        """Close a file, and let the archiver start."""
        self._other_bytes += file.size
        file.file.close()
        self._archiver.due_at_s = 0.0

    def _on_disk_error(self, error: OSError) -> None:
        """Log the first error since the last successful write, and start the archiver for the file that has ended."""
        self._archiver.due_at_s = 0.0
        if not self._has_failed:
            self._has_failed = True
            log.error(
                "history recording failed, events are dropped until a retry succeeds",
                namespace=self._namespace,
                directory=str(self.directory),
                reason=str(error),
                retry_s=DISK_RETRY_S,
            )

    def _drop_for_a_while(self) -> bool:
        """Drop all lines for `DISK_RETRY_S` after the disk has failed. Return whether the recording ends."""
        end_s = time.monotonic() + DISK_RETRY_S
        while (remaining_s := end_s - time.monotonic()) > 0:
            try:
                lines = self._queue.get(timeout=remaining_s)
            except Empty:
                break
            if lines is None:
                self._queue.put(None)  # for the last call of `_record`, which writes the gap
                return True
            self._drop(lines)
        return False

    def _drop(self, lines: bytes | _Snapshot) -> None:
        """Count lines that were taken from the queue as dropped, because the disk has failed."""
        self._dropped_by_thread.add()
        self._queued_sizes.popleft()
        if isinstance(lines, _Snapshot):
            self._unrecorded_live = lines.live

    def _resume(self, file: _RawFile) -> None:
        """Begin the first file after a failure of the disk with lines that replace everything dropped since then."""
        self._other_bytes = raw_bytes(self.directory, self.retention, file.stem)
        if self._unrecorded_live is not None:
            start = file.size
            file.write(records.encode_lines([records.unrecorded(time.time() * 1000, self._unrecorded_live)]))
            file.begin_events(start)
            self._unrecorded_live = None
        self._write_gap(file)
        self._has_failed = False
        log.info("history recording resumed", namespace=self._namespace, directory=str(self.directory))

    def _next_lines(self, file: _RawFile) -> bytes | _Snapshot | None:
        """Wait for the next lines, at most until the file reaches its maximum age.

        Return the lines, b"" if there are none, or None if the recording ends.
        """
        remaining_s = file.remaining_s()
        waits_for_room = self._dropped_by_thread.count > 0 or remaining_s == 0  # for lines, or for the next file
        try:
            return self._queue.get(timeout=ROOM_CHECK_S if waits_for_room else remaining_s)
        except Empty:
            return b""

    def _append(self, file: _RawFile, lines: bytes | _Snapshot) -> None:
        """Write lines, or drop them if there is no room for them."""
        if isinstance(lines, _Snapshot):
            self._append_snapshot(file, lines)
        elif self._has_room(file, len(lines)):
            if self._dropped_by_thread.count:
                log.info("history recording resumed", namespace=self._namespace, directory=str(self.directory))
                self._write_gap(file)
            file.write(lines)
        else:
            if not self._dropped_by_thread.count:
                log.warning(
                    "history recording paused, events are dropped until files are archived",
                    reason="the files that are not archived have reached their share of GENIE_HISTORY_MAX_MB",
                    namespace=self._namespace,
                    directory=str(self.directory),
                    raw_bytes=self._other_bytes + file.size,
                    max_raw_bytes=self.retention.raw_bytes,
                )
            self._dropped_by_thread.add()
            self._archiver.retry_later()  # the archiver of another server, which had the lock, may have failed

    def _append_snapshot(self, file: _RawFile, snapshot: _Snapshot) -> None:
        """Write the snapshot with which a recording begins. If there is no room for it, a gap replaces it."""
        start = file.size
        for part in snapshot.parts:
            snapshot_bytes = file.size + len(part) - start
            if snapshot_bytes > self.retention.snapshot_bytes or not self._has_room(file, len(part)):
                file.file.truncate(start)  # removes the parts that were written
                file.file.seek(start)
                file.write(records.encode_lines([records.unrecorded(time.time() * 1000, snapshot.live)]))
                self._dropped_by_thread.total += 1
                break
            file.write(part)
        file.begin_events(start)

    def _has_room(self, file: _RawFile, count: int, reserved: int = RESERVED_BYTES) -> bool:
        """Return whether `count` more bytes fit, so that `reserved` bytes of the limit for all raw files stay free.

        Counts the other files again if they seem to be too large, because the archiver may have deleted some.
        """
        max_other_bytes = self.retention.raw_bytes - reserved - file.size - count
        if self._other_bytes > max_other_bytes and time.monotonic() >= self._recount_at_s:
            self._other_bytes = raw_bytes(self.directory, self.retention, file.stem)
            self._recount_at_s = time.monotonic() + ROOM_CHECK_S
        return self._other_bytes <= max_other_bytes

    def _write_gap(self, file: _RawFile) -> None:
        """Write the gap that replaces the writes that the thread has dropped, if there are any.

        Room is reserved for it.
        """
        count = self._dropped_by_thread.count
        if gap := self._dropped_by_thread.take_gap():
            try:
                file.write(gap)
            except OSError:
                self._dropped_by_thread.count = count  # the same gap follows in the next file
                raise

    def _create_next_file(self, previous_snapshot_bytes: int = 0) -> _RawFile:
        """Create the next file.

        Until the size of its snapshot is known, `previous_snapshot_bytes` is used, the size of the previous snapshot.
        """
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        now_ms, number = time.time() * 1000, self._number + 1
        opened = records.Opened(now_ms, records.FORMAT, self._namespace, self._server, self._term, number)
        file = _RawFile(self.directory, opened, previous_snapshot_bytes)
        self._number = number
        return file

    def _archive(self) -> None:
        """Start the archiver if it is due, and count the writes that an ended archiver has dropped."""
        self._on_archived(self._archiver.poll())

    def _on_archived(self, dropped: int | None) -> None:
        """If an archiver has ended, count the writes that it has dropped, and allow a recount of the files.

        `dropped` is None if no archiver has ended.
        """
        if dropped is not None:
            self._dropped_by_thread.total += dropped
            self._recount_at_s = 0.0
