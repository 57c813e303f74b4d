"""The commands of the lock manager. A `Request` is also the command that requests its locks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from genie.core.model import Request, Weight
from genie.lock_modes import QueueMode, UnitCount


@dataclass(slots=True)
class Take:
    """Acquire available resources, in the given order, until their weights add up to `target`.

    The command never waits: if the available resources cannot reach `target`, it acquires nothing.
    `request` names no resources until the grant, and afterwards the acquired resources.
    """

    request: Request
    choices: Sequence[tuple[str, QueueMode]]
    """Names, each once, with the mode `S`, `X` or `U`. None of them is a subtree."""
    weights: Sequence[Weight]
    """The weight of each choice, in the same order."""
    target: Weight
    units: Mapping[str, UnitCount] = field(default_factory=dict)
    """The units of the choices in the mode `U`."""
    as_strings: bool = False
    """The client sent its target as a string, so the sums in the reply are also strings. Not read by the lock manager."""


@dataclass(slots=True, init=False)
class Release:
    """Release a held lock, or cancel a waiting request."""

    id: int
    ref: str | None
    """The `ref` of the command, which the reply repeats. The lock manager ignores it."""

    def __init__(self, id: int, ref: str | None = None) -> None:  # written out because mypyc compiles it
        self.id = id
        self.ref = ref


@dataclass(slots=True)
class Extend:
    """Set the deadline of a held lock to `transaction_timeout_ms` from now."""

    id: int
    transaction_timeout_ms: float
    ref: str | None = None
    """The `ref` of the command, which the reply repeats. The lock manager ignores it."""


@dataclass(slots=True)
class Expire:
    """End expired requests, the most overdue first, until the ended requests have at least `limit` locks, held or waited
    for.

    The locks of the requests that are granted in their place count as well.

    The limit bounds the duration of a step.
    """

    limit: int = 1000


@dataclass(slots=True)
class Disconnect:
    """End the requests of a client that disconnected, all together: cancel the waiting ones, and release the held ones."""

    requests: Sequence[Request]


@dataclass(slots=True)
class Recover:
    """Complete a restart: disconnect every request without a session, then grant every grantable request."""

    contended: list[str] | None = None
    """Some of the resources with waiters, from a caller that has disconnected the requests, and that recovers in parts. None: both
    are done in this step, for all resources."""


@dataclass(slots=True)
class Continue:
    """Check the waiters that an earlier step has left in `pending_grants`, and grant the grantable ones."""


Command = Request | Release | Take | Extend | Expire | Disconnect | Recover | Continue
