"""What can be asked of the lock manager, beside a `Request`, which is a command itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from genie.core.model import Request, Weight


@dataclass(slots=True)
class Take:
    """Hold, in the order given, those of the resources that are free now, until their weights reach `target`.

    Or nothing, if they don't reach it: it never waits. `request` is what is granted then; it names nothing yet.
    """

    request: Request
    choices: Sequence[tuple[str, bool]]
    """Names, each once, and whether each is wanted exclusively."""
    weights: Sequence[Weight]
    target: Weight
    as_strings: bool = False
    """Whether the client wrote its target as a string, and gets the sums back so. The core carries it."""


@dataclass(slots=True)
class Release:
    """Give back a held lock, or cancel a waiting request."""

    id: int
    ref: str | None = None
    """Echoed by the answer. The core carries it."""


@dataclass(slots=True)
class Extend:
    """Let a held lock end `transaction_timeout_ms` from now."""

    id: int
    transaction_timeout_ms: float
    ref: str | None = None
    """Echoed by the answer. The core carries it."""


@dataclass(slots=True)
class Expire:
    """End what is due, the most overdue first, at most `limit` requests: so no step is long."""

    limit: int = 1000


@dataclass(slots=True)
class Disconnect:
    """Whoever made these requests is gone: the waiting ones go, the held ones go where they said so."""

    requests: Sequence[Request]


@dataclass(slots=True)
class Recover:
    """After loading: everybody is gone (see `Disconnect`), and every line is looked at for what can be granted."""


Command = Request | Release | Take | Extend | Expire | Disconnect | Recover
