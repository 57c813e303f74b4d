"""A request as a record, and back. The only place that knows what a record looks like."""

from __future__ import annotations

import orjson

from genie.core import Request, State

_STATES = {State.HELD: "held", State.WAITING: "queued"}
_BY_NAME = {name: state for state, name in _STATES.items()}


def encode(request: Request) -> bytes:
    """A held or waiting request as JSON. What has its usual value is left out: records are many."""
    record: dict[str, object] = {
        "id": request.id,
        "state": _STATES[request.state],
        "since": request.since,
        "since_unix_ms": request.since_unix_ms,
        "deadline": request.deadline,
        "transaction_timeout_ms": request.transaction_timeout_ms,
    }
    if request.exclusive:
        record["exclusive"] = request.exclusive
    if request.shared:
        record["shared"] = request.shared
    if request.fence:
        record["fence"] = request.fence
    if request.transaction is not None:
        record["transaction"] = request.transaction
    if request.priority:
        record["priority"] = request.priority
    if request.ref is not None:
        record["ref"] = request.ref
    if request.release_on_disconnect:
        record["release_on_disconnect"] = True
    if request.moved is not None:
        record["moved"] = {name: entry[:2] for name, entry in request.moved.items()}
    return orjson.dumps(record)


def decode(record: bytes) -> Request:
    """The request that was stored. It has no origin: whoever made it is not connected to this process."""
    stored = orjson.loads(record)
    request = Request(
        shared=tuple(stored.get("shared", ())),
        exclusive=tuple(stored.get("exclusive", ())),
        transaction_timeout_ms=stored["transaction_timeout_ms"],
        transaction=stored.get("transaction"),
        priority=stored.get("priority", 0),
        ref=stored.get("ref"),
        release_on_disconnect=stored.get("release_on_disconnect", False),
    )
    request.id = stored["id"]
    request.owner = request.id if request.transaction is None else request.transaction
    request.state = _BY_NAME[stored["state"]]
    request.fence = stored.get("fence", 0)
    request.since = stored["since"]
    request.since_unix_ms = stored["since_unix_ms"]
    request.deadline = stored["deadline"]
    if request.state is State.WAITING:
        request.place = (-request.priority, request.id, request)
        for name, (priority, ticket) in stored.get("moved", {}).items():
            request.move(name, (priority, ticket, request))
    return request
