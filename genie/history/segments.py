"""The files of the history: compresses and indexes complete files, deletes old ones, and reads them.

    python -m genie.history.segments DIRECTORY MAX_BYTES MAX_AGE_S

archives every complete file of a directory. A raw file `NAME.jsonl` becomes `NAME.jsonl.gz`: gzip members of about
`BLOCK_BYTES` each, so that `zcat` reads the file and a search reads single blocks. `NAME.index` has the time and place of
each block, and for each resource, transaction and client the blocks with their events. The requests that are live at the
end of a file are the first lines of the next one, so each file can be understood without the earlier ones.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import sys
import time
import zlib
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, Self

from msgspec import Struct, json

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
    RawDecoder,
    Released,
    UnreadableHistory,
    without_partial_line,
)
from genie.history.retention import RESERVED_BYTES, Retention

BLOCK_BYTES: Final = 128 << 10
"""Bytes of lines in a block before its compression."""
RAW: Final = ".jsonl"
ARCHIVED: Final = ".jsonl.gz"
INDEX: Final = ".index"
STATE: Final = ".state"
"""Suffix of the file with the requests that are carried into a raw file, until that file is archived."""
DAMAGED: Final = ".damaged"
"""Suffix of a raw file that could not be read. It is not searched, and deleted when it is old."""
LEVEL: Final = 3
BLOCK_ENTRY_BYTES: Final = 96
"""Bytes of a block in the header of an index at most."""
EMPTY_ARCHIVE_BYTES: Final = 1 << 10
"""Bytes of an archived file in which everything is missing, with its index, at most."""
CRC_BYTES: Final = 4
_KEY_BYTES: Final = 4
_ENTRY_BYTES: Final = _KEY_BYTES + 2
"""Bytes of a key and the number of a block in an index."""
_NUMBER_BITS: Final = 16
"""Bits of the number of a block in an index."""
_NAME: Final = re.compile(
    r"(?P<stem>[0-9]{8}T[0-9]{6}\.[0-9]{6}Z-(?P<term>[0-9a-f]{8})-(?P<number>[0-9]{6,}))(?P<suffix>\..+)"
)
"""The name of a file: time of its first line, leadership, and number in it."""
LEFTOVER_S: Final = 3_600.0
"""Seconds after which a file that belongs to no other one is not one that is being written."""
_HEAD_BYTES: Final = 4 << 10
"""Bytes of the first two lines of a file at most, if the second one is a gap."""
_GZIP: Final = 31
"""`wbits` of zlib for a gzip member."""


_PART_REQUESTS: Final = 100
"""Number of requests of a snapshot that are encoded together."""
EXPIRY_DELAY_MS: Final = 3_600_000.0
"""How long after its deadline a request is live at most. It ends late if the store is unavailable."""

# -- The requests that are live --------------------------------------------------------------------------


class LiveRequests:
    """The requests that are held or wait, according to the lines so far."""

    def __init__(self) -> None:
        self.requests: dict[int, Queued] = {}
        self.unrecorded = 0
        """Number of live requests whose lines are missing, because a snapshot was left out; -1: not known."""
        self.last_at = 0.0
        """The time of the last line."""

    def apply(self, line: Line) -> None:
        """Apply one line. A line about an unknown request, whose beginning is not in the history, changes nothing."""
        requests = self.requests
        self.last_at = line.at
        match line:
            case Queued():  # also Granted and Carried
                requests[line.id] = line
            case Locked():
                request = requests.get(line.id)
                if request is not None:
                    expires = line.at + request.transaction_timeout_ms
                    requests[line.id] = carry(request, line.at, line.fence, expires, None)
            case Released():
                self._end(line.id)
            case Gap():
                self.unrecorded = line.live or self.unrecorded
            case Extended():
                request = requests.get(line.id)
                if isinstance(request, Granted):
                    extended = line.at + line.transaction_timeout_ms
                    requests[line.id] = carry(request, request.at, request.fence, extended, None)
            case Moved():
                request = requests.get(line.id)
                if request is not None and not getattr(request, "fence", 0):
                    requests[line.id] = carry(request, request.at, 0, deadline_of(request), line.positions)
            case _:
                pass

    def _end(self, id_: int) -> None:
        if self.requests.pop(id_, None) is None and self.unrecorded > 0:
            self.unrecorded -= 1

    def carried(self) -> list[Carried]:
        """Return the requests as the first lines of the next file.

        A request whose deadline is long over has ended, but its end is missing, because the disk was too slow. It would be
        carried until the end of the leadership, and is left out.
        """
        carried = [
            request
            if isinstance(request, Carried)
            else carry(request, request.at, getattr(request, "fence", 0), deadline_of(request), None)
            for request in self.requests.values()
        ]
        return [each for each in carried if each.deadline is None or each.deadline >= self.last_at - EXPIRY_DELAY_MS]

    def snapshot(self, max_bytes: int) -> bytes | None:
        """Return the requests as the first lines of the next file; None if not all are known, or they have more than `max_bytes`."""
        if self.unrecorded:
            return None
        carried, parts, size = self.carried(), list[bytes](), 0
        for at in range(0, len(carried), _PART_REQUESTS):
            parts.append(records.encode_lines(carried[at : at + _PART_REQUESTS]))
            size += len(parts[-1])
            if size > max_bytes:
                return None
        return b"".join(parts)

    def gap(self) -> Gap:
        """Return the line in place of the snapshot."""
        return records.unrecorded(self.last_at, -1 if self.unrecorded < 0 else self.unrecorded + len(self.requests))


def deadline_of(request: Queued) -> float | None:
    """Return when a request ends at the latest, in Unix ms; None: never."""
    if isinstance(request, Carried):
        return request.deadline
    if isinstance(request, Granted):
        return request.at + request.transaction_timeout_ms
    return None if request.queue_timeout_ms >= NO_LIMIT_MS else request.at + request.queue_timeout_ms


NO_LIMIT_MS: Final = 2_147_483_647


def carry(
    request: Queued, at: float, fence: int, deadline: float | None, positions: dict[str, tuple[float, int]] | None
) -> Carried:
    """Return a request in its current state, as a line of the next file."""
    return Carried(
        at,
        request.id,
        request.exclusive,
        request.shared,
        request.transaction,
        request.priority,
        request.queue_timeout_ms,
        request.transaction_timeout_ms,
        request.release_on_disconnect,
        request.principal,
        request.note,
        request.waits_for,
        fence,
        deadline,
        positions,
    )


# -- The index -------------------------------------------------------------------------------------------


class Block(Struct, array_like=True, gc=False):
    """A gzip member: its place in the file, and the times of its first and last event (Unix ms).

    The times are None in a block without events, such as one with requests that are carried into the file.
    """

    offset: int
    size: int
    first_at: float | None
    last_at: float | None


class IndexHeader(Struct):
    """The first line of an index.

    `entries` keys (4 bytes each, ascending) follow, as many block numbers (2 bytes), and the CRC-32 of all this (4 bytes).
    """

    blocks: list[Block]
    entries: int
    events: int
    first_at: float
    last_at: float
    is_unrecorded: bool = False
    """Whether the file does not have the requests of the time before it, because they were too large."""


def key_of(kind: str, name: str) -> int:
    """Return the key of a resource (`kind` is `r`), a transaction (`t`) or a client (`c`) in an index.

    A key is the CRC-32 of kind and name, because it takes a fifth of the time of a cryptographic digest. Two names with the
    same key only make a search read more blocks.
    """
    return zlib.crc32(name.encode(), zlib.crc32(kind.encode()))


GAP_KEY: Final = key_of("gap", "")
"""The key of the blocks in which events are missing."""


def _keys_of(request: Queued) -> list[int]:
    keys = [key_of("r", name) for name in request.exclusive + request.shared]
    if request.transaction is not None:
        keys.append(key_of("t", request.transaction))
    if request.principal is not None:
        keys.append(key_of("c", request.principal))
    return keys


class _ArchiveWriter:
    """Writes the blocks and the index of one archived file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")
        self.blocks: list[Block] = []
        self._pairs: list[int] = []
        """Each key with the number of a block that has it, in the last `_NUMBER_BITS`."""
        self._keys: dict[int, list[int]] = {}
        """Keys of the requests that are live, by id."""
        self.events = 0
        self._is_unrecorded = False

    def add(self, lines: list[Line], text: bytes, take: Callable[[int], bool]) -> bool:
        """Append one block: `text` is the encoded `lines`. Return False, without it, if `take` gives no room for its bytes."""
        keys, keys_of_block, times = self._keys, set[int](), array("d")
        for line in lines:
            if isinstance(line, (Locked, Released, Extended, Moved)):
                keys_of_block.update(keys.get(line.id, ()))
                if type(line) is Released:
                    keys.pop(line.id, None)
            elif isinstance(line, Queued):
                found = keys[line.id] = _keys_of(line)
                keys_of_block.update(found)
                if isinstance(line, Carried):
                    continue
            elif isinstance(line, Gap):
                if line.live:
                    self._is_unrecorded = True
                    continue
                keys_of_block.add(GAP_KEY)
            else:
                continue
            times.append(line.at)
        number = len(self.blocks)
        if number >> _NUMBER_BITS:
            raise UnreadableHistory(f"{self._path}: too large to be archived: it has more than {number} blocks")
        compressor = zlib.compressobj(LEVEL, zlib.DEFLATED, _GZIP)
        member = compressor.compress(text) + compressor.flush()
        if not take(len(member) + BLOCK_ENTRY_BYTES + _ENTRY_BYTES * len(keys_of_block)):
            return False
        self._pairs += [key << _NUMBER_BITS | number for key in keys_of_block]
        offset = self._file.tell()
        first, last = (min(times), max(times)) if times else (None, None)
        self._file.write(member)
        self.blocks.append(Block(offset, len(member), first, last))
        self.events += len(times)
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        """Close the file durably."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def index(self) -> bytes:
        """Return the index of the file."""
        pairs = sorted(self._pairs)
        first = min((block.first_at for block in self.blocks if block.first_at is not None), default=0.0)
        last = max((block.last_at for block in self.blocks if block.last_at is not None), default=0.0)
        header = IndexHeader(self.blocks, len(pairs), self.events, first, last, self._is_unrecorded)
        keys = array("I", [pair >> _NUMBER_BITS for pair in pairs])
        numbers = array("H", [pair & (1 << _NUMBER_BITS) - 1 for pair in pairs])
        content = json.encode(header) + b"\n" + keys.tobytes() + numbers.tobytes()
        return content + zlib.crc32(content).to_bytes(CRC_BYTES, "little")


# -- Reading ---------------------------------------------------------------------------------------------


@dataclass
class Segment:
    """One file of the history, raw or archived. `path` is where it was when the directory was listed."""

    path: Path
    term: str
    number: int
    _header: IndexHeader | None = None
    _index: bytes = field(default=b"", repr=False)

    @property
    def stem(self) -> str:
        """The name of the file without its suffixes."""
        return self.path.name.partition(".jsonl")[0]

    @property
    def is_archived(self) -> bool:
        """Whether the file is compressed and indexed."""
        return self.path.name.endswith(ARCHIVED)

    @property
    def is_self_contained(self) -> bool:
        """Whether the file has all requests that are live at its begin."""
        if not self.is_archived:
            first = self.path if self.number == 1 else self.path.with_name(self.stem + STATE)
            with contextlib.suppress(FileNotFoundError), first.open("rb") as file:
                return not records.begins_unrecorded(file.read(_HEAD_BYTES))
            archived = self.path.with_name(self.stem + ARCHIVED)
            if not archived.exists():  # the file before is not archived yet
                return False
            self.path = archived  # meanwhile
        return not self.header.is_unrecorded

    @property
    def header(self) -> IndexHeader:
        """The header of the index of an archived file."""
        if self._header is None:
            path = self.path.with_name(self.stem + INDEX)
            try:
                content = path.read_bytes()
            except FileNotFoundError:
                if not self.path.exists():
                    raise  # both were deleted meanwhile
                raise UnreadableHistory(f"{self.path} has no index") from None
            self._index = content[:-CRC_BYTES]
            if zlib.crc32(self._index).to_bytes(CRC_BYTES, "little") != content[-CRC_BYTES:]:
                raise UnreadableHistory(f"{path}: damaged")
            encoded, _, entries = self._index.partition(b"\n")
            try:
                self._header = json.decode(encoded, type=IndexHeader)
            except ValueError as error:
                raise UnreadableHistory(f"{path}: {error}") from None
            if len(entries) != _ENTRY_BYTES * self._header.entries:
                raise OtherFormat(f"{path}: another version of Genie has written this index")
        return self._header

    def blocks_with(self, keys: Iterable[int]) -> set[int]:
        """Return the numbers of the blocks of an archived file that have events with one of the keys."""
        header = self.header
        start = self._index.index(b"\n") + 1
        end = start + _KEY_BYTES * header.entries
        view = memoryview(self._index)
        sorted_keys, numbers = view[start:end].cast("I"), view[end:].cast("H")
        found = set()
        for key in keys:
            position = bisect_left(sorted_keys, key)
            while position < header.entries and sorted_keys[position] == key:
                found.add(numbers[position])
                position += 1
        return found

    def read_blocks(self, numbers: Iterable[int]) -> Iterator[list[Line]]:
        """Yield the lines of blocks of an archived file, in the given order."""
        blocks = self.header.blocks
        with self.path.open("rb") as file:
            for number in numbers:
                block = blocks[number]
                file.seek(block.offset)
                try:
                    text = zlib.decompress(file.read(block.size), _GZIP)
                except zlib.error as error:
                    raise UnreadableHistory(f"{self.path}: {error}") from None
                yield self._decode(records.decode, text)

    def read(self) -> Iterator[list[Line]]:
        """Yield all lines of the file, several at a time. A raw file begins with the requests that are carried into it."""
        if not self.is_archived:
            decode = partial(self._decode, RawDecoder().decode)
            try:
                with contextlib.suppress(FileNotFoundError):
                    yield from map(decode, _blocks_of_lines(self.path.with_name(self.stem + STATE)))
                yield from map(decode, _blocks_of_lines(self.path))
            except FileNotFoundError:
                archived = self.path.with_name(self.stem + ARCHIVED)
                if not archived.exists():
                    raise
                self.path = archived  # meanwhile
            else:
                return
        yield from self.read_blocks(range(len(self.header.blocks)))

    def _decode(self, decode: Callable[[bytes], list[Line]], text: bytes) -> list[Line]:
        try:
            return decode(text)
        except UnreadableHistory as error:
            raise type(error)(f"{self.path}: {error}") from None


def _blocks_of_lines(path: Path) -> Iterator[bytes]:
    """Yield the complete lines of a file, about `BLOCK_BYTES` at a time."""
    with path.open("rb") as file:
        rest = b""
        while read := file.read(BLOCK_BYTES):
            complete = without_partial_line(rest + read)
            rest = (rest + read)[len(complete) :]
            if complete:
                yield complete


def last_at(segment: Segment) -> float:
    """Return the time of the last event of a file, Unix ms; 0 if it has none."""
    if segment.is_archived:
        return segment.header.last_at
    lines = (line for lines in segment.read() for line in lines if not isinstance(line, (Opened, Carried)))
    return max((line.at for line in lines), default=0.0)


def list_segments(directory: Path) -> list[Segment]:
    """Return the files of a directory: leadership by leadership, each by its numbers. Other files are ignored.

    The order of the names is not enough: a clock that is set back gives a file an earlier name than the one before it.
    """
    found: dict[str, Segment] = {}
    begins: dict[str, str] = {}
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match is not None and match["suffix"] in (RAW, ARCHIVED):
            # While a file is archived, both exist: the raw one is complete until it is deleted.
            segment = found.setdefault(match["stem"], Segment(path, match["term"], int(match["number"])))
            begins[segment.term] = min(segment.stem, begins.get(segment.term, segment.stem))
    return sorted(found.values(), key=lambda segment: (begins[segment.term], segment.number))


def recorded_terms(directory: Path, since: float, until: float) -> Iterator[Iterator[Line]]:
    """Yield the lines of each leadership with events from `since` to `until` (Unix ms), for a replay.

    The lines of a leadership begin with the last file that begins before `since`, with the requests that are carried into it.
    If these are not recorded in it, the lines begin with an earlier file; if they are in no file, with a gap that says so.
    """
    by_term: dict[str, list[Segment]] = {}
    for segment in list_segments(directory):
        by_term.setdefault(segment.term, []).append(segment)
    for segments in by_term.values():
        starts = [_first_at(segment) for segment in segments]
        first = max((index for index, start in enumerate(starts) if start <= since), default=0)
        while first > 0 and not segments[first].is_self_contained:
            first -= 1
        chosen = [segment for segment, start in zip(segments, starts, strict=True) if start <= until][first:]
        if chosen:
            yield _lines_for_replay(chosen, until)


def _lines_for_replay(segments: list[Segment], until: float) -> Iterator[Line]:
    """Yield the lines of files of one leadership. Only the first file may say that the requests before it are not recorded."""
    if not segments[0].is_self_contained:
        yield records.unrecorded(_first_at(segments[0]), -1)
    for segment in segments:
        for lines in segment.read():
            yield from (line for line in lines if line.at <= until and not (isinstance(line, Gap) and line.live))


def _first_at(segment: Segment) -> float:
    """Return the time of the `opened` line of a file."""
    opened = (line.at for lines in segment.read() for line in lines if isinstance(line, Opened))
    return next(opened, 0.0)


# -- Archiving -------------------------------------------------------------------------------------------


class Room:
    """The bytes of a directory that the archiver may still use. The oldest files are deleted to make room.

    What the archiver writes are all files except the raw ones, for which the servers have a share of their own.
    """

    def __init__(self, directory: Path, retention: Retention) -> None:
        self._directory, self.retention = directory, retention
        segments = list_segments(directory)
        files = [path for path in directory.iterdir() if (match := _NAME.fullmatch(path.name)) and not _is_raw(match)]
        self._used = sum(map(_size, files))
        owned = {path for segment in segments for path in _files_of(segment)}
        self._deletable: deque[tuple[Path, ...]] = deque((path,) for path in sorted(files) if path not in owned)
        """Files from the oldest to the latest, first what killed archivers have left and what cannot be read."""
        self._deletable += [_files_of(segment) for segment in segments if segment.is_archived]

    def take(self, count: int) -> bool:
        """Make room for `count` bytes. Return whether there is room; then they are used."""
        has_room = self._shrink_to(self.retention.archive_bytes - count)
        self._used += count * has_room
        return has_room

    def add(self, *paths: Path) -> None:
        """Note files that may be deleted from now on. Their bytes are taken already."""
        self._deletable.append(paths)

    def free(self, count: int) -> None:
        """Note that files with `count` bytes were deleted."""
        self._used -= count

    def shrink(self) -> None:
        """Delete the oldest files until all others fit, and the raw ones leave the server room to begin another one."""
        segments = list_segments(self._directory)
        complete = deque(segment for segment in segments if not segment.is_archived and not is_recorded(segment))
        raw = raw_bytes(self._directory, self.retention)
        self._shrink_to(self.retention.archive_bytes)
        while complete and (
            raw > self.retention.raw_bytes - RESERVED_BYTES or self._used > self.retention.archive_bytes
        ):
            segment = complete.popleft()
            raw -= _size(segment.path)
            self._delete(_files_of(segment)[1:])
            segment.path.unlink(missing_ok=True)

    def _shrink_to(self, max_bytes: int) -> bool:
        """Delete the oldest files until at most `max_bytes` are used. Return whether that was possible."""
        while self._used > max_bytes and self._deletable:
            self._delete(self._deletable.popleft())
        return self._used <= max_bytes

    def _delete(self, paths: Iterable[Path]) -> None:
        for path in paths:
            self._used -= _size(path)
            path.unlink(missing_ok=True)


def _is_raw(name: re.Match[str]) -> bool:
    """Return whether a file is written by a server."""
    return name["suffix"] in (RAW, f"{RAW}.part")


def raw_bytes(directory: Path, retention: Retention, except_stem: str = "") -> int:
    """Return the bytes of the raw files of a directory. A file that a server writes now counts as a complete one at least."""
    total = 0
    for path in directory.iterdir():
        match = _NAME.fullmatch(path.name)
        if match is not None and _is_raw(match) and match["stem"] != except_stem:
            with contextlib.suppress(FileNotFoundError):  # it is archived meanwhile
                total += max(_size(path), retention.segment_bytes if is_written(path) else 0)
    return total


def archive_complete(directory: Path, retention: Retention | None = None) -> int:
    """Archive each raw file that no server writes any more, in order. Return how many writes were dropped.

    A file that cannot be read is renamed, so that the files after it are archived; one of another version of Genie is left to
    that version, as long as such files leave room for others.
    """
    left: dict[str, Segment] = {}
    room, dropped = Room(directory, retention or Retention()), 0
    while True:
        raw = [segment for segment in list_segments(directory) if not segment.is_archived]
        complete = [segment for segment in raw if segment.stem not in left and not is_written(segment.path)]
        if not complete:
            break
        # Listed again, because a server may have begun the file that follows just before it completed the last one.
        by_number = {(segment.term, segment.number): segment for segment in list_segments(directory)}
        for segment in complete:
            try:
                dropped += archive(segment, by_number.get((segment.term, segment.number + 1)), room)
            except OtherFormat as error:
                left[segment.stem] = segment
                sys.stderr.write(f"{error}; it is not archived\n")
            except UnreadableHistory as error:
                damaged = segment.path.with_name(f"{segment.path.name}{DAMAGED}")
                sys.stderr.write(f"{error}; it is kept as {damaged.name}\n")
                if room.take(_size(segment.path)):
                    segment.path.rename(damaged)
                    room.add(damaged)
                else:
                    segment.path.unlink()
    sizes = {stem: _size(segment.path) for stem, segment in left.items()}
    for stem, segment in left.items():
        if sum(sizes.values()) > room.retention.raw_bytes // 2:
            sizes[stem] = 0
            segment.path.unlink(missing_ok=True)
    return dropped


def is_recorded(segment: Segment) -> bool:
    """Return whether a server still writes a file."""
    try:
        return not segment.is_archived and is_written(segment.path)
    except FileNotFoundError:  # it is archived meanwhile
        return False


def is_written(path: Path) -> bool:
    """Return whether a server still writes a raw file: it holds a lock on the file."""
    with path.open("rb") as file:
        try:
            # Shared, because NFS rejects an exclusive lock on a file that is open for reading.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def archive(segment: Segment, following: Segment | None, room: Room) -> int:
    """Compress and index one raw file, and write the snapshot for the `following` file of the same term.

    What does not fit is replaced by a gap. Returns the number of gaps. The raw file is deleted last: a process that is killed
    before leaves nothing half, and archives the file again.
    """
    directory, stem = segment.path.parent, segment.stem
    archived, index, state = (directory / f"{stem}{suffix}" for suffix in (ARCHIVED, INDEX, STATE))
    part, live = archived.with_name(f"{archived.name}.part"), LiveRequests()
    room.take(EMPTY_ARCHIVE_BYTES)
    with _ArchiveWriter(part) as writer:
        is_complete = _copy(segment, live, writer, room)
    _write_durably(index, writer.index())
    gaps = 0 if is_complete else 1
    if following is not None and not following.is_archived:
        snapshot = live.snapshot(room.retention.snapshot_bytes)
        if snapshot is None or not room.take(len(snapshot)):
            snapshot, gaps = records.encode_lines([live.gap()]), gaps + (not live.unrecorded)
        _write_durably(following.path.with_name(following.stem + STATE), snapshot)
    part.rename(archived)
    _sync_directory(directory)
    segment.path.unlink()
    room.free(_size(state))
    state.unlink(missing_ok=True)
    room.add(archived, index)
    return gaps


def _copy(segment: Segment, live: LiveRequests, writer: _ArchiveWriter, room: Room) -> bool:
    """Copy the lines of a raw file to an archive, as far as there is room. Return whether there was room for all."""
    missing: list[float] = []
    """Times of the events that are not copied."""
    for lines in _lines_to_archive(segment):
        for line in lines:
            live.apply(line)
        if missing or not writer.add(lines, records.encode_lines(lines), room.take):
            missing += [line.at for line in lines if not isinstance(line, (Opened, Carried))] or [live.last_at]
            missing = [min(missing), max(missing)]
    if missing:
        gap = Gap(missing[0], 1, missing[1])
        writer.add([gap], records.encode_lines([gap]), lambda _bytes: True)  # `EMPTY_ARCHIVE_BYTES` are taken
    return not missing


def _lines_to_archive(segment: Segment) -> Iterator[list[Line]]:
    """Yield the lines of a raw file, after a gap if the file before it was deleted, and thus the live requests are not known."""
    if segment.number > 1 and not segment.path.with_name(segment.stem + STATE).exists():
        yield [records.unrecorded(_first_at(segment), -1)]
    yield from segment.read()


def _write_durably(path: Path, content: bytes) -> None:
    part = path.with_name(f"{path.name}.part")
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    part.rename(path)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def delete_expired(directory: Path, max_age_s: float, now_ms: float) -> None:
    """Delete archived files, the oldest first, until none is older than `max_age_s`.

    Files that cannot be archived, and what a killed process has left, are deleted when they are older than `max_age_s`.
    """
    segments = list_segments(directory)
    for segment in segments:
        if segment.is_archived:
            if now_ms - _expires_from(segment) <= max_age_s * 1000:
                break
            segment.path.unlink(missing_ok=True)
            _index_of(segment).unlink(missing_ok=True)
    live = {
        path
        for segment in segments
        if segment.is_archived or _is_young(segment.path, max_age_s, now_ms) or is_written(segment.path)
        for path in _files_of(segment)
    }
    for path in directory.iterdir():
        if _NAME.fullmatch(path.name) and path not in live:
            with contextlib.suppress(FileNotFoundError):
                if not _is_young(path, max_age_s, now_ms):
                    path.unlink()


def _is_young(path: Path, max_age_s: float, now_ms: float) -> bool:
    """Return whether a file was changed within `max_age_s`, or so lately that it may be written now."""
    return now_ms - path.stat().st_mtime * 1000 <= max(max_age_s, LEFTOVER_S) * 1000


def _index_of(segment: Segment) -> Path:
    return segment.path.with_name(segment.stem + INDEX)


def _files_of(segment: Segment) -> tuple[Path, ...]:
    """Return the paths of the files that belong to a file of the history."""
    if segment.is_archived:
        return segment.path, _index_of(segment)
    return segment.path, segment.path.with_name(segment.stem + STATE)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _expires_from(segment: Segment) -> float:
    """Return the time of the last event of an archived file; without one, or if it is damaged, when it was archived."""
    with contextlib.suppress(UnreadableHistory):
        if segment.header.events:
            return segment.header.last_at
    return segment.path.stat().st_mtime * 1000


def shrink(directory: Path, retention: Retention) -> None:
    """Delete the oldest files of a directory until it keeps to the retention, unless an archiver does so already."""
    with _archiver_lock(directory) as is_locked:
        if is_locked:
            Room(directory, retention).shrink()


def clean_up(directory: Path, retention: Retention) -> int:
    """Archive the complete files of a directory, and delete the expired ones. Return how many writes were dropped.

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
    """Lock a directory for the block, unless it is locked. Yield whether it is."""
    with (directory / "archiver.lock").open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def main(arguments: list[str]) -> None:
    """Clean up a directory, and print how many writes were dropped."""
    with contextlib.suppress(OSError):
        os.nice(19)  # leaves the processor to the server
    try:
        dropped = clean_up(Path(arguments[0]), Retention(int(arguments[1]), float(arguments[2])))
    except OSError as error:
        sys.exit(f"the history in {arguments[0]} cannot be archived: {error}")
    with contextlib.suppress(BrokenPipeError):  # the server has ended
        sys.stdout.write(f"{dropped}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
