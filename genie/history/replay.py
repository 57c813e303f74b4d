"""Runs recorded requests through the lock manager again, unchanged or with changes.

`replay` repeats what the recorded commands did, and compares every grant and every end with the record. `what_if`
simulates the same arrivals with other priorities or timeouts, or without some requests. Both are pure: no clock, no
files.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from heapq import heappop, heappush
from math import floor, inf
from statistics import median
from typing import Any, Final, TypeGuard

from genie import core
from genie.core import (
    Continue,
    Disconnect,
    Expire,
    Extend,
    LockManager,
    Reason,
    Recover,
    Release,
    Request,
    State,
    Take,
    context_of,
)
from genie.core.deadlines import NEVER
from genie.core.grant import is_available, is_immediately_grantable
from genie.core.model import NO_TIMEOUT_MS, details_of
from genie.core.view import find_blockers
from genie.history.records import WHY_MISSING, Carried, Extended, Gap, Granted, Line, Locked, Opened, Queued, Released

MAX_SIMULATED: Final = 1_000_000
"""Maximum number of requests that `what_if` simulates. Each takes about 1 KB of memory."""
GRANTS: Final = (core.Granted, core.Taken, core.Locked)
"""The events that grant a request."""
DEFAULT_HOLD_MS: Final = 100.0
"""How long `what_if` holds a lock if no recorded request was granted and released."""


class _Origin:
    """The session of a recorded request. It makes no difference to the lock manager."""

    key: str | None = None
    timeout_ms: float = 0.0
    note: str | None = None


_ORIGIN: Final = _Origin()


class Diverged(Exception):
    """The lock manager did not repeat what was recorded at the time `at`.

    Either the history has a gap, or Genie has a defect.
    """

    def __init__(self, at: float, message: str) -> None:
        super().__init__(message)
        self.at = at


class UnknownState(Exception):
    """The requests that were live at the time `at`, when the replay begins, are not recorded."""

    def __init__(self, at: float) -> None:
        super().__init__("the requests that were held or waiting are not recorded")
        self.at = at


class TooManyRequests(ValueError):
    """The recorded period has more requests than `what_if` can simulate."""


@dataclass(slots=True)
class Step:
    """One recorded command, as text, with its effects."""

    at: float
    """When the command was executed, in Unix ms."""
    command: str
    outcome: list[str]
    """A line for each event of the command."""
    queues: dict[str, tuple[list[str], list[str]]]
    """By each resource of the command, its holders and waiters before and after the command."""


# -- Exact replay ----------------------------------------------------------------------------------------


class Replay:
    """Applies recorded lines in order, and compares the results of the lock manager with them.

    `on_step` is called with each command that was executed at or after `since` (Unix ms).
    """

    def __init__(self, since: float = -inf, on_step: Callable[[Step], None] | None = None) -> None:
        self.manager = LockManager()
        self.grants = 0
        """Number of grants that were repeated exactly: at the same time, with the same fencing token."""
        self.ends = 0
        """Number of ends that were repeated exactly: at the same time, for the same reason."""
        self.is_cut_off = False
        """True if the record ends in the middle of a step, because its server was killed or the disk was full."""
        self._since = since
        self._on_step = on_step
        self._unconfirmed_events: deque[core.Event] = deque()
        """Events of the lock manager that no line has confirmed yet."""
        self._accepts_carried = True
        """True until the first event of the replay or of a leadership. Only then are carried requests loaded."""

    def run(self, lines: Iterable[Line]) -> None:
        """Apply all lines. Raises UnknownState, and Diverged if the lock manager does not repeat a recorded event."""
        source = iter(lines)
        line = next(source, None)
        while line is not None:
            # While events are unconfirmed, a `disconnected` may be one of them, and then needs no command.
            if not _is_disconnection(line) or self._unconfirmed_events:
                self._apply(line)
                line = next(source, None)
                continue
            # Requests that end at the same time end together: all their locks are removed before any waiter is granted.
            disconnected = [line]
            line = next(source, None)
            while _is_disconnection(line) and line.at == disconnected[0].at:
                disconnected.append(line)
                line = next(source, None)
            self._execute_disconnection(disconnected)
            for each in disconnected:
                self._confirm(each)
        self.is_cut_off = bool(self._unconfirmed_events)

    def _apply(self, line: Line) -> None:
        """Apply one line: execute the command that caused a recorded event, and compare the results."""
        match line:
            case Opened() if line.number == 1:  # the first file of a leadership
                self.manager = LockManager()
                self._accepts_carried = True
                self._unconfirmed_events.clear()
            case Opened():
                pass  # a later file repeats the live requests, which are known unless the replay begins here
            case Carried():
                if self._accepts_carried and self.manager.table.find(line.id) is None:
                    self.manager.adopt(make_request(line))
            case Gap() if line.live:  # a gap of carried requests, not of events
                raise UnknownState(line.at)
            case Gap():
                raise Diverged(line.at, f"events are missing here, {WHY_MISSING}")
            case Queued() | Locked() | Released():
                self._accepts_carried = False
                if not self._unconfirmed_events:
                    self._execute_cause(line)
                self._confirm(line)
            case Extended():
                self._step(Extend(line.id, line.transaction_timeout_ms), line.at, f"extend {line.id}")
            case _:
                self._accepts_carried = False

    def _execute_cause(self, line: Queued | Locked | Released) -> None:
        """Execute the command that led to a recorded event."""
        match line:
            case Queued():
                self._execute_request(line)
            case Locked():
                self._execute_grant(line)
            case Released():
                self._execute_end(line)

    def _execute_request(self, line: Queued) -> None:
        """Execute a recorded request. Raises Diverged if it was executed before."""
        manager = self.manager
        if manager.table.find(line.id) is not None:
            raise Diverged(line.at, f"{_describe_line(line)} is recorded twice")
        if not line.names:
            return  # a request with `anyOf` that ended at once, so it changed no state
        manager.next_id = line.id
        request = new_request(line)
        command: core.Command = request
        if isinstance(line, Granted):
            command = _granting_command(manager, request)
            self._begin_fences(line.fence)
        self._step(command, line.at, f"request {describe_request(line)}", line.names)

    def _execute_grant(self, line: Locked) -> None:
        """Grant a waiting request: continue a step that left grants for later, or else recover as a new leader does."""
        self._begin_fences(line.fence)
        if self.manager.pending_grants:
            self._step(Continue(), line.at, "continue")
        else:
            self._step(Recover(), line.at, "recover")

    def _execute_end(self, line: Released) -> None:
        """Execute the timeout or the release that ended a request."""
        manager = self.manager
        request = manager.table.find(line.id)
        if request is None:
            return  # the request has no names, or its arrival is not in the record
        if line.reason not in (Reason.QUEUE_TIMEOUT, Reason.TRANSACTION_TIMEOUT):
            self._step(Release(line.id), line.at, f"release {line.id}", request.names())
            return
        manager.deadlines.discard(request.deadline, request.id)
        request.deadline = 0  # the most overdue request, so that no other request ends instead
        manager.deadlines.add(request.deadline, request.id)
        self._step(Expire(limit=1), line.at, f"expire {line.id}", request.names())

    def _begin_fences(self, fence: int) -> None:
        """Before the first grant, make `fence` the next fencing token.

        Later tokens must then equal the recorded ones.
        """
        if not self.grants:
            self.manager.next_fence = fence

    def _adjust_fences(self, fence: int) -> None:
        """Renumber the fencing tokens of unconfirmed grants, so that they begin with `fence`, the first recorded token."""
        granted = [event.request for event in self._unconfirmed_events if isinstance(event, GRANTS)]
        if granted:
            difference = fence - granted[0].fence
            self.manager.next_fence += difference
            for request in granted:
                request.fence += difference

    def _execute_disconnection(self, lines: list[Released]) -> None:
        """Execute the loss of connections, which ended all requests of `lines` at the same time."""
        requests = [request for line in lines if (request := self.manager.table.find(line.id)) is not None]
        names = tuple(dict.fromkeys(name for request in requests for name in request.names()))
        ids = " ".join(str(line.id) for line in lines)
        self._accepts_carried = False
        self._step(Disconnect(requests), lines[0].at, f"disconnect {ids}", names)

    def _step(self, command: core.Command, at: float, text: str, names: tuple[str, ...] = ()) -> None:
        """Execute a command, keep its events to confirm them, and report the step.

        `text` describes the command, and `names` are the resources whose queues are reported.
        """
        on_step = self._on_step if at >= self._since else None
        before = {} if on_step is None else {name: self._describe_queue(name) for name in names}
        events = self.manager.step(command, at)
        self._unconfirmed_events += (event for event in events if not isinstance(event, (core.Moved, core.Extended)))
        if on_step is not None:
            queues = {name: (before[name], self._describe_queue(name)) for name in names}
            outcome = [_describe(event) for event in events]
            if isinstance(command, Request) and command.state is State.WAITING:
                outcome += explain_wait(self.manager, command)
            on_step(Step(at, text, outcome, queues))

    def _describe_queue(self, name: str) -> list[str]:
        """Return the owners that hold a resource, in brackets, and then the owners that wait for it, in queue order."""
        resource = self.manager.table.lookup(name)
        if resource is None:
            return []
        holders = [f"[{_owner(holder)}]" for holder in resource.holders.values()]
        entries = () if resource.wait_queue is None else resource.wait_queue
        waiters = [_owner(request) for _priority, _ticket, request in entries]
        return holders + waiters

    def _confirm(self, line: Queued | Locked | Released) -> None:
        """Compare a recorded event with the next event of the lock manager. Raises Diverged if they differ."""
        if isinstance(line, Queued) and not line.names:
            return  # a request with `anyOf` that ended at once, which `_execute_request` did not execute
        if isinstance(line, (Granted, Locked)) and not self.grants:
            self._adjust_fences(line.fence)
        if not self._unconfirmed_events:
            if isinstance(line, Released) and self.manager.outcome(line.id) is None:
                return  # its arrival is not in the record
            raise Diverged(line.at, f"{_describe_line(line)} is recorded, but did not happen")
        event = self._unconfirmed_events.popleft()
        if not _is_same_event(line, event):
            raise Diverged(line.at, f"{_describe_line(line)} is recorded, but {_describe(event)} happened")
        if isinstance(line, (Granted, Locked)):
            self.grants += 1
        elif isinstance(line, Released):
            self.ends += 1


def _is_same_event(line: Queued | Locked | Released, event: core.Event) -> bool:
    """Return whether an event of the lock manager is the recorded one."""
    request: Any = getattr(event, "request", None)
    if request is None or request.id != line.id:
        return False
    if isinstance(line, Granted):
        return isinstance(event, (core.Granted, core.Taken)) and bool(request.fence == line.fence)
    if isinstance(line, Queued):
        return isinstance(event, core.Queued)
    if isinstance(line, Locked):
        return isinstance(event, core.Locked) and bool(request.fence == line.fence)
    return isinstance(event, core.Released) and event.reason is line.reason


def _is_disconnection(line: Line | None) -> TypeGuard[Released]:
    """Return whether a line is the end of a request whose connection was lost."""
    return isinstance(line, Released) and line.reason is Reason.DISCONNECTED


def _granting_command(manager: LockManager, request: Request) -> core.Command:
    """Return the command of a request that is recorded as granted at once.

    Only a request with `anyOf` may be granted beside earlier waiters. It is repeated with the granted names as its only
    choices.
    """
    table = manager.table
    request.owner = manager.next_id if request.transaction is None else request.transaction
    choices, units = list(request.modes()), request.units
    names_subtree = request.details is not None and request.details.subtrees  # `anyOf` has no subtrees
    if names_subtree or is_immediately_grantable(table, request):
        return request
    if not all(is_available(table, request.owner, name, mode, units.get(name)) for name, mode in choices):
        return request
    request.details = None  # set again by the grant
    weights = [1] * len(choices)
    return Take(request, choices, weights, target=len(choices), units=units)


def make_request(line: Carried) -> Request:
    """Return a request in the state in which it was carried into a file."""
    request = new_request(line)
    request.id = line.id
    request.owner = line.id if line.transaction is None else line.transaction
    request.fence, request.since, request.since_unix_ms = line.fence, line.at, line.at
    request.deadline = NEVER if line.deadline is None else floor(line.deadline)
    request.state = State.HELD if line.fence else State.WAITING
    if not line.fence:
        request.queue_entry = (-request.priority, request.id, request)  # (negated priority, ticket, request)
        for name, (priority, ticket) in (line.positions or {}).items():
            request.move(name, (priority, ticket, request))
    return request


def new_request(line: Queued) -> Request:
    """Return a recorded request as a command for the lock manager."""
    request = Request(
        line.shared,
        line.exclusive,
        queue_timeout_ms=line.queue_timeout_ms,
        transaction_timeout_ms=line.transaction_timeout_ms,
        transaction=line.transaction,
        priority=line.priority,
        release_on_disconnect=line.release_on_disconnect,
        origin=_ORIGIN,
        context=context_of(line.principal, line.note),
    )
    request.details = details_of(line.shared, line.exclusive, line.units)
    return request


def describe_request(line: Queued) -> str:
    """Return a recorded request as text, such as `7 of transfer-1 for exclusive:a with priority 2`."""
    transaction = "" if line.transaction is None else f" of {line.transaction}"
    priority = f" with priority {line.priority:g}" if line.priority else ""
    return f"{line.id}{transaction} for {' '.join(line.locks)}{priority}"


def _describe_line(line: Queued | Locked | Released) -> str:
    """Return a recorded event as text, in the form of `_describe`."""
    if isinstance(line, Released):
        return f"ended {line.id}: {line.reason}"
    if isinstance(line, (Granted, Locked)):
        return f"granted {line.id} with fence {line.fence}"
    return f"queued {line.id}"


def explain_wait(manager: LockManager, request: Request) -> list[str]:
    """Return why a waiting request is not granted: a line for each of its first blockers, then the number of the others."""
    blockers, total = find_blockers(manager.table, request)
    lines = []
    for blocker in blockers:
        relation = "holds" if blocker.held else "is earlier in the queue for"
        lines.append(f"not granted: {blocker.transaction or blocker.id} {relation} {blocker.lock}")
    if total > len(blockers):
        lines.append(f"and {total - len(blockers)} more blockers")
    return lines


def _owner(request: Request) -> str:
    """Return the transaction of a request, or its id if it has none."""
    return request.transaction or str(request.id)


def _describe(event: core.Event) -> str:  # noqa: PLR0911 - one for each kind
    """Return an event of the lock manager as text."""
    request = getattr(event, "request", None)
    who = "" if request is None else str(request.id)
    if request is not None and request.transaction:
        who += f" ({request.transaction})"
    match event:
        case core.Granted() | core.Taken():
            return f"granted {who}: nothing conflicts; fence {event.request.fence}"
        case core.Locked():
            return f"granted {who} after {event.waited_ms:.0f} ms: nothing before it conflicts; fence {event.request.fence}"
        case core.Queued():
            return f"queued {who}"
        case core.Deadlocked():
            return f"ended {who}: deadlock of {' → '.join(map(str, event.cycle.owners))}"
        case core.Released():
            return f"ended {who}: {event.reason}"
        case core.Moved():
            return f"moved {who} in the queue, to avoid a deadlock"
        case _:
            return type(event).__name__


# -- What if ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Change:
    """Changes for the requests that match all patterns.

    A pattern is a shell pattern, such as `transfer-*`, or None, which matches all requests. A new value of None keeps
    the recorded value.
    """

    transaction: str | None = None
    """Pattern of the transaction."""
    resource: str | None = None
    """Pattern of at least one resource."""
    client: str | None = None
    """Pattern of the principal."""
    priority: float | None = None
    """The new priority."""
    queue_timeout_ms: float | None = None
    """The new queue timeout."""
    transaction_timeout_ms: float | None = None
    """The new transaction timeout."""
    remove: bool = False
    """True to leave the requests out."""

    def matches(self, line: Queued) -> bool:
        """Return whether a recorded request matches all patterns."""
        return (
            _any_matches(self.transaction, [line.transaction])
            and _any_matches(self.client, [line.principal])
            and _any_matches(self.resource, line.names)
        )


def _any_matches(pattern: str | None, texts: Iterable[str | None]) -> bool:
    """Return whether the pattern is None or matches one of the texts. It does not match None."""
    return pattern is None or any(text is not None and fnmatchcase(text, pattern) for text in texts)


@dataclass(slots=True)
class Outcome:
    """The results of the requests of a period, as recorded or as simulated."""

    requests: int = 0
    granted: int = 0
    ended: dict[str, int] = field(default_factory=dict)
    """Number of requests that ended for each reason other than a release."""
    waits: dict[int, float] = field(default_factory=dict)
    """The wait in milliseconds of each granted request, by id. 0 if the request was granted at once."""

    @property
    def waited(self) -> int:
        """Number of requests that were granted after a wait."""
        return sum(wait > 0 for wait in self.waits.values())

    def percentile(self, share: float) -> float:
        """Return the wait (ms) that `share`, from 0 to 1, of the granted requests did not exceed. 0 if none was granted."""
        if not self.waits:
            return 0.0
        index = min(len(self.waits) - 1, int(share * len(self.waits)))
        return sorted(self.waits.values())[index]

    def count_end(self, reason: Reason) -> None:
        """Count an end for a reason other than a release."""
        if reason is not Reason.SUCCESS:
            self.ended[str(reason)] = self.ended.get(str(reason), 0) + 1


@dataclass(slots=True)
class _Recorded:
    """One recorded request, with its grant and its end."""

    line: Queued
    granted_at: float | None = None
    ended_at: float | None = None
    reason: Reason | None = None
    was_live: bool = False
    """True if the request was live when the period began."""


def what_if(lines: Iterable[Line], since: float, change: Change | None) -> tuple[Outcome, Outcome]:
    """Return the recorded outcome of the requests from `since` (Unix ms) on, and the outcome of a simulation with a change.

    A simulated request arrives at its recorded time, and is held for its recorded duration. A request that was never granted
    is held for the median of the other durations. A client that stopped waiting stops waiting after the same time. With
    `change=None` the simulation repeats the record, up to the milliseconds by which timers are late.

    Raises TooManyRequests.
    """
    recorded = _collect(lines)
    actual = Outcome()
    for request in recorded.values():
        if not _arrived_since(since, request.line):
            continue
        actual.requests += 1
        if request.granted_at is not None:
            actual.granted += 1
            actual.waits[request.line.id] = request.granted_at - request.line.at
        if request.reason is not None:
            actual.count_end(request.reason)
    return actual, _Simulation(recorded, since, change).run()


def _arrived_since(since: float, line: Queued) -> bool:
    """Return whether a request arrived at `since` or later.

    A carried request arrived before the line that carries it.
    """
    return line.at >= since and not isinstance(line, Carried)


def _collect(lines: Iterable[Line]) -> dict[int, _Recorded]:
    """Return the recorded requests by id.

    A request that the next leadership does not carry on ended with its leadership.
    """
    recorded: dict[int, _Recorded] = {}
    uncarried: dict[int, _Recorded] = {}
    """Live requests of the previous leadership that the next one has not carried on so far."""
    has_begun, last_at = False, 0.0
    for line in lines:
        if isinstance(line, Opened):
            if line.number == 1:  # a leadership begins
                uncarried = {id_: request for id_, request in recorded.items() if request.ended_at is None}
            continue
        if isinstance(line, Carried):
            uncarried.pop(line.id, None)
        else:  # no further request is carried
            has_begun = True
            for request in uncarried.values():
                request.ended_at, request.reason = max(last_at, request.line.at), Reason.SUCCESS
            uncarried = {}
            last_at = line.at
        _record(line, recorded, was_live=not has_begun and isinstance(line, Carried))
        if len(recorded) > MAX_SIMULATED:
            raise TooManyRequests(f"more than {MAX_SIMULATED:,} requests")
    return recorded


def _record(line: Line, recorded: dict[int, _Recorded], *, was_live: bool) -> None:
    """Add the request of a line to `recorded`, or the grant or end of a request.

    `was_live` says whether a new request was live when the recorded period began.
    """
    if isinstance(line, Queued):
        if line.id not in recorded and line.names:
            granted_at = line.at if isinstance(line, Granted) and line.fence else None
            recorded[line.id] = _Recorded(line, granted_at, was_live=was_live)
    elif isinstance(line, Locked) and line.id in recorded:
        recorded[line.id].granted_at = line.at
    elif isinstance(line, Released) and line.id in recorded:
        recorded[line.id].ended_at, recorded[line.id].reason = line.at, line.reason


class _Simulation:
    """A simulation of recorded arrivals in virtual time."""

    def __init__(self, recorded: dict[int, _Recorded], since: float, change: Change | None) -> None:
        self._recorded, self._since, self._change = recorded, since, change
        self._manager = LockManager()
        self._outcome = Outcome()
        self._ends: list[tuple[float, int]] = []
        """A heap of the releases that are scheduled: (time, id)."""
        hold_times_ms = [
            request.ended_at - request.granted_at
            for request in recorded.values()
            if request.ended_at is not None and request.granted_at is not None and request.reason is Reason.SUCCESS
        ]
        self._median_hold_ms = median(hold_times_ms) if hold_times_ms else DEFAULT_HOLD_MS

    def run(self) -> Outcome:
        """Simulate all recorded arrivals, then the time until the last recorded end. Return the outcome."""
        last, has_begun = 0.0, False
        # The requests that are carried into the period are first.
        by_arrival = sorted(self._recorded.values(), key=lambda each: (not each.was_live, each.line.at, each.line.id))
        for request in by_arrival:
            line = request.line
            change = self._change if self._change is not None and self._change.matches(line) else None
            if change is not None and change.remove:
                continue
            if not has_begun and not request.was_live:
                has_begun = True
                self._grant_after_removals(line.at)
            self._advance(line.at)
            last = line.at
            self._arrive(request, change)
        ends = [request.ended_at for request in self._recorded.values() if request.ended_at is not None]
        if not has_begun:
            self._grant_after_removals(last)
        self._advance(max([last, *ends]))
        return self._outcome

    def _grant_after_removals(self, now: float) -> None:
        """Grant the live requests that are no longer blocked, because the change has removed their blockers."""
        self._step(Recover(), now)

    def _arrive(self, recorded: _Recorded, change: Change | None) -> None:
        """Execute a request, with the change if it is not None, or load the request if it was live when the period began."""
        line, manager = recorded.line, self._manager
        if recorded.was_live and isinstance(line, Carried):
            request = make_request(line)
            manager.adopt(request)
            if line.fence:
                self._schedule_end(request, line.at)
            return
        request = new_request(line)
        if change is not None:
            request.priority = line.priority if change.priority is None else change.priority
            if change.queue_timeout_ms is not None:
                request.queue_timeout_ms = min(change.queue_timeout_ms, NO_TIMEOUT_MS)
            if change.transaction_timeout_ms is not None:
                request.transaction_timeout_ms = change.transaction_timeout_ms
        manager.next_id = line.id
        if _arrived_since(self._since, line):
            self._outcome.requests += 1
        has_stopped_waiting = recorded.granted_at is None and recorded.reason in (Reason.SUCCESS, Reason.DISCONNECTED)
        if has_stopped_waiting and recorded.ended_at is not None:
            heappush(self._ends, (recorded.ended_at, line.id))
        self._step(request, line.at)

    def _schedule_end(self, request: Request, granted_at: float) -> None:
        """Schedule the release of a granted request after its recorded duration, or after the median duration."""
        recorded = self._recorded[request.id]
        if recorded.granted_at is None:
            hold_ms = self._median_hold_ms
        elif recorded.ended_at is None or recorded.reason is Reason.TRANSACTION_TIMEOUT:
            return  # held until its deadline
        else:
            hold_ms = recorded.ended_at - recorded.granted_at
        heappush(self._ends, (granted_at + hold_ms, request.id))

    def _advance(self, until: float) -> None:
        """Advance the virtual time: execute the releases and timeouts that are due until `until`."""
        manager = self._manager
        while True:
            next_deadline = manager.deadlines.next
            next_end = self._ends[0][0] if self._ends else inf
            if min(next_deadline, next_end) > until:
                return
            if next_end <= next_deadline:
                _, id_ = heappop(self._ends)
                if manager.table.find(id_) is not None:
                    self._step(Release(id_), next_end)
            else:
                self._step(Expire(), next_deadline)

    def _step(self, command: core.Command, now: float) -> None:
        """Execute a command, and all grants that it has left for later."""
        self._handle(self._manager.step(command, now), now)
        while self._manager.pending_grants:
            self._handle(self._manager.step(Continue(), now), now)

    def _handle(self, events: list[core.Event], now: float) -> None:
        """Schedule the releases of granted requests, and count the grants and the ends in the period."""
        outcome = self._outcome
        for event in events:
            if isinstance(event, (core.Granted, core.Locked)):
                request = event.request
                self._schedule_end(request, now)
                line = self._recorded[request.id].line
                if _arrived_since(self._since, line):
                    outcome.granted += 1
                    outcome.waits[request.id] = now - line.at
            elif isinstance(event, core.Released):
                line = self._recorded[event.request.id].line
                if _arrived_since(self._since, line):
                    outcome.count_end(event.reason)
