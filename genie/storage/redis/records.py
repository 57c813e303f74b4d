"""The encoding of batches and records. No other module depends on the format.

A *record* is the JSON form of a held or waiting request, or of a retained reply. An encoded *batch* is text of several
lines. The first line has the clock and the counters. Each further line has an id, a space and the record, or an id
alone, which deletes the id.
"""

from __future__ import annotations

from typing import Annotated, Literal
from weakref import WeakValueDictionary

from msgspec import DecodeError, Meta, Struct, ValidationError, json

from genie.core import ENDED, HELD, SUCCESS, WAITING, Reason, Request, context_of
from genie.core.deadlines import NEVER
from genie.core.model import Details, details_of
from genie.storage.store import Batch, Change, RetainedReply, StoredOrigin, UnknownFormat

TIMEOUT_MS = 10_000.0
"""The queue timeout and the transaction timeout of a record that does not contain them."""
SESSION_TIMEOUT_MS = 10_000.0
"""The session timeout of a record that does not contain one."""


MAX_NUMBER = 2**53
"""No server stores a greater number, except `NEVER` as a deadline. A server cannot calculate with some, or send them to
clients."""
ID_DIGITS = len(str(MAX_NUMBER))
"""Maximum number of digits of an id."""
Number = Annotated[float, Meta(ge=-MAX_NUMBER, le=MAX_NUMBER)]
Integer = Annotated[int, Meta(ge=-MAX_NUMBER, le=MAX_NUMBER)]


class StoredDetails(Struct, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """The additional fields of a request that names units or subtrees.

    A version of Genie that does not know these fields rejects the record.
    """

    units: dict[str, tuple[Integer, Integer]] = {}
    """The units and their limit, by counted resource."""
    subtrees: bool = False
    """True if some of the names are subtrees."""


class Record(Struct, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """A held or waiting request, or a retained reply, without its id. Default values are omitted to save memory.

    More than 16 fields: one for each key of the stored JSON object. A record with an unknown field is rejected: a later
    version of Genie has written it, and the field may matter.
    """

    since: Number
    """When the request was granted, began to wait or ended, in milliseconds of the lock manager's clock."""
    since_unix_ms: Integer
    """The same moment as Unix time. 0 for a retained reply."""
    deadline: Annotated[int, Meta(ge=-MAX_NUMBER, le=NEVER)]
    """When the request expires, in milliseconds of the lock manager's clock. 0 for a retained reply, `NEVER` without a
    time limit."""
    state: Literal["held", "queued", "ended"] = "held"
    """`ended` for a retained reply."""
    queue_timeout_ms: Number = TIMEOUT_MS
    transaction_timeout_ms: Number = TIMEOUT_MS
    exclusive: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    fence: Integer = 0
    transaction: str | None = None
    priority: Number = 0
    ref: str | None = None
    release_on_disconnect: bool = False
    moved: dict[str, tuple[Number, Integer]] | None = None
    """Queue position (negated priority, ticket) by resource, where a queue rearrangement has assigned another position."""
    session: str | None = None
    """The key of the session that made the request. None if the request has no session."""
    session_timeout_ms: Number = SESSION_TIMEOUT_MS
    chosen: str | None = None
    """The `choice_digest` of a request with `anyOf`."""
    principal: str | None = None
    note: str | None = None
    """The note of the request, or of its connection if the request has neither a note nor a `session`."""
    traceparent: str | None = None
    session_note: str | None = None
    """The note of the session's requests that have no `note`."""
    line: str = ""
    """The message of a retained reply, without its newline. Empty if the session released the request itself."""
    details: StoredDetails | None = None


class _EndedPayload(Struct, gc=False):
    """The part of the payload of a `released` message that is needed here."""

    reason: Reason


class _EndedLine(Struct, gc=False):
    """The part of a retained reply's `line` that is needed here."""

    payload: _EndedPayload


_decode_ended = json.Decoder(_EndedLine).decode
_encode = json.Encoder().encode
_decode = json.Decoder(Record).decode
_decode_counters = json.Decoder(tuple[Number, Integer, Integer]).decode


def encode(change: Request | RetainedReply) -> bytes:
    """Encode a request or a retained reply as a record."""
    return _encode_request(change) if isinstance(change, Request) else _encode_retained_reply(change)


def _encode_request(request: Request) -> bytes:
    """Encode a held or waiting request as a record."""
    moved, context, origin = request.moved, request.context, request.origin
    note = context.note
    session_key = session_note = None
    session_timeout_ms = SESSION_TIMEOUT_MS
    if origin is not None:
        if origin.key is not None:
            session_key, session_timeout_ms, session_note = origin.key, origin.timeout_ms, origin.note
        elif note is None:  # a connection without a session is not stored: store its note as the note of the request
            note = origin.note
    # The arguments are positional, because keywords would be slower on this hot path. msgspec omits a field whose value
    # is the same object as the default: so a value that is equal to the default is replaced by the default. The priority
    # of a compiled request is a float: 0.0. The negated priorities of `moved` are -0.0 or 0, too.
    return _encode(
        Record(
            request.since,
            int(request.since_unix_ms),
            request.deadline,
            "held" if request.state is HELD else "queued",
            TIMEOUT_MS if request.queue_timeout_ms == TIMEOUT_MS else request.queue_timeout_ms,
            TIMEOUT_MS if request.transaction_timeout_ms == TIMEOUT_MS else request.transaction_timeout_ms,
            request.exclusive,
            request.shared,
            request.fence,
            request.transaction,
            request.priority or 0,
            request.ref,
            request.release_on_disconnect,
            None if moved is None else {name: (entry[0] or 0, entry[1]) for name, entry in moved.items()},
            session_key,
            session_timeout_ms,
            context.choice_digest,
            context.principal,
            note,
            context.traceparent,
            session_note,
            "",  # no message: only a retained reply has one
            None if request.details is None else _stored_details(request.details),
        )
    )


def _stored_details(details: Details) -> StoredDetails | None:
    """Return the details to store, or None if the request names neither units nor subtrees."""
    if not details.units and not details.subtrees:
        return None
    return StoredDetails(details.units, bool(details.subtrees))


def _encode_retained_reply(reply: RetainedReply) -> bytes:
    """Encode a retained reply as a record with the state `ended`."""
    return _encode(
        Record(
            since=reply.at,
            since_unix_ms=0,
            deadline=0,
            state="ended",
            ref=reply.ref,
            session=reply.origin.key,
            session_timeout_ms=reply.origin.timeout_ms,
            principal=reply.origin.principal,
            session_note=reply.origin.note,
            line=reply.message.decode().rstrip("\n"),
        )
    )


# -- Batches ------------------------------------------------------------------------------------------


def encode_changes(changes: dict[int, Change]) -> dict[int, bytes]:
    """Encode each change as a line of a batch. Return the lines by id."""
    lines = {}
    for id_, change in changes.items():
        if isinstance(change, Request):
            if change.state is ENDED:
                lines[id_] = b"%d" % id_
            else:
                lines[id_] = b"%d %b" % (id_, _encode_request(change))
        elif change is None:
            lines[id_] = b"%d" % id_
        else:
            lines[id_] = b"%d %b" % (id_, _encode_retained_reply(change))
    return lines


def encode_batch(batch: Batch, lines: dict[int, bytes]) -> bytes:
    """Encode a batch: its counters, then its changes, which are already encoded as `lines`."""
    return b"\n".join([encode_counters(batch), *lines.values()])


def encode_counters(batch: Batch) -> bytes:
    """Encode the clock and the counters of a batch, without its changes."""
    return b"%.3f %d %d" % (batch.clock_ms, batch.next_id, batch.next_fence)


def decode_counters(encoded: bytes) -> Batch:
    """Decode the result of `encode_counters`: a batch without changes. Raises UnknownFormat if a counter is invalid."""
    try:
        clock_ms, next_id, next_fence = _decode_counters(b"[%b]" % b",".join(encoded.split()))
    except DecodeError as error:
        raise UnknownFormat(f"the counters {encoded[:100]!r} are invalid: {error}") from None
    return Batch({}, next_id, next_fence, clock_ms)


def split_batch(encoded: bytes) -> tuple[bytes, dict[bytes, bytes]]:
    """Split an encoded batch into its encoded counters and its encoded records by id.

    An empty record deletes the id.
    """
    counters, *lines = encoded.split(b"\n")
    return counters, dict([line.partition(b" ")[::2] for line in lines])


def decode_records(records: dict[bytes, bytes], decoder: RecordDecoder) -> dict[int, Change]:
    """Decode records by id. An empty record becomes None, which deletes the id.

    Raises UnknownFormat if an id or a record is invalid.
    """
    changes: dict[int, Change] = {}
    for encoded_id, record in records.items():
        id_ = int(encoded_id) if encoded_id.isdigit() and len(encoded_id) <= ID_DIGITS else 0
        if not 0 < id_ <= MAX_NUMBER:
            raise UnknownFormat(f"{encoded_id[:100]!r} is not the id of a record")
        changes[id_] = decoder.decode(id_, record) if record else None
    return changes


class RecordDecoder:
    """Decodes records. All requests and retained replies of one session share one `StoredOrigin` object."""

    def __init__(self) -> None:
        self._origins: WeakValueDictionary[str, StoredOrigin] = WeakValueDictionary()
        """Origin by session key."""

    def decode(self, id: int, record: bytes | str) -> Request | RetainedReply:
        """Decode the record of an id.

        Raises UnknownFormat if the record is malformed, or has a field that this version of Genie does not know, or a value
        of another type.
        """
        try:
            stored = _decode(record)
            return self._to_retained_reply(id, stored) if stored.state == "ended" else self._to_request(id, stored)
        except ValidationError as error:
            raise UnknownFormat(f"the record of {id} was written by another version of Genie: {error}") from None
        except DecodeError as error:
            raise UnknownFormat(f"the record of {id} is malformed: {error}") from None

    def _to_retained_reply(self, id: int, stored: Record) -> RetainedReply:
        """Return the retained reply of a record."""
        line = stored.line.encode() + b"\n" if stored.line else b""
        reason = _decode_ended(line).payload.reason if line else SUCCESS
        return RetainedReply(id, stored.ref, self._origin(stored), stored.since, line, reason)

    def _to_request(self, id: int, stored: Record) -> Request:
        """Return the held or waiting request of a record."""
        request = Request(
            stored.shared,
            stored.exclusive,
            stored.queue_timeout_ms,
            transaction_timeout_ms=stored.transaction_timeout_ms,
            transaction=stored.transaction,
            priority=stored.priority,
            ref=stored.ref,
            release_on_disconnect=stored.release_on_disconnect,
            origin=None if stored.session is None else self._origin(stored),
            context=context_of(stored.principal, stored.note, stored.traceparent, stored.chosen),
        )
        if stored.details is not None:
            request.details = details_of(stored.shared, stored.exclusive, stored.details.units)
        request.id = id
        request.owner = id if stored.transaction is None else stored.transaction
        request.fence = stored.fence
        request.since = stored.since
        request.since_unix_ms = stored.since_unix_ms
        request.deadline = stored.deadline
        if stored.state == "held":
            request.state = HELD
        else:
            request.state = WAITING
            request.queue_entry = (-request.priority, request.id, request)  # (negated priority, ticket, request)
            for name, (priority, ticket) in (stored.moved or {}).items():
                request.move(name, (priority, ticket, request))
        return request

    def _origin(self, stored: Record) -> StoredOrigin:
        """Return the origin of a record's session, the same object for all records of that session.

        Its timeout and its note become those of this record, because a session may change them when it resumes.
        """
        key = stored.session or ""
        origin = self._origins.get(key)
        if origin is None:
            origin = self._origins[key] = StoredOrigin(key, 0)
        origin.timeout_ms, origin.note = stored.session_timeout_ms, stored.session_note
        origin.principal = stored.principal or origin.principal
        return origin
