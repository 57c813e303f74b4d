"""Turns in an iteration of the event loop: its time is shared by all work of the leaders and followers of a server.

The work consists of *parts*, of three kinds:

- A *batch* executes the commands of one namespace for a few milliseconds.
- A *slice* continues work that is not finished in one step: pending grants, expired requests, expired sessions, watch events.
- A *slow command* is one whose work grows with the state.

Each part is bounded, but all parts together could take long. So once an iteration has taken `ITERATION_S`, no other
part begins in it: the part waits for a later iteration. The last part may exceed the limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import ParamSpec

from genie import work_time

P = ParamSpec("P")

Caller = Hashable
"""Identifies an object that asks for parts. The `id` of the object, because a reference would keep its state in
memory."""

BATCH_S = 0.005
"""Seconds for the batches of all namespaces in one iteration. The last command of a batch may exceed the limit."""

ITERATION_S = 0.006
"""Seconds of an iteration after which no other part begins. More than `BATCH_S`, so that a slow command can follow a full batch."""

LONG_S = 0.010
"""An iteration that takes longer than this many seconds is followed by `RESTING_ITERATIONS` that only run batches."""

RESTING_ITERATIONS = 2
"""Number of iterations that only run batches after a long iteration. In the first one, the commands that arrived
meanwhile are read after the batch has begun. The second one executes and answers them."""

SHORT_S = 0.001
"""Total seconds of batches, over several iterations, up to which the end of an iteration is not scheduled. So
iterations with little work need no callback at their end."""

OVERRUN_PENALTY = 100
"""If the last part of a caller exhausted its iteration, the caller waits for this number of iterations after all
others. So clients of a namespace do not wait for expensive commands to many other namespaces."""

MAX_DENIED = 64
"""After this number of denied parts, a caller is overdue: no other part begins before its next one."""

OVERDUE_ITERATIONS = 4
"""Number of iterations for which all others wait for an overdue caller. After them, it must be denied `MAX_DENIED`
parts again, because it may no longer exist."""

MAX_REMEMBERED = 10_000
"""Maximum number of callers that are remembered because of an `OVERRUN_PENALTY`, and as many because of denied parts.
Beyond it, all are forgotten: some may no longer exist."""


class _Kind:
    """The callers that ask for parts of one kind."""

    def __init__(self) -> None:
        # A part is a piece of work of some milliseconds that a caller asks for: a batch, a slice or a slow command.
        self.ran: set[Caller] = set()
        """The callers with a part in this iteration."""
        self.late: dict[Caller, int] = {}
        """The callers without a part in this iteration, with the iteration since which they wait."""
        self.late_before: dict[Caller, int] = {}
        """`late` of the previous iteration, without the callers that had a part since."""
        self.denied: dict[Caller, int] = {}
        """Number of denied parts of each caller since its last part."""
        self.skipped = 0
        """Number of consecutive iterations, up to the last one, in which every part of this kind was denied."""
        self.waited_in_vain = False
        """True if a part of this kind was denied in this iteration only because another caller has waited longer."""
        self.is_unordered = False
        """True if any caller may be the next one, because in the last iteration the caller that had waited longest did not
        ask, and no other caller had a part."""


class IterationTurns:
    """Decides which parts begin in an iteration.

    A caller whose part must wait asks again in the next iteration. Of the callers of one kind, the caller that has
    waited longest is first, apart from `OVERRUN_PENALTY`. The kind that was skipped in the most iterations is first in
    the next one. Both orders only consider the callers of the previous iteration, so `MAX_DENIED` bounds how often a
    caller is denied a part.
    """

    def __init__(self) -> None:
        self.is_active = False
        """False if every part may begin and a batch may take `BATCH_S`. Then a caller may run a batch without
        `begin_batch`, and need not call `spend` up to `SHORT_S`. This saves 8 % of the instructions of a cycle with one
        contended lock."""
        self.spent_s = 0.0
        """Seconds that the parts of this iteration have taken; while not `is_active`, also those of earlier iterations."""
        self.is_exhausted = False
        """True if this iteration has taken `ITERATION_S`, so that no other part begins."""
        self._iteration = 0
        self._resting = 0
        """Number of iterations that only run batches from now on, including the current one."""
        self._batches, self._slices, self._slow = _Kind(), _Kind(), _Kind()
        self._first: _Kind | None = None
        """The kind whose part must be the first in this iteration. None if any kind may be first."""
        self._last: Caller = None
        """The caller of the last part of this iteration. None before it, and if it began while not `is_active`."""
        self._overdue: tuple[_Kind, Caller] | None = None
        """The overdue caller, and the kind of its part, for which all others wait. None if no caller is overdue."""
        self._overdue_until = 0
        """The last iteration in which all others wait for the overdue caller."""
        self._exhausting: set[Caller] = set()
        """The callers whose last part exhausted its iteration."""
        self._batches_before = 1
        """Number of batches in the previous iteration."""
        self._is_end_scheduled = False
        """True if `_end_iteration`, or `_end_after_others`, is scheduled."""

    def enter(self, caller: Caller) -> None:
        """Begin the next iteration if the event loop is in a new one.

        A caller must call this before its first part in an iteration, unless this is a batch.
        """
        # A caller enters an iteration once. If it has asked for a part already, this is a new iteration, unless the end
        # of the current one is still scheduled.
        kinds = self._batches, self._slow, self._slices
        if not self._is_end_scheduled and any(caller in kind.ran or caller in kind.late for kind in kinds):
            self._end_iteration()

    def begin_batch(self, caller: Caller) -> float:
        """Return for how many seconds a batch may execute commands now, or 0 if it must wait.

        The batches of an iteration share `BATCH_S` equally. Their number is that of this or the previous iteration, the
        greater one.
        """
        self.enter(caller)
        if not self._begin(self._batches, caller):
            return 0.0
        return BATCH_S / max(len(self._batches.ran), self._batches_before)

    def begin_slow(self, caller: Caller) -> bool:
        """Return whether the caller may execute a slow command now. An iteration executes at most one."""
        return self._begin(self._slow, caller)

    def run_slice(self, caller: Caller, work: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call `work`, which does a slice of work, unless the slice must wait."""
        if self._begin(self._slices, caller):
            started = work_time.now()
            work(*args, **kwargs)
            self.spend(work_time.now() - started)

    def spend(self, seconds: float) -> None:
        """Add the duration of a part, or of an expensive command that is executed outside a batch."""
        self.spent_s += seconds
        if self.spent_s >= ITERATION_S and not self.is_exhausted:
            self.is_exhausted = True
            self._exhausting.add(self._last)
        if self.spent_s > SHORT_S and not self._is_end_scheduled:
            self.is_active = self._is_end_scheduled = True  # from now on, each part asks whether it may begin
            asyncio.get_running_loop().call_soon(self._end_after_others)

    def _begin(self, kind: _Kind, caller: Caller) -> bool:
        """Return whether a part may begin, and record that it begins or that it was denied."""
        self.is_active = True
        is_second_slow = kind is self._slow and len(kind.ran) > 0
        is_next = self._overdue == (kind, caller) or (self._overdue is None and self._is_next(kind, caller))
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
        """Return whether this caller is the next one, with a part of this kind. There must be no overdue caller."""
        if self._resting:  # this iteration only runs batches, because the last one was long
            if kind is not self._batches:
                return False
        elif self._first is not None and self._first is not kind and not self._first.ran:
            return False
        if kind.is_unordered:
            return True
        since = self._waits_since(kind, caller)
        if all(since <= other_since for other_since in kind.late_before.values()):
            return True
        kind.waited_in_vain = True
        return False

    def _waits_since(self, kind: _Kind, caller: Caller) -> int:
        """Return the iteration since which a caller waits, later by `OVERRUN_PENALTY` if its last part exhausted an iteration."""
        since = kind.late_before.get(caller)
        if since is not None:
            return since
        return self._iteration + (OVERRUN_PENALTY if caller in self._exhausting else 0)

    def _deny(self, kind: _Kind, caller: Caller) -> None:
        """Record that a part was denied. After `MAX_DENIED` denials the caller is overdue: all others wait for it."""
        kind.late[caller] = self._waits_since(kind, caller)
        denied = kind.denied[caller] = kind.denied.get(caller, 0) + 1
        if denied >= MAX_DENIED and self._overdue is None:
            kind.denied[caller] = 0
            self._overdue, self._overdue_until = (kind, caller), self._iteration + OVERDUE_ITERATIONS

    def _end_after_others(self) -> None:
        """End the iteration now, or after the callbacks that are already scheduled if it is exhausted.

        With uvloop, these callbacks are the rest of an iteration in which input was read.
        """
        if self.is_exhausted:
            asyncio.get_running_loop().call_soon(self._end_iteration)
        else:
            self._end_iteration()

    def _end_iteration(self) -> None:
        """Begin the next iteration: decide which kind is first in it, and whether it only runs batches."""
        if self._resting:
            self._resting -= 1
        elif self.spent_s > LONG_S:
            self._resting = RESTING_ITERATIONS
        self._batches_before = max(len(self._batches.ran), 1)
        kinds = self._slow, self._slices, self._batches
        for kind in kinds:  # a kind was skipped if callers asked for its parts, and none had one
            was_skipped = len(kind.late) > 0 and not kind.ran
            kind.skipped = kind.skipped + 1 if was_skipped else 0
            kind.is_unordered, kind.waited_in_vain = was_skipped and kind.waited_in_vain, False
            kind.late_before, kind.late = kind.late, {}
            kind.ran.clear()
        most_skipped = max(kinds, key=lambda kind: kind.skipped)
        self._first = most_skipped if most_skipped.skipped else None
        self.spent_s = 0.0
        self.is_exhausted = self._is_end_scheduled = False
        self._last = None
        self._iteration += 1
        if self._iteration > self._overdue_until:
            self._overdue = None
        # While active, each part asks whether it may begin.
        has_waiting_callers = self._overdue is not None or any(kind.late_before for kind in kinds)
        self.is_active = has_waiting_callers or self._resting > 0 or self._batches_before > 1
        if len(self._exhausting) > MAX_REMEMBERED:
            self._exhausting.clear()
        for kind in kinds:
            if len(kind.denied) > MAX_REMEMBERED:
                kind.denied.clear()
