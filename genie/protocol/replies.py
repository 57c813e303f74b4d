"""Encodes the server's messages to clients as lines.

Small messages are built by bytes formatting, which is faster than any encoder (measured).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, islice
from typing import Any, Final, Protocol

from genie import core
from genie.core import SUCCESS, Blocker, Inspection, Reason, Released, Request, Row
from genie.core.context import shown_context
from genie.errors import Code, RequestRejected
from genie.lock_modes import QueueMode, U
from genie.protocol import codec
from genie.protocol.limits import PROTOCOL

FEATURES = (
    "anyOf",
    "bye",
    "extend",
    "inspect",
    "note",
    "quiet",
    "sessions",
    "subtrees",
    "traceparent",
    "units",
    "watch",
)
"""Optional features that `welcome` lists: commands and fields that the original specification does not contain."""
PING_INTERVAL_MS = 2_000
"""Interval that `welcome` recommends to clients: a client that waits for a message, and has received none for this
time, sends `ping`."""
MAX_INSPECTED_BYTES = 256 << 10
"""Maximum bytes of the rows in one `inspected`."""
MAX_ROW_RESOURCES = 10
"""Maximum resources listed in one row of `inspected`; `resourcesTotal` counts all resources."""
MAX_READ_NAMES = 20_000
"""Maximum number of names that one `inspected` compares with the prefixes of the principal: a request with `anyOf` may
have 10,000. Beyond it, only `MAX_ROW_RESOURCES` names of each further row are compared."""


class Viewer(Protocol):
    """A client that may not see everything."""

    def may_see(self, name: str) -> bool:
        """Return whether the client may see the resource with this name."""

    def may_see_context(self, resource: str) -> bool:
        """Return whether the client may see the notes and traces of requests for this resource."""


def _encoded_ref(ref: str | None) -> bytes:
    """Return `ref` encoded as the last field of a payload, with its comma. Return b"" for None."""
    return b"" if ref is None else b',"ref":' + codec.dumps(ref)


class Named(Protocol):
    """An object with an id and an optional `ref`."""

    id: int
    ref: str | None


def bare(command: str, ref: str | None) -> bytes:
    """Encode a reply whose payload has at most a `ref`: `pong` or `bye`."""
    return b'{"command":"%b","payload":{}}\n' % command.encode() if ref is None else message(command, {}, ref)


def queued(request: Named) -> bytes:
    """Encode `queued`: a request arrived and has an id."""
    if request.ref is None:
        return b'{"command":"queued","payload":{"id":%d}}\n' % request.id
    return b'{"command":"queued","payload":{"id":%d%b}}\n' % (request.id, _encoded_ref(request.ref))


def granted(request: Request, quiet: bool) -> bytes:
    """Encode `queued` and `locked` for a request that was granted immediately.

    With `quiet`, `queued` is omitted for a request with a `ref`.
    """
    if request.ref is None:
        return b'{"command":"queued","payload":{"id":%d}}\n{"command":"locked","payload":{"id":%d,"fence":%d}}\n' % (
            request.id,
            request.id,
            request.fence,
        )
    return locked(request) if quiet else queued(request) + locked(request)


def locked(request: Request) -> bytes:
    """Encode `locked`: a request is granted."""
    if request.ref is None:
        return b'{"command":"locked","payload":{"id":%d,"fence":%d}}\n' % (request.id, request.fence)
    return b'{"command":"locked","payload":{"id":%d,"fence":%d%b}}\n' % (
        request.id,
        request.fence,
        _encoded_ref(request.ref),
    )


def locked_after_wait(
    request: Request, blockers: Iterable[Blocker], blockers_total: int, viewer: Viewer | None = None
) -> bytes:
    """Encode `locked` for a request that was granted after a wait, with its first blockers when it began to wait.

    Blockers have only the notes and traces that `viewer` may see, or all if it is None.
    """
    payload: dict[str, Any] = {"id": request.id, "fence": request.fence}
    payload["blockers"] = [_blocker_fields(blocker, viewer) for blocker in blockers]
    payload["blockersTotal"] = blockers_total
    return message("locked", payload, request.ref)


def taken(request: Request) -> bytes:
    """Encode `locked` for a request with `anyOf`, units or subtrees. With `anyOf`, it lists the acquired resources."""
    if request.context.choice_digest is None:
        return locked(request)
    payload = {"id": request.id, "fence": request.fence, "resources": request.names()}
    return message("locked", payload, request.ref)


def locked_again(request: Request, now: float) -> bytes:
    """Encode `locked` for a lock that is already held, with the time until it expires.

    With `anyOf`, list the acquired resources. `now` is the lock manager's time in ms.
    """
    remaining_ms = expires_in_ms(request, now)
    if request.context.choice_digest is not None:
        payload = {"id": request.id, "fence": request.fence, "expiresIn": remaining_ms, "resources": request.names()}
        return message("locked", payload, request.ref)
    return b'{"command":"locked","payload":{"id":%d,"fence":%d,"expiresIn":%d%b}}\n' % (
        request.id,
        request.fence,
        remaining_ms,
        _encoded_ref(request.ref),
    )


def welcome(server: str, namespace: str, *, resumed: bool, quiet: bool, ref: str | None = None) -> bytes:
    """Encode the reply to `hello`: version and build of the server, protocol, features, settings of the connection."""
    payload = {
        "protocol": PROTOCOL,
        "server": server,
        "features": FEATURES,
        "pingInterval": PING_INTERVAL_MS,
        "namespace": namespace,
        "resumed": resumed,
        "quiet": quiet,
    }
    return message("welcome", payload, ref)


def success(id: int, ref: str | None) -> bytes:
    """Encode `released` for a request that its client released. `ref` is the `ref` of the `release`."""
    if ref is None:
        return b'{"command":"released","payload":{"id":%d,"reason":"success"}}\n' % id
    return ended(id, SUCCESS, ref)


MAX_LISTED_OWNERS: Final = 100
"""Maximum number of transactions of a deadlock's cycle that `released` lists. With names, notes and traces of the greatest
lengths, 100 take 600 KB."""


def released(event: Released, now: float, ref: str | None, viewer: Viewer | None = None) -> bytes:
    """Encode `released`, with the details of its reason. `now` is the lock manager's time in ms.

    `ref` is the `ref` of the ended request, or in the reply to a `release` the `ref` of the `release`. Blockers and the
    steps of a cycle have only the notes and traces that `viewer` may see, or all if it is None.
    """
    request = event.request
    if event.reason is SUCCESS:
        return success(request.id, ref)
    if event.reason is Reason.DISCONNECTED:
        return ended(request.id, event.reason, ref)
    payload: dict[str, Any] = {"id": request.id, "reason": event.reason}
    if event.reason is Reason.QUEUE_TIMEOUT:
        payload["waited"] = _round_ms(now - request.since)
    elif event.reason is Reason.TRANSACTION_TIMEOUT:
        payload["held"] = _round_ms(now - request.since)
    if isinstance(event, core.Insufficient):
        return _released_insufficient(event)
    if isinstance(event, core.TimedOut):
        payload["blockers"] = [_blocker_fields(blocker, viewer) for blocker in event.blockers]
        payload["blockersTotal"] = event.blockers_total
    elif isinstance(event, core.Deadlocked):
        cycle = event.cycle
        payload["cycle"] = cycle.owners[:MAX_LISTED_OWNERS]
        if len(cycle.owners) > MAX_LISTED_OWNERS:
            payload["cycleTotal"] = len(cycle.owners)
        payload["waits"] = [_wait_fields(wait, viewer) for wait in cycle.waits[:MAX_LISTED_OWNERS]]
    return message("released", payload, ref)


def _released_insufficient(event: core.Insufficient) -> bytes:
    """Encode `released` with the reason `insufficient`.

    The line is built by formatting, because the JSON library can't encode integers over 64 bits.
    """
    request = event.request
    pattern = b'"%d"' if event.as_strings else b"%d"
    line = b'{"command":"released","payload":{"id":%d,"reason":"insufficient","free":%b,"locked":%b%b}}\n'
    return line % (request.id, pattern % event.free, pattern % event.locked, _encoded_ref(request.ref))


def ended(id: int, reason: Reason, ref: str | None) -> bytes:
    """Encode `released` without details, for a request that ended now or earlier."""
    return b'{"command":"released","payload":{"id":%d,"reason":"%b"%b}}\n' % (id, reason.encode(), _encoded_ref(ref))


def extended(event: core.Extended, ref: str | None) -> bytes:
    """Encode `extended`: a held lock has a new deadline."""
    payload = {"id": event.request.id, "transactionTimeout": _round_ms(event.transaction_timeout_ms)}
    return message("extended", payload, ref)


def inspected(inspection: Inspection, now: float, viewer: Viewer | None = None, ref: str | None = None) -> bytes:
    """Encode the reply to `inspect`. `now` is the lock manager's time in ms.

    Rows beyond `MAX_INSPECTED_BYTES` are omitted. With a `viewer`, only the resources that it may see are named. The others
    are only counted.
    """
    remaining_bytes, remaining_names = MAX_INSPECTED_BYTES, MAX_READ_NAMES
    encoded: dict[str, list[codec.Fragment]] = {"holders": [], "queue": []}
    rows = chain((("holders", row) for row in inspection.holders), (("queue", row) for row in inspection.queue))
    for field, row in rows:
        limit = max(remaining_names, MAX_ROW_RESOURCES)
        resources, is_context_visible, read_count = _visible_resources(row.request, viewer, limit)
        remaining_names -= read_count
        fields = _row_fields(row, now, viewer, resources)
        if is_context_visible:
            _add_context(fields, shown_context(row.request))
        encoded_row = codec.dumps(fields)
        remaining_bytes -= len(encoded_row)
        if remaining_bytes < 0:
            break
        encoded[field].append(codec.Fragment(encoded_row))
    return message(
        "inspected",
        {
            "holders": encoded["holders"],
            "holdersTotal": inspection.holders_total,
            "queue": encoded["queue"],
            "queueTotal": inspection.queue_total,
        },
        ref,
    )


def watching(prefix: str, rows: list[bytes], truncated: bool, ref: str | None) -> bytes:
    """Encode the reply to `watch`. `rows` are results of `watching_row`. `truncated` is true if rows are missing."""
    held = codec.Fragment(b"[%b]" % b",".join(rows))
    return message("watching", {"prefix": prefix, "held": held, "truncated": truncated}, ref)


def unwatched(prefix: str, ref: str | None) -> bytes:
    """Encode the reply to `unwatch`."""
    return message("unwatched", {"prefix": prefix}, ref)


MODE_NAMES: Final = (b"shared", b"exclusive", b"units")
"""The wire form of each mode: `S`, `X` and `U`."""


def watching_row(request: Request, resource: str, mode: QueueMode) -> bytes:
    """Encode one row of `watching`: a held lock on one resource."""
    # Formatting takes half the time of the JSON encoder, and a reply has up to 10,000 rows.
    transaction = request.transaction
    row = b'{"resource":%b,"mode":"%b","id":%d' % (codec.dumps(resource), MODE_NAMES[mode], request.id)
    if mode == U:
        row += b',"units":%d,"of":%d' % request.units[resource]
    return row + b"}" if transaction is None else row + b',"transactionName":%b}' % codec.dumps(transaction)


def event(request: Request, resource: str, mode: QueueMode, state: str) -> bytes:
    """Encode `event`: a lock on a watched resource was granted (`state` is `locked`) or released (`unlocked`)."""
    row = watching_row(request, resource, mode)
    return b'{"command":"event","payload":{"state":"%b",%b}\n' % (state.encode(), row[1:])


LAGGED = b'{"command":"event","payload":{"state":"lagged"}}\n'
"""The last event of a watcher that does not read its events fast enough. All its watches have ended."""


def error(rejection: RequestRejected, leader: str | None = None) -> bytes:
    """Encode `error`: a command was rejected and had no effect.

    `leader` is the address of the server that can execute the command, if it is known.
    """
    payload: dict[str, Any] = {"code": rejection.code, "message": rejection.message}
    if rejection.id is not None:
        payload["id"] = rejection.id
    if leader is not None:
        payload["leader"] = leader
    if rejection.code == Code.UNSUPPORTED_PROTOCOL:
        payload["supported"] = [PROTOCOL]
    return message("error", payload, rejection.ref)


def message(command: str, payload: dict[str, Any], ref: str | None = None) -> bytes:
    """Encode a message as a line. Adds `ref` to `payload` unless it is None."""
    if ref is not None:
        payload["ref"] = ref
    return codec.message(command, payload)


def expires_in_ms(request: Request, now: float) -> int:
    """Return the time in whole ms until a request times out.

    It is rounded down, because the deadline was rounded up.
    """
    return max(0, int(request.deadline - now))


def _round_ms(duration: float) -> float:
    """Return a duration in ms as an integer if it has no fraction, otherwise rounded to microseconds."""
    return int(duration) if duration == int(duration) else round(duration, 3)


def _blocker_fields(blocker: Blocker, viewer: Viewer | None) -> dict[str, Any]:
    """Return the wire fields of a blocker."""
    row: dict[str, Any] = {
        "id": blocker.id,
        "resource": blocker.resource,
        "mode": blocker.mode,
        "state": "held" if blocker.held else "queued",
        "since": blocker.since_unix_ms,
    }
    if blocker.units is not None:
        row["units"], row["of"] = blocker.units
    if blocker.transaction is not None:
        row["transactionName"] = blocker.transaction
    if viewer is None or viewer.may_see_context(blocker.resource):
        _add_context(row, blocker.context)
    return row


def _wait_fields(wait: core.Wait, viewer: Viewer | None) -> dict[str, Any]:
    """Return the wire fields of a step of a cycle."""
    row: dict[str, Any] = {"resource": wait.resource, "waiter": wait.waiter, "holder": wait.holder}
    if wait.units is not None:
        row["units"], row["of"] = wait.units
    if viewer is None or viewer.may_see_context(wait.resource):
        _add_context(row, wait.context)
    return row


def _add_context(row: dict[str, Any], context: core.Context) -> None:
    if context.note is not None:
        row["note"] = context.note
    if context.traceparent is not None:
        row["traceparent"] = context.traceparent


def _visible_resources(request: Request, viewer: Viewer | None, limit: int) -> tuple[list[str], bool, int]:
    """Return the first `MAX_ROW_RESOURCES` resources of a request that `viewer` may see.

    Also return whether it may see the note and trace of the request, which is so if it may see those of one of the
    resources, and the number of names read, at most `limit`.
    """
    resources: list[str] = []
    is_context_visible, read_count = viewer is None, 0
    for name, mode in islice(request.modes(), limit):
        read_count += 1
        if viewer is None or viewer.may_see(name):
            resources.append(request.lock_text(name, mode))
            is_context_visible = is_context_visible or (viewer is not None and viewer.may_see_context(name))
            if len(resources) == MAX_ROW_RESOURCES:
                break
    return resources, is_context_visible, read_count


def _row_fields(row: Row, now: float, viewer: Viewer | None, resources: list[str]) -> dict[str, Any]:
    """Return the wire fields of a row of `inspected`, with these `resources` of its request.

    With a `viewer`, only blockers on resources that it may see are listed.
    """
    request, blockers = row.request, row.blockers
    if viewer is not None:
        blockers = tuple([blocker for blocker in blockers if viewer.may_see(blocker.resource)])
    fields: dict[str, Any] = {
        "id": request.id,
        "resources": resources,
        "resourcesTotal": request.name_count(),
        "priority": _round_ms(request.priority),
        "since": int(request.since_unix_ms),
    }
    if request.deadline < core.NEVER:
        fields["expiresIn"] = expires_in_ms(request, now)
    if request.transaction is not None:
        fields["transactionName"] = request.transaction
    if request.state is core.HELD:
        fields["fence"] = request.fence
    else:
        fields["blockers"] = [_blocker_fields(blocker, viewer) for blocker in blockers]
        fields["blockersTotal"] = row.blockers_total
    return fields
