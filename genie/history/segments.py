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
_GZIP: Final = 31
"""`wbits` of zlib for a gzip member."""


EXPIRY_DELAY_MS: Final = 3_600_000.0
"""How long after its deadline a request is live at most. It ends late if the store is unavailable."""

# -- The requests that are live --------------------------------------------------------------------------


class LiveRequests:
    """The requests that are held or wait, according to the lines so far."""

    def __init__(self) -> None:
        self.requests: dict[int, Queued] = {}
        self._last_at = 0.0

    def apply(self, line: Line) -> None:
        """Apply one line. A line about an unknown request, whose beginning is not in the history, changes nothing."""
        requests = self.requests
        self._last_at = line.at
        match line:
            case Queued():  # also Granted and Carried
                requests[line.id] = line
            case Locked():
                request = requests.get(line.id)
                if request is not None:
                    expires = line.at + request.transaction_timeout_ms
                    requests[line.id] = carry(request, line.at, line.fence, expires, None)
            case Released():
                requests.pop(line.id, None)
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
        return [each for each in carried if each.deadline is None or each.deadline >= self._last_at - EXPIRY_DELAY_MS]


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

    def add(self, lines: list[Line], text: bytes) -> None:
        """Append one block: `text` is the encoded `lines`."""
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
                keys_of_block.add(GAP_KEY)
            else:
                continue
            times.append(line.at)
        number = len(self.blocks)
        if number >> _NUMBER_BITS:
            raise UnreadableHistory(f"{self._path}: too large to be archived: it has more than {number} blocks")
        self._pairs += [key << _NUMBER_BITS | number for key in keys_of_block]
        compressor = zlib.compressobj(LEVEL, zlib.DEFLATED, _GZIP)
        member = compressor.compress(text) + compressor.flush()
        offset = self._file.tell()
        first, last = (min(times), max(times)) if times else (None, None)
        self._file.write(member)
        self.blocks.append(Block(offset, len(member), first, last))
        self.events += len(times)

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
        header = IndexHeader(self.blocks, len(pairs), self.events, first, last)
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
        return self.is_archived or self.number == 1 or self.path.with_name(self.stem + STATE).exists()

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

    The lines of a leadership begin with the last file that begins before `since`, with the requests that are carried into it;
    if these are not known, because an earlier file is not archived yet, with that file.
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
            yield (line for segment in chosen for lines in segment.read() for line in lines if line.at <= until)


def _first_at(segment: Segment) -> float:
    """Return the time of the `opened` line of a file."""
    opened = (line.at for lines in segment.read() for line in lines if isinstance(line, Opened))
    return next(opened, 0.0)


# -- Archiving -------------------------------------------------------------------------------------------


def archive_complete(directory: Path) -> None:
    """Archive each raw file that no server writes any more, in order.

    A file that cannot be read is renamed, so that the files after it are archived; one of another version of Genie is left to
    that version.
    """
    left: set[str] = set()
    while True:
        raw = [segment for segment in list_segments(directory) if not segment.is_archived]
        complete = [segment for segment in raw if segment.stem not in left and not is_written(segment.path)]
        if not complete:
            return
        # Listed again, because a server may have begun the file that follows just before it completed the last one.
        by_number = {(segment.term, segment.number): segment for segment in list_segments(directory)}
        for segment in complete:
            try:
                archive(segment, by_number.get((segment.term, segment.number + 1)))
            except OtherFormat as error:
                left.add(segment.stem)
                sys.stderr.write(f"{error}; it is not archived\n")
            except UnreadableHistory as error:
                damaged = segment.path.with_name(f"{segment.path.name}{DAMAGED}")
                segment.path.rename(damaged)
                sys.stderr.write(f"{error}; it is kept as {damaged.name}\n")


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


def archive(segment: Segment, following: Segment | None) -> None:
    """Compress and index one raw file, and write the state for the `following` file of the same term.

    The raw file is deleted last: a process that is killed before leaves nothing half, and archives the file again.
    """
    directory, stem = segment.path.parent, segment.stem
    archived, index = directory / f"{stem}{ARCHIVED}", directory / f"{stem}{INDEX}"
    writer, live = _ArchiveWriter(archived.with_name(f"{archived.name}.part")), LiveRequests()
    with writer:
        for lines in segment.read():
            for line in lines:
                live.apply(line)
            writer.add(lines, records.encode_lines(lines))
    _write_durably(index, writer.index())
    if following is not None and not following.is_archived:
        carried = records.encode_lines(live.carried())
        _write_durably(following.path.with_name(following.stem + STATE), carried)
    archived.with_name(f"{archived.name}.part").rename(archived)
    _sync_directory(directory)
    segment.path.unlink()
    (directory / f"{stem}{STATE}").unlink(missing_ok=True)


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


def delete_expired(directory: Path, max_bytes: int, max_age_s: float, now_ms: float) -> None:
    """Delete archived files, the oldest first, until all have at most `max_bytes` and none is older than `max_age_s`.

    Files that cannot be archived, and what a killed process has left, are deleted when they are older than `max_age_s`.
    """
    segments = list_segments(directory)
    archived = [segment for segment in segments if segment.is_archived]
    sizes = {segment.stem: _size(segment.path) + _size(_index_of(segment)) for segment in archived}
    total = sum(sizes.values())
    for segment in archived:
        if total <= max_bytes and now_ms - _expires_from(segment) <= max_age_s * 1000:
            break
        segment.path.unlink(missing_ok=True)
        _index_of(segment).unlink(missing_ok=True)
        total -= sizes[segment.stem]
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


def clean_up(directory: Path, max_bytes: int, max_age_s: float) -> None:
    """Archive the complete files of a directory, and delete the expired ones. Only one process does this at a time."""
    with (directory / "archiver.lock").open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        try:
            archive_complete(directory)
        finally:  # also if the disk is full: this makes room
            delete_expired(directory, max_bytes, max_age_s, time.time() * 1000)


def main(arguments: list[str]) -> None:
    """Clean up a directory."""
    with contextlib.suppress(OSError):
        os.nice(19)  # leaves the processor to the server
    try:
        clean_up(Path(arguments[0]), int(arguments[1]), float(arguments[2]))
    except OSError as error:
        sys.exit(f"the history in {arguments[0]} cannot be archived: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
