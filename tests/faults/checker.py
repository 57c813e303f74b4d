"""Checks the guarantees: gets every grant, every write and every message, and records the violations."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from faults.fenced_counters import FencedCounters, LateWrite

KEYS = ("counters/1", "counters/2", "counters/3")
POOL, POOL_UNITS = "pool", 2
"""A counted resource, and how many of its units may be in use."""

TAIL = 200
"""How many events of the history a failure shows."""

MAX_GRANT_TIMES = 100_000
"""How many times of grants are kept."""


class Violation(AssertionError):
    """A guarantee was violated."""


@dataclass(slots=True, eq=False)
class Grant:
    """A lock, according to its client. It is certainly held until `certain_until`, however late the client was notified."""

    client: str
    id: int
    fence: int
    keys: tuple[str, ...]
    certain_until: float
    entered_at: float = field(default_factory=time.monotonic)

    @property
    def certain(self) -> bool:
        """True if the lock is certainly still held: only its owner can have ended it."""
        return time.monotonic() < self.certain_until


def locks_of(keys: tuple[str, ...]) -> list[str]:
    """Return the locks on keys, as clients write them. All counters are locked by their subtree, and the pool by a unit."""
    if len(keys) == len(KEYS):
        return ["exclusive:counters/**"]
    return [f"1/{POOL_UNITS}:{key}" if key == POOL else f"exclusive:{key}" for key in keys]


class Checker:
    """Records what happens, and the violations. `violated` is set with the first violation."""

    def __init__(self) -> None:
        self.started_at = time.monotonic()
        self.store = FencedCounters()
        self.counts: Counter[str] = Counter()
        self.cycles: Counter[str] = Counter()
        self.violations: list[str] = []
        self.violated = asyncio.Event()
        self.history: deque[str] = deque(maxlen=TAIL)
        self.stopped_leaders: dict[tuple[str, int], float] = {}
        """Servers that have lost leadership while they were stopped, and when they were stopped: they must not send more."""
        self._holders: defaultdict[str, list[Grant]] = defaultdict(list)
        self._owners: dict[int, tuple[str, str]] = {}
        self._fences: dict[int, int] = {}
        self._last_fence: dict[str, int] = {}
        self._granted_at: deque[float] = deque(maxlen=MAX_GRANT_TIMES)
        self._awaited: list[tuple[float, bool, asyncio.Future[float]]] = []

    def note(self, source: str, event: str) -> None:
        """Add an event to the history."""
        self.history.append(f"{time.monotonic() - self.started_at:10.4f}  {source:12} {event}")

    def violate(self, what: str) -> None:
        """Record a violation."""
        self.note("VIOLATION", what)
        self.violations.append(what)
        self.violated.set()

    def check(self) -> None:
        """Raise Violation if there was any."""
        if self.violations:
            raise Violation("; ".join(self.violations[:5]))

    # -- grants and writes --------------------------------------------------------------------------------

    def record_id(self, client: str, ref: str, id_: int) -> None:
        """Record the id that a server has assigned to a request: it must be unique, and always the same."""
        if self._owners.setdefault(id_, (client, ref)) != (client, ref):
            self.violate(f"id {id_} is {client}'s {ref}, but was {self._owners[id_]}")

    def granted(self, grant: Grant, *, connected_at: float | None, is_repetition: bool) -> None:
        """Record that a client was notified of a grant; `is_repetition`: it may have been notified before."""
        self.note(grant.client, f"holds {','.join(grant.keys)} as {grant.id}, fence {grant.fence}")
        known = self._fences.get(grant.fence)
        if known is not None and known != grant.id:
            self.violate(f"fence {grant.fence} was assigned to {known} and to {grant.id}")
        self._fences[grant.fence] = grant.id
        for key in grant.keys:
            holders = self._holders[key]
            others = [f"{other.client} as {other.id}" for other in holders if other.certain]
            if grant.certain and len(others) >= (POOL_UNITS if key == POOL else 1):
                self.violate(f"{grant.client} holds {key} as {grant.id}, and so does {', '.join(others)}")
            if key != POOL and grant.certain and grant.fence <= self._last_fence.get(key, 0):
                self.violate(f"fence {grant.fence} of {key} follows {self._last_fence[key]}")
            self._last_fence[key] = max(grant.fence, self._last_fence.get(key, 0))
            holders.append(grant)
        if not is_repetition:
            self._record_grant(connected_at)

    def lost(self, grant: Grant) -> None:
        """Record that a client starts to release its lock, or was notified of its end."""
        for key in grant.keys:
            if grant in self._holders[key]:
                self._holders[key].remove(grant)

    def read(self, grant: Grant, key: str) -> int | None:
        """Read a counter; None if the access is rejected."""
        try:
            return self.store.read(key, grant.fence)
        except LateWrite as late:
            self._on_rejected(grant, late)
            return None

    def write(self, grant: Grant, key: str, value: int) -> bool:
        """Write a counter; return whether the write was accepted."""
        try:
            self.store.write(key, value, grant.fence)
        except LateWrite as late:
            self._on_rejected(grant, late)
            return False
        self.note(grant.client, f"{key} = {value}, fence {grant.fence}")
        return True

    def _on_rejected(self, grant: Grant, late: LateWrite) -> None:
        self.note(grant.client, f"rejected: {late}")
        self.counts["rejected"] += 1
        if grant.certain:
            self.violate(f"a write of {grant.client} was rejected ({late}) though it certainly holds {grant.id}")

    # -- waiting for grants -------------------------------------------------------------------------------

    def grant_after(self, moment: float, *, fresh: bool) -> asyncio.Future[float]:
        """Return a future: the time of the next grant after a time; `fresh`: on a connection that was made after it, too."""
        future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._awaited.append((moment, fresh, future))
        return future

    def longest_gap(self, since: float) -> float:
        """Return the longest time since then without a grant."""
        moments = [since, *(moment for moment in self._granted_at if moment > since), time.monotonic()]
        return max(later - earlier for earlier, later in pairwise(moments))

    def _record_grant(self, connected_at: float | None) -> None:
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

    def message_received(self, address: tuple[str, int], since: float, command: str, payload: dict[str, Any]) -> None:
        """Check a message of a server, on a connection that the server has known since `since`.

        A server that lost leadership while it was stopped may only send what is still true, on old connections, or reject.
        """
        stopped_at = self.stopped_leaders.get(address)
        if stopped_at is None or (since >= stopped_at and (command, payload.get("code")) == ("error", "unavailable")):
            return
        if since < stopped_at and self._is_true(command, payload):
            self.note(str(address[1]), f"sends a late message that is true: {command} {payload}")
            self.counts["late messages that are true"] += 1
            return
        self.violate(f"{address[1]} is not the leader any more, but sends {command} {payload}")

    def _is_true(self, command: str, payload: dict[str, Any]) -> bool:
        """Return whether a late message agrees with the messages of the next leader.

        A leader may be stopped while it sends the messages of a stored batch, and sends the rest later.
        """
        id_ = payload.get("id", 0)
        if command == "locked":
            return self._fences.get(payload["fence"]) == id_
        if command == "released":
            return id_ in self._owners and not any(
                grant.id == id_ for holders in self._holders.values() for grant in holders
            )
        return command in ("queued", "extended") and id_ in self._owners
