"""The commands of the lock manager. A `Request` is itself the command that asks for its locks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from genie.core.model import Request, Weight


@dataclass(slots=True)
class Take:
    """Acquire available resources, in the order given, until their weights reach `target`.

    It acquires nothing if they cannot reach it, and never waits. If it is granted, `request` gets
    the names of the resources that it acquired; until then it names none.
    """

    request: Request
    choices: Sequence[tuple[str, bool]]
    """Names, each once, with whether each is wanted in exclusive mode."""
    weights: Sequence[Weight]
    target: Weight
    as_strings: bool = False
    """Whether the client sent its target as a string: then the sums in the reply are strings too.
    The lock manager only carries it."""


@dataclass(slots=True)
class Release:
    """Release a held lock, or cancel a waiting request."""

    id: int
    ref: str | None = None
    """Echoed by the reply. The lock manager only carries it."""


@dataclass(slots=True)
class Extend:
    """Set the deadline of a held lock to `transaction_timeout_ms` from now."""

    id: int
    transaction_timeout_ms: float
    ref: str | None = None
    """Echoed by the reply. The lock manager only carries it."""


@dataclass(slots=True)
class Expire:
    """End expired requests, the most overdue first.

    At most `limit` of them, which bounds the duration of a step.
    """

    limit: int = 1000


@dataclass(slots=True)
class Disconnect:
    """End the requests of a client that disconnected.

    Waiting ones are cancelled; held ones are released only if they have `release_on_disconnect`.
    """

    requests: Sequence[Request]


@dataclass(slots=True)
class Recover:
    """Complete a restart: disconnect every request without a session, then grant what is grantable."""


Command = Request | Release | Take | Extend | Expire | Disconnect | Recover
