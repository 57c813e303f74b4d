"""The requests according to the messages of all clients, which must be consistent."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fuzz.sent_commands import SentCommand


class Violation(AssertionError):
    """A message violates the protocol, or is missing."""


@dataclass(slots=True)
class KnownRequest:
    """The state of one request according to the messages of all clients."""

    id: int
    owner: Any
    """The `ClientModel`, or the secret of the session and its number among those with this secret."""
    command: SentCommand | None = None
    """The command that made it; None if its reply was never received."""
    ref: str | None = None
    state: str = "queued"
    fence: int | None = None
    modes: dict[str, str] = field(default_factory=dict)
    """The mode of each name that it requests or holds: `shared`, `exclusive`, or units as `2/10`."""
    reason: str | None = None
    extended: bool = False
    releasers: set[Any] = field(default_factory=set)
    """The clients that released or extended it."""


class SharedModel:
    """All requests of a scenario, and the order of their fencing tokens."""

    def __init__(self) -> None:
        self.requests: dict[int, KnownRequest] = {}
        self.order: list[int] = []
        """Ids in the order of their first messages."""
        self.fences: dict[int, int] = {}
        """Fencing token to id."""
        self.max_fence = 0
        """The greatest fencing token before the last check."""
        self.new_fences: list[int] = []
        """The fencing tokens since then."""
        self.generations: dict[str, int] = {}
        """The number of sessions with each secret."""
        self.begun_late: set[str] = set()
        """Secrets of sessions that were taken over before the client that began them has read its `welcome`."""
        self.releasers_by_ref: dict[str, set[Any]] = {}
        """The clients that released by ref."""
        self._by_ref: dict[tuple[Any, str], KnownRequest] = {}
        self.claims: dict[str, list[Any]] = {}
        """The clients that used the secret of each session."""

    def recent_id(self, place: int) -> int:
        """Return one of the last 40 ids, counted from the end; 0 if there is none."""
        return self.order[-1 - place % min(len(self.order), 40)] if self.order else 0

    def new(self, id_: int, owner: Any, command: SentCommand | None, ref: str | None) -> KnownRequest:
        """Add a request with its first message."""
        known = KnownRequest(id_, owner, command, ref)
        if command is not None:
            known.modes = command.modes
        self.requests[id_] = known
        if ref is not None:
            self._by_ref[owner, ref] = known
        self.order.append(id_)
        return known

    def request_with_ref(self, owner: Any, ref: str) -> KnownRequest | None:
        """Return the request of an owner with a ref; None before the first message about it."""
        return self._by_ref.get((owner, ref))

    def locked(self, known: KnownRequest, payload: dict[str, Any], *, is_repetition: bool) -> None:
        """Record a `locked`; `is_repetition`: it may repeat an earlier one."""
        fence = payload["fence"]
        if self.fences.setdefault(fence, known.id) != known.id or known.fence not in (None, fence):
            raise Violation(f"the fence {fence} of {known.id} belongs to another request")
        if not is_repetition:
            if known.fence is not None:
                raise Violation(f"{known.id} is locked twice")
            self.new_fences.append(fence)
        known.fence = fence
        if known.state == "queued":  # another client may have received its end earlier
            known.state = "held"

    def ended(self, known: KnownRequest, reason: str) -> None:
        """Record a `released`."""
        if known.reason not in (None, reason):
            raise Violation(f"{known.id} ended by {reason}, but before by {known.reason}")
        known.state, known.reason = "ended", reason

    def check_fences(self) -> None:
        """Check that the fencing tokens since the last check are greater than all earlier ones."""
        if self.new_fences and min(self.new_fences) <= self.max_fence:
            raise Violation(f"the fence {min(self.new_fences)} follows {self.max_fence}")
        self.max_fence = max([self.max_fence, *self.new_fences])
        self.new_fences.clear()
