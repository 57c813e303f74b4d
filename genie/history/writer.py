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
"""Seconds after which a file with events is complete, if it has as many bytes of events as its snapshot."""
MAX_SEGMENT_S: Final = 86_400.0
"""Seconds after which any file with events is complete."""
MAX_QUEUED_BYTES: Final = 64 << 20
"""Bytes that may wait for the disk. Beyond them, events are dropped."""
ROOM_CHECK_S: Final = 1.0
"""Interval of the look for room while events are dropped, in seconds."""
ARCHIVER_RETRY_S: Final = 60.0
"""Seconds after which an archiver that has failed is started again."""


def namespace_directory(directory: str | Path, namespace: str) -> Path:
    """Return the directory with the history of one namespace."""
    name = quote(namespace, safe="")
    return Path(directory) / (name.replace(".", "%2E") if name in (".", "..") else name)


def clean_up_command(directory: Path, retention: Retention) -> list[str]:
    """Return the command of the process that archives and deletes files."""
    limits = [str(retention.max_bytes), str(retention.max_age_s)]
    return [sys.executable, "-m", "genie.history.archiver", str(directory), *limits]


@dataclass(slots=True)
class Missing:
    """Writes that were dropped since the last one that was not."""

    writes: int = 0
    since_ms: float = 0.0
    """When the first of them was dropped, Unix ms."""
    total: int = 0
    """All that were dropped, also before."""

    def add(self) -> None:
        """Count one more."""
        if not self.writes:
            self.since_ms = time.time() * 1000
        self.writes += 1
        self.total += 1

    def take(self) -> bytes:
        """Return the line about them, and forget them; empty if there are none."""
        if not self.writes:
            return b""
        gap, self.writes = records.Gap(self.since_ms, self.writes, time.time() * 1000), 0
        return records.encode_lines([gap])


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """The first lines of a recording, which the thread itself makes: `live` requests, one line for each."""

    live: int
    parts: Iterable[bytes]


class _RawFile:
    """The file that is written now. It is locked (`flock`), so that the archiver of any server leaves it alone."""

    def __init__(self, directory: Path, opened: records.Opened, snapshot_bytes: int) -> None:
        begin = datetime.fromtimestamp(opened.at / 1000, UTC)
        self.stem = f"{begin:%Y%m%dT%H%M%S.%fZ}-{opened.term}-{opened.number:06}"
        """The name without its suffix."""
        self._state = directory / f"{self.stem}{STATE}" if opened.number > 1 else None
        """The file with its snapshot, once the file before is archived. The first file has its snapshot itself."""
        # The file gets its name after it is locked: an archiver must not take it for a complete one in between.
        part = directory / f"{self.stem}{RAW}.part"
        self.file = os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "ab")
        fcntl.flock(self.file, fcntl.LOCK_EX)
        self.write(records.encode_lines([opened]))
        part.rename(directory / f"{self.stem}{RAW}")
        self._opened_at_s = time.monotonic()
        self._opened_size = self.size
        """Its size without events."""
        self.snapshot_bytes = snapshot_bytes
        """Size of the last snapshot that is known: the file is complete when it has as many bytes of events."""

    @property
    def size(self) -> int:
        """The bytes of the file."""
        return self.file.tell()

    def write(self, lines: bytes) -> None:
        """Append lines."""
        self.file.write(lines)
        self.file.flush()

    def begin_events(self, snapshot_start: int) -> None:
        """Note that the snapshot, which begins at `snapshot_start`, is written. What follows are events."""
        self._opened_size = self.size
        self.snapshot_bytes = self.size - snapshot_start

    def is_complete(self, segment_bytes: int) -> bool:
        """Return whether the next file begins: this one is large or old, and has as many bytes of events as its snapshot."""
        if self._state is not None:
            with contextlib.suppress(FileNotFoundError):  # the file before is not archived yet
                self.snapshot_bytes = self._state.stat().st_size
        is_large = 0 < self.size - self._opened_size >= max(segment_bytes, self.snapshot_bytes)
        return is_large or self.remaining_s() == 0

    def remaining_s(self) -> float | None:
        """Return the time until the file is old; None if it has no events, and so never is."""
        events = self.size - self._opened_size
        if not events:
            return None
        age_s = SEGMENT_S if events >= self.snapshot_bytes else MAX_SEGMENT_S
        return max(0.0, self._opened_at_s + age_s - time.monotonic())


class _Archiver:
    """The process that archives complete files: started when it is due, and again after a failure."""

    def __init__(self, directory: Path, namespace: str, retention: Retention) -> None:
        self._command = clean_up_command(directory, retention)
        self._namespace = namespace
        self._process: subprocess.Popen[bytes] | None = None
        self.due_at_s: float | None = 0.0  # at once: what an earlier process has left
        """When it is to be started, on the monotonic clock; None: nothing is to be archived."""

    def retry_later(self) -> None:
        """Start it after a pause, unless it runs or is due already."""
        if self._process is None and self.due_at_s is None:
            self.due_at_s = time.monotonic() + ARCHIVER_RETRY_S

    def poll(self) -> int | None:
        """Start it if it is due. Return how many writes it has dropped, if it has ended since the last call."""
        has_ended = self._process is not None and self._process.poll() is not None
        dropped = self.join() if has_ended else None
        if self._process is None and self.due_at_s is not None and time.monotonic() >= self.due_at_s:
            self.due_at_s = None
            try:
                self._process = subprocess.Popen(  # noqa: S603 - our own module
                    self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
                )
            except OSError as error:  # no process can be started now
                log.warning("archiver of the history not started", namespace=self._namespace, error=str(error))
                self.retry_later()
        return dropped

    def join(self) -> int | None:
        """Wait until it has ended. Return how many writes it has dropped; None if it does not run."""
        process, self._process = self._process, None
        if process is None:
            return None
        output, _ = process.communicate()
        if process.returncode:
            self.retry_later()
        return int(output or 0)


class HistoryWriter:
    """Appends lines to the current file of one leadership.

    `write` and `close` never wait: a thread does what may block. An error of the disk ends the recording: `error` has its text.
    Lines for which the retention leaves no room are dropped, and the next lines begin with a gap.
    """

    def __init__(self, directory: Path, namespace: str, server: str, retention: Retention) -> None:
        self.directory, self.error = directory, ""
        self.retention = retention
        self._namespace, self._server = namespace, server
        self._term = secrets.token_hex(4)
        self._number = 0
        self._queue: SimpleQueue[bytes | _Snapshot | None] = SimpleQueue()
        self._queued: deque[int] = deque()
        """Sizes of what waits in the queue. The thread removes from the left, the event loop appends to the right."""
        self._gap = Missing()
        """The writes that the event loop has dropped since the last one that it has queued."""
        self._lost = Missing()
        """The writes that the thread has dropped since the last one that it has written. In all, also those of its archiver."""
        self._other_bytes = 0
        """Bytes of the raw files except the current one, when they were last counted."""
        self._count_from_s = 0.0
        """When they may be counted again, on the monotonic clock."""
        self._archiver = _Archiver(directory, namespace, retention)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="genie-history", daemon=True)
        self._thread.start()

    def write(self, lines: bytes) -> None:
        """Queue lines for the thread, or drop them if too much is queued."""
        if self.error or sum(self._queued) > MAX_QUEUED_BYTES:
            self._gap.add()
            return
        lines = self._gap.take() + lines
        self._queued.append(len(lines))
        self._queue.put(lines)

    @property
    def dropped(self) -> int:
        """How many writes, each with many events, were dropped."""
        return self._gap.total + self._lost.total

    def write_snapshot(self, live: int, parts: Iterable[bytes], queued_bytes: int = 0) -> None:
        """Queue the first lines of a recording, one for each of `live` requests. The thread itself makes the parts.

        `queued_bytes` is the size of parts that are made already.
        """
        self._queued.append(queued_bytes)
        self._queue.put(_Snapshot(live, parts))
        if self.error:  # the thread has ended, or ends now
            self._drop_queued()

    def _drop_queued(self) -> None:
        """Free what waits for a disk that has failed: up to `MAX_QUEUED_BYTES`, and requests that have ended since."""
        with contextlib.suppress(Empty):
            while True:
                self._lost.total += self._queue.get_nowait() is not None

    def close(self) -> None:
        """End the file once everything queued is written."""
        if not self.error and (gap := self._gap.take()):
            self._queued.append(len(gap))
            self._queue.put(gap)
        self._queue.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait until the file is written and closed. The archiver may still run."""
        self._closed.wait(timeout_s)

    # -- in the thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        file: _RawFile | None = None
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            shrink(self.directory, self.retention)
            file = self._create_next_file()
            while (lines := self._next_lines(file)) is not None:
                if os.fstat(file.file.fileno()).st_nlink == 0:  # the file was deleted
                    file.file.close()
                    file = self._create_next_file(file.snapshot_bytes)
                if lines:
                    self._append(file, lines)
                    self._queued.popleft()
                if file.is_complete(self.retention.segment_bytes) and self._has_room(file, 0, RESERVED_BYTES // 2):
                    following = self._create_next_file(file.snapshot_bytes)
                    self._other_bytes += file.size
                    file.file.close()
                    file, self._archiver.due_at_s = following, 0.0
                self._archive()
            self._write_gap(file)
        except OSError as error:
            self.error = str(error)
            log.error(  # noqa: TRY400 - the text of the error says it all
                "history recording ended", namespace=self._namespace, directory=str(self.directory), error=self.error
            )
            self._drop_queued()
        finally:
            if file is not None:
                with contextlib.suppress(OSError):  # the error that is logged above, again
                    file.file.close()
            self._closed.set()
        self._on_archived(self._archiver.join())

    def _next_lines(self, file: _RawFile) -> bytes | _Snapshot | None:
        """Wait for the next lines, at most until the file is complete: then there are none. None: the recording ends."""
        remaining_s = file.remaining_s()
        needs_room = self._lost.writes > 0 or remaining_s == 0
        try:
            return self._queue.get(timeout=ROOM_CHECK_S if needs_room else remaining_s)
        except Empty:
            return b""

    def _append(self, file: _RawFile, lines: bytes | _Snapshot) -> None:
        """Write lines, or drop them if there is no room for them."""
        if isinstance(lines, _Snapshot):
            self._append_snapshot(file, lines)
        elif self._has_room(file, len(lines)):
            if self._lost.writes:
                log.info("history recording resumed", namespace=self._namespace, directory=str(self.directory))
                self._write_gap(file)
            file.write(lines)
        else:
            if not self._lost.writes:
                log.warning(
                    "history recording paused: GENIE_HISTORY_MAX_MB leaves no room until files are archived",
                    namespace=self._namespace,
                    directory=str(self.directory),
                    raw_bytes=self._other_bytes + file.size,
                    max_raw_bytes=self.retention.raw_bytes,
                )
            self._lost.add()
            self._archiver.retry_later()  # the archiver of another server, which had the lock, may have failed

    def _append_snapshot(self, file: _RawFile, snapshot: _Snapshot) -> None:
        """Write the first lines of a recording; if they are too many, only that they are not recorded."""
        start = file.size
        for part in snapshot.parts:
            size = file.size + len(part) - start
            if size > self.retention.snapshot_bytes or not self._has_room(file, len(part)):
                file.file.truncate(start)
                file.file.seek(start)
                file.write(records.encode_lines([records.unrecorded(time.time() * 1000, snapshot.live)]))
                self._lost.total += 1
                break
            file.write(part)
        file.begin_events(start)

    def _has_room(self, file: _RawFile, count: int, reserved: int = RESERVED_BYTES) -> bool:
        """Return whether all raw files stay below their bound with `count` more bytes. Counts the other files if they do not."""
        allowed = self.retention.raw_bytes - reserved - file.size - count
        if self._other_bytes > allowed and time.monotonic() >= self._count_from_s:
            self._other_bytes = raw_bytes(self.directory, self.retention, file.stem)
            self._count_from_s = time.monotonic() + ROOM_CHECK_S
        return self._other_bytes <= allowed

    def _write_gap(self, file: _RawFile) -> None:
        """Write the line about the writes that the thread has dropped, for which room is reserved."""
        if gap := self._lost.take():
            file.write(gap)

    def _create_next_file(self, previous_snapshot_bytes: int = 0) -> _RawFile:
        """Create the next file.

        Until the size of its own snapshot is known, `previous_snapshot_bytes`, the size of the snapshot of the previous file,
        decides when the file is complete.
        """
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._number += 1
        now_ms = time.time() * 1000
        opened = records.Opened(now_ms, records.FORMAT, self._namespace, self._server, self._term, self._number)
        return _RawFile(self.directory, opened, previous_snapshot_bytes)

    def _archive(self) -> None:
        """Start the archiver if it is due, and note what it has done if it has ended."""
        self._on_archived(self._archiver.poll())

    def _on_archived(self, dropped: int | None) -> None:
        """Count the writes that an archiver has dropped; None: none has ended. The files have other sizes now."""
        if dropped is not None:
            self._lost.total += dropped
            self._count_from_s = 0.0
