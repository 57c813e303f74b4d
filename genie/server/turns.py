"""Turns in an iteration of the event loop: its time is shared by all work of the leaders and followers of a server.

The work consists of *parts*, of three kinds:

- A *batch* executes the commands of one namespace for a few milliseconds.
- A *slice* continues work that is not finished in one step: pending grants, expired requests, expired sessions, watch events.
- A *slow command* is one whose work grows with the state.

Each part is bounded, but together they would take long. So no part begins once an iteration has taken `ITERATION_S`: it waits
for a later iteration. The last part may exceed the limit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable
from typing import ParamSpec

P = ParamSpec("P")

Caller = Hashable
"""Identifies what asks for parts. An id, not the object: its state must be freed although `IterationTurns` is kept."""

BATCH_S = 0.005
"""Seconds for the batches of all namespaces in one iteration. The last command of a batch may exceed the limit."""

ITERATION_S = 0.006
"""Seconds of an iteration after which no other part begins. More than `BATCH_S`, so that a slow command can follow a full batch."""

LONG_S = 0.010
"""An iteration that takes longer than this many seconds is followed by `RESTING_ITERATIONS` that only run batches."""

RESTING_ITERATIONS = 2
"""In the first of these iterations, the commands that arrived meanwhile are read after the batch has begun. The second one
executes and answers them."""

SHORT_S = 0.001
"""Seconds up to which batches are only added up, over all iterations: so iterations with little work need no callback at their
end."""


OVERRUN_PENALTY = 100
"""Number of iterations for which a caller waits after all others if its last part was the last one of an exhausted iteration. So
clients of a namespace do not wait for expensive commands to many other namespaces."""

MAX_DENIED = 64
"""Number of denied parts of a caller after which no other part begins before its next one."""

OVERDUE_ITERATIONS = 4
"""Number of iterations for which all others wait for such a caller. After them, it must be denied `MAX_DENIED` parts again: it may
not exist any more."""

MAX_REMEMBERED = 10_000
"""Number of callers with an `OVERRUN_PENALTY`, and of callers with denied parts, beyond which they are forgotten. Some may not
exist any more."""


class _Kind:
    """The callers that ask for parts of one kind."""

    def __init__(self) -> None:
        self.ran: set[Caller] = set()
        """The callers with a part in this iteration."""
        self.late: dict[Caller, int] = {}
        """The callers without a part in this iteration, with the iteration since which they wait."""
        self.late_before: dict[Caller, int] = {}
        """`late` of the previous iteration, without the callers that had a part since."""
        self.denied: dict[Caller, int] = {}
        """How many parts of a caller were denied since its last one."""
        self.skipped = 0
        """Number of the last iterations in which no part began although one was asked for."""


class IterationTurns:
    """Decides which parts begin in an iteration.

    A caller whose part must wait asks again in the next iteration. Of the callers of one kind, the caller that has waited
    longest is first, apart from `OVERRUN_PENALTY`. The kind that was skipped for the most iterations is first in the next one.
    Both orders only know who asked in the previous iteration, so `MAX_DENIED` bounds how often a caller is denied a part.
    """

    def __init__(self) -> None:
        self.is_active = False
        """False if every part may begin, and a batch may take `BATCH_S`. Then the methods need not be called before a batch, nor
        after it up to `SHORT_S`: this saves 8 % of the instructions of a cycle with one contended lock."""
        self.spent_s = 0.0
        """Seconds that the parts of this iteration have taken; while not `is_active`, also those of earlier iterations."""
        self.is_exhausted = False
        """True if this iteration has taken `ITERATION_S`, so that no other part begins."""
        self._iteration = 0
        self._resting = 0
        """Number of iterations, this one included, that only run batches."""
        self._batches, self._slices, self._slow = _Kind(), _Kind(), _Kind()
        self._first: _Kind | None = None
        """The kind with which this iteration begins. None: any kind."""
        self._last: Caller = None
        """The caller of the last part of this iteration. None: it was not asked for, as there was time for every part."""
        self._overdue: tuple[_Kind, Caller] | None = None
        """The caller for whose part of a kind all others wait."""
        self._overdue_until = 0
        """The last iteration in which they wait."""
        self._exhausting: set[Caller] = set()
        """The callers whose last part was the last one of an exhausted iteration."""
        self._batches_before = 1
        """Number of batches in the previous iteration."""
        self._is_end_scheduled = False
        """True if `_end_iteration`, or `_end_after_others`, is scheduled."""

    def enter(self, caller: Caller) -> None:
        """Prepare for parts of a caller. It must call this before its first part in an iteration, unless this is a batch."""
        kinds = self._batches, self._slow, self._slices
        if not self._is_end_scheduled and any(caller in kind.ran or caller in kind.late for kind in kinds):
            self._end_iteration()

    def begin_batch(self, caller: Caller) -> float:
        """Return for how many seconds a batch may execute commands now, or 0 if it must wait.

        That is `BATCH_S` divided by the number of batches, in this or the previous iteration, whichever has more.
        """
        self.enter(caller)
        if not self._begin(self._batches, caller):
            return 0.0
        return BATCH_S / max(len(self._batches.ran), self._batches_before)

    def begin_slow(self, caller: Caller) -> bool:
        """Return whether the caller may execute a slow command now. One is executed in an iteration."""
        return self._begin(self._slow, caller)

    def run_slice(self, caller: Caller, work: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Do a slice of work, unless it must wait."""
        if self._begin(self._slices, caller):
            started = time.monotonic()
            work(*args, **kwargs)
            self.spend(time.monotonic() - started)

    def spend(self, seconds: float) -> None:
        """Add the duration of a part, or of an expensive command that is executed immediately."""
        self.spent_s += seconds
        if self.spent_s >= ITERATION_S and not self.is_exhausted:
            self.is_exhausted = True
            self._exhausting.add(self._last)
        if self.spent_s > SHORT_S and not self._is_end_scheduled:
            self.is_active = self._is_end_scheduled = True
            asyncio.get_running_loop().call_soon(self._end_after_others)

    def _begin(self, kind: _Kind, caller: Caller) -> bool:
        """Return whether a part may begin. If not, remember since when the caller waits, and how often it was denied a part."""
        self.is_active = True
        is_second_slow = kind is self._slow and len(kind.ran) > 0
        is_next = self._is_next(kind, caller) if self._overdue is None else self._overdue == (kind, caller)
        if self.is_exhausted or is_second_slow or not is_next:
            self._deny(kind, caller)
            return False
        self._overdue = None
        kind.ran.add(caller)
        kind.late_before.pop(caller, None)
        kind.denied.pop(caller, None)
        self._exhausting.discard(caller)
        self._last = caller
        return True

    def _is_next(self, kind: _Kind, caller: Caller) -> bool:
        """Return whether no other kind and no other caller is before this one."""
        if self._resting and kind is not self._batches:
            return False
        if not self._resting and self._first is not None and self._first is not kind and not self._first.ran:
            return False
        # The callers that wait may not ask in this iteration. So after one in which none of them ran, any may begin.
        return kind.skipped > 0 or self._waits_since(kind, caller) <= min(kind.late_before.values(), default=1 << 63)

    def _waits_since(self, kind: _Kind, caller: Caller) -> int:
        since = kind.late_before.get(caller)
        if since is not None:
            return since
        return self._iteration + (OVERRUN_PENALTY if caller in self._exhausting else 0)

    def _deny(self, kind: _Kind, caller: Caller) -> None:
        kind.late[caller] = self._waits_since(kind, caller)
        denied = kind.denied[caller] = kind.denied.get(caller, 0) + 1
        if denied >= MAX_DENIED and self._overdue is None:
            kind.denied[caller] = 0
            self._overdue, self._overdue_until = (kind, caller), self._iteration + OVERDUE_ITERATIONS

    def _end_after_others(self) -> None:
        """End the iteration. With uvloop, the scheduled callbacks are the rest of an iteration in which input was read, so an
        exhausted one ends after them.
        """
        if self.is_exhausted:
            asyncio.get_running_loop().call_soon(self._end_iteration)
        else:
            self._end_iteration()

    def _end_iteration(self) -> None:
        if self._resting:
            self._resting -= 1
        elif self.spent_s > LONG_S:
            self._resting = RESTING_ITERATIONS
        self._batches_before = max(len(self._batches.ran), 1)
        kinds = self._slow, self._slices, self._batches
        for kind in kinds:
            kind.skipped = kind.skipped + 1 if kind.late and not kind.ran else 0
            kind.late_before, kind.late = kind.late, {}
            kind.ran.clear()
        most = max(kinds, key=lambda kind: kind.skipped)
        self._first = most if most.skipped else None
        self.spent_s = 0.0
        self.is_exhausted = self._is_end_scheduled = False
        self._last = None
        self._iteration += 1
        if self._iteration > self._overdue_until:
            self._overdue = None
        is_awaited = self._overdue is not None or any(kind.late_before for kind in kinds)
        self.is_active = is_awaited or self._resting > 0 or self._batches_before > 1
        if len(self._exhausting) > MAX_REMEMBERED:
            self._exhausting.clear()
        for kind in kinds:
            if len(kind.denied) > MAX_REMEMBERED:
                kind.denied.clear()
