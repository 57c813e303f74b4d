"""The judge: sees every grant, every write and every line of the wire, and says what must not be."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from faults.store import LateWrite, Store

TAIL = 200
"""Events of the history that a failure shows."""

REMEMBERED = 100_000
"""Grants whose moment is known."""


class Broken(AssertionError):
    """A promise was not kept."""


@dataclass(slots=True, eq=False)
class Grant:
    """A lock, as one client knows it. It is surely held until `sure_until`, however long it was under way."""

    client: str
    id: int
    fence: int
    keys: tuple[str, ...]
    sure_until: float
    entered_at: float = field(default_factory=time.monotonic)

    @property
    def sure(self) -> bool:
        """Nothing but its owner can have ended it yet."""
        return time.monotonic() < self.sure_until


class Watch:
    """Everything that happened, and what of it was wrong. `broken` is set with the first of those."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.store = Store()
        self.counts: Counter[str] = Counter()
        self.cycles: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.broken = asyncio.Event()
        self.history: deque[str] = deque(maxlen=TAIL)
        self.silenced: dict[tuple[str, int], float] = {}
        """Servers that have lost the lead while they were stopped, and when they were stopped: they have no say."""
        self._inside: dict[str, Grant] = {}
        self._owners: dict[int, tuple[str, str]] = {}
        self._fences: dict[int, int] = {}
        self._last_fence: dict[str, int] = {}
        self._granted_at: deque[float] = deque(maxlen=REMEMBERED)
        self._awaited: list[tuple[float, bool, asyncio.Future[float]]] = []

    def note(self, who: str, what: str) -> None:
        """One line of the history."""
        self.history.append(f"{time.monotonic() - self.began:10.4f}  {who:12} {what}")

    def violate(self, what: str) -> None:
        """Something that must not be."""
        self.note("WRONG", what)
        self.wrong.append(what)
        self.broken.set()

    def check(self) -> None:
        """Broken, if anything was wrong by now."""
        if self.wrong:
            raise Broken("; ".join(self.wrong[:5]))

    # -- grants and writes --------------------------------------------------------------------------------

    def known_as(self, client: str, ref: str, id_: int) -> None:
        """A server has given an id to a request: it is nobody else's, and the same each time."""
        if self._owners.setdefault(id_, (client, ref)) != (client, ref):
            self.violate(f"id {id_} is {client}'s {ref}, and was {self._owners[id_]}")

    def granted(self, grant: Grant, *, connected_at: float | None, again: bool) -> None:
        """A client has heard that it holds. `again`: as the last word on it, perhaps not for the first time."""
        self.note(grant.client, f"holds {','.join(grant.keys)} as {grant.id}, fence {grant.fence}")
        known = self._fences.get(grant.fence)
        if known is not None and known != grant.id:
            self.violate(f"fence {grant.fence} was given to {known} and to {grant.id}")
        self._fences[grant.fence] = grant.id
        for key in grant.keys:
            other = self._inside.get(key)
            if other is not None and other.sure and grant.sure:
                self.violate(f"{grant.client} holds {key} as {grant.id}, and so does {other.client} as {other.id}")
            if grant.sure and grant.fence <= self._last_fence.get(key, 0):
                self.violate(f"fence {grant.fence} of {key} follows {self._last_fence[key]}")
            self._last_fence[key] = max(grant.fence, self._last_fence.get(key, 0))
            self._inside[key] = grant
        if not again:
            self._told(connected_at)

    def left(self, grant: Grant) -> None:
        """It gives the lock back from now on, or has heard that it is lost."""
        for key in grant.keys:
            if self._inside.get(key) is grant:
                del self._inside[key]

    def read(self, grant: Grant, key: str) -> int | None:
        """The counter; None where the store refuses."""
        try:
            return self.store.read(key, grant.fence)
        except LateWrite as late:
            self._refused(grant, late)
            return None

    def write(self, grant: Grant, key: str, value: int) -> bool:
        """Write the counter; whether the store took it."""
        try:
            self.store.write(key, value, grant.fence)
        except LateWrite as late:
            self._refused(grant, late)
            return False
        self.note(grant.client, f"{key} = {value}, fence {grant.fence}")
        return True

    def _refused(self, grant: Grant, late: LateWrite) -> None:
        self.note(grant.client, f"refused: {late}")
        self.counts["refused"] += 1
        if grant.sure:
            self.violate(f"{grant.client} was refused ({late}) though it surely holds {grant.id}")

    # -- waiting for grants -------------------------------------------------------------------------------

    def grant_after(self, moment: float, *, fresh: bool) -> asyncio.Future[float]:
        """When the next lock is granted that is told after a moment; `fresh`: on a connection made since, too."""
        future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._awaited.append((moment, fresh, future))
        return future

    def silence(self, since: float) -> float:
        """The longest time since then in which nobody was granted a lock."""
        moments = [since, *(moment for moment in self._granted_at if moment > since), time.monotonic()]
        return max(later - earlier for earlier, later in pairwise(moments))

    def _told(self, connected_at: float | None) -> None:
        now = time.monotonic()
        self._granted_at.append(now)
        for item in self._awaited[:]:
            moment, fresh, future = item
            if future.done():
                self._awaited.remove(item)
            elif now >= moment and (not fresh or (connected_at is not None and connected_at >= moment)):
                self._awaited.remove(item)
                future.set_result(now)

    # -- lines --------------------------------------------------------------------------------------------

    def heard(self, address: tuple[str, int], since: float, command: str, payload: dict[str, Any]) -> None:
        """A line came, whoever reads it, on a connection of which the server has known since then."""
        stopped_at = self.silenced.get(address)
        if stopped_at is None or (since >= stopped_at and (command, payload.get("code")) == ("error", "unavailable")):
            return
        if since < stopped_at and self._true(command, payload):
            self.note(str(address[1]), f"says late what is true: {command} {payload}")
            self.counts["said late, and true"] += 1
            return
        self.violate(f"{address[1]} does not lead any more and says {command} {payload}")

    def _true(self, command: str, payload: dict[str, Any]) -> bool:
        """A leader may be stopped within its telling of what is stored. The rest it tells later, and it must be what the
        next leader has told of the same requests by now.
        """
        id_ = payload.get("id", 0)
        if command == "locked":
            return self._fences.get(payload["fence"]) == id_
        if command == "released":
            return id_ in self._owners and not any(grant.id == id_ for grant in self._inside.values())
        return command in ("queued", "extended") and id_ in self._owners
