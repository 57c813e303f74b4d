"""The reference model of the lock manager: the queue rule of the specification, implemented literally.

There is one queue. After every change it is scanned from its head, and the resources of earlier requests count as locked.
It has no queue rearrangement and no deadlock detection, so it is a reference only where the literal rule never deadlocks.
It is slow on purpose, and shares no code with the lock manager.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil


@dataclass(eq=False)
class OracleRequest:
    """A request in the reference model. Times are in milliseconds."""

    id: int
    owner: str | int
    modes: dict[str, str]
    priority: float
    transaction_timeout_ms: float
    deadline: float


@dataclass
class Oracle:
    """Holders and one queue. Each method returns the events that it caused, as `(event, id, …)`."""

    queue: list[OracleRequest] = field(default_factory=list)
    held: list[OracleRequest] = field(default_factory=list)
    last_id: int = 0

    def request(
        self,
        modes: dict[str, str],
        now: float,
        *,
        owner: str | None = None,
        priority: float = 0,
        queue_timeout_ms: float = 10_000,
        transaction_timeout_ms: float = 10_000,
    ) -> list[tuple[object, ...]]:
        """Queue a request. `modes` maps resources to "shared" or "exclusive"."""
        self.last_id += 1
        request = OracleRequest(
            self.last_id,
            self.last_id if owner is None else owner,
            modes,
            priority,
            transaction_timeout_ms,
            now + queue_timeout_ms,
        )
        not_lower = [i for i, other in enumerate(self.queue) if other.priority >= priority]
        self.queue.insert(not_lower[-1] + 1 if not_lower else 0, request)
        log = [("queued", request.id), *self._grant_from_head(now)]
        if queue_timeout_ms <= 0 and request in self.queue:
            self.queue.remove(request)
            log.append(("released", request.id, "queue-timeout"))
        return log

    def release(self, id_: int, now: float) -> list[tuple[object, ...]]:
        """Release a held request, or cancel a queued one."""
        for request in [*self.held, *self.queue]:
            if request.id == id_:
                return [*self._end(request, "success"), *self._grant_from_head(now)]
        return []

    def expire(self, now: float) -> list[tuple[object, ...]]:
        """End the requests whose deadlines have passed, by millisecond and then by id."""
        log: list[tuple[object, ...]] = []
        expired = [request for request in [*self.held, *self.queue] if request.deadline <= now]
        for request in sorted(expired, key=lambda request: (ceil(request.deadline), request.id)):
            if request.deadline <= now:
                reason = "transaction-timeout" if request in self.held else "queue-timeout"
                log += [*self._end(request, reason), *self._grant_from_head(now)]
        return log

    def _end(self, request: OracleRequest, reason: str) -> list[tuple[object, ...]]:
        (self.held if request in self.held else self.queue).remove(request)
        return [("released", request.id, reason)]

    def _grant_from_head(self, now: float) -> list[tuple[object, ...]]:
        log: list[tuple[object, ...]] = []
        index = 0
        while index < len(self.queue):
            request = self.queue[index]
            if any(_conflict(request, other) for other in [*self.held, *self.queue[:index]]):
                index += 1
                continue
            self.queue.remove(request)
            self.held.append(request)
            request.deadline = now + request.transaction_timeout_ms
            log.append(("locked", request.id))
            index = 0
        return log


def _conflict(one: OracleRequest, other: OracleRequest) -> bool:
    return one.owner != other.owner and any(
        "exclusive" in (mode, other.modes[name]) for name, mode in one.modes.items() if name in other.modes
    )
