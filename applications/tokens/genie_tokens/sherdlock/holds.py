"""Tracking which tokens are held by this selector, and by other clients.

`LockTracker` combines two sources: the reservations of this selector, and the events of a watch on
all token locks. `LockSubscription` opens this watch only while its use outweighs its cost.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import islice, takewhile
from math import inf
from typing import NamedTuple

from genie import GenieError
from genie.backoff import Backoff
from genie.tasks import cancel_and_wait, closing
from genie_tokens.sherdlock.locks import TOKEN_PREFIX, LockClient
from genie_tokens.supervisor import supervise

TRUSTED_LEASES = 2
"""Number of lease durations after which an observed lock counts as ended, in case its end was not
reported: if very many locks are held, a watch reports neither all of them nor the end of all.
"""
EXPIRY_INTERVAL_S = 1.0
"""Interval in which observed locks that are no longer trusted are removed."""
MAX_EXPIRED = 1_000
"""Maximum number of reservations, and of observed locks, that one call of `expire` removes."""
MAX_RELEASED_LOCKS = 10_000
"""Locks released by this selector whose `unlocked` event is still expected. Genie buffers at most
this many messages for one watcher.
"""


class Reservation:
    """Tokens that this selector holds, or has requested, for a transaction.

    After `expires_at` the tokens are free, unless the watch reports a lock.
    """

    __slots__ = ("expires_at", "runs_to_expiry", "token_ids", "transaction")

    def __init__(self, transaction: str, token_ids: Iterable[str]) -> None:
        self.transaction = transaction
        self.token_ids = set(token_ids)
        self.expires_at = inf
        """When the first of the locks expires (event-loop time, in seconds); infinite until the
        locks are granted.
        """
        self.runs_to_expiry = False
        """True if the locks are never released, and end only when they expire."""

    @property
    def pending(self) -> bool:
        """True if Genie has not granted the locks yet."""
        return self.expires_at == inf


class ObservedLock(NamedTuple):
    """A lock on a token that the watch has reported, and the time of the report."""

    id: int
    transaction: str | None
    observed_at: float


class LockTracker:
    """The holders of tokens: reservations of this selector, and locks that the watch has reported.

    `lease` is in seconds. `on_hold_ended` is called when a reservation or an observed lock ends: with
    the id of each of its tokens, and with whether the token may be free now. `on_cleared` is called
    when all observed locks are discarded.
    """

    __slots__ = (
        "_by_expiry",
        "_duplicates",
        "_next_check_at",
        "_released_ids",
        "_trusted_s",
        "observed_locks",
        "on_cleared",
        "on_hold_ended",
        "reservations",
    )

    def __init__(self, lease: float) -> None:
        self._trusted_s = TRUSTED_LEASES * lease
        """How long a lock counts as held after the watch has reported it."""
        self.on_hold_ended: Callable[[str, bool], object] = _ignore
        """Called with the id of a token, and whether it may be free now."""
        self.on_cleared: Callable[[], object] = _ignore
        """Called when all observed locks have been discarded."""
        self.reservations: dict[str, Reservation] = {}
        """By token id: this selector's reservation of the token, which may have expired."""
        self.observed_locks: dict[str, ObservedLock] = {}
        """By token id: the lock that the watch has reported. Includes locks of this selector."""
        self._duplicates: dict[str, list[ObservedLock]] = {}
        """By token id: further locks on the same token. A transaction can lock a token twice."""
        self._by_expiry: OrderedDict[Reservation, None] = OrderedDict()
        """The reservations whose locks were granted, about in the order in which they expire."""
        self._next_check_at = -inf
        """When `expire` checks the observed locks again (event-loop seconds)."""
        self._released_ids: dict[int, None] = {}
        """Ids of locks released by this selector whose `unlocked` event is expected, oldest first.
        """

    # -- queries --------------------------------------------------------------------------------------------

    def local_reservation(self, id: str, now: float) -> Reservation | None:
        """Return this selector's reservation of a token, unless it has expired."""
        reservation = self.reservations.get(id)
        return None if reservation is None or reservation.expires_at <= now else reservation

    def has_releasable_reservation(self, ids: Iterable[str], now: float) -> bool:
        """Return whether any of these tokens belongs to a reservation of this selector that can be
        released before it expires.
        """
        return any(
            (reservation := self.local_reservation(id, now)) is not None and not reservation.runs_to_expiry
            for id in ids
        )

    def observed_lock(self, id: str, now: float) -> ObservedLock | None:
        """Return the lock that the watch has reported for a token. None if there is no report, or
        if the report is too old to be trusted.
        """
        lock = self.observed_locks.get(id)
        return None if lock is None or now - lock.observed_at > self._trusted_s else lock

    def held_by_other(self, id: str, transaction: str, now: float) -> bool:
        """Return whether another transaction holds a token, according to the locks that the watch
        has reported.
        """
        lock = self.observed_lock(id, now)
        return lock is not None and lock.transaction != transaction

    def is_held(self, id: str, now: float) -> bool:
        """Return whether any transaction holds a token, according to the watch or this selector."""
        return self.observed_lock(id, now) is not None or self.local_reservation(id, now) is not None

    # -- this selector's reservations ------------------------------------------------------------------------

    def reserve(self, reservation: Reservation) -> None:
        """Make the tokens of a reservation unavailable to other selections of this selector."""
        for id in reservation.token_ids:
            self.reservations[id] = reservation

    def narrow(self, reservation: Reservation, granted: Iterable[str], expires_at: float = inf) -> None:
        """Replace the requested tokens of a reservation by the tokens that Genie has granted, if any
        until `expires_at` (event-loop seconds).

        Requested tokens that were not granted are not reported as free, because other clients hold at
        least some of them.
        """
        granted_ids = set(granted)
        for id in reservation.token_ids - granted_ids:
            if self.reservations.get(id) is reservation:
                del self.reservations[id]
                self.on_hold_ended(id, False)
        reservation.token_ids = granted_ids
        self.reserve(reservation)
        if granted_ids:
            reservation.expires_at = expires_at
            self._by_expiry[reservation] = None

    def renew(self, reservation: Reservation, expires_at: float) -> None:
        """Record that Genie has extended the locks of a reservation to `expires_at` (event-loop seconds)."""
        reservation.expires_at = expires_at
        if reservation not in self._by_expiry:  # it expired while the locks were being extended
            for id in reservation.token_ids:
                self.reservations.setdefault(id, reservation)
        self._by_expiry[reservation] = None
        self._by_expiry.move_to_end(reservation)

    def drop(self, reservation: Reservation) -> None:
        """Remove a reservation, and report its tokens as free, except tokens on which the watch has
        observed a lock.
        """
        self._by_expiry.pop(reservation, None)
        for id in reservation.token_ids:
            if self.reservations.get(id) is reservation:
                del self.reservations[id]
                self.on_hold_ended(id, id not in self.observed_locks)

    def keep_until_expiry(self, reservation: Reservation, now: float) -> None:
        """Let a reservation end only when its locks expire. Drops the reservations that have expired by
        the time `now`.
        """
        reservation.runs_to_expiry = True
        self.expire(now)

    def expire(self, now: float) -> None:
        """Drop the reservations that have expired by the time `now`, and remove the observed locks that
        are no longer trusted: of both at most `MAX_EXPIRED`. Must be called before each selection,
        because there are no timers.
        """
        for _ in range(MAX_EXPIRED):
            oldest = next(iter(self._by_expiry), None)
            if oldest is None or oldest.expires_at > now:
                break
            self.drop(oldest)
        if now >= self._next_check_at:
            self._next_check_at = now + EXPIRY_INTERVAL_S
            outdated = takewhile(lambda item: now - item[1].observed_at > self._trusted_s, self.observed_locks.items())
            for id, lock in list(islice(outdated, MAX_EXPIRED)):
                self.on_unlocked(id, lock.id)

    def on_released(self, lock_id: int, ids: Iterable[str]) -> None:
        """Record that Genie has confirmed the release of a lock of this selector on these tokens.

        The watch may report a lock some milliseconds after its owner got the reply. So a `locked`
        event of this lock may arrive after the release: the event is outdated, and must be ignored.
        """
        self._released_ids[lock_id] = None
        if len(self._released_ids) > MAX_RELEASED_LOCKS:
            del self._released_ids[next(iter(self._released_ids))]  # the oldest
        for id in ids:
            self._remove(id, lock_id)
            self.on_hold_ended(id, False)  # it is reported as free when its reservation is dropped

    # -- events of the watch ---------------------------------------------------------------------------------

    def clear_observed(self) -> None:
        """Discard all observed locks, because the watch has ended, or begins again with a snapshot."""
        self.observed_locks.clear()
        self._duplicates.clear()
        self.on_cleared()

    def on_locked(self, id: str, lock_id: int, transaction: str | None, now: float) -> None:
        """Add a lock that the watch has reported for a token. Ignored if this selector has released
        the lock already.
        """
        if lock_id in self._released_ids:
            return
        observed = ObservedLock(lock_id, transaction, now)
        if id in self.observed_locks:
            self._duplicates.setdefault(id, []).append(observed)
        else:
            self.observed_locks[id] = observed

    def on_unlocked(self, id: str, lock_id: int) -> None:
        """Remove a lock whose end the watch has reported. If the token has no other observed lock,
        the token is reported as free.
        """
        self._released_ids.pop(lock_id, None)
        self._remove(id, lock_id)
        self.on_hold_ended(id, id not in self.observed_locks)

    def _remove(self, id: str, lock_id: int) -> None:
        """Remove an observed lock on a token; has no effect if the lock is unknown. If there are
        further locks on the token, the next of them becomes the token's observed lock.
        """
        if id in self._duplicates:
            remaining = [lock for lock in (self.observed_locks[id], *self._duplicates.pop(id)) if lock.id != lock_id]
            del self.observed_locks[id]  # the next lock moves to the end: `expire` stops at the first recent lock
            self.observed_locks[id] = remaining[0]  # it exists, because there were at least two locks
            if len(remaining) > 1:
                self._duplicates[id] = remaining[1:]
        elif id in self.observed_locks and self.observed_locks[id].id == lock_id:
            del self.observed_locks[id]


def _ignore(*_: object) -> None:
    pass


# -- the adaptive subscription --------------------------------------------------------------------------------

CHECK_INTERVAL_S = 1.0
"""Interval of the decision whether to stay subscribed."""
CHEAP_EVENTS_PER_S = 500.0
"""Rate of lock events up to which a subscription costs only some milliseconds of CPU time a second.
"""
RESUBSCRIBE_AFTER_S = 30.0
"""Pause after a subscription that was expensive and not needed."""
KEEP_AFTER_USE_S = 5.0
"""How long a subscription is kept after it was last needed."""
AVERAGE_WEIGHT = 0.05
"""Weight of one request in the moving average of contended requests."""
SUBSCRIBE_ABOVE = 0.2
"""Share of contended requests above which the selector subscribes: a failed request costs one more
round trip.
"""
UNSUBSCRIBE_BELOW = 0.05
"""Share of contended requests below which the selector may unsubscribe."""

_PREFIX_LENGTH = len(TOKEN_PREFIX)


class LockSubscription:
    """An adaptive subscription: watches the locks of all tokens to update a `LockTracker`, while
    that is cheap or needed.

    Every lock event costs CPU time; without them, a selector learns only from rejected requests
    that a token is locked. So it is subscribed at the start, while there are few events, while many
    requests are contended, and while a `with subscription:` block waits for tokens of others.
    `on_snapshot` is called when the tracker has received all locks that existed when the watch
    began.
    """

    def __init__(self, client: LockClient, tracker: LockTracker, on_snapshot: Callable[[], None]) -> None:
        self._client = client
        self._tracker = tracker
        self._on_snapshot = on_snapshot
        self._contended_share = 0.0
        """Moving average of the share of contended requests, 0 to 1."""
        self._last_needed_at = -inf
        """When the subscription was last needed."""
        self._waiter_count = 0
        """The number of `with` blocks in progress: they wait for tokens that others hold."""
        self._event_count = 0
        """The number of lock events since the last check."""
        self._watch_task: asyncio.Task[None] | None = None
        """The task that receives the lock events; None while not subscribed."""
        self._check_timer: asyncio.TimerHandle | None = None
        """Calls `_check_need` while subscribed, and `start` after the selector has unsubscribed."""
        self._closing_tasks: set[asyncio.Task[None]] = set()
        """Cancelled watches that have not ended yet."""
        self._closed = False

    def start(self) -> None:
        """Start to watch the locks of tokens. Has no effect if the watch runs already, or after
        `close`.
        """
        loop = asyncio.get_running_loop()
        if self._watch_task is None and not self._closed:
            if self._check_timer is not None:
                self._check_timer.cancel()
            self._watch_task = loop.create_task(supervise("watching the locks of tokens", self._run_watch))
            self._check_timer = loop.call_later(CHECK_INTERVAL_S, self._check_need)

    def record_request(self, *, contended: bool) -> None:
        """Record a request for token locks, and subscribe if too large a share of the latest
        requests was contended.

        `contended` is True if other clients held too many tokens: the request has failed, or would
        have failed if the subscription had not reported their locks.
        """
        self._contended_share += AVERAGE_WEIGHT * (contended - self._contended_share)
        if contended and self._contended_share > SUBSCRIBE_ABOVE:
            self._subscribe_as_needed()

    def __enter__(self) -> None:
        """Subscribe at least until the end of the block, which waits for tokens that other
        transactions hold.
        """
        self._waiter_count += 1
        self._subscribe_as_needed()

    def __exit__(self, *_: object) -> None:
        self._waiter_count -= 1

    async def close(self) -> None:
        """Unsubscribe permanently."""
        self._closed = True
        self._unsubscribe()
        for task in list(self._closing_tasks):
            await cancel_and_wait(task)

    def _subscribe_as_needed(self) -> None:
        """Subscribe, and record that the subscription is needed now."""
        self._last_needed_at = asyncio.get_running_loop().time()
        self.start()

    def _check_need(self) -> None:
        """Stay subscribed if that is cheap or needed; else unsubscribe, and subscribe again after
        `RESUBSCRIBE_AFTER_S`. A timer calls this every `CHECK_INTERVAL_S`.
        """
        loop = asyncio.get_running_loop()
        is_cheap = self._event_count <= CHEAP_EVENTS_PER_S * CHECK_INTERVAL_S
        self._event_count = 0
        recently_needed = loop.time() - self._last_needed_at < KEEP_AFTER_USE_S
        if is_cheap or self._waiter_count or self._contended_share > UNSUBSCRIBE_BELOW or recently_needed:
            self._check_timer = loop.call_later(CHECK_INTERVAL_S, self._check_need)
        else:
            self._unsubscribe()
            self._check_timer = loop.call_later(RESUBSCRIBE_AFTER_S, self.start)

    def _unsubscribe(self) -> None:
        """Cancel the watch, and discard the locks that it has reported, because they are no longer
        updated.
        """
        watch_task, self._watch_task = self._watch_task, None
        if self._check_timer is not None:
            self._check_timer.cancel()
        if watch_task is not None:
            self._closing_tasks.add(watch_task)
            watch_task.add_done_callback(self._closing_tasks.discard)
            watch_task.cancel()
            self._tracker.clear_observed()

    async def _run_watch(self, backoff: Backoff) -> None:
        """Watch the locks of all tokens, and pass the events to the tracker, until the watch fails.
        The caller retries with `backoff`, which is reset once the initial snapshot is complete.
        """
        tracker, loop = self._tracker, asyncio.get_running_loop()
        tracker.clear_observed()
        async with closing(self._client.watch(TOKEN_PREFIX)) as changes:
            snapshot_task = loop.create_task(self._await_snapshot(backoff))
            try:
                async for change in changes:
                    self._event_count += 1
                    if change.state == "locked":
                        tracker.on_locked(change.resource[_PREFIX_LENGTH:], change.id, change.transaction, loop.time())
                    else:
                        tracker.on_unlocked(change.resource[_PREFIX_LENGTH:], change.id)
            finally:
                await cancel_and_wait(snapshot_task)

    async def _await_snapshot(self, backoff: Backoff) -> None:
        """Wait until the watch has reported all locks that existed when the watch began, and then
        call `on_snapshot`.

        The server replies to a `ping` after these reports. If the `ping` fails, `on_snapshot` is
        called at once.
        """
        try:
            await self._client.ping()
            backoff.reset()
        except GenieError:
            pass  # the waiting selections retry without a complete snapshot
        self._event_count = 0  # the rate of events does not include the snapshot
        self._on_snapshot()
