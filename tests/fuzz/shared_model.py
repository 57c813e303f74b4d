"""All that clients were told of requests, by id: what must agree between them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fuzz.sent_commands import Said


class Wrong(AssertionError):
    """Something was told, or not told, that should not be so."""


@dataclass(slots=True)
class Known:
    """A request, as far as anybody was told of it."""

    id: int
    owner: Any
    """Whose it is: an `Ear`, or what a session is known by."""
    said: Said | None = None
    """What asked for it; None where that answer was never heard."""
    ref: str | None = None
    state: str = "queued"
    fence: int | None = None
    names: dict[str, bool] = field(default_factory=dict)
    reason: str | None = None
    extended: bool = False
    releasers: set[Any] = field(default_factory=set)


class Book:
    """Requests by id."""

    def __init__(self) -> None:
        self.requests: dict[int, Known] = {}
        self.order: list[int] = []
        """Ids as they were told."""
        self.fences: dict[int, int] = {}
        """The id of each."""
        self.greatest = 0
        """Of the fences before the last look."""
        self.fresh: list[int] = []
        """Fences since then."""
        self.generations: dict[str, int] = {}
        """How often each session began anew."""
        self.releasers_by_ref: dict[str, set[Any]] = {}
        """Who released by each ref."""
        self._by_ref: dict[tuple[Any, str], Known] = {}
        self.claims: dict[str, list[Any]] = {}
        """Who said the secret of each."""

    def pick(self, place: int) -> int:
        """An id that somebody was told; 0 if nobody was."""
        return self.order[-1 - place % min(len(self.order), 40)] if self.order else 0

    def new(self, id_: int, owner: Any, said: Said | None, ref: str | None) -> Known:
        """A request that nobody was told of before."""
        known = Known(id_, owner, said, ref)
        if said is not None:
            known.names = said.names
        self.requests[id_] = known
        if ref is not None:
            self._by_ref[owner, ref] = known
        self.order.append(id_)
        return known

    def named(self, owner: Any, ref: str) -> Known | None:
        """The request that somebody made with a ref, as far as they were told of it."""
        return self._by_ref.get((owner, ref))

    def locked(self, known: Known, payload: dict[str, Any], *, again: bool) -> None:
        """Somebody was told of a grant; `again` where it may be an old one."""
        fence = payload["fence"]
        if self.fences.setdefault(fence, known.id) != known.id or known.fence not in (None, fence):
            raise Wrong(f"the fence {fence} of {known.id} is not its own")
        if not again:
            if known.fence is not None:
                raise Wrong(f"{known.id} is locked twice")
            self.fresh.append(fence)
        known.fence = fence
        if known.state == "queued":  # somebody else may have been told of its end a moment before
            known.state = "held"

    def ended(self, known: Known, reason: str) -> None:
        """Somebody was told of an end."""
        if known.reason not in (None, reason):
            raise Wrong(f"{known.id} ended by {reason}, and before by {known.reason}")
        known.state, known.reason = "ended", reason

    def look(self) -> None:
        """Fences grow: all that were told since the last look are greater than those before."""
        if self.fresh and min(self.fresh) <= self.greatest:
            raise Wrong(f"the fence {min(self.fresh)} comes after {self.greatest}")
        self.greatest = max([self.greatest, *self.fresh])
        self.fresh.clear()
