"""Which tokens are held: by this selector, and by others as far as Genie reports it.

`LockTracker` combines two sources: the reservations that this selector has made, and the lock
events of a watch on all token locks. `LockSubscription` opens that watch only while it pays off.
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
"""Leases after which an observed lock counts as ended, in case its end was missed: where very many
locks are held a watch reports neither all of them nor all that end.
"""
MAX_RELEASED_LOCKS = 10_000
"""Locks released here whose `unlocked` event is still expected. Genie buffers no more messages than
that for one watcher.
"""


class Reservation:
    """Tokens that this selector holds, or has requested, for a transaction.

    `expires_at` is the earliest time at which its locks expire (event-loop seconds; infinite until
    Genie has granted them). After that only what Genie reports counts.
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
        """Whether Genie has not replied yet."""
        return self.expires_at == inf


class ObservedLock(NamedTuple):
    """A lock that the watch has reported, and when."""

    id: int
    transaction: str | None
    observed_at: float


class LockTracker:
    """The holders of all tokens, as far as this selector knows them. `lease` is in seconds.

    `on_free` is called with the id of each token that becomes free.
    """

    __slots__ = ("_duplicates", "_released", "_to_expire", "_trusted_s", "observed", "on_free", "reservations")

    def __init__(self, lease: float) -> None:
        self._trusted_s = TRUSTED_LEASES * lease
        self.on_free: Callable[[str], object] = _ignore
        self.reservations: dict[str, Reservation] = {}
        """By token id. May contain expired ones."""
        self.observed: dict[str, ObservedLock] = {}
        """By token id: the lock that the watch has reported. Includes this selector's own locks."""
        self._duplicates: dict[str, list[ObservedLock]] = {}
        """Further locks on the same token: one transaction can lock it twice."""
        self._to_expire: deque[Reservation] = deque()
        """Reservations with `runs_to_expiry`."""
        self._released: dict[int, None] = {}
        """Ids of locks released here whose `unlocked` event is still expected, oldest first."""

    # -- queries --------------------------------------------------------------------------------------------

    def local_reservation(self, id: str, now: float) -> Reservation | None:
        """Return this selector's unexpired reservation of a token."""
        reservation = self.reservations.get(id)
        return None if reservation is None or reservation.expires_at <= now else reservation

    def any_releasable(self, ids: Iterable[str], now: float) -> bool:
        """Whether a reservation here that may still be released has any of these tokens."""
        return any(
            (reservation := self.local_reservation(id, now)) is not None and not reservation.runs_to_expiry
            for id in ids
        )

    def observed_lock(self, id: str, now: float) -> ObservedLock | None:
        """Return the lock that the watch has reported for a token, unless the report is out of date."""
        lock = self.observed.get(id)
        return None if lock is None or now - lock.observed_at > self._trusted_s else lock

    def held_by_other(self, id: str, transaction: str, now: float) -> bool:
        """Whether the watch has reported that another transaction holds a token."""
        lock = self.observed_lock(id, now)
        return lock is not None and lock.transaction != transaction

    def is_held(self, id: str, now: float) -> bool:
        """Whether any transaction holds a token."""
        return self.observed_lock(id, now) is not None or self.local_reservation(id, now) is not None

    # -- this selector's reservations ------------------------------------------------------------------------

    def reserve(self, reservation: Reservation) -> None:
        """Make the tokens of a reservation unavailable to other selections here."""
        for id in reservation.ids:
            self.reservations[id] = reservation

    def narrow(self, reservation: Reservation, granted: Iterable[str]) -> None:
        """Replace the tokens of a reservation by those that Genie has granted."""
        ids = set(granted)
        for id in reservation.ids - ids:
            if self.reservations.get(id) is reservation:
                del self.reservations[id]  # not granted because another client holds it: not free
        reservation.ids = ids
        self.reserve(reservation)

    def drop(self, reservation: Reservation) -> None:
        """Remove a reservation, and report those of its tokens that are free."""
        for id in reservation.ids:
            if self.reservations.get(id) is reservation:
                del self.reservations[id]
                if id not in self.observed:
                    self.on_free(id)

    def keep_until_expiry(self, reservation: Reservation, now: float) -> None:
        """Keep a reservation that is never released until it expires; drop those that have expired."""
        if not reservation.runs_to_expiry:
            reservation.runs_to_expiry = True
            self._to_expire.append(reservation)
        while self._to_expire and self._to_expire[0].expires_at <= now:
            self.drop(self._to_expire.popleft())

    def on_released(self, lock: int, ids: Iterable[str]) -> None:
        """Genie has confirmed the release of one of this selector's locks, on these tokens.

        Events of a lock reach the watch some milliseconds after the replies to its owner. Events of
        this lock that still arrive are therefore out of date and ignored.
        """
        self._released[lock] = None
        if len(self._released) > MAX_RELEASED_LOCKS:
            del self._released[next(iter(self._released))]
        for id in ids:
            self._remove(id, lock)

    # -- events of the watch ---------------------------------------------------------------------------------

    def clear_observed(self) -> None:
        """Discard what the watch has reported: it has ended, or starts with a new snapshot."""
        self.observed.clear()
        self._duplicates.clear()

    def on_locked(self, id: str, lock: int, transaction: str | None, now: float) -> None:
        """A token was locked."""
        if lock in self._released:
            return
        new = ObservedLock(lock, transaction, now)
        if id in self.observed:
            self._duplicates.setdefault(id, []).append(new)
        else:
            self.observed[id] = new

    def on_unlocked(self, id: str, lock: int) -> None:
        """One lock on a token has ended."""
        self._released.pop(lock, None)
        self._remove(id, lock)
        if id not in self.observed:
            self.on_free(id)

    def _remove(self, id: str, lock: int) -> None:
        """Remove a lock on a token from the observed ones, if it is among them."""
        if id in self._duplicates:
            rest = [other for other in (self.observed[id], *self._duplicates.pop(id)) if other.id != lock]
            self.observed[id] = rest[0]
            if len(rest) > 1:
                self._duplicates[id] = rest[1:]
        elif id in self.observed and self.observed[id].id == lock:
            del self.observed[id]


def _ignore(_id: str) -> None:
    pass


# -- the adaptive subscription --------------------------------------------------------------------------------

CHECK_INTERVAL_S = 1.0
"""How often it is decided whether to stay subscribed."""
CHEAP_EVENTS_PER_S = 500.0
"""Rate of lock events below which a subscription costs next to nothing: some milliseconds a second."""
RESUBSCRIBE_AFTER_S = 30.0
"""Pause after a subscription that was expensive and of no use."""
KEEP_AFTER_USE_S = 5.0
"""How long a subscription is kept after it was last of use."""
AVERAGE_WEIGHT = 0.05
"""Weight of one request in the moving average of contended requests."""
SUBSCRIBE_ABOVE = 0.2
"""Part of contended requests from which on a subscription pays off: a failed request costs one more
round trip.
"""
UNSUBSCRIBE_BELOW = 0.05
"""Part of contended requests below which a subscription no longer pays off."""

_PREFIX_LENGTH = len(TOKEN_PREFIX)


class LockSubscription:
    """Watches the locks of all tokens and updates a `LockTracker`, while that pays off.

    It is open at the start, while `with subscription:` blocks wait for tokens of others, while many
    requests are contended, and where there are few events. `on_snapshot` is called when the tracker
    has received all locks that existed when the watch began.
    """

    def __init__(self, client: LockClient, tracker: LockTracker, on_snapshot: Callable[[], None]) -> None:
        self._client = client
        self._tracker = tracker
        self._on_snapshot = on_snapshot
        self._contention = 0.0
        """Moving average of contended requests, 0 to 1."""
        self._needed_at = -inf
        self._waiters = 0
        self._events = 0
        """Events since the last check."""
        self._watch: asyncio.Task[None] | None = None
        self._check_timer: asyncio.TimerHandle | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False

    def start(self) -> None:
        """Subscribe, unless that has been done."""
        loop = asyncio.get_running_loop()
        if self._watch is None and not self._closed:
            if self._check_timer is not None:
                self._check_timer.cancel()
            self._watch = loop.create_task(supervise("watching the locks of tokens", self._run_watch))
            self._check_timer = loop.call_later(CHECK_INTERVAL_S, self._check)

    def record_request(self, *, contended: bool) -> None:
        """Record a request for tokens; `contended`: without a subscription it has, or would have, too few spares."""
        self._contention += AVERAGE_WEIGHT * (contended - self._contention)
        if contended and self._contention > SUBSCRIBE_ABOVE:
            self._require()

    def __enter__(self) -> None:
        """Stay subscribed while the block waits for tokens that others hold."""
        self._waiters += 1
        self._require()

    def __exit__(self, *_: object) -> None:
        self._waiters -= 1

    async def close(self) -> None:
        """Unsubscribe for good."""
        self._closed = True
        self._unsubscribe()
        for task in list(self._closing):
            await cancel_and_wait(task)

    def _require(self) -> None:
        self._needed_at = asyncio.get_running_loop().time()
        self.start()

    def _check(self) -> None:
        loop = asyncio.get_running_loop()
        cheap, self._events = self._events <= CHEAP_EVENTS_PER_S * CHECK_INTERVAL_S, 0
        recently_needed = loop.time() - self._needed_at < KEEP_AFTER_USE_S
        if cheap or self._waiters or self._contention > UNSUBSCRIBE_BELOW or recently_needed:
            self._check_timer = loop.call_later(CHECK_INTERVAL_S, self._check)
        else:
            self._unsubscribe()
            self._check_timer = loop.call_later(RESUBSCRIBE_AFTER_S, self.start)

    def _unsubscribe(self) -> None:
        watch, self._watch = self._watch, None
        if self._check_timer is not None:
            self._check_timer.cancel()
        if watch is not None:
            self._closing.add(watch)
            watch.add_done_callback(self._closing.discard)
            watch.cancel()
            self._tracker.clear_observed()

    async def _run_watch(self, backoff: Backoff) -> None:
        tracker, loop = self._tracker, asyncio.get_running_loop()
        tracker.clear_observed()
        async with closing(self._client.watch(TOKEN_PREFIX)) as changes:
            snapshot = loop.create_task(self._await_snapshot(backoff))
            try:
                async for change in changes:
                    self._events += 1
                    if change.state == "locked":
                        tracker.on_locked(change.resource[_PREFIX_LENGTH:], change.id, change.transaction, loop.time())
                    else:
                        tracker.on_unlocked(change.resource[_PREFIX_LENGTH:], change.id)
            finally:
                await cancel_and_wait(snapshot)

    async def _await_snapshot(self, backoff: Backoff) -> None:
        """Ping the server: its reply follows the locks that existed when the watch began."""
        try:
            await self._client.ping()
            backoff.reset()
        except GenieError:
            pass  # the waiters try their luck once
        self._events = 0  # the snapshot does not count into the rate
        self._on_snapshot()
