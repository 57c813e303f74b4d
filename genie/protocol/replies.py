"""From what happened to a line, for the server. Small messages by bytes formatting: nothing is faster."""

from __future__ import annotations

from typing import Any, Protocol

from genie import core
from genie.core import SUCCESS, Blocker, Inspection, Mode, Reason, Released, Request, Row
from genie.errors import RequestRejected
from genie.protocol import codec

PONG = b'{"command":"pong","payload":{}}\n'
MAX_ANSWER = 256 << 10
"""Bytes of rows in one `inspected`."""
ROW_RESOURCES = 10
"""Resources named in one row of `inspected`; `resourcesTotal` says how many there are."""


def _ref(ref: str | None) -> bytes:
    return b"" if ref is None else b',"ref":' + codec.dumps(ref)


class Named(Protocol):
    """What has an id and perhaps a `ref`."""

    id: int
    ref: str | None


def queued(request: Named) -> bytes:
    """A request has arrived and has an id."""
    if request.ref is None:
        return b'{"command":"queued","payload":{"id":%d}}\n' % request.id
    return b'{"command":"queued","payload":{"id":%d%b}}\n' % (request.id, _ref(request.ref))


def granted(request: Request) -> bytes:
    """Both `queued` and `locked`."""
    if request.ref is None:
        return b'{"command":"queued","payload":{"id":%d}}\n{"command":"locked","payload":{"id":%d,"fence":%d}}\n' % (
            request.id,
            request.id,
            request.fence,
        )
    return queued(request) + locked(request)


def locked(request: Request) -> bytes:
    """A request is granted."""
    if request.ref is None:
        return b'{"command":"locked","payload":{"id":%d,"fence":%d}}\n' % (request.id, request.fence)
    return b'{"command":"locked","payload":{"id":%d,"fence":%d%b}}\n' % (request.id, request.fence, _ref(request.ref))


def taken(request: Request) -> bytes:
    """`queued` and `locked` of a request that chose: with what it took."""
    payload = {"id": request.id, "fence": request.fence, "resources": request.names()}
    return queued(request) + message("locked", payload, request.ref)


def still_locked(request: Request, now: float) -> bytes:
    """`locked`, said again: with what is left of the hold, and where the request chose with what it took."""
    left = max(0, int(request.deadline - now))
    if request.chosen is not None:
        payload = {"id": request.id, "fence": request.fence, "expiresIn": left, "resources": request.names()}
        return message("locked", payload, request.ref)
    return b'{"command":"locked","payload":{"id":%d,"fence":%d,"expiresIn":%d%b}}\n' % (
        request.id,
        request.fence,
        left,
        _ref(request.ref),
    )


def welcome(version: str, namespace: str, resumed: bool) -> bytes:
    """The answer to `hello`."""
    return message("welcome", {"version": version, "namespace": namespace, "resumed": resumed}, None)


def released(event: Released, now: float) -> bytes:
    """A request ended at `now` (the manager's clock), with all that its reason has to say."""
    request = event.request
    if event.reason is SUCCESS and request.ref is None:
        return b'{"command":"released","payload":{"id":%d,"reason":"success"}}\n' % request.id
    if event.reason is SUCCESS or event.reason is Reason.DISCONNECTED:
        return ended(request.id, event.reason, request.ref)
    payload: dict[str, Any] = {"id": request.id, "reason": event.reason}
    if event.reason is Reason.QUEUE_TIMEOUT:
        payload["waited"] = _ms(now - request.since)
    elif event.reason is Reason.TRANSACTION_TIMEOUT:
        payload["held"] = _ms(now - request.since)
    if isinstance(event, core.Refused):
        return _insufficient(event)
    if isinstance(event, core.TimedOut):
        payload["blockers"] = [_blocker(blocker) for blocker in event.blockers]
        payload["blockersTotal"] = event.blockers_total
    elif isinstance(event, core.Deadlocked):
        payload["cycle"] = event.cycle.owners
        payload["waits"] = [
            {"resource": wait.resource, "waiter": wait.waiter, "holder": wait.holder} for wait in event.cycle.waits
        ]
    return message("released", payload, request.ref)


def _insufficient(event: core.Refused) -> bytes:
    """The sums are integers wherever the weights were, and may be longer than a JSON library takes them."""
    request = event.request
    told = b'{"command":"released","payload":{"id":%d,"reason":"insufficient","free":%b,"locked":%b%b}}\n'
    return told % (request.id, repr(event.free).encode(), repr(event.locked).encode(), _ref(request.ref))


def ended(id: int, reason: Reason, ref: str | None) -> bytes:
    """A request ended, now by `release` or some time ago."""
    return b'{"command":"released","payload":{"id":%d,"reason":"%b"%b}}\n' % (id, reason.encode(), _ref(ref))


def extended(event: core.Extended) -> bytes:
    """A held lock ends later, or sooner."""
    payload = {"id": event.request.id, "transactionTimeout": _ms(event.transaction_timeout_ms)}
    return message("extended", payload, event.request.ref)


def inspected(inspection: Inspection, now: float, prefixes: tuple[str, ...] | None = None) -> bytes:
    """The answer to `inspect`; `now` is the manager's clock. Rows beyond `MAX_ANSWER` bytes are left out.

    Of resources whose names begin with none of the `prefixes` it is told how many there are (None: all are told).
    """
    room = MAX_ANSWER
    told: dict[str, list[codec.Fragment]] = {"holders": [], "queue": []}
    rows = [("holders", row) for row in inspection.holders] + [("queue", row) for row in inspection.queue]
    for part, row in rows:
        line = codec.dumps(_row(row, now, prefixes))
        room -= len(line)
        if room < 0:
            break
        told[part].append(codec.Fragment(line))
    return message(
        "inspected",
        {
            "holders": told["holders"],
            "holdersTotal": inspection.holders_total,
            "queue": told["queue"],
            "queueTotal": inspection.queue_total,
        },
    )


def watching(prefix: str, rows: list[bytes], truncated: bool) -> bytes:
    """The answer to `watch`: what is held now, as `row`s."""
    held = codec.Fragment(b"[%b]" % b",".join(rows))
    return message("watching", {"prefix": prefix, "held": held, "truncated": truncated})


def unwatched(prefix: str) -> bytes:
    """The answer to `unwatch`."""
    return message("unwatched", {"prefix": prefix})


def held(request: Request, resource: str, exclusive: bool) -> bytes:
    """A row of `watching`."""
    if request.transaction is None:  # 10,000 rows are one answer: each takes half the time so
        mode = Mode.EXCLUSIVE if exclusive else Mode.SHARED
        return b'{"resource":%b,"mode":"%b","id":%d}' % (codec.dumps(resource), mode.encode(), request.id)
    return codec.dumps(_lock(request, resource, exclusive))


def event(request: Request, resource: str, exclusive: bool, state: str) -> bytes:
    """A lock was taken, or given back."""
    return message("event", {"state": state, **_lock(request, resource, exclusive)})


def _lock(request: Request, resource: str, exclusive: bool) -> dict[str, Any]:
    row = {"resource": resource, "mode": Mode.EXCLUSIVE if exclusive else Mode.SHARED, "id": request.id}
    if request.transaction is not None:
        row["transactionName"] = request.transaction
    return row


LAGGED = b'{"command":"event","payload":{"state":"lagged"}}\n'
"""There were more of them than this connection could take: nothing more is told of what it watched."""


def error(rejected: RequestRejected, leader: str | None = None) -> bytes:
    """A command was refused and changed nothing. `leader` is the address of the server that would take it."""
    payload: dict[str, Any] = {"code": rejected.code, "message": rejected.message}
    if rejected.id is not None:
        payload["id"] = rejected.id
    if leader is not None:
        payload["leader"] = leader
    return message("error", payload, rejected.ref)


def message(command: str, payload: dict[str, Any], ref: str | None = None) -> bytes:
    """Any message."""
    if ref is not None:
        payload["ref"] = ref
    return codec.message(command, payload)


def _ms(duration: float) -> float:
    return int(duration) if duration == int(duration) else round(duration, 3)


def _blocker(blocker: Blocker) -> dict[str, Any]:
    row: dict[str, Any] = {
        "id": blocker.id,
        "resource": blocker.resource,
        "mode": blocker.mode,
        "state": "held" if blocker.held else "queued",
        "since": blocker.since_unix_ms,
    }
    if blocker.transaction is not None:
        row["transactionName"] = blocker.transaction
    return row


def _row(row: Row, now: float, prefixes: tuple[str, ...] | None) -> dict[str, Any]:
    request, blockers = row.request, row.blockers
    names = shown = request.names()
    if prefixes is not None:
        shown = tuple([name for name in names if name.startswith(prefixes)])
        blockers = tuple([blocker for blocker in blockers if blocker.resource.startswith(prefixes)])
    told: dict[str, Any] = {
        "id": request.id,
        "resources": [f"{request.mode(name)}:{name}" for name in shown[:ROW_RESOURCES]],
        "resourcesTotal": len(names),
        "priority": _ms(request.priority),
        "since": int(request.since_unix_ms),
        "expiresIn": _ms(max(0.0, request.deadline - now)),
    }
    if request.transaction is not None:
        told["transactionName"] = request.transaction
    if request.state is core.HELD:
        told["fence"] = request.fence
    else:
        told["blockers"] = [_blocker(blocker) for blocker in blockers]
        told["blockersTotal"] = row.blockers_total
    return told
