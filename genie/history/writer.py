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
from genie.history.segments import RAW

log = structlog.get_logger()

SEGMENT_BYTES: Final = 16 << 20
"""Size beyond which a file is complete, and the next one begins."""
SEGMENT_S: Final = 3_600.0
"""Seconds after which a file with events is complete, however small it is."""
MAX_QUEUED_BYTES: Final = 64 << 20
"""Bytes that may wait for the disk. Beyond them, events are dropped."""
MAX_BACKLOG_BYTES: Final = 1 << 30
"""Bytes of the files of a leadership that wait for the archiver, because the machine is busy. Beyond them, events are dropped."""
BACKLOG_CHECK_S: Final = 1.0
"""Interval of the check of the backlog while events are dropped, in seconds."""
ARCHIVER_RETRY_S: Final = 60.0
"""Seconds after which an archiver that has failed is started again."""
KEY_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class Retention:
    """How long the history is kept: at most `max_bytes` of complete files, each at most `max_age_s` after its last event."""

    max_bytes: int = 10 << 30
    max_age_s: float = 30 * 86_400.0


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
    return [sys.executable, "-m", "genie.history.segments", str(directory), *limits]


class HistoryWriter:
    """Appends lines to the current file of one leadership.

    `write` and `close` never wait: a thread does what may block. The current file is locked (`flock`), so that the archiver
    of any server leaves it alone. An error of the disk ends the recording: `error` has its text.
    """

    def __init__(self, directory: Path, namespace: str, server: str, retention: Retention) -> None:
        self.directory, self.error = directory, ""
        self._dropped = self._discarded = 0
        """Numbers of dropped writes: by the event loop, and by the thread."""
        self._namespace, self._server, self._retention = namespace, server, retention
        self._term = secrets.token_hex(4)
        self._number = 0
        self._opened_size = 0
        """Size of the current file without events."""
        self._opened_at_s = 0.0
        self._queue: SimpleQueue[bytes | Iterable[bytes] | None] = SimpleQueue()
        self._queued: deque[int] = deque()
        """Sizes of what waits in the queue. The thread removes from the left, the event loop appends to the right."""
        self._is_backlog_full = False
        """Whether too many files wait for the archiver."""
        self._gap = 0
        """How many writes were dropped since the last one that was not."""
        self._gap_since_ms = 0.0
        """When the first of them was dropped, Unix ms."""
        self._archiver: subprocess.Popen[bytes] | None = None
        self._archive_from_s: float | None = 0.0  # at once: what an earlier process has left
        """When the archiver is to be started, on the monotonic clock; None: nothing is to be archived."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="genie-history", daemon=True)
        self._thread.start()

    def write(self, lines: bytes) -> None:
        """Queue lines for the thread, or drop them if too much is queued, or if too many files wait for the archiver."""
        if self.error or self._is_backlog_full or sum(self._queued) > MAX_QUEUED_BYTES:
            self._dropped += 1
            if not self._gap:
                self._gap_since_ms = time.time() * 1000
            self._gap += 1
            return
        lines = self._take_gap() + lines
        self._queued.append(len(lines))
        self._queue.put(lines)

    def _take_gap(self) -> bytes:
        """Return the line about the writes that were dropped since the last one that was not; empty if there were none."""
        if not self._gap:
            return b""
        gap, self._gap = records.Gap(self._gap_since_ms, self._gap, time.time() * 1000), 0
        return records.encode_lines([gap])

    @property
    def dropped(self) -> int:
        """How many writes, each with many events, were dropped."""
        return self._dropped + self._discarded

    def write_parts(self, parts: Iterable[bytes]) -> None:
        """Queue lines that the thread itself makes: for the first lines of a recording, which may be very many."""
        self._queued.append(0)
        self._queue.put(parts)
        if self.error:  # the thread has ended, or ends now
            self._drop_queued()

    def _drop_queued(self) -> None:
        """Free what waits for a disk that has failed: up to `MAX_QUEUED_BYTES`, and requests that have ended since."""
        with contextlib.suppress(Empty):
            while True:
                self._discarded += self._queue.get_nowait() is not None

    def close(self) -> None:
        """End the file once everything queued is written."""
        if not self.error and (gap := self._take_gap()):
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
            file = self._open()
            while (lines := self._next_lines(file)) is not None:
                if os.fstat(file.fileno()).st_nlink == 0:  # the file was deleted
                    file.close()
                    file = self._open()
                if lines:
                    file.writelines([lines] if isinstance(lines, bytes) else lines)
                    file.flush()
                    self._queued.popleft()
                if file.tell() >= SEGMENT_BYTES or self._remaining_s(file) == 0:
                    following = self._open()
                    file.close()
                    file, self._archive_from_s = following, 0.0
                    self._check_backlog()
                elif self._is_backlog_full:
                    self._check_backlog()
                self._archive()
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
            self._archiver.wait()

    def _next_lines(self, file: IO[bytes]) -> bytes | Iterable[bytes] | None:
        """Wait for the next lines, at most until the file is complete: then there are none. None: the recording ends."""
        try:
            return self._queue.get(timeout=BACKLOG_CHECK_S if self._is_backlog_full else self._remaining_s(file))
        except Empty:
            return b""

    def _remaining_s(self, file: IO[bytes]) -> float | None:
        """Return the time until the current file is complete; None if it has no events, and so never is."""
        if file.tell() == self._opened_size:
            return None
        return max(0.0, self._opened_at_s + SEGMENT_S - time.monotonic())

    def _open(self) -> IO[bytes]:
        """Create and lock the next file, and write its first line."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._number += 1
        now = time.time()
        name = f"{datetime.fromtimestamp(now, UTC):%Y%m%dT%H%M%S.%fZ}-{self._term}-{self._number:06}{RAW}"
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

    def _check_backlog(self) -> None:
        """Drop events from now on if too many files of this leadership wait for the archiver; otherwise no longer."""
        backlog = 0
        for path in self.directory.glob(f"*-{self._term}-*{RAW}"):
            with contextlib.suppress(FileNotFoundError):  # it is archived meanwhile
                backlog += path.stat().st_size
        is_full = backlog > MAX_BACKLOG_BYTES
        if is_full and not self._is_backlog_full:
            log.warning(
                "history recording paused: files wait for the archiver",
                namespace=self._namespace,
                directory=str(self.directory),
                backlog_bytes=backlog,
            )
        if self._is_backlog_full and not is_full:
            log.info("history recording resumed", namespace=self._namespace, directory=str(self.directory))
        self._is_backlog_full = is_full
        if is_full and self._archiver is None and self._archive_from_s is None:
            # The archiver of another server, which had the lock, may have failed.
            self._archive_from_s = time.monotonic() + ARCHIVER_RETRY_S

    def _archive(self) -> None:
        """Start the archiver if a file is complete, or the last one has failed, and no archiver runs."""
        if self._archiver is not None and self._archiver.poll() is not None:
            if self._archiver.returncode != 0 and self._archive_from_s is None:
                self._archive_from_s = time.monotonic() + ARCHIVER_RETRY_S
            self._archiver = None
        if self._archiver is None and self._archive_from_s is not None and time.monotonic() >= self._archive_from_s:
            command = clean_up_command(self.directory, self._retention)
            try:
                self._archiver = subprocess.Popen(command, stdin=subprocess.DEVNULL)  # noqa: S603 - our own module
            except OSError as error:  # no process can be started now
                log.warning("archiver of the history not started", namespace=self._namespace, error=str(error))
                self._archive_from_s = time.monotonic() + ARCHIVER_RETRY_S
                return
            self._archive_from_s = None
