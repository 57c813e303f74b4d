"""Reads the files of the history: raw ones, which a server writes, and archived ones, which have an index.

`NAME.index` has the times and the place of each block of `NAME.jsonl.gz`, and for each resource, transaction and client
the numbers of the blocks with its events. `archiver.py` writes both files.
"""

from __future__ import annotations

import contextlib
import fcntl
import re
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import BinaryIO, Final

from msgspec import Struct, json

from genie.files import open_regular_file
from genie.history import records
from genie.history.records import Gap, Line, Opened, OtherFormat, RawDecoder, UnreadableHistory, is_event
from genie.history.retention import Retention

BLOCK_BYTES: Final = 128 << 10
"""Bytes of lines in a block before its compression."""
RAW: Final = ".jsonl"
"""Suffix of a raw file."""
ARCHIVED: Final = ".jsonl.gz"
"""Suffix of an archived file."""
INDEX: Final = ".index"
"""Suffix of the index of an archived file."""
STATE: Final = ".state"
"""Suffix of the snapshot of a raw file: the requests that are carried into the file, until it is archived."""
CRC_BYTES: Final = 4
"""Size of the checksum at the end of an index."""
_KEY_BYTES: Final = 4
"""Size of a key in an index."""
ENTRY_BYTES: Final = _KEY_BYTES + 2
"""Size of a key and the number of a block in an index."""
NUMBER_BITS: Final = 16
"""Size of the number of a block in an index, in bits."""
NAME: Final = re.compile(
    r"(?P<stem>[0-9]{8}T[0-9]{6}\.[0-9]{6}Z-(?P<term>[0-9a-f]{8})-(?P<number>[0-9]{6,}))(?P<suffix>\..+)"
)
"""The name of a file: the time of its first line, the leadership (term), and the number of the file in this leadership."""
_HEAD_BYTES: Final = 4 << 10
"""Maximum size of the first two lines of a file whose second line is a gap."""
GZIP: Final = 31
"""`wbits` of zlib for a gzip member."""

# -- The index -------------------------------------------------------------------------------------------


class Block(Struct, array_like=True, gc=False):
    """A gzip member of an archived file."""

    offset: int
    """Where the block begins in the file, in bytes."""
    size: int
    """The compressed size in bytes."""
    first_at: float | None
    """The time of the first event, in Unix ms. None if the block has no events, only requests that are carried into the
    file."""
    last_at: float | None
    """The time of the last event, in Unix ms. None if the block has no events."""


class IndexHeader(Struct):
    """The first line of an index.

    After it come all keys (4 bytes each, ascending), then for each key the number of a block (2 bytes), then the CRC-32
    of all this (4 bytes).
    """

    blocks: list[Block]
    entries: int
    """How many keys follow."""
    events: int
    """How many events the file has."""
    first_at: float
    """The time of the first event, in Unix ms. 0 if the file has no events."""
    last_at: float
    """The time of the last event, in Unix ms. 0 if the file has no events."""
    is_unrecorded: bool = False
    """True if the file lacks the requests that were live at its beginning, because there was no room for them."""


def key_of(kind: str, name: str) -> int:
    """Return the key of a resource (`kind` is `r`), a transaction (`t`) or a client (`c`) in an index.

    A key is the CRC-32 of kind and name, which takes a fifth of the time of a cryptographic digest. If two names have
    the same key, a search only reads more blocks.
    """
    return zlib.crc32(name.encode(), zlib.crc32(kind.encode()))


def encode_index(blocks: list[Block], pairs: list[int], events: int, *, is_unrecorded: bool) -> bytes:
    """Encode the index of a file with this number of events.

    Each of `pairs` is a key and the number of a block with this key, in one integer: the lowest `NUMBER_BITS` are the
    number. `is_unrecorded` is as in `IndexHeader`.
    """
    first = min((block.first_at for block in blocks if block.first_at is not None), default=0.0)
    last = max((block.last_at for block in blocks if block.last_at is not None), default=0.0)
    sorted_pairs = sorted(pairs)
    number_mask = (1 << NUMBER_BITS) - 1
    keys = array("I", [pair >> NUMBER_BITS for pair in sorted_pairs])
    numbers = array("H", [pair & number_mask for pair in sorted_pairs])
    header = IndexHeader(blocks, len(pairs), events, first, last, is_unrecorded)
    content = json.encode(header) + b"\n" + keys.tobytes() + numbers.tobytes()
    return content + zlib.crc32(content).to_bytes(CRC_BYTES, "little")


GAP_KEY: Final = key_of("gap", "")
"""The key of the blocks in which events are missing."""


# -- Reading ---------------------------------------------------------------------------------------------


@dataclass
class Segment:
    """One file of the history, raw or archived."""

    path: Path
    """Where the file was when the directory was listed, or when the file was read."""
    term: str
    """Identifies the leadership."""
    number: int
    """The number of the file in this leadership, from 1."""
    _header: IndexHeader | None = None
    """The header of the index. None until it is read."""
    _index: bytes = field(default=b"", repr=False)
    """The index without its checksum. Empty until it is read."""

    @property
    def stem(self) -> str:
        """The name of the file without its suffixes."""
        return self.path.name.partition(".jsonl")[0]

    def sibling(self, suffix: str) -> Path:
        """Return the path of the file with the same name and another suffix."""
        return self.path.with_name(self.stem + suffix)

    @property
    def files(self) -> tuple[Path, ...]:
        """The paths of the file itself, and of the index of an archived file, or of the snapshot of a raw file."""
        return self.path, self.sibling(INDEX if self.is_archived else STATE)

    @property
    def is_archived(self) -> bool:
        """True if the file is compressed and indexed."""
        return self.path.name.endswith(ARCHIVED)

    @property
    def is_self_contained(self) -> bool:
        """True if the file, or its snapshot, has all requests that are live at its beginning."""
        if not self.is_archived:
            begin = self.path if self.number == 1 else self.sibling(STATE)
            with contextlib.suppress(FileNotFoundError), open_regular_file(begin) as file:
                return not records.begins_unrecorded(file.read(_HEAD_BYTES))
            if not self.sibling(ARCHIVED).exists():  # the previous file is not archived yet
                return False
            # The raw file was archived after the directory was listed.
        return not self.header.is_unrecorded

    @property
    def header(self) -> IndexHeader:
        """The header of the index of an archived file. Raises UnreadableHistory if the index is missing or damaged."""
        if self._header is None:
            self._header = self._read_index()
        return self._header

    def _read_index(self) -> IndexHeader:
        """Read and check the index, and return its header."""
        path = self.sibling(INDEX)
        try:
            with open_regular_file(path) as file:
                content = file.read()
        except FileNotFoundError:
            if not self.path.exists():
                raise  # both files were deleted after the directory was listed
            raise UnreadableHistory(f"{self.path} has no index: restore it from a backup, or delete the file") from None
        self._index = content[:-CRC_BYTES]
        if zlib.crc32(self._index).to_bytes(CRC_BYTES, "little") != content[-CRC_BYTES:]:
            raise UnreadableHistory(f"{path}: damaged, its checksum is wrong")
        first_line, _, entries = self._index.partition(b"\n")
        try:
            header = json.decode(first_line, type=IndexHeader)
        except ValueError as error:
            raise UnreadableHistory(f"{path}: {error}") from None
        if len(entries) != ENTRY_BYTES * header.entries:
            raise OtherFormat(f"{path}: another version of Genie has written this index")
        return header

    def blocks_with(self, keys: Iterable[int]) -> set[int]:
        """Return the numbers of the blocks of an archived file that have events with one of the keys."""
        entry_count = self.header.entries
        keys_start = self._index.index(b"\n") + 1  # after the header
        numbers_start = keys_start + _KEY_BYTES * entry_count
        view = memoryview(self._index)
        sorted_keys, numbers = view[keys_start:numbers_start].cast("I"), view[numbers_start:].cast("H")
        found = set()
        for key in keys:
            position = bisect_left(sorted_keys, key)
            while position < entry_count and sorted_keys[position] == key:
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
                    text = zlib.decompress(file.read(block.size), GZIP)
                except zlib.error as error:
                    raise UnreadableHistory(f"{self.path}: {error}") from None
                yield self._decode(records.decode, text)

    def read(self) -> Iterator[list[Line]]:
        """Yield all lines of the file, several at a time.

        A raw file begins with the requests that are carried into it.
        """
        with contextlib.ExitStack() as exit_stack:
            files = [] if self.is_archived else self._open_raw(exit_stack)
            decode = partial(self._decode, RawDecoder().decode)
            for file in files:
                yield from map(decode, _blocks_of_lines(file))
        if not files:
            yield from self.read_blocks(range(len(self.header.blocks)))

    def _open_raw(self, exit_stack: contextlib.ExitStack) -> list[BinaryIO]:
        """Open the snapshot of a raw file, if it has one, and the raw file itself. `exit_stack` closes them.

        The open files stay readable when the archiver deletes them. If the raw file was archived after the directory
        was listed, set `path` to the archive, and return no files.
        """
        files: list[BinaryIO] = []
        with contextlib.suppress(FileNotFoundError):  # the first file of a leadership has no snapshot
            files.append(exit_stack.enter_context(open_regular_file(self.sibling(STATE))))
        try:  # the archiver deletes the raw file first: if this file exists, its snapshot was not deleted before
            files.append(exit_stack.enter_context(open_regular_file(self.path)))
        except FileNotFoundError:
            archived = self.sibling(ARCHIVED)
            if not archived.exists():
                raise
            self.path = archived
            return []
        return files

    def _decode(self, decode: Callable[[bytes], list[Line]], text: bytes) -> list[Line]:
        """Return `decode(text)`. The message of an error begins with the path."""
        try:
            return decode(text)
        except UnreadableHistory as error:
            raise type(error)(f"{self.path}: {error}") from None


def _blocks_of_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the complete lines of a file, about `BLOCK_BYTES` at a time. An unfinished last line is left out."""
    rest = b""
    while read := file.read(BLOCK_BYTES):
        complete, newline, rest = (rest + read).rpartition(b"\n")
        if newline:
            yield complete + newline


def last_at(segment: Segment) -> float:
    """Return the time of the last event of a file, in Unix ms, or 0 if the file has no event."""
    if segment.is_archived:
        return segment.header.last_at
    lines = chain.from_iterable(segment.read())
    return max((line.at for line in lines if is_event(line)), default=0.0)


def named_files(directory: Path) -> Iterator[tuple[Path, re.Match[str]]]:
    """Yield the regular files of a directory with a `NAME`. A FIFO would wait for another process, and a folder has no lines."""
    for path in directory.iterdir():
        match = NAME.fullmatch(path.name)
        if match is not None and path.is_file():
            yield path, match


def list_segments(directory: Path) -> list[Segment]:
    """Return the files of a directory, ordered by leadership and number. Files with other names are ignored.

    The order is not that of the names: after the clock was set back, a file has an earlier name than the previous file.
    """
    found: dict[str, Segment] = {}
    first_stems: dict[str, str] = {}
    """The earliest stem of each leadership."""
    files = sorted(named_files(directory)) if directory.is_dir() else []
    for path, match in files:
        if match["suffix"] in (RAW, ARCHIVED):
            # While a file is archived, both exist. The raw file, which is sorted first, is complete until it is deleted.
            segment = found.setdefault(match["stem"], Segment(path, match["term"], int(match["number"])))
            first_stems.setdefault(segment.term, segment.stem)
    return sorted(found.values(), key=lambda segment: (first_stems[segment.term], segment.number))


def recorded_terms(directory: Path, since: float, until: float) -> Iterator[Iterator[Line]]:
    """Yield an iterator over the lines of each leadership with events from `since` to `until` (Unix ms), for a replay.

    The lines of a leadership begin with the last file that begins before `since`, with the requests that are carried
    into it. If that file lacks these requests, the lines begin with an earlier file, or with a gap if all files lack
    them.
    """
    by_term: dict[str, list[Segment]] = {}
    for segment in list_segments(directory):
        by_term.setdefault(segment.term, []).append(segment)
    for segments in by_term.values():
        starts = [first_at(segment) for segment in segments]
        first = max((index for index, start in enumerate(starts) if start <= since), default=0)
        while first > 0 and not segments[first].is_self_contained:
            first -= 1
        in_period = [segment for segment, start in zip(segments, starts, strict=True) if start <= until][first:]
        if in_period:
            yield _lines_for_replay(in_period, until)


def _lines_for_replay(segments: list[Segment], until: float) -> Iterator[Line]:
    """Yield the lines up to `until` (Unix ms) of the given files of one leadership.

    If the first file lacks the requests that were live at its beginning, a gap replaces them. In later files such a gap
    is left out, because the live requests are known.
    """
    if not segments[0].is_self_contained:
        yield records.unrecorded(first_at(segments[0]), live=-1)
    for segment in segments:
        for lines in segment.read():
            yield from (line for line in lines if line.at <= until and not (isinstance(line, Gap) and line.live))


def first_at(segment: Segment) -> float:
    """Return the time of the `opened` line of a file, in Unix ms, or 0 if the file lacks it."""
    opened = (line.at for lines in segment.read() for line in lines if isinstance(line, Opened))
    return next(opened, 0.0)


def is_recorded(segment: Segment) -> bool:
    """Return whether a server still writes a file, which may be archived or deleted meanwhile."""
    try:
        return not segment.is_archived and is_written(segment.path)
    except FileNotFoundError:  # the file was archived after the directory was listed
        return False


def is_written(path: Path) -> bool:
    """Return whether a server still writes a raw file, on which it then has a lock. Raises FileNotFoundError."""
    with path.open("rb") as file:
        try:
            # Shared, because NFS rejects an exclusive lock on a file that is open for reading.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def is_raw(path: Path) -> bool:
    """Return whether this is the path of a raw file, complete or not. A server writes such a file, not the archiver."""
    return path.name.endswith((RAW, f"{RAW}.part"))


def raw_bytes(directory: Path, retention: Retention, except_stem: str = "") -> int:
    """Return the bytes of the raw files of a directory, except the file with the stem `except_stem`.

    A file that a server still writes counts as complete, even if it is smaller.
    """
    total = 0
    for path, match in named_files(directory):
        if is_raw(path) and match["stem"] != except_stem:
            with contextlib.suppress(FileNotFoundError):  # the file was archived after the directory was listed
                min_bytes = retention.segment_bytes if is_written(path) else 0
                total += max(size_of(path), min_bytes)
    return total


def size_of(path: Path) -> int:
    """Return the bytes of a file, or 0 if it was deleted."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
