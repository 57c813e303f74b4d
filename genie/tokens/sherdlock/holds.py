"""Tracking which tokens are held by this selector, and by other clients.

`LockTracker` combines two sources: the reservations of this selector, and the events of a watch on
all token locks. `LockSubscription` opens this watch only while its use outweighs its cost.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from math import inf
from typing import NamedTuple

from genie.backoff import Backoff
from genie.errors import GenieError
from genie.tasks import cancel_and_wait, closing, supervise
from genie.tokens.sherdlock.locks import TOKEN_PREFIX, LockClient

TRUSTED_LEASES = 2
"""Number of lease durations after which an observed lock counts as ended, in case its end was not
reported: if very many locks are held, a watch reports neither all of them nor the end of all.
"""
MAX_RELEASED_LOCKS = 10_000
"""Locks released by this selector whose `unlocked` event is still expected. Genie buffers at most
this many messages for one watcher.
"""


class Reservation:
    """Tokens that this selector holds, or has requested, for a transaction.

    `expires_at` is the earliest time at which its locks expire (event-loop seconds; infinite until
    Genie has granted them). Afterwards its tokens are free, unless the watch reports a lock.
    """

    __slots__ = ("expires_at", "ids", "runs_to_expiry", "transaction")

    def __init__(self, transaction: str, ids: Iterable[str]) -> None:
        self.transaction = transaction
        self.ids = set(ids)
        self.expires_at = inf
        self.runs_to_expiry = False
        """Whether its locks are never released, and end only when they expire."""

    @property
    def pending(self) -> bool:
        """Whether Genie has not granted the locks yet."""
        return self.expires_at == inf


class ObservedLock(NamedTuple):
    """A lock on a token that the watch has reported, and the time of the report."""

    id: int
    transaction: str | None
    observed_at: float


class LockTracker:
    """The holders of tokens: reservations of this selector, and locks that the watch has reported.

    `lease` is in seconds. `on_free` is called with the id of each token that becomes free.
    """

    __slots__ = ("_duplicates", "_released", "_to_expire", "_trusted_s", "observed", "on_free", "reservations")

    def __init__(self, lease: float) -> None:
        self._trusted_s = TRUSTED_LEASES * lease
        self.on_free: Callable[[str], object] = _ignore
        self.reservations: dict[str, Reservation] = {}
        """By token id. May contain expired ones."""
        self.observed: dict[str, ObservedLock] = {}
        """By token id: the lock that the watch has reported. Includes locks of this selector."""
        self._duplicates: dict[str, list[ObservedLock]] = {}
        """By token id: further locks on the same token, which a transaction can lock twice."""
        self._to_expire: deque[Reservation] = deque()
        """Reservations with `runs_to_expiry`."""
        self._released: dict[int, None] = {}
        """Ids of locks released by this selector whose `unlocked` event is expected, oldest first.
        """

    # -- queries --------------------------------------------------------------------------------------------

    def local_reservation(self, id: str, now: float) -> Reservation | None:
        """Return this selector's reservation of a token, unless it has expired."""
        reservation = self.reservations.get(id)
        return None if reservation is None or reservation.expires_at <= now else reservation

    def has_releasable_reservation(self, ids: Iterable[str], now: float) -> bool:
        """Return whether any of these tokens belongs to a reservation of this selector that can
        still be released.
        """
        return any(
            (reservation := self.local_reservation(id, now)) is not None and not reservation.runs_to_expiry
            for id in ids
        )

    def observed_lock(self, id: str, now: float) -> ObservedLock | None:
        """Return the lock that the watch has reported for a token, unless the report is too old."""
        lock = self.observed.get(id)
        return None if lock is None or now - lock.observed_at > self._trusted_s else lock

    def held_by_other(self, id: str, transaction: str, now: float) -> bool:
        """Return whether another transaction holds a token, according to the watch."""
        lock = self.observed_lock(id, now)
        return lock is not None and lock.transaction != transaction

    def is_held(self, id: str, now: float) -> bool:
        """Return whether any transaction holds a token, according to the watch or this selector."""
        return self.observed_lock(id, now) is not None or self.local_reservation(id, now) is not None

    # -- this selector's reservations ------------------------------------------------------------------------

    def reserve(self, reservation: Reservation) -> None:
        """Make the tokens of a reservation unavailable to other selections of this selector."""
        for id in reservation.ids:
            self.reservations[id] = reservation

    def narrow(self, reservation: Reservation, granted: Iterable[str]) -> None:
        """Replace the requested tokens of a reservation by those that Genie has granted.

        The others are not reported as free, because other clients hold them.
        """
        granted_ids = set(granted)
        for id in reservation.ids - granted_ids:
            if self.reservations.get(id) is reservation:
                del self.reservations[id]
        reservation.ids = granted_ids
        self.reserve(reservation)

    def drop(self, reservation: Reservation) -> None:
        """Remove a reservation, and report its tokens as free if no lock was observed on them."""
        for id in reservation.ids:
            if self.reservations.get(id) is reservation:
                del self.reservations[id]
                if id not in self.observed:
                    self.on_free(id)

    def keep_until_expiry(self, reservation: Reservation, now: float) -> None:
        """Let a reservation end by its expiry only; drop the earlier ones that have expired."""
        if not reservation.runs_to_expiry:
            reservation.runs_to_expiry = True
            self._to_expire.append(reservation)
        while self._to_expire and self._to_expire[0].expires_at <= now:
            self.drop(self._to_expire.popleft())

    def on_released(self, lock_id: int, ids: Iterable[str]) -> None:
        """Record that this selector has released a lock on these tokens, as Genie has confirmed.

        The watch reports events of a lock some milliseconds later than the replies to its owner. So
        a `locked` event of this lock that still arrives is outdated, and must be ignored.
        """
        self._released[lock_id] = None
        if len(self._released) > MAX_RELEASED_LOCKS:
            del self._released[next(iter(self._released))]
        for id in ids:
            self._remove(id, lock_id)

    # -- events of the watch ---------------------------------------------------------------------------------

    def clear_observed(self) -> None:
        """Discard all observed locks: the watch has ended, or begins again with a snapshot."""
        self.observed.clear()
        self._duplicates.clear()

    def on_locked(self, id: str, lock_id: int, transaction: str | None, now: float) -> None:
        """Add an observed lock on a token, unless this selector has released it since."""
        if lock_id in self._released:
            return
        observed = ObservedLock(lock_id, transaction, now)
        if id in self.observed:
            self._duplicates.setdefault(id, []).append(observed)
        else:
            self.observed[id] = observed

    def on_unlocked(self, id: str, lock_id: int) -> None:
        """Remove an observed lock that has ended, and report the token as free if it was the last
        one.
        """
        self._released.pop(lock_id, None)
        self._remove(id, lock_id)
        if id not in self.observed:
            self.on_free(id)

    def _remove(self, id: str, lock_id: int) -> None:
        """Remove an observed lock on a token, if it is present; a duplicate takes its place."""
        if id in self._duplicates:
            locks = (self.observed[id], *self._duplicates.pop(id))
            remaining = [lock for lock in locks if lock.id != lock_id]
            self.observed[id] = remaining[0]
            if len(remaining) > 1:
                self._duplicates[id] = remaining[1:]
        elif id in self.observed and self.observed[id].id == lock_id:
            del self.observed[id]


def _ignore(_id: str) -> None:
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
        self._contention = 0.0
        """Moving average of the share of contended requests, 0 to 1."""
        self._needed_at = -inf
        """When the subscription was last needed."""
        self._waiters = 0
        """The number of `with` blocks."""
        self._events = 0
        """The number of events since the last check."""
        self._watch: asyncio.Task[None] | None = None
        self._check_timer: asyncio.TimerHandle | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False

    def start(self) -> None:
        """Subscribe, unless already subscribed or closed."""
        loop = asyncio.get_running_loop()
        if self._watch is None and not self._closed:
            if self._check_timer is not None:
                self._check_timer.cancel()
            self._watch = loop.create_task(supervise("watching the locks of tokens", self._run_watch))
            self._check_timer = loop.call_later(CHECK_INTERVAL_S, self._check)

    def record_request(self, *, contended: bool) -> None:
        """Record a request for tokens, and subscribe if too many are contended.

        `contended`: others held too many tokens, so that the request failed, or would have failed
        without the knowledge from a subscription.
        """
        self._contention += AVERAGE_WEIGHT * (contended - self._contention)
        if contended and self._contention > SUBSCRIBE_ABOVE:
            self._subscribe_as_needed()

    def __enter__(self) -> None:
        """Subscribe for at least the duration of the block, which waits for tokens that others
        hold.
        """
        self._waiters += 1
        self._subscribe_as_needed()

    def __exit__(self, *_: object) -> None:
        self._waiters -= 1

    async def close(self) -> None:
        """Unsubscribe permanently."""
        self._closed = True
        self._unsubscribe()
        for task in list(self._closing):
            await cancel_and_wait(task)

    def _subscribe_as_needed(self) -> None:
        self._needed_at = asyncio.get_running_loop().time()
        self.start()

    def _check(self) -> None:
        """Stay subscribed if that is cheap or needed; else unsubscribe for a while. Called by a
        timer.
        """
        loop = asyncio.get_running_loop()
        is_cheap = self._events <= CHEAP_EVENTS_PER_S * CHECK_INTERVAL_S
        self._events = 0
        recently_needed = loop.time() - self._needed_at < KEEP_AFTER_USE_S
        if is_cheap or self._waiters or self._contention > UNSUBSCRIBE_BELOW or recently_needed:
            self._check_timer = loop.call_later(CHECK_INTERVAL_S, self._check)
        else:
            self._unsubscribe()
            self._check_timer = loop.call_later(RESUBSCRIBE_AFTER_S, self.start)

    def _unsubscribe(self) -> None:
        """Cancel the watch, and discard what it has reported, which is no longer updated."""
        watch, self._watch = self._watch, None
        if self._check_timer is not None:
            self._check_timer.cancel()
        if watch is not None:
            self._closing.add(watch)
            watch.add_done_callback(self._closing.discard)
            watch.cancel()
            self._tracker.clear_observed()

    async def _run_watch(self, backoff: Backoff) -> None:
        """Watch the locks of all tokens, and pass the events to the tracker, until the watch fails."""
        tracker, loop = self._tracker, asyncio.get_running_loop()
        tracker.clear_observed()
        async with closing(self._client.watch(TOKEN_PREFIX)) as changes:
            snapshot_task = loop.create_task(self._await_snapshot(backoff))
            try:
                async for change in changes:
                    self._events += 1
                    if change.state == "locked":
                        tracker.on_locked(change.resource[_PREFIX_LENGTH:], change.id, change.transaction, loop.time())
                    else:
                        tracker.on_unlocked(change.resource[_PREFIX_LENGTH:], change.id)
            finally:
                await cancel_and_wait(snapshot_task)

    async def _await_snapshot(self, backoff: Backoff) -> None:
        """Wait until the watch has reported all locks that existed when it began: the server's
        reply to a `ping` follows these events.
        """
        try:
            await self._client.ping()
            backoff.reset()
        except GenieError:
            pass  # without the snapshot, the waiters retry with what is known
        self._events = 0  # the events of the snapshot do not count into the rate
        self._on_snapshot()
