"""Watches: subscriptions to the locks whose resources have a prefix, and their resynchronization.

A subscription ends with its connection, or when the server sends `lagged`. The watch is then `LAGGING`: it ignores events.
It also becomes `LAGGING` if `MAX_BUFFERED_CHANGES` changes are not consumed yet. Once its buffered changes are consumed, it
sends `watch` again, on the current connection. The reply is a snapshot of the held locks. The watch compares the snapshot
with the locks that it has reported, and reports the difference: `unlocked` for a lock that has ended, `locked` for a new one.
A lock that was granted and released in between is not reported.

Two invariants: every `unlocked` follows a `locked` of the same resource and id; and a consumer that applies the changes
never has two conflicting locks on one resource, since the end of one is reported before the grant of the other.

If more locks are held than the server's limit, the snapshot is `truncated`. A reported lock that is missing from such a
snapshot counts as held until its `unlocked` arrives, or the `locked` of a conflicting lock. But both may have been missed, so at
most `MAX_UNLISTED_LOCKS` of these locks are kept: the oldest of the others are reported as `unlocked`, although they may be held.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum, auto
from typing import Final, Literal

from msgspec import Struct

from genie.client.calls import Calls
from genie.client.commands import Call, Outcome, make_line
from genie.client.handshake import UP, Handshake
from genie.errors import GenieError
from genie.lock_modes import WHOLE_NAMESPACE, is_subtree
from genie.protocol.messages import Event, HeldRow, Unwatched, Watching
from genie.protocol.resources import check_name

MAX_BUFFERED_CHANGES: Final = 10_000
"""With this number of unconsumed changes, a watch ignores events and needs a snapshot. A single snapshot may be larger."""
MAX_UNLISTED_LOCKS: Final = 100_000
"""How many reported locks that are missing from a truncated snapshot still count as held."""


class Change(Struct, frozen=True, gc=False):
    """A lock on `resource` (a name without a mode) was granted (`locked`) or has ended (`unlocked`).

    `mode` is `shared`, `exclusive` or `units`. `id` is the id of the lock, and `transaction` is the name of its transaction,
    or None. A resource may be locked under several ids: by shared locks, by units, or by several locks of one transaction.
    For the mode `units`, `units` is the number of locked units, and `of` is the limit of units in use. Otherwise both are
    None. A resource such as `accounts/**` is a subtree: all names below it are locked.
    """

    resource: str
    state: Literal["locked", "unlocked"]
    mode: str
    id: int
    transaction: str | None = None
    units: int | None = None
    of: int | None = None

    def conflicts_with(self, other: Change) -> bool:
        """Return whether two locks on the same resource conflict.

        Locks of one transaction do not conflict. Other locks conflict, unless both are shared or both are units.
        """
        in_same_transaction = self.transaction is not None and self.transaction == other.transaction
        if self.id == other.id or in_same_transaction:
            return False
        return self.mode != other.mode or self.mode == "exclusive"


class HeldLocks(dict[int, Change]):
    """The reported locks on one resource, by id, which do not conflict with each other.

    A resource may have thousands of shared locks. So a new lock is not compared with each of them if all have the mode or
    the transaction of the new lock, and cannot conflict with it.
    """

    __slots__ = ("common_mode", "common_transaction")

    def __init__(self) -> None:
        self.common_mode: str | None = None
        """The mode of all locks. None if they may have several modes."""
        self.common_transaction: str | None = None
        """The transaction of all locks. None if they may have several transactions, or none."""

    def add(self, change: Change) -> None:
        """Add a lock that does not conflict with the others."""
        is_first = not self
        if is_first:
            self.common_mode, self.common_transaction = change.mode, change.transaction
        if change.mode != self.common_mode:
            self.common_mode = None
        if change.transaction != self.common_transaction:
            self.common_transaction = None
        self[change.id] = change

    def conflicting_with(self, change: Change) -> list[Change]:
        """Return the locks that conflict with a new lock."""
        all_share_mode = change.mode != "exclusive" and change.mode == self.common_mode
        all_in_its_transaction = change.transaction is not None and change.transaction == self.common_transaction
        if all_share_mode or all_in_its_transaction:
            return []
        # Some locks have ended since, and the others may have more in common: the next call may be shorter.
        modes = {other.mode for other in self.values()}
        transactions = {other.transaction for other in self.values()}
        self.common_mode = modes.pop() if len(modes) == 1 else None
        self.common_transaction = transactions.pop() if len(transactions) == 1 else None
        return [other for other in self.values() if change.conflicts_with(other)]


class WatchState(Enum):
    """The state of a watch."""

    LAGGING = auto()
    """The watch ignores events until it has a snapshot from the server."""
    LIVE = auto()
    """The watch applies the events of the connection."""
    ENDED = auto()


LIVE: Final = WatchState.LIVE


class Watch(Call):
    """The command `watch`, and the changes that result from it. The command is sent when the first change is awaited."""

    __slots__ = ("changes", "error", "held_locks", "prefix", "state", "truncated", "wants_next")

    fails_with_connection = False

    def __init__(self, prefix: str) -> None:
        if prefix:
            check_name(prefix, "a prefix")
        super().__init__(make_line("watch", prefix=prefix))
        self.prefix = prefix
        self.state = WatchState.LAGGING
        self.changes: deque[Change] = deque()
        """The changes that the consumer has not taken yet."""
        self.held_locks: dict[str, HeldLocks] = {}
        """The locks that are held once the consumer has taken all `changes`, by resource and id."""
        self.wants_next = False
        """True if the consumer waits for a change, and was not woken yet."""
        self.truncated = False
        """True if the last snapshot did not contain all held locks."""
        self.error: GenieError | None = None
        """Why the server rejected the watch, until the consumer gets the error. Otherwise None."""

    @property
    def ended(self) -> bool:
        """True if the watch has ended, so that no further changes follow."""
        return self.state is WatchState.ENDED

    def raise_rejection(self) -> None:
        """Raise the error with which the server rejected the watch, if there is one. It is raised only once."""
        error, self.error = self.error, None
        if error is not None:
            raise error

    def apply_snapshot(self, rows: Sequence[HeldRow], truncated: bool) -> None:
        """Append the changes that lead from the locks reported so far to the held locks of a snapshot.

        `truncated` is true if the snapshot does not contain all held locks. A reported lock that is missing from such a
        snapshot may still be held, so no `unlocked` change is appended for the last `MAX_UNLISTED_LOCKS` of these locks.
        """
        self.truncated = truncated
        if not truncated or sum(map(len, self.held_locks.values())) > MAX_UNLISTED_LOCKS:
            held_keys = {(row.resource, row.id) for row in rows}
            reported_keys = [(resource, id) for resource, locks in self.held_locks.items() for id in locks]
            missing_keys = [key for key in reported_keys if key not in held_keys]
            if truncated:
                del missing_keys[-MAX_UNLISTED_LOCKS:]
            for resource, id in missing_keys:
                self.apply_unlocked(resource, id)
        for row in rows:
            self.apply_locked(row)

    def apply_locked(self, row: HeldRow | Event.Payload) -> None:
        """Append a `locked` change, unless the lock was reported before.

        A conflicting lock that was reported before must have ended, so its `unlocked` change is appended first.
        """
        change = Change(row.resource, "locked", row.mode, row.id, row.transactionName, row.units, row.of)
        locks = self.held_locks.get(row.resource)
        if locks is None:
            locks = HeldLocks()
        elif row.id in locks:
            return
        for other in locks.conflicting_with(change):
            self.apply_unlocked(other.resource, other.id)
        locks.add(change)
        self.held_locks[row.resource] = locks  # `apply_unlocked` may have removed it
        self.changes.append(change)

    def apply_unlocked(self, resource: str, id: int) -> None:
        """Append an `unlocked` change if the lock was reported as held."""
        locks = self.held_locks.get(resource)
        ended = None if locks is None else locks.pop(id, None)
        if ended is not None:
            self.changes.append(Change(resource, "unlocked", ended.mode, id, ended.transaction, ended.units, ended.of))
            if not locks:
                del self.held_locks[resource]


def _matches(prefix: str, resource: str) -> bool:
    """Return whether a resource has the prefix, or is a subtree that contains all names with the prefix."""
    if resource.startswith(prefix):
        return True
    return is_subtree(resource) and prefix.startswith(resource.removesuffix(WHOLE_NAMESPACE))


class WatchInfo:
    """The attributes that `genie.Watch` and `genie.sync.Watch` have in common."""

    __slots__ = ("_watch",)

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    @property
    def prefix(self) -> str:
        """The prefix of the watched resource names."""
        return self._watch.prefix

    @property
    def truncated(self) -> bool:
        """True if the last snapshot was truncated, because more locks are held than the server searches or sends.

        If so, some held locks may not be reported. The `unlocked` change of a lock that ended while the client was
        disconnected may be delayed until a conflicting lock on the same resource is granted. If more than 100,000 reported
        locks are missing from the snapshot, the oldest of them are reported as `unlocked`, although they may be held.
        """
        return self._watch.truncated


class Unwatch(Call):
    """The command `unwatch`."""

    __slots__ = ()

    fails_with_connection = False

    def __init__(self, prefix: str) -> None:
        super().__init__(make_line("unwatch", prefix=prefix))


class Watches:
    """The open watches of a client.

    Several watches may have the same prefix: the server sends each event of the prefix once, for all of them.
    """

    def __init__(self, handshake: Handshake, calls: Calls) -> None:
        self._handshake = handshake
        self._calls = calls
        self._open_watches: dict[Watch, None] = {}
        """An ordered set of the open watches."""
        self._subscribed_prefixes: set[str] = set()
        """The prefixes that the client has subscribed to on this connection, and has not unsubscribed from."""
        self._unanswered: set[Watch] = set()
        """Watches whose `watch` command has no reply yet, even if they were closed since."""

    def __bool__(self) -> bool:
        return bool(self._open_watches)

    # -- calls of the consumer ----------------------------------------------------------------------------

    def request_next(self, watch: Watch, now: float) -> None:
        """Record that the consumer of a watch waits for the next change, and send the `watch` command if necessary.

        The watch must not have ended, and must have no changes. An outcome wakes the consumer at the next change, or at the
        end of the watch.
        """
        self._open_watches[watch] = None
        watch.wants_next = True
        self.send_needed(now)

    def close(self, watch: Watch, now: float) -> None:
        """End a watch, and unsubscribe from its prefix unless another watch has the same prefix."""
        self._open_watches.pop(watch, None)
        self._end(watch, error=None)
        is_prefix_used = any(other.prefix == watch.prefix for other in self._open_watches)
        if watch.prefix in self._subscribed_prefixes and not is_prefix_used:
            self._subscribed_prefixes.discard(watch.prefix)
            self._calls.send(Unwatch(watch.prefix), now)

    def close_all(self) -> None:
        """End all watches, because the client is being closed. Its subscriptions end with its session."""
        for watch in self.all():
            del self._open_watches[watch]
            self._end(watch, error=None)

    def all(self) -> list[Watch]:
        """Return all open watches."""
        return list(self._open_watches)

    # -- events of the connection -------------------------------------------------------------------------

    def send_needed(self, now: float) -> None:
        """Send the `watch` command of each watch that needs a snapshot now, if there is a connection.

        A watch needs a snapshot if it is lagging, its consumer waits, and its last command was answered.
        """
        if self._handshake.phase is not UP:
            return
        for watch in self._open_watches:
            if watch.wants_next and watch not in self._unanswered and watch.state is WatchState.LAGGING:
                self._calls.send(watch, now)
                self._unanswered.add(watch)
                self._subscribed_prefixes.add(watch.prefix)

    def on_message(self, message: Watching | Unwatched | Event, now: float) -> None:
        """Handle the reply to a `watch` or `unwatch`, or the event `lagged`."""
        match message:
            case Watching():
                self._on_watching(message.payload)
            case Unwatched():
                self._calls.pop(Unwatch, message.payload.ref)
            case Event():  # `lagged`: the server has ended all subscriptions
                self._resynchronize()
                self.send_needed(now)

    def _on_watching(self, reply: Watching.Payload) -> None:
        """Apply the snapshot in the reply to a `watch` command. After that the watch applies events."""
        watch = self._calls.pop(Watch, reply.ref)
        if watch is None:
            return
        self._unanswered.discard(watch)
        if watch.state is WatchState.LAGGING:  # else the watch was closed while the reply was awaited
            watch.state = WatchState.LIVE
            watch.apply_snapshot(reply.held, reply.truncated)
            self._wake(watch)

    def on_rejected(self, watch: Watch, error: GenieError) -> None:
        """End a watch that the server rejected with `error`.

        A consumer that waits for a change gets the error now. Otherwise the error is kept until the consumer wants a change.
        """
        self._unanswered.discard(watch)
        self._open_watches.pop(watch, None)
        watch.error = error if watch.future is None else None
        self._end(watch, error)

    def on_event(self, event: Event.Payload) -> None:
        """Apply a `locked` or `unlocked` event to all live watches with a matching prefix.

        A watch whose buffer of unconsumed changes is full ignores the event, and needs a snapshot later.
        """
        for watch in self._open_watches:
            if watch.state is not LIVE or not _matches(watch.prefix, event.resource):
                continue
            if len(watch.changes) >= MAX_BUFFERED_CHANGES:
                watch.state = WatchState.LAGGING
            elif event.state == "locked":
                watch.apply_locked(event)
            elif event.state == "unlocked":
                watch.apply_unlocked(event.resource, event.id)
            if watch.wants_next:
                self._wake(watch)

    def on_disconnected(self) -> None:
        """Make all watches fetch a snapshot on the next connection."""
        self._unanswered.clear()
        self._resynchronize()

    def _resynchronize(self) -> None:
        """Make all watches fetch a snapshot, because their subscriptions have ended.

        The prefix of a `watch` command without a reply remains subscribed, even if the watch was closed since, because the
        server has not executed the command yet.
        """
        self._subscribed_prefixes &= {watch.prefix for watch in self._unanswered}
        for watch in self._open_watches:
            watch.state = WatchState.LAGGING

    # -- helpers ------------------------------------------------------------------------------------------

    def _wake(self, watch: Watch) -> None:
        """Wake the consumer of a watch by an outcome, if the consumer waits and the watch has a change."""
        if watch.wants_next and watch.changes:
            watch.wants_next = False
            self._calls.outcomes.append(Outcome(watch))

    def _end(self, watch: Watch, error: GenieError | None) -> None:
        """End a watch, and wake its consumer. `error` is raised in a waiting consumer. Without it, the iteration ends."""
        watch.state = WatchState.ENDED
        watch.changes.clear()
        watch.held_locks.clear()
        if watch.wants_next:
            watch.wants_next = False
            self._calls.outcomes.append(Outcome(watch, error=error))
