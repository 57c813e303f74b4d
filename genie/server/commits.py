"""One batch in flight at most: what a commit may take, when the store counts as away, and the clock of an idle server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from genie.server.dispatch import Dispatch
from genie.storage.base import Batch, Change, Store, Superseded

if TYPE_CHECKING:
    from genie.config import Settings
    from genie.observability.stats import Stats

HEARTBEAT_S = 1.0
"""How often an idle server commits its clock: what a crash may add to the life of a lock. Three times in a lease, where that is oftener."""

MIN_TICK_S = 0.025
"""How exactly the patience with the store is kept, at best."""

RESERVE = 100_000
"""Ids that are stored ahead of their use."""


class Owner(Protocol):
    """Who is told what comes of a commit."""

    def on_stored(self) -> None:
        """It is stored."""

    def on_away(self) -> None:
        """It takes longer than the store may."""

    def on_failure(self, error: BaseException) -> None:
        """The server can't go on: the store said so, or it has not answered for a lease, and another may lead by now."""


class Commits:
    """Writes batches to the store, one after the other."""

    def __init__(
        self,
        owner: Owner,
        dispatch: Dispatch,
        store: Store,
        settings: Settings,
        stats: Stats,
        clock: Callable[[], float],
    ) -> None:
        self._owner: Owner | None = owner
        """None when this is stopped: nobody is told any more, nor kept in memory by this."""
        self.in_flight = False
        self.away = False
        """The store has not answered for longer than it may."""
        self.reserved = 0
        """Ids below this are stored as given out."""
        self._dispatch = dispatch
        self._manager = dispatch.manager
        self._store = store
        self._stats = stats
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._sent_at = 0.0
        self._patience_s = settings.store_timeout_ms / 1000
        self._lease_s = settings.lease if store.durable else float("inf")
        self._heartbeat_s = min(HEARTBEAT_S, self._lease_s / 3)
        self._tick_s = max(MIN_TICK_S, min(self._heartbeat_s, self._patience_s / 4))
        self._ticker = self._loop.call_later(self._tick_s, self._tick) if store.durable else None

    @property
    def due(self) -> bool:
        """Whether one is needed though nothing has changed: to know that this server leads, or to have more ids."""
        if self._loop.time() - self._sent_at > self._lease_s:
            return True
        return self._manager.next_id > self.reserved and self._store.durable

    def write(self, changes: dict[int, Change], now: float) -> None:
        """Begin one. Ids are stored ahead of their use: what is said of one that waits need not be stored itself."""
        manager = self._manager
        self._dispatch.stored_below = manager.next_id
        if manager.next_id > self.reserved - RESERVE // 2:
            self.reserved = manager.next_id + RESERVE
        self.in_flight, self._sent_at = True, self._loop.time()
        self._stats.sizes.add(len(changes))
        self._store.commit(Batch(changes, self.reserved, manager.next_fence, now), self._answered)

    def _answered(self, error: BaseException | None) -> None:
        self.in_flight = self.away = False
        owner = self._owner
        if owner is None:
            return
        took_s = self._loop.time() - self._sent_at
        self._stats.commits.add(took_s * 1000)
        if error is None and took_s > self._lease_s:
            error = Superseded("it took longer than the lease until a commit was answered; another may lead by now")
        if error is None:
            owner.on_stored()
        else:
            owner.on_failure(error)

    def _tick(self) -> None:
        """Look after the store: is it away, or idle for so long that the clock should be stored?

        A timer of its own for each commit would cost more than the rest of it.
        """
        owner = self._owner
        if owner is None:
            return
        self._ticker = self._loop.call_later(self._tick_s, self._tick)
        quiet_s = self._loop.time() - self._sent_at
        try:
            if self.in_flight:
                if quiet_s > self._lease_s:
                    owner.on_failure(Superseded("nothing could be committed for longer than the lease"))
                elif quiet_s >= self._patience_s and not self.away:
                    self.away = True
                    self._stats.store_errors += 1
                    owner.on_away()
            elif quiet_s >= self._heartbeat_s - self._tick_s:
                self.write({}, self._clock())
        except Exception as error:  # noqa: BLE001 - a defect: better no server than one that has lost its way
            owner.on_failure(error)

    def stop(self) -> None:
        """Whatever the store answers, nobody hears of it any more."""
        self._owner = None
        if self._ticker is not None:
            self._ticker.cancel()
