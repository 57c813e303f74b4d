"""Turns for the first input of connections: TLS handshakes, and lines of connections that are not READY yet.

No scheduler queues this input, so its time is limited here.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable
from typing import TypeVar

from genie import round_robin, work_time

T = TypeVar("T")

Owner = Hashable
"""Identifies who has sent input: the name of a principal, or the address of a client that is not authenticated."""

Waiting = dict[Owner, deque[Callable[[], None]]]
"""The functions that process the postponed input of connections, by owner. The next owner is first."""

OPENING_BATCH_S = 0.005
"""Seconds for the input of all connections that are not READY, in one iteration of the event loop. The last input may exceed
this time."""


class OpeningTurns:
    """Processes input at once for `OPENING_BATCH_S`. Further input waits for later iterations of the event loop.

    The owners of the input that waits take turns. So the connections of one owner do not delay the others.

    A first line may have a MiB, and thousands of clients may send their first lines at the same moment. Connections whose
    `hello` was rejected may send lines again and again, so their input is processed *later*, after the other input. At
    least one such input is processed in an iteration.
    """

    def __init__(self) -> None:
        self._remaining_s = OPENING_BATCH_S
        """Seconds for which input may still be processed in this iteration of the event loop."""
        self._waiting: Waiting = {}
        self._waiting_later: Waiting = {}
        """Input that is processed after the input in `_waiting`."""
        self._is_scheduled = False
        """True if `_run_waiting` runs in the next iteration."""

    @property
    def has_time(self) -> bool:
        """True if input may be processed now. Otherwise it must be postponed."""
        return not self._waiting and self._remaining_s > 0

    @property
    def has_spare_time(self) -> bool:
        """True if input that is processed later may be processed now. Otherwise it must be postponed."""
        return self.has_time and not self._waiting_later

    def run(self, process: Callable[[], T]) -> T:
        """Process input now, and subtract the time that it takes from the rest of this iteration."""
        started = work_time.now()
        try:
            return process()
        finally:
            self._remaining_s -= work_time.now() - started
            if self._remaining_s <= 0:
                self._schedule()

    def spend(self, seconds: float) -> None:
        """Subtract a time that input takes later from the rest of this iteration. Called while the input is processed."""
        self._remaining_s -= seconds

    def postpone(self, owner: Owner, process: Callable[[], None], *, later: bool = False) -> None:
        """Process input of an owner in a later iteration of the event loop, with `later` after the other input."""
        waiting = self._waiting_later if later else self._waiting
        round_robin.append(waiting, owner, process)
        self._schedule()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._run_waiting)

    def _run_waiting(self) -> None:
        """Process the waiting input for the time of one iteration."""
        self._is_scheduled, self._remaining_s = False, OPENING_BATCH_S
        try:
            self._run_some(self._waiting)
            self._run_some(self._waiting_later)
        finally:
            if self._waiting or self._waiting_later:
                self._schedule()

    def _run_some(self, waiting: Waiting) -> None:
        """Process the first input in `waiting`, and further input while this iteration has time."""
        count = sum(map(len, waiting.values()))
        for _ in range(count):  # a connection that is postponed again waits for the next iteration
            self.run(round_robin.take_next(waiting))
            if self._remaining_s <= 0:
                break
