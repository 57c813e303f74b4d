"""Writes the lines of the history to files, in a thread, and starts the archiver when a file is complete."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
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
from typing import IO, Final
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
KEY_BYTES: Final = 32


def namespace_directory(directory: str | Path, namespace: str) -> Path:
    """Return the directory with the history of one namespace."""
    name = quote(namespace, safe="")
    return Path(directory) / (name.replace(".", "%2E") if name in (".", "..") else name)


def redaction_key(directory: Path, *, create: bool = True) -> bytes:
    """Return the key of the redacted names in a directory, which only the owner can read. It is created with the directory.

    Raises ValueError if the key is damaged: with a part of it, digests could be compared with guessed names.
    """
    path = directory / "redaction.key"
    if create and not path.exists():
        fresh = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):  # another server may have been first
            os.link(fresh, path)
        fresh.unlink()
    key = path.read_bytes()
    if len(key) != KEY_BYTES:
        raise ValueError(f"{path} is damaged: it has {len(key)} bytes, not {KEY_BYTES}")
    return key


def name_digest(key: bytes, name: str) -> str:
    """Return what is recorded of a redacted name after its prefix."""
    return f"#{hmac.new(key, name.encode(), hashlib.sha256).hexdigest()[:16]}"


def recorded_names(directory: Path, name: str) -> set[str]:
    """Return all texts that may be recorded for a name: the name, and with the key of the directory its redactions."""
    try:
        digest = name_digest(redaction_key(directory, create=False), name)
    except (OSError, ValueError):  # nothing is redacted, or the reader may not know what
        return {name}
    return {name, *(f"{name[:length]}{digest}" for length in range(1, len(name) + 1))}


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

    def add(self) -> None:
        """Count one more."""
        if not self.writes:
            self.since_ms = time.time() * 1000
        self.writes += 1

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


class HistoryWriter:
    """Appends lines to the current file of one leadership.

    `write` and `close` never wait: a thread does what may block. The current file is locked (`flock`), so that the archiver
    of any server leaves it alone. An error of the disk ends the recording: `error` has its text. Lines for which the retention
    leaves no room are dropped, and the next lines begin with a gap.
    """

    def __init__(self, directory: Path, namespace: str, server: str, retention: Retention) -> None:
        self.directory, self.error = directory, ""
        self.retention = retention
        self._dropped = self._discarded = 0
        """Numbers of dropped writes: by the event loop, and by the thread and its archiver."""
        self._namespace, self._server = namespace, server
        self._term = secrets.token_hex(4)
        self._number = 0
        self._stem = ""
        """The name of the current file without its suffix."""
        self._opened_size = 0
        """Size of the current file without events."""
        self._opened_at_s = 0.0
        self._snapshot_bytes = 0
        """Size of the last snapshot that is known: a file is complete when it has as many bytes of events."""
        self._queue: SimpleQueue[bytes | _Snapshot | None] = SimpleQueue()
        self._queued: deque[int] = deque()
        """Sizes of what waits in the queue. The thread removes from the left, the event loop appends to the right."""
        self._gap = Missing()
        """The writes that the event loop has dropped since the last one that it has queued."""
        self._lost = Missing()
        """The writes that the thread has dropped since the last one that it has written."""
        self._other_bytes = 0
        """Bytes of the raw files except the current one, when they were last counted."""
        self._count_from_s = 0.0
        """When they may be counted again, on the monotonic clock."""
        self._archiver: subprocess.Popen[bytes] | None = None
        self._archive_from_s: float | None = 0.0  # at once: what an earlier process has left
        """When the archiver is to be started, on the monotonic clock; None: nothing is to be archived."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="genie-history", daemon=True)
        self._thread.start()

    def write(self, lines: bytes) -> None:
        """Queue lines for the thread, or drop them if too much is queued."""
        if self.error or sum(self._queued) > MAX_QUEUED_BYTES:
            self._dropped += 1
            self._gap.add()
            return
        lines = self._gap.take() + lines
        self._queued.append(len(lines))
        self._queue.put(lines)

    @property
    def dropped(self) -> int:
        """How many writes, each with many events, were dropped."""
        return self._dropped + self._discarded

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
                self._discarded += self._queue.get_nowait() is not None

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
        file: IO[bytes] | None = None
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            shrink(self.directory, self.retention)
            file = self._open()
            while (lines := self._next_lines(file)) is not None:
                if os.fstat(file.fileno()).st_nlink == 0:  # the file was deleted
                    file.close()
                    file = self._open()
                if lines:
                    self._append(file, lines)
                    self._queued.popleft()
                if self._is_complete(file) and self._has_room(file, 0, RESERVED_BYTES // 2):
                    following = self._open()
                    self._other_bytes += file.tell()
                    file.close()
                    file, self._archive_from_s = following, 0.0
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
                    file.close()
            self._closed.set()
        if self._archiver is not None:
            self._end_archiver(self._archiver)

    def _next_lines(self, file: IO[bytes]) -> bytes | _Snapshot | None:
        """Wait for the next lines, at most until the file is complete: then there are none. None: the recording ends."""
        remaining_s = self._remaining_s(file)
        needs_room = self._lost.writes > 0 or remaining_s == 0
        try:
            return self._queue.get(timeout=ROOM_CHECK_S if needs_room else remaining_s)
        except Empty:
            return b""

    def _append(self, file: IO[bytes], lines: bytes | _Snapshot) -> None:
        """Write lines, or drop them if there is no room for them."""
        if isinstance(lines, _Snapshot):
            self._append_snapshot(file, lines)
        elif self._has_room(file, len(lines)):
            if self._lost.writes:
                log.info("history recording resumed", namespace=self._namespace, directory=str(self.directory))
                self._write_gap(file)
            file.write(lines)
            file.flush()
        else:
            if not self._lost.writes:
                log.warning(
                    "history recording paused: GENIE_HISTORY_MAX_MB leaves no room until files are archived",
                    namespace=self._namespace,
                    directory=str(self.directory),
                    raw_bytes=self._other_bytes + file.tell(),
                    max_raw_bytes=self.retention.raw_bytes,
                )
            self._discarded += 1
            self._lost.add()
            if self._archiver is None and self._archive_from_s is None:
                # The archiver of another server, which had the lock, may have failed.
                self._archive_from_s = time.monotonic() + ARCHIVER_RETRY_S

    def _append_snapshot(self, file: IO[bytes], snapshot: _Snapshot) -> None:
        """Write the first lines of a recording; if they are too many, only that they are not recorded."""
        start = file.tell()
        for part in snapshot.parts:
            size = file.tell() + len(part) - start
            if size > self.retention.snapshot_bytes or not self._has_room(file, len(part)):
                file.truncate(start)
                file.seek(start)
                file.write(records.encode_lines([records.unrecorded(time.time() * 1000, snapshot.live)]))
                self._discarded += 1
                break
            file.write(part)
        file.flush()
        self._snapshot_bytes = file.tell() - start
        self._opened_size = file.tell()

    def _has_room(self, file: IO[bytes], count: int, reserved: int = RESERVED_BYTES) -> bool:
        """Return whether all raw files stay below their bound with `count` more bytes. Counts the other files if they do not."""
        allowed = self.retention.raw_bytes - reserved - file.tell() - count
        if self._other_bytes > allowed and time.monotonic() >= self._count_from_s:
            self._other_bytes = raw_bytes(self.directory, self.retention, self._stem)
            self._count_from_s = time.monotonic() + ROOM_CHECK_S
        return self._other_bytes <= allowed

    def _write_gap(self, file: IO[bytes]) -> None:
        """Write the line about the writes that the thread has dropped, for which room is reserved."""
        if gap := self._lost.take():
            file.write(gap)
            file.flush()

    def _is_complete(self, file: IO[bytes]) -> bool:
        """Return whether the next file begins: this one is large or old, and has as many bytes of events as its snapshot."""
        if self._number > 1:
            with contextlib.suppress(FileNotFoundError):  # the file before is not archived yet
                self._snapshot_bytes = (self.directory / f"{self._stem}{STATE}").stat().st_size
        events = file.tell() - self._opened_size
        is_large = 0 < events >= max(self.retention.segment_bytes, self._snapshot_bytes)
        return is_large or self._remaining_s(file) == 0

    def _remaining_s(self, file: IO[bytes]) -> float | None:
        """Return the time until the current file is old; None if it has no events, and so never is."""
        events = file.tell() - self._opened_size
        if not events:
            return None
        age_s = SEGMENT_S if events >= self._snapshot_bytes else MAX_SEGMENT_S
        return max(0.0, self._opened_at_s + age_s - time.monotonic())

    def _open(self) -> IO[bytes]:
        """Create and lock the next file, and write its first line."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._number += 1
        now = time.time()
        self._stem = f"{datetime.fromtimestamp(now, UTC):%Y%m%dT%H%M%S.%fZ}-{self._term}-{self._number:06}"
        name = f"{self._stem}{RAW}"
        # The file gets its name after it is locked: an archiver must not take it for a complete one in between.
        part = self.directory / f"{name}.part"
        file = os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "ab")
        fcntl.flock(file, fcntl.LOCK_EX)
        opened = records.Opened(now * 1000, records.FORMAT, self._namespace, self._server, self._term, self._number)
        file.write(records.encode_lines([opened]))
        file.flush()
        part.rename(self.directory / name)
        self._opened_size, self._opened_at_s = file.tell(), time.monotonic()
        return file

    def _archive(self) -> None:
        """Start the archiver if a file is complete, or the last one has failed, and no archiver runs."""
        if self._archiver is not None and self._archiver.poll() is not None:
            self._end_archiver(self._archiver)
            if self._archiver.returncode != 0 and self._archive_from_s is None:
                self._archive_from_s = time.monotonic() + ARCHIVER_RETRY_S
            self._archiver = None
        if self._archiver is None and self._archive_from_s is not None and time.monotonic() >= self._archive_from_s:
            command = clean_up_command(self.directory, self.retention)
            try:
                self._archiver = subprocess.Popen(  # noqa: S603 - our own module
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
                )
            except OSError as error:  # no process can be started now
                log.warning("archiver of the history not started", namespace=self._namespace, error=str(error))
                self._archive_from_s = time.monotonic() + ARCHIVER_RETRY_S
                return
            self._archive_from_s = None

    def _end_archiver(self, archiver: subprocess.Popen[bytes]) -> None:
        """Wait for the archiver, and count what it has dropped. The files have other sizes now."""
        output, _ = archiver.communicate()
        self._discarded += int(output or 0)
        self._count_from_s = 0.0
