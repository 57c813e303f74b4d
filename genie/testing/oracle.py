"""The queue rule as the seed of Genie says it, as literally as it can be written.

One queue, walked from the beginning after every change; what a request above asks for counts as locked. No reordering,
no cycles: this is the measure for the lock manager wherever the literal rule leads everybody to the end. Slow on
purpose, and made of nothing that the lock manager is made of.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil


@dataclass(eq=False)
class Asked:
    """A request as the oracle keeps it."""

    id: int
    owner: str | int
    modes: dict[str, str]
    priority: float
    transaction_timeout_ms: float
    deadline: float


@dataclass
class Oracle:
    """Holders, one queue, and a log of what happened: `(what, id, …)`."""

    queue: list[Asked] = field(default_factory=list)
    held: list[Asked] = field(default_factory=list)
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
        """A request arrives. `modes`: resource → "shared" or "exclusive"."""
        self.last_id += 1
        asked = Asked(
            self.last_id,
            self.last_id if owner is None else owner,
            modes,
            priority,
            transaction_timeout_ms,
            now + queue_timeout_ms,
        )
        behind = [i for i, other in enumerate(self.queue) if other.priority >= priority]
        self.queue.insert(behind[-1] + 1 if behind else 0, asked)
        log = [("queued", asked.id), *self._run(now)]
        if queue_timeout_ms <= 0 and asked in self.queue:
            self.queue.remove(asked)
            log.append(("released", asked.id, "queue-timeout"))
        return log

    def release(self, id_: int, now: float) -> list[tuple[object, ...]]:
        """A held request is given back, or a queued one cancelled."""
        for asked in [*self.held, *self.queue]:
            if asked.id == id_:
                return [*self._end(asked, "success"), *self._run(now)]
        return []

    def expire(self, now: float) -> list[tuple[object, ...]]:
        """What is due ends, by millisecond and then by id."""
        log: list[tuple[object, ...]] = []
        due = [asked for asked in [*self.held, *self.queue] if asked.deadline <= now]
        for asked in sorted(due, key=lambda asked: (ceil(asked.deadline), asked.id)):
            if asked.deadline <= now:
                reason = "transaction-timeout" if asked in self.held else "queue-timeout"
                log += [*self._end(asked, reason), *self._run(now)]
        return log

    def _end(self, asked: Asked, reason: str) -> list[tuple[object, ...]]:
        (self.held if asked in self.held else self.queue).remove(asked)
        return [("released", asked.id, reason)]

    def _run(self, now: float) -> list[tuple[object, ...]]:
        log: list[tuple[object, ...]] = []
        place = 0
        while place < len(self.queue):
            asked = self.queue[place]
            if any(_conflict(asked, other) for other in [*self.held, *self.queue[:place]]):
                place += 1
                continue
            self.queue.remove(asked)
            self.held.append(asked)
            asked.deadline = now + asked.transaction_timeout_ms
            log.append(("locked", asked.id))
            place = 0
        return log


def _conflict(one: Asked, other: Asked) -> bool:
    return one.owner != other.owner and any(
        "exclusive" in (mode, other.modes[name]) for name, mode in one.modes.items() if name in other.modes
    )
