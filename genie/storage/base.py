"""What a store is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from genie.core import Request, Snapshot


@dataclass(slots=True)
class Batch:
    """What one group commit writes, all of it or nothing.

    `changes` maps an id to its request as it is now: held or waiting ones are written, ended ones deleted. The rest
    are the manager's counters (no id from `next_id` on was given out, nor may one below it be) and clock (ms).
    """

    changes: dict[int, Request] = field(default_factory=dict)
    next_id: int = 1
    next_fence: int = 1
    clock_ms: float = 0.0


class Superseded(Exception):
    """Another server has taken the namespace over. This one must not say anything to anyone any more."""


class Store(Protocol):
    """Keeps the requests that are held or wait. One batch at a time."""

    durable: bool
    """Whether anything is written, so that it is worth telling what changed."""

    async def open(self, snapshot: Callable[[], Snapshot]) -> Snapshot:
        """Take the namespace over and load what it holds.

        `snapshot` gives the whole present state at any later time: a store that finds its own content lost writes
        it anew from there.
        """

    def commit(self, batch: Batch, done: Callable[[BaseException | None], None]) -> None:
        """Write a batch and call `done`: now or, with most stores, later.

        The store retries, with the same batch, for as long as it takes; `done` is given an error only where there is
        no use in that, as with `Superseded`. The next batch must wait until then.
        """

    async def close(self) -> None:
        """Let go of everything. Nothing is committed afterwards."""
