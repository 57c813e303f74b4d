"""What is to be known of an id as a record, and back. The only place that knows what a record looks like."""

from __future__ import annotations

from weakref import WeakValueDictionary

from msgspec import Struct, json

from genie.core import HELD, SUCCESS, WAITING, Reason, Request
from genie.storage.store import RetainedReply, StoredOrigin

SESSION_TIMEOUT_MS = 10_000.0


class Record(Struct, omit_defaults=True, gc=False):
    """A held or waiting request, or an reply, as JSON, but for its id.

    What has its usual value is left out: records are many.
    """

    since: float
    since_unix_ms: int
    deadline: int
    state: str = "held"
    queue_timeout_ms: float = 10_000
    transaction_timeout_ms: float = 10_000
    exclusive: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    fence: int = 0
    transaction: str | None = None
    priority: float = 0
    ref: str | None = None
    release_on_disconnect: bool = False
    moved: dict[str, tuple[float, int]] | None = None
    """Its places (minus the priority, ticket) in lines where a reordering gave it another."""
    session: str | None = None
    session_timeout_ms: float = SESSION_TIMEOUT_MS
    chosen: str | None = None
    principal: str | None = None
    note: str | None = None
    line: str = ""
    """Of an reply: the message, without its end. Empty: the session released the request itself."""


class _EndedPayload(Struct, gc=False):
    reason: Reason


class _EndedLine(Struct, gc=False):
    """What is read of the `line` of an reply."""

    payload: _EndedPayload


_decode_ended = json.Decoder(_EndedLine).decode
_encode = json.Encoder().encode
_decode = json.Decoder(Record).decode


def encode(change: Request | RetainedReply) -> bytes:
    """A held or waiting request, or an reply, as its record."""
    if isinstance(change, RetainedReply):
        return _encode_retained_reply(change)
    moved, origin = change.moved, change.origin
    key = None if origin is None else origin.key
    return _encode(
        Record(
            change.since,
            int(change.since_unix_ms),
            change.deadline,
            "held" if change.state is HELD else "queued",
            change.queue_timeout_ms,
            change.transaction_timeout_ms,
            change.exclusive,
            change.shared,
            change.fence,
            change.transaction,
            change.priority,
            change.ref,
            change.release_on_disconnect,
            None if moved is None else {name: entry[:2] for name, entry in moved.items()},
            key,
            SESSION_TIMEOUT_MS if origin is None or key is None else origin.timeout_ms,
            change.choice_digest,
            change.principal,
            change.note,
        )
    )


def _encode_retained_reply(reply: RetainedReply) -> bytes:
    return _encode(
        Record(
            reply.at,
            0,
            0,
            "ended",
            ref=reply.ref,
            session=reply.origin.key,
            session_timeout_ms=reply.origin.timeout_ms,
            line=reply.message.decode().rstrip("\n"),
        )
    )


class Reader:
    """Reads records. What has one session is given one origin."""

    def __init__(self) -> None:
        self._origins: WeakValueDictionary[str, StoredOrigin] = WeakValueDictionary()

    def read(self, id: int, record: bytes | str) -> Request | RetainedReply:
        """What was stored under an id. Whoever made it is not connected to this process."""
        stored = _decode(record)
        if stored.state == "ended":
            line = stored.line.encode() + b"\n" if stored.line else b""
            reason = _decode_ended(line).payload.reason if line else SUCCESS
            return RetainedReply(id, stored.ref, self._origin(stored), stored.since, line, reason)
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
            choice_digest=stored.chosen,
            principal=stored.principal,
            note=stored.note,
        )
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
            request.queue_entry = (-request.priority, request.id, request)
            for name, (priority, ticket) in (stored.moved or {}).items():
                request.move(name, (priority, ticket, request))
        return request

    def _origin(self, stored: Record) -> StoredOrigin:
        key = stored.session or ""
        origin = self._origins.get(key)
        if origin is None:
            origin = self._origins[key] = StoredOrigin(key, 0)
        origin.timeout_ms = stored.session_timeout_ms  # the last word counts
        return origin
