"""What the server looks after several times a second: how late its loop is, who waits for long, what deadlocked.

The log is written here and not where it happens: so a flood of slow waits costs a bounded number of lines.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import structlog

from genie.core import WAITING, Blocker, Request, Wait
from genie.core.view import MAX_COUNTED_BLOCKERS, sample_blockers

if TYPE_CHECKING:
    from genie.observability.stats import Deadlock, Stats
    from genie.server.pipeline import Pipeline

log = structlog.get_logger()

SAMPLE_INTERVAL_S = 0.1
MAX_LOGGED_EVENTS = 10
"""Slow waits, and deadlocks, told in one pulse. Of the rest it is told how many they are."""
MAX_LOGGED_STEPS = 100
"""Steps of a cycle that are told."""
MAX_LOGGED_RESOURCES = 10
"""Resources of one request that are told."""


class Monitor:
    """`slow_wait_ms` says from when on a wait is told; 0: never."""

    def __init__(self, namespace: str, stats: Stats, slow_wait_ms: float) -> None:
        self._log = log.bind(namespace=namespace)
        self._stats = stats
        self._slow_ms = slow_wait_ms
        stats.follows_newcomers = slow_wait_ms > 0
        self._loop = asyncio.get_running_loop()
        stats.turn(self._loop.time() * 1000)
        self._due = self._loop.time() + SAMPLE_INTERVAL_S
        self._timer = self._loop.call_at(self._due, self._beat)
        self.pipeline: Pipeline | None = None
        """That of a server that leads."""

    def stop(self) -> None:
        """No more."""
        self._timer.cancel()

    def _beat(self) -> None:
        now = self._loop.time()
        self._stats.lag.add((now - self._due) * 1000)
        self._stats.turn(now * 1000)
        if self.pipeline is not None:
            self._tell_slow(self.pipeline)
        self._tell_deadlocks()
        self._due = max(now, self._due + SAMPLE_INTERVAL_S)
        self._timer = self._loop.call_at(self._due, self._beat)

    def _tell_slow(self, pipeline: Pipeline) -> None:
        """Tell of those who began to wait so long ago, and still do. They are in the order in which they came."""
        newcomers, now, told, untold = self._stats.newcomers, pipeline.now, 0, 0
        while newcomers and (newcomers[0].state is not WAITING or newcomers[0].since <= now - self._slow_ms):
            request = newcomers.popleft()
            if request.state is not WAITING:
                continue
            if told < MAX_LOGGED_EVENTS:
                told += 1
                self._log.warning("slow wait", **_slow(pipeline, request, now))
            else:
                untold += 1
        if untold:
            self._log.warning("slow wait", more=untold)
        self._stats.forget_newcomers(len(pipeline.manager.table.waiting))

    def _tell_deadlocks(self) -> None:
        found, many = self._stats.untold_deadlocks()
        for deadlock in found[:MAX_LOGGED_EVENTS]:
            self._log.warning("deadlock", **_deadlock(deadlock))
        if many > MAX_LOGGED_EVENTS:
            self._log.warning("deadlock", more=many - MAX_LOGGED_EVENTS)


def _slow(pipeline: Pipeline, request: Request, now: float) -> dict[str, Any]:
    blockers, total, _ = sample_blockers(pipeline.manager.table, request, MAX_COUNTED_BLOCKERS, count=True)
    names = request.names()
    return {
        "id": request.id,
        "transaction": request.transaction,
        **({} if request.note is None else {"note": request.note}),
        "waited_ms": round(now - request.since),
        "resources": [f"{request.mode(name)}:{name}" for name in names[:MAX_LOGGED_RESOURCES]],
        "resources_total": len(names),
        "blockers": [_blocker(blocker) for blocker in blockers],
        "blockers_total": total,
    }


def _blocker(blocker: Blocker) -> dict[str, Any]:
    return {
        "id": blocker.id,
        "transaction": blocker.transaction,
        "resource": f"{blocker.mode}:{blocker.resource}",
        "state": "held" if blocker.held else "queued",
        "since_unix_ms": blocker.since_unix_ms,
        **({} if blocker.note is None else {"note": blocker.note}),
    }


def _deadlock(deadlock: Deadlock) -> dict[str, Any]:
    waits = deadlock.cycle.waits
    return {
        "id": deadlock.id,
        "transaction": deadlock.transaction,
        "cycle": deadlock.cycle.owners[:MAX_LOGGED_STEPS],
        "waits": [_step(wait) for wait in waits[:MAX_LOGGED_STEPS]],
        "steps": len(waits),
    }


def _step(wait: Wait) -> dict[str, Any]:
    step = {"waiter": wait.waiter, "resource": wait.resource, "holder": wait.holder}
    return step if wait.note is None else {**step, "note": wait.note}
