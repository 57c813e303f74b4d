"""The archiver: compresses and indexes the complete files of the history, and deletes old ones, in a process of its own.

    python -m genie.history.archiver DIRECTORY MAX_BYTES MAX_AGE_S

archives every complete file of a directory. A raw file `NAME.jsonl` becomes `NAME.jsonl.gz`: gzip members of about
`BLOCK_BYTES` each, so that `zcat` reads the file and a search reads single blocks. `NAME.index` is its index. The requests that
are live at the end of a file are its *snapshot*. The next file begins with the snapshot, so each file can be read without the
earlier files.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import time
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, Self

from genie.core import NO_TIMEOUT_MS
from genie.files import open_without_waiting
from genie.history import records
from genie.history.records import (
    Carried,
    Extended,
    Gap,
    Granted,
    Line,
    Locked,
    Moved,
    Opened,
    OtherFormat,
    Queued,
    Released,
    UnreadableHistory,
)
from genie.history.retention import RESERVED_BYTES, Retention
from genie.history.segments import (
    ARCHIVED,
    ENTRY_BYTES,
    GAP_KEY,
    GZIP,
    INDEX,
    NUMBER_BITS,
    STATE,
    Block,
    Segment,
    encode_index,
    first_at,
    is_raw,
    is_recorded,
    is_written,
    key_of,
    list_segments,
    named_files,
    raw_bytes,
    size_of,
)

DAMAGED: Final = ".damaged"
"""Suffix of a raw file that could not be read. It is not searched, and deleted when it is old."""
COMPRESSION_LEVEL: Final = 3
"""zlib's level, from 1 to 9."""
BLOCK_ENTRY_BYTES: Final = 96
"""Maximum size of a block's entry in the header of an index."""
EMPTY_ARCHIVE_BYTES: Final = 1 << 10
"""Maximum size of an archived file without any event, together with its index."""
LEFTOVER_S: Final = 3_600.0
"""Age beyond which a file that belongs to no segment is a leftover. A process may still write a younger file."""
PART_REQUESTS: Final = 100
"""Number of requests of a snapshot that are encoded together."""
EXPIRY_DELAY_MS: Final = 3_600_000.0
"""Maximum time for which a request may stay live after its deadline. It does so while the store is unavailable."""

# -- The requests that are live --------------------------------------------------------------------------


class LiveRequests:
    """The held and waiting requests after the lines that were applied so far."""

    def __init__(self) -> None:
        self.requests: dict[int, Queued] = {}
        self.unrecorded_count = 0
        """Number of live requests whose lines are missing, because there was no room for a snapshot. -1 if the number
        is unknown."""
        self.last_at = 0.0
        """The time of the last line, in Unix ms."""

    def apply(self, line: Line) -> None:
        """Apply one line. A line about an unknown request, whose beginning is not in the history, changes nothing."""
        requests = self.requests
        self.last_at = line.at
        if isinstance(line, Queued):  # also Granted and Carried
            requests[line.id] = line
        elif isinstance(line, Released):
            if requests.pop(line.id, None) is None and self.unrecorded_count > 0:
                self.unrecorded_count -= 1
        elif isinstance(line, Gap):
            if line.live:  # the gap replaces a snapshot
                self.unrecorded_count = line.live
        elif not isinstance(line, Opened) and (request := requests.get(line.id)) is not None:
            requests[line.id] = changed(request, line)  # a grant, an extension or a move

    def carried(self) -> list[Carried]:
        """Return the requests that have not ended, as the lines with which the next file begins.

        A request whose deadline passed long ago is omitted: the request has ended, but its end was not recorded because
        the disk was too slow.
        """
        oldest_deadline = self.last_at - EXPIRY_DELAY_MS
        carried = []
        for request in self.requests.values():
            deadline = deadline_of(request)
            if deadline is not None and deadline < oldest_deadline:
                continue
            if isinstance(request, Carried):
                carried.append(request)
            else:
                carried.append(carry(request, request.at, fence_of(request), deadline, positions=None))
        return carried

    def snapshot(self, max_bytes: int) -> bytes | None:
        """Return the live requests, encoded as the first lines of the next file.

        Return None if some of the live requests are unknown, or if the lines exceed `max_bytes`.
        """
        if self.unrecorded_count:
            return None
        carried, snapshot = self.carried(), bytearray()
        for start in range(0, len(carried), PART_REQUESTS):  # in parts, to stop early if the snapshot is too large
            snapshot += records.encode_lines(carried[start : start + PART_REQUESTS])
            if len(snapshot) > max_bytes:
                return None
        return bytes(snapshot)

    def gap(self) -> Gap:
        """Return the line that replaces a snapshot of these requests."""
        live = -1 if self.unrecorded_count < 0 else self.unrecorded_count + len(self.requests)
        return records.unrecorded(self.last_at, live)


def deadline_of(request: Queued) -> float | None:
    """Return when a request ends at the latest, in Unix ms, or None if it has no time limit."""
    if isinstance(request, Carried):
        return request.deadline
    if isinstance(request, Granted):
        return request.at + request.transaction_timeout_ms
    return None if request.queue_timeout_ms >= NO_TIMEOUT_MS else request.at + request.queue_timeout_ms


def fence_of(request: Queued) -> int:
    """Return the fencing token of a request, or 0 if it waits."""
    return request.fence if isinstance(request, Granted) else 0


def carry(
    request: Queued, at: float, fence: int, deadline: float | None, positions: dict[str, tuple[float, int]] | None
) -> Carried:
    """Return a request in its current state, as a line of the next file. The other arguments are as in `Carried`."""
    fields: dict[str, Any] = {name: getattr(request, name) for name in Queued.__struct_fields__ if name != "at"}
    return Carried(at, **fields, fence=fence, deadline=deadline, positions=positions)


def changed(request: Queued, line: Locked | Extended | Moved) -> Queued:
    """Return a request with the changes of a line about it: its grant, its extension or its new positions."""
    if isinstance(line, Locked):
        deadline = line.at + request.transaction_timeout_ms
        return carry(request, line.at, line.fence, deadline, positions=None)
    if isinstance(line, Extended) and isinstance(request, Granted):
        deadline = line.at + line.transaction_timeout_ms
        return carry(request, request.at, request.fence, deadline, positions=None)
    if isinstance(line, Moved) and not fence_of(request):  # it still waits
        return carry(request, request.at, 0, deadline_of(request), line.positions)
    return request


# -- One file ---------------------------------------------------------------------------------------------


class _ArchiveWriter:
    """Writes the blocks and the index of one archived file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = _create(path)
        self._blocks: list[Block] = []
        self._pairs: list[int] = []
        """Each key combined with the number of a block that contains the key, in the format of `encode_index`."""
        self._keys: dict[int, list[int]] = {}
        """Keys of the requests that are live, by id."""
        self._event_count = 0
        self._is_unrecorded = False
        """True if a gap replaces the snapshot with which the file begins."""

    def add(self, lines: list[Line], text: bytes, reserve: Callable[[int], bool]) -> bool:
        """Append one block, whose encoded `lines` are `text`. Return False if `reserve` has no room for it.

        `reserve` is called with the bytes that the archive and its index become larger. Raises UnreadableHistory if the
        file has too many blocks.
        """
        block_keys, times = self._keys_and_times(lines)
        number = len(self._blocks)
        if number >> NUMBER_BITS:  # more bits than the index has for the number of a block
            raise UnreadableHistory(f"{self._path}: too large to be archived: it has more than {number} blocks")
        compressor = zlib.compressobj(COMPRESSION_LEVEL, zlib.DEFLATED, GZIP)
        member = compressor.compress(text) + compressor.flush()
        if not reserve(len(member) + BLOCK_ENTRY_BYTES + ENTRY_BYTES * len(block_keys)):
            return False
        self._pairs += [key << NUMBER_BITS | number for key in block_keys]
        offset = self._file.tell()
        first, last = (min(times), max(times)) if times else (None, None)
        self._file.write(member)
        self._blocks.append(Block(offset, len(member), first, last))
        self._event_count += len(times)
        return True

    def _keys_and_times(self, lines: list[Line]) -> tuple[set[int], array[float]]:
        """Return the index keys and the times of the events of a block. Updates the keys of the live requests."""
        block_keys, times = set[int](), array("d")
        for line in lines:
            if isinstance(line, (Locked, Released, Extended, Moved)):
                block_keys.update(self._keys.get(line.id, ()))
                if isinstance(line, Released):
                    self._keys.pop(line.id, None)
            elif isinstance(line, Queued):
                self._keys[line.id] = _keys_of(line)
                block_keys.update(self._keys[line.id])
            elif isinstance(line, Gap) and line.live:
                self._is_unrecorded = True
                continue  # this gap lacks no events
            elif isinstance(line, Gap):
                block_keys.add(GAP_KEY)
            if records.is_event(line):
                times.append(line.at)
        return block_keys, times

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        """Close the file durably."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def index(self) -> bytes:
        """Return the index of the file."""
        return encode_index(self._blocks, self._pairs, self._event_count, is_unrecorded=self._is_unrecorded)


def _keys_of(request: Queued) -> list[int]:
    """Return the index keys of a request: of its resources, its transaction and its client."""
    keys = [key_of("r", name) for name in request.names]
    if request.transaction is not None:
        keys.append(key_of("t", request.transaction))
    if request.principal is not None:
        keys.append(key_of("c", request.principal))
    return keys


def archive(segment: Segment, following: Segment | None, room: Room) -> int:
    """Compress and index one raw file, and write the snapshot with which the `following` file begins.

    A gap replaces events or a snapshot for which there is no room. Return the number of new gaps.

    The raw file is deleted when its archive is durable. If this process is killed before, the next process archives the
    raw file again.
    """
    archived, index, snapshot = segment.sibling(ARCHIVED), segment.sibling(INDEX), segment.sibling(STATE)
    part, live = archived.with_name(f"{archived.name}.part"), LiveRequests()
    room.reserve(EMPTY_ARCHIVE_BYTES)
    with _ArchiveWriter(part) as writer:
        is_complete = _copy(segment, live, writer, room)
    _write_durably(index, writer.index())
    gap_count = 0 if is_complete else 1
    if following is not None and not following.is_archived:
        gap_count += _write_snapshot(following, live, room)
    part.rename(archived)
    _sync_directory(segment.path.parent)
    segment.path.unlink()
    room.release(size_of(snapshot))
    snapshot.unlink(missing_ok=True)
    room.add_deletable(archived, index)
    return gap_count


def _write_snapshot(following: Segment, live: LiveRequests, room: Room) -> int:
    """Write the live requests with which a file begins, or a gap if there is no room.

    Return the number of new gaps, 0 or 1.
    """
    path, snapshot = following.sibling(STATE), live.snapshot(room.retention.snapshot_bytes)
    if snapshot is not None and room.reserve(len(snapshot)):
        _write_durably(path, snapshot)
        return 0
    _write_durably(path, records.encode_lines([live.gap()]))
    began_before = live.unrecorded_count != 0  # in an earlier file, which has counted the gap
    return 0 if began_before else 1


def _copy(segment: Segment, live: LiveRequests, writer: _ArchiveWriter, room: Room) -> bool:
    """Apply the lines of a raw file to `live`, and copy them to an archive while there is room.

    A gap replaces the rest. Return whether all lines were copied.
    """
    gap: Gap | None = None
    for lines in _lines_to_archive(segment):
        for line in lines:
            live.apply(line)
        if gap is None and writer.add(lines, records.encode_lines(lines), room.reserve):
            continue
        times = [line.at for line in lines if records.is_event(line)] or [live.last_at]
        if gap is None:
            gap = Gap(min(times), dropped=1, until=max(times))
        gap.at, gap.until = min(gap.at, *times), max(gap.until, *times)
    if gap is not None:
        writer.add([gap], records.encode_lines([gap]), lambda _bytes: True)  # `EMPTY_ARCHIVE_BYTES` are reserved
    return gap is None


def _lines_to_archive(segment: Segment) -> Iterator[list[Line]]:
    """Yield the lines of a raw file, several at a time.

    If the live requests are unknown, because the previous file was deleted, the first line is a gap.
    """
    if segment.number > 1 and not segment.sibling(STATE).is_file():
        yield [records.unrecorded(first_at(segment), live=-1)]
    yield from segment.read()


def _create(path: Path) -> BinaryIO:
    """Create a file, in place of what a killed process has left. A FIFO with this name would wait for its reader."""
    path.unlink(missing_ok=True)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


def _write_durably(path: Path, content: bytes) -> None:
    """Write a file that only the owner can read, so that after a crash it is complete or does not exist."""
    part = path.with_name(f"{path.name}.part")
    with _create(part) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    part.rename(path)


def _sync_directory(directory: Path) -> None:
    """Make the renamed and created files of a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# -- A directory ------------------------------------------------------------------------------------------


class Room:
    """The bytes of a directory that the archiver may still use. The oldest files are deleted to make room.

    Raw files do not count: they have a share of their own, which the servers use.
    """

    def __init__(self, directory: Path, retention: Retention) -> None:
        self._directory, self.retention = directory, retention
        segments = list_segments(directory)
        files = [path for path, _ in named_files(directory) if not is_raw(path)]
        self._used_bytes = sum(map(size_of, files))
        """Bytes of all files except raw files."""
        segment_files = {path for segment in segments for path in segment.files}
        others = [path for path in sorted(files) if path not in segment_files]  # leftovers and damaged files
        self._deletable: deque[tuple[Path, ...]] = deque((path,) for path in others)
        """The files that may be deleted, in the order of their deletion. The files of a tuple are deleted together."""
        self._deletable += [segment.files for segment in segments if segment.is_archived]

    def reserve(self, count: int) -> bool:
        """Delete old files until `count` more bytes fit, and count these as used. Return False if they do not fit."""
        has_room = self._shrink_to(self.retention.archive_bytes - count)
        if has_room:
            self._used_bytes += count
        return has_room

    def add_deletable(self, *paths: Path) -> None:
        """Allow that files are deleted together to make room. Their bytes are reserved already."""
        self._deletable.append(paths)

    def release(self, count: int) -> None:
        """Subtract the bytes of files that the caller deletes."""
        self._used_bytes -= count

    def shrink(self) -> None:
        """Delete the oldest files until the others fit, and the server has room for one more raw file.

        Archives are deleted first, then raw files that no server writes any more.
        """
        self._shrink_to(self.retention.archive_bytes)
        segments = list_segments(self._directory)
        complete = [segment for segment in segments if not segment.is_archived and not is_recorded(segment)]
        total_raw_bytes = raw_bytes(self._directory, self.retention)
        for segment in complete:
            raw_fits = total_raw_bytes <= self.retention.raw_bytes - RESERVED_BYTES
            if raw_fits and self._used_bytes <= self.retention.archive_bytes:
                return
            total_raw_bytes -= size_of(segment.path)
            self._delete([segment.sibling(STATE)])
            segment.path.unlink(missing_ok=True)

    def _shrink_to(self, max_bytes: int) -> bool:
        """Delete the oldest files until at most `max_bytes` are used. Return whether that was possible."""
        while self._used_bytes > max_bytes and self._deletable:
            self._delete(self._deletable.popleft())
        return self._used_bytes <= max_bytes

    def _delete(self, paths: Iterable[Path]) -> None:
        """Delete files, and subtract their bytes."""
        for path in paths:
            self._used_bytes -= size_of(path)
            path.unlink(missing_ok=True)


def archive_complete(directory: Path, retention: Retention | None = None) -> int:
    """Archive each raw file that no server writes any more, in order. Return the number of dropped writes.

    A file that cannot be read is renamed, so that later files are archived. Files of another version of Genie are left
    to that version. If they take more than half of the room for raw files, the oldest are deleted.
    """
    foreign: dict[str, Segment] = {}
    """The files of another version of Genie, by stem."""
    room, dropped = Room(directory, retention or Retention()), 0
    while True:
        raw = [segment for segment in list_segments(directory) if not segment.is_archived]
        complete = [segment for segment in raw if segment.stem not in foreign and not is_written(segment.path)]
        if not complete:
            break
        # List the files again: a server may have begun a further file just before it completed the last one.
        by_number = {(segment.term, segment.number): segment for segment in list_segments(directory)}
        for segment in complete:
            try:
                dropped += archive(segment, by_number.get((segment.term, segment.number + 1)), room)
            except OtherFormat as error:
                foreign[segment.stem] = segment
                sys.stderr.write(f"{error}; it is not archived\n")
            except UnreadableHistory as error:
                _set_aside(segment.path, error, room)
    _limit_foreign([*foreign.values()], room.retention.raw_bytes // 2)
    return dropped


def _set_aside(path: Path, error: UnreadableHistory, room: Room) -> None:
    """Rename a raw file that cannot be read, or delete it if there is no room for it among the archived files."""
    if room.reserve(size_of(path)):
        damaged = path.with_name(f"{path.name}{DAMAGED}")
        sys.stderr.write(f"{error}; it is kept as {damaged.name}\n")
        path.rename(damaged)
        room.add_deletable(damaged)
    else:
        sys.stderr.write(f"{error}; it is deleted, because there is no room for it\n")
        path.unlink()


def _limit_foreign(segments: list[Segment], max_bytes: int) -> None:
    """Delete the first of these files until the others have at most `max_bytes`."""
    total_bytes = sum(size_of(segment.path) for segment in segments)
    for segment in segments:
        if total_bytes <= max_bytes:
            return
        total_bytes -= size_of(segment.path)
        segment.path.unlink(missing_ok=True)


def delete_expired(directory: Path, max_age_s: float, now_ms: float) -> None:
    """Delete archived files, the oldest first, until none is older than `max_age_s`.

    Files that cannot be archived, and leftovers of killed processes, are deleted when they are older than `max_age_s`.
    """
    segments = list_segments(directory)
    for segment in segments:
        if segment.is_archived:
            if now_ms - _ages_from_ms(segment) <= max_age_s * 1000:
                break
            for path in segment.files:
                path.unlink(missing_ok=True)
    kept: set[Path] = set()
    for segment in segments:
        if segment.is_archived or _is_young(segment.path, max_age_s, now_ms) or is_written(segment.path):
            kept.update(segment.files)
    for path, _ in named_files(directory):
        if path not in kept:
            with contextlib.suppress(FileNotFoundError):
                if not _is_young(path, max_age_s, now_ms):
                    path.unlink()


def _is_young(path: Path, max_age_s: float, now_ms: float) -> bool:
    """Return whether a file was changed in the last `max_age_s`, but at least in the last `LEFTOVER_S`."""
    changed_at_ms = path.stat().st_mtime * 1000
    return now_ms - changed_at_ms <= max(max_age_s, LEFTOVER_S) * 1000


def _ages_from_ms(segment: Segment) -> float:
    """Return the Unix time in ms from which the age of an archived file counts: its last event, or else its creation."""
    with contextlib.suppress(UnreadableHistory):
        if segment.header.events:
            return segment.header.last_at
    return segment.path.stat().st_mtime * 1000


def shrink(directory: Path, retention: Retention) -> None:
    """Delete the oldest files of a directory until the rest is within the retention.

    Do nothing if an archiver runs, which does the same.
    """
    with _archiver_lock(directory) as is_locked:
        if is_locked:
            Room(directory, retention).shrink()


def clean_up(directory: Path, retention: Retention) -> int:
    """Archive the complete files of a directory, and delete the expired files. Return the number of dropped writes.

    Only one process does this at a time.
    """
    with _archiver_lock(directory) as is_locked:
        if not is_locked:
            return 0
        Room(directory, retention).shrink()
        try:
            return archive_complete(directory, retention)
        finally:  # also if the disk is full: this makes room
            delete_expired(directory, retention.max_age_s, time.time() * 1000)


@contextlib.contextmanager
def _archiver_lock(directory: Path) -> Iterator[bool]:
    """Lock a directory for the duration of the block. Yield False if another process has locked it."""
    with open(directory / "archiver.lock", "wb", opener=open_without_waiting) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def main(arguments: list[str]) -> None:
    """Clean up a directory, and print how many writes were dropped.

    The arguments are the directory, the maximum bytes of its files, and their maximum age in seconds.
    """
    directory, max_bytes, max_age_s = arguments
    with contextlib.suppress(OSError):
        os.nice(19)  # leaves the processor to the server
    try:
        dropped = clean_up(Path(directory), Retention(int(max_bytes), float(max_age_s)))
    except OSError as error:
        sys.exit(f"the history in {directory} cannot be archived: {error}")
    with contextlib.suppress(BrokenPipeError):  # the server has ended
        sys.stdout.write(f"{dropped}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
