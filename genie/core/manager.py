"""The memory of what has ended."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil, inf

from genie.core import deadlock
from genie.core.commands import Command, Disconnect, Expire, Extend, Release, Take
from genie.core.deadlines import NEVER, Deadlines
from genie.core.events import (
    AlreadyEnded,
    Deadlocked,
    Event,
    Extended,
    Granted,
    Insufficient,
    Locked,
    Moved,
    NotHeld,
    Queued,
    QueueFull,
    Released,
    Taken,
    TimedOut,
    UnknownId,
)
from genie.core.grant import grant_candidates, is_available, is_grantable, is_immediately_grantable
from genie.core.lock_table import AffectedQueues, LockTable
from genie.core.model import ENDED, HELD, NO_TIMEOUT_MS, SUCCESS, WAITING, Owner, Reason, Request, Weight
from genie.core.view import find_blockers

RECENT_OUTCOMES = 100_000
"""So many of the last ended ids are remembered at least, and at most twice as many."""


class RecentOutcomes:
    """Ids that were released, with their first reason.

    Two dicts that take turns: when the newer is full the older is dropped whole. Taking the oldest out of one dict,
    again and again, would walk over the holes that the earlier ones left.
    """

    __slots__ = ("_newer", "_older")

    def __init__(self) -> None:
        self._newer: dict[int, Reason] = {}
        self._older: dict[int, Reason] = {}

    def add(self, id: int, reason: Reason) -> None:
        """Remember why a request ended."""
        newer = self._newer
        if len(newer) >= RECENT_OUTCOMES:
            self._older, self._newer = newer, {}
            newer = self._newer
        newer[id] = reason

    def get(self, id: int) -> Reason | None:
        """The first reason of a request that ended, or None."""
        return self._newer.get(id) or self._older.get(id)


# -- The lock manager: commands in, events out. The only place that changes who holds and who waits --------


class LockManager:
    """Decides who holds what.

    `unix_offset_ms` turns its clock into wall time, for people. The same commands at the same times give the same
    events.

    A state that was reached elsewhere, before a restart or in another process, is put together by `adopt` and `forget`.
    """

    def __init__(
        self, next_id: int = 1, next_fence: int = 1, *, unix_offset_ms: float = 0.0, max_queue_entries: float = inf
    ) -> None:
        self.table = LockTable()
        self.deadlines = Deadlines()
        self.next_id = next_id
        self.next_fence = next_fence
        self.unix_offset_ms = unix_offset_ms
        self.max_queue_entries = max_queue_entries
        """Places in all lines together that there may be. What would need more is not taken up."""
        self.rearrangements = 0
        """How often lines were given another order because of a cycle."""
        self._outcomes = RecentOutcomes()

    def step(self, command: Command, now: float) -> list[Event]:
        """Carry out one command at a time (ms, never going back) and tell what it did, in order.

        A step that raises has a defect: every command that the types allow has an answer.
        """
        events: list[Event] = []
        if isinstance(command, Request):
            self._request(command, now, events)
        elif isinstance(command, Release):
            self._release(command.id, now, events)
        elif isinstance(command, Take):
            self._take(command, now, events)
        elif isinstance(command, Extend):
            self._extend(command, now, events)
        elif isinstance(command, Expire):
            self._expire(command.limit, now, events)
        elif isinstance(command, Disconnect):
            self._end_all(command.requests, now, events)
        else:
            self._recover(now, events)
        return events

    def adopt(self, request: Request) -> None:
        """Take in a request as it is, held or waiting. Nobody is granted anything by it: that was decided elsewhere."""
        self.table.restore(request)
        self._set_deadline(request)

    def discard(self, id: int) -> None:
        """Let go of a request, if there is one with this id. Nobody is granted anything by it."""
        request = self.table.find(id)
        if request is None:
            return
        self._clear_deadline(request)
        if request.state is HELD:
            self.table.remove_held(request)
        else:
            self.table.dequeue(request)

    def add_outcome(self, id: int, reason: Reason) -> None:
        """Take in how a request ended before the state was loaded."""
        self._outcomes.add(id, reason)

    def outcome(self, id: int) -> Reason | None:
        """Why a request ended, for as long as that is remembered."""
        return self._outcomes.get(id)

    # -- commands -----------------------------------------------------------------------------------------

    def _request(self, request: Request, now: float, events: list[Event]) -> None:
        self._assign_id(request)
        if is_immediately_grantable(self.table, request):
            self._grant(request, now)
            events.append(Granted(request))
        elif self.table.queue_entries + len(request.exclusive) + len(request.shared) > self.max_queue_entries:
            events.append(QueueFull(request))
        else:
            self._queue(request, now, events)

    def _take(self, take: Take, now: float, events: list[Event]) -> None:
        """What is free is granted as it is: nobody waits for it, so that nobody is passed and no cycle can close."""
        request = take.request
        reached: Weight = 0
        locked: Weight = 0
        self._assign_id(request)
        taken: tuple[list[str], list[str]] = [], []
        for (name, exclusive), weight in zip(take.choices, take.weights, strict=True):
            if not is_available(self.table, request.owner, name, exclusive):
                locked += weight
                continue
            taken[exclusive].append(name)
            reached += weight
            if reached >= take.target:
                request.shared, request.exclusive = tuple(taken[False]), tuple(taken[True])
                self._grant(request, now)
                events.append(Taken(request))
                return
        request.since, request.since_unix_ms = now, now + self.unix_offset_ms
        events.append(Queued(request))
        self._end(Insufficient(request, Reason.INSUFFICIENT, reached, locked, take.as_strings), events)

    def _queue(self, request: Request, now: float, events: list[Event]) -> None:
        table = self.table
        request.since = now
        request.since_unix_ms = now + self.unix_offset_ms
        events.append(Queued(request))
        moved = table.enqueue(request)
        previous: dict[str, list[Request]] = {}
        if deadlock.creates_cycle(table, request):
            cycle = deadlock.find_deadlock(table, request.owner)
            if cycle is not None:
                table.dequeue(request)
                self._end(Deadlocked(request, Reason.DEADLOCK, cycle), events)
                self._append_moved(moved, events)
                return
            previous = self._rearrange_queues(request.owner, moved)
            self.rearrangements += bool(previous)
        if request.queue_timeout_ms <= 0 and not is_grantable(table, request):
            for name, requests in previous.items():
                moved |= dict.fromkeys(table.wait_queue(name).rearrange(name, requests))
            self._time_out(request, events)
        else:
            timeout_ms = request.queue_timeout_ms
            request.deadline = NEVER if timeout_ms >= NO_TIMEOUT_MS else ceil(now + timeout_ms)
            self._set_deadline(request)
            if previous:
                self._grant_waiters([(name, True, None) for name in previous], now, events, newcomer=request)
            elif is_grantable(table, request):
                self._grant_waiter(request, now, events)
        if moved:
            moved.pop(request, None)
            self._append_moved(moved, events)

    def _release(self, id: int, now: float, events: list[Event]) -> None:
        request = self.table.held.get(id)
        if request is not None:
            affected = self._remove_held(request)
            self._end(Released(request, SUCCESS), events)
            if affected:
                self._grant_waiters(affected, now, events)
        elif id in self.table.waiting:
            self._end_all([self.table.waiting[id]], now, events, SUCCESS)
        else:
            events.append(self._ended_or_unknown(id))

    def _extend(self, command: Extend, now: float, events: list[Event]) -> None:
        request = self.table.held.get(command.id)
        if request is not None:
            self.deadlines.discard(request.deadline, request.id)
            request.deadline = ceil(now + command.transaction_timeout_ms)
            self.deadlines.add(request.deadline, request.id)
            events.append(Extended(request, command.transaction_timeout_ms))
        elif command.id in self.table.waiting:
            events.append(NotHeld(self.table.waiting[command.id]))
        else:
            events.append(self._ended_or_unknown(command.id))

    def _expire(self, limit: int, now: float, events: list[Event]) -> None:
        for id_ in self.deadlines.expired(now, limit):
            request = self.table.find(id_)
            if request is None or request.deadline > now:
                continue  # an earlier one of this very step made way for it
            if request.state is HELD:
                affected = self._remove_held(request)
                self._end(Released(request, Reason.TRANSACTION_TIMEOUT), events)
            else:
                self.deadlines.discard(request.deadline, id_)
                affected = self._queues_of(request)
                self._time_out(request, events)
            self._grant_waiters(affected, now, events)

    def _end_all(
        self,
        requests: Iterable[Request],
        now: float,
        events: list[Event],
        reason: Reason = Reason.DISCONNECTED,
    ) -> None:
        """End requests together. All of them go before anyone is granted, or one could be granted to the other."""
        affected: AffectedQueues = []
        for request in requests:
            if request.state is WAITING:
                affected += self._queues_of(request)
                self._clear_deadline(request)
                self.table.dequeue(request)
                self._end(Released(request, reason), events)
            elif request.state is HELD and request.release_on_disconnect:
                affected += self._remove_held(request)
                self._end(Released(request, reason), events)
        self._grant_waiters(affected, now, events)

    def _recover(self, now: float, events: list[Event]) -> None:
        table = self.table
        gone = [*table.held.values(), *table.waiting.values()]
        self._end_all([request for request in gone if request.origin is None], now, events)
        self._grant_waiters(
            [(name, True, None) for name in table.resources], now, events
        )  # nobody waits for the others

    # -- what they are made of ----------------------------------------------------------------------------

    def _assign_id(self, request: Request) -> None:
        """Give a newcomer its id and its owner."""
        request.id = request.owner = self.next_id
        self.next_id += 1
        if request.transaction is not None:
            request.owner = request.transaction

    def _grant(self, request: Request, now: float) -> None:
        request.state = HELD
        request.fence = self.next_fence
        self.next_fence += 1
        request.since = now
        request.since_unix_ms = now + self.unix_offset_ms
        request.deadline = ceil(now + request.transaction_timeout_ms)
        self.table.add_held(request)
        self.deadlines.add(request.deadline, request.id)

    def _end(self, event: Released, events: list[Event]) -> None:
        request = event.request
        request.state = ENDED
        self._outcomes.add(request.id, event.reason)
        events.append(event)

    def _time_out(self, request: Request, events: list[Event]) -> None:
        """End a waiting request with `queue-timeout`, and say who stood in its way."""
        blockers, total = find_blockers(self.table, request)
        self.table.dequeue(request)
        self._end(TimedOut(request, Reason.QUEUE_TIMEOUT, blockers, total), events)

    def _remove_held(self, request: Request) -> AffectedQueues:
        """Take the locks of a request from it, and say in whose lines that may help someone."""
        self.deadlines.discard(request.deadline, request.id)
        return self.table.remove_held(request)

    def _set_deadline(self, request: Request) -> None:
        """Let a request fall due at its deadline. One that waits may have none; one that is held always has one."""
        if request.deadline < NEVER:
            self.deadlines.add(request.deadline, request.id)

    def _clear_deadline(self, request: Request) -> None:
        if request.deadline < NEVER:
            self.deadlines.discard(request.deadline, request.id)

    def _queues_of(self, request: Request) -> AffectedQueues:
        """The lines in which a waiting request stands, for when it has left them."""
        return [(name, exclusive, request.entry(name)) for name, exclusive in request.modes()]

    def _append_moved(self, moved: dict[Request, None], events: list[Event]) -> None:
        """Say whose places changed, of those who still wait."""
        events += (Moved(request) for request in moved if request.state is WAITING)

    def _ended_or_unknown(self, id: int) -> Event:
        reason = self._outcomes.get(id)
        return UnknownId(id) if reason is None else AlreadyEnded(id, reason)

    def _rearrange_queues(self, owner: Owner, moved: dict[Request, None]) -> dict[str, list[Request]]:
        """Give the lines in which the owners of a cycle stand an order without one.

        Adds to `moved` those whose places changed; returns the orders as they were, by resource.
        """
        table = self.table
        ranks = deadlock.topological_ranks(table, deadlock.strongly_connected_component(table, owner))
        names = dict.fromkeys(
            name for member in ranks for request in table.waiting_of(member).values() for name in request.names()
        )
        previous: dict[str, list[Request]] = {}
        for name in names:
            queue = table.wait_queue(name)
            requests = deadlock.rearranged_order(queue, name, ranks)
            if requests is not None:
                previous[name] = [entry[2] for entry in queue.entries()]
                moved |= dict.fromkeys(queue.rearrange(name, requests))
        return previous

    def _grant_waiters(
        self, affected: AffectedQueues, now: float, events: list[Event], newcomer: Request | None = None
    ) -> None:
        """Grant what can be granted, in the order of the queue.

        A grant makes nobody else's wait shorter (it was ahead of them before, and now it is a holder), so that one
        look at the candidates is enough.
        """
        for request in grant_candidates(self.table, affected, newcomer):
            if is_grantable(self.table, request):
                self._grant_waiter(request, now, events)

    def _grant_waiter(self, request: Request, now: float, events: list[Event]) -> None:
        """Let a waiting request hold what it waited for."""
        self.table.dequeue(request)
        self._clear_deadline(request)
        waited_ms = now - request.since
        self._grant(request, now)
        events.append(Locked(request, waited_ms))
