"""Exports a namespace to JSON lines, and imports it into an empty namespace, for backups and for a move to another Redis.

The first line of an export is a header. Each further line has the id and the record of a request or retained reply, in the
order of the ids. The last line has the number of records, so that a truncated file is recognized.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import Annotated, TypeVar

import structlog
from msgspec import DecodeError, Raw, Struct, json
from msgspec import Meta as Constraints

from genie.core import Request
from genie.core.invariants import find_violations
from genie.storage.redis.check import find_counter_violations
from genie.storage.redis.keyspace import FORMAT_VERSION, Keyspace, Meta, meta_key
from genie.storage.redis.log import EpochHistory, LogIncomplete, LogReader, decode_position, encode_position
from genie.storage.redis.primary import Primary
from genie.storage.redis.records import RecordDecoder, encode
from genie.storage.redis.replica import load_state
from genie.storage.redis.url import RedisUrl
from genie.storage.store import Batch, LeadershipLost, UnknownFormat

log = structlog.get_logger()

FILE_FORMAT = "genie-namespace"
"""Identifies an export in its header."""
POLL_INTERVAL_S = 0.1
"""How often an import checks whether the stored leader commits."""
LEASE_MARGIN_S = 0.5
"""How much longer than the lease an import waits for a commit of the stored leader."""

MAX_COUNTER = 2**53 - 1
"""Maximum of the clock (ms) and the counters of an export: clients cannot read greater ids and fencing tokens."""
INVALID = (DecodeError, ValueError, RecursionError)
"""The exceptions for a line that is no JSON, is not UTF-8, has a value of another type, or is nested too deeply."""

T = TypeVar("T")


class TransferError(Exception):
    """An export or import was refused. Nothing was changed."""


class Header(Struct, rename="camel", forbid_unknown_fields=True):
    """The first line of an export."""

    format: str
    version: int
    namespace: str
    position: str
    """The position of the last log entry that the export contains, `epoch-index`."""
    clock_ms: Annotated[float, Constraints(ge=0, le=MAX_COUNTER)]
    next_id: Annotated[int, Constraints(ge=1, le=MAX_COUNTER)]
    next_fence: Annotated[int, Constraints(ge=1, le=MAX_COUNTER)]


class _Line(Struct, forbid_unknown_fields=True):
    """The line of one record."""

    id: int
    record: Raw


class _Trailer(Struct, forbid_unknown_fields=True):
    """The last line of an export."""

    count: int
    """How many records the export has."""


_decode_line = json.Decoder(_Line).decode


# -- Export -------------------------------------------------------------------------------------------


async def export_namespace(url: str, namespace: str) -> tuple[Header, Iterator[bytes]]:
    """Export a namespace.

    Return the header of the export, and an iterator over all its lines, with the header as the first.

    The lines are the state at the position in the header, even if a leader commits during the export. Raises
    TransferError if the namespace does not exist, has another format or lacks a part of the log. Raises RedisFailure if
    Redis is unavailable.
    """
    primary = Primary(RedisUrl.parse(url), meta_key(namespace))
    try:
        keyspace = Keyspace(primary, namespace)
        reader = LogReader(primary, keyspace.log)
        state = await load_state(keyspace, reader, log)
    except (UnknownFormat, DecodeError, LogIncomplete) as error:
        raise TransferError(str(error)) from None
    finally:
        primary.drop()
    if state is None:
        raise TransferError(f"Redis has no namespace {namespace!r}")
    position = encode_position(reader.position)
    header = Header(FILE_FORMAT, FORMAT_VERSION, namespace, position, state.clock_ms, state.next_id, state.next_fence)
    return header, _encode_lines(header, state)


def _encode_lines(header: Header, state: Batch) -> Iterator[bytes]:
    """Yield the lines of an export, each with its newline."""
    yield json.encode(header) + b"\n"
    count = 0
    for id_, change in state.changes.items():
        if change is not None:
            count += 1
            yield b'{"id":%d,"record":%b}\n' % (id_, encode(change))
    yield b'{"count":%d}\n' % count


# -- Import -------------------------------------------------------------------------------------------


def decode_export(lines: Iterable[bytes]) -> tuple[Header, Batch]:
    """Decode the lines of an export. Raises TransferError, with the number of the line, if a line is invalid."""
    numbered = enumerate(lines, 1)
    _, first = next(numbered, (1, b""))
    header = _decode_header(first)
    decoder = RecordDecoder()
    state = Batch({}, header.next_id, header.next_fence, header.clock_ms)
    last_id = 0
    for number, line in numbered:
        if line.startswith(b'{"count"'):
            _check_trailer(number, line, state)
            if next(numbered, None) is not None:
                raise TransferError(f"line {number + 1}: text after the line with the count")
            _check_soundness(state)
            return header, state
        try:
            decoded = _decode_line(line)
            state.changes[decoded.id] = decoder.decode(decoded.id, bytes(decoded.record))
        except INVALID as error:
            raise TransferError(f"line {number}: {error}") from None
        if decoded.id <= last_id:
            raise TransferError(f"line {number}: the id {decoded.id} follows {last_id}, and ids must ascend")
        last_id = decoded.id
    raise TransferError("the last line, which has the count of the records, is missing: the file is truncated")


def _check_trailer(number: int, line: bytes, state: Batch) -> None:
    """Raise TransferError if the count in the last line, which has this number, is not that of the records in `state`."""
    trailer: _Trailer = _decode(number, line, _Trailer)
    if trailer.count != len(state.changes):
        raise TransferError(
            f"line {number}: the count is {trailer.count}, and the file has {len(state.changes)} records: "
            "lines were lost or added"
        )


def _check_soundness(state: Batch) -> None:
    """Raise TransferError if the records contradict the counters, or the locks contradict each other."""
    requests = (change for change in state.changes.values() if isinstance(change, Request))
    violations = find_counter_violations(state.changes, state) or list(find_violations(requests))
    if violations:
        raise TransferError(f"the records of the file are not sound: {violations[0]}")


def _decode_header(line: bytes) -> Header:
    """Decode the first line. Raises TransferError if it is invalid."""
    try:
        found = json.decode(line)
    except INVALID:
        found = None
    # The format and the version are checked before the other fields, which a later version may change.
    if not isinstance(found, dict) or found.get("format") != FILE_FORMAT:
        raise TransferError("line 1: this is not an export of a namespace")
    if found.get("version") != FORMAT_VERSION:
        raise TransferError(
            f"line 1: the export has the format version {found.get('version')}, and this version of Genie knows {FORMAT_VERSION}"
        )
    header: Header = _decode(line_number=1, line=line, kind=Header)
    try:
        is_position = all(0 <= number <= MAX_COUNTER for number in decode_position(header.position.encode()))
    except ValueError:
        is_position = False
    if not is_position:
        raise TransferError(f"line 1: {header.position!r} is not a position")
    return header


def _decode(line_number: int, line: bytes, kind: type[T]) -> T:
    """Decode one line. Raises TransferError, with the line number, if the line is not JSON or does not match `kind`."""
    try:
        return json.decode(line, type=kind)
    except INVALID as error:
        raise TransferError(f"line {line_number}: {error}") from None


async def import_namespace(url: str, namespace: str, header: Header, state: Batch, *, replace: bool) -> tuple[int, int]:
    """Write `state`, a decoded export, to a namespace that no server leads, in a new epoch without a leader.

    The epoch is higher than those of the export and of the namespace, and the counters are not lower, so that ids and
    fencing tokens are not assigned again. Returns the number of the new epoch, and how many records were replaced.

    Raises TransferError if a server leads the namespace, or if the namespace is not empty and `replace` is False.
    """
    primary = Primary(RedisUrl.parse(url), meta_key(namespace))
    try:
        keyspace = Keyspace(primary, namespace)
        keyspace.highest_epoch = decode_position(header.position.encode())[0]
        meta = await _wait_for_vacancy(keyspace)
        present = await load_state(keyspace, LogReader(primary, keyspace.log), log)
        replaced_count = 0 if present is None else sum(change is not None for change in present.changes.values())
        if replaced_count and not replace:
            raise TransferError(
                f"the namespace {namespace!r} is not empty, it has {replaced_count} records: --replace deletes them"
            )
        if present is not None:
            state.next_id = max(state.next_id, present.next_id)
            state.next_fence = max(state.next_fence, present.next_fence)
        history = EpochHistory() if meta is None else meta.history
        await keyspace.restore_snapshot(node=None, state=state, history=history)
    except LeadershipLost as error:
        raise TransferError(
            f"a server became the leader of the namespace {namespace!r} during the import: {error}"
        ) from None
    except (UnknownFormat, DecodeError, LogIncomplete) as error:
        raise TransferError(str(error)) from None
    else:
        return keyspace.epoch.number, replaced_count
    finally:
        primary.drop()


async def _wait_for_vacancy(keyspace: Keyspace) -> Meta | None:
    """Wait until no server can lead the namespace, and return its metadata, or None if the namespace does not exist.

    A leader that has not resigned may be alive until it has committed nothing for its lease. Raises TransferError if
    the leader commits in this time.
    """
    loop = asyncio.get_running_loop()
    first = latest = await keyspace.read()
    if first is None or first.node is None:
        return first
    end = loop.time() + first.node.lease_ms / 1000 + LEASE_MARGIN_S
    while loop.time() < end:
        await asyncio.sleep(POLL_INTERVAL_S)
        latest = await keyspace.read()
        if latest is not None and latest.node is None:
            return latest  # the leader has resigned
        if latest is None or (latest.epoch, latest.position) != (first.epoch, first.position):
            raise TransferError(
                f"the server at {first.node.address} leads the namespace {keyspace.name!r}: stop all its servers first"
            )
    return latest
