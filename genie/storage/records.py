"""A request as a record, and back. The only place that knows what a record looks like."""

from __future__ import annotations

from msgspec import Struct, json

from genie.core import HELD, WAITING, Request


class Record(Struct, omit_defaults=True, gc=False):
    """A held or waiting request as JSON, but for its id. What has its usual value is left out: records are many."""

    since: float
    since_unix_ms: int
    deadline: int
    state: str = "held"
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


_encode = json.Encoder().encode
_decode = json.Decoder(Record).decode


def encode(request: Request) -> bytes:
    """A held or waiting request as its record."""
    moved = request.moved
    return _encode(
        Record(
            request.since,
            int(request.since_unix_ms),
            request.deadline,
            "held" if request.state is HELD else "queued",
            request.transaction_timeout_ms,
            request.exclusive,
            request.shared,
            request.fence,
            request.transaction,
            request.priority,
            request.ref,
            request.release_on_disconnect,
            None if moved is None else {name: entry[:2] for name, entry in moved.items()},
        )
    )


def decode(id: int, record: bytes) -> Request:
    """The request that was stored under its id. It has no origin: whoever made it is not connected to this process."""
    stored = _decode(record)
    request = Request(
        stored.shared,
        stored.exclusive,
        transaction_timeout_ms=stored.transaction_timeout_ms,
        transaction=stored.transaction,
        priority=stored.priority,
        ref=stored.ref,
        release_on_disconnect=stored.release_on_disconnect,
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
        request.place = (-request.priority, request.id, request)
        for name, (priority, ticket) in (stored.moved or {}).items():
            request.move(name, (priority, ticket, request))
    return request
