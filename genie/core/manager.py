"""The lock manager: commands in, events out. Only this module changes which requests hold and wait."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import ceil, inf

from genie.core import deadlock, reduction
from genie.core.commands import Command, Continue, Disconnect, Expire, Extend, Release, Take
from genie.core.context import Origin
from genie.core.deadlines import NEVER, Deadlines
from genie.core.events import (
    AlreadyEnded,
    Cycle,
    Deadlocked,
    Event,
    Extended,
    Granted,
    GraphFull,
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
from genie.core.grant import (
    MAX_CANDIDATES,
    RoomBelow,
    first_waiter_for_units,
    grant_candidates,
    is_available,
    is_grantable,
    is_immediately_grantable,
    only_grantable,
    units_in_use,
    waits_for_holder,
)
from genie.core.lock_order.analysis import LockOrder
from genie.core.lock_table import AffectedQueues, LockTable, Transaction
from genie.core.model import (
    ENDED,
    HELD,
    NO_TIMEOUT_MS,
    SUCCESS,
    WAITING,
    Details,
    Reason,
    Request,
    Weight,
    in_parts,
    needs_session,
)
from genie.core.special import MAX_QUEUES, MAX_SEARCHED_LEVELS
from genie.core.subtrees import close_slice, close_specials, open_specials, open_subtrees
from genie.core.view import MAX_COUNTED_BLOCKERS, MAX_LISTED_BLOCKERS, find_blockers, read_limit, sample_blockers
from genie.core.wait_queue import MAX_ARRIVAL_STEPS
from genie.lock_modes import MAX_SUBTREE_LEVELS, QueueMode, S, U, X

RECENT_OUTCOMES = 100_000
"""Minimum number of recent outcomes that are remembered. The maximum is twice this number."""

MAX_EXPIRY_READS = 4_000
"""Maximum number of requests and resources that one `Expire` reads, to describe blockers and to find waiters to grant. The
other expired requests end in the next step."""

MAX_CONTINUED_QUEUES = 1_000
"""Number of queues with pending grants that one `Continue` reads."""

MAX_FAST_RELEASE_NAMES = 32
"""Maximum number of names of a request that is released without a step while there are subtrees. To find out that no subtree is
above a name takes up to 4 µs, and the server measures only the duration of steps."""


class RecentOutcomes:
    """A cache of the reasons for which requests ended, by id, in two generations.

    When the newer generation is full, the whole older generation is dropped. Removing the oldest keys one by one from a single
    dict would be slow: to find the oldest key, CPython skips the slots of all removed keys.
    """

    __slots__ = ("_newer", "_older")

    def __init__(self) -> None:
        self._newer: dict[int, Reason] = {}
        """Reasons by id of the request; `_older` likewise, for requests that ended earlier."""
        self._older: dict[int, Reason] = {}

    def add(self, id: int, reason: Reason) -> None:
        """Store the outcome of a request."""
        newer = self._newer
        if len(newer) >= RECENT_OUTCOMES:
            self._older, self._newer = newer, {}
            newer = self._newer
        newer[id] = reason

    def get(self, id: int) -> Reason | None:
        """Return the reason for which a request ended, or None if the reason is not remembered."""
        return self._newer.get(id) or self._older.get(id)


# -- The lock manager ----------------------------------------------------------------


class LockManager:
    """Decides which request holds which lock.

    The same commands at the same times give the same events. `unix_offset_ms` converts the times of
    commands to Unix time, for display.

    The decisions of another process, such as the leader, are applied with `load_in_parts`, `adopt`, `discard_in_parts` and
    `add_outcome`, which grant nothing.
    """

    def __init__(self, next_id: int = 1, next_fence: int = 1, *, unix_offset_ms: float = 0.0) -> None:
        self.table = LockTable()
        self.deadlines = Deadlines()
        self.next_id = next_id
        """The id of the next request."""
        self.next_fence = next_fence
        """The fencing token of the next grant."""
        self.unix_offset_ms = unix_offset_ms
        self.lock_order: LockOrder | None = None
        """The analysis of the lock order, which observes the transactions and never changes them. None if it is off."""
        self.pending_grants = self.table.pending_grants
        """Queues in which waiters may still be grantable, because a step had too many candidates. `Continue` grants them."""
        self.rearrangements = 0
        """Number of cycles that were resolved by rearranging wait queues."""
        self._outcomes = RecentOutcomes()

    def lead(self, *, min_id: int, unix_offset_ms: float, lock_order: LockOrder | None) -> None:
        """Prepare a follower's lock manager to execute commands. The first command must be `Recover`.

        New ids and fencing tokens are at least `min_id`.
        """
        self.next_id, self.next_fence = max(self.next_id, min_id), max(self.next_fence, min_id)
        self.unix_offset_ms, self.lock_order = unix_offset_ms, lock_order

    def step(self, command: Command, now: float) -> list[Event]:
        """Execute one command at the time `now` (ms, monotonic) and return its events in order.

        A well-typed command never raises an exception, except for a defect.
        """
        if isinstance(command, Request):
            return self.request(command, now)
        if isinstance(command, Release):
            return self.release(command.id, now)
        events: list[Event] = []
        if isinstance(command, Take):
            self._take(command, now, events)
        elif isinstance(command, Extend):
            self._extend(command, now, events)
        elif isinstance(command, Expire):
            self._expire(command.limit, now, events)
        elif isinstance(command, Disconnect):
            self._end_all(command.requests, now, events)
        elif isinstance(command, Continue):
            affected = self.table.take_pending_grants(MAX_CONTINUED_QUEUES)
            closing = next((name for name, *_ in affected if name in self.table.closing), None)
            if closing is not None:  # one subtree in a step: the others stay pending
                affected += close_slice(self.table, closing)
            self._grant_waiters(affected, now, events)
        else:
            self._recover(command.contended, now, events)
        return events

    # The two fast paths execute nearly all commands. They make no events: the caller knows what happened. In the server,
    # a lock and release cost 0.88 of the CPU time of two steps.

    def grant_if_uncontended(self, request: Request, now: float) -> bool:
        """Grant a new request for exclusive locks on unlocked resources, or for units of one resource, without a step.

        Return True if it was granted, with the effect that a step would have. If it was not, nothing has changed, and the
        request needs a step.
        """
        table = self.table
        uncontended = table.uncontended
        resources = table.resources
        for name in request.exclusive:
            if name in uncontended or name in resources:
                return False
        if request.shared:
            return False
        if request.details is not None:
            if not self._hold_units(request, request.details):
                return False
        elif table.subtrees and any(map(table.is_below_subtree, request.exclusive)):
            return False
        id_ = self.next_id
        self.next_id = id_ + 1
        request.id = request.owner = id_
        request.state = HELD
        request.fence = self.next_fence
        self.next_fence += 1
        request.since = now
        request.since_unix_ms = now + self.unix_offset_ms
        request.deadline = ceil(now + request.transaction_timeout_ms)
        self.deadlines.add(request.deadline, id_)
        table.held[id_] = request
        if request.transaction is not None:
            self._add_to_transaction(request, request.transaction, now)
        for name in request.exclusive:
            uncontended[name] = request
        return True

    def release_if_uncontended(self, id: int, origin: Origin) -> Request | None:
        """Release a request of `origin` that holds only uncontended resources, without a step. Return the request.

        If it is not such a request, return None: nothing has changed, and the release needs a step.
        """
        table = self.table
        request = table.held.get(id)
        uncontended = table.uncontended
        if request is None or request.origin is not origin or request.shared:
            return None
        # Units, or names that may be below a subtree.
        if table.specials and (table.subtrees or request.details is not None) and not self._leave_specials(request):
            return None
        for name in request.exclusive:
            if name not in uncontended:
                return None
        del table.held[id]
        for name in request.exclusive:
            del uncontended[name]
        if request.transaction is not None:
            transaction = table.transactions[request.transaction]
            grants = transaction.grants
            grants_before = len(grants)
            del transaction.held[id]
            transaction.held_classes = None
            for name in request.exclusive:
                del grants[name]  # its only grant, because the resource is uncontended
            if not transaction.held and not transaction.waiting:
                del table.transactions[request.transaction]
            else:
                transaction.compact_if_halved(grants_before)
        self.deadlines.discard(request.deadline, id)
        request.state = ENDED
        self._outcomes.add(id, SUCCESS)
        return request

    def _hold_units(self, request: Request, details: Details) -> bool:
        """Make a new request a holder of its units, for `grant_if_uncontended`.

        Return False, without a change, if the request needs a step. It needs none if it only names units of one resource, and
        this resource has free units and no waiters.
        """
        if request.transaction is not None or request.exclusive or len(details.units) != 1:
            return False
        table = self.table
        [(name, (units, limit))] = details.units.items()
        resource = table.resources.get(name)
        if resource is None:
            if name in table.uncontended:
                return False
        elif resource.wait_queue is not None or units > limit - units_in_use(resource, limit):
            return False
        if table.subtrees and table.is_below_subtree(name):
            return False
        table.hold_units(self.next_id, request, name, units)
        return True

    def _leave_specials(self, request: Request) -> bool:
        """Remove a request from the holders of its units, for `release_if_uncontended`.

        Return False, without a change, if the release needs a step.
        """
        table, details = self.table, request.details
        if details is None:  # subtrees count the locks below them
            names = request.exclusive
            return len(names) <= MAX_FAST_RELEASE_NAMES and not any(map(table.is_below_subtree, names))
        if request.transaction is not None or request.exclusive or len(details.units) != 1:
            return False
        [(name, (units, _))] = details.units.items()
        if table.resources[name].wait_queue is not None or (table.subtrees and table.is_below_subtree(name)):
            return False
        table.drop_units(request.id, name, units)
        return True

    def load_in_parts(self, requests: Iterable[Request], replaced: Iterable[int] = ()) -> Iterator[None]:
        """Discard the requests with the ids `replaced`, and adopt `requests`, in parts: yield after each part.

        The table must not change meanwhile. This opens all new subtrees together: `adopt` alone would read the whole table for
        each of them.
        """
        parts: list[list[Request]] = []
        subtrees = set[str]()
        for part in in_parts(requests):
            parts.append(part)
            subtrees.update(*[each.details.subtrees for each in part if each.details is not None])
            yield
        self.table.kept_open = subtrees
        yield from self.discard_in_parts(replaced)
        self.table.kept_open = ()
        if subtrees:  # held locks first: counting them is faster when the subtrees are opened than one by one
            yield from self._adopt_in_parts(parts, _is_held_without_subtree)
            yield from open_subtrees(self.table, subtrees)
            yield from self._adopt_in_parts(parts, lambda request: not _is_held_without_subtree(request))
        else:
            yield from self._adopt_in_parts(parts, lambda _: True)

    def _adopt_in_parts(self, parts: list[list[Request]], is_due: Callable[[Request], bool]) -> Iterator[None]:
        for part in parts:
            for request in filter(is_due, part):
                self.adopt(request)
            yield

    def adopt(self, request: Request) -> None:
        """Add a request in its current state, held or waiting, without granting any other request."""
        details = request.details
        if details is not None:
            details.queue_modes = None  # may be of another table, if this process has loaded the state before
            if details.units or details.subtrees:
                open_specials(self.table, request, is_bounded=False)
            else:
                request.details = None
        self.table.restore(request)
        if request.deadline < NEVER:
            self.deadlines.add(request.deadline, request.id)

    def discard_in_parts(self, ids: Iterable[int]) -> Iterator[None]:
        """Remove the held and waiting requests with these ids, without granting any other request. Yield after each part.

        Afterwards, no subtree is left in `closing`.
        """
        table = self.table
        for part in in_parts(filter(None, map(table.find, ids))):
            for request in part:
                self._discard(request)
            yield
            while table.closing:
                close_slice(table, next(iter(table.closing)), keep_moved=True)
                yield

    def _discard(self, request: Request) -> None:
        if request.deadline < NEVER:
            self.deadlines.discard(request.deadline, request.id)
        if request.state is HELD:
            self.table.remove_held(request)
        else:
            self.table.dequeue(request)
        if request.details is not None:
            close_specials(self.table, request, keep_moved=True)

    def free_in_parts(self) -> Iterator[None]:
        """Drop all requests in parts, because the lock manager is no longer used. Yield between the parts."""
        yield from self.deadlines.free_in_parts()
        yield from self.table.free_in_parts()

    def add_outcome(self, id: int, reason: Reason) -> None:
        """Remember the reason of a request that ended before the state was loaded."""
        self._outcomes.add(id, reason)

    def outcome(self, id: int) -> Reason | None:
        """Return the reason for which a request ended, or None if the reason is not remembered."""
        return self._outcomes.get(id)

    # -- Commands -------------------------------------------------------------------------

    def request(self, request: Request, now: float, max_queue_entries: float = inf) -> list[Event]:
        """Grant a new request immediately or queue it: a step of a `Request`.

        Reject it if the wait queues would have more than `max_queue_entries` entries, or if it would wait in too many queues.
        """
        events: list[Event] = []
        if request.details is not None:
            if not open_specials(self.table, request, max_queue_entries=max_queue_entries):
                self._assign_id(request)
                self._close_specials(request)
                return [QueueFull(request, is_opening=True)]
            max_queue_entries -= len(request.units)  # the checks below count its other entries
        id_ = self.next_id
        self.next_id = id_ + 1
        request.id = id_
        request.owner = id_ if request.transaction is None else request.transaction
        if is_immediately_grantable(self.table, request):
            if request.transaction is not None and self.lock_order is not None:
                self._analyse(request, request.transaction, now)
            self._grant(request, now)
            events.append(Granted(request))
        elif self.table.queue_entries + len(request.exclusive) + len(request.shared) > max_queue_entries or (
            self.table.subtrees
            and self.table.count_queues(request) > min(MAX_QUEUES, max_queue_entries - self.table.queue_entries)
        ):
            if request.details is not None:
                self._close_specials(request)
            # If there is room for `MAX_QUEUES` more entries, the subtrees above its names are too many.
            events.append(QueueFull(request, is_opening=self.table.queue_entries + MAX_QUEUES < max_queue_entries))
        else:
            if request.transaction is not None and self.lock_order is not None:
                self._analyse(request, request.transaction, now)
            self._queue(request, now, events)
        return events

    def _take(self, take: Take, now: float, events: list[Event]) -> None:
        """Grant available resources until their weights reach the target, or end the request as insufficient.

        No other owner waits for an available resource in a conflicting mode, so no request is
        overtaken and no cycle can arise.
        """
        request = take.request
        reached: Weight = 0
        locked: Weight = 0
        self._assign_id(request)
        taken: tuple[list[str], list[str], list[str]] = [], [], []  # indexed by mode: S, X, U
        table = self.table
        uncontended, resources, subtrees = table.uncontended, table.resources, table.subtrees
        if subtrees and _have_too_many_levels(take.choices):
            events.append(QueueFull(request, is_opening=True))
            return
        room_below = RoomBelow()
        for (name, mode), weight in zip(take.choices, take.weights, strict=True):
            # A name that is in neither table is available: there may be 10,000, and a call takes half of their time.
            if (name in uncontended or name in resources or subtrees) and not is_available(
                table, request.owner, name, mode, take.units.get(name), room_below
            ):
                locked += weight
                continue
            taken[mode].append(name)
            reached += weight
            if reached >= take.target:
                request.shared, request.exclusive = tuple(taken[S]), tuple(taken[X])
                if taken[U]:
                    request.details = Details({name: take.units[name] for name in taken[U]})
                    open_specials(self.table, request)
                self._grant(request, now)
                events.append(Taken(request))
                return
        request.since, request.since_unix_ms = now, now + self.unix_offset_ms
        events.append(Queued(request))
        insufficient = Insufficient(
            request, Reason.INSUFFICIENT, free=reached, locked=locked, as_strings=take.as_strings
        )
        self._end(insufficient, events)

    def _queue(self, request: Request, now: float, events: list[Event]) -> None:
        """Enqueue a new request, and resolve the cycle that it may create in the wait-for graph.

        The new request ends immediately if the cycle is a deadlock. Another cycle is resolved by
        rearranging wait queues. A request with a queue timeout of 0 that cannot be granted also ends
        immediately, and the queues get their previous order back.
        """
        table = self.table
        request.since = now
        request.since_unix_ms = now + self.unix_offset_ms
        events.append(Queued(request))
        moved = table.enqueue(request)
        queues = {*request.queues()} if table.specials else None  # now: a granted request has left those of subtrees
        rearranged: deadlock.Rearrangement | None = None
        # A request whose insertion took too many steps is rejected there, too.
        if (moved and moved[request] > MAX_ARRIVAL_STEPS) or deadlock.may_create_cycle(table, request):
            rearranged = self._resolve_cycle(request, moved, events)
            if rearranged is None:
                return  # the request has ended
        if request.queue_timeout_ms <= 0 and not is_grantable(table, request):
            if moved:
                self._undo_rearrangement(rearranged or {})
                self._end_on_arrival(request, events)
            else:
                self._time_out(request, events)
            return
        timeout_ms = request.queue_timeout_ms
        if timeout_ms >= NO_TIMEOUT_MS:
            request.deadline = NEVER
        else:
            request.deadline = ceil(now + timeout_ms)
            self.deadlines.add(request.deadline, request.id)
        if rearranged:
            self._grant_waiters([(name, X, None) for name in rearranged], now, events, new_request=request)
        elif is_grantable(table, request):
            self._grant_waiter(request, now, events)
        if moved:
            moved.pop(request, None)
            self._append_moved(moved, {*(queues or request.names()), *(rearranged or ())}, events)

    def _undo_rearrangement(self, rearranged: deadlock.Rearrangement) -> None:
        for name, (entries, order) in rearranged.items():
            previous = [entry[2] for entry in entries]
            self.table.wait_queue(name).rearrange(name, [request.entry(name) for request in order], previous)

    def _resolve_cycle(
        self, request: Request, moved: dict[Request, int], events: list[Event]
    ) -> deadlock.Rearrangement | None:
        """Rearrange wait queues so that a new request is in no cycle, and return the changes. Return None if the request ended.

        The request ends with `deadlock` if it is deadlocked. With a queue timeout of 0, it also ends if holders block it,
        because no order of the queues makes it grantable. It is rejected with `GraphFull` if the search takes too many steps,
        because it could deadlock. The requests whose positions changed are added to `moved`.
        """
        table, budget = self.table, deadlock.StepBudget(moved.get(request, 0))
        is_special = table.specials > 0
        try:  # if the insertion of the request took too many steps, no budget is left, and `find_deadlock` raises
            if is_special and budget.left >= 0 and reduction.finishes_in_queue_order(table, request.owner):
                return {}
            find_deadlock = reduction.find_deadlock if is_special else deadlock.find_deadlock
            cycle = find_deadlock(table, request.owner, budget)
            if cycle is not None or (request.queue_timeout_ms <= 0 and waits_for_holder(table, request)):
                self._end_on_arrival(request, events, cycle)
                return None
            find_rearrangement = reduction.find_rearrangement if is_special else deadlock.find_rearrangement
            rearrangement = find_rearrangement(table, request.owner, budget)
        except deadlock.GraphTooLarge:
            table.withdraw(request)
            self._close_specials(request)
            request.state = ENDED
            events[:] = [GraphFull(request)]
            return None
        for name, (entries, order) in rearrangement.items():
            moved |= dict.fromkeys(table.wait_queue(name).rearrange(name, entries, order), 0)
        self.rearrangements += bool(rearrangement)
        return rearrangement

    def release(self, id: int, now: float) -> list[Event]:
        """Release a held request or cancel a waiting one, then grant the waiters that it blocked: a step of a `Release`."""
        events: list[Event] = []
        request = self.table.held.get(id)
        if request is not None:
            self.deadlines.discard(request.deadline, id)
            affected = self.table.remove_held(request)
            if request.details is not None:
                affected += close_specials(self.table, request)
            self._end(Released(request, SUCCESS), events)
            if affected:
                self._grant_waiters(affected, now, events)
        elif id in self.table.waiting:
            self._end_all([self.table.waiting[id]], now, events, SUCCESS)
        else:
            events.append(self._ended_or_unknown(id))
        return events

    def _extend(self, command: Extend, now: float, events: list[Event]) -> None:
        """Set a new deadline for a held request."""
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
        """End expired requests, and grant the waiters that they blocked, until the ended locks and the grants reach `limit`.

        If very many requests time out together, all blockers are counted only for the first of them.
        """
        reads = 0
        for id_ in self.deadlines.expired(now, limit):
            request = self.table.find(id_)
            if request is None or request.deadline > now:
                continue  # the end of an earlier request in this step granted or ended this request
            if limit <= 0 or reads >= MAX_EXPIRY_READS:
                break
            limit -= len(request.exclusive) + len(request.shared)
            if request.details is not None:
                limit -= len(request.units)
            if request.state is HELD:
                self.deadlines.discard(request.deadline, id_)
                affected = self.table.remove_held(request)
                if request.details is not None:
                    affected += close_specials(self.table, request)
                self._end(Released(request, Reason.TRANSACTION_TIMEOUT), events)
            else:
                self.deadlines.discard(request.deadline, id_)
                affected = self._queues_of(request)
                max_counted = MAX_COUNTED_BLOCKERS if 2 * reads < MAX_EXPIRY_READS else MAX_LISTED_BLOCKERS
                reads += self._time_out(request, events, max_counted)
            if affected:
                event_count = len(events)
                reads += self._grant_waiters(affected, now, events)
                limit -= len(events) - event_count  # the grants

    def _end_all(
        self, requests: Iterable[Request], now: float, events: list[Event], reason: Reason = Reason.DISCONNECTED
    ) -> None:
        """End several requests together, held and waiting ones.

        All are removed before any waiter is granted. Otherwise the removal of one request could grant another of these
        requests, which must end.
        """
        affected: AffectedQueues = []
        for request in requests:
            if request.state is WAITING:
                affected += self._queues_of(request)
                if request.deadline < NEVER:
                    self.deadlines.discard(request.deadline, request.id)
                self.table.dequeue(request)
                if request.details is not None:
                    affected += close_specials(self.table, request)
                self._end(Released(request, reason), events)
            elif request.state is HELD:
                self.deadlines.discard(request.deadline, request.id)
                affected += self.table.remove_held(request)
                if request.details is not None:
                    affected += close_specials(self.table, request)
                self._end(Released(request, reason), events)
        self._grant_waiters(affected, now, events)

    def _recover(self, contended: Iterable[str] | None, now: float, events: list[Event]) -> None:
        """Grant every grantable waiter of the resources `contended`.

        If `contended` is None, first end the requests that need a session and have none, and then search all resources.
        """
        table = self.table
        if contended is None:
            self._end_all(filter(needs_session, [*table.held.values(), *table.waiting.values()]), now, events)
            contended = table.resources  # those in `uncontended` have no waiters
        affected: AffectedQueues = [(name, X, None) for name in contended]
        self._grant_waiters(affected, now, events)

    # -- Parts of the commands ------------------------------------------------------------

    def _assign_id(self, request: Request) -> None:
        """Assign the id and the owner of a new request."""
        request.id = request.owner = self.next_id
        self.next_id += 1
        if request.transaction is not None:
            request.owner = request.transaction

    def _analyse(self, request: Request, name: str, now: float) -> None:
        """Analyse the lock order of a request of the transaction `name`, before it is granted or queued."""
        lock_order, transaction = self.lock_order, self.table.transactions.get(name)
        if lock_order is None or transaction is None or not transaction.held or request.queue_timeout_ms <= 0:
            return  # a request that never waits cannot cause a deadlock by the locks that it requests
        lock_order.on_request(transaction, request, now + self.unix_offset_ms)

    def _grant(self, request: Request, now: float) -> None:
        """Make a request held, and add it to the lock table."""
        # The next seven lines are the same in `grant_if_uncontended`: the fast path avoids the call of a common method.
        request.state = HELD
        request.fence = self.next_fence
        self.next_fence += 1
        request.since = now
        request.since_unix_ms = now + self.unix_offset_ms
        request.deadline = ceil(now + request.transaction_timeout_ms)
        self.deadlines.add(request.deadline, request.id)
        if request.transaction is not None and self.lock_order is not None:
            transaction = self.table.transactions.get(request.transaction)
            if transaction is not None and transaction.waiting:
                self.lock_order.on_grant(transaction, request, request.since_unix_ms)
        self.table.add_held(request)

    def _add_to_transaction(self, request: Request, name: str, now: float) -> None:
        """Add a request for unlocked resources, which is granted without a step, to its transaction `name`."""
        request.owner = name
        transaction = self.table.transactions.get(name)
        if transaction is None:
            transaction = self.table.transactions[name] = Transaction()
        elif self.lock_order is not None:
            self._analyse(request, name, now)
            if transaction.waiting:
                self.lock_order.on_grant(transaction, request, now + self.unix_offset_ms)
        transaction.held[request.id] = request
        for resource in request.exclusive:
            transaction.grants[resource] = 1  # its first grant, because the resource was unlocked

    def _end(self, event: Released, events: list[Event]) -> None:
        """Mark a request that was removed from the table as ended, and remember its outcome."""
        request = event.request
        request.state = ENDED
        self._outcomes.add(request.id, event.reason)
        events.append(event)

    def _close_specials(self, request: Request) -> None:
        """Close the special resources that only `request` named. It has ended without a grant.

        Waiters below its subtrees that have become grantable are granted in a later step.
        """
        affected = close_specials(self.table, request)
        if affected:
            self._leave_for_later(affected)

    def _leave_for_later(self, affected: AffectedQueues) -> None:
        self.table.add_pending_grants(affected)
        self.deadlines.soonest = 0.0  # 0 is a lower bound: the caller then checks what is due

    def _time_out(self, request: Request, events: list[Event], max_counted: int = MAX_COUNTED_BLOCKERS) -> int:
        """End a waiting request with the reason `queue-timeout`. The event lists its blockers. Return how many were read."""
        limit = read_limit(request, max_counted)
        blockers, total, reads = sample_blockers(self.table, request, limit, count=True)
        self.table.dequeue(request)
        if request.details is not None:
            self._close_specials(request)
        self._end(TimedOut(request, Reason.QUEUE_TIMEOUT, blockers, min(total, max_counted)), events)
        return reads

    def _end_on_arrival(self, request: Request, events: list[Event], cycle: Cycle | None = None) -> None:
        """End a new request that cannot wait: with `deadlock` if it closed a cycle, else with `queue-timeout`."""
        blockers, total = find_blockers(self.table, request) if cycle is None else ((), 0)
        self.table.withdraw(request)
        if request.details is not None:
            self._close_specials(request)
        if cycle is None:
            self._end(TimedOut(request, Reason.QUEUE_TIMEOUT, blockers, total), events)
        else:
            self._end(Deadlocked(request, Reason.DEADLOCK, cycle), events)

    def _queues_of(self, request: Request) -> AffectedQueues:
        """Return the queues of a waiting request, in which waiters may become grantable once it is removed."""
        modes = request.modes if request.details is None else request.queue_modes
        return [(name, mode, request.entry(name)) for name, mode in modes()]

    def _append_moved(self, moved: dict[Request, int], names: set[str], events: list[Event]) -> None:
        """Append a `Moved` event for each request in `moved` that still waits.

        `names` are the queues in which they may have moved. Pending searches of these queues begin at the front again, because
        a request may have moved to a position that was already read.
        """
        if moved:
            self.table.restart_pending_grants(names)
        events += (Moved(request) for request in moved if request.state is WAITING)

    def _ended_or_unknown(self, id: int) -> Event:
        """Return the event for a command with the id of a request that is neither held nor waiting."""
        reason = self._outcomes.get(id)
        return UnknownId(id) if reason is None else AlreadyEnded(id, reason)

    def _grant_waiters(
        self, affected: AffectedQueues, now: float, events: list[Event], new_request: Request | None = None
    ) -> int:
        """Grant the grantable requests of the affected queues in queue order, and `new_request` if it is grantable.

        Returns the approximate number of requests and resources that were read. If there are very many candidates, the rest is
        left for later steps.

        One pass is enough, because a grant makes no other request grantable: a request that blocked others as an earlier
        waiter blocks them as a holder now. Only a grant of units is followed by another pass, because later waiters need not
        fit into the limit of a holder.
        """
        table = self.table
        if len(affected) == 1 and new_request is None and not table.unmoved:
            only_candidate = only_grantable(table, affected[0][0])
            if only_candidate is not None:
                self._grant_waiter(only_candidate, now, events)
                return 1
            if table.specials and (reads := self._grant_units(affected[0][0], now, events)):
                return reads
        candidates, left, reads = grant_candidates(table, affected, new_request)
        for request in candidates:
            if is_grantable(table, request):
                self._grant_waiter(request, now, events)
        if table.unmoved:  # a subtree was closed, in whose queue they had moved
            # Some may have ended since, if an earlier step has closed it.
            events += [Moved(request) for request in table.unmoved if request.state is not ENDED]
            table.unmoved.clear()
        if table.specials:
            left += self._grant_beside_units(candidates, now, events)
        if left:
            self._leave_for_later(left)
        return reads

    def _grant_units(self, name: str, now: float, events: list[Event]) -> int:
        """Grant waiters for units of one resource, as `_grant_waiters` does, if they are its only waiters.

        They are granted in queue order: if the first one does not fit, no later one does. Returns the number of requests that
        were read, or 0 if the queue must be searched for other grantable waiters.
        """
        reads = 0
        while (first := first_waiter_for_units(self.table, name)) is not None:
            resource = self.table.resources[name]
            units, limit = first.units[name]
            reads += 1
            if units > limit - units_in_use(resource, limit):
                return reads
            self._grant_waiter(first, now, events)
            if reads >= MAX_CANDIDATES:
                self._leave_for_later([(name, U, None)])
                return reads
        left = self.table.resources.get(name)
        return reads if left is not None and left.wait_queue is None else 0

    def _grant_beside_units(self, granted: list[Request], now: float, events: list[Event]) -> AffectedQueues:
        """Grant the waiters for units that have become grantable because an earlier waiter, one of `granted`, holds its units.

        As a holder, this request no longer limits later waiters to its own limit. Returns the changes of queues that are left
        for later steps.
        """
        reads = 0
        left: AffectedQueues = []
        while True:
            affected: AffectedQueues = [
                (name, U, None) for request in granted if request.state is HELD for name in request.units
            ]
            if not affected or reads >= MAX_CANDIDATES:
                return left + affected
            candidates, unread, count = grant_candidates(self.table, affected)
            left += unread
            reads += count + len(affected)
            granted = []
            for request in candidates:
                if is_grantable(self.table, request):
                    self._grant_waiter(request, now, events)
                    granted.append(request)

    def _grant_waiter(self, request: Request, now: float, events: list[Event]) -> None:
        """Dequeue and grant a waiting request."""
        self.table.dequeue(request)
        if request.deadline < NEVER:
            self.deadlines.discard(request.deadline, request.id)
        waited_ms = now - request.since
        self._grant(request, now)
        events.append(Locked(request, waited_ms))


def _is_held_without_subtree(request: Request) -> bool:
    return request.state is HELD and (request.details is None or not request.details.subtrees)


def _have_too_many_levels(choices: Sequence[tuple[str, QueueMode]]) -> bool:
    """Return whether the search for subtrees above these choices, pairs (name, mode), reads more than `MAX_SEARCHED_LEVELS`."""
    if len(choices) * MAX_SUBTREE_LEVELS <= MAX_SEARCHED_LEVELS:
        return False
    directories = {name[: name.rfind("/") + 1] for name, _ in choices}
    parents = {directory[: directory.rfind("/", 0, -1) + 1] for directory in directories}
    levels = sum([min(parent.count("/"), MAX_SUBTREE_LEVELS) for parent in parents])
    return len(directories) + levels > MAX_SEARCHED_LEVELS
