"""What the clients know of requests, by id: their messages must agree."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fuzz.sent_commands import SentCommand


class Violation(AssertionError):
    """A message violates the protocol, or is missing."""


@dataclass(slots=True)
class KnownRequest:
    """What the clients know of one request."""

    id: int
    owner: Any
    """The `ClientModel`, or the secret and the generation of the session."""
    said: SentCommand | None = None
    """The command that made it; None if its reply was never received."""
    ref: str | None = None
    state: str = "queued"
    fence: int | None = None
    names: dict[str, bool] = field(default_factory=dict)
    reason: str | None = None
    extended: bool = False
    releasers: set[Any] = field(default_factory=set)


class SharedModel:
    """Requests by id."""

    def __init__(self) -> None:
        self.requests: dict[int, KnownRequest] = {}
        self.order: list[int] = []
        """Ids in the order of the messages."""
        self.fences: dict[int, int] = {}
        """Fencing token to id."""
        self.greatest = 0
        """The greatest fencing token before the last check."""
        self.fresh: list[int] = []
        """Fencing tokens since then."""
        self.generations: dict[str, int] = {}
        """The number of sessions with each secret."""
        self.releasers_by_ref: dict[str, set[Any]] = {}
        """The clients that released by ref."""
        self._by_ref: dict[tuple[Any, str], KnownRequest] = {}
        self.claims: dict[str, list[Any]] = {}
        """The clients that used the secret of each session."""

    def pick(self, place: int) -> int:
        """Return a recent id; 0 if there is none."""
        return self.order[-1 - place % min(len(self.order), 40)] if self.order else 0

    def new(self, id_: int, owner: Any, said: SentCommand | None, ref: str | None) -> KnownRequest:
        """Add a request with its first message."""
        known = KnownRequest(id_, owner, said, ref)
        if said is not None:
            known.names = said.names
        self.requests[id_] = known
        if ref is not None:
            self._by_ref[owner, ref] = known
        self.order.append(id_)
        return known

    def named(self, owner: Any, ref: str) -> KnownRequest | None:
        """Return the request of an owner with a ref, if there was a message about it."""
        return self._by_ref.get((owner, ref))

    def locked(self, known: KnownRequest, payload: dict[str, Any], *, again: bool) -> None:
        """Record a `locked`; `again`: it may repeat an earlier one."""
        fence = payload["fence"]
        if self.fences.setdefault(fence, known.id) != known.id or known.fence not in (None, fence):
            raise Violation(f"the fence {fence} of {known.id} belongs to another request")
        if not again:
            if known.fence is not None:
                raise Violation(f"{known.id} is locked twice")
            self.fresh.append(fence)
        known.fence = fence
        if known.state == "queued":  # another client may have received its end earlier
            known.state = "held"

    def ended(self, known: KnownRequest, reason: str) -> None:
        """Record a `released`."""
        if known.reason not in (None, reason):
            raise Violation(f"{known.id} ended by {reason}, and before by {known.reason}")
        known.state, known.reason = "ended", reason

    def look(self) -> None:
        """Check that the fencing tokens since the last check are greater than all earlier ones."""
        if self.fresh and min(self.fresh) <= self.greatest:
            raise Violation(f"the fence {min(self.fresh)} follows {self.greatest}")
        self.greatest = max([self.greatest, *self.fresh])
        self.fresh.clear()
