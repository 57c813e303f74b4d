"""How much memory clients can make a server use at most, computed from its settings: `genie config limits`.

Each figure is an upper bound, which tests compare with the measured memory. The usual memory is much less: a lock with a short
name takes about 0.7 KiB, and a connection without TLS about 3 KiB.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from genie.config import Settings
from genie.core import Context, Request
from genie.core.lock_order.classes import MAX_CACHED_NAMES, MAX_CLASSES
from genie.core.lock_order.edges import MAX_EDGES
from genie.core.lock_order.inversions import MAX_INVERSIONS, MAX_OFFENDERS
from genie.core.manager import RECENT_OUTCOMES
from genie.core.size import NAME_BYTES, REQUEST_BYTES, RESOURCE_BYTES, SHORT_NAMES, excess_bytes, text_bytes
from genie.history.writer import MAX_QUEUED_BYTES
from genie.observability.stats import MAX_DEADLOCK_STEPS, MAX_RESOURCES
from genie.protocol.commands import MAX_CACHED_RESOURCES
from genie.protocol.limits import MAX_NOTE, MAX_REF
from genie.protocol.resources import MAX_NAME
from genie.server.machine import RECEIVE_BUFFER_BYTES
from genie.server.sessions import (
    GUARANTEED_REPLIES,
    MAX_RETAINED_REPLIES_TOTAL,
    MAX_RETAINED_REPLY_BYTES,
    SESSION_BYTES,
)
from genie.server.state_size import WATCH_BYTES
from genie.server.unread_output import COMMAND_FACTOR, MAX_WRITE_BYTES
from genie.server.watch_events import MAX_WAITING_BYTES

KIB: Final = 1 << 10
MIB: Final = 1 << 20

WIDEST: Final = "\U0010ffff"
"""A character that takes the most bytes of all."""

ENDED_REQUEST_BYTES: Final = REQUEST_BYTES + SHORT_NAMES * NAME_BYTES
"""Maximum bytes of a request that is retained with its reply. A larger request is not retained."""
REPLY_BYTES: Final = ENDED_REQUEST_BYTES + MAX_RETAINED_REPLY_BYTES
"""Maximum bytes of a retained reply of a session with a key. Without a key, a reply has no message."""
CONNECTION_BYTES: Final = 8 * KIB + MAX_WRITE_BYTES + SESSION_BYTES + GUARANTEED_REPLIES * ENDED_REQUEST_BYTES
"""Maximum bytes of a connection with its session, its guaranteed replies, and the unread output that no limit
counts."""
TLS_BYTES: Final = 704 * KIB
"""Bytes of the buffers of OpenSSL and asyncio for a connection that has received long lines. For others they take about
50 KiB."""
TLS_READ_BYTES: Final = 256 * KIB
"""Bytes that a connection with TLS may deliver at once: the read buffer of asyncio's TLS."""
ADMIN_CONNECTIONS: Final = 512
"""Maximum number of connections to the admin port."""
ADMIN_CONNECTION_BYTES: Final = 512 * KIB
"""Maximum bytes of a connection to the admin port, on average: 64 KiB of input before it is parsed, and as much afterwards.
Parsed, that takes up to 320 KiB if the request is incomplete, and 1 MiB for requests that wait."""
ADMIN_RESPONSE_BYTES: Final = 96 * MIB
"""Maximum bytes of large responses of the admin port, which are being sent or are cached."""
OUTCOME_BYTES: Final = 96
"""Bytes of the id and the reason of an ended request."""
PARTIAL_FACTOR: Final = 2
"""Memory of an incomplete line while it grows, as a multiple of its bytes."""
UNREAD_FACTOR: Final = 2
"""Memory of unread output, as a multiple of its bytes. Python reserves up to an eighth more for output that grows."""
CACHED_RESOURCE_BYTES: Final = 1_024
"""Bytes of an entry of the cache of decoded resources, which has only short names."""
PROGRAM_BYTES: Final = 192 * MIB
"""Bytes of the interpreter, the code, and the batch that is executed and sent."""
STORE_BYTES: Final = 128 * MIB
"""Bytes that are sent to Redis or read from it: a batch, a part of the state, the log of commits."""

_NAME: Final = text_bytes(WIDEST * MAX_NAME)
_EXAMPLE: Final = 4 * _NAME + text_bytes(WIDEST * MAX_NOTE)
_STEP_BYTES: Final = 2 * _NAME + text_bytes(WIDEST * MAX_NOTE) + KIB
"""Maximum bytes of a step of a cycle: its owner, its resource, and the context of its request."""
LOCK_ORDER_BYTES: Final = (
    MAX_CLASSES * 2 * (_NAME + KIB)
    + (MAX_EDGES + MAX_INVERSIONS * MAX_OFFENDERS) * (_EXAMPLE + 2 * KIB)  # an edge with its guards
    + 2 * MAX_CACHED_NAMES * (_NAME + KIB)  # classes by stem and by name
)
"""Bytes of the analysis of the lock order if all texts have the greatest lengths."""


@dataclass(frozen=True, slots=True)
class Bound:
    """The memory that one limit bounds: at most `value` objects, each of at most `each` bytes.

    `what` names the objects. With `per_namespace`, each namespace can have as many.
    """

    what: str
    setting: str | None
    """The flat name of the setting. None if the limit is fixed."""
    value: int
    each: int
    per_namespace: bool = False

    def total(self, namespaces: int) -> int:
        """Return the maximum bytes on a server with this number of namespaces."""
        return self.value * self.each * (namespaces if self.per_namespace else 1)


def memory_bounds(settings: Settings) -> list[Bound]:
    """Return the bounds of a server with these settings. Their sum bounds its memory."""
    limits = settings.limits
    has_tls = settings.tls.cert is not None
    tls_bytes, read_bytes = (TLS_BYTES, TLS_READ_BYTES) if has_tls else (0, 2 * RECEIVE_BUFFER_BYTES)
    bounds = [  # each with the setting that limits the number of objects, the number, and the bytes of each object
        Bound("program", None, 1, PROGRAM_BYTES),
        Bound("connections", "max_connections", limits.max_connections, CONNECTION_BYTES + tls_bytes),
        Bound("one read of each connection", "max_connections", limits.max_connections, read_bytes),
        Bound("bytes of incomplete lines", "max_partial", limits.max_partial, PARTIAL_FACTOR),
        Bound("unread bytes", "max_unread_total", limits.max_unread_total, UNREAD_FACTOR),
        Bound("cached names", None, MAX_CACHED_RESOURCES, CACHED_RESOURCE_BYTES),
        Bound("bytes of queued commands", "max_pending", limits.max_pending, COMMAND_FACTOR, per_namespace=True),
        Bound("bytes of locks, waits, sessions, watches", "max_state", limits.max_state, 1, per_namespace=True),
        Bound("retained replies of sessions", None, MAX_RETAINED_REPLIES_TOTAL, REPLY_BYTES, per_namespace=True),
        Bound("retained replies without a session", None, MAX_RETAINED_REPLIES_TOTAL, ENDED_REQUEST_BYTES, per_namespace=True),
        Bound("bytes of requests with unsent events", None, MAX_WAITING_BYTES, 1, per_namespace=True),
        Bound("steps of recent deadlocks", None, MAX_DEADLOCK_STEPS, _STEP_BYTES, per_namespace=True),
        Bound("contended resources", None, 2 * MAX_RESOURCES, _NAME + 256, per_namespace=True),
        Bound("ended ids", None, 2 * RECENT_OUTCOMES, OUTCOME_BYTES, per_namespace=True),
    ]  # fmt: skip
    if settings.admin.port is not None:
        admin_connection_bytes = ADMIN_CONNECTION_BYTES + tls_bytes
        bounds += [
            Bound("connections to the admin port", "admin_port", ADMIN_CONNECTIONS, admin_connection_bytes),
            Bound("bytes of responses of the admin port", "admin_port", ADMIN_RESPONSE_BYTES, 1),
        ]
    if settings.lock_order == "on":
        bounds.append(Bound("lock order", "lock_order", 1, LOCK_ORDER_BYTES, per_namespace=True))
    if settings.history.dir is not None:
        bounds.append(Bound("bytes of unwritten history", "history_dir", MAX_QUEUED_BYTES, 1, per_namespace=True))
    if settings.redis.url is not None:
        bounds.append(Bound("commits to Redis", "redis_url", 1, STORE_BYTES, per_namespace=True))
    return bounds


def total_bytes(settings: Settings) -> int:
    """Return how much memory a server with these settings takes at most."""
    return sum(bound.total(len(settings.namespaces)) for bound in memory_bounds(settings))


def principal_share(settings: Settings) -> dict[str, int]:
    """Return how much of each limited total one principal can use at most, if clients need a token."""
    limits = settings.limits
    part = limits.principal_share
    return {
        "bytes of limits.max_state": int(limits.max_state * part),
        "held locks": int(limits.max_locks * part),
        "entries in wait queues": int(limits.max_queue * part),
        "retained replies of sessions": int(MAX_RETAINED_REPLIES_TOTAL * part),
        "retained replies without a session": int(MAX_RETAINED_REPLIES_TOTAL * part),
    }


_LONGEST: Final = Request(
    exclusive=(WIDEST * MAX_NAME,),
    transaction=WIDEST * MAX_NAME,
    ref=WIDEST * MAX_REF,
    context=Context(note=WIDEST * MAX_NOTE),
)

STATE_COSTS: Final = {
    "locks with short texts": REQUEST_BYTES + NAME_BYTES,
    "locks with the longest texts": REQUEST_BYTES + NAME_BYTES + excess_bytes(_LONGEST),
    "waits with short texts, each for a lock of its own": REQUEST_BYTES + NAME_BYTES + RESOURCE_BYTES,
    "sessions that have lost their connection": SESSION_BYTES,
    "watches with the longest prefix": WATCH_BYTES + text_bytes(WIDEST * MAX_NAME),
}
"""The objects that count towards `max_state`, and the bytes of each."""
