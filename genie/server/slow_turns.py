"""What the namespaces of a server share in an iteration of their event loop: one slow command, and the time of batches and slices."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable

SLICES_S = 0.005
"""Seconds for the slices of all namespaces in one iteration of the event loop: ends of expired requests and sessions, and watch
events. The last slice may exceed it."""

RESTING_BATCHES = 2
"""Number of batches, or of iterations of the event loop, without a slow command after one that took long. In the first one, the
commands that arrived meanwhile are read after the batch has begun. The second one executes and answers them."""


class SlowTurns:
    """Gives one caller a turn in each iteration: the caller that has waited longest, if it asks again.

    A caller without a turn asks again in the next iteration if its slow commands, or its slices, still wait.
    """

    def __init__(self) -> None:
        self._iteration = 0
        self._batches = 0
        """Number of batches that have begun in this iteration."""
        self._batches_before = 1
        """Number of batches in the previous iteration, at least 1."""
        self._is_taken = False
        """True if a caller has the turn of this iteration."""
        self._resting = 0
        """Number of the next iterations in which no caller has the turn, because a slow command took long."""
        self._is_scheduled = False
        """True if `_end_iteration` is scheduled."""
        self._asked: dict[Hashable, int] = {}
        """The callers without a turn in this iteration, with the iteration in which they first asked."""
        self._asked_before: dict[Hashable, int] = {}
        """`_asked` of the previous iteration."""
        self._slices_s = SLICES_S
        """Seconds that are left for slices in this iteration."""
        self._late: dict[Hashable, int] = {}
        """The callers without a slice in this iteration, with the iteration in which they first asked."""
        self._late_before: dict[Hashable, int] = {}
        """`_late` of the previous iteration, without the callers that got a slice since."""

    def share(self, batch_s: float) -> float:
        """Count a batch, and return its time limit: `batch_s` divided by the number of batches, in this or the previous
        iteration, whichever has more.
        """
        self._schedule_end()
        self._batches += 1
        return batch_s / max(self._batches, self._batches_before)

    def run_slice(self, caller: Hashable, work: Callable[[], None]) -> None:
        """Do a slice of work, if there is time in this iteration, and no other caller has waited longer for a slice."""
        self._schedule_end()
        since = self._late_before.get(caller, self._iteration)
        if self._slices_s <= 0 or since > min(self._late_before.values(), default=since):
            self._late[caller] = since
            return
        self._late_before.pop(caller, None)
        started = time.monotonic()
        work()
        self._slices_s -= time.monotonic() - started

    def take(self, caller: Hashable) -> bool:
        """Return whether the caller may execute a slow command in this iteration. If not, remember since when it waits."""
        self._schedule_end()
        since = self._asked_before.get(caller, self._iteration)
        if self._is_taken or since > min(self._asked_before.values(), default=since):
            self._asked[caller] = since
            return False
        self._is_taken = True
        return True

    def rest(self) -> None:
        """Give no turns in the next `RESTING_BATCHES` iterations, because a slow command took long."""
        self._resting = RESTING_BATCHES

    def _schedule_end(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._end_iteration)

    def _end_iteration(self) -> None:
        self._batches_before, self._batches = max(self._batches, 1), 0
        self._asked_before, self._asked = self._asked, {}
        self._late_before, self._late = self._late, {}
        self._slices_s = SLICES_S
        self._is_taken, self._is_scheduled = self._resting > 0, False
        self._resting = max(0, self._resting - 1)
        self._iteration += 1
